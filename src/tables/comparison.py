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
from src.tables.results import FINISHED, SEED, lower_is_better
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
_DENOMINATORS = {"val_loss": ("tokens", 1.0), "val_bits_per_byte": ("bytes", math.log(2))}
"""Score -> its denominator in validation.json, and the nats of its unit."""
Interval = tuple[float, float]


@dataclass
class Comparison:
    """A candidate against the base. Differences are candidate minus base."""

    candidate: Family
    base_mean: float
    mean: float
    difference: float
    t_interval: Interval | None
    """95 % interval over seeds; None for a single pair."""
    bootstrap_interval: Interval | None
    """95 % interval over seeds and, if `samples`, over validation samples."""
    pairs: int
    """Number of pairs; if not paired, the smaller number of seeds."""
    is_paired: bool
    samples: int
    """Validation samples, or groups of them; 0 if they are not recorded or differ."""
    p: float
    """Two-sided, after Holm's correction; the larger value of t and bootstrap."""
    verdict: str
    more_seeds: int | None
    """Further seeds for a t interval of ± the minimum effect, or without one of ± the difference; None if it cannot be
    computed, or above `MAX_SEEDS`."""
    diverged_seeds: list[Any] = field(default_factory=list)
    """Seeds of the candidate that ended in NaN, which makes it worse."""
    failed_seeds: list[Any] = field(default_factory=list)
    """Seeds of either side that failed or have not finished, so that there is no verdict: those that are left are no
    fair sample."""


@dataclass
class _Sides:
    """Values of both sides. With samples, value = sum of nats / sum of denominators."""

    base: "np.ndarray"
    """(seeds,) float64."""
    candidate: "np.ndarray"
    is_paired: bool
    sums: "tuple[np.ndarray, ...] | None"
    """Nats and denominators of the base, (seeds, samples), and those of the candidate; None without samples."""

    @property
    def pairs(self) -> int:
        """Number of pairs; if not paired, the smaller number of seeds."""
        return min(len(self.base), len(self.candidate))

    def variances(self) -> list[float]:
        """Variance over seeds of the differences of pairs, or of each side."""
        samples = [self.candidate - self.base] if self.is_paired else [self.base, self.candidate]
        return [deviation(values.tolist()) ** 2 for values in samples]

    def standard_error(self) -> tuple[float | None, float]:
        """Standard error of the difference of means, and its degrees of freedom (Welch's without pairs). None for
        fewer than two seeds."""
        if self.pairs < 2:
            return None, 0.0
        counts = [self.pairs] if self.is_paired else [len(self.base), len(self.candidate)]
        parts = [variance / count for variance, count in zip(self.variances(), counts, strict=True)]
        total = sum(parts)
        weights = sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
        return math.sqrt(total), total**2 / weights if weights else sum(counts) - len(counts)

    def more_seeds(self, half_width: float) -> int | None:
        """Further seeds for a t interval of ± `half_width`; None if unknown or above `MAX_SEEDS`."""
        if not half_width:
            return None
        if self.pairs < 2:
            return MIN_SEEDS - self.pairs
        variances = self.variances()
        for number in range(max(self.pairs, MIN_SEEDS), MAX_SEEDS):
            freedom = len(variances) * (number - 1)
            if t_975(freedom) * math.sqrt(sum(variances) / number) <= half_width:
                return number - self.pairs
        return None


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
    sign = -1.0 if (lower_is_better(metric) if lowest is None else lowest) else 1.0
    results = [_compare(base, candidate, metric, sign, min_effect, seed, count) for candidate in candidates]
    corrected_p, largest = [0.0] * len(results), 0.0
    order = sorted(range(len(results)), key=lambda number: results[number].p)
    for place, number in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * results[number].p))
        corrected_p[number] = largest
    for result, p in zip(results, corrected_p, strict=True):
        result.p = p
        if not result.diverged_seeds and not result.failed_seeds and p < LEVEL:
            result.verdict = BETTER if sign * result.difference > 0 else WORSE
    return results


def require_min_effect(value: float) -> None:
    """Raise ConfigError if `value` is no minimum effect: a number of at least 0."""
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"--min-effect: expected a number of at least 0, got {value}.")


def _compare(  # noqa: PLR0913, PLR0917
    base: Family, candidate: Family, metric: str, sign: float, min_effect: float, seed: str, count: int
) -> Comparison:
    import numpy as np

    (base_rows, diverged_base_seeds), (candidate_rows, diverged_seeds) = (
        _rows_by_seed(family, metric, seed) for family in (base, candidate)
    )
    if diverged_base_seeds:
        raise ConfigError(f"{base.rows[0]['exp_id']}: diverged, or {metric} ended in NaN. Choose another base.")
    for family, rows in ((base, base_rows), (candidate, candidate_rows)):
        if not rows and not diverged_seeds:
            raise ConfigError(
                f"{family.rows[0]['exp_id']}: no finished run of this experiment has {metric!r}. "
                "Choose another --metric, or wait for the end of a run."
            )
    if diverged_seeds:
        mean, nan = statistics.fmean(row[metric] for row in base_rows.values()), math.nan
        pairs = len(candidate_rows)
        return Comparison(candidate, mean, nan, nan, None, None, pairs, True, 0, 1.0, WORSE, None, diverged_seeds)
    sides = _pair(base, candidate, base_rows, candidate_rows, metric)
    difference = float(sides.candidate.mean() - sides.base.mean())
    error, freedom = sides.standard_error()
    draws = _bootstrap(sides, count)
    half, p = None, 1.0
    if error is not None:
        half = _t_quantile(freedom) * error
        p = max(_t_p(sign * difference, error, freedom, min_effect), _draws_p(sign * draws, min_effect))
        if not error and sides.sums is None:
            p = 1.0  # the seed changes nothing, so seeds are no sample
        if sides.is_paired and len(base_rows) + len(candidate_rows) > 2 * sides.pairs:
            p = max(p, _p_of_all(base_rows, candidate_rows, metric, difference, min_effect))
    low, high = np.percentile(draws, [100 * LEVEL / 2, 100 - 100 * LEVEL / 2])
    return Comparison(
        candidate,
        float(sides.base.mean()),
        float(sides.candidate.mean()),
        difference,
        None if half is None else (difference - half, difference + half),
        (float(low), float(high)),
        sides.pairs,
        sides.is_paired,
        0 if sides.sums is None else sides.sums[0].shape[1],
        p,
        SAME,
        sides.more_seeds(min_effect or abs(difference)),
        failed_seeds=[row.get(seed) for row in (*base.rows, *candidate.rows) if row["state"] not in FINISHED],
    )


def _p_of_all(
    base_rows: Mapping[Any, Any], candidate_rows: Mapping[Any, Any], metric: str, difference: float, min_effect: float
) -> float:
    """Welch's p of all seeds, if one side has more than the pairs: which seeds have a pair can depend on results.
    difference: that of the pairs; p is 1 if all seeds have the opposite sign."""
    import numpy as np

    ours, theirs = (np.array([row[metric] for row in rows.values()]) for rows in (base_rows, candidate_rows))
    error, freedom = _Sides(ours, theirs, False, None).standard_error()
    gain = float(theirs.mean() - ours.mean())
    return _t_p(gain, error, freedom, min_effect) if error and gain * difference > 0 else 1.0


def _rows_by_seed(family: Family, metric: str, seed: str) -> tuple[dict[Any, Any], list[Any]]:
    """Finished runs with the score by seed, and the seeds that diverged or ended in NaN.

    Raises:
        ConfigError: two runs have one seed, such as children of parents with different seeds.
    """
    rows = averaged_rows(family.rows)
    by_seed: dict[Any, str] = {}
    for row in rows:
        other = by_seed.setdefault(row.get(seed), row["exp_id"])
        if other != row["exp_id"]:
            raise ConfigError(
                f"{other} and {row['exp_id']}: both have {seed} {row.get(seed)!r}. Give each run a seed of its own."
            )
    diverged_seeds = [row.get(seed) for row in rows if ended_in_nan(row, metric)]
    diverged_seeds += [row.get(seed) for row in family.rows if row["exp_id"] in family.diverged_ids]
    return {row.get(seed): row for row in rows if row.get(metric) is not None}, diverged_seeds


def _pair(
    base: Family, candidate: Family, base_rows: Mapping[Any, Any], candidate_rows: Mapping[Any, Any], metric: str
) -> _Sides:
    """The values of the common seeds if these are all of a side, else of all seeds, not paired; with samples if all
    runs have the same."""
    import numpy as np

    common = sorted(base_rows.keys() & candidate_rows, key=repr)  # the order of runs changes no bootstrap draw
    if len(common) < min(len(base_rows), len(candidate_rows)):
        common = []
    rows = [[by_seed[key] for key in common or sorted(by_seed, key=repr)] for by_seed in (base_rows, candidate_rows)]
    values = [np.array([row[metric] for row in side], dtype=float) for side in rows]
    sums = None
    if metric in _DENOMINATORS:
        name, unit = _DENOMINATORS[metric]
        every_record = base.records | candidate.records
        records = [[every_record.get(row["exp_id"], {}) for row in side] for side in rows]
        first = records[0][0].get(name)
        _require_recorded_scores([*base_rows.values(), *candidate_rows.values()], every_record, metric)
        if first and all(record.get(name) == first for side in records for record in side):
            arrays = [
                np.array([record[key] for record in side], dtype=float) * scale
                for side in records
                for key, scale in (("nats", 1 / unit), (name, 1.0))
            ]
            arrays = [each[:, arrays[1][0] > 0] for each in arrays]  # a sample without text has no share of the score
            means = [arrays[i].sum(axis=1) / arrays[i + 1].sum(axis=1) for i in (0, 2)]
            if all(np.allclose(mean, value, rtol=1e-3) for mean, value in zip(means, values, strict=True)):
                sums = tuple(arrays)
    return _Sides(values[0], values[1], bool(common), sums)


def _require_recorded_scores(
    rows: Sequence[Mapping[str, Any]], records: Mapping[str, Mapping[str, Any]], metric: str
) -> None:
    """Raise ConfigError if val_bits_per_byte of a run differs from its recorded sums by more than rounding."""
    if metric != PER_BYTE:
        return  # val_loss can be a mean over tasks, or of tokens with weights
    for row in rows:
        record = records.get(row["exp_id"], {})
        if record.get("bytes") and row.get(metric) is not None:
            value = sum(record["nats"]) / sum(record["bytes"]) / math.log(2)
            if not math.isclose(value, row[metric], rel_tol=1e-3):
                raise ConfigError(
                    f"{row['exp_id']}: {metric} is {row[metric]:.6g}, but the sums of its validation give {value:.6g}. "
                    "Its scores were changed; train it again."
                )


def _t_quantile(freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - LEVEL / 2))


def _t_p(gain: float, error: float, freedom: float, min_effect: float) -> float:
    """Two-sided p that the gain is within ± `min_effect`."""
    from scipy.special import stdtr

    excess = abs(gain) - min_effect
    return min(1.0, 2 * float(stdtr(freedom, -excess / error))) if error else float(excess <= 0)


def _draws_p(gains: "np.ndarray", min_effect: float) -> float:
    """Two-sided p of bootstrap draws of the gain."""
    smaller = min((gains <= min_effect).sum(), (gains >= -min_effect).sum())
    return min(1.0, 2 * (int(smaller) + 1) / (len(gains) + 1))


def _bootstrap(sides: _Sides, count: int) -> "np.ndarray":
    """(count,) differences of means over resampled seeds and samples; paired where the sides are paired."""
    import numpy as np

    random = np.random.default_rng(0)

    def weights(number: int) -> "np.ndarray":
        return random.multinomial(number, np.full(number, 1 / number), size=count).astype(float)

    of_seeds = weights(len(sides.base))
    of_candidates = of_seeds if sides.is_paired else weights(len(sides.candidate))
    values = [np.broadcast_to(side, (count, len(side))) for side in (sides.base, sides.candidate)]
    if sides.sums is not None:
        of_samples = weights(sides.sums[0].shape[1])
        values = [(of_samples @ sides.sums[i].T) / (of_samples @ sides.sums[i + 1].T) for i in (0, 2)]
    means = [(v * w).sum(axis=1) / w.sum(axis=1) for v, w in zip(values, (of_seeds, of_candidates), strict=True)]
    return means[1] - means[0]
