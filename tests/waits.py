"""Counts on a CPU how often a training step would wait for a GPU.

What the training copies to its device stands for what is on a GPU, and so does all that is computed from it:
`WaitCounter` follows the storages of tensors through every operation, also those of the backward pass. Reading such a
tensor is a wait, and so is an operation whose result has as many entries as the values of such a tensor say. A copy to
the device is a tensor of its own, as on a GPU.

Not seen: copies from memory that is not pinned, and waits inside kernels of a GPU alone. `python -m benchmarks.gpu
--only synchronisations` counts all of them on a GPU.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import ROOT

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
SIZED_BY_VALUES = {
    *(
        aten.nonzero.default,
        aten.nonzero_numpy.default,
        aten.masked_select.default,
        aten.bincount.default,
        aten.argwhere.default,
    ),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.repeat_interleave.Tensor),
    aten.masked_scatter_backward.default,
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
TO_HOST = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
TO_DEVICE = {Tensor.to}
MAKES = {torch.arange, torch.empty, torch.full, torch.ones, torch.rand, torch.randn, torch.zeros}
"""With `device=` they make a tensor there."""
STEP, STARTS = "train_step", ("_require_no_dropout",)
"""The function that is a step, and what is in the first of a start alone."""


class WaitCounter(TorchDispatchMode):
    """Within the block: the waits of each optimizer step, as the places in our code or in a library that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []
        """Of each call of the function that is a step, if it waits at all."""
        self._step: Any = None
        self._device: dict[int, StorageWeakRef] = {}
        self._functions = _Copies(self)

    def __enter__(self) -> "WaitCounter":
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        on_device = any(map(self.is_on_device, tensors))
        if on_device and self._waits(func, args):
            self.note(str(func))
        found = func(*args, **(kwargs or {}))
        if on_device:
            for leaf in tree_leaves((found, args if func._schema.is_mutable else ())):
                if isinstance(leaf, Tensor):
                    self.put_on_device(leaf)
        return found

    def _waits(self, func: Any, args: Sequence[Any]) -> bool:
        if func in READS | SIZED_BY_VALUES:
            return any(self.is_on_device(arg) for arg in tree_leaves(args) if isinstance(arg, Tensor))
        masks = (
            [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            if func in INDEXED
            else []
        )
        return any(map(self.is_on_device, masks))

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether it stands for one on a GPU."""
        known = self._device.get(_storage(tensor))
        return known is not None and not known.expired()

    def put_on_device(self, tensor: Tensor) -> None:
        """Have the memory of a tensor stand for memory of a GPU."""
        self._device[_storage(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def take_from_device(self, tensor: Tensor) -> None:
        """Have the memory of a tensor stand for memory of the CPU."""
        self._device.pop(_storage(tensor), None)

    def note(self, what: str) -> None:
        """Count a wait, if it is one of a step."""
        frames = list(_frames())
        training = next((frame for frame in frames if frame.f_code.co_name == STEP), None)
        if training is None or any(frame.f_code.co_name in STARTS for frame in frames):
            return
        outside = [
            frame for frame in frames if not _file(frame).startswith((os.path.dirname(torch.__file__), __file__))
        ]
        own = next(frame for frame in frames if _file(frame).startswith(str(ROOT / "src")))
        places = dict.fromkeys(f"{_short(_file(frame))}:{frame.f_lineno}" for frame in (outside[0], own))
        if training is not self._step:
            self._step = training
            self.steps.append([])
        self.steps[-1].append(f"{what} at {' from '.join(places)}")

    def table(self) -> str:
        """For people: the waits of the step that has most, by place."""
        most = Counter(max(self.steps, key=len, default=[]))
        return "\n".join(f"{count} x {place}" for place, count in most.items())


class _Copies(TorchFunctionMode):
    """Sees what the dispatcher does not: copies from and to a device that is a CPU."""

    def __init__(self, counter: WaitCounter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in TO_HOST and self.counter.is_on_device(args[0]):
            self.counter.note(f"Tensor.{func.__name__}")
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            self.counter.note(f"torch.{func.__name__} on a device")
        found = func(*args, **kwargs)
        if func in MAKES and kwargs.get("device") is not None:
            self.counter.put_on_device(found)
        if func is Tensor.cpu:
            found = found.clone()
            self.counter.take_from_device(found)
        if (
            func in TO_DEVICE
            and kwargs.get("non_blocking")
            and isinstance(found, Tensor)
            and not self.counter.is_on_device(args[0])
        ):
            found = found.clone() if found is args[0] else found
            self.counter.put_on_device(found)
        if func in TO_DEVICE and isinstance(found, nn.Parameter):
            self.counter.put_on_device(found)
        return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _file(frame: Any) -> str:
    return frame.f_code.co_filename


def _short(path: str) -> str:
    return path.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
