"""Copies of tensors on the CPU, whose memory is used again: to take fresh memory costs more than to copy into it."""

from collections.abc import Iterable

from torch import Tensor


class Copies:
    """Of tensors by name. One `of` overwrites what the one before has returned."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies that later changes of the tensors do not reach."""
        self._kept = {name: self._copy(name, tensor.detach()) for name, tensor in tensors}
        return dict(self._kept)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            return tensor.to("cpu", copy=True)
        return kept.copy_(tensor)
