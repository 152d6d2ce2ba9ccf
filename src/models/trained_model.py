"""The model that another experiment trained, named by that experiment's id."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from src.errors import CheckpointError, ConfigError, UserError
from src.experiments.config import Places, Problems, join
from src.experiments.interfaces import Architecture, ModelConfig
from src.experiments.kinds import FrameFormat, TokenizerSource
from src.experiments.registry import MODELS, bind
from src.files import read_json
from src.support.call_once import call_once

if TYPE_CHECKING:
    from torch import nn


class Config(ModelConfig):
    """The experiment and its checkpoint."""

    exp_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Id of the parent, set by `ref`. When the parent changes, so does the child's id."""
    checkpoint: Literal["last", "best"] = "last"
    """last: the newest checkpoint. best: the best by `loop.best_metric`."""
    step: int | None = Field(default=None, gt=0)
    """Continue the parent's training after this step, with its optimizer state and data position; null: start a new
    training from its weights. The checkpoint of the step must be kept: --keep_every."""

    @model_validator(mode="after")
    def _names_one_checkpoint(self) -> "Config":
        if self.step is not None and self.checkpoint != "last":
            raise ValueError(f"step: {self.step}, but checkpoint is {self.checkpoint!r}. Remove one of them.")
        return self

    def build(self, places: Places) -> "nn.Module":
        """Build the parent's model with the weights of the checkpoint; `name_or_path` is the checkpoint's tokenizer.

        Raises:
            ConfigError: the parent is unknown, or not trained yet.
            CheckpointError: the checkpoint is missing, damaged, or inconsistent.
        """
        if places.on_paper:
            return self.parent(places).build(places)
        folder = self._checkpoint_folder(places)
        if folder is None:
            raise ConfigError(
                f"{places.runs / self.exp_id}: no {self.step or self.checkpoint} checkpoint of parent {self.exp_id}. "
                "Train the parent first: add --with-parents."
            )
        return from_checkpoint(folder, f"parent {self.exp_id}", places)

    def identity(self, places: Places) -> str | None:
        """Digest of the weights that `build` loads and of the parent's base models; None if the parent is not trained
        yet.

        Raises:
            CheckpointError: a checkpoint is missing or damaged.
        """
        from src.runs import parents

        folder = self._checkpoint_folder(places)
        if folder is None:
            return None
        weights = parents.fingerprints({"name": "experiment", **self.model_dump()}, places.runs)
        below = _bind_model(read_json(folder / "model.json", CheckpointError), f"parent {self.exp_id}").fingerprint(
            places
        )
        return hashlib.sha256(json.dumps([weights, below], sort_keys=True).encode()).hexdigest()

    def tokenizer_folder(self, places: Places) -> Path | None:
        """Folder of the parent's tokenizer, which all its checkpoints have; None if there is no checkpoint yet."""
        from src.runs.checkpoints import checkpoints

        folders = checkpoints.list_all(places.runs / self.exp_id)
        return folders[-1] / "tokenizer" if folders else None

    def find_tokenizer(self, places: Places) -> TokenizerSource | None:
        """That of a checkpoint, or what the parent will be trained with."""
        try:
            parent = self.parent(places)
        except UserError:
            return None
        return super().find_tokenizer(places) or parent.find_tokenizer(places)

    def _checkpoint_folder(self, places: Places) -> Path | None:
        """The checkpoint that `build` loads; None if the parent is not trained yet."""
        from src.runs.checkpoints import checkpoints
        from src.runs.store import SavedRun

        run = SavedRun(places.runs / self.exp_id)
        if self.step is not None:
            return checkpoints.of_step(run.path, self.step) if checkpoints.list_all(run.path) else None
        if self.checkpoint == "best":
            return checkpoints.best(run.path)
        return checkpoints.last(run) if run.status["state"] == "done" else None

    def check(self, places: Places) -> None:
        self.parent(places)

    def architecture(self, places: Places) -> Architecture | None:
        return self.parent(places).architecture(places)

    def weight_type(self, places: Places) -> str | None:
        return self.parent(places).weight_type(places)

    def trained_type(self, places: Places) -> str | None:
        return self.parent(places).trained_type(places)

    def cache_bytes(self, places: Places, value_bytes: int) -> dict[str, int] | None:
        return self.parent(places).cache_bytes(places, value_bytes)

    def frame_format(self, places: Places) -> FrameFormat | None:
        return self.parent(places).frame_format(places)

    def kind(self, places: Places | None) -> str | None:
        return None if places is None else self.parent(places).kind(places)

    def parent(self, places: Places) -> ModelConfig:
        """The model config of the parent, from its save directory, else from exp_configs.py."""
        return call_once(self._read_parent, places)

    def _read_parent(self, places: Places) -> ModelConfig:
        return _bind_model(self.parent_experiment(places)["model"], f"parent {self.exp_id}")

    def parent_experiment(self, places: Places) -> dict[str, Any]:
        """The dict of the parent, from its save directory, else from exp_configs.py.

        Raises:
            ConfigError: there is none, or it trains no model.
        """
        saved_config = places.runs / self.exp_id / "exp_dict.json"
        raw = read_json(saved_config, ConfigError) if saved_config.is_file() else places.experiments.get(self.exp_id)
        if raw is None:
            raise ConfigError(
                f"parent {self.exp_id}: neither under {places.runs} nor in exp_configs.py. "
                "Refer to an existing experiment with ref(...), and train it with --with-parents."
            )
        if not isinstance(raw, dict):
            raise ConfigError(f"parent {self.exp_id}: {saved_config}: expected a dict, got {type(raw).__name__}.")
        if "model" not in raw:
            raise ConfigError(
                f"parent {self.exp_id}: the experiment has no 'model'. Refer to an experiment that trains one."
            )
        if raw.get("evaluation") is not None:
            raise ConfigError(f"parent {self.exp_id}: the experiment trains nothing. Use the model that it evaluates.")
        return raw


def from_checkpoint(folder: Path, subject: str, places: Places) -> "nn.Module":
    """Load the model of a checkpoint; its `name_or_path` is the checkpoint's tokenizer. subject: prefix of error
    messages.

    Raises:
        CheckpointError: the checkpoint is damaged or inconsistent.
        UserError: a part of the model is missing.
    """
    from src.support.deferred import read_file
    from src.support.weights import load_trained

    model = _bind_model(read_json(folder / "model.json", CheckpointError), subject).build(places)
    load_trained(model, folder / "model.safetensors", read_file)
    model.name_or_path = str(folder / "tokenizer")
    return model


def _bind_model(raw: Any, subject: str) -> ModelConfig:
    try:
        return bind(MODELS, raw)
    except Problems as error:
        lines = (f"{subject}: {join('model', path)}: {text}" for path, text in error.problems)
        raise ConfigError("\n".join(lines)) from None
