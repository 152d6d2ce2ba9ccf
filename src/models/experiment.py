"""The model that another experiment trained, named by that experiment's id."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

import src.config
from src.config import Places, Problems, join
from src.errors import CheckpointError, ConfigError
from src.files import read_json
from src.models.architecture import Architecture
from src.registry import MODELS, Part, bind

if TYPE_CHECKING:
    from torch import nn


class Config(src.config.Config):
    """Whose model, and from which of its checkpoints."""

    exp_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Id of the parent, as `ref` writes it: when the parent changes, so does the child's id."""
    checkpoint: Literal["last", "best"] = "last"


def build(config: Config, places: Places) -> "nn.Module":
    """The parent's model with the weights of the checkpoint; `name_or_path` is the checkpoint's tokenizer.

    Raises:
        ConfigError: the parent is unknown, or not trained yet.
        CheckpointError: the checkpoint is gone, damaged, or does not fit its own description.
    """
    from src.experiments import checkpoints
    from src.experiments.saved import read_status

    run = places.runs / config.exp_id
    folder = None
    if config.checkpoint == "best":
        folder = checkpoints.best(run)
    elif read_status(run)["state"] == "done":
        folder = checkpoints.last(run)
    if folder is None:
        raise ConfigError(
            f"{run}: the {config.checkpoint} checkpoint of parent {config.exp_id} is not there. Train the parent first: add --with-parents."
        )
    return from_checkpoint(folder, f"parent {config.exp_id}", places)


def from_checkpoint(folder: Path, who: str, places: Places) -> "nn.Module":
    """The model of a checkpoint, with its weights; `name_or_path` is the checkpoint's tokenizer. Messages begin with `who`.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit its own description.
        UserError: what the model is built on cannot be had.
    """
    from src.weights import load_trained

    model = _bound(read_json(folder / "model.json", CheckpointError), who)(places)
    load_trained(model, folder / "model.safetensors")
    model.name_or_path = str(folder / "tokenizer")
    return model


def check(config: Config, places: Places) -> None:
    """Look for the parent's dict; the parent need not be trained yet.

    Raises:
        ConfigError: nobody knows the id, or its dict is not one of an experiment.
    """
    _parent(config, places)


def architecture(config: Config, places: Places) -> Architecture | None:
    """The parent's."""
    return _parent(config, places).ask("architecture", places)


def _parent(config: Config, places: Places) -> Part:
    """The model part of the parent's dict, from its save directory or else from exp_configs.py."""
    written = places.runs / config.exp_id / "exp_dict.json"
    raw = read_json(written, ConfigError) if written.is_file() else places.experiments.get(config.exp_id)
    if raw is None:
        raise ConfigError(
            f"parent {config.exp_id}: neither under {places.runs} nor in exp_configs.py. "
            "Name an experiment that is, with ref(...), and train it with --with-parents."
        )
    if not isinstance(raw, dict):
        raise ConfigError(f"parent {config.exp_id}: {written}: expected a dict, got {type(raw).__name__}.")
    if "model" not in raw:
        raise ConfigError(f"parent {config.exp_id}: its experiment has no 'model'.")
    return _bound(raw["model"], f"parent {config.exp_id}")


def _bound(raw: Any, who: str) -> Part:
    try:
        return bind(MODELS, raw)
    except Problems as error:
        lines = (f"{who}: {join('model', path)}: {text}" for path, text in error.found)
        raise ConfigError("\n".join(lines)) from None
