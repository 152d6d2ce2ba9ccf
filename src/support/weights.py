"""Trained weights of a model: which ones a checkpoint stores, and how to load them. Models on the meta device."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import CheckpointError
from src.files import reading

if TYPE_CHECKING:
    from torch import Tensor, nn

STORED_TENSORS = "stored_tensors"
"""Attribute of a transformers model that was built unfilled: its tensors that are stored in the folder `name_or_path`,
by name."""
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


def load_trained(model: "nn.Module", file: Path) -> None:
    """Load the `trained_weights` saved as safetensors in `file` into `model`, in place.

    Raises:
        CheckpointError: the file is missing or damaged, or its names or shapes differ from those of the trained
            weights of `model`. `model` is then unchanged.
    """
    import torch

    saved = read_tensors(file)
    state = matching_state(model, file, {name: tensor.shape for name, tensor in saved.items()})
    with torch.no_grad():
        for name, tensor in saved.items():
            state[name].copy_(tensor)


def require_equal_shapes(expected: "Mapping[str, Tensor]", saved: "Mapping[str, Tensor]", file: Path) -> None:
    """Raise CheckpointError if the names or shapes of the tensors `saved` in `file` differ from the expected ones."""
    shapes, expected_shapes = ({n: tuple(t.shape) for n, t in tensors.items()} for tensors in (saved, expected))
    if shapes != expected_shapes:
        different_names = {name for name, _ in shapes.items() ^ expected_shapes.items()}
        raise CheckpointError(
            f"{file}: checkpoint is for a different model. Different names or shapes: "
            f"{summarize_names(different_names)}. Use the model that was saved, or another checkpoint."
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


def matching_state(model: "nn.Module", file: Path, shapes: Mapping[str, Sequence[int]]) -> "dict[str, Tensor]":
    """The entries of the state dict for the names of `trained_weights`, to copy into.
    shapes: shapes of the tensors in `file`, by name.

    Raises:
        CheckpointError: names or shapes differ from those of the trained weights of `model`.
    """
    names, advice = trained_weights(model), "Use the model that was saved, or another checkpoint."
    if shapes.keys() != names.keys():
        absent, extra = names.keys() - shapes.keys(), shapes.keys() - names.keys()
        raise CheckpointError(
            f"{file}: checkpoint is for a different model. Missing: {summarize_names(absent)}; "
            f"unexpected: {summarize_names(extra)}. {advice}"
        )
    for name, tensor in names.items():
        if tuple(shapes[name]) != tuple(tensor.shape):
            raise CheckpointError(
                f"{file}: checkpoint is for a different model. {name} is {list(shapes[name])}, "
                f"expected {list(tensor.shape)}. {advice}"
            )
    state = model.state_dict()
    return {name: state[name] for name in names}


def summarize_names(names: Iterable[str]) -> str:
    """The first three names, and the number of the rest."""
    sorted_names = sorted(names)
    more = f" and {len(sorted_names) - 3} more" if len(sorted_names) > 3 else ""
    return (", ".join(sorted_names[:3]) or "none") + more


def build_unfilled(build: Callable[[], Any], folder: Path, files: Sequence[Path]) -> Any | None:
    """Build a pretrained transformers model with parameters on the meta device and real buffers.

    FSDP2 shards it first; each rank then reads its shards from `files`, which must be all weight files in `folder`.
    None if the files cannot be read directly: not safetensors, or a weight of the model is missing by name or shape.

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
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118  not a dict
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
    """Untie weights that differ in the files. Transformers does so too, and T5 v1.1 needs it.

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
    """Whether weights of the model, or of its base, are still on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def stored_names(model: "nn.Module") -> dict[Path, dict[str, str]]:
    """{folder: {name in its files: name in the state dict of `model`}} of the weights to read.

    Wrappers and adapters change names, but not tensors.
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
        "weights that are in no file"
    )
    return names


@contextmanager
def appear_filled(model: "nn.Module") -> Iterator[None]:
    """Within the block, weights on the meta device appear to be on the CPU, so that peft puts its adapters there.
    They take no memory."""
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
