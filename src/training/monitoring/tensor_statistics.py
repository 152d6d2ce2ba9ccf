"""Eleven statistics of a tensor, from sums that can be combined over pieces and processes.

Statistics and names are those of HuggingFaceM4's trainer. A piece is read once, in float64, by few kernels; only `rows`
synchronizes with the device. Shapes: P = len(PARTS) sums, K tensors, R pieces.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

NAMES = (
    "var_min",
    "var_max",
    "var_mean",
    "var_std",
    "abs_var_min",
    "abs_var_max",
    "abs_var_mean",
    "abs_var_std",
    "var_norm_2",
    "var_norm_1",
    "nonzero",
)
"""`std` is the sample standard deviation (divisor n - 1); norms are divided by the number of elements; `nonzero` is a
count."""
PARTS = ("numel", "min", "max", "abs_min", "mean", "squares", "abs_sum", "nonzero", "nonfinite")
"""Entries of `sums`. `squares`: sum of squared deviations from the mean."""
_DIGITS = 7
_CHUNK = {"cpu": 2**16}
"""Elements converted to float64 at a time; on a CPU, limited by its cache."""
_CHUNK_ELSEWHERE = 2**23


def describe(tensor: Tensor) -> dict[str, float | int | None]:
    """The eleven statistics of one tensor, as in `rows`."""
    return rows(sums(tensor)[None])[0]


def sums(tensor: Tensor) -> Tensor:
    """Sums (P,) float64 of a real tensor of any shape and type, on its device."""
    return sums_of(chunks(tensor), tensor.device)


def sums_of(pieces: Iterable[Tensor], device: torch.device) -> Tensor:
    """Like `sums`, for a tensor given as flat `pieces` on `device`."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        piece_sums = [_piece(piece) for piece in pieces if piece.numel()]
        return join_sums(torch.stack(piece_sums)) if piece_sums else empty(device)


def empty(device: torch.device) -> Tensor:
    """Sums of an empty tensor, the neutral element of `join_sums`."""
    return torch.tensor([0, math.inf, -math.inf, math.inf, 0, 0, 0, 0, 0], dtype=torch.float64, device=device)


def chunks(*tensors: Tensor) -> Iterator:
    """Split a tensor into flat pieces small enough to copy; for several tensors of one shape, into tuples of pieces."""
    size = _CHUNK.get(tensors[0].device.type, _CHUNK_ELSEWHERE)
    pieces = [tensor.detach().reshape(-1).split(size) for tensor in tensors]
    return iter(pieces[0]) if len(pieces) == 1 else zip(*pieces, strict=True)


def join_sums(parts: Tensor) -> Tensor:
    """(R, …, P) -> (…, P): join the sums of R pieces.

    Means and squared deviations follow Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979), which is accurate even if the deviation is small relative to the mean.
    """
    if len(parts) == 1:
        return parts[0]
    numel, low, high, abs_low, mean, squares, abs_sum, nonzero, nonfinite = parts.unbind(-1)
    total = numel.sum(0)
    middle = (numel * mean).sum(0) / total.clamp(min=1)
    spread = torch.where(numel > 0, numel * (mean - middle) ** 2, 0)
    return torch.stack(
        [
            total,
            low.amin(0),
            high.amax(0),
            abs_low.amin(0),
            middle,
            (squares + spread).sum(0),
            abs_sum.sum(0),
            nonzero.sum(0),
            nonfinite.sum(0),
        ],
        dim=-1,
    )


def to_rows(parts: Tensor) -> Tensor:
    """(K, P) -> (K, 11) in the order of NAMES. Undefined values, such as the mean of an empty tensor, are NaN."""
    numel, low, high, abs_low, mean, squares, abs_sum, nonzero, _ = parts.unbind(-1)
    some = torch.where(numel > 0, numel, torch.nan)
    abs_mean = abs_sum / some
    square_sum = squares + numel * mean**2
    one_sign = (low >= 0) | (high <= 0)
    abs_squares = torch.where(one_sign, squares, (square_sum - numel * abs_mean**2).clamp(min=0))
    free = torch.where(numel > 1, numel - 1, torch.nan)
    return torch.stack(
        [
            torch.where(numel > 0, low, torch.nan),
            torch.where(numel > 0, high, torch.nan),
            torch.where(numel > 0, mean, torch.nan),
            (squares / free).sqrt(),
            torch.where(numel > 0, abs_low, torch.nan),
            torch.where(numel > 0, torch.maximum(low.abs(), high.abs()), torch.nan),
            abs_mean,
            (abs_squares / free).sqrt(),
            square_sum.sqrt() / some,
            abs_mean,
            nonzero,
        ],
        dim=-1,
    )


def rows(parts: Tensor) -> list[dict[str, float | int | None]]:
    """(K, P) -> a dict by NAMES for each tensor, rounded to seven digits. Synchronizes with the device once.

    Undefined and non-finite numbers are None, for JSON. A tensor with non-finite elements also has "nonfinite", their
    count.
    """
    parts = parts.cpu()
    statistics = []
    for numbers, nonfinite in zip(to_rows(parts).tolist(), parts[:, -1].tolist(), strict=True):
        row: dict[str, float | int | None] = {
            name: _round_digits(number) for name, number in zip(NAMES[:-1], numbers, strict=False)
        }
        row["nonzero"] = int(numbers[-1])
        statistics.append({**row, "nonfinite": int(nonfinite)} if nonfinite else row)
    return statistics


def norms(parts: Tensor) -> Sequence[float | None]:
    """(K, P) -> L2 norm of each tensor, not divided by its size; None if not finite."""
    parts = parts.cpu()
    square_sums = parts[:, PARTS.index("squares")] + parts[:, 0] * parts[:, PARTS.index("mean")] ** 2
    return [norm if math.isfinite(norm) else None for norm in square_sums.sqrt().tolist()]


def _round_digits(number: float) -> float | None:
    return float(f"{number:.{_DIGITS}g}") if math.isfinite(number) else None


def _piece(piece: Tensor) -> Tensor:
    """Sums (P,) of a non-empty flat piece, in two passes over a copy for accuracy."""
    numbers, absolute = _scratch(piece)
    numbers.copy_(piece)
    torch.abs(numbers, out=absolute)
    low, high = numbers.aminmax()
    mean = numbers.mean()
    abs_low, abs_sum = absolute.amin(), absolute.sum()
    numel = torch.full_like(mean, piece.numel())
    # Counting costs as much as everything else. A CPU, which need not synchronize, counts only if needed.
    look = piece.device.type == "cpu"
    nonzero = numel if look and abs_low > 0 else absolute.count_nonzero().double()
    finite = torch.zeros_like(mean) if look and abs_sum.isfinite() else numel - absolute.isfinite().count_nonzero()
    numbers.sub_(mean)
    return torch.stack([numel, low, high, abs_low, mean, torch.dot(numbers, numbers), abs_sum, nonzero, finite])


def _scratch(piece: Tensor) -> tuple[Tensor, Tensor]:
    """Two scratch buffers, reused on a CPU, where allocation costs several times as much as the sums."""
    if piece.device.type == "cpu" and piece.numel() <= _CHUNK["cpu"]:
        return _cpu_scratch()[0, : piece.numel()], _cpu_scratch()[1, : piece.numel()]
    return torch.empty_like(piece, dtype=torch.float64), torch.empty_like(piece, dtype=torch.float64)


@cache
def _cpu_scratch() -> Tensor:
    return torch.empty(2, _CHUNK["cpu"], dtype=torch.float64)
