"""Paired comparisons of experiments: differences of means over seeds, intervals, and verdicts.

Student's t over seeds (Welch's if they are not common; Student 1908, Welch 1947), the paired bootstrap over seeds and
validation samples (Efron and Tibshirani 1993, chapters 13 and 16), and Holm's correction (Holm 1979).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from src.errors import ConfigError
from src.tables.comparability import PER_BYTE, Family
from src.tables.results import FINISHED, SEED, Row, lower_is_better
from src.tables.statistics import averaged_rows, deviation, ended_in_nan, t_975

if TYPE_CHECKING:
    import numpy as np

BETTER, WORSE, SAME = "better", "worse", "not distinguishable"
LEVEL = 0.05
"""Probability of a verdict other than "not distinguishable" for equal experiments."""
MIN_SEEDS = 3
MAX_SEEDS = 1000
"""Maximum number of seeds to look for."""
DRAWS = 2000
"""Minimum number of bootstrap draws."""
DRAWS_PER_CANDIDATE = 200
"""More draws for many candidates, so that p can be small enough for Holm's correction."""
_ROUNDING = 1e-3
"""Relative difference of a score and its recorded sums."""
_DENOMINATORS = {"val_loss": ("tokens", 1.0), PER_BYTE: ("bytes", 1 / math.log(2))}
"""Score -> its denominator in validation.json, and its units in a nat."""
Interval = tuple[float, float]


@dataclass
class Comparison:
    """A candidate against the base. Differences are candidate minus base."""

    candidate: Family
    base_mean: float
    mean: float = math.nan
    difference: float = math.nan
    t_interval: Interval | None = None
    """95 % interval over seeds; None for a single pair."""
    bootstrap_interval: Interval | None = None
    """95 % interval over seeds and, if `samples`, over validation samples."""
    pairs: int = 0
    """Number of pairs; if not paired, the smaller number of seeds."""
    is_paired: bool = True
    samples: int = 0
    """Validation samples, or groups of them; 0 if they are not recorded or differ."""
    p: float = 1.0
    """Two-sided, after Holm's correction; the larger value of t and bootstrap."""
    verdict: str = SAME
    more_seeds: int | None = None
    """Further seeds for a t interval of ± the minimum effect, or without one of ± the difference; None if it cannot be
    computed, or above `MAX_SEEDS`."""
    diverged_seeds: list[Any] = field(default_factory=list)
    """Seeds of the candidate that ended in NaN, which makes it worse."""
    failed_seeds: list[Any] = field(default_factory=list)
    """Seeds of either side that failed or have not finished, so that there is no verdict: those that are left are no
    fair sample."""


@dataclass
class _Sides:
    """Values of both sides by seed."""

    values: "list[np.ndarray]"
    """(seeds,) float64 of the base, and of the candidate."""
    is_paired: bool
    nats: "list[np.ndarray]" = field(default_factory=list)
    """(seeds, samples) of each side, in units of the score; empty without samples."""
    denominators: "np.ndarray | None" = None
    """(samples,). value = sum of nats / sum of denominators."""


def compare(
    base: Family,
    candidates: Sequence[Family],
    metric: str,
    lowest: bool | None = None,
    min_effect: float = 0.0,
    seed: str = SEED,
) -> list[Comparison]:
    """Compare each candidate with the base over finished runs, with Holm's correction over the candidates.

    lowest: whether a low score is good; None: by its name. min_effect: "better" requires an improvement of more than
    this, "worse" a deterioration of more than this.

    Raises:
        ConfigError: no finished run of a side has the score, the base ended in NaN, or `min_effect` is negative.
    """
    require_min_effect(min_effect)
    count = max(DRAWS, DRAWS_PER_CANDIDATE * len(candidates))
    results = [_compare(base, candidate, metric, min_effect, seed, count) for candidate in candidates]
    lowest, largest = lower_is_better(metric) if lowest is None else lowest, 0.0
    for place, result in enumerate(sorted(results, key=lambda each: each.p)):
        result.p = largest = max(largest, min(1.0, (len(results) - place) * result.p))
        if not result.diverged_seeds and not result.failed_seeds and result.p < LEVEL:
            result.verdict = BETTER if (result.difference < 0) == lowest else WORSE
    return results


def require_min_effect(value: float) -> None:
    """Raise ConfigError if `value` is no minimum effect: a number of at least 0."""
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"--min-effect: expected a number of at least 0, got {value}.")


def _compare(base: Family, candidate: Family, metric: str, min_effect: float, seed: str, count: int) -> Comparison:
    import numpy as np

    base_rows, diverged_base_seeds = _rows_by_seed(base, metric, seed)
    rows, diverged_seeds = _rows_by_seed(candidate, metric, seed)
    if diverged_base_seeds:
        raise ConfigError(f"{base.rows[0]['exp_id']}: diverged, or {metric} ended in NaN. Choose another base.")
    if diverged_seeds:
        mean = statistics.fmean(row[metric] for row in base_rows.values())
        return Comparison(candidate, mean, pairs=len(rows), verdict=WORSE, diverged_seeds=diverged_seeds)
    records = base.records | candidate.records
    if metric == PER_BYTE:
        _require_recorded_scores([*base_rows.values(), *rows.values()], records)
    sides = _pair(base_rows, rows, records, metric)
    base_mean, mean = (float(side.mean()) for side in sides.values)
    difference = mean - base_mean
    samples = [sides.values[1] - sides.values[0]] if sides.is_paired else sides.values
    pairs = min(map(len, samples))
    draws = _bootstrap(sides, count)
    interval, p = None, 1.0
    if pairs > 1:
        half, t_p = _t_test(samples, difference, min_effect)
        interval = difference - half, difference + half
        if half or sides.nats:  # else the seed changes nothing, so seeds are no sample
            p = max(t_p, _draws_p(draws, min_effect))
        if sides.is_paired and len(base_rows) + len(rows) > 2 * pairs:  # which seeds have a pair can depend on results
            every = [np.array([row[metric] for row in by_seed.values()]) for by_seed in (base_rows, rows)]
            gain = float(every[1].mean() - every[0].mean())
            half, t_p = _t_test(every, gain, min_effect)
            p = max(p, t_p) if half and gain * difference > 0 else 1.0
    low, high = np.percentile(draws, [100 * LEVEL / 2, 100 - 100 * LEVEL / 2])
    return Comparison(
        candidate,
        base_mean,
        mean,
        difference,
        interval,
        (float(low), float(high)),
        pairs,
        sides.is_paired,
        0 if sides.denominators is None else len(sides.denominators),
        p,
        more_seeds=_more_seeds(samples, min_effect or abs(difference)),
        failed_seeds=[row.get(seed) for row in (*base.rows, *candidate.rows) if row["state"] not in FINISHED],
    )


def _rows_by_seed(family: Family, metric: str, seed: str) -> tuple[dict[Any, Row], list[Any]]:
    """Finished runs with the score by seed, and the seeds that diverged or ended in NaN.

    Raises:
        ConfigError: there is neither; or two runs have one seed, such as children of parents with different seeds.
    """
    rows = averaged_rows(family.rows)
    ids: dict[Any, str] = {}
    for row in rows:
        if (other := ids.setdefault(row.get(seed), row["exp_id"])) != row["exp_id"]:
            raise ConfigError(
                f"{other} and {row['exp_id']}: both have {seed} {row.get(seed)!r}. Give each run a seed of its own."
            )
    diverged_seeds = [row.get(seed) for row in rows if ended_in_nan(row, metric)]
    diverged_seeds += [row.get(seed) for row in family.rows if row["exp_id"] in family.diverged_ids]
    by_seed = {row.get(seed): row for row in rows if row.get(metric) is not None}
    if not by_seed and not diverged_seeds:
        raise ConfigError(
            f"{family.rows[0]['exp_id']}: no finished run of this experiment has {metric!r}. "
            "Choose another --metric, or wait for the end of a run."
        )
    return by_seed, diverged_seeds


def _require_recorded_scores(rows: Sequence[Row], records: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError if val_bits_per_byte of a run differs from its recorded sums by more than rounding."""
    for row in rows:
        record = records.get(row["exp_id"], {})
        value = sum(record["nats"]) / sum(record["bytes"]) / math.log(2) if record.get("bytes") else row[PER_BYTE]
        if not math.isclose(value, row[PER_BYTE], rel_tol=_ROUNDING):
            raise ConfigError(
                f"{row['exp_id']}: {PER_BYTE} is {row[PER_BYTE]:.6g}, but the sums of its validation give {value:.6g}. "
                "Its scores were changed; train it again."
            )


def _pair(
    base_rows: Mapping[Any, Row], rows: Mapping[Any, Row], records: Mapping[str, Mapping[str, Any]], metric: str
) -> _Sides:
    """The values of the common seeds if these are all of a side, else of all seeds, not paired; with samples if all
    runs have the same."""
    import numpy as np

    common = sorted(base_rows.keys() & rows, key=repr)  # the order of runs changes no bootstrap draw
    if len(common) < min(len(base_rows), len(rows)):
        common = []
    side_rows = [[by_seed[key] for key in common or sorted(by_seed, key=repr)] for by_seed in (base_rows, rows)]
    sides = _Sides([np.array([row[metric] for row in side], dtype=float) for side in side_rows], bool(common))
    name, unit = _DENOMINATORS.get(metric, ("", 1.0))
    of_sides = [[records.get(row["exp_id"], {}) for row in side] for side in side_rows]
    first = of_sides[0][0].get(name)
    if first and all(record.get(name) == first for side in of_sides for record in side):
        has_text = np.array(first) > 0  # a sample without text has no share of the score
        nats = [(np.array([record["nats"] for record in side]) * unit)[:, has_text] for side in of_sides]
        total = sum(first)
        # val_loss can be a mean over tasks, or of tokens with weights
        if all(
            np.allclose(of_side.sum(axis=1) / total, values, rtol=_ROUNDING)
            for of_side, values in zip(nats, sides.values, strict=True)
        ):
            sides.nats, sides.denominators = nats, np.array(first, dtype=float)[has_text]
    return sides


def _t_test(samples: "Sequence[np.ndarray]", gain: float, min_effect: float) -> tuple[float, float]:
    """Half the 95 % interval of the mean of one sample, or (Welch) of the difference of the means of two, and the
    two-sided p that the `gain`, which is this mean or difference, is within ± `min_effect`."""
    from scipy.special import stdtr

    parts = [deviation(values.tolist()) ** 2 / len(values) for values in samples]
    freedoms = [len(values) - 1 for values in samples]
    total, error = sum(parts), math.sqrt(sum(parts))
    weights = sum(part**2 / freedom for part, freedom in zip(parts, freedoms, strict=True))
    freedom = total**2 / weights if weights else sum(freedoms)
    excess = abs(gain) - min_effect
    p = min(1.0, 2 * float(stdtr(freedom, -excess / error))) if error else float(excess <= 0)
    return t_975(freedom) * error, p


def _more_seeds(samples: "Sequence[np.ndarray]", half_width: float) -> int | None:
    """Further seeds for a t interval of ± `half_width`; None if unknown or above `MAX_SEEDS`."""
    number = min(map(len, samples))
    if number < 2 or not half_width:
        return MIN_SEEDS - number if half_width else None
    variance = sum(deviation(values.tolist()) ** 2 for values in samples)
    numbers = range(max(number, MIN_SEEDS), MAX_SEEDS)
    widths = ((n, t_975(len(samples) * (n - 1)) * math.sqrt(variance / n)) for n in numbers)
    return next((n - number for n, width in widths if width <= half_width), None)


def _draws_p(differences: "np.ndarray", min_effect: float) -> float:
    """Two-sided p of bootstrap draws of the difference."""
    smaller = min((differences <= min_effect).sum(), (differences >= -min_effect).sum())
    return min(1.0, 2 * (int(smaller) + 1) / (len(differences) + 1))


def _bootstrap(sides: _Sides, count: int) -> "np.ndarray":
    """(count,) differences of means over resampled seeds and samples; paired where the sides are paired."""
    import numpy as np

    random = np.random.default_rng(0)

    def weights(number: int) -> "np.ndarray":
        return random.multinomial(number, np.full(number, 1 / number), size=count).astype(float)

    of_base = weights(len(sides.values[0]))
    of_seeds = [of_base, of_base if sides.is_paired else weights(len(sides.values[1]))]
    values = sides.values
    if sides.denominators is not None:
        of_samples = weights(len(sides.denominators))
        values = [of_samples @ nats.T / (of_samples @ sides.denominators)[:, None] for nats in sides.nats]
    means = [(v * w).sum(axis=1) / w.sum(axis=1) for v, w in zip(values, of_seeds, strict=True)]
    return means[1] - means[0]
