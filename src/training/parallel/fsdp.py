"""Fully sharded data parallelism (FSDP2): each process has a shard of every weight, gradient and optimizer state.

With replicas (HSDP) the processes form equal groups of adjacent ranks. Each group shards one model, and gradients are
averaged between groups.
"""

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.pytorch_utils import Conv1D

from src.support import distributed
from src.support.deferred import Recording, take_recording
from src.support.weights import require_equal_shapes, trained_state, trained_weights
from src.training.checkpointing import checkpoint, safetensors_stream
from src.training.checkpointing.shard_store import ShardStore
from src.training.config import LoopConfig
from src.training.optim import optimizers
from src.training.parallel.engine import Engine

log = logging.getLogger(__name__)
_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)
_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


class FSDPEngine(Engine):
    """Gathers layers one at a time. Each process saves and loads its shard of a checkpoint, at any world size.

    With precision bfloat16, the weights that autocast would cast are gathered in bfloat16, so that autograd saves no
    full layer. Results are bitwise equal: other weights, such as those of norms, are gathered in float32, and gradients
    are averaged in float32.
    """

    name = "fsdp"
    sharded = True
    shards_gradients = True

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        config: LoopConfig,
        replicas: int = 1,
        sharded_gradients: bool = False,
    ) -> None:
        """See `Options.fsdp_replicas` and `Options.fsdp_sharded_gradients`."""
        super().__init__(accelerator, module, config)
        self.sharded_gradients = sharded_gradients
        root = shard_model(module, accelerator.device, accelerator.mixed_precision == "bf16", replicas)
        if hasattr(module, "generate"):  # it does not call the root's forward, which gathers
            register_fsdp_forward_method(module, "generate")
        self.model, self.root = module, root
        self.shards = ShardStore()
        self.optimizer = optimizers.build_optimizer(module, config, accelerator.device)

    def accumulation_context(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are reduced only in the last pass, or with `sharded_gradients` after each pass; then only shards
        are accumulated."""
        self.root.set_requires_gradient_sync(last or self.sharded_gradients)
        self.root.set_requires_all_reduce(last)  # between replicas
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`."""
        loss.backward()

    def gradients(self) -> Iterable[Tensor]:
        """This process's shards."""
        return [_local(p.grad) for p in self.module.parameters() if p.grad is not None]

    def own_gradients(self) -> Iterable[Tensor]:
        """Shards without those of replicas."""
        return [
            _local(p.grad) for p in self.module.parameters() if p.grad is not None and not distributed.is_copy(p.grad)
        ]

    def stage_shards(self) -> Callable[[Path], None] | None:
        """See `Engine`. No process needs memory for more than its shards."""
        return self.shards.stage(
            trained_weights(self.module), checkpoint.optimizer_tensors(self.module, self.optimizer)
        )

    def load_weights(self, file: Path) -> None:
        """Each process reads its shard."""
        with distributed.raise_together():
            state = trained_state(self.module)
            require_equal_shapes(state, safetensors_stream.read(file), file)
        self.shards.load(file.parent, state)

    def load_optimizer(self, folder: Path) -> None:
        """Each process reads its shard, from FSDP2 shards of any world size or from optimizer.safetensors."""
        self.shards.load_optimizer(folder, self.module, self.optimizer)


def shard_model(
    module: nn.Module, device: torch.device, bfloat16: bool, replicas: int = 1, frozen: bool = False
) -> FSDPModule:
    """Shard a model in place. If it was built without weights, compute this process's shard of them. Collective.

    bfloat16: whether to gather the weights that autocast would cast in this type. frozen: whether to hold no gathered
    weights after a forward pass, as no backward pass follows.

    Raises:
        CheckpointError: a file with weights is damaged.
    """
    distributed.ensure_group()
    recording = take_recording(module)
    deferred = {name: weight.detach() for name, weight in module.named_parameters() if weight.is_meta}
    if recording:
        log.info("Each process computes its shard of the weights, one tensor at a time.")
        for folder in recording.folders(module):
            log.info("%s: each process loads its shard of these weights.", folder)
    shape = (replicas, distributed.world_size() // replicas) if replicas > 1 else (distributed.world_size(),)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    for layer in sharded_layers(module):
        if bfloat16 and (cast := cast_modules(layer, module)):
            fully_shard(cast, mesh=mesh, mp_policy=_BFLOAT16)
        fully_shard(layer, mesh=mesh)
    root = fully_shard(module, mesh=mesh, reshard_after_forward=True if frozen else None)
    assert isinstance(root, FSDPModule)
    if recording:
        _fill(module, device, recording, deferred)
    return root


def _fill(module: nn.Module, device: torch.device, recording: Recording, deferred: Mapping[str, Tensor]) -> None:
    """Compute the shard of the weights that a sharded model was built without; other tensors do not change.
    deferred: these weights by name, on the meta device."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        return itertools.chain(module.named_parameters(), module.named_buffers(remove_duplicate=False))

    there = {name: tensor.detach().clone() for name, tensor in tensors() if not tensor.is_meta}
    module.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in tensors():
            if name in there:
                tensor.copy_(there[name])
    parameters = dict(module.named_parameters())
    with distributed.raise_together(), torch.no_grad():
        for name, tensor in deferred.items():
            shard = parameters[name]
            assert isinstance(shard, DTensor)
            shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
            if shape[0]:
                shard.to_local().copy_(recording.compute_rows(tensor, offset[0], offset[0] + shape[0]))


def sharded_layers(module: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one at a time: entries of module lists, without nested ones such as T5's
    sublayers."""
    layers: list[nn.Module] = []
    inner: set[int] = set()
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and id(part) not in inner:
            layers += [layer for layer in part if any(True for _ in layer.parameters())]
            inner |= {id(below) for below in part.modules()}
    return layers


def cast_modules(layer: nn.Module, model: nn.Module) -> list[nn.Module]:
    """The modules of a layer with weights that autocast casts and that no other module uses."""
    uses = Counter(id(weight) for part in model.modules() for weight in part.parameters(recurse=False))
    modules = [part for part in layer.modules() if isinstance(part, _CAST)]
    return [part for part in modules if all(uses[id(weight)] == 1 for weight in part.parameters(recurse=False))]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
