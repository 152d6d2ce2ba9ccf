"""The interface between recipes and the training loop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from accelerate import Accelerator
from torch import Tensor, nn

from src.experiments.dataset_protocols import Dataset
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.loss import Loss
from src.training.parallel.engine import Engine
from src.training.validation import SampleSums, count_loss_tokens


class Experience(Protocol):
    """Data that a training generates for itself, such as rollouts of its model. The order of its data set triggers it.

    All methods are collective.
    """

    def begin(self, engine: Engine) -> None:
        """Called once, when the engine has the weights at the start or resume of the training."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """The state to resume from, in addition to the order's cursor. Saved as experience.safetensors in each
        checkpoint.

        Must be gathered and equal on all ranks, as a restart can have another world size. Raises TrainingError if they
        differ.
        """
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`. Called before `begin`."""
        ...

    def seconds(self) -> Mapping[str, float]:
        """Seconds of each phase of the generation in this process since the last call."""
        ...


@dataclass(frozen=True)
class TrainSpec:
    """A training that a recipe passes to the loop."""

    model: nn.Module
    about: CheckpointMetadata
    train: Dataset
    inputs: Mapping[str, str]
    """Fingerprints of the training's inputs by name. They must not change between starts."""
    loss: Loss
    """(model, batch) -> summed loss, and optional named sums to report; see `training.loss.Loss`."""
    evaluate: Callable[..., Mapping[str, float]]
    """(accelerator) -> scores of the current model, equal on every rank. Called on every rank, in eval mode. With
    `record`, (accelerator, samples), a list to which it adds the `SampleSums` of all samples, if it knows them."""
    finish: Callable[[Accelerator], Mapping[str, float]] | None = None
    """Like `evaluate`, but called after the last checkpoint is written; called again if interrupted."""
    finish_with_best: bool = False
    """Whether `finish` uses the best weights by `loop.best_metric` instead of the last ones."""
    count: Callable[[Mapping[str, Tensor]], float] = count_loss_tokens
    """Divisor of the summed loss of a batch: its number of tokens, conversations or pairs, or its sum of weights. A
    step minimizes the sum of losses divided by the sum of counts of the global batch, independent of the
    micro-batch."""
    experience: Experience | None = None
    dropout: bool = True
    """Whether the model trains with dropout. False for policies, as ratios must refer to the sampling distribution."""
    record: Callable[..., None] | None = None
    """(finished steps, samples): records the evaluation at the last step. Collective."""

    def scores(self, accelerator: Accelerator, last_step: int | None) -> dict[str, float]:
        """Evaluate the model. last_step: finished steps, if this can be the last evaluation."""
        if last_step is None or self.record is None:
            return dict(self.evaluate(accelerator))
        samples: list[SampleSums] = []
        scores = dict(self.evaluate(accelerator, samples))
        self.record(last_step, samples=samples)
        return scores
