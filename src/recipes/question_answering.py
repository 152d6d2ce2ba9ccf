"""Training and scoring models that answer questions: what the recipes `crossattn`, `prompted` and `fid` share.

Each of them adds which model and data it takes, and the loss.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field, model_validator

from src import distributed
from src.config import Places
from src.errors import ConfigError
from src.evaluation.config import Answers, Inference, score_names
from src.interfaces import DatasetField, ModelField, RecipeConfig, call_once
from src.registry import resolved_dict
from src.runs.context import Run
from src.training.config import Evaluation, LoopConfig

VAL_LOSSES = ("val_loss", "val_loss_shuffled_context")


class QuestionAnswering(RecipeConfig):
    """An experiment: a loop that trains, or the evaluation of the model as it is."""

    model_kind: ClassVar[str]
    """The kind of model that the recipe takes, one of `kinds.KINDS`."""
    dataset_name: ClassVar[str]
    """The data set that it takes."""

    seed: int = Field(ge=0, lt=2**63)
    model: ModelField
    data: DatasetField
    loop: LoopConfig | None = None
    evaluation: Evaluation | None = None
    answers: Answers | None = None
    inference: Inference | None = None

    @model_validator(mode="after")
    def _trains_or_evaluates(self) -> "QuestionAnswering":
        if (self.loop is None) == (self.evaluation is None):
            raise ValueError("expected either loop, which trains the model, or evaluation, which scores it as it stands.")
        if self.evaluation and self.model.name == "lora":
            raise ValueError("model: new adapters change nothing before they are trained. Take their base, or write loop.")
        self.model.require_kind(self.model_kind, None)
        if self.data.name != self.dataset_name:
            raise ValueError(f"data: the data of this recipe are {self.dataset_name!r}, got {self.data.name!r}.")
        return self

    @abstractmethod
    def loss(self) -> "Callable[..., Any]":
        """(model, batch) and, for training, label smoothing and z-loss -> summed loss."""

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """Each raises a UserError for what can be known to fail before anything is loaded."""
        from src.data.qa import row_index
        from src.data.qa.subsets import RowsConfig

        data, loop, inference = self.data, self.loop, self.inference
        assert isinstance(data, RowsConfig), "the validator has checked its name"

        def check_trainable() -> None:
            if loop and self.model.is_frozen():
                raise ConfigError("model: its weights are frozen, so there is nothing to train. Put 'lora' around it, or write evaluation.")

        new_tokens = max((asked.max_new_tokens for asked in (self.answers, inference) if asked), default=0)
        checks: list[Callable[[], object]] = [
            lambda: call_once(self.model.check, places),
            lambda: self.model.check_kind(self.model_kind, places),
            check_trainable,
            lambda: call_once(data.check, places),
            lambda: data.check_length(self.model.longest_sequence(places), new_tokens),
            lambda: inference and row_index.check(places, data, inference.split, inference.index_file),
        ]
        if loop:
            measured = {*VAL_LOSSES, *score_names(self.answers.metrics if self.answers else [])}
            checks += [lambda: loop.compile and data.check_compiled(), lambda: loop.check(measured)]
        return checks

    def run(self, run: Run) -> None:
        """Train to the last step, or score the model as it is; then make the inference. Collective.

        Scores: train_loss, val_loss and, where there are contexts, val_loss_shuffled_context (nats per token), the metrics of `answers`;
        at the end what is kept of a context, where that is known, and the metrics of `inference`.
        """
        import torch

        from src.data.qa import row_index
        from src.data.qa.subsets import RowsConfig
        from src.data.text import tokenizers
        from src.evaluation import evaluate_only, generation, inference
        from src.training.checkpointing.folder import CheckpointMetadata
        from src.training.loop import TrainSpec, fit
        from src.training.state import fingerprints
        from src.training.validation import mean_loss

        loss = self.loss()
        asked, batch_size = self.inference, (self.loop or self.evaluation).micro_batch  # type: ignore[union-attr]  one of them is there
        assert isinstance(self.data, RowsConfig), "the validator has checked its name"
        torch.manual_seed(self.seed)
        with distributed.raise_together():
            model = self.model.build(run.places)
            tokenizer = tokenizers.load(model.name_or_path)
            val = self.data.build(run.places, tokenizer, "val", self.seed)
            shuffled = val.with_shuffled_contexts() if val.reads_contexts else None
            if self.answers:
                self.answers.require(val)
            job = None
            if asked:
                rows = row_index.read(run.places, self.data, asked.index_file) if asked.index_file else None
                job = inference.prepare(asked, self.data.build(run.places, tokenizer, asked.split, self.seed), rows)
            train = self.data.build(run.places, tokenizer, "train", self.seed) if self.loop else None
            inputs = fingerprints(run, val if train is None else train, tokenizer, self.model.fingerprint(run.places))

        def evaluate(accelerator: Any) -> dict[str, float]:
            scores = {
                name: mean_loss(model, data, loss, batch_size, accelerator.device)
                for name, data in zip(VAL_LOSSES, (val, shuffled), strict=True)
                if data is not None
            }
            if self.answers:
                generator = generation.AnswerGenerator(model, val, tokenizer, batch_size, accelerator.device)
                scores |= generation.evaluate(self.answers, generator)
            return scores

        def finish(accelerator: Any) -> dict[str, float]:
            value_bytes = next(model.parameters()).dtype.itemsize
            kept = self.model.cache_bytes(run.places, value_bytes) if shuffled is not None else None
            scores: dict[str, float] = dict(kept or {})
            if val.stored_bytes_per_token is not None:
                scores["cache_bytes_per_context_token"] = val.stored_bytes_per_token
            if job:
                generator = generation.AnswerGenerator(model, job.dataset, tokenizer, batch_size, accelerator.device)
                scores |= inference.make(run, job, generator, inputs)
            return scores

        if self.evaluation:
            evaluate_only.evaluate_only(model, run, self.evaluation, evaluate, finish)
            return
        assert self.loop and train is not None, "the validator has checked that it trains or evaluates"  # noqa: PT018  one reason
        smoothing, z_loss = self.loop.label_smoothing, self.loop.z_loss
        about = CheckpointMetadata(resolved_dict(self.model), tokenizer)
        task = TrainSpec(model, about, train, inputs, lambda module, batch: loss(module, batch, smoothing, z_loss), evaluate, finish)
        fit(task, run, self.loop, self.seed)
