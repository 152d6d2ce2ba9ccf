"""Recipe `metadata_lm`: as `lm`, on documents with metadata; evaluations measure the gain from metadata (`gains`)."""

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import model_validator

from src.evaluation.harness import Harness
from src.experiments.config import Places
from src.experiments.kinds import DECODER
from src.recipes import pretraining
from src.recipes.training_recipe import TrainingRecipe
from src.runs.context import Run
from src.systems.metadata.data import dataset
from src.systems.metadata.data.annotations import Document
from src.systems.metadata.gains import Gains, check_columns, check_fits, measure, select


class Config(TrainingRecipe):
    """An experiment of this recipe, without its "recipe" key."""

    gains: Gains | None = None
    harness: Harness | None = None
    """Tasks of lm-evaluation-harness to score; None for none."""

    @model_validator(mode="after")
    def _validation_has_metadata(self) -> "Config":
        pretraining.require_text(self, DECODER)
        data = self.data.validation
        if self.gains and not isinstance(data, dataset.Config):
            raise ValueError(f"gains: needs validation data 'metadata', got {data.name!r}. Remove gains.")
        if self.gains and isinstance(data, dataset.Config):
            for column in self.gains.columns:
                data.require_written("gains.columns", column)
        return self

    def checks(self, places: Places) -> list[Callable[[], object]]:
        scores = [*pretraining.score_names(), pretraining.BITS_PER_BYTE, *(self.gains.names() if self.gains else [])]
        return [*pretraining.checks(self, places, scores), lambda: self.check_columns(places)]

    def check_columns(self, places: Places) -> None:
        """Raise a UserError if too few validation documents have the columns of `gains`, or fit into a block. If the
        folder of the tokenizer is not known yet, only the columns are checked."""
        data = self.data.validation
        if not self.gains or not isinstance(data, dataset.Config):
            return

        def documents() -> Iterator[Document]:
            return data.iterate(places, "val")

        check_columns(self.gains, documents)
        if source := self.model.find_tokenizer(places):
            from src.data.text import tokenizers

            maker = data.make_maker(tokenizers.load(source.folder, source.new_tokens))
            check_fits(self.gains, maker, documents)

    def training_loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        return self.with_loop_options(causal_lm_loss)

    def run(self, run: Run) -> None:
        """Train to the last step, or evaluate. Collective."""
        from src.training.loss import causal_lm_loss

        gains = self.gains

        def measure_gains(val: Any, scorer: pretraining.Scorer) -> dict[str, float]:
            assert isinstance(val, dataset.MetadataBlocks), "the validator has checked the data"
            return measure(gains, val.documents, scorer.token_losses) if gains else {}

        def require_documents(_: Any, val: Any) -> dict[str, str]:
            """Raises DataError before the training if gains could not be measured."""
            if gains:
                list(select(gains, val.documents.maker, val.documents.read))
            return {}

        text_training = pretraining.TextTraining(
            causal_lm_loss,
            bits_per_byte=True,
            begin=require_documents,
            more_scores=measure_gains if gains else None,
        )
        pretraining.train_on_text(self, run, text_training)
