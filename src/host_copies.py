"""What the CPU knows of tensors that are on a GPU, so that a training step does not wait for the GPU to tell.

Batches are made on the CPU. `to_device` remembers beside each copy what it was copied from: which tokens are real or
learned, and how many, is then worked out from that. Without such a copy, as for a tensor of a caller of his own,
everything works and may wait. On a CPU a tensor is its own copy.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

_NAME = "host_copy"
_NOTHING_HIDDEN: ContextVar[bool] = ContextVar("nothing hidden", default=False)


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch with every tensor on `device`. From pinned memory nothing waits for the copies."""
    return {name: remember(tensor.to(device, non_blocking=True), tensor) for name, tensor in batch.items()}


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on `device`, which is not waited for; one that is there already as it is."""
    return (tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor).to(
        device, non_blocking=True
    )


def remember(tensor: Tensor, copy: Tensor) -> Tensor:
    """`tensor`, from now on with its `copy` on the CPU. Neither may change any more."""
    if copy is not tensor:
        vars(tensor)[_NAME] = copy
    return tensor


def host_copy(tensor: Tensor) -> Tensor:
    """The copy on the CPU that is known of a tensor, else the tensor itself. Of a view of it none is known."""
    return vars(tensor).get(_NAME, tensor)


def change_both(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What `change` makes of a tensor, with what it makes of the copy on the CPU where one is known."""
    copy = host_copy(tensor)
    return change(tensor) if copy is tensor else remember(change(tensor), change(copy))


def places(mask: Tensor) -> Tensor:
    """(N,) int64 on the device of `mask`: where in its flat form it is True, in order."""
    return upload(host_copy(mask).flatten().nonzero()[:, 0], mask.device)


def pick(values: Tensor, mask: Tensor) -> Tensor:
    """`values[mask]`, where the shape of `mask` is that of the first axes of `values`: (N, ...), in row-major order."""
    return values.flatten(0, mask.dim() - 1)[places(mask)]


def pick_before(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`values[:, :-1][mask[:, 1:]]`: (N, ...), one before each True of the mask, such as what predicts a token."""
    before = host_copy(mask_BT)[:, 1:]
    rows, columns = before.nonzero(as_tuple=True)
    return values_BT.flatten(0, 1)[upload(rows * values_BT.shape[1] + columns, values_BT.device)]


def write_beside(like: Tensor, value: Tensor) -> Tensor:
    """A number in float64 on the device of `like`. What the CPU has is written there, as a copy would wait."""
    if value.device == like.device:
        return value.detach().double()
    return like.new_full((), float(value), dtype=torch.float64)


def read_together(*parts: Tensor) -> list[list[float]]:
    """The numbers of vectors in float64, with one wait for the device."""
    devices = dict.fromkeys(
        part.device for part in parts
    )  # the CPU may be one of them, as where gradients are kept there
    flat = {device: iter(torch.cat([part for part in parts if part.device == device]).tolist()) for device in devices}
    return [list(islice(flat[part.device], len(part))) for part in parts]


@contextmanager
def nothing_hidden() -> Iterator[None]:
    """In the block no mask for attention that transformers makes of two axes hides anything:
    it is not asked whether one does."""
    token = _NOTHING_HIDDEN.set(True)
    try:
        yield
    finally:
        _NOTHING_HIDDEN.reset(token)


@cache
def answer_masks() -> None:
    """From now on transformers asks the CPU, where that knows, whether a mask hides anything and rows are packed.

    It then makes the masks that it would make. Of masks and positions without a copy it asks the device, as ever.
    """
    from transformers import masking_utils

    known = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    for name in ("sdpa", "eager", "flash_attention_2"):
        known.register(name, _answering(known[name]))
    prepare: Callable[..., Any] = masking_utils._preprocess_mask_arguments
    find: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices

    def _preprocess_mask_arguments(
        config: Any, inputs_embeds: Tensor, attention_mask: Any, *others: Any, **options: Any
    ) -> Any:
        if (
            isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        ):  # else it is made bool there, without its copy
            attention_mask = change_both(Tensor.bool, attention_mask)
        return prepare(config, inputs_embeds, attention_mask, *others, **options)

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        copy = host_copy(position_ids)
        found = find(copy)
        return found if found is None or copy is position_ids else upload(found, position_ids.device)

    masking_utils._preprocess_mask_arguments = _preprocess_mask_arguments
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


def _answering(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of transformers that makes a mask for attention, which is not told of one that hides nothing."""

    def make_mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        attention_mask = None if _NOTHING_HIDDEN.get() else attention_mask
        copy = None if attention_mask is None else host_copy(attention_mask)
        if copy is None or copy is attention_mask or copy.shape[-1] != options.get("kv_length"):
            return make(*args, attention_mask=attention_mask, **options)
        if copy.all():
            return make(*args, attention_mask=None, **options)
        if (
            options.get("q_length") == options["kv_length"]
        ):  # else it may be padding of a static cache alone, behind the queries
            options["allow_is_causal_skip"] = False
        return make(*args, attention_mask=attention_mask, **{**options, "allow_is_bidirectional_skip": False})

    return make_mask
