"""The trained weights of a model: those that a checkpoint stores, and loading them. Models on the meta device, filled
later."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import CheckpointError
from src.files import reading

if TYPE_CHECKING:
    from torch import Tensor, nn

STORED_TENSORS = "stored_tensors"
"""Attribute of a model of transformers that was built unfilled: its tensors that are in the files of the folder
`name_or_path`, by name."""


def trained_weights(model: "nn.Module") -> "dict[str, Tensor]":
    """The entries of the state dict that training changes, detached and contiguous, by name.

    These are the parameters that require a gradient and the buffers of the modules that hold such a parameter.
    Frozen parameters are left out. Tensors that are tied are there once, under the name that comes first.
    """
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for prefix, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            names.update(f"{prefix}.{name}" if prefix else name for name, _ in module.named_buffers(recurse=False))
    # The state dict has the last word: it leaves out the buffers that are not persistent.
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name in names}


def load_trained(model: "nn.Module", file: Path) -> None:
    """Copy what `trained_weights` gave, saved as safetensors in `file`, into `model`, which is changed in place.

    Raises:
        CheckpointError: the file is missing or damaged, or its names or shapes are not those of the trained weights
            of `model`. `model` is unchanged then.
    """
    import torch

    saved = read_tensors(file)
    state = matching_state(model, file, {name: tensor.shape for name, tensor in saved.items()})
    with torch.no_grad():
        for name, tensor in saved.items():
            state[name].copy_(tensor)


def read_tensors(file: Path) -> "dict[str, Tensor]":
    """The tensors of a safetensors file, by name, on the CPU.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    from safetensors.torch import load_file

    with reading_tensors(file):
        return load_file(file)


@contextmanager
def reading_tensors(file: Path) -> Iterator[None]:
    """Turn any error of reading the safetensors file `file` into a CheckpointError that names it."""
    from safetensors import SafetensorError

    try:
        with reading(file, CheckpointError):
            yield
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file. Restore it from a copy.") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: damaged, not readable as safetensors ({error}). Restore it from a copy."
        ) from None


def matching_state(model: "nn.Module", file: Path, shapes: Mapping[str, Sequence[int]]) -> "dict[str, Tensor]":
    """The entries of the state dict that `trained_weights` names, to copy into. shapes: of the tensors in `file`, by
    name.

    Raises:
        CheckpointError: these are not the names or the shapes of the trained weights of `model`.
    """
    names = trained_weights(model)
    if shapes.keys() != names.keys():
        absent, extra = names.keys() - shapes.keys(), shapes.keys() - names.keys()
        raise CheckpointError(
            f"{file}: of another model. Missing: {summarize_names(absent)}; unexpected: {summarize_names(extra)}."
        )
    for name, tensor in names.items():
        if tuple(shapes[name]) != tuple(tensor.shape):
            raise CheckpointError(
                f"{file}: of another model. {name} is {list(shapes[name])}, expected {list(tensor.shape)}."
            )
    state = model.state_dict()
    return {name: state[name] for name in names}


def summarize_names(names: Iterable[str]) -> str:
    """The first three names, and the number of the rest."""
    sorted_names = sorted(names)
    more = f" and {len(sorted_names) - 3} more" if len(sorted_names) > 3 else ""
    return (", ".join(sorted_names[:3]) or "none") + more


def build_unfilled(build: Callable[[], Any], folder: Path, files: Sequence[Path]) -> Any | None:
    """Build a pretrained model of transformers with parameters on the meta device; its buffers have their values.

    FSDP2 shards it first, and each process then reads its part of `files`, which must be all weights in `folder`.
    None if the files cannot be read directly: not safetensors, or without a weight of the model by name or shape.

    Raises:
        CheckpointError: a file is damaged.
    """
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from transformers import GenerationConfig

    if {path.resolve() for path in folder.glob("*.safetensors")} != {path.resolve() for path in files}:
        return None
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()
    shapes: dict[str, list[int]] = {}
    holders: dict[str, Path] = {}
    for file in files:
        with reading_tensors(file), safe_open(file, "pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118  it is no dict
            holders |= dict.fromkeys(tensors.keys(), file)
    _untie(model, holders)
    state = model.state_dict(keep_vars=True)
    stored_names = [name for name, tensor in state.items() if shapes.get(name) == list(tensor.shape)]
    stored_ids = {id(state[name]) for name in stored_names}
    if any(id(parameter) not in stored_ids for parameter in model.parameters()):
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = str(folder)
    setattr(model, STORED_TENSORS, {name: state[name] for name in stored_names})
    return model.eval()


def _untie(model: "nn.Module", holders: Mapping[str, Path]) -> None:
    """Part weights that are tied, and that the files have with different numbers: transformers does so, and T5 v1.1
    counts on it.

    holders: the file of each weight, by name.
    """
    from safetensors import safe_open
    from torch import empty_like, equal, nn

    def read(name: str) -> "Tensor":
        with safe_open(holders[name], "pt") as tensors:
            return tensors.get_tensor(name)

    first: dict[int, str] = {}
    parameters = [
        (name, parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in holders
    ]
    for name, parameter in parameters:
        first_name = first.setdefault(id(parameter), name)
        if first_name != name and not equal(read(first_name), read(name)):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(empty_like(parameter)))


def is_unfilled(model: "nn.Module") -> bool:
    """Whether weights of it are not there yet: all, or those of a base."""
    return any(parameter.is_meta for parameter in model.parameters())


def stored_names(model: "nn.Module") -> dict[Path, dict[str, str]]:
    """Names of missing weights in the state dict of `model`, by their names in the files, by folder.

    Wrappers and adapters change names, but not the tensors.
    """
    state, names, tensor_ids = model.state_dict(keep_vars=True), {}, set()
    for part in model.modules():
        if STORED_TENSORS in vars(part):
            files = {id(tensor): name for name, tensor in getattr(part, STORED_TENSORS).items()}
            names[Path(str(part.name_or_path))] = {
                files[id(tensor)]: name for name, tensor in state.items() if id(tensor) in files
            }
            tensor_ids |= files.keys()
    assert all(id(parameter) in tensor_ids for parameter in model.parameters() if parameter.is_meta), (
        "weights that no file has"
    )
    return names


@contextmanager
def appear_filled(model: "nn.Module") -> Iterator[None]:
    """Inside this `with` weights that are not there yet seem to be on the CPU, where peft then puts its adapters. They
    take no memory."""
    import torch
    from torch import nn
    from torch.utils import swap_tensors

    weights = [weight for weight in model.parameters() if weight.is_meta]
    zeros = [
        nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape), weight.requires_grad)
        for weight in weights
    ]
    for pair in zip(weights, zeros, strict=True):
        swap_tensors(*pair)
    yield
    for weight, zero in zip(weights, zeros, strict=True):
        swap_tensors(weight, zero)
        weight.requires_grad_(zero.requires_grad)
