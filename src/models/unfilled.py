"""Build a pretrained transformers model without weights, which are read later from its safetensors files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import GenerationConfig

from src.support.deferred import Recording, read_tensor


def read_later(recording: Recording, build: Callable[[], Any], folder: Path, files: Sequence[Path]) -> Any:
    """Build a pretrained transformers model with parameters on the meta device and real buffers, in the block of
    `recording`.

    files: all weight files that transformers loads from `folder`.

    Raises:
        ValueError: the files cannot be read directly: not safetensors, or a weight is missing by name or shape; or
            transformers loads some weights in another type, or adapters.
        CheckpointError: a file is damaged.
    """
    if {path.suffix for path in files} != {".safetensors"} or (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder}: the weights are in other files.")
    saved_tensors: dict[str, Tensor] = {}
    holders: dict[str, Path] = {}
    for file in files:
        tensors = recording.read_later(file)
        saved_tensors |= tensors
        holders |= dict.fromkeys(tensors, file)
    with recording.pause():
        # `from_pretrained` draws no random numbers, but some constructors do.
        with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
            model = build()
            model.apply(lambda module: setattr(module, "_is_hf_initialized", False))
            model.initialize_weights()  # like `from_pretrained`, computes buffers in float32
        model.tie_weights()
        _untie(model, holders)
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name in saved_tensors and saved_tensors[name].shape == tensor.shape
    }
    ids = {id(tensor) for tensor in state.values()}
    if any(id(parameter) not in ids for parameter in model.parameters()) or model._get_dtype_plan(model.dtype):
        raise ValueError(f"{folder}: weights of the model are not in the files, or stay in float32.")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = str(folder)
    for name, tensor in state.items():
        tensor.detach().copy_(saved_tensors[name])
    return model.eval()


def _untie(model: nn.Module, holders: Mapping[str, Path]) -> None:
    """Untie weights that differ in the files. Transformers does so too, and T5 v1.1 needs it.

    holders: the file of each weight, by name.
    """
    first: dict[int, str] = {}
    parameters = [
        (name, parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in holders
    ]
    for name, parameter in parameters:
        first_name = first.setdefault(id(parameter), name)
        if first_name != name and not torch.equal(*(read_tensor(holders[n], n) for n in (first_name, name))):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(torch.empty_like(parameter)))
