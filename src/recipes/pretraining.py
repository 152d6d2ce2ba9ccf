"""Training on text, shared by `lm`, `metadata_lm` and `t5_pretrain`.
Each adds its types of model and data, and the loss."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from src.evaluation.config import Answers, SampledAnswers
from src.experiments.config import Places
from src.experiments.dataset_protocols import Dataset
from src.experiments.kinds import KINDS
from src.experiments.registry import resolved_dict
from src.recipes.finetuning import Finetuning
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once
from src.training.config import Evaluation

if TYPE_CHECKING:
    import torch

    from src.training.validation import LossSums


class Pretraining(Finetuning):
    """An experiment that trains on text, or evaluates a model on it."""

    model_kind: ClassVar[str]
    """The kind of model that the recipe takes, one of `kinds.KINDS`."""
    data_kind: ClassVar[str | None] = None
    """The `reader` of its data; None: `model_kind`."""
    measures_accuracy: ClassVar[bool] = False
    """Whether an evaluation counts the tokens that the model finds the likeliest."""
    reported: ClassVar[Sequence[str]] = ()
    """Named sums of `loss` whose means an evaluation reports, as val_NAME and by part of the data as val_NAME/PART."""

    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _can_learn(self) -> "Pretraining":
        if self.loop and self.model.is_frozen():
            raise ValueError(
                "model: it is quantized, and cannot learn. Put 'lora' around it, or leave quantization out."
            )
        self.model.require_kind(self.model_kind, None)
        if self.data.name == "rollouts":
            raise ValueError("data: 'rollouts' are answers of a policy. Take recipe 'ppo' or 'grpo', or its prompts.")
        wanted = self.data_kind or self.model_kind
        if self.data.reader != wanted:
            raise ValueError(
                f"data: {self.data.name!r} is for {KINDS[self.data.reader]}; "
                f"this recipe reads data for {KINDS[wanted]}."
            )
        return self

    @abstractmethod
    def loss(self) -> "Callable[..., torch.Tensor]":
        """(model, batch) and, for training, label smoothing and z-loss -> summed loss."""

    def score_names(self) -> list[str]:
        """Names of the scores of an evaluation."""
        return ["val_loss", *(f"val_{name}" for name in self.reported or ["perplexity"])]

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
            self.check_questions,
        ]
        if loop:
            checks += [
                lambda: self.data.check_steps(loop.steps),
                self.check_compiled,
                lambda: loop.check(self.score_names()),
            ]
        return checks

    def run(self, run: Run) -> None:
        """Train to the last step, or evaluate. Collective.

        Scores: train_loss, val_loss (nats per token), val_perplexity, the val_loss of each part of a mixture, and what
        the recipe adds.
        """
        import torch

        from src.data.text import tokenizers
        from src.training.checkpointing.checkpoint import CheckpointMetadata
        from src.training.spec import TrainSpec
        from src.training.state import fingerprints
        from src.training.validation import LossSums

        loss = self.loss()
        torch.manual_seed(self.seed)
        with distributed.raise_together():
            model = self.build_model(run, used_before=type(self).prepare is not Pretraining.prepare)
            tokenizer = tokenizers.load(model.name_or_path, self.model.new_tokens())
            val = self.data.build(run.places, tokenizer, "val", self.seed)
            train = self.data.build(run.places, tokenizer, "train", self.seed) if self.loop else val
            inputs = {
                **fingerprints(run, train, tokenizer, self.model.fingerprint(run.places)),
                **self.begin(train, val, run),
            }

        train, val = self.prepare(model, train, val, run)

        def evaluate(accelerator: Any) -> dict[str, float]:
            scorer = Scorer(
                model, tokenizer, loss, self.micro_batch, accelerator.device, self.measures_accuracy, self.count
            )
            summing = replace(scorer, loss=self.in_chunks(loss))
            parts = {name: summing.loss_sums(part) for name, part in getattr(val, "parts", {"": val}).items()}
            whole = LossSums.total(parts.values())
            scores = {"val_loss": whole.loss}
            if not self.reported:
                scores["val_perplexity"] = float(torch.tensor(whole.loss).exp())
            if self.measures_accuracy:
                scores["val_accuracy"] = whole.accuracy
            for name, part in {"": whole, **(parts if len(parts) > 1 else {})}.items():
                scores |= {
                    f"val_{kind}/{name}".rstrip("/"): part.means[kind] for kind in self.reported if kind in part.means
                }
                scores |= {f"val_loss/{name}": part.loss} if name else {}
            return scores | self.more_scores(val, scorer)

        about = CheckpointMetadata(resolved_dict(self.model), tokenizer)
        finish = None if self.loop else lambda _: {}
        spec = TrainSpec(model, about, train, inputs, self.training_loss(loss), evaluate, finish, count=self.count)
        self.fit_or_evaluate(spec, run)

    def begin(self, train: Dataset, val: Any, run: Run) -> Mapping[str, str]:
        """Called on every rank before the training, which could not be evaluated where it raises a UserError.

        Returns more fingerprints of inputs by name, which must not change between starts.
        """
        return {}

    def prepare(self, model: Any, train: Any, val: Any, run: Run) -> tuple[Any, Any]:
        """The training and the validation set, with what the model as it begins tells of them. Collective."""
        return train, val

    def count(self, batch: "Mapping[str, torch.Tensor]") -> float:
        """What the training loss of a batch, on the CPU, is divided by: its learned tokens."""
        from src.training.validation import count_loss_tokens

        return count_loss_tokens(batch)

    def more_scores(self, val: Any, scorer: "Scorer") -> dict[str, float]:
        """Further scores of the validation set. Collective."""
        return {}


@dataclass(frozen=True)
class Scorer:
    """A model on its device, as an evaluation finds it."""

    model: Any
    tokenizer: Any
    loss: "Callable[..., torch.Tensor]"
    micro_batch: int
    device: "torch.device"
    measures_accuracy: bool
    count: "Callable[[Mapping[str, torch.Tensor]], float]"

    def loss_sums(self, data: Dataset) -> "LossSums":
        """Summed loss and tokens of all samples. Collective."""
        from src.training.validation import measure

        return measure(
            self.model, data, self.loss, self.micro_batch, self.device, self.measures_accuracy, count=self.count
        )

    def token_losses(self, data: Dataset) -> list[list[float]]:
        """Nats of each scored token of each sample, where control tokens but the end token have no probability.
        Collective."""
        from src.data.text import tokenizers
        from src.training.validation import token_losses

        control_ids = tokenizers.control_ids(self.tokenizer)
        return token_losses(self.model, data, self.loss, self.micro_batch, self.device, control_ids)

    def sampled_answers(self, asked: SampledAnswers, val: Any) -> dict[str, float]:
        """Scores of drawn answers to the first questions of a data set. Collective."""
        from src.evaluation import generation, sampled

        return sampled.evaluate(
            asked, generation.AnswerGenerator(self.model, val, self.tokenizer, self.micro_batch, self.device)
        )

    def answers(self, asked: Answers, val: Any) -> dict[str, float]:
        """Scores of generated answers to the first questions of a data set, and with other contexts. Collective."""
        from src.evaluation import generation

        generator = generation.AnswerGenerator(
            self.model, val, self.tokenizer, self.micro_batch, self.device, asked.decoding()
        )
        return generation.evaluate(asked, generator, val.with_shuffled_contexts() if asked.shuffled_context else None)
