"""Recipe `prompted`: a decoder answers questions about contexts in its prompt.
Fully fine-tuned, trained with adapters, or not trained."""

from collections.abc import Callable
from typing import Any, ClassVar

from src.experiments.kinds import DECODER
from src.systems.crossattn.question_answering import QuestionAnswering


class Config(QuestionAnswering):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = DECODER
    dataset_name: ClassVar[str] = "prompted_qa"

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import causal_lm_loss

        return causal_lm_loss
