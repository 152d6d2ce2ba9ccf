"""Recipe `crossattn`: train cross-attention layers in a frozen language model to answer questions about a context."""

from collections.abc import Callable
from typing import Any, ClassVar

from src.experiments.config import Places
from src.experiments.kinds import CROSS_ATTENTION
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once
from src.systems.crossattn.question_answering import QuestionAnswering


class Config(QuestionAnswering):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = CROSS_ATTENTION
    dataset_name: ClassVar[str] = "qa"

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import context_lm_loss

        return context_lm_loss

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """The checks of every question-answering recipe, and that contexts encoded in advance are of this base."""
        return [*super().checks(places), lambda: call_once(self._check_base, places)]

    def run(self, run: Run) -> None:
        """Train, or evaluate without training; then run the inference. Collective."""
        with distributed.raise_together():
            self._check_base(run.places)  # a parent may have been trained since the check
        super().run(run)

    def _check_base(self, places: Places) -> None:
        from src.systems.crossattn.data.cross_attention import Config as QAConfig

        assert isinstance(self.data, QAConfig), "the validator has checked its name"
        self.data.check_base(places, self.model)
