"""Groups of runs that differ only in seed: mean, standard deviation, confidence interval, and tables of two keys."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from src.tables.results import (
    FACTS,
    FINISHED,
    SEED,
    Row,
    all_config_keys,
    check_known,
    distinguishing_keys,
    group_rows,
    resolve_key,
    score_names,
    sort_key,
    spell,
)


def grouping_keys(rows: Sequence[Row], by: Sequence[str] | None, seed: str = SEED) -> list[str]:
    """`by`; or if None, the `distinguishing_keys` of `rows`: keys that differ, except for `seed`.

    Raises:
        ConfigError: no row has a key of `by`.
    """
    if by is None:
        return distinguishing_keys(rows, seed)
    existing = {*all_config_keys(rows), *FACTS}
    by = [resolve_key(existing, key) for key in by]
    check_known("key", by, existing)
    return by


def averaged_rows(rows: Sequence[Row], include_unfinished: bool = False) -> list[Row]:
    """The rows to average: finished runs, since the last score of a crashed or running run is not a result."""
    return [row for row in rows if include_unfinished or row["state"] in FINISHED]


def mean(rows: Sequence[Row], score: str, include_unfinished: bool = False) -> float | None:
    """The mean of a score over `averaged_rows`; None if no row has it."""
    values = [row[score] for row in averaged_rows(rows, include_unfinished) if row.get(score) is not None]
    return statistics.fmean(values) if values else None


def aggregate(
    rows: Sequence[Row], by: Sequence[str], scores: Sequence[str], include_unfinished: bool = False
) -> list[dict[str, Any]]:
    """One row for each combination of `by`, with means over the finished runs; with `include_unfinished`, over all runs
    that have the score.

    Keys: those of `by`; "exp_ids", "tags" and "note" of the runs; "runs", their number; "done", how many are finished;
    "state", such as "done" or "2 done, 1 failed"; "over", the averaged runs: "done", "all" or "step 10"; "step", the
    last step of the averaged runs, or of all runs if no run is averaged, as "5-10" if they differ; and for each score
    the mean (None without a run), "<score>_std" (sample, n - 1; None for n < 2), "<score>_ci95" (half the width of the
    95 % confidence interval of the mean, Student's t; None for n < 2), "<score>_n" (number of averaged runs) and
    "<score>_nan" (number of runs left out because the score ended in NaN or infinity).

    Raises:
        ConfigError: no row has a key of `by`, or a score.
    """
    by = grouping_keys(rows, by)
    check_known("score", scores, score_names(rows))
    return [_aggregate_group(group, by, scores, include_unfinished) for group in group_rows(rows, by)]


def count_runs(row: dict[str, Any], score: str) -> str:
    """How many runs the mean of a score includes, in a row of `aggregate`: "3 of 5", or "" for all.

    Without a mean: "0 of 2 done" or "0 of 2 at step 10"; "NaN" if all values ended in NaN; "-" if the score is missing.
    """
    if row[score] is not None:
        return "" if row[f"{score}_n"] == row["runs"] else f"{row[f'{score}_n']} of {row['runs']}"
    if row["over"].startswith("step"):
        return f"0 of {row['runs']} at {row['over']}"
    if row["over"] == "done" and not row["done"]:
        return f"0 of {row['runs']} done"
    return "NaN" if row[f"{score}_nan"] else "-"


def ended_in_nan(row: Row, score: str) -> bool:
    """Whether the last value of the score was NaN or infinity."""
    return row.get(score, 0.0) is None and score in row.scores and row.at_step is None


def nan_remarks(rows: Sequence[Row], scores: Sequence[str], include_unfinished: bool = False) -> list[str]:
    """A remark with the number of runs that means leave out because a score ended in NaN or infinity; else empty."""
    names = {
        row["exp_id"]: [name for name in scores if ended_in_nan(row, name)]
        for row in averaged_rows(rows, include_unfinished)
        if None in row.values()
    }
    count = sum(map(bool, names.values()))
    score_list = [name for name in scores if any(name in of_run for of_run in names.values())]
    return [f"{count} run{'s' * (count > 1)} ended in NaN: {', '.join(score_list)}."] if count else []


def missing_seeds(rows: Sequence[Row], by: Sequence[str], seed: str = SEED) -> list[str]:
    """A remark for each combination of `by` that has no run with a seed of other combinations:
    their means are not over the same seeds."""
    if seed in by:
        return []
    result = []
    for comparable_rows in group_rows(
        rows, ["group"] if "group" in by else []
    ):  # if groups are separate rows, they are not compared
        seeds = sorted(
            {spell(row, seed): row[seed] for row in comparable_rows if seed in row}.items(),
            key=lambda pair: sort_key(pair[1]),
        )
        for group in group_rows(comparable_rows, by):
            has = {spell(row, seed) for row in group}
            if absent := [value for text, value in seeds if text not in has]:
                values = ", ".join(f"{key}={group[0].get(key)}" for key in by) or "all"
                result.append(f"{values}: no run with {seed} {', '.join(map(str, absent))}; other rows have it.")
    return result


@dataclass(frozen=True)
class Pivot:
    """One score over two keys."""

    rows: list[Any]
    """Values of the first key, sorted."""
    columns: list[Any]
    """Values of the second key, sorted."""
    cells: list[list[dict[str, Any] | None]]
    """Rows of `aggregate`; None if a combination has no runs."""


def pivot(rows: Sequence[Row], index: str, columns: str, score: str, include_unfinished: bool = False) -> Pivot:
    """Mean of `score`, as in `aggregate`, for each combination of the keys `index` and `columns`.

    Raises:
        ConfigError: no row has a key or the score.
    """
    index, columns = grouping_keys(rows, [index, columns])
    cells = {
        (spell(cell, index), spell(cell, columns)): cell
        for cell in aggregate(rows, [index, columns], [score], include_unfinished)
    }
    downwards, across = ({spell(row, key): row.get(key) for row in rows} for key in (index, columns))
    down, over = (
        sorted(values, key=lambda text, values=values: sort_key(values[text])) for values in (downwards, across)
    )
    table = [[cells.get((one, other)) for other in over] for one in down]
    return Pivot([downwards[one] for one in down], [across[other] for other in over], table)


def _aggregate_group(
    rows: Sequence[Row], by: Sequence[str], scores: Sequence[str], include_unfinished: bool
) -> dict[str, Any]:
    over = averaged_rows(rows, include_unfinished)
    states = [(row["state"] == "lost" and row.contact) or row["state"] for row in rows]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    at_step = rows[0].at_step
    steps = [row["step"] for row in over or rows if row["step"] is not None]
    result: dict[str, Any] = {key: rows[0].get(key) for key in by}
    result["exp_ids"] = [row["exp_id"] for row in rows]
    result["runs"] = len(rows)
    result["done"] = len(averaged_rows(rows))
    result["state"] = states[0] if len(counts) == 1 else ", ".join(f"{n} {state}" for state, n in counts.items())
    result["over"] = f"step {at_step}" if at_step is not None else "all" if include_unfinished else "done"
    result["step"] = f"{min(steps)}-{max(steps)}" if len(set(steps)) > 1 else next(iter(steps), None)
    result["tags"] = sorted({tag for row in rows for tag in row["tags"]})
    result["note"] = "; ".join(dict.fromkeys(row["note"] for row in rows if row["note"]))
    for name in scores:
        values = [row[name] for row in over if row.get(name) is not None]
        result[name] = statistics.fmean(values) if values else None
        result[f"{name}_std"] = deviation(values) if len(values) > 1 else None
        result[f"{name}_ci95"] = ci95(values)
        result[f"{name}_n"] = len(values)
        result[f"{name}_nan"] = sum(ended_in_nan(row, name) for row in over)
    return result


@cache
def t_975(freedom: float) -> float:
    """The 0.975 quantile of Student's t with `freedom` >= 1 degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation of at least two values. Ten times as fast as `statistics.stdev`."""
    if min(values) == max(values):  # their mean can differ from them by rounding
        return 0.0
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def ci95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean of `values`; None for fewer than two."""
    return t_975(len(values) - 1) * deviation(values) / math.sqrt(len(values)) if len(values) > 1 else None
