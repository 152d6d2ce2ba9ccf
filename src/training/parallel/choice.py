"""Chooses the engine from the command line, and checks its requirements."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from src.errors import ConfigError
from src.runs.context import Options
from src.support.weights import is_unfilled
from src.training.config import LoopConfig, require_device
from src.training.parallel import compilation, memory
from src.training.parallel.engine import DDPEngine, Engine

_INSTEAD = {
    "adamw_scale": "--fsdp instead of --deepspeed",
    "adafactor": "whole copies (neither --deepspeed nor --fsdp)",
}
"""How an optimizer that ZeRO cannot have shares a model."""


def build_accelerator(config: LoopConfig, options: Options) -> Accelerator:
    """Accelerate for this process, with the precision of `config`.

    Raises:
        ConfigError: float16 without a GPU, or with a shared model;
            an optimizer that needs whole tensors, with cut ones; the DeepSpeed json or the launcher says otherwise than
            the experiment; checkpoints are to be kept at steps at which none is written.
    """
    options.keep.check(options.save_intervals(config.eval_every))
    config.check_accelerate(options.launcher_settings)
    if config.precision == "float16" and (options.deepspeed or options.fsdp):
        raise ConfigError(
            "loop.precision: 'float16' trains whole models only. Use 'bfloat16', or leave out --deepspeed and --fsdp."
        )
    if (
        options.deepspeed and config.optimizer != "adamw"
    ):  # ZeRO joins parameters end to end: it has no tensor whose size could be taken
        raise ConfigError(
            f"loop.optimizer: {config.optimizer!r} needs to know each tensor's size, "
            f"and DeepSpeed shows it flat pieces of many. Use {_INSTEAD[config.optimizer]}, or 'adamw'."
        )
    if options.fsdp and config.optimizer == "adafactor":
        raise ConfigError(
            "loop.optimizer: 'adafactor' needs whole rows and columns, and --fsdp gives it parts. "
            "Leave out --fsdp (its state is small: each process can have it all), or use 'adamw_scale' or 'adamw'."
        )
    if options.deepspeed:
        from src.training.parallel.zero import fill_settings

        fill_settings(options.deepspeed, config)
    return plain_accelerator(config.precision, "loop.precision")


def plain_accelerator(precision: str, field: str) -> Accelerator:
    """Accelerate for this process, with `precision`; `field` names it in errors.

    On a CPU the process keeps freed memory from then on (`memory.reuse_freed_memory`).

    Raises:
        ConfigError: float16 without a GPU.
    """
    require_device(precision, field)
    gpu = torch.cuda.is_available()
    if not gpu:
        memory.reuse_freed_memory()
    # One process may run several experiments, each with its precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=not gpu, mixed_precision={"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[precision])


def change_layers(model: nn.Module, config: LoopConfig, options: Options) -> None:
    """Have the layers of `model`, with its weights in it or unfilled, compute as `config` and the command line say.
    Changed in place.

    Raises:
        ConfigError: it has no layers that could.
    """
    if config.compile:
        compilation.compile_layers(model)
    if options.gradient_checkpointing:
        memory.checkpoint_layers(model, options.gradient_checkpointing)


def build_engine(
    accelerator: Accelerator, model: nn.Module, config: LoopConfig, options: Options, checkpoint: Path | None = None
) -> Engine:
    """The engine that the command line asks for: DDP, FSDP2 or ZeRO. Collective.

    checkpoint: whose trained weights a model gets that is unfilled; another has them already.
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
