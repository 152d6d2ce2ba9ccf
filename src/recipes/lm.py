"""Recipe `lm`: train a causal language model on the next token, from scratch or from given weights."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import model_validator

from src.kinds import DECODER
from src.recipes.pretraining import Pretraining


class Config(Pretraining):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = DECODER

    @model_validator(mode="after")
    def _reads_text_alone(self) -> "Config":
        if self.data.name in ("qa", "fid_qa"):
            reads = {"qa": "crossattn", "fid_qa": "fid"}[self.data.name]
            raise ValueError(f"this recipe would leave the contexts of {self.data.name!r} data unread; recipe {reads!r} reads them.")
        return self

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        return causal_lm_loss
