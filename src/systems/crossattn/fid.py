"""Recipe `fid`: Fusion-in-Decoder: the encoder reads each passage separately, the decoder all of them together."""

from collections.abc import Callable
from typing import Any, ClassVar

from src.experiments.kinds import FUSION_IN_DECODER
from src.systems.crossattn.question_answering import QuestionAnswering


class Config(QuestionAnswering):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = FUSION_IN_DECODER
    takes_chunks: ClassVar[bool] = False
    dataset_name: ClassVar[str] = "fid_qa"

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import context_lm_loss

        return context_lm_loss
