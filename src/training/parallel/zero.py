"""DeepSpeed ZeRO (Rajbhandari et al. 2020): processes share optimizer states (stage 1), gradients (2) and weights (3).

The JSON file of --deepspeed sets only the parallelism. Batch sizes, clipping, precision and learning rate are set by
the experiment.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from src import files
from src.errors import CheckpointError, ConfigError
from src.files import read_json
from src.support import distributed
from src.support.weights import read_tensors, trained_weights
from src.training.checkpointing import checkpoint, zero_layout
from src.training.config import LoopConfig
from src.training.optim import optimizers
from src.training.parallel.engine import Engine

SHARDS = "zero"
_NUMBERS = (
    *(
        "amp",
        "data_types",
        "prescale_gradients",
        "gradient_predivide_factor",
        "communication_data_type",
        "sparse_gradients",
    ),
    *(
        "curriculum_learning",
        "data_efficiency",
        "progressive_layer_drop",
        "eigenvalue",
        "quantize_training",
        "compression_training",
    ),
    *("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients"),
    *("zero_optimization.zero_quantized_nontrainable_weights", "zero_optimization.zenflow", "torch_autocast"),
)
"""Keys that change results. The file is not part of the experiment, so it cannot set them."""


def fill_settings(path: Path, config: LoopConfig) -> dict[str, Any]:
    """Read the JSON file `path` and fill in the settings of the experiment in place of "auto".

    Raises:
        ConfigError: the file has no ZeRO stage or contradicts the experiment. The message has each such key.
    """
    settings = read_json(path, ConfigError)
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(settings).__name__}.")
    stage = (
        settings.get("zero_optimization", {}).get("stage")
        if isinstance(settings.get("zero_optimization"), dict)
        else None
    )
    if stage not in (1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage: expected 1, 2 or 3, got {json.dumps(stage)}.")
    # Passes per step, including padding.
    count = -(-(config.sequences_per_step // config.micro_batch) // distributed.world_size())
    expected: dict[str, Any] = {
        "train_batch_size": count * config.micro_batch * distributed.world_size(),
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": count,
        "gradient_clipping": config.max_grad_norm,
        "bf16.enabled": False,
        "fp16.enabled": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization.compute_grad_norm": True,  # needed by `drop`
    }
    flat = _flat(settings)
    wrong = [
        f"{key}: {json.dumps(flat[key])}, but the experiment has {json.dumps(value)}"
        for key, value in expected.items()
        if flat.get(key, "auto") not in ("auto", value)
    ]
    wrong += [
        f"{key}: {json.dumps(settings[key])}, but the experiment has {value}"
        for key, value in _experiment_settings(config).items()
        if settings.get(key, "auto") != "auto"
    ]
    wrong += [
        f"{key}: {json.dumps(value)} changes results, but is not set by the experiment"
        for key, value in {**settings, **flat}.items()
        if key in _NUMBERS and value not in ("auto", None) and value is not False
    ]
    if wrong:
        raise ConfigError("\n".join(f'{path}: {text}. Remove it, or use "auto".' for text in wrong))
    # As in every engine, the loop clips, autocast sets the precision, and weights are float32.
    return {
        "steps_per_print": 2**62,
        **_without_auto({key: value for key, value in settings.items() if key not in ("bf16", "fp16")}),
        **{key: value for key, value in expected.items() if "." not in key},
        "gradient_clipping": 0.0,
    }


def _experiment_settings(config: LoopConfig) -> dict[str, str]:
    """Description of the experiment's optimizer and schedule, which DeepSpeed does not build."""
    betas = f"betas {config.adam_beta1:g} and {config.adam_beta2:g}, epsilon {config.adam_epsilon:g}"
    return {
        "optimizer": f"AdamW: learning rate {config.learning_rate:g}, {betas}, weight decay {config.weight_decay:g}",
        "scheduler": f"{config.schedule!r} with loop.warmup_rate {config.warmup_rate:g}",
    }


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _without_auto(nested: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in nested.items()
        if value != "auto"
    }


class ZeroEngine(Engine):
    """Saves optimizer states as DeepSpeed's own shards. Another world size consolidates them before loading."""

    shards_gradients = True

    def __init__(self, accelerator: Accelerator, module: nn.Module, config: LoopConfig, path: Path) -> None:
        super().__init__(accelerator, module, config)
        import deepspeed

        from src.training.checkpointing.zero_writer import ShardWriter

        settings = fill_settings(path, config)
        self.stage = settings["zero_optimization"]["stage"]
        self.name, self.sharded = f"zero{self.stage}", self.stage == 3
        # On CPUs DeepSpeed would compile its own all-reduce. torch's lock on it outlives a killed process and blocks
        # later starts, and the all-reduce waits forever for a dead process.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        distributed.ensure_group()
        deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False)
        if self.sharded and accelerator.mixed_precision == "bf16":
            release_conv1d_weights(module)
        adamw = optimizers.build_optimizer(module, config, accelerator.device)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=module, optimizer=adamw, config=settings)
        self.model = self.engine
        self._moments_linked = False
        self.writer = self.engine.checkpoint_engine = ShardWriter()
        # DeepSpeed would copy a recovery script into each checkpoint, which consolidate.py replaces, and could fail on
        # a full disk.
        self.engine._copy_recovery_script = lambda save_path: None

    def accumulation_context(self, last: bool) -> Any:
        """Stages 2 and 3 reduce gradients after every pass, stage 1 after the last."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`."""
        self.engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self.engine.step()  # counts the pass without an update

    def gradients(self) -> Iterable[Tensor]:
        """This process's shards, as DeepSpeed stores them between the last backward pass and its step."""
        if self.stage == 3 and self.optimizer.offload_optimizer:
            return [part.grad for part in self.optimizer.fp32_partitioned_groups_flat if part.grad is not None]
        if self.stage < 3 and self.optimizer.cpu_offload:
            return [part.grad for part in self.optimizer.single_partition_of_fp32_groups if part.grad is not None]
        return [part for parts in self.optimizer.averaged_gradients.values() for part in parts]

    def step(self) -> None:
        """Run DeepSpeed's step."""
        self.engine.step()
        if not self._moments_linked:
            self._link_moments()

    def _link_moments(self) -> None:
        """Make DeepSpeed link each parameter's moments, as stages 1 and 2 link only once, in the first step, when only
        one group has moments."""
        self._moments_linked = True
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def skip_step(self) -> None:
        """Skip the step through DeepSpeed's overflow handling, by a NaN norm."""
        name = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        nan = torch.tensor(math.nan)
        setattr(self.optimizer, name, lambda: [nan] if self.stage == 3 else nan)
        try:
            self.engine.step()
        finally:
            delattr(self.optimizer, name)
        assert self.optimizer.overflow, "DeepSpeed did not skip the step"

    def model_state(self) -> dict[str, Tensor]:
        """See `Engine`. Stage 3 gathers one weight at a time."""
        if self.stage < 3:
            return super().model_state()
        import deepspeed

        parameters, state = dict(self.module.named_parameters()), {}
        for name, tensor in trained_weights(self.module).items():
            parameter = parameters.get(name)
            with deepspeed.zero.GatheredParameters([parameter] if parameter is not None else []):
                if distributed.is_main():
                    state[name] = (tensor if parameter is None else parameter.detach()).to("cpu", copy=True)
        return state

    def load_weights(self, file: Path) -> None:
        """See `Engine`. Stage 3 gathers one parameter at a time."""
        if self.stage < 3:
            return super().load_weights(file)
        import deepspeed

        with distributed.raise_together():
            saved = read_tensors(file) if distributed.is_main() else {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    if name in saved:  # tied parameters are saved once
                        parameter.data.copy_(saved[name])
        return None

    def optimizer_state(self) -> None:
        """Return None, as `save_shards` writes the state."""

    def save_shards(self, folder: Path) -> None:
        """Write DeepSpeed's files below zero/, and their topology."""
        self.engine.save_checkpoint(str(folder), tag=SHARDS, save_latest=False, exclude_frozen_parameters=True)
        self.writer.check()
        frozen = sum(not parameter.requires_grad for parameter in self.module.parameters())
        topology = {"stage": self.stage, "world_size": distributed.world_size(), "frozen": frozen}
        distributed.broadcast_from_rank0(lambda: files.write_json(folder / SHARDS / zero_layout.TOPOLOGY, topology))

    def load_optimizer(self, folder: Path) -> None:
        """Load shards of the same world size and stage, else optimizer.safetensors, which is consolidated if
        missing."""
        topology = folder / SHARDS / zero_layout.TOPOLOGY
        now = {"stage": self.stage, "world_size": distributed.world_size()}
        with distributed.raise_together():
            saved = read_json(topology, CheckpointError, {})
            same = isinstance(saved, dict) and now.items() <= saved.items()
        if same:
            # Not strict, as frozen weights are not saved.
            self.engine.load_checkpoint(str(folder), tag=SHARDS, load_module_strict=False)
        else:
            checkpoint.ensure_whole_optimizer(folder)
            self._load_parts(folder)

    def _load_parts(self, folder: Path) -> None:
        """Load this process's shard of the moments, by parameter name."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        with distributed.raise_together():
            entries = list(checkpoint.optimizer_entries(folder, self.module))
        step = max((float(value) for _, key, value in entries if key == "step"), default=0.0)
        shards = (
            self.optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else self.optimizer.single_partition_of_fp32_groups
        )
        for part in shards:  # torch's AdamW creates moments only in its first step
            moments = {key: torch.zeros_like(part) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.optimizer.state[part] = {"step": torch.tensor(step), **moments}
        self._link_moments()
        for parameter, key, value in entries:
            if key != "step" and self.stage == 3:  # sharded here, as DeepSpeed's own sharding fails for unequal sizes
                safe_set_local_optimizer_state(parameter, _own_part(value).to(parameter.device), key)
            elif key != "step":
                safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)


def release_conv1d_weights(model: nn.Module) -> None:
    """Make GPT-2's layers save no gathered weights for the backward pass, like DeepSpeed's linear layers. In place.

    Autograd would save autocast's bfloat16 copies of the weights, half the size of the model that stage 3 shards.
    """
    for module in model.modules():
        if isinstance(module, Conv1D):
            module.forward = partial(_forward_conv1d, module)


def _forward_conv1d(module: Conv1D, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_autocast_enabled(x.device.type):
        rows = rows.to(torch.get_autocast_dtype(x.device.type))
    return _ReleasedAddmm.apply(module.bias, rows, module.weight).view(*x.shape[:-1], module.nf)


class _ReleasedAddmm(torch.autograd.Function):
    """`torch.addmm(bias_O, x_NI, weight_IO)` that saves the parameter, which DeepSpeed frees and gathers, instead of a
    copy."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight  # not a saved tensor: --offload_activations would copy the gathered weight
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None)
        return torch.addmm(bias.detach(), x, weight.detach())  # detached, as autocast caches copies of parameters

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x,) = grads, ctx.saved_tensors
        return (
            grad.sum(0) if ctx.needs_input_grad[0] else None,
            grad @ ctx.weight.to(grad.dtype).t() if ctx.needs_input_grad[1] else None,
            x.t() @ grad if ctx.needs_input_grad[2] else None,
        )


def _own_part(whole: Tensor) -> Tensor:
    """This process's stage-3 shard of a parameter or its moments: flat, of equal size, the last one zero-padded."""
    share = -(-whole.numel() // distributed.world_size())
    flat = torch.nn.functional.pad(whole.flatten(), (0, share * distributed.world_size() - whole.numel()))
    return flat[distributed.rank() * share :][:share]
