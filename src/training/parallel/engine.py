"""How the processes of one training share the model, its gradients and its optimizer.
The loop uses only the methods of `Engine`.

The norm of the gradients is taken here, alike in every mode: in float64, so that neither the number of processes nor
the way the parameters are cut changes the float32 that it is rounded to, and clipping gives the same bits everywhere.
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
from src.training.optim.adamw_scale import AdamWScale

_torch: Any = torch
"""Has functions over lists of tensors, which the type checker does not know."""


class BufferPool:
    """Reusable CPU buffers for copies of tensors, by name: allocating fresh pages is slower than copying.

    A call of `copies` overwrites what the call before it has returned.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copies(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies of the tensors, valid until the next call."""
        self._buffers = {name: self._copy(name, tensor.detach()) for name, tensor in tensors}
        return dict(self._buffers)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            return tensor.to("cpu", copy=True)
        return buffer.copy_(tensor)


class Engine(ABC):
    """A model that trains.
    `model` is what a loss calls; `optimizer` has the parameter groups that the learning rate is set in."""

    name: str
    """For people, in the ledger."""
    sharded = False
    """True where a forward pass is collective: every process must make as many as the others.
    See `equalize_forward_passes`."""
    shards_gradients = False
    """True where each process has a part of the gradients."""
    model: nn.Module
    optimizer: Any

    def __init__(self, accelerator: Accelerator, module: nn.Module, config: LoopConfig) -> None:
        self.accelerator, self.module, self.config = accelerator, module, config
        self._weights, self._moments = BufferPool(), BufferPool()
        self.seed_generation: Callable[[], object] = lambda: None
        """Called where a block of `generating` begins; the loop sets it."""

    def equalize_forward_passes(self) -> None:
        """Make every rank run the same number of forward passes: sharded models deadlock otherwise."""
        if self.sharded:
            for part in self.module.modules():
                if "num_passes" in vars(part):
                    vars(part)["num_passes"] = distributed.all_reduce_max

    @contextlib.contextmanager
    def generating(self) -> Iterator[nn.Module]:
        """Within the block: the model in eval mode and without gradients, for `generate`.
        Collective for sharded models.

        torch's generators are seeded where the block begins: each process draws numbers of its own, the same after any
        restart.
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
        """Around one forward and backward pass; after the `last` of a step gradients are the mean over processes."""
        return contextlib.nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`."""

    @abstractmethod
    def gradients(self) -> Iterable[Tensor]:
        """This process's gradients after the last `backward`. `clip` scales them in place."""

    @abstractmethod
    def step(self) -> None:
        """Update the weights and clear the gradients.
        Where the norm is not finite in float16, only the loss scale changes."""

    @abstractmethod
    def skip_step(self) -> None:
        """Clear the gradients without an update."""

    def own_gradients(self) -> Iterable[Tensor]:
        """Those of `gradients` that no process of lower rank has, too, where processes have parts of the model."""
        return self.gradients()

    def norms(self) -> Tensor:
        """(K,) float64: the L2 norms of the K `own_gradients`, on their device, which is not waited for."""
        gradients = [*self.own_gradients()]
        return (
            torch.stack(_torch._foreach_norm(gradients, 2, dtype=torch.float64))
            if gradients
            else torch.zeros(0, dtype=torch.float64)
        )

    def weight_norms(self) -> Tensor:
        """(K,) float64: like `norms`, of the weights, where the optimizer asks for them; else K is 0."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer.norms() if isinstance(optimizer, AdamWScale) else torch.zeros(0, dtype=torch.float64)

    def total_norm(self, norms: Sequence[float], weight_norms: Sequence[float] = ()) -> float:
        """L2 norm of the gradients over all parameters, rounded to float32, from `norms`. Collective.

        weight_norms: what `step` needs; it reads them itself where there are none."""
        if weight_norms:
            getattr(self.optimizer, "optimizer", self.optimizer).measured_norms = list(weight_norms)
        square = math.fsum(norm**2 for norm in norms)
        (total,) = distributed.all_reduce_sum([square]) if self.shards_gradients else [square]
        return float(torch.tensor(math.sqrt(total), dtype=torch.float32))

    def norm(self) -> float:
        """`total_norm`, read from the device on its own. Collective."""
        return self.total_norm(self.norms().tolist())

    def clip(self, norm: float, max_norm: float) -> bool:
        """Scale the gradients so that their norm is at most `max_norm`; returns whether they were scaled."""
        if not (math.isfinite(norm) and norm > max_norm):
            return False
        if gradients := [*self.gradients()]:
            _torch._foreach_mul_(gradients, max_norm / norm)
        return True

    def model_state(self) -> dict[str, Tensor]:
        """The trained weights, unsharded, copied to the CPU; valid until the next call.
        Collective; empty except on rank 0."""
        return self._weights.copies(trained_weights(self.module).items()) if distributed.is_main() else {}

    def optimizer_state(self) -> dict[str, Tensor] | None:
        """The optimizer's state by parameter name, like `model_state`. None if `save_shards` writes it."""
        return (
            self._moments.copies(checkpoint.optimizer_tensors(self.module, self.optimizer).items())
            if distributed.is_main()
            else {}
        )

    def stage_shards(self) -> Callable[[Path], None] | None:
        """Where each process writes its part of weights and optimizer while the training goes on:
        copies of them, as what writes them.

        It is called in a thread of every process, with a folder on a shared disk. None in other modes: see
        `model_state`. Collective.
        """
        return None

    def save_shards(self, folder: Path) -> None:  # noqa: B027  most modes have none
        """Write the optimizer's shards into a folder on a shared disk. Collective."""

    def load_weights(self, file: Path) -> None:
        """Put the trained weights of a checkpoint's `file` into the model, after the last step:
        the optimizer is not told. Collective.

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
    """`model` and an empty parameter that it never uses: DDP warns where it looks for such and there are none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        like = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        # Below the model, as the last: the place of each of the others in the buckets stays.
        self.unused = nn.ParameterList([nn.Parameter(like.new_empty(0))])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class DDPEngine(Engine):
    """Every process holds the whole model; DistributedDataParallel averages the gradients."""

    name = "replicated"

    def __init__(self, accelerator: Accelerator, module: nn.Module, config: LoopConfig) -> None:
        super().__init__(accelerator, module, config)
        optimizer = optimizers.build_optimizer(module, config, accelerator.device)
        self.model, self.optimizer = (
            accelerator.prepare_model(module, evaluation_mode=True),
            accelerator.prepare_optimizer(optimizer),
        )
        if distributed.world_size() > 1:
            device = [accelerator.device.index] if accelerator.device.type == "cuda" else None
            # DDP rebuilds its buckets after the first step, and gloo sums three or more ranks in an order that depends
            # on the buckets: a restarted run would not end with the same bits. Looking for unused parameters is what
            # keeps the buckets as they are. Gradients lie in the buckets, so that where a step is one pass there is no
            # second copy of them.
            self.model = DistributedDataParallel(
                _WithUnusedParameter(self.model),
                device_ids=device,
                find_unused_parameters=True,
                gradient_as_bucket_view=True,
            )
            self.model.forward_sync_buffers = False  # they are constants: masks and frequencies
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backward pass of the loss, scaled in float16."""
        scaler = self.accelerator.scaler
        (scaler.scale(loss) if scaler else loss).backward()
        if last:
            self.accelerator.unscale_gradients()

    def accumulation_context(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are reduced over processes only in the last pass."""
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)

    def gradients(self) -> Iterable[Tensor]:
        """Of every trained parameter that was used."""
        return [p.grad for p in self.trained if p.grad is not None]

    def step(self) -> None:
        """The optimizer's step, unless the loss scaler found an overflow."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip_step(self) -> None:
        """Clear the gradients, as after a step."""
        self.optimizer.zero_grad()
        if self.accelerator.scaler:
            self.accelerator.scaler.update()

    def load_optimizer(self, folder: Path) -> None:
        """From optimizer.safetensors."""
        checkpoint.load_optimizer(folder, self.module, self.optimizer.optimizer)
