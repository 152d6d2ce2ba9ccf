"""95 % intervals of a mean over seeds, after Student's t, without scipy."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import stdev

_NORMAL = 1.959963984540054
"""The 0.975 quantile of the normal distribution."""
_MANY = 200


@cache
def t_975(freedom: int) -> float:
    """The 0.975 quantile of Student's t with `freedom` >= 1 degrees of freedom, to 1e-9 of its value.

    Up to 200 degrees the distribution function is a finite sum (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and
    26.7.4), inverted by bisection; beyond, the expansion 26.7.5 at the normal quantile.
    """
    assert freedom >= 1, freedom
    if freedom > _MANY:
        return _expanded(freedom)
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def half_width_95(std: float, count: int) -> float:
    """Half the width of the 95 % interval of the mean of `count` >= 2 values with the sample standard deviation `std`."""
    return t_975(count - 1) * std / math.sqrt(count)


def ci95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean of `values`; None of fewer than two."""
    return half_width_95(stdev(values), len(values)) if len(values) > 1 else None


def _within(angle: float, freedom: int) -> float:
    """Probability that |t| <= sqrt(freedom) tan(angle)."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(2 if odd else 1, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _expanded(freedom: int) -> float:
    x = _NORMAL
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, start=1))
