"""Averages of weights for `src.models.export`: the mean of several checkpoints, or the moving average of a training.

The mean of checkpoints 1 ... n of a run is (w(1) + ... + w(n)) / n for each trained tensor, as in stochastic weight
averaging (Izmailov et al. 2018, arXiv 1803.05407) and in the last 5 or 20 checkpoints of the Transformer (Vaswani et
al. 2017, section 6.1). Sums are in float64. Tensors of integers are those of the last checkpoint. With adapters, the
mean is that of their factors, not of their products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import CheckpointError, ConfigError
from src.files import defect
from src.runs.checkpoints import checkpoints
from src.support.weights import AVERAGE, load_parameters, read_tensors, require_equal_shapes, trained_state

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Average:
    """Weights to export instead of those of a checkpoint. Exactly one field is set."""

    last: int | None = None
    """Mean of this number of newest checkpoints."""
    steps: Sequence[int] = ()
    """Mean of the checkpoints of these steps."""
    moving: bool = False
    """The moving average of `loop.ema`."""

    def load_into(self, model: Any, source: Path, folder: Path) -> None:
        """Replace the trained weights of `model`. source: the run; folder: its newest checkpoint, that of `model`.

        Raises:
            ConfigError: `source` is not a run, or `folder` has no moving average.
            CheckpointError: a checkpoint is missing, damaged or for another model.
        """
        if self.moving:
            if not (folder / AVERAGE).exists():
                raise ConfigError(f"--ema: {folder} has no {AVERAGE}. Train with loop.ema, or use --average_last.")
            parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
            load_parameters(parameters, read_tensors(folder / AVERAGE), folder / AVERAGE)
            return
        if source == folder:
            raise ConfigError(f"{source}: expected a run, as an average needs several checkpoints. Name the run.")
        files = [path / "model.safetensors" for path in self._folders(source)]
        load_parameters(trained_state(model), mean_tensors(files), files[-1])

    def _folders(self, run: Path) -> list[Path]:
        """The checkpoints to average, by step."""
        if self.steps:
            return [checkpoints.of_step(run, step) for step in sorted(set(self.steps))]
        complete_paths = [path for path in checkpoints.list_all(run) if defect(path) is None]
        if self.last is None or not 0 < self.last <= len(complete_paths):
            steps = ", ".join(str(checkpoints.step_of(path)) for path in complete_paths)
            raise CheckpointError(
                f"{run}: has {len(complete_paths)} complete checkpoints (steps {steps}), but --average_last is "
                f"{self.last}. Use fewer, or train the run again with --keep_last or --keep_every."
            )
        return complete_paths[-self.last :]


def mean_tensors(files: Sequence[Path]) -> "dict[str, Tensor]":
    """The mean of the tensors in safetensors files with equal names and shapes, in their types.

    Raises:
        CheckpointError: a file is missing or damaged, or differs from the first in names or shapes.
    """
    import torch

    sums: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors = read_tensors(file)
        if not sums:
            sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in tensors.items()}
        require_equal_shapes(sums, tensors, file)
        for name, tensor in tensors.items():
            sums[name] += tensor
    return {
        name: (sums[name] / len(files)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
