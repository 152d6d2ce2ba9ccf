"""Training on text, shared by `lm`, `metadata_lm` and `t5_pretrain`. Each adds its types of model and data, and the loss."""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from src import distributed
from src.call_once import call_once
from src.config import Places, added_field
from src.interfaces import Dataset
from src.kinds import KINDS
from src.recipes.finetuning import Finetuning
from src.registry import resolved_dict
from src.runs.context import Run
from src.training.config import Evaluation

if TYPE_CHECKING:
    import torch


class Pretraining(Finetuning):
    """An experiment that trains on text, or evaluates a model on it."""

    model_kind: ClassVar[str]
    """The kind of model that the recipe takes, one of `kinds.KINDS`."""
    measures_accuracy: ClassVar[bool] = False
    """Whether an evaluation counts the tokens that the model finds the likeliest."""

    evaluation: Evaluation | None = added_field(None)

    @model_validator(mode="after")
    def _can_learn(self) -> "Pretraining":
        if self.loop and self.model.is_frozen():
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
        loop = self.loop
        checks: list[Callable[[], object]] = [
            lambda: call_once(self.model.check, places),
            lambda: call_once(self.data.check, places),
            lambda: self.data.check_tokenizer(self.model.tokenizer_folder(places)),
            lambda: self.data.check_length(self.model.longest_sequence(places)),
            lambda: self.data.check_model(call_once(self.model.architecture, places)),
            lambda: self.check_precision(places),
        ]
        if loop:
            checks += [lambda: self.data.check_steps(loop.steps), self.check_compiled, lambda: loop.check(self.score_names())]
        return checks

    def run(self, run: Run) -> None:
        """Train to the last step, or evaluate. Collective.

        Scores: train_loss, val_loss (nats per token), val_perplexity, the val_loss of each part of a mixture, and what the recipe adds.
        """
        import torch

        from src.data.text import tokenizers
        from src.training.checkpointing.folder import CheckpointMetadata
        from src.training.spec import TrainSpec
        from src.training.state import fingerprints
        from src.training.validation import LossSums, measure, token_losses

        loss = self.loss()
        torch.manual_seed(self.seed)
        with distributed.raise_together():
            model = self.model.build(run.places)
            tokenizer = tokenizers.load(model.name_or_path, self.model.new_tokens())
            val = self.data.build(run.places, tokenizer, "val", self.seed)
            train = self.data.build(run.places, tokenizer, "train", self.seed) if self.loop else val
            inputs = fingerprints(run, train, tokenizer, self.model.fingerprint(run.places))

        def evaluate(accelerator: Any) -> dict[str, float]:
            def loss_sums(data: Dataset) -> LossSums:
                return measure(model, data, loss, self.micro_batch, accelerator.device, self.measures_accuracy)

            def losses(data: Dataset) -> list[list[float]]:
                return token_losses(model, data, loss, self.micro_batch, accelerator.device, tokenizers.control_ids(tokenizer))

            parts = {name: loss_sums(part) for name, part in getattr(val, "parts", {"": val}).items()}
            whole = LossSums(*map(sum, zip(*parts.values(), strict=True)))
            scores = {"val_loss": whole.loss, "val_perplexity": float(torch.tensor(whole.loss).exp())}
            if self.measures_accuracy:
                scores["val_accuracy"] = whole.accuracy
            if len(parts) > 1:
                scores |= {f"val_loss/{name}": part.loss for name, part in parts.items()}
            return scores | self.more_scores(val, loss_sums, losses)

        about = CheckpointMetadata(resolved_dict(self.model), tokenizer)
        spec = TrainSpec(model, about, train, inputs, self.training_loss(loss), evaluate, None if self.loop else lambda _: {})
        self.fit_or_evaluate(spec, run)

    def more_scores(
        self, val: Dataset, loss_sums: Callable[[Dataset], Any], losses: Callable[[Dataset], list[list[float]]]
    ) -> dict[str, float]:
        """Further scores of the validation set. Collective.

        loss_sums: data set -> `training.validation.LossSums`. losses: data set -> nats of each scored token of each sample, where the
        tokenizer's control tokens but the end token have no probability.
        """
        return {}
