"""Groups of runs that differ in their seed alone: mean, standard deviation, confidence interval, and tables of two keys."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from src.tables.rows import (
    FACTS,
    FINISHED,
    SEED,
    Row,
    check_known,
    config_keys,
    distinguishing_keys,
    group_rows,
    resolve_key,
    score_names,
    sort_key,
    spell,
)


def grouping_keys(rows: Sequence[Row], by: Sequence[str] | None, seed: str = SEED) -> list[str]:
    """`by`, or if it is None the `distinguishing_keys` of `rows`: those that differ, but for the key `seed`.

    Raises:
        ConfigError: a key of `by` that no row has.
    """
    if by is None:
        return distinguishing_keys(rows, seed)
    known = {key for row in rows for key in [*config_keys(row), *FACTS]}
    by = [resolve_key(known, key) for key in by]
    check_known("key", by, known)
    return by


def averaged_rows(rows: Sequence[Row], unfinished: bool = False) -> list[Row]:
    """Those of `rows` that means are taken over: the finished ones. The last score of a run that crashed or goes on is no result."""
    return [row for row in rows if unfinished or row["state"] in FINISHED]


def mean(rows: Sequence[Row], score: str, unfinished: bool = False) -> float | None:
    """Of one score over `averaged_rows`; None where none of these has it."""
    values = [row[score] for row in averaged_rows(rows, unfinished) if row.get(score) is not None]
    return statistics.fmean(values) if values else None


def aggregate(rows: Sequence[Row], by: Sequence[str], scores: Sequence[str], unfinished: bool = False) -> list[dict[str, Any]]:
    """One row for each combination of `by`; its means are over the finished runs, or with `unfinished` over all that have the score.

    Its keys: those of `by`; "exp_ids", "tags" and "note" of its runs; "runs", their number; "done", how many are finished; "state", such
    as "done" or "2 done, 1 failed"; "step", the lowest last step; and for each score its mean (None over no run), "<score>_std" (sample,
    n - 1; None for n < 2), "<score>_ci95" (half the width of the 95 % confidence interval of the mean, Student's t; None for n < 2) and
    "<score>_n" (runs that the mean is over).

    Raises:
        ConfigError: a key of `by` or a score that no row has.
    """
    by = grouping_keys(rows, by)
    check_known("score", scores, score_names(rows))
    return [_aggregate_group(group, by, scores, unfinished) for group in group_rows(rows, by)]


def count_runs(row: dict[str, Any], score: str) -> str:
    """Which runs the mean of a score in a row of `aggregate` is over: "3 of 5", "" for all; without a mean "0 of 2 done", or "-"."""
    if row[score] is None:
        return "-" if row["done"] else f"0 of {row['runs']} done"
    return "" if row[f"{score}_n"] == row["runs"] else f"{row[f'{score}_n']} of {row['runs']}"


def missing_seeds(rows: Sequence[Row], by: Sequence[str], seed: str = SEED) -> list[str]:
    """A sentence for each combination of `by` that lacks values of `seed` which others have: its mean is over different runs."""
    if seed in by:
        return []
    found = []
    for alike in group_rows(rows, ["group"] if "group" in by else []):  # groups that are rows of their own are not compared
        seeds = sorted({spell(row, seed): row[seed] for row in alike if seed in row}.items(), key=lambda pair: sort_key(pair[1]))
        for group in group_rows(alike, by):
            has = {spell(row, seed) for row in group}
            if absent := [value for spelled, value in seeds if spelled not in has]:
                named = ", ".join(f"{key}={group[0].get(key)}" for key in by) or "all"
                found.append(f"{named}: no run with {seed} {', '.join(map(str, absent))}, which others have.")
    return found


@dataclass(frozen=True)
class Pivot:
    """One score over two keys."""

    rows: list[Any]
    """Values of the first key, sorted."""
    columns: list[Any]
    """Values of the second key, sorted."""
    cells: list[list[dict[str, Any] | None]]
    """Rows of `aggregate`; None for a combination without runs."""


def pivot(rows: Sequence[Row], index: str, columns: str, score: str, unfinished: bool = False) -> Pivot:
    """Mean of `score`, as `aggregate` takes it, for each combination of the keys `index` and `columns`.

    Raises:
        ConfigError: a key or a score that no row has.
    """
    index, columns = grouping_keys(rows, [index, columns])
    cells = {(spell(cell, index), spell(cell, columns)): cell for cell in aggregate(rows, [index, columns], [score], unfinished)}
    downwards, across = ({spell(row, key): row.get(key) for row in rows} for key in (index, columns))
    down, over = (sorted(values, key=lambda spelled, values=values: sort_key(values[spelled])) for values in (downwards, across))
    table = [[cells.get((one, other)) for other in over] for one in down]
    return Pivot([downwards[one] for one in down], [across[other] for other in over], table)


def _aggregate_group(rows: Sequence[Row], by: Sequence[str], scores: Sequence[str], unfinished: bool) -> dict[str, Any]:
    over = averaged_rows(rows, unfinished)
    states = [(row["state"] == "lost" and row.contact) or row["state"] for row in rows]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    steps = [row["step"] for row in rows if row["step"] is not None]
    found: dict[str, Any] = {key: rows[0].get(key) for key in by}
    found["exp_ids"] = [row["exp_id"] for row in rows]
    found["runs"] = len(rows)
    found["done"] = len(averaged_rows(rows))
    found["state"] = states[0] if len(counts) == 1 else ", ".join(f"{n} {state}" for state, n in counts.items())
    found["step"] = min(steps) if steps else None
    found["tags"] = sorted({tag for row in rows for tag in row["tags"]})
    found["note"] = "; ".join(dict.fromkeys(row["note"] for row in rows if row["note"]))
    for name in scores:
        values = [row[name] for row in over if row.get(name) is not None]
        found[name] = statistics.fmean(values) if values else None
        found[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
        found[f"{name}_ci95"] = ci95(values)
        found[f"{name}_n"] = len(values)
    return found


@cache
def t_975(freedom: int) -> float:
    """The 0.975 quantile of Student's t with `freedom` >= 1 degrees of freedom.

    The distribution function is a finite sum (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4), inverted by
    bisection. Importing scipy.stats takes a second.
    """
    assert freedom >= 1, freedom
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, freedom) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def ci95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean of `values`; None for fewer than two."""
    return t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _probability(angle: float, freedom: int) -> float:
    """The probability that |t| <= sqrt(freedom) tan(angle)."""
    sine, square, odd = math.sin(angle), math.cos(angle) ** 2, freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(2 if odd else 1, freedom, 2):
        total += term
        term *= square * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
