"""Training and evaluating models that answer questions, shared by the recipes `crossattn`, `prompted` and `fid`.

Each of them adds which model and data it takes, and the loss.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import model_validator

from src.evaluation.config import Answers, Inference
from src.experiments.config import Places
from src.experiments.registry import resolved_dict
from src.recipes.finetuning import Finetuning
from src.runs.context import Run
from src.support import distributed
from src.support.call_once import call_once

VAL_LOSSES = ("val_loss", "val_loss_shuffled_context")


class QuestionAnswering(Finetuning):
    """An experiment that trains or evaluates a model on questions."""

    model_kind: ClassVar[str]
    """The kind of model that the recipe takes, one of `kinds.KINDS`."""
    dataset_name: ClassVar[str]
    """The data set that it takes."""

    answers: Answers | None = None
    inference: Inference | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "QuestionAnswering":
        self.model.require_kind(self.model_kind, None)
        if self.data.name != self.dataset_name:
            raise ValueError(f"data: the data of this recipe are {self.dataset_name!r}, got {self.data.name!r}.")
        return self

    @abstractmethod
    def loss(self) -> "Callable[..., Any]":
        """(model, batch) and, for training, label smoothing and z-loss -> summed loss."""

    def checks(self, places: Places) -> list[Callable[[], object]]:
        """Checks that need no model or data in memory; each raises a UserError."""
        from src.systems.crossattn.data import row_index
        from src.systems.crossattn.data.subsets import RowsConfig

        data, loop, inference = self.data, self.loop, self.inference
        assert isinstance(data, RowsConfig), "the validator has checked its name"
        new_tokens = max((asked.max_new_tokens for asked in (self.answers, inference) if asked), default=0)
        checks: list[Callable[[], object]] = [
            lambda: call_once(self.model.check, places),
            lambda: self.model.check_kind(self.model_kind, places),
            self.check_trainable,
            self.check_questions,
            lambda: self.check_precision(places),
            lambda: call_once(data.check, places),
            lambda: data.check_length(self.model.longest_sequence(places), new_tokens),
            lambda: inference and row_index.check(places, data, inference.split, inference.index_file),
        ]
        if loop:
            measured = {*VAL_LOSSES, *(self.answers.score_names() if self.answers else [])}
            checks += [self.check_compiled, lambda: loop.check(measured)]
        return checks

    def run(self, run: Run) -> None:
        """Train, or evaluate without training; then run the inference. Collective.

        Scores: train_loss, val_loss and, where there are contexts, val_loss_shuffled_context (nats per token), the
        metrics of `answers`; at the end what is kept of a context, where that is known, and the metrics of `inference`.
        """
        import torch

        from src.data.text import tokenizers
        from src.evaluation import generation, inference
        from src.systems.crossattn.data import row_index
        from src.systems.crossattn.data.subsets import RowsConfig
        from src.training.checkpointing.checkpoint import CheckpointMetadata
        from src.training.spec import TrainSpec
        from src.training.state import fingerprints
        from src.training.validation import mean_loss

        loss = self.loss()
        asked, batch_size = self.inference, self.micro_batch
        assert isinstance(self.data, RowsConfig), "the validator has checked its name"
        torch.manual_seed(self.seed)
        with distributed.raise_together():
            model = self.build_model(run)
            tokenizer = tokenizers.load(model.name_or_path, self.model.new_tokens())
            val = self.data.build(run.places, tokenizer, "val", self.seed)
            shuffled = val.with_shuffled_contexts() if val.reads_contexts else None
            if self.answers:
                self.answers.require(val)
            job = None
            if asked:
                rows = row_index.read(run.places, self.data, asked.index_file) if asked.index_file else None
                job = inference.prepare(asked, self.data.build(run.places, tokenizer, asked.split, self.seed), rows)
            train = self.data.build(run.places, tokenizer, "train", self.seed) if self.loop else val
            inputs = fingerprints(run, train, tokenizer, self.model.fingerprint(run.places))

        def evaluate(accelerator: Any) -> dict[str, float]:
            scores = {
                name: mean_loss(model, data, self.in_chunks(loss), batch_size, accelerator.device)
                for name, data in zip(VAL_LOSSES, (val, shuffled), strict=True)
                if data is not None
            }
            if self.answers:
                generator = generation.AnswerGenerator(
                    model, val, tokenizer, batch_size, accelerator.device, self.answers.decoding()
                )
                scores |= generation.evaluate(self.answers, generator, shuffled)
            return scores

        def finish(accelerator: Any) -> dict[str, float]:
            value_bytes = next(model.parameters()).dtype.itemsize
            kept = self.model.cache_bytes(run.places, value_bytes) if shuffled is not None else None
            scores: dict[str, float] = dict(kept or {})
            if val.stored_bytes_per_token is not None:
                scores["cache_bytes_per_context_token"] = val.stored_bytes_per_token
            if job:
                generator = generation.AnswerGenerator(
                    model, job.dataset, tokenizer, batch_size, accelerator.device, job.config.decoding()
                )
                scores |= inference.make(run, job, generator, inputs)
            return scores

        about = CheckpointMetadata(resolved_dict(self.model), tokenizer)
        self.fit_or_evaluate(TrainSpec(model, about, train, inputs, self.training_loss(loss), evaluate, finish), run)
