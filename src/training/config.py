"""Settings of the training loop, or of an evaluation without training.
How often to log is not part of an experiment."""

from collections.abc import Collection, Mapping
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from src.errors import ConfigError
from src.experiments.config import Config, Places, unknown_text
from src.experiments.interfaces import ModelConfig
from src.support import distributed
from src.training.divergence.detector import Config as Divergence

POLYNOMIAL_END = 1e-7
"""Where transformers' polynomial schedule ends."""
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


class EarlyStopping(Config):
    """Stop after `patience` evaluations in a row that improve `loop.best_metric` by no more than `min_gain`."""

    patience: int = Field(gt=0)
    min_gain: float = Field(default=0.0, ge=0)


class LoopConfig(Config):
    """One optimizer step reads `sequences_per_step` sequences, `micro_batch` at a time in each process.

    The number of micro-batches that each process accumulates follows from these two and the number of processes.
    """

    steps: int = Field(gt=0)
    sequences_per_step: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    optimizer: Literal["adamw", "adamw_scale", "adafactor"] = "adamw"
    """See src/training/optim/optimizers.py.
    The learning rate of the other two is a share of the size of the weights."""
    learning_rate: float = Field(gt=0)
    schedule: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """Named as in transformers."""
    warmup_rate: float = Field(default=0.0, ge=0, lt=1)
    """Share of `steps` during which the learning rate rises, from 0 where `warmup_start` says nothing else."""
    warmup_start: float = Field(default=0.0, ge=0, le=1)
    """Share of `learning_rate` at the start of the warm-up.
    T5's schedule, 1/sqrt(max(step, warm-up)), is inverse_sqrt with 1."""
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of `learning_rate` at which linear and cosine end."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to matrices, not to biases and norms."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-6, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared logarithm of the softmax's denominator, of each token: 1e-4 for PaLM (Chowdhery et al.
    2022, section 5) and for T5 (`z_loss` of Mesh TensorFlow's Unitransformer)."""
    cross_entropy_chunk_tokens: int = Field(default=0, ge=0)
    """Tokens per chunk of the output projection and cross entropy, such as 1024. Only the logits of a chunk are in
    memory; they are recomputed in the backward pass. Sums are rounded differently. 0: one chunk."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the forward and backward pass; weights and optimizer have the type of the model."""
    group_by_length: bool = False
    """Whether micro-batches have samples of similar length, for less padding:
    the samples of 50 steps are sorted by length."""
    compile: bool = False
    """Whether the model's layers are compiled for training passes. Another rounding, and other draws of dropout."""
    eval_every: int = Field(gt=0)
    """Optimizer steps between evaluations; the last step is always evaluated."""
    also_at: list[PositiveInt] = []
    """Further steps to evaluate and save at, such as [2, 100]. Each counts as an evaluation for early stopping. Their
    checkpoints are deleted by --keep_last and --keep_every."""
    best_metric: str = "val_loss"
    best_mode: Literal["min", "max"] = "min"
    early_stopping: EarlyStopping | None = None
    divergence: Divergence = Divergence()

    @model_validator(mode="after")
    def _consistent(self) -> "LoopConfig":
        if self.sequences_per_step % self.micro_batch:
            raise ValueError(
                f"sequences_per_step = {self.sequences_per_step} is not "
                f"a multiple of micro_batch = {self.micro_batch}, so a step is no integer number of micro-batches."
            )
        beyond = [step for step in self.also_at if step > self.steps]
        if beyond:
            raise ValueError(f"also_at: step {beyond[0]} is after the last, {self.steps}.")
        if self.schedule == "polynomial" and self.learning_rate <= POLYNOMIAL_END:
            raise ValueError(f"schedule 'polynomial' falls to {POLYNOMIAL_END}, so learning_rate must be above it.")
        if self.schedule == "constant" and self.warmup_rate:
            raise ValueError(
                "schedule 'constant' has no warm-up: write 'constant_with_warmup', or leave warmup_rate out."
            )
        if self.warmup_start and not round(self.warmup_rate * self.steps):
            raise ValueError("warmup_start: there is no warm-up. Set warmup_rate, or leave warmup_start out.")
        if self.final_rate and self.schedule not in ("linear", "cosine"):
            raise ValueError(
                "final_rate is where 'linear' and 'cosine' end; "
                f"schedule {self.schedule!r} would ignore it. Leave it out."
            )
        return self

    @model_validator(mode="after")
    def _adafactor_heeds_all(self) -> "LoopConfig":
        if self.optimizer == "adafactor":
            ignored = [name for name in _ADAM if getattr(self, name) != type(self).model_fields[name].default]
            if ignored:
                raise ValueError(
                    f"{', '.join(ignored)}: "
                    "optimizer 'adafactor' has no such setting, and would ignore it. Leave it out."
                )
        return self

    def check(self, scores: Collection[str]) -> None:
        """Check the settings against the number of processes and the `scores` that the recipe evaluates.

        Raises:
            ConfigError: there are more processes than micro-batches in a step, or nobody measures `best_metric`.
        """
        name, _, part = self.best_metric.partition("/")  # "em/nq": over the rows of one source, where metrics are given
        if name not in scores or (part and name.startswith("val_")):
            raise ConfigError(f"loop.best_metric: {unknown_text('score', self.best_metric, scores)}")
        count, shares = self.sequences_per_step // self.micro_batch, distributed.world_size()
        if count < shares:
            raise ConfigError(
                f"loop.sequences_per_step: {self.sequences_per_step} sequences in micro-batches of "
                f"{self.micro_batch} make {count} "
                f"micro-batches a step, fewer than the {shares} processes with data of their own. Start at most "
                f"{count * distributed.world_size() // shares}, or lower loop.micro_batch."
            )

    def check_accelerate(self, options: Mapping[str, str | float]) -> None:
        """Refuse options of `accelerate launch` that contradict the experiment.
        options: from `src.launch.accelerate_env`.

        Raises:
            ConfigError: names both values.
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
            f"{name} is {value}, but accelerate launch {option} says "
            f"{other if isinstance(other, str) else f'{other:g}'}. "
            "Leave it out there: the experiment decides."
            for key, (option, name, value) in expected.items()
            if (other := options.get(key, value)) != value
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))


SHORT_TYPES = ("bfloat16", "float16")
"""Types that lose small updates by rounding:
an Adam step of 1e-5 is below half the spacing of bfloat16 at weights above 0.005."""


class Evaluation(Config):
    """The model is evaluated once, without training."""

    micro_batch: int = Field(gt=0)
    """Sequences in one forward pass."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the forward pass; weights have the type of the model."""

    @property
    def steps(self) -> int:
        """Always 0: nothing is trained."""
        return 0

    def check_accelerate(self, options: Mapping[str, str | float]) -> None:
        """Raises ConfigError if `accelerate launch` has another precision."""
        other = options.get("precision", self.precision)
        if other != self.precision:
            raise ConfigError(
                f"evaluation.precision is {self.precision}, but accelerate launch --mixed_precision says {other}. "
                "Leave it out there: the experiment decides."
            )


def check_weight_type(precision: str, field: str, model: ModelConfig, places: Places) -> None:
    """Raises ConfigError where weights in one of the short types would be computed with in the other:
    each layer rounds twice."""
    of_weights = model.weight_type(places)
    if {precision, of_weights} == {"bfloat16", "float16"}:
        raise ConfigError(
            f"{field}: {precision!r}, and the model's weights are in {of_weights!r} (dtype). Write the same for both."
        )


def check_trained_type(model: ModelConfig, places: Places) -> None:
    """Raises ConfigError where training would update weights in bfloat16 or float16."""
    if (kind := model.trained_type(places)) in SHORT_TYPES:
        raise ConfigError(short_weights_message(kind))


def short_weights_message(kind: str) -> str:
    """For trained weights in one of `SHORT_TYPES`."""
    return (
        f"model.dtype: {kind!r}, and these weights are trained: updates smaller than their rounding would be lost. "
        'Use "dtype": "float32" with "precision": "bfloat16" in loop, or put \'lora\' around the model.'
    )


def require_device(precision: str, field: str) -> None:
    """Raises ConfigError where there is no device that computes in `precision`."""
    if precision != "float16":
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"{field}: 'float16' needs a GPU, and this machine has no GPU. Use 'bfloat16' or 'float32'.")
