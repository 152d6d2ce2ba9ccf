"""Choose the engine from the command line, and check its requirements."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from src.errors import ConfigError
from src.runs.context import Options
from src.support import torch_settings
from src.support.weights import is_unfilled
from src.training.config import LoopConfig, require_device
from src.training.parallel import compilation, memory
from src.training.parallel.engine import DDPEngine, Engine

_INSTEAD = {
    "adamw_scale": "--fsdp instead of --deepspeed",
    "adafactor": "full copies (neither --deepspeed nor --fsdp)",
    "muon": "full copies (neither --deepspeed nor --fsdp)",
}
"""Alternatives to ZeRO for optimizers that it does not support."""
_NEEDS_COMPLETE = {"adafactor": "complete rows and columns", "muon": "complete matrices"}
"""Optimizers that FSDP2 does not support."""


def build_accelerator(config: LoopConfig, options: Options) -> Accelerator:
    """Build the Accelerator of this process, with the precision of `config`.

    Raises:
        ConfigError: float16 without a GPU or with a sharded model; an optimizer or `ema` that does not support
            sharding; the DeepSpeed JSON or the launcher contradicts the experiment; the retention rule names steps
            without checkpoints.
    """
    options.keep.check(options.save_intervals(config.eval_every))
    config.check_accelerate(options.launcher_settings)
    if config.precision == "float16" and (options.deepspeed or options.fsdp):
        raise ConfigError(
            "loop.precision: 'float16' does not support sharded models. "
            "Use 'bfloat16', or leave out --deepspeed and --fsdp."
        )
    for name in sorted(config.optimizers - {"adamw"}):
        where = "loop.optimizer" if name == config.optimizer else "loop.groups"
        if options.deepspeed:  # ZeRO concatenates parameters, so single tensors have no size
            raise ConfigError(
                f"{where}: {name!r} needs the size of each tensor, "
                f"but DeepSpeed concatenates tensors. Use {_INSTEAD[name]}, or 'adamw'."
            )
        if options.fsdp and name in _NEEDS_COMPLETE:
            raise ConfigError(
                f"{where}: {name!r} needs {_NEEDS_COMPLETE[name]}, but --fsdp shards them. "
                "Leave out --fsdp, or use 'adamw_scale' or 'adamw'."
            )
    if config.ema and (options.deepspeed or options.fsdp):
        raise ConfigError(
            f"loop.ema: {config.ema:g} needs full copies of the weights. Leave out --deepspeed and --fsdp, or set it "
            "to null and average checkpoints: python -m src.models.export RUN FOLDER --average_last N."
        )
    if options.deepspeed:
        from src.training.parallel.zero import fill_settings

        fill_settings(options.deepspeed, config)
    return plain_accelerator(config.precision, "loop.precision")


def plain_accelerator(precision: str, field: str) -> Accelerator:
    """Build the Accelerator of this process with `precision`. field: path of the precision for error messages.

    On a CPU, also configure the process to reuse freed memory (`memory.reuse_freed_memory`), and for bfloat16
    `torch_settings.speed_up_bfloat16`.

    Raises:
        ConfigError: float16 without a GPU.
    """
    require_device(precision, field)
    gpu = torch.cuda.is_available()
    if not gpu:
        memory.reuse_freed_memory()
    if precision == "bfloat16":
        torch_settings.speed_up_bfloat16()
    # A process can run several experiments with different precisions.
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=not gpu, mixed_precision={"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[precision])


def change_layers(model: nn.Module, config: LoopConfig, options: Options) -> None:
    """Apply compilation and gradient checkpointing to the layers of `model`, in place.

    Raises:
        ConfigError: the model has no layers for it.
    """
    if config.compile:
        compilation.compile_layers(model)
    if options.gradient_checkpointing:
        memory.checkpoint_layers(model, options.gradient_checkpointing)


def build_engine(
    accelerator: Accelerator, model: nn.Module, config: LoopConfig, options: Options, checkpoint: Path | None = None
) -> Engine:
    """Build the engine of the command line: DDP, FSDP2 or ZeRO. Collective.

    checkpoint: trained weights to load into a model without weights; other models already have them.
    """
    without_weights = is_unfilled(model)
    if options.deepspeed:
        from src.training.parallel.zero import ZeroEngine

        engine: Engine = ZeroEngine(accelerator, model, config, options.deepspeed)
    elif options.fsdp:
        from src.training.parallel.fsdp import FSDPEngine

        engine = FSDPEngine(accelerator, model, config, options.fsdp_replicas, options.fsdp_sharded_gradients)
    else:
        engine = DDPEngine(accelerator, model, config)
    if checkpoint and without_weights:
        engine.load_weights(checkpoint / "model.safetensors")
    engine.equalize_forward_passes()
    return engine
