"""Base class of all recipes: a model is trained, or evaluated without training."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from src.data import row_counts
from src.errors import ConfigError, check_all
from src.experiments.config import Places, load
from src.experiments.interfaces import DatasetField, ModelField, RecipeConfig
from src.runs.context import Run
from src.runs.store import SavedRun
from src.support import distributed
from src.support.call_once import call_once
from src.training.config import (
    Evaluation,
    LoopConfig,
    check_trained_type,
    check_weight_type,
    require_device,
)

if TYPE_CHECKING:
    from src.training.parallel.memory_plan import MemoryPlan
    from src.training.spec import TrainSpec


class TrainingRecipe(RecipeConfig):
    """An experiment: a training loop or an evaluation."""

    takes_chunks: ClassVar[bool] = True
    """Whether the loss can be computed in chunks of tokens; true for the losses of `training.loss`."""

    is_cross_entropy: ClassVar[bool] = True
    """Whether the loss has label smoothing and z-loss: `training.loss`'s cross entropy of given tokens."""

    can_continue: ClassVar[bool] = True
    """Whether a training can continue that of another experiment from a step: not if it refers to the initial model."""

    seed: int = Field(ge=0, lt=2**63)
    """Seed of initial weights, data order and dropout."""
    variant: str | None = None
    """A name for a version of the code. No code reads it: it gives trainings with changed code an id of their own, so
    that they can be compared with those before the change."""
    model: ModelField
    """The model to train or evaluate."""
    data: DatasetField
    """Training and validation data."""
    loop: LoopConfig | None = None
    """Training settings. Set exactly one of `loop` and `evaluation`."""
    evaluation: Evaluation | None = None
    """Evaluate without training."""

    @model_validator(mode="after")
    def _trains_or_evaluates(self) -> "TrainingRecipe":
        if (self.loop is None) == (self.evaluation is None):
            which = "neither is" if self.loop is None else "both are"
            raise ValueError(f"set exactly one of loop (train) and evaluation; {which} set.")
        if self.evaluation and self.model.name == "lora":
            raise ValueError("model: untrained adapters change nothing. Use their base, or set loop to train them.")
        return self

    @model_validator(mode="after")
    def _lengths_are_known(self) -> "TrainingRecipe":
        if self.loop and self.loop.group_by_length and (self.data.has_order or not self.data.is_measured):
            why = "have a fixed order" if self.data.has_order else "have unknown sample lengths"
            raise ValueError(f"loop.group_by_length: {self.data.name!r} data {why}. Remove it.")
        return self

    @model_validator(mode="after")
    def _supports_chunks(self) -> "TrainingRecipe":
        if self.loop and self.loop.cross_entropy_chunk_tokens and not self.takes_chunks:
            raise ValueError(
                "loop.cross_entropy_chunk_tokens: this recipe needs the logits of all tokens at once. Remove it."
            )
        return self

    @model_validator(mode="after")
    def _uses_loss_options(self) -> "TrainingRecipe":
        if self.loop and not self.is_cross_entropy:
            for name in ("label_smoothing", "z_loss"):
                if value := getattr(self.loop, name):
                    raise ValueError(f"loop.{name}: {value}, but the loss of this recipe has no such term. Remove it.")
        return self

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass."""
        stage = self.loop or self.evaluation
        assert stage is not None, "the validator has checked it"
        return stage.micro_batch

    @property
    def precision(self) -> tuple[str, str]:
        """Precision of the loop or the evaluation, and the path of the field."""
        name, stage = ("loop", self.loop) if self.loop else ("evaluation", self.evaluation)
        assert stage is not None, "the validator has checked it"
        return stage.precision, f"{name}.precision"

    def check(self, places: Places) -> None:
        """See `RecipeConfig.check`; also check that a continued training fits its parent's."""
        from src.training.checkpointing import continuation

        check_all(lambda: super(TrainingRecipe, self).check(places), lambda: continuation.check(self, places))

    def with_steps(self, places: Places) -> Self:
        """The recipe with the steps of `loop.budget` instead of the budget; itself without a budget."""
        if self.loop is None or self.loop.budget is None:
            return self
        lengths, sequences = self.data.batch_lengths(), self.loop.sequences_per_step
        of_step, why = None, f"the batches of {self.data.name!r} data differ in length, so their tokens are unknown."
        if lengths and self.loop.budget.tokens:
            of_step = sequences * sum(lengths)
        elif lengths:
            from src.training.monitoring.flops import batch_flops

            call_once(self.model.check, places)
            model, batch = self._on_paper(places, sequences)
            count, why = batch_flops(model), "the operations of this model are unknown."
            of_step = count and count(batch)
        steps = self.loop.budget.steps(of_step, why)
        raw = {**self.loop.model_dump(exclude_unset=True), "steps": steps, "budget": None}
        return self.model_copy(update={"loop": load(LoopConfig, raw, "loop")})

    def _on_paper(self, places: Places, sequences: int) -> tuple[Any, Any]:
        """The model without its weights, and a batch of `sequences` of maximum length."""
        import torch

        from src.data.longest_batch import longest_batch

        with torch.device("meta"):
            model = self.model.build(replace(places, on_paper=True))
        return model, longest_batch(self.data, sequences, model.config)

    def check_precision(self, places: Places) -> None:
        """Raise ConfigError if weights have the other 16-bit type, or are trained in 16 bits."""
        check_weight_type(*self.precision, self.model, places)
        if self.loop:
            check_trained_type(self.model, places)

    def check_device(self) -> None:
        require_device(*self.precision)
        self.model.check_device()

    def check_trainable(self) -> None:
        """Raise ConfigError if the loop has no weights to train."""
        if self.loop and self.model.is_frozen():
            raise ConfigError(
                "model: all weights are frozen, so there is nothing to train. "
                "Wrap it in 'lora', or set evaluation instead of loop."
            )

    def check_compiled(self) -> None:
        """Raise ConfigError if the loop compiles the model and batches differ in length."""
        if self.loop and self.loop.compile:
            self.data.check_compiled()

    def training_loss(self) -> Callable[..., Any]:
        """(model, batch) -> summed loss of a training step, and optional named sums. Not available for policies."""
        raise NotImplementedError

    def with_loop_options(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Pass the loop's label smoothing and z-loss to `loss` as further arguments."""
        options = (self.loop.label_smoothing, self.loop.z_loss) if self.loop else ()
        return self.in_chunks(lambda model, batch: loss(model, batch, *options))

    def in_chunks(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Compute `loss` in chunks of `loop.cross_entropy_chunk_tokens`, if set."""
        if not (self.loop and self.loop.cross_entropy_chunk_tokens):
            return loss
        from src.training.parallel.linear_cross_entropy import chunks_of

        tokens = self.loop.cross_entropy_chunk_tokens

        def take_chunks(model: Any, batch: Any) -> Any:
            with chunks_of(tokens):
                return loss(model, batch)

        return take_chunks

    def plan_memory(self, places: Places, **machines: Any) -> "MemoryPlan":
        """Estimate the memory of the training on a GPU, and its duration, without loading weights. machines: fields of
        `memory_plan.Machines`.

        Raises:
            ConfigError: nothing is trained, or the estimate does not support a part of it.
        """
        from src.training.parallel.memory_plan import Machines, plan

        loop = self.with_steps(places).loop
        if loop is None:
            raise ConfigError("--memory: the experiment has no loop, so nothing is trained. Remove --memory.")
        model, batch = self._on_paper(places, loop.micro_batch)
        return plan(model, self.training_loss(), batch, loop, Machines(**machines))

    def check_questions(self, places: Places) -> None:
        """Raise a UserError if the data have no questions, no contexts to shuffle, or fewer questions than evaluations
        use."""
        data = self.data.validation
        val_samples = getattr(data, "val_samples", None)
        for name in ("answers", "sampled", "inference"):
            setting = getattr(self, name, None)
            if setting is None:
                continue
            if not data.has_questions:
                raise ConfigError(
                    f"{name}: the validation data {data.name!r} have no questions. Remove it, and evaluate the trained "
                    "model in another experiment with data such as 'conversations'."
                )
            for control in ("shuffled_context", "wrong_contexts"):
                if getattr(setting, control, False) and not data.reads_contexts:
                    raise ConfigError(f"{name}.{control}: these data have no contexts. Remove it.")
            for metric in setting.metrics:
                call_once(metric.check)
                if metric.needs_contexts and not data.has_contexts:
                    raise ConfigError(
                        f"{name}.metrics: {metric.name!r} compares answers with contexts, but {data.name!r} data "
                        "have no contexts. Remove it."
                    )
                call_once(metric.check_data, data, places)
            requested = getattr(setting, "questions", 0)
            if val_samples is not None and requested > val_samples:
                raise ConfigError(
                    f"{name}.questions: {requested} requested, but data.val_samples is {val_samples}. "
                    f"Use at most {val_samples}, or null for all."
                )
            available = call_once(data.count_questions, places, requested) if requested else None
            if available is not None:
                row_counts.require(f"{name}.questions", requested, available)

    def build_model(self, run: Run) -> Any:
        """Build the model. For FSDP2, leave out weights, which each process reads or draws later, one at a time. An
        evaluated checkpoint of a parent that is not done is marked first, so that the parent keeps it.
        """
        model: Any = self.model
        if self.evaluation and model.name == "experiment" and model.step is not None and distributed.is_main():
            from src.training.checkpointing import continuation

            continuation.mark(SavedRun(run.places.runs / model.exp_id), model.step)
        if not (run.options.fsdp and self.loop):
            return self.model.build(run.places)
        from src.support.deferred import build_deferred

        return build_deferred(lambda: self.model.build(run.places))

    def fit_or_evaluate(self, spec: "TrainSpec", run: Run) -> None:
        """Train if there is a loop, else evaluate; then call `spec.finish`. Collective."""
        from src.evaluation.evaluate_only import evaluate_only
        from src.training.loop import fit

        if self.loop:
            fit(spec, run, self.loop, self.seed)
        elif self.evaluation and spec.finish:
            evaluate_only(spec.model, run, self.evaluation, partial(spec.scores, last_step=0), spec.finish)
