"""Compute output projection and cross entropy in chunks of tokens, so that not all logits are in memory at once.

A batch of 32,768 tokens has 4 GiB of float32 logits for a vocabulary of 32,000, and a training has several copies:
logits, log-probabilities and gradients. Here the logits of a chunk are computed, reduced to a loss and freed. The
backward pass recomputes them (checkpointing, Chen et al. 2016, arXiv 1604.06174), which costs one more product with the
output matrix.
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
    """Within the block, `sum_loss` uses chunks of `tokens` tokens."""
    _sizes.append(tokens)
    try:
        yield
    finally:
        _sizes.pop()


def takes_chunks() -> bool:
    """Whether a block of `chunks_of` is active."""
    return bool(_sizes)


def sum_loss(model: nn.Module, logits: Callable[[], Tensor], loss: Callable[..., Tensor], *tensors_N: Tensor) -> Tensor:
    """Compute loss(logits_NV, *tensors_N), a sum over N tokens. logits() calls `model` and returns its logits (..., V)
    for these tokens in order.

    Within `chunks_of`, the output projection returns the loss instead of logits within the model's forward pass, when
    the matrix of a sharded model is gathered. Chunks are added in order in float32; a single chunk gives the same bits
    as without chunks.

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
    """The module that computes logits from hidden states, possibly below wrappers."""
    for part in model.modules():
        if isinstance(getattr(head := getattr(part, "get_output_embeddings", lambda: None)(), "weight", None), Tensor):
            return head
    raise ConfigError(f"{FIELD}: {type(model).__name__} has no output projection. Remove it.")


def _require_unchanged(model: nn.Module, output: Tensor, sums: list[Tensor]) -> None:
    """Check that the model returns the sum from its projection unchanged, as scaling or capping of logits would apply
    to the sum.

    DDP returns a copy, which is compared in the first pass.
    """
    if len(sums) == 1 and (output is sums[0] or "logits_stay_as_they_are" in vars(model)):
        return
    if (
        len(sums) != 1
        or output.shape
        or isinstance(output, FakeTensor)
        or not torch.equal(output.nan_to_num(), sums[0].nan_to_num())
    ):
        raise ConfigError(f"{FIELD}: {type(model).__name__} changes the logits after its output projection. Remove it.")
    vars(model)["logits_stay_as_they_are"] = True
