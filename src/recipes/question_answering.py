"""Training and scoring models that answer questions: what the recipes of the baselines share.

A recipe adds which models and data sets it takes and what the loss is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from src import config as configs
from src import distributed
from src.config import Places
from src.errors import ConfigError
from src.evaluation.config import Answers, Inference, measured, most_new_tokens
from src.registry import Dataset, Model, check_kind, max_positions, require_kind, resolved
from src.runs.context import Run
from src.training.config import LoopConfig
from src.training.evaluation_config import Evaluation

if TYPE_CHECKING:
    from torch import Tensor

VAL_LOSSES = ("val_loss", "val_loss_shuffled_context")


class QuestionAnswering(configs.Config):
    """An experiment: a loop that trains, or the evaluation of the model as it stands."""

    seed: int = Field(ge=0, lt=2**63)
    model: Model
    data: Dataset
    loop: LoopConfig | None = None
    evaluation: Evaluation | None = None
    answers: Answers | None = None
    inference: Inference | None = None

    @model_validator(mode="after")
    def _trains_or_not(self) -> "QuestionAnswering":
        if (self.loop is None) == (self.evaluation is None):
            raise ValueError("expected either loop, which trains the model, or evaluation, which scores it as it stands.")
        if self.evaluation and self.model.name == "lora":
            raise ValueError("model: new adapters change nothing before they are trained. Take their base, or write loop.")
        return self

    def require(self, kind: str, data: str) -> None:
        """Raises ValueError where the model is not of that kind, as far as that is known, or the data set has another name."""
        require_kind(self.model, kind, None)
        if self.data.name != data:
            raise ValueError(f"data: the data of this recipe are {data!r}, got {self.data.name!r}.")

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass."""
        return (self.loop or self.evaluation).micro_batch  # type: ignore[union-attr]  one of them is there


def checks(
    config: QuestionAnswering, places: Places, kind: str, check_split: Callable[[Places, configs.Config, str, str | None], None]
) -> list[Callable[[], object]]:
    """For `errors.check_all`: each raises a UserError for what can be known to fail before anything is loaded.

    check_split: raises one where the data set of a config lacks a split, or an index file where one is named.
    """

    def learns() -> None:
        if config.loop and config.model.ask("frozen"):
            raise ConfigError("model: its weights are frozen, so there is nothing to train. Put 'lora' around it, or write evaluation.")

    asked = config.inference
    new_tokens = most_new_tokens(config.answers, config.inference)
    found = [
        lambda: config.model.ask("check", places),
        lambda: check_kind(config.model, kind, places),
        learns,
        lambda: config.data.ask("check", places),
        lambda: config.data.ask("fits", max_positions(config.model, places), new_tokens),
        lambda: asked and check_split(places, config.data.config, asked.split, asked.index_file),
    ]
    loop = config.loop
    if loop:
        found += [
            lambda: config.data.ask("one_shape", loop.compile),
            lambda: loop.check({*VAL_LOSSES, *measured(config.answers)}),
        ]
    return found


def carry_out(
    config: QuestionAnswering,
    run: Run,
    loss: "Callable[..., Tensor]",
    load_tokenizer: Callable[[str], Any],
    listed: Callable[[Places, configs.Config, str], list[int]],
) -> None:
    """Train to the last step, or score the model as it stands; and then make the inference. Collective.

    loss: (model, batch) and, for training, label smoothing and z-loss -> summed loss. load_tokenizer: of the model's name_or_path.
    listed: an index file of the data set of a config, by name -> the row numbers in it. Scores: train_loss and those of `_Exam`.
    """
    import torch

    from src.evaluation import evaluate_only, inference
    from src.training.checkpointing.folder import About
    from src.training.fingerprints import fingerprints
    from src.training.loop import Task, fit

    torch.manual_seed(config.seed)
    with distributed.together():
        model = config.model(run.places)
        tokenizer = load_tokenizer(model.name_or_path)

        def build(split: str) -> Any:
            return config.data(run.places, tokenizer, split, config.seed)

        val = build("val")
        shuffled = val.with_shuffled_contexts() if val.reads_contexts else None
        if config.answers:
            config.answers.require(val)
        asked = inference.prepare(config.inference, build, partial(listed, run.places, config.data.config))
        train = build("train") if config.loop else None
        inputs = fingerprints(run, val if train is None else train, tokenizer, config.model.ask("fingerprint", run.places))
        exam = _Exam(config, run, model, tokenizer, loss, val, shuffled, asked, inputs)
    if config.evaluation:
        return evaluate_only.score(model, run, config.evaluation, exam.evaluate, exam.finish)
    assert config.loop, "the validator has seen to it"
    smoothing, z_loss = config.loop.label_smoothing, config.loop.z_loss
    about = About(resolved(config.model), tokenizer)
    task = Task(model, about, train, inputs, lambda module, batch: loss(module, batch, smoothing, z_loss), exam.evaluate, exam.finish)
    fit(task, run, config.loop, config.seed)
    return None


@dataclass(frozen=True)
class _Exam:
    """A model and what it is asked. Both methods are called on every rank and give the same scores on each."""

    config: QuestionAnswering
    run: Run
    model: Any
    tokenizer: Any
    loss: "Callable[..., Tensor]"
    val: Any
    shuffled: Any
    """`val` with other questions' contexts; None where the samples have none."""
    asked: Any
    """What `inference.prepare` gave."""
    inputs: dict[str, str]
    """What `training.inputs.fingerprints` gave."""

    def evaluate(self, accelerator: Any) -> dict[str, float]:
        """val_loss and, where there are contexts, val_loss_shuffled_context (nats per token), and the scores of `answers`."""
        from src.evaluation import generation as answers
        from src.training.validation import mean_loss

        found = {}
        for name, data in zip(VAL_LOSSES, (self.val, self.shuffled), strict=True):
            if data is not None:
                found[name] = mean_loss(self.model, data, self.loss, self.config.micro_batch, accelerator.device)
        asked = self.config.answers
        return found | (answers.evaluate(asked, self._respondent(self.val, accelerator)) if asked else {})

    def finish(self, accelerator: Any) -> dict[str, float]:
        """What is kept of a context, where that is known, and the scores of `inference`."""
        from src.evaluation import inference

        value_bytes = next(self.model.parameters()).dtype.itemsize
        kept = self.config.model.ask("cache_bytes", self.run.places, value_bytes) if self.shuffled is not None else None
        if self.val.stored_bytes_per_token is not None:
            kept = {**(kept or {}), "cache_bytes_per_context_token": self.val.stored_bytes_per_token}
        return (kept or {}) | inference.make(self.run, self.asked, lambda dataset: self._respondent(dataset, accelerator), self.inputs)

    def _respondent(self, dataset: Any, accelerator: Any) -> Any:
        from src.evaluation.generation import Respondent

        return Respondent(self.model, dataset, self.tokenizer, self.config.micro_batch, accelerator.device)
