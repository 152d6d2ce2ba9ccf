"""Settings of the training loop, or of an evaluation without training. The logging interval is not part of an
experiment."""

from collections.abc import Collection, Mapping
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from src.errors import ConfigError
from src.experiments.config import Config, Places, added_field, unknown_text
from src.experiments.interfaces import ModelConfig
from src.support import distributed
from src.support.patterns import compile_pattern
from src.training.divergence.detector import Config as Divergence

POLYNOMIAL_END = 1e-7
"""Final learning rate of transformers' polynomial schedule."""
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_SCHEDULES_OF = {"final_rate": ("linear", "cosine", "wsd"), "decay_rate": ("wsd",), "decay_shape": ("wsd",)}
"""Fields that other schedules ignore."""


class EarlyStopping(Config):
    """Stop after `patience` consecutive evaluations without an improvement of `loop.best_metric` by more than
    `min_gain`."""

    patience: int = Field(gt=0)
    """Evaluations in a row without improvement."""
    min_gain: float = Field(default=0.0, ge=0)
    """Smallest change that counts as an improvement."""


class Budget(Config):
    """Size of a training, from which its steps follow: equal on every machine. Set exactly one field. The steps are
    rounded down."""

    tokens: int | None = Field(default=None, gt=0)
    """Tokens to read, inputs and targets, with padding."""
    flops: float | None = Field(default=None, gt=0)
    """Floating-point operations of the forward and backward passes, as for MFU (src/training/monitoring/flops.py):
    without recomputation and evaluations."""

    @model_validator(mode="after")
    def _has_one_unit(self) -> "Budget":
        if (self.tokens is None) == (self.flops is None):
            raise ValueError("set exactly one of tokens and flops.")
        return self

    def steps(self, of_step: float | None, why_unknown: str) -> int:
        """Optimizer steps. of_step: tokens or FLOPs of a step; None if unknown.

        Raises:
            ConfigError: the unit is unknown, or the budget is less than one step.
        """
        unit, budget = ("tokens", self.tokens) if self.tokens else ("flops", self.flops)
        if not of_step or budget is None:
            raise ConfigError(f"loop.budget.{unit}: {why_unknown} Set loop.steps instead.")
        if budget < of_step:
            raise ConfigError(f"loop.budget.{unit}: {budget:g} is less than the {of_step:g} of one step. Use more.")
        return int(budget // of_step)


OptimizerName = Literal["adamw", "adamw_scale", "adafactor", "muon"]


class ParameterGroup(Config):
    """Settings of the parameters whose names match a pattern, where they differ from the loop's."""

    match: str
    """Regular expression (RE2), searched in the names of trained parameters, such as "embed|lm_head"."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate, with the schedule of the loop; null: as without the group."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of the matrices in the group; null: `loop.weight_decay`."""
    optimizer: OptimizerName | None = None
    """null: `loop.optimizer`."""

    @model_validator(mode="after")
    def _is_a_pattern(self) -> "ParameterGroup":
        compile_pattern(self.match)
        return self


class LoopConfig(Config):
    """Settings of the training loop. An optimizer step reads `sequences_per_step` sequences, `micro_batch` at a time
    per process.

    The number of accumulated micro-batches follows from these two and the number of processes.
    """

    steps: int = Field(default=0, gt=0)
    """Optimizer steps. Set exactly one of `steps` and `budget`."""
    budget: Budget | None = added_field(None)
    """Tokens or operations to train with, instead of `steps`."""
    sequences_per_step: int = Field(gt=0)
    """Sequences per optimizer step, over all processes."""
    micro_batch: int = Field(gt=0)
    """Sequences per forward pass of a process."""
    optimizer: OptimizerName = "adamw"
    """See src/training/optim/optimizers.py. The learning rate of adamw_scale and adafactor is relative to the size of
    the weights. muon trains the matrices of the model's layers, and adamw everything else."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate."""
    muon_learning_rate: float | None = added_field(None, gt=0)
    """Peak learning rate of the matrices that Muon trains; null: `learning_rate`. Updates are scaled to the size of
    AdamW's, so rates of AdamW are a good start."""
    groups: list[ParameterGroup] = added_field([])
    """Parameters with other settings. The first group whose pattern matches a name wins."""
    layerwise_decay: float = added_field(1.0, gt=0, le=1)
    """Factor of the learning rate from each layer to the layer before it, for fine-tuning: layer i of n (from 0) has
    decay^(n - i), embeddings decay^(n + 1), and parameters after the last layer 1."""
    schedule: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "wsd",
    ] = "linear"
    """Learning rate schedule, named as in transformers; wsd is its warmup_stable_decay."""
    decay_rate: float = added_field(0.0, ge=0, le=1)
    """Share of `steps` at the end with falling learning rate, for schedule wsd. Between warm-up and decay the learning
    rate is constant."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = added_field("linear")
    """Shape of the decay of schedule wsd: after a share x of it, 1 - x, half a cosine, or 1 - sqrt(x)."""
    warmup_rate: float = Field(default=0.0, ge=0, lt=1)
    """Share of `steps` with rising learning rate."""
    warmup_start: float = Field(default=0.0, ge=0, le=1)
    """Share of `learning_rate` at the start of the warm-up. T5's schedule, 1/sqrt(max(step, warm-up)), is inverse_sqrt
    with warmup_start 1."""
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Final share of `learning_rate` of the schedules linear, cosine and wsd."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices, not to biases and norms."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of gradients."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of squared gradients."""
    adam_epsilon: float = Field(default=1e-6, gt=0)
    """Added to the denominator of Adam's update."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay per optimizer step of a moving average of the weights, such as 0.999; null: no average. Each evaluation
    repeats all scores with the average (`val_loss_ema`), checkpoints have it as ema.safetensors, and
    `python -m src.models.export RUN FOLDER --ema` exports it. Not for sharded models."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target probability spread over all tokens."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log of the softmax denominator of each token. 1e-4 in PaLM (Chowdhery et al. 2022, section
    5) and T5 (`z_loss` of Mesh TensorFlow's Unitransformer)."""
    cross_entropy_chunk_tokens: int = Field(default=0, ge=0)
    """Tokens per chunk of the output projection and cross entropy, such as 1024, so that only the logits of a chunk are
    in memory. They are recomputed in the backward pass. Changes the rounding of sums. 0: one chunk."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the forward and backward pass. Weights and optimizer state have the type of the model."""
    group_by_length: bool = False
    """Whether to sort the samples of 50 steps by length, so that micro-batches have less padding."""
    compile: bool = False
    """Whether to compile the model's layers for training passes. Changes rounding and dropout."""
    eval_every: int = Field(gt=0)
    """Optimizer steps between evaluations. The last step is always evaluated."""
    extra_eval_steps: list[PositiveInt] = []
    """Further steps to evaluate and save at, such as [2, 100]. They count for early stopping, and --keep_last and
    --keep_every can delete their checkpoints."""
    best_metric: str = "val_loss"
    """Score of evaluations that selects the best checkpoint."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a low or a high `best_metric` is good."""
    early_stopping: EarlyStopping | None = None
    divergence: Divergence = Divergence()

    @model_validator(mode="after")
    def _consistent(self) -> "LoopConfig":
        if bool(self.steps) == bool(self.budget):
            raise ValueError(f"set exactly one of steps and budget; {'both are' if self.steps else 'neither is'} set.")
        if self.sequences_per_step % self.micro_batch:
            raise ValueError(
                f"sequences_per_step = {self.sequences_per_step} is not "
                f"a multiple of micro_batch = {self.micro_batch}. Change one of them."
            )
        beyond = [step for step in self.extra_eval_steps if step > self.steps]
        if beyond and self.steps:
            raise ValueError(f"extra_eval_steps: step {beyond[0]} is after the last step, {self.steps}. Remove it.")
        if self.schedule == "polynomial" and self.learning_rate <= POLYNOMIAL_END:
            raise ValueError(
                f"learning_rate: expected more than {POLYNOMIAL_END}, the final value of schedule 'polynomial', got "
                f"{self.learning_rate:g}."
            )
        if self.schedule == "constant" and self.warmup_rate:
            raise ValueError(
                "warmup_rate: schedule 'constant' has no warm-up. Use 'constant_with_warmup', or remove warmup_rate."
            )
        if self.steps and self.warmup_start and not round(self.warmup_rate * self.steps):
            raise ValueError("warmup_start: there is no warm-up. Set warmup_rate, or remove warmup_start.")
        for name, schedules in _SCHEDULES_OF.items():
            if getattr(self, name) != type(self).model_fields[name].default and self.schedule not in schedules:
                expected = " or ".join(map(repr, schedules))
                raise ValueError(f"{name}: only for schedule {expected}, got {self.schedule!r}. Remove it.")
        return self

    @model_validator(mode="after")
    def _decays_within_the_steps(self) -> "LoopConfig":
        if self.schedule != "wsd" or (self.budget and self.decay_rate):  # the steps follow from the budget
            return self
        warmup, decay = (round(rate * self.steps) for rate in (self.warmup_rate, self.decay_rate))
        if not decay:
            raise ValueError(
                f"decay_rate: schedule 'wsd' needs at least one of {self.steps} steps to decay, got "
                f"{self.decay_rate:g}. Set it, or use 'constant_with_warmup'."
            )
        if warmup + decay > self.steps:
            raise ValueError(
                f"decay_rate: {warmup} steps of warm-up and {decay} of decay are more than the {self.steps} steps. "
                "Lower decay_rate or warmup_rate."
            )
        return self

    @model_validator(mode="after")
    def _adafactor_ignores_nothing(self) -> "LoopConfig":
        if self.optimizers == {"adafactor"}:
            ignored = [name for name in _ADAM if getattr(self, name) != type(self).model_fields[name].default]
            if ignored:
                raise ValueError(f"{', '.join(ignored)}: ignored by optimizer 'adafactor'. Remove it.")
        if self.muon_learning_rate and "muon" not in self.optimizers:
            raise ValueError("muon_learning_rate: no parameter has optimizer 'muon'. Remove it.")
        return self

    @property
    def optimizers(self) -> set[str]:
        """Names of the optimizers of the loop and its groups."""
        return {self.optimizer, *(group.optimizer for group in self.groups if group.optimizer)}

    def check(self, scores: Collection[str]) -> None:
        """Check the settings against the number of processes and the recipe's `scores`.

        Raises:
            ConfigError: there are more processes than micro-batches in a step, or `best_metric` is not a score.
        """
        if self.ema:
            scores = {*scores, *(f"{score}_ema" for score in scores)}
        # "em/nq": over the rows of one source, where metrics are given
        starts = [f"{score.rstrip('/')}/" for score in scores if not score.startswith("val_") and "@" not in score]
        if self.best_metric not in scores and not self.best_metric.startswith(tuple(starts)):
            if "best_metric" not in self.model_fields_set:
                raise ConfigError(
                    f"loop.best_metric: missing, and its default {self.best_metric!r} is not a score of this recipe. "
                    "Set it, and loop.best_mode: 'max' if a high score is better. "
                    f"Scores: {', '.join(sorted(scores))}."
                )
            raise ConfigError(f"loop.best_metric: {unknown_text('score', self.best_metric, scores)}")
        count, shares = self.sequences_per_step // self.micro_batch, distributed.world_size()
        if count < shares:
            raise ConfigError(
                f"loop.sequences_per_step: {self.sequences_per_step} sequences in micro-batches of "
                f"{self.micro_batch} make {count} micro-batches per step, fewer than the {shares} processes. "
                f"Start at most {count} processes, or lower loop.micro_batch."
            )

    def check_accelerate(self, options: Mapping[str, str | float]) -> None:
        """Check that options of `accelerate launch` do not contradict the experiment. options: from
        `src.launch.accelerate_env`.

        Raises:
            ConfigError: an option differs. The message has both values.
        """
        accumulation_steps = -(-(self.sequences_per_step // self.micro_batch) // distributed.world_size())
        expected = {
            "precision": ("--mixed_precision", "loop.precision", self.precision),
            "gradient_accumulation_steps": (
                "--gradient_accumulation_steps",
                "the accumulation of loop.sequences_per_step",
                accumulation_steps,
            ),
            "max_grad_norm": ("--gradient_clipping", "loop.max_grad_norm", self.max_grad_norm),
        }
        wrong = [
            f"{name}: {value}, but accelerate launch has {option} "
            f"{other if isinstance(other, str) else f'{other:g}'}. "
            "Leave the option out."
            for key, (option, name, value) in expected.items()
            if (other := options.get(key, value)) != value
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))


SHORT_TYPES = ("bfloat16", "float16")
"""Types that lose small updates by rounding. An Adam step of 1e-5 is below half the spacing of bfloat16 at weights
above 0.005."""


class Evaluation(Config):
    """Settings of a single evaluation without training."""

    micro_batch: int = Field(gt=0)
    """Sequences in one forward pass."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the forward pass. Weights have the type of the model."""

    @property
    def steps(self) -> int:
        """Always 0: nothing is trained."""
        return 0

    def check_accelerate(self, options: Mapping[str, str | float]) -> None:
        """Raise ConfigError if `accelerate launch` has another precision."""
        other = options.get("precision", self.precision)
        if other != self.precision:
            raise ConfigError(
                f"evaluation.precision: {self.precision}, but accelerate launch has --mixed_precision {other}. "
                "Leave the option out."
            )


def check_weight_type(precision: str, field: str, model: ModelConfig, places: Places) -> None:
    """Raise ConfigError if weights have one 16-bit type and `precision` is the other, as each layer would round
    twice."""
    of_weights = model.weight_type(places)
    if {precision, of_weights} == {"bfloat16", "float16"}:
        raise ConfigError(
            f"{field}: {precision!r}, but the dtype of the model's weights is {of_weights!r}. "
            "Use the same type for both."
        )


def check_trained_type(model: ModelConfig, places: Places) -> None:
    """Raise ConfigError if training would update weights in bfloat16 or float16."""
    if (kind := model.trained_type(places)) in SHORT_TYPES:
        raise ConfigError(short_weights_message(kind))


def short_weights_message(kind: str) -> str:
    """Error message for trained weights in one of `SHORT_TYPES`."""
    return (
        f"model.dtype: {kind!r} for trained weights would lose updates smaller than its rounding. "
        'Use "dtype": "float32" with "precision": "bfloat16" in loop, or wrap the model in \'lora\'.'
    )


def require_device(precision: str, field: str) -> None:
    """Raise ConfigError if no device computes in `precision`."""
    if precision != "float16":
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"{field}: 'float16' needs a GPU. Use 'bfloat16' or 'float32'.")
