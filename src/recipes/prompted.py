"""Recipe `prompted`: a decoder answers questions on contexts that are in its prompt. Trained whole, by adapters, or not at all."""

from collections.abc import Callable
from typing import Any, ClassVar

from src.kinds import DECODER
from src.recipes.question_answering import QuestionAnswering


class Config(QuestionAnswering):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = DECODER
    dataset_name: ClassVar[str] = "prompted_qa"

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        return causal_lm_loss
