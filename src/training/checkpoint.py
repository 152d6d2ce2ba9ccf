"""Tensors and state in and out of a checkpoint folder. Which folder is whole, last or best: src/experiments/checkpoints.py.

A folder holds model.safetensors (trained weights only), optimizer.safetensors, state.json, model.json (the `model` part of the
experiment, defaults written out), tokenizer/ and manifest.json with the hash of every file. Nothing is pickled.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from src import files
from src.errors import CheckpointError, RunError
from src.experiments import checkpoints
from src.weights import load_trained, trained_weights

_SEPARATOR = "::"


def save(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], about: "About") -> Path:
    """Write the checkpoint of `step`, whole or not at all.

    Raises:
        RunError: the disk refuses. Earlier checkpoints are untouched.
    """
    final = checkpoints.folder(run, step)
    try:
        with files.new_directory(final) as folder:
            save_file(trained_weights(model), folder / "model.safetensors")
            save_file(optimizer_tensors(model, optimizer), folder / "optimizer.safetensors")
            files.write_json(folder / "state.json", state)
            files.write_json(folder / "model.json", about.model)
            _save_tokenizer(about.tokenizer, folder / "tokenizer")
    except SafetensorError as error:
        raise RunError(f"{final}: cannot write: {error}. Nothing complete was lost; make room or choose another folder.") from None
    return final


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if "os error" in str(error):  # the tokenizers library raises a bare Exception with what the disk said
            raise RunError(f"{folder}: cannot write: {error}. Nothing complete was lost; make room or choose another folder.") from None
        raise


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put the checkpoint in `folder` into `model` and `optimizer` (both mutated); returns its state.

    Raises:
        CheckpointError: it is a checkpoint of another model or optimizer.
    """
    load_trained(model, folder / "model.safetensors")
    _load_optimizer(folder / "optimizer.safetensors", model, optimizer)
    return files.read_json(folder / "state.json", CheckpointError)


class About:
    """What stands in a checkpoint besides the loop's state: it makes the folder loadable on its own."""

    def __init__(self, model: dict[str, Any], tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: {"blocks.0.mlp.weight::exp_avg": tensor, …}."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}{_SEPARATOR}{key}": torch.as_tensor(value).contiguous()
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def _load_optimizer(file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(model.named_parameters())
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in load_file(file).items():
        name, entry = key.rsplit(_SEPARATOR, 1)
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in owned:
            raise CheckpointError(f"{file}: has state for {name!r}, which this model does not train.")
        # AdamW keeps its step count on the CPU, everything shaped like the parameter beside it.
        device = parameter.device if value.shape == parameter.shape and value.ndim else value.device
        optimizer.state[parameter][entry] = value.to(device)
