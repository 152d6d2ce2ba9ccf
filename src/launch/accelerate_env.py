"""Translate the options of `accelerate launch` into those of our command line.

They arrive as environment variables (accelerate/utils/launch.py, version 1.15). `take_choices` returns how the model is
sharded; settings that belong to the experiment are compared with it later; unsupported options are refused.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from src.errors import ConfigError
from src.files import ROOT

RESOURCES = ROOT / "resources"
_STAGES = {
    ("1", "none", "none"): "ds_config_zero1.json",
    ("2", "none", "none"): "ds_config_zero2.json",
    ("3", "none", "none"): "ds_config_zero3.json",
    ("3", "cpu", "cpu"): "ds_config_zero3_offload.json",
}
_ZERO = "ACCELERATE_DEEPSPEED_"
_SHAPE = {_ZERO + "ZERO_STAGE": "2", _ZERO + "OFFLOAD_OPTIMIZER_DEVICE": "none", _ZERO + "OFFLOAD_PARAM_DEVICE": "none"}
"""Variables that choose a ZeRO stage without a JSON file, with accelerate's defaults."""
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
_REQUIRED_VALUES = {
    "ACCELERATE_USE_MEGATRON_LM": "false",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "false",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "",
    "FSDP_VERSION": "2",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_IGNORED_MODULES": "",
}
"""Variable -> its only supported value. Those of FSDP apply only with --use_fsdp."""
_HARMLESS = ("ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY")


@dataclass(frozen=True)
class Choices:
    """Choices made on the command line of `accelerate launch`, or on ours."""

    deepspeed: Path | None = None
    """As --deepspeed."""
    fsdp: bool = False
    """As --fsdp."""
    settings: dict[str, str | float] = field(default_factory=dict)
    """Settings that belong to the experiment: precision, gradient_accumulation_steps and max_grad_norm, if given."""


def take_choices(
    environment: MutableMapping[str, str], processes: int, deepspeed: Path | None = None, fsdp: bool = False
) -> Choices:
    """The choices of `accelerate launch` and of our own options `deepspeed` and `fsdp`, for `processes` processes.

    Removes accelerate's variables from `environment`, so that neither accelerate nor transformers acts on them. `--cpu`
    hides the GPUs.

    Raises:
        ConfigError: an option is not supported, or contradicts another.
    """
    zero, sharded = _is_on(environment, "ACCELERATE_USE_DEEPSPEED"), _is_on(environment, "ACCELERATE_USE_FSDP")
    messages = [
        f"accelerate launch --{name.removeprefix('ACCELERATE_').lower()}: "
        f"expected {expected or 'nothing'}, got {value}. Only the number of processes, "
        "the precision, --use_deepspeed and --use_fsdp are taken from accelerate: write the rest in the experiment."
        for name, expected in _REQUIRED_VALUES.items()
        if (sharded or not name.startswith("FSDP_"))
        and (value := environment.get(name, "").lower()) not in ("", expected)
        if (name, value) != ("FSDP_RESHARD_AFTER_FORWARD", "full_shard")
    ]
    if messages:
        raise ConfigError("\n".join(messages))
    if (zero or sharded) and (deepspeed or fsdp):
        ours, theirs = "--deepspeed" if deepspeed else "--fsdp", "--use_deepspeed" if zero else "--use_fsdp"
        raise ConfigError(f"accelerate launch {theirs} and trainval.py {ours}: give one of them.")
    if processes == 1:
        _check_process_count(environment)
    path, settings = _deepspeed_json(environment) if zero else None, _read_settings(environment)
    if _is_on(environment, "ACCELERATE_USE_CPU"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    for name in list(environment):
        if (name.startswith("ACCELERATE_") and name not in _HARMLESS) or (sharded and name.startswith("FSDP_")):
            del environment[name]
    return Choices(path or deepspeed, sharded or fsdp, settings)


def _is_on(environment: MutableMapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("true", "1", "yes")


def _deepspeed_json(environment: MutableMapping[str, str]) -> Path:
    config_file = environment.get(_ZERO + "CONFIG_FILE", "none")
    stage_options = {name: environment[name] for name in _SHAPE if environment.get(name, "none") != "none"}
    if config_file != "none":
        if stage_options:
            names = " and ".join("--" + name.removeprefix(_ZERO).lower() for name in stage_options)
            raise ConfigError(
                f"accelerate launch --deepspeed_config_file {config_file}: {names} belong in that file. Leave them out."
            )
        return Path(config_file)
    stage, optimizer, weights = (environment.get(name, default) for name, default in _SHAPE.items())
    if (stage, optimizer, weights) not in _STAGES:
        raise ConfigError(
            f"accelerate launch --zero_stage {stage} --offload_optimizer_device {optimizer} "
            f"--offload_param_device {weights}: expected one of {', '.join(' '.join(each) for each in _STAGES)}. "
            "For other settings, give a JSON file with --deepspeed_config_file."
        )
    return RESOURCES / _STAGES[stage, optimizer, weights]


def _check_process_count(environment: MutableMapping[str, str]) -> None:
    """Refuse --cpu with several processes: accelerate sets their rendezvous address, but starts only one."""
    if (
        _is_on(environment, "ACCELERATE_USE_CPU")
        and environment.get("MASTER_ADDR") == "127.0.0.1"
        and "MASTER_PORT" in environment
    ):
        raise ConfigError(
            "accelerate launch --cpu starts one process whatever --num_processes says. Write --multi_gpu in "
            "place of --cpu, which starts them without a GPU too, or --num_processes 1 with MASTER_ADDR unset."
        )


def _read_settings(environment: MutableMapping[str, str]) -> dict[str, str | float]:
    """Settings in the environment. The precision "no" counts as not set: it is also accelerate's default."""
    settings: dict[str, str | float] = {}
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision != "no":
        settings["precision"] = _PRECISIONS.get(precision, precision)
    for name, variable in (
        ("gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS"),
        ("max_grad_norm", "GRADIENT_CLIPPING"),
    ):
        value = environment.get("ACCELERATE_" + variable, "auto").lower()
        if value not in ("auto", "none", ""):
            try:
                settings[name] = float(value)
            except ValueError:
                raise ConfigError(
                    f"accelerate launch --{variable.lower()}: expected a number or auto, got {value!r}."
                ) from None
    return settings
