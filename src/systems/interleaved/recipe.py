"""Recipe `interleaved`: train a model that reads images on documents of text and images, streamed from tars."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from src.errors import ConfigError
from src.evaluation.config import Answers
from src.experiments.config import Places
from src.experiments.dataset_protocols import Dataset
from src.experiments.kinds import VISION_LANGUAGE
from src.recipes.pretraining import Pretraining, Scorer
from src.runs.context import Run
from src.systems.interleaved.streaming import dataset, manifest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHUFFLED = "val_loss_shuffled_context"


class Config(Pretraining):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = VISION_LANGUAGE

    answers: Answers | None = None
    """Texts that follow a prompt, generated at each evaluation. Their contexts are the images before them."""

    @model_validator(mode="after")
    def _reads_tars(self) -> "Config":
        if not isinstance(self.data, dataset.Config):
            raise ValueError(f"data: the data of this recipe are 'streamed', got {self.data.name!r}.")
        if self.answers and self.answers.num_beams > 1:
            raise ValueError("answers.num_beams: beams are not for models that read images. Leave it out.")
        return self

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import interleaved_lm_loss

        return interleaved_lm_loss

    def training_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """With what was read of each source, as means over rows, and its loss."""
        import torch

        from src.training.loss import watch_groups

        assert isinstance(self.data, dataset.Config), "the validator has checked it"
        whole, names = super().training_loss(loss), sorted(self.data.sources)

        def loss_and_sums(model: Any, batch: "Mapping[str, Tensor]") -> Any:
            with watch_groups(batch, batch["source_ids"], len(names)) as by_source:
                summed = whole(model, batch)
            rows = torch.tensor(float(len(batch["input_ids"])))
            counted = {
                f"{kind}/{name}": (batch["counted"][source, number], rows)
                for source, name in enumerate(names)
                for number, kind in enumerate(dataset.COUNTED)
            }
            counted["cache_hits"] = batch["cached"][0], batch["cached"][1]
            return summed, {
                **counted,
                **{f"loss/{name}": (by_source[i, 0], by_source[i, 1]) for i, name in enumerate(names)},
            }

        return loss_and_sums

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        return (
            float(batch["loss_weights"][batch["loss_mask"]].sum()) if "loss_weights" in batch else super().count(batch)
        )

    def begin(self, train: Dataset, val: Any, run: Run) -> Mapping[str, str]:
        """Check what is asked, and pass over what the run has found to be unreadable.
        Returns digests of samples of the tars."""
        if self.answers:
            self.answers.require(val)
        if not isinstance(train, dataset.StreamedDataset):
            return {}
        train.quarantine.open(run.path)
        sources = zip(train.source_names, train.documents, strict=True)
        return {
            f"content of data.sources.{name}": manifest.sample_digest(documents.manifest) for name, documents in sources
        }

    def score_names(self) -> list[str]:
        return [*super().score_names(), SHUFFLED, *(self.answers.score_names() if self.answers else [])]

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """See `Pretraining`; and that the frames are those of the model."""
        return [*super().checks(places), lambda: self.check_frames(places)]

    def check_frames(self, places: Places) -> None:
        """Raises ConfigError where the data make other frames than the model reads."""
        assert isinstance(self.data, dataset.Config), "the validator has checked it"
        images, sizes = self.data.images, self.model.frame_sizes(places)
        if sizes and sizes != (images.frame_size, images.image_tokens):
            raise ConfigError(
                f"data.images: the model reads frames of {sizes[0]} pixels a side as {sizes[1]} tokens each, "
                f"and frame_size is {images.frame_size} and image_tokens {images.image_tokens}."
            )

    def more_scores(self, val: Any, scorer: Scorer) -> dict[str, float]:
        """val_loss_shuffled_context: the same documents with others' images; and the scores of `answers`."""
        scores: dict[str, float] = {}
        if val.reads_contexts:
            parts = {name: scorer.loss_sums(part) for name, part in val.with_shuffled_contexts().parts.items()}
            total, tokens = (sum(getattr(part, name) for part in parts.values()) for name in ("loss_sum", "tokens"))
            scores[SHUFFLED] = total / tokens
            if len(parts) > 1:
                scores |= {f"{SHUFFLED}/{name}": part.loss for name, part in parts.items()}
        return scores | (scorer.answers(self.answers, val) if self.answers else {})
