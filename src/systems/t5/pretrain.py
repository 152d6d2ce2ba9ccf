"""Recipe `t5_pretrain`: an encoder-decoder is pre-trained by denoising text, from scratch or from given weights.

Beside the scores of every pre-training: val_accuracy, the share of target tokens that the model finds the likeliest,
given those before; with `depth` data val_sentence_loss and val_sentence_accuracy, of the sentence tokens alone.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from src.experiments.config import Places
from src.experiments.kinds import ENCODER_DECODER
from src.recipes.pretraining import Pretraining, Scorer

SENTENCE_SCORES = ("val_sentence_loss", "val_sentence_accuracy")
"""Of data sets with `sentence_targets`."""


class Config(Pretraining):
    """An experiment of this recipe, without its "recipe" key."""

    model_kind: ClassVar[str] = ENCODER_DECODER
    measures_accuracy: ClassVar[bool] = True

    def loss(self) -> Callable[..., Any]:
        from src.training.loss import depth_loss, seq2seq_loss

        def loss(model: Any, batch: Any, *options: float) -> Any:
            return (depth_loss if "cross_mask" in batch else seq2seq_loss)(model, batch, *options)

        return loss

    def score_names(self) -> list[str]:
        return [
            *super().score_names(),
            "val_accuracy",
            *(SENTENCE_SCORES if self.data.validation.name == "depth" else ()),
        ]

    def checks(self, places: Places) -> list[Callable[[], object]]:
        return [*super().checks(places), lambda: self.model.check_kind(ENCODER_DECODER, places)]

    def more_scores(self, val: Any, scorer: Scorer) -> dict[str, float]:
        sentence_targets = getattr(val, "sentence_targets", None)
        if sentence_targets is None:
            return {}
        sentences = scorer.loss_sums(sentence_targets())
        return dict(zip(SENTENCE_SCORES, (sentences.loss, sentences.accuracy), strict=True))
