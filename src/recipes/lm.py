"""Recipe `lm`: train a causal language model on the next token, from scratch or from given weights."""

from collections.abc import Callable
from typing import Any, ClassVar

from src.experiments.kinds import DECODER
from src.recipes.pretraining import Pretraining


class Config(Pretraining):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = DECODER

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        return causal_lm_loss
