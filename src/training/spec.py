"""What a recipe passes to the training loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from src.experiments.dataset_protocols import Dataset
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.loss import Loss
from src.training.parallel.engine import Engine
from src.training.validation import count_loss_tokens


class Experience(Protocol):
    """What a training makes for itself to read, such as rollouts of its model. The order of its data set decides when.

    All methods are collective.
    """

    def begin(self, engine: Engine) -> None:
        """Called once, when the engine has the weights that the training starts or continues from."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What a restart needs besides the order's cursor. Saved as experience.safetensors in each checkpoint.

        The same on all ranks, else the training stops: gather what each has made, as a restart may have another number
        of ranks.
        """
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `tensors` gave, before `begin`."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase of its making in this process, since the last call."""
        ...


@dataclass(frozen=True)
class TrainSpec:
    """A training, as a recipe passes it to the loop."""

    model: nn.Module
    about: CheckpointMetadata
    train: Dataset
    inputs: Mapping[str, str]
    """Fingerprints of the training's inputs by name. They must not change between starts."""
    loss: Loss
    """(model, batch) -> summed loss, and named sums to report if it has any; see `training.loss.Loss`."""
    evaluate: Callable[[Accelerator], Mapping[str, float]]
    """Scores of the model as it stands, the same on every rank. Called on every rank, in eval mode."""
    finish: Callable[[Accelerator], Mapping[str, float]] | None = None
    """Like `evaluate`, but called once after training, when the last checkpoint is written;
    called again if it was interrupted."""
    finish_with_best: bool = False
    """Whether `finish` is called with the best weights by `loop.best_metric`, instead of the last ones."""
    count: Callable[[Mapping[str, Tensor]], float] = count_loss_tokens
    """What the loss of a batch is a sum over: its tokens, or its conversations, pairs or weights. A step minimises the
    sum of losses over the sum of counts of the global batch, however that is cut into micro-batches."""
    experience: Experience | None = None
    dropout: bool = True
    """Whether the model trains in training mode.
    A policy does not: its ratios would be of other distributions than it has sampled from."""
