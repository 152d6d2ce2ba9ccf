"""Recipe `metadata_lm`: as `lm`, on documents with metadata; evaluations tell what the metadata are worth (`gains`)."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import model_validator

from src.experiments.kinds import DECODER
from src.recipes.pretraining import Pretraining, Scorer
from src.systems.metadata.data import dataset
from src.systems.metadata.gains import Gains, measure


class Config(Pretraining):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = DECODER

    gains: Gains | None = None

    @model_validator(mode="after")
    def _validation_has_metadata(self) -> "Config":
        data = self.data.validation
        if self.gains and not isinstance(data, dataset.Config):
            raise ValueError(f"gains: they are of the data set 'metadata', and the validation data are {data.name!r}.")
        if self.gains and isinstance(data, dataset.Config):
            for column in self.gains.columns:
                data.require_written("gains.columns", column)
        return self

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        return causal_lm_loss

    def score_names(self) -> list[str]:
        return [*super().score_names(), *(self.gains.names() if self.gains else [])]

    def more_scores(self, val: Any, scorer: Scorer) -> dict[str, float]:
        if self.gains is None:
            return {}
        assert isinstance(val, dataset.MetadataBlocks), "the validator has checked the data"
        return measure(self.gains, val.documents, scorer.token_losses)
