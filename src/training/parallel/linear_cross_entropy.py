"""Output projection and cross entropy of some tokens at a time, so that the logits of all are never held at once.

A batch of 32,768 tokens has 4 GiB of logits in float32 for a vocabulary of 32,000, and a training holds them several
times: as logits, their logarithms and their gradients. Here the logits of a chunk are made, summed up as a loss and
forgotten; the backward pass makes them again (checkpointing, Chen et al. 2016, arXiv 1604.06174), which costs one more
product with the output matrix.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from src.errors import ConfigError

FIELD = "loop.cross_entropy_chunk_tokens"
_sizes: list[int] = []


@contextlib.contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    """Within the block, `sum_loss` takes so many tokens at a time."""
    _sizes.append(tokens)
    try:
        yield
    finally:
        _sizes.pop()


def takes_chunks() -> bool:
    """Whether this is within `chunks_of`."""
    return bool(_sizes)


def sum_loss(model: nn.Module, logits: Callable[[], Tensor], loss: Callable[..., Tensor], *tensors_N: Tensor) -> Tensor:
    """loss(logits_NV, *tensors_N), a sum over N tokens,
    where logits() calls `model` and returns its logits (..., V) for them in order.

    Within `chunks_of` the output projection of the model makes the loss in the place of the logits, as part of its
    forward pass: where a model is sharded, the matrix is whole there. Chunks are added in float32 in their order; one
    chunk of all has the bits of a plain loss.

    Raises:
        ConfigError: the model has no output projection, or changes the logits after it.
    """
    if not _sizes:
        return loss(logits().flatten(0, -2), *tensors_N)
    head = _output_projection(model)
    old_forward, size, sums = head.__dict__.get("forward"), _sizes[-1], []
    plain = head.forward

    def project(hidden_MD: Tensor, *tensors_M: Tensor) -> Tensor:
        return loss(plain(hidden_MD), *tensors_M)

    def forward(hidden: Tensor) -> Tensor:
        parts = [tensor.split(size) for tensor in (hidden.flatten(0, -2), *tensors_N)]
        sums.append(torch.stack([_recompute(project, *part) for part in zip(*parts, strict=True)]).sum())
        return sums[0]

    head.forward = forward
    try:
        output = logits()
    finally:
        if old_forward is None:
            del head.forward
        else:
            head.forward = old_forward
    _require_unchanged(model, output, sums)
    return output


def _recompute(project: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return checkpoint(project, *tensors, use_reentrant=False) if torch.is_grad_enabled() else project(*tensors)


def _output_projection(model: nn.Module) -> Any:
    """The module that makes logits of hidden states, which may lie below wrappers."""
    for part in model.modules():
        if isinstance(getattr(head := getattr(part, "get_output_embeddings", lambda: None)(), "weight", None), Tensor):
            return head
    raise ConfigError(f"{FIELD}: {type(model).__name__} has no output projection. Leave it out.")


def _require_unchanged(model: nn.Module, output: Tensor, sums: list[Tensor]) -> None:
    """That the model returns the sum as its projection made it. A scale or a cap of logits would act on the sum.

    DDP returns a copy, of which the numbers are compared the first time.
    """
    if len(sums) == 1 and (output is sums[0] or "logits_stay_as_they_are" in vars(model)):
        return
    if (
        len(sums) != 1
        or output.shape
        or isinstance(output, FakeTensor)
        or not torch.equal(output.nan_to_num(), sums[0].nan_to_num())
    ):
        raise ConfigError(
            f"{FIELD}: {type(model).__name__} does not give the logits as its output projection makes them. "
            "Leave it out."
        )
    vars(model)["logits_stay_as_they_are"] = True
