"""Trained weights of a model: which ones a checkpoint stores, and how to load them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import CheckpointError
from src.files import reading

if TYPE_CHECKING:
    from torch import Tensor, nn

AVERAGE = "ema.safetensors"
"""File of a checkpoint with the moving average of the trained parameters, by name; see `loop.ema`."""


def trained_weights(model: "nn.Module") -> "dict[str, Tensor]":
    """The entries of the state dict that training changes, detached and contiguous, by name.

    These are the parameters that require a gradient, and the buffers of modules with such a parameter. Frozen
    parameters are left out. Tied tensors appear once, under the first name.
    """
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for prefix, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            names.update(f"{prefix}.{name}" if prefix else name for name, _ in module.named_buffers(recurse=False))
    # The state dict leaves out buffers that are not persistent.
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name in names}


def load_trained(model: "nn.Module", file: Path, read: "Callable[[Path], dict[str, Tensor]] | None" = None) -> None:
    """Load the `trained_weights` saved as safetensors in `file` into `model`, in place.
    read: a function that reads the file; None: `read_tensors`.

    Raises:
        CheckpointError: the file is missing or damaged, or its names or shapes differ from those of the trained
            weights of `model`. `model` is then unchanged.
    """
    load_parameters(trained_state(model), (read or read_tensors)(file), file)


def trained_state(model: "nn.Module") -> "dict[str, Tensor]":
    """The entries of the state dict for the names of `trained_weights`, to copy into."""
    state = model.state_dict()
    return {name: state[name] for name in trained_weights(model)}


def require_equal_shapes(expected: "Mapping[str, Tensor]", saved: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError if the names or shapes of the tensors `saved` in `file` differ from the expected ones."""
    advice = "Use the model that was saved, or another checkpoint."
    if saved.keys() != expected.keys():
        absent, extra = expected.keys() - saved.keys(), saved.keys() - expected.keys()
        raise CheckpointError(
            f"{file}: checkpoint is for a different model. Missing: {summarize_names(absent)}; "
            f"unexpected: {summarize_names(extra)}. {advice}"
        )
    for name, tensor in expected.items():
        if tuple(saved[name].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{file}: checkpoint is for a different model. {name} is {list(saved[name].shape)}, "
                f"expected {list(tensor.shape)}. {advice}"
            )


def load_parameters(parameters: "Mapping[str, Tensor]", saved: "Mapping[str, Tensor]", file: Path) -> None:
    """Copy the tensors `saved` in `file` into `parameters`.

    Raises:
        CheckpointError: names or shapes differ. Nothing is copied.
    """
    import torch

    require_equal_shapes(parameters, saved, file)
    with torch.no_grad():
        for name, tensor in saved.items():
            parameters[name].copy_(tensor)


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


def summarize_names(names: Iterable[str]) -> str:
    """The first three names, and the number of the rest."""
    sorted_names = sorted(names)
    more = f" and {len(sorted_names) - 3} more" if len(sorted_names) > 3 else ""
    return (", ".join(sorted_names[:3]) or "none") + more


def is_unfilled(model: "nn.Module") -> bool:
    """Whether weights of the model, or of its base, are still on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())
