"""Estimate the GPU memory and duration of a training, without a GPU and without memory for the weights.

The passes of a step run on torch's fake tensors through the real model, loss, autocast and autograd. A dispatch mode
counts the bytes of every live storage, which covers saved activations, recomputation and copies by the loss. Sharding
and buffers of engines are added by formulas.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from transformers.pytorch_utils import Conv1D

from src.errors import ConfigError
from src.experiments.config import unknown_text
from src.files import read_json
from src.training.config import LoopConfig
from src.training.loss import Loss
from src.training.monitoring import flops
from src.training.optim import parameter_groups
from src.training.optim.parameter_groups import Settings
from src.training.parallel import fsdp, memory
from src.training.parallel.compilation import layers
from src.training.parallel.live_storages import FakeStorages

MFU = 0.4
"""Share of a GPU's peak that is assumed for the duration by default."""
_ZERO_SIZES = {"reduce_bucket_size": 500_000_000, "stage3_max_live_parameters": 1_000_000_000}
"""Default sizes of DeepSpeed's buckets, in elements."""
Groups = Mapping[Settings, Mapping[str, nn.Parameter]]
"""Trained parameters by settings and name, from `parameter_groups.split`."""


@dataclass(frozen=True)
class Machines:
    """The hardware and engine of a planned training."""

    gpus: int
    gpu: str
    """Part of the device's name, such as "H100"."""
    fsdp: bool = False
    deepspeed: Path | None = None
    gradient_checkpointing: str | None = None
    """"full" or "selective"; see `memory.checkpoint_layers`."""
    fsdp_sharded_gradients: bool = False
    mfu: float = MFU
    """Assumed share of the GPU's peak."""

    def shares_gradients(self, passes: int) -> bool:
        """Whether each GPU has only a shard of the gradients. With FSDP2 they can be unsharded until the last of
        several passes."""
        if self.deepspeed:
            return self.zero_settings()["stage"] >= 2
        return self.fsdp and (passes == 1 or self.fsdp_sharded_gradients)

    def zero_settings(self) -> dict[str, Any]:
        """Read `zero_optimization` from the JSON of --deepspeed.

        Raises:
            ConfigError: it is missing or has no valid stage.
        """
        settings = read_json(self.deepspeed or Path(), ConfigError)
        zero = settings.get("zero_optimization") if isinstance(settings, dict) else None
        if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
            stage = json.dumps(zero.get("stage") if isinstance(zero, dict) else None)
            raise ConfigError(f"{self.deepspeed}: zero_optimization.stage: expected 1, 2 or 3, got {stage}.")
        return zero

    def peak(self, precision: str) -> float | None:
        """Peak FLOP/s of one GPU; None if unknown in this precision.

        Raises:
            ConfigError: the GPU is not in the table.
        """
        rates = [flops.peak_flops(self.gpu, kind) for kind in ("bfloat16", "float16")]
        if rates == [None, None]:
            raise ConfigError(f"--gpu: {unknown_text('GPU', self.gpu, flops.PEAKS)}")
        return flops.peak_flops(self.gpu, precision)


@dataclass(frozen=True)
class MemoryPlan:
    """Peak memory of one GPU, and duration of the training."""

    parameters: int
    trained: int
    parts: Mapping[str, int]
    """Bytes by `PARTS`, at the peak of the total."""
    operations: int | None
    """Floating-point operations of a step, on all GPUs; None if the model's are unknown."""
    steps: int
    tokens: int
    """Tokens of all steps, if each sequence has the maximum length of the data."""
    checkpoint_bytes: int
    """Bytes of the trained weights and the optimizer's state in one checkpoint."""
    tokens_per_second: float | None
    """Total of all GPUs, at `Machines.mfu`; None if the peak or the operations are unknown."""
    hours: float | None
    groups: Mapping[str, int]
    """Number of trained parameters by label and optimizer of `parameter_groups.Settings`, if there are several."""

    @property
    def total(self) -> int:
        """Total in bytes."""
        return sum(self.parts.values())


def plan(
    model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], config: LoopConfig, machines: Machines
) -> MemoryPlan:
    """Plan the training of a model on the meta device, on micro-batches like `batch`.

    Raises:
        ConfigError: the GPU or an option is not supported, or there are more GPUs than micro-batches in a step.
    """
    groups = parameter_groups.split(model, config)
    count_operations, peak = flops.batch_flops(model), machines.peak(config.precision)
    count = config.sequences_per_step // config.micro_batch
    if count < machines.gpus:
        raise ConfigError(
            f"--gpus {machines.gpus}: a step has {count} micro-batches. "
            f"Use at most {count} GPUs, or lower loop.micro_batch."
        )
    passes = -(-count // machines.gpus)
    if machines.gradient_checkpointing:
        memory.checkpoint_layers(model, machines.gradient_checkpointing)
    storages = FakeStorages(vocabulary(model), machines.gpus if machines.shares_gradients(passes) else 1)
    if config.precision == "bfloat16":
        storages.gathered = {
            id(weight) for part in _cast_modules(model, machines) for weight in part.parameters(recurse=False)
        }
    parts = _share(model, pass_peak(storages, model, loss, batch, config.precision, passes), passes, config, machines)
    work = count_operations(batch) if count_operations else None
    read = sum(int(batch[name].sum()) for name in ("attention_mask", "context_mask") if name in batch)
    rate = machines.mfu * peak / work if peak and work else None  # micro-batches per second of one GPU
    every, trained_bytes = list(model.parameters()), sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return MemoryPlan(
        parameters=sum(parameter.numel() for parameter in every),
        trained=sum(parameter.numel() for parameter in every if parameter.requires_grad),
        parts=parts,
        operations=work * count if work else None,
        steps=config.steps,
        tokens=config.steps * count * read,
        checkpoint_bytes=optimizer_bytes(groups) + (2 if config.ema else 1) * trained_bytes,
        tokens_per_second=rate * read * machines.gpus if rate else None,
        hours=config.steps * passes / rate / 3600 if rate else None,
        groups=_group_sizes(groups),
    )


def _group_sizes(groups: Groups) -> dict[str, int]:
    """Number of parameters by label of `loop.groups` and optimizer."""
    sizes: dict[str, int] = {}
    for settings, parameters in groups.items():
        label = f"{settings.label or 'rest'} ({settings.optimizer})"
        sizes[label] = sizes.get(label, 0) + sum(parameter.numel() for parameter in parameters.values())
    return sizes if len(sizes) > 1 else {}


def _cast_modules(model: nn.Module, machines: Machines) -> list[nn.Module]:
    """Modules without a saved bfloat16 copy for the backward pass, as the engine gathers them again."""
    if machines.fsdp:
        return [part for layer in fsdp.sharded_layers(model) for part in fsdp.cast_modules(layer, model)]
    settings = machines.zero_settings() if machines.deepspeed else {}
    if settings.get("stage") != 3:
        return []
    # Linear by DeepSpeed, Conv1D by zero.py.
    kinds = (Conv1D, nn.Linear) if settings.get("memory_efficient_linear", True) else (Conv1D,)
    return [part for part in model.modules() if isinstance(part, kinds)]


def pass_peak(
    storages: FakeStorages, model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], precision: str, passes: int
) -> dict[str, int]:
    """Bytes by part at the peak of the forward and backward passes of a step, for an unsharded model. `model` becomes
    fake."""
    _make_fake(model, storages)
    batch = {name: storages.fake(value) if value.is_meta else value for name, value in batch.items()}
    for value in batch.values():
        storages.hold(value, "activations")
    model.train()
    dtype = torch.float16 if precision == "float16" else torch.bfloat16
    with storages, storages.device:
        for _ in range(min(passes, 2)):  # the second pass has the gradients of the first
            with torch.autocast("cpu", dtype, enabled=precision != "float32"):
                loss_sum = loss(model, batch)
                loss_sum = loss_sum[0] if isinstance(loss_sum, tuple) else loss_sum
            # `backward` would disable the function mode, including during recomputation.
            _engine_run_backward(
                (loss_sum,),
                (torch.ones_like(loss_sum),),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
            del loss_sum
    return storages.at_peak


def _make_fake(model: nn.Module, storages: FakeStorages) -> None:
    """Replace all weights and buffers of `model` by fake tensors, preserving ties, and count them."""
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    stand_in = storages.fake(tensor)
                    fakes[id(tensor)] = (
                        nn.Parameter(stand_in, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stand_in
                    )
                    storages.hold(fakes[id(tensor)], "weights")
                    storages._entries[fakes[id(tensor)].untyped_storage()]["gathered"] = id(tensor) in storages.gathered
                    if tensor.requires_grad:
                        parameter: Any = fakes[id(tensor)]
                        parameter.register_post_accumulate_grad_hook(
                            lambda weight: storages.hold(weight.grad, "gradients")
                        )
                tensors[name] = fakes[id(tensor)]  # type: ignore[assignment]  of the same kind as before


def _share(
    model: nn.Module, peak: Mapping[str, int], passes: int, config: LoopConfig, machines: Machines
) -> dict[str, int]:
    """Bytes by part on one GPU with the engine's sharding: at the peak of a pass, or of the optimizer step if
    larger."""
    groups = parameter_groups.split(model, config)
    gradients, N = sum(p.nbytes for p in model.parameters() if p.requires_grad), machines.gpus
    average = gradients if config.ema else 0
    parts = {**peak, "optimizer": optimizer_bytes(groups) + average}
    step = {
        **parts,
        "gradients": gradients,
        "activations": 0,
        "logits": 0,
        "copies": 0 if config.optimizers == {"adafactor"} else gradients,
    }
    if machines.deepspeed:
        parts, step = (_zero(each, machines.zero_settings(), gradients, N) for each in (parts, step))
    elif machines.fsdp:
        layer, rest = _layer_sizes(model)
        whole = parts["gradients"] // (N if machines.shares_gradients(passes) else 1)
        parts, step = (
            {**each, **{name: each[name] // N for name in ("weights", "optimizer")}} for each in (parts, step)
        )
        # Two layers are gathered, and gradients of two layers are being reduced.
        parts |= {"gradients": whole, "copies": parts["copies"] + 2 * rest + 4 * layer}
        step |= {"gradients": step["gradients"] // N, "copies": step["copies"] // N}
    elif N > 1 and passes > 1:
        parts["copies"] += gradients  # DDP's buckets, in addition to the gradients of earlier passes
    return max(parts, step, key=lambda each: sum(each.values()))


def _zero(parts: Mapping[str, int], settings: Mapping[str, Any], gradients: int, N: int) -> dict[str, int]:
    """Apply the sharding of DeepSpeed's stages. Each process has a copy of the weights that it updates, and a bucket of
    gradients."""
    stage, most = settings["stage"], {name: 4 * _number(settings, name, usual) for name, usual in _ZERO_SIZES.items()}
    bucket = min(gradients, most["reduce_bucket_size"])
    shares = dict(parts)
    is_offloaded = (settings.get("offload_optimizer") or {}).get("device", "none") != "none"
    shares["optimizer"] = 0 if is_offloaded else parts["optimizer"] // N
    shares["copies"] = parts["copies"] + bucket + (0 if is_offloaded else gradients // N)
    if stage >= 2:
        shares["gradients"] = parts["gradients"] // N
    if stage == 3:
        shares["weights"] = parts["weights"] // N
        shares["copies"] += min(parts["weights"], most["stage3_max_live_parameters"])
    return shares


def _number(settings: Mapping[str, Any], name: str, usual: int) -> int:
    return usual if settings.get(name, "auto") == "auto" else int(settings[name])


def _layer_sizes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the largest layer that FSDP2 gathers, and of parameters outside of layers, which are unsharded in a
    pass."""
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers(model)]
    return max(sizes, default=0), sum(parameter.nbytes for parameter in model.parameters()) - sum(sizes)


def optimizer_bytes(groups: Groups) -> int:
    """Bytes of the optimizer's state: two moments per weight, one with muon, or with adafactor the means of rows and
    columns."""
    return sum(
        _state_bytes(parameter, settings.optimizer) for settings, each in groups.items() for parameter in each.values()
    )


def _state_bytes(p: nn.Parameter, optimizer: str) -> int:
    if optimizer == "adafactor":
        return 4 * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.ndim > 1 else p.numel())
    return p.nbytes if optimizer == "muon" else 2 * p.nbytes


def vocabulary(model: Any) -> int:
    """Rows of the output matrix; 0 without an output matrix."""
    head = getattr(getattr(model, "base", model), "get_output_embeddings", lambda: None)()
    return 0 if head is None else head.weight.shape[0]
