"""Quantiles of Student's t: published values, and the area under the density."""

import math

import numpy as np
import pytest

from src.tables import statistics


# Table of percentage points of the t distribution, P = 0.975 (NIST/SEMATECH e-Handbook of Statistical Methods,
# 1.3.6.7.2).
@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (9, 2.262),
        (10, 2.228),
        (29, 2.045),
        (30, 2.042),
        (60, 2.000),
        (100, 1.984),
    ],
)
def test_published_values(freedom: int, expected: float):
    assert statistics.t_975(freedom) == pytest.approx(expected, abs=5.1e-4)


def test_closed_forms():
    assert statistics.t_975(1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-9)
    assert statistics.t_975(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 31, 100, 200, 201, 1000, 100_000])
def test_the_area_between_them_is_95_percent(freedom: int):
    points, step = np.linspace(0, statistics.t_975(freedom), 200_001, retstep=True)
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = constant * np.exp(-(freedom + 1) / 2 * np.log1p(points**2 / freedom))
    simpson = step / 3 * (density[0] + density[-1] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum())
    assert 2 * simpson == pytest.approx(0.95, abs=1e-8)


def test_the_interval_of_a_mean():
    values = [1.0, 2.0, 4.0, 8.0]
    assert statistics.ci95(values) == pytest.approx(statistics.t_975(3) * np.std(values, ddof=1) / 2, rel=1e-12)
    assert statistics.ci95([1.0]) is None
