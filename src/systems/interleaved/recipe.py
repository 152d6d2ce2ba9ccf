"""Recipe `interleaved`: train a vision-language model on documents of text and images, streamed from tars."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from src.errors import ConfigError
from src.evaluation.config import Answers
from src.experiments.config import Places
from src.experiments.dataset_protocols import Dataset
from src.experiments.kinds import VISION_LANGUAGE
from src.recipes import pretraining
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.systems.interleaved.streaming import dataset, manifest

if TYPE_CHECKING:
    from torch import Tensor

SHUFFLED = "val_loss_shuffled_context"


class Config(TrainingRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    answers: Answers | None = None
    """Answers to prompts, generated at each evaluation. Their contexts are the preceding images."""

    @model_validator(mode="after")
    def _reads_tars(self) -> "Config":
        pretraining.require_text(self, VISION_LANGUAGE)
        if not isinstance(self.data, dataset.Config):
            raise ValueError(f"data: expected 'streamed', got {self.data.name!r}.")
        if self.answers and self.answers.num_beams > 1:
            raise ValueError(
                f"answers.num_beams: {self.answers.num_beams}, but models that read images do not support beams. "
                "Remove it."
            )
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        scores = [*pretraining.score_names(), SHUFFLED, *(self.answers.score_names() if self.answers else [])]
        return [*pretraining.checks(self, places, scores), lambda: self.check_frames(places)]

    def check_frames(self, places: Places) -> None:
        """Raises ConfigError if the frames of the data do not fit the model."""
        assert isinstance(self.data, dataset.Config), "the validator has checked it"
        images, frames = self.data.images, self.model.frame_format(places)
        if frames is None:
            return
        if (frames.pixels, frames.tokens) != (images.frame_size, images.image_tokens):
            raise ConfigError(
                f"data.images: frame_size is {images.frame_size} and image_tokens is {images.image_tokens}, but the "
                f"model reads frames of {frames.pixels} pixels a side as {frames.tokens} tokens each. Use these two "
                "numbers."
            )
        if frames.style != images.style:
            raise ConfigError(f"data.images.style: expected the model's {frames.style!r}, got {images.style!r}.")
        if frames.max_tiles and images.tiles_per_side > frames.max_tiles:
            raise ConfigError(
                f"model.max_tiles: {frames.max_tiles}, but data.images.max_size {images.max_size} makes up to "
                f"{images.tiles_per_side} tiles per side. Raise max_tiles, or lower max_size."
            )

    def training_loss(self) -> Callable[..., Any]:
        """The loss, with the counts per source as means over rows, and the loss per source."""
        import torch

        from src.training.loss import interleaved_lm_loss, watch_groups

        assert isinstance(self.data, dataset.Config), "the validator has checked it"
        loss_function, names = self.with_loop_options(interleaved_lm_loss), sorted(self.data.sources)

        def loss_and_sums(model: Any, batch: "Mapping[str, Tensor]") -> Any:
            with watch_groups(batch, batch["source_ids"], len(names)) as by_source:
                loss_sum = loss_function(model, batch)
            rows = torch.tensor(float(len(batch["input_ids"])))
            counts = {
                f"{kind}/{name}": (batch["source_counts"][source, number], rows)
                for source, name in enumerate(names)
                for number, kind in enumerate(dataset.COUNTS)
            }
            counts["cache_hits"] = batch["cached"][0], batch["cached"][1]
            losses = {f"loss/{name}": (by_source[i, 0], by_source[i, 1]) for i, name in enumerate(names)}
            return loss_sum, {**counts, **losses}

        return loss_and_sums

    def run(self, run: Run) -> None:
        """Train to the last step, or evaluate. Collective.

        Scores: those of `pretraining.train_on_text` and of `answers`, and val_loss_shuffled_context: the loss of the
        same documents with images from different documents.
        """
        from src.training.loss import interleaved_lm_loss

        answers = self.answers

        def begin(train: Dataset, val: Any) -> Mapping[str, str]:
            """Open the quarantine of the run. Returns digests of samples of the tars."""
            if answers:
                answers.require(val)
            if not isinstance(train, dataset.StreamedDataset):
                return {}
            train.quarantine.open(run.path)
            sources = zip(train.source_names, train.documents, strict=True)
            return {f"content of data.sources.{name}": manifest.sample_digest(each.manifest) for name, each in sources}

        def more_scores(val: Any, scorer: pretraining.Scorer) -> dict[str, float]:
            shuffled = shuffled_losses(val, scorer) if val.reads_contexts else {}
            return shuffled | (scorer.answers(answers, val) if answers else {})

        pretraining.train_on_text(
            self, run, pretraining.TextTraining(interleaved_lm_loss, count=count, begin=begin, more_scores=more_scores)
        )


def count(batch: "Mapping[str, Tensor]") -> float:
    """Number of tokens with loss in a batch, weighted by source."""
    from src.training.validation import count_loss_tokens

    weights = batch.get("loss_weights")
    return count_loss_tokens(batch) if weights is None else float(weights[batch["loss_mask"]].sum())


def shuffled_losses(val: Any, scorer: pretraining.Scorer) -> dict[str, float]:
    """Loss with images from different documents, in total and by source. Collective."""
    parts = {name: scorer.loss_sums(part) for name, part in val.with_shuffled_contexts().parts.items()}
    total, tokens = (sum(getattr(part, name) for part in parts.values()) for name in ("loss_sum", "tokens"))
    by_source = {f"{SHUFFLED}/{name}": part.loss for name, part in parts.items()} if len(parts) > 1 else {}
    return {SHUFFLED: total / tokens, **by_source}
