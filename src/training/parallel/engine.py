"""Engines share the model, its gradients and its optimizer between processes. The loop uses only the methods of
`Engine`.

The gradient norm is computed here in the same way for every engine: in float64, so that sharding and the number of
processes do not change its float32 value, and clipping is bitwise equal everywhere.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from src.support import distributed
from src.support.weights import load_trained, trained_weights
from src.training.checkpointing import checkpoint
from src.training.config import LoopConfig
from src.training.optim import optimizers
from src.training.optim.adamw_scale import AdamWScale, l2_norms

_torch: Any = torch
"""For functions over lists of tensors, which have no type stubs."""


class BufferPool:
    """Reusable CPU buffers for copies of tensors, by name, as allocating new pages is slower than copying.

    Each call of `copies` overwrites the result of the previous call.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copies(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy the tensors; valid until the next call."""
        self._buffers = {name: self._copy(name, tensor.detach()) for name, tensor in tensors}
        return dict(self._buffers)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            return tensor.to("cpu", copy=True)
        return buffer.copy_(tensor)


class Engine(ABC):
    """Trains a model. `model` is the module for the loss; `optimizer` has the parameter groups for the learning
    rate."""

    name: str
    """Name for people, in the ledger."""
    sharded = False
    """Whether a forward pass is collective, so that all processes must run the same number. See
    `equalize_forward_passes`."""
    shards_gradients = False
    """Whether each process has a shard of the gradients."""
    model: nn.Module
    optimizer: Any

    def __init__(self, accelerator: Accelerator, module: nn.Module, config: LoopConfig) -> None:
        self.accelerator, self.module, self.config = accelerator, module, config
        self._weights, self._moments = BufferPool(), BufferPool()
        self.seed_generation: Callable[[], object] = lambda: None
        """Called at the start of a block of `generating`; set by the loop."""

    def equalize_forward_passes(self) -> None:
        """Make all ranks run the same number of forward passes, as sharded models would deadlock."""
        if self.sharded:
            for part in self.module.modules():
                if "num_passes" in vars(part):
                    vars(part)["num_passes"] = distributed.all_reduce_max

    @contextlib.contextmanager
    def generating(self) -> Iterator[nn.Module]:
        """Yield the model in eval mode and without gradients, for `generate`. Collective for sharded models.

        torch's generators are seeded at the start of the block, differently per process and equally after a restart.
        """
        was_training = self.module.training
        self.module.eval()
        self.seed_generation()
        try:
            with torch.no_grad(), self.accelerator.autocast():
                yield self.module
        finally:
            self.module.train(was_training)

    def accumulation_context(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context of one forward and backward pass. After the `last` pass of a step, gradients are the mean over
        processes."""
        return contextlib.nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`."""

    @abstractmethod
    def gradients(self) -> Iterable[Tensor]:
        """This process's gradients after the last `backward`; `clip` scales them in place."""

    def step(self) -> None:
        """Update the weights and clear the gradients. If the norm is not finite in float16, only the loss scale
        changes."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip_step(self) -> None:
        """Clear the gradients without an update."""
        self.optimizer.zero_grad()

    def own_gradients(self) -> Iterable[Tensor]:
        """The `gradients` without those that a process of lower rank also has, if the model is sharded."""
        return self.gradients()

    def norms(self) -> Tensor:
        """L2 norms, (K,) float64, of the K `own_gradients`, on their device, without synchronization."""
        return l2_norms([*self.own_gradients()])

    def weight_norms(self) -> Tensor:
        """Like `norms`, for the weights, if the optimizer uses them; else K is 0."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer.norms() if isinstance(optimizer, AdamWScale) else torch.zeros(0, dtype=torch.float64)

    def total_norm(self, norms: Sequence[float], weight_norms: Sequence[float] = ()) -> float:
        """L2 norm of all gradients from `norms`, rounded to float32. Collective.

        weight_norms: passed to `step`, which computes them if missing."""
        if weight_norms:
            getattr(self.optimizer, "optimizer", self.optimizer).measured_norms = list(weight_norms)
        square = math.fsum(norm**2 for norm in norms)
        (total,) = distributed.all_reduce_sum([square]) if self.shards_gradients else [square]
        return float(torch.tensor(math.sqrt(total), dtype=torch.float32))

    def norm(self) -> float:
        """Compute `total_norm`, synchronizing with the device. Collective."""
        return self.total_norm(self.norms().tolist())

    def clip(self, norm: float, max_norm: float) -> bool:
        """Clip the gradients to the norm `max_norm`; returns whether they were scaled."""
        if not (math.isfinite(norm) and norm > max_norm):
            return False
        if gradients := [*self.gradients()]:
            _torch._foreach_mul_(gradients, max_norm / norm)
        return True

    def model_state(self) -> dict[str, Tensor]:
        """Copy the unsharded trained weights to the CPU; valid until the next call. Collective; empty except on rank
        0."""
        return self._weights.copies(trained_weights(self.module).items()) if distributed.is_main() else {}

    def optimizer_state(self) -> dict[str, Tensor] | None:
        """Copy the optimizer's state, by parameter name, like `model_state`. None if `save_shards` writes it."""
        return (
            self._moments.copies(checkpoint.optimizer_tensors(self.module, self.optimizer).items())
            if distributed.is_main()
            else {}
        )

    def stage_shards(self) -> Callable[[Path], None] | None:
        """Copy this process's shards of weights and optimizer, and return a function that writes them while the
        training continues.

        The function is called in a thread of every process, with a folder on a shared disk. None for engines with
        `model_state`. Collective.
        """
        return None

    def save_shards(self, folder: Path) -> None:  # noqa: B027  most engines have no shards
        """Write the optimizer's shards into a folder on a shared disk. Collective."""

    def load_weights(self, file: Path) -> None:
        """Load the trained weights of a checkpoint's `file` into the model, after the last step, without changing the
        optimizer. Collective.

        Raises:
            CheckpointError: it was written for another model, or is damaged.
        """
        with distributed.raise_together():
            load_trained(self.module, file)

    @abstractmethod
    def load_optimizer(self, folder: Path) -> None:
        """Load the optimizer's state from a checkpoint, after the weights. Collective.

        Raises:
            CheckpointError: it was written for another model, or is damaged.
        """


class _WithUnusedParameter(nn.Module):
    """`model` and an empty unused parameter, as DDP warns if it searches for unused parameters and finds nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        like = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        # The last parameter, so that the buckets of the other parameters do not change.
        self.unused = nn.ParameterList([nn.Parameter(like.new_empty(0))])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class DDPEngine(Engine):
    """Every process has a full copy of the model; DistributedDataParallel averages the gradients."""

    name = "replicated"

    def __init__(self, accelerator: Accelerator, module: nn.Module, config: LoopConfig) -> None:
        super().__init__(accelerator, module, config)
        optimizer = optimizers.build_optimizer(module, config, accelerator.device)
        self.model, self.optimizer = (
            accelerator.prepare_model(module, evaluation_mode=True),
            accelerator.prepare_optimizer(optimizer, device_placement=False),  # it would copy the groups
        )
        if distributed.world_size() > 1:
            device = [accelerator.device.index] if accelerator.device.type == "cuda" else None
            # DDP rebuilds its buckets after the first step, and gloo's order of summation over three or more ranks
            # depends on the buckets, so a restarted run would differ in bits. find_unused_parameters prevents the
            # rebuild. Gradients are views of the buckets, so that a step with one pass has no second copy.
            self.model = DistributedDataParallel(
                _WithUnusedParameter(self.model),
                device_ids=device,
                find_unused_parameters=True,
                gradient_as_bucket_view=True,
            )
            self.model.forward_sync_buffers = False  # constants: masks and frequencies
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def backward(self, loss: Tensor, last: bool) -> None:
        """Run the backward pass, with a scaled loss in float16."""
        scaler = self.accelerator.scaler
        (scaler.scale(loss) if scaler else loss).backward()
        if last:
            self.accelerator.unscale_gradients()

    def accumulation_context(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are reduced only in the last pass."""
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)

    def gradients(self) -> Iterable[Tensor]:
        """Gradients of the trained parameters that were used."""
        return [p.grad for p in self.trained if p.grad is not None]

    def skip_step(self) -> None:
        """Clear the gradients, as after a step."""
        super().skip_step()
        if self.accelerator.scaler:
            self.accelerator.scaler.update()

    def load_optimizer(self, folder: Path) -> None:
        """Load optimizer.safetensors."""
        checkpoint.load_optimizer(folder, self.module, self.optimizer.optimizer)
