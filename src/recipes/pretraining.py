"""Training on text, shared by the recipes `lm` and `t5_pretrain`. Each adds its types of model and data, and the loss."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from src import distributed
from src.config import Places
from src.interfaces import Dataset, DatasetField, ModelField, RecipeConfig, call_once
from src.kinds import KINDS
from src.registry import resolved_dict
from src.runs.context import Run
from src.training.config import LoopConfig, check_weight_type, require_device

if TYPE_CHECKING:
    import torch


class Pretraining(RecipeConfig):
    """An experiment that trains on text."""

    model_kind: ClassVar[str]
    """The kind of model that the recipe takes, one of `kinds.KINDS`."""
    measures_accuracy: ClassVar[bool] = False
    """Whether an evaluation counts the tokens that the model finds the likeliest."""

    seed: int = Field(ge=0, lt=2**63)
    model: ModelField
    data: DatasetField
    loop: LoopConfig

    @model_validator(mode="after")
    def _can_learn(self) -> "Pretraining":
        if self.model.is_frozen():
            raise ValueError("model: it is quantized, and cannot learn. Put 'lora' around it, or leave quantization out.")
        self.model.require_kind(self.model_kind, None)
        if self.data.reader != self.model_kind:
            raise ValueError(f"data: {self.data.name!r} is for {KINDS[self.data.reader]}; this recipe trains {KINDS[self.model_kind]}.")
        return self

    @abstractmethod
    def loss(self) -> "Callable[..., torch.Tensor]":
        """(model, batch) and, for training, label smoothing and z-loss -> summed loss."""

    def score_names(self) -> list[str]:
        """Names of the scores of an evaluation."""
        return ["val_loss", "val_perplexity"]

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """Checks that need no model or data in memory; each raises a UserError."""
        return [
            lambda: call_once(self.model.check, places),
            lambda: call_once(self.data.check, places),
            lambda: self.data.check_tokenizer(self.model.tokenizer_folder(places)),
            lambda: self.data.check_length(self.model.longest_sequence(places)),
            lambda: self.data.check_model(call_once(self.model.architecture, places)),
            lambda: check_weight_type(self.loop.precision, "loop.precision", self.model, places),
            lambda: self.data.check_steps(self.loop.steps),
            lambda: self.loop.compile and self.data.check_compiled(),
            lambda: self.loop.check(self.score_names()),
        ]

    def check_device(self) -> None:
        require_device(self.loop.precision, "loop.precision")

    def run(self, run: Run) -> None:
        """Train to the last step. Collective.

        Scores: train_loss, val_loss (nats per token), val_perplexity, the val_loss of each part of a mixture, and what the recipe adds.
        """
        import torch

        from src.data.text import tokenizers
        from src.training.checkpointing.folder import CheckpointMetadata
        from src.training.loop import fit
        from src.training.spec import TrainSpec
        from src.training.state import fingerprints
        from src.training.validation import LossSums, measure

        loss = self.loss()
        torch.manual_seed(self.seed)
        with distributed.raise_together():
            model = self.model.build(run.places)
            tokenizer = tokenizers.load(model.name_or_path)
            train = self.data.build(run.places, tokenizer, "train", self.seed)
            val = self.data.build(run.places, tokenizer, "val", self.seed)
            inputs = fingerprints(run, train, tokenizer, self.model.fingerprint(run.places))

        def evaluate(accelerator: Any) -> dict[str, float]:
            def loss_sums(data: Dataset) -> LossSums:
                return measure(model, data, loss, self.loop.micro_batch, accelerator.device, self.measures_accuracy)

            parts = {name: loss_sums(part) for name, part in getattr(val, "parts", {"": val}).items()}
            whole = LossSums(*map(sum, zip(*parts.values(), strict=True)))
            scores = {"val_loss": whole.loss, "val_perplexity": float(torch.tensor(whole.loss).exp())}
            if self.measures_accuracy:
                scores["val_accuracy"] = whole.accuracy
            if len(parts) > 1:
                scores |= {f"val_loss/{name}": part.loss for name, part in parts.items()}
            return scores | self.more_scores(val, loss_sums)

        def training_loss(module: torch.nn.Module, batch: Any) -> torch.Tensor:
            return loss(module, batch, self.loop.label_smoothing, self.loop.z_loss)

        about = CheckpointMetadata(resolved_dict(self.model), tokenizer)
        fit(TrainSpec(model, about, train, inputs, training_loss, evaluate), run, self.loop, self.seed)

    def more_scores(self, val: Dataset, loss_sums: Callable[[Dataset], Any]) -> dict[str, float]:
        """Further scores of the validation set. loss_sums: data set -> `training.validation.LossSums`. Collective."""
        return {}
