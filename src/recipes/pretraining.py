"""Training a language model on text: what the recipes `lm` and `t5_pretrain` share. Each adds which models and data it takes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src import config as configs
from src import distributed
from src.config import Places
from src.registry import DECODER, KINDS, Dataset, Model, max_positions, require_kind, resolved
from src.runs.context import Run
from src.training.config import LoopConfig

if TYPE_CHECKING:
    from torch import Tensor

SCORES = ("val_loss", "val_perplexity")
SENTENCE_SCORES = ("val_sentence_loss", "val_sentence_accuracy")
"""Of data sets with `sentence_targets`."""


class Pretraining(configs.Config):
    """An experiment, without its "recipe" key."""

    seed: int = Field(ge=0, lt=2**63)
    model: Model
    data: Dataset
    loop: LoopConfig

    @model_validator(mode="after")
    def _can_learn(self) -> "Pretraining":
        if self.model.ask("frozen"):
            raise ValueError("model: it is quantized, and cannot learn. Put 'lora' around it, or leave quantization out.")
        return self

    def require(self, kind: str) -> None:
        """Raises ValueError where the model is not of that kind, as far as that is known, or the data are for another."""
        require_kind(self.model, kind, None)
        reader = self.data.ask("reader") or DECODER
        if reader != kind:
            raise ValueError(f"data: {self.data.name!r} is for {KINDS[reader]}; this recipe trains {KINDS[kind]}.")


def checks(config: Pretraining, places: Places, more_scores: Sequence[str] = ()) -> list[Callable[[], object]]:
    """For `errors.check_all`: each raises a UserError for what can be known to fail before anything is loaded."""
    return [
        lambda: config.model.ask("check", places),
        lambda: config.data.ask("check", places),
        lambda: config.data.ask("check_tokenizer", config.model.ask("tokenizer_folder", places)),
        lambda: config.data.ask("fits", max_positions(config.model, places)),
        lambda: config.data.ask("one_shape", config.loop.compile),
        lambda: config.loop.check({*SCORES, *more_scores}),
    ]


def carry_out(
    config: Pretraining, run: Run, loss: "Callable[..., Tensor]", load_tokenizer: Callable[[str], Any], accuracy: bool = False
) -> None:
    """Train to the last step. Scores: train_loss, val_loss (nats per token), val_perplexity, where asked for val_accuracy, and the val_loss
    of each part of a mixture. Collective.

    loss: (model, batch) and, for training, label smoothing and z-loss -> summed loss. load_tokenizer: of the model's
    name_or_path.
    """
    import torch

    from src.training.checkpointing.folder import About
    from src.training.fingerprints import fingerprints
    from src.training.loop import Task, fit
    from src.training.validation import Measured, measure

    torch.manual_seed(config.seed)
    with distributed.together():
        model = config.model(run.places)
        tokenizer = load_tokenizer(model.name_or_path)
        train = config.data(run.places, tokenizer, "train", config.seed)
        val = config.data(run.places, tokenizer, "val", config.seed)
        inputs = fingerprints(run, train, tokenizer, config.model.ask("fingerprint", run.places))

    def evaluate(accelerator: Any) -> dict[str, float]:
        def measured(data: Any) -> Measured:
            return measure(model, data, loss, config.loop.micro_batch, accelerator.device, accuracy)

        parts = {name: measured(part) for name, part in getattr(val, "parts", {"": val}).items()}
        whole = Measured(*map(sum, zip(*parts.values(), strict=True)))
        found = {"val_loss": whole.loss, "val_perplexity": float(torch.tensor(whole.loss).exp())}
        if accuracy:
            found["val_accuracy"] = whole.accuracy
        if len(parts) > 1:
            found |= {f"val_loss/{name}": part.loss for name, part in parts.items()}
        if hasattr(val, "sentence_targets"):
            sentences = measured(val.sentence_targets())
            found |= dict(zip(SENTENCE_SCORES, (sentences.loss, sentences.accuracy), strict=True))
        return found

    def learned(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss(module, batch, config.loop.label_smoothing, config.loop.z_loss)

    about = About(resolved(config.model), tokenizer)
    fit(Task(model, about, train, inputs, learned, evaluate), run, config.loop, config.seed)
