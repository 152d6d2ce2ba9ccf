"""Build a model without its weights: record how each tensor is computed, and compute single tensors later.

Inside a `Recording`, new tensors are on the meta device, and each operation on them is recorded with the state of
torch's generator. A weight computed later is equal in every bit to that of a model built as usual, and the generator is
left in the same state. Weights in safetensors files are recorded as reads.
"""

import copy
import itertools
import mmap
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from src.errors import ConfigError
from src.support.weights import is_unfilled, read_tensors, reading_tensors

_FACTORIES = {"empty", "empty_strided", "full", "ones", "rand", "randn", "zeros"}
"""Operations that create a tensor of any size from numbers."""
_DRAWS = {"exponential_", "normal_", "rand", "randn", "random_", "uniform_"}
"""Operations that draw as many random numbers for any values of their arguments."""
_REPLACES = {"copy_", "exponential_", "fill_", "normal_", "random_", "uniform_", "zero_"}
"""In-place operations with a result that does not depend on previous values."""
_COPIES = {"_to_copy": 0, "clone": 0, "copy_": 1}
"""Operations that at most convert the type, with the position of the source in their arguments."""
_READ = "read"
_CANNOT = "a model that calls it cannot be built in shards. Start without --fsdp."
_META = torch.device("meta")
_ATTRIBUTE = "deferred_weights"


@dataclass(frozen=True, eq=False)
class _Operation:
    """A recorded operation. Its tensors are on the meta device, except constants in `args` and `kwargs`."""

    run: Any
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Sequence[Tensor]
    reads: Sequence[int]
    """Storages with values that it needs."""
    overwrites: Sequence[Tensor] = ()
    """Tensors that it overwrites completely, in place."""
    random_state: Tensor | None = None
    """State of torch's generator before an operation that draws."""


class _RecordableFunctions(TorchFunctionMode):
    """A block in which torch's functions call the operations to record."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == vars(torch._C.TensorBase)["is_meta"].__get__ and sys._getframe(1).f_globals is vars(init):
            return False  # torch's orthogonal_, sparse_ and dirac_ return early on the meta device
        if func == vars(torch._C.TensorBase)["data"].__set__ and args[0].is_meta:
            args = (args[0], args[1].to(_META))
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """A block in which models are built without their weights."""

    active: ClassVar["Recording | None"] = None
    """The recording of the current block."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        """Numbers of the operations that change a storage."""

    def __enter__(self) -> Self:
        Recording.active = self
        self._truncated: Any = init._no_grad_trunc_normal_
        init._no_grad_trunc_normal_ = self._draw_truncated
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        init._no_grad_trunc_normal_ = self._truncated
        Recording.active = None

    def _draw_truncated(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record torch's function as one operation, as the number of its draws depends on their values."""
        if tensor.is_meta and kwargs.get("generator") is None:
            target, state = tensor.detach(), torch.get_rng_state()
            with self.pause():
                self._truncated(_empty_like(target), *args, **kwargs)
            drawing = _Operation(
                self._truncated, "trunc_normal_", (target, *args), kwargs, [target], [], [target], state
            )
            self._add(drawing, {_storage(target)})
            return tensor
        return self._truncated(tensor, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation on meta tensors, or one that creates a tensor. Run all others."""
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        is_new = (not tensors and name in _FACTORIES) or kwargs.get("device") == _META
        if not is_new and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        specs = func._schema.arguments
        values = dict(zip((spec.name for spec in specs), args, strict=False)) | kwargs
        changed = _tensors([values.get(spec.name) for spec in specs if spec.alias_info and spec.alias_info.is_write])
        draws = torch.Tag.nondeterministic_seeded in func.tags
        is_value = any("Tensor" not in str(result.type) for result in func._schema.returns)
        if is_value or (draws and name not in _DRAWS) or kwargs.get("generator") or not all(t.is_meta for t in changed):
            if any(tensor.is_meta for tensor in changed):
                raise ConfigError(f"{func}: {_CANNOT}")
            args, kwargs = tree_map_only(Tensor, self.compute, (args, kwargs))
            return func(*args, **kwargs)
        state = torch.get_rng_state() if draws else None
        if draws:
            unused_args, unused_kwargs = tree_map_only(Tensor, _empty_like, (args, kwargs))
            func(*unused_args, **unused_kwargs)  # advances the generator
        overwrites = [t for t in changed if name in _REPLACES and t.nbytes == t.untyped_storage().nbytes()]
        reads = [_storage(t) for t in tensors if t.is_meta and not any(t is each for each in overwrites)]
        overwrites = [t for t in overwrites if _storage(t) not in reads]
        if is_new or "device" in kwargs:
            kwargs["device"] = _META
        planned_args, planned_kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
        try:
            result = func(*planned_args, **planned_kwargs)
        except NotImplementedError:  # torch's parametrizations ignore it
            raise ConfigError(f"{func}: {_CANNOT}") from None
        args, kwargs, results, overwrites = tree_map_only(Tensor, _alias, (args, kwargs, _tensors(result), overwrites))
        if "device" in kwargs:
            kwargs |= {"device": torch.device("cpu"), "dtype": result.dtype}  # torch's default type can change
        self._add(
            _Operation(func, name, args, kwargs, results, reads, overwrites, state),
            {_storage(t) for t in changed} | {_storage(t) for t in results} - {_storage(t) for t in tensors},
        )
        return result

    def _add(self, operation: _Operation, changed: set[int]) -> None:
        """changed: the storages that it creates or changes; without any, the operation only returns a view."""
        for storage in changed:
            self._writers[storage].append(len(self._operations))
        if changed:
            self._operations.append(operation)

    def pause(self) -> AbstractContextManager[Any]:
        """A block in which models are built as usual."""
        return _disable_current_modes()

    def read_later(self, file: Path) -> dict[str, Tensor]:
        """The tensors of a safetensors file, on the meta device, by name.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        with self.pause(), reading_tensors(file), safe_open(file, "pt") as content:
            parts = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  not a dict
            tensors = {
                name: torch.empty(part.get_shape(), dtype=_TYPES[part.get_dtype()], device="meta")
                for name, part in parts.items()
            }
            for name, tensor in tensors.items():
                self._add(_Operation(partial(read_tensor, file, name), _READ, (), {}, [tensor], ()), {_storage(tensor)})
        return tensors

    def compute(self, tensor: Tensor) -> Tensor:
        """The tensor's values, on the CPU. Returns a tensor that is not on the meta device as it is.

        Raises:
            CheckpointError: a file that it is read from is missing or damaged.
        """
        if not tensor.is_meta:
            return tensor
        storages: dict[int, torch.UntypedStorage] = {}

        def real(argument: Tensor) -> Tensor:
            if not argument.is_meta:
                return argument
            view = torch.empty(0, dtype=argument.dtype)
            return view.set_(storages[_storage(argument)], argument.storage_offset(), argument.shape, argument.stride())

        with self.pause(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for operation in self._operations_of(tensor):
                for each in operation.overwrites:
                    storages[_storage(each)] = _allocate(each.nbytes)
                if operation.random_state is not None:
                    torch.set_rng_state(operation.random_state)
                args, kwargs = tree_map_only(Tensor, real, (operation.args, operation.kwargs))
                result = operation.run(*args, **kwargs)
                for planned_tensor, result_tensor in zip(operation.results, _tensors(result), strict=True):
                    assert result_tensor.dtype == planned_tensor.dtype, f"{operation.name}: another default type"
                    storages.setdefault(_storage(planned_tensor), result_tensor.untyped_storage())
            return real(tensor)

    def compute_rows(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """Rows of `compute(tensor)`. Reads only these rows if the tensor is stored in a file.

        Raises:
            CheckpointError: see `compute`.
        """
        number = self._writers[_storage(tensor)][-1]
        operation = self._operations[number]
        if operation.name == _READ and _covers(tensor, operation.results[0]):
            return operation.run(begin, end)
        if operation.name in _COPIES:
            target = operation.results[0]
            source = operation.args[_COPIES[operation.name]]
            is_last = source.is_meta and self._writers[_storage(source)][-1] < number
            if is_last and _covers(tensor, target) and _covers(source, target):
                return self.compute_rows(source, begin, end).to(tensor.dtype)
        return self.compute(tensor)[begin:end]

    def folders(self, model: nn.Module) -> list[Path]:
        """Folders of the files that the model's weights are read from."""
        weights = [weight for weight in model.parameters() if weight.is_meta]
        operations = itertools.chain.from_iterable(map(self._operations_of, weights))
        return sorted({operation.run.args[0].parent for operation in operations if operation.name == _READ})

    def _operations_of(self, tensor: Tensor) -> Iterator[_Operation]:
        """The operations that compute the tensor, in their order."""
        numbers: set[int] = set()
        visited: set[tuple[int, int]] = set()
        open_storages = [(_storage(tensor), len(self._operations))]
        while open_storages:
            storage, end = open_storages.pop()
            writers = self._writers[storage]
            assert writers, "a meta tensor of another recording"
            for number in reversed(writers[: bisect_left(writers, end)]):
                if (storage, number) in visited:
                    break
                visited.add((storage, number))
                operation = self._operations[number]
                numbers.add(number)
                open_storages += [(each, number) for each in operation.reads if each != storage]
                if storage not in operation.reads:
                    break
        return (self._operations[number] for number in sorted(numbers))


def build_deferred(build: Callable[[], Any]) -> Any:
    """Build a model with its weights on the meta device, for `take_recording`. Buffers have their values."""
    with Recording() as recording, _RecordableFunctions():
        model = build()
    weights = {id(weight) for weight in model.parameters()}
    for values in [vars(module) for module in model.modules()]:
        for key, value in values.items():
            if any(tensor.is_meta and id(tensor) not in weights for tensor in _tensors(value)):
                values[key] = tree_map_only(Tensor, lambda t: t if id(t) in weights else recording.compute(t), value)
    setattr(model, _ATTRIBUTE, recording)
    return model


def copy_frozen(part: Any, model: nn.Module) -> Any:
    """A frozen copy of a part of a model from `build_deferred`, whose weights are computed from the same recording."""
    recording = vars(model)[_ATTRIBUTE]
    weights = [weight for weight in part.parameters() if weight.is_meta]
    copies: dict[int, Any] = {id(weight): nn.Parameter(weight.detach()) for weight in weights}
    frozen_part = copy.deepcopy(part, {id(recording): recording, **copies})
    setattr(frozen_part, _ATTRIBUTE, recording)
    return frozen_part.requires_grad_(False).eval()


def pause_recording() -> AbstractContextManager[Any]:
    """A block in which tensors have values, also in a `Recording`."""
    return Recording.active.pause() if Recording.active else nullcontext()


def building_like(model: nn.Module) -> AbstractContextManager[Any]:
    """A block in which further weights are built with values if those of the model have values, also in a `Recording`.

    peft and transformers mix them with the model's."""
    return nullcontext() if is_unfilled(model) else pause_recording()


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name; in a `Recording`, without their values.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return Recording.active.read_later(file) if Recording.active else read_tensors(file)


def take_recording(model: nn.Module) -> Recording | None:
    """Remove and return the recording of the model's weights; None if the model has its weights."""
    return vars(model).pop(_ATTRIBUTE, None)


def read_tensor(file: Path, name: str, begin: int = 0, end: int | None = None) -> Tensor:
    """A tensor of a safetensors file, or rows of it. Raises CheckpointError if the file is missing or damaged."""
    with reading_tensors(file), safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name) if end is None else tensors.get_slice(name)[begin:end]


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    """A number of the tensor's storage, which a recording keeps alive."""
    return tensor.untyped_storage()._cdata


def _allocate(size: int) -> torch.UntypedStorage:
    """Memory that returns to the system when it is freed. With `memory.reuse_freed_memory`, malloc would keep it."""
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8).untyped_storage()


def _empty_like(tensor: Tensor) -> Tensor:
    """A tensor with the shape and strides of one on the meta device."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _allocate(tensor.itemsize * extent * bool(tensor.numel()))
    return torch.empty(0, dtype=tensor.dtype).set_(memory, 0, tensor.shape, tensor.stride())


def _on_meta(tensor: Tensor) -> Tensor:
    """The tensor or, for a constant, one of the same shape on the meta device."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _alias(tensor: Tensor) -> Tensor:
    """A tensor that later assignments to `tensor.data` do not change."""
    return tensor.detach() if tensor.is_meta else tensor.clone()


def _covers(tensor: Tensor, other: Tensor) -> bool:
    """Whether the elements of both contiguous tensors correspond by position in their storages."""
    pair = (tensor, other)
    return tensor.shape == other.shape and all(t.is_contiguous() and t.storage_offset() == 0 for t in pair)
