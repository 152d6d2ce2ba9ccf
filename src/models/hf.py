"""A pretrained causal language model from a folder or from the local Hugging Face cache. Never downloads."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

import src.config
from src.config import Places
from src.errors import CheckpointError, ConfigError
from src.files import read_json
from src.models.architecture import Architecture, from_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weight files that transformers looks for, in its order; each may instead be an index of shards."""


class Config(src.config.Config):
    """Which model, and the type of its weights in memory."""

    path: str = Field(min_length=1)
    """Hub id such as "bigcode/starcoderbase-1b", or a folder made by save_pretrained."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    revision: str | None = None
    """Branch, tag or commit of the hub id; None for main."""


def build(config: Config, places: Places) -> "PreTrainedModel":
    """The model with its weights, ready to train or to freeze.

    Raises:
        ConfigError: it is not on this machine; says how to get it.
        CheckpointError: its weights are incomplete or damaged.
    """
    import pickle

    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    check(config, places)
    folder = _folder(config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, config.dtype), local_files_only=True, output_loading_info=True
        )
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{_weights(folder)}: damaged or of another model ({first}). Get it again.") from error
    model, report = loaded
    if report["missing_keys"]:
        # transformers would go on with random numbers in their place.
        raise CheckpointError(f"{_weights(folder)}: incomplete: {', '.join(sorted(report['missing_keys'])[:3])} missing. Get it again.")
    return model


def check(config: Config, places: Places) -> None:
    """Look for the model's files.

    Raises:
        ConfigError: they are not on this machine; says how to get them.
        CheckpointError: some are missing.
    """
    del places  # a hub id or an own folder, not a prepared data set
    folder = _folder(config)
    if Path(config.path).is_dir() and config.revision is not None:
        raise ConfigError(f"{config.path!r} is a folder, so revision {config.revision!r} would be ignored. Remove it, or name a hub id.")
    weights = _weights(folder)
    if weights is None:
        raise CheckpointError(f"{folder}: no weights here. Expected {' or '.join(WEIGHTS)}.")
    if weights.suffix == ".json":
        for shard in sorted(set(read_json(weights, CheckpointError).get("weight_map", {}).values())):
            if not (folder / shard).is_file():
                raise CheckpointError(f"{folder / shard}: missing, though {weights.name} lists it. Get it again.")


def architecture(config: Config, places: Places) -> Architecture | None:
    """The sizes written in config.json; None where it has none that we know.

    Raises:
        ConfigError: the model is not on this machine.
    """
    del places
    return from_dict(read_json(_folder(config) / "config.json", ConfigError))


def _folder(config: Config) -> Path:
    """The folder that has the model's config.json."""
    given = Path(config.path)
    if given.is_dir():
        if not (given / "config.json").is_file():
            raise ConfigError(f"{config.path!r} is a folder without a config.json. Name one that save_pretrained made.")
        return given
    repository = _cache() / f"models--{config.path.replace('/', '--')}"
    name = config.revision or "main"
    reference = repository / "refs" / name
    found = repository / "snapshots" / (reference.read_text().strip() if reference.is_file() else name)
    if not (found / "config.json").is_file():
        what = f"{config.path!r}" + (f" at revision {config.revision!r}" if config.revision else "")
        command = f"hf download {config.path}" + (f" --revision {config.revision}" if config.revision else "")
        raise ConfigError(
            f"{what} is neither a folder nor in the local Hugging Face cache. Get it once with `{command}` "
            "(gated models: `hf auth login` first), or give a folder as the model's path."
        )
    return found


def _cache() -> Path:
    """Hugging Face's cache of the hub, by its own environment variables; importing huggingface_hub to ask takes a sixth of a second."""
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    hub = Path(os.environ.get("HF_HOME", home)) / "hub"
    return Path(os.environ.get("HF_HUB_CACHE", hub)).expanduser()


def _weights(folder: Path) -> Path | None:
    """The file, or the index of files, that transformers will load from `folder`."""
    candidates = [folder / f"{name}{suffix}" for name in WEIGHTS for suffix in ("", ".index.json")]
    return next((path for path in candidates if path.is_file()), None)
