"""Histories of scores as columns of numbers, and their means and deviations over seeds."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from src.errors import DataError, UserError
from src.files import reading
from src.runs.jsonl_records import read_appended
from src.runs.scores import SCORE_LIST, SCORES, read_score_list
from src.runs.store import CODE_VERSIONS, PERF
from src.runs.summary import is_finite, parse_rows
from src.tables import cache
from src.tables.results import Row, lower_is_better, score_names
from src.tables.statistics import ended_in_nan, t_975

if TYPE_CHECKING:
    import numpy as np

VALUES = ("last", "best", "max", "min")
"""Which value of a run a table shows."""
_BATCH = 500
_HEAD = ""
"""Cache name of the header of a history. The names of scores are stored as JSON, so they differ."""
Columns = dict[str, "np.ndarray"]
"""float64 by score, and "step", all of one length; NaN if a row has no such score."""


class _History(NamedTuple):
    """Columns of the first `size` bytes of a scores.jsonl. tail: hash of their end. scores: all names, in order."""

    size: int
    tail: str
    scores: list[str]
    columns: Columns


@dataclass
class Band:
    """A mean curve over runs; all arrays of one length, in the order of `x`."""

    x: "np.ndarray"
    mean: "np.ndarray"
    std: "np.ndarray"
    """Sample standard deviation (n - 1); NaN for a single run."""
    count: "np.ndarray"
    """Number of runs with a finite value."""

    def half_width(self, interval: str = "std") -> "np.ndarray":
        """Half the width of the band: "std", or "ci95", the 95 % confidence interval of the mean.
        NaN for a single run."""
        import numpy as np

        if interval == "std":
            return self.std
        wide = {int(n): t_975(int(n) - 1) / n**0.5 for n in np.unique(self.count) if n > 1}
        return self.std * np.array([wide.get(int(n), np.nan) for n in self.count])

    def smooth(self, weight: float) -> "Band":
        """The band smoothed by exponential moving averages, with bias correction.
        weight: of earlier values, in [0, 1)."""
        return (
            replace(self, mean=_moving_average(self.mean, weight), std=_moving_average(self.std, weight))
            if weight
            else self
        )


def _moving_average(values: "np.ndarray", weight: float) -> "np.ndarray":
    """The moving average. NaN values stay NaN and do not count."""
    averages, total, norm = values.copy(), 0.0, 0.0
    for place, value in enumerate(values):
        if math.isfinite(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + 1 - weight
            averages[place] = total / norm
    return averages


def histories(runs: Path, names: Iterable[str], scores: Sequence[str]) -> tuple[dict[str, Columns], list[str]]:
    """Columns of "step" and the available `scores`, by run; and a warning for each run that cannot be read.

    Rows of haven without a step are numbered. Only rows appended since the last call are parsed.
    """
    result: dict[str, Columns] = {}
    warnings: list[str] = []
    names, requested = list(names), ["step", *scores]
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        cached = _read_cache(runs, batch, requested)
        changed: dict[str, _History] = {}
        for name in batch:
            try:
                with reading(runs / name):
                    history = _read_history(runs / name, cached.get(name))
            except UserError as error:
                warnings.append(f"without its history: {error}")
                continue
            result[name] = {score: history.columns[score] for score in requested if score in history.columns}
            if history.size and history is not cached.get(name):
                changed[name] = history
        cache.write(runs, {name: _pack(history) for name, history in changed.items()})
    return result, warnings


def choose_values(
    runs: Path, rows: Sequence[Row], value: str = "last", at_step: int | None = None
) -> tuple[list[Row], list[str]]:
    """The rows with the requested value of each score, and warnings about unreadable histories and missing steps.

    value: one of `VALUES`, over all steps. "best" follows `loop.best_mode` for `loop.best_metric`, and the name for
    other scores. A score that ended in NaN or infinity also has no best, max or min, so that such a run is never ranked
    first.
    at_step: use the values at exactly this step; None if a run has no row or no value there.
    """
    if value == "last" and at_step is None:
        return list(rows), []
    names = list(dict.fromkeys(name for score in score_names(rows) for name in (score, score.removeprefix("score."))))
    result, warnings = histories(runs, [row["exp_id"] for row in rows], names)
    new_rows = [row.replace(_choose_of_run(row, result.get(row["exp_id"], {}), value, at_step)) for row in rows]
    for row in new_rows:
        row.at_step = at_step
    if at_step is not None and (absent := sum(row["step"] is None for row in new_rows)):
        warnings = [*warnings, f"{absent} of {len(new_rows)} runs have no row at step {at_step}; they are left out."]
    return new_rows, warnings


def _choose_of_run(row: Row, columns: Columns, value: str, at_step: int | None) -> dict[str, Any]:
    import numpy as np

    values: dict[str, Any] = {}
    for score in row.scores:
        if ended_in_nan(row, score) and at_step is None:
            values[score] = None
            continue
        column = columns.get(score, columns.get(score.removeprefix("score.")))
        if column is None:
            values[score] = row[score] if score == CODE_VERSIONS else None
            continue
        finite = column[np.isfinite(column) & (at_step is None or columns["step"] == at_step)].tolist()
        best = (
            (min if _is_lower_better(row, score) else max) if value == "best" else {"min": min, "max": max}.get(value)
        )
        values[score] = (best(finite) if best else finite[-1]) if finite else None
    if at_step is not None:
        values["step"] = at_step if at_step in columns.get("step", ()) else None
    return values


def _is_lower_better(row: Row, score: str) -> bool:
    if row.get("loop.best_metric") == score and row.get("loop.best_mode") in ("min", "max"):
        return row["loop.best_mode"] == "min"
    return lower_is_better(score)


def bands(
    runs: Path, groups: Sequence[Sequence[Mapping[str, Any]]], scores: Sequence[str], x: str = "step"
) -> tuple[list[list[Band]], list[str]]:
    """For each score a band for each group of rows (`rows.load_rows`), at each step where any run has a finite value.

    x: "step", "seconds" of training, or a score such as "tokens": its mean over the runs at each step.

    Raises:
        DataError: no run has values of `x`.
    """
    names = [name.removeprefix("score.") for name in scores]
    requested = list(dict.fromkeys([*scores, *names, x]))
    result, warnings = histories(runs, [row["exp_id"] for group in groups for row in group], requested)
    if x != "step":
        places = {name: _x_values(runs / name, columns, x) for name, columns in result.items()}
        if not any(len(of_run) for of_run in places.values()):
            raise DataError(
                f"{runs}: no run has {x!r} in its scores or its {PERF}, so it cannot be the x axis. Use --x step."
            )
    else:
        places = {}

    def points(group: Sequence[Mapping[str, Any]], score: str, name: str) -> Iterator[tuple[Any, Any, Any]]:
        for row in sorted(
            group, key=lambda row: row["exp_id"]
        ):  # sorted, so that the order of the runs does not change the last digits
            columns = result.get(row["exp_id"], {})
            values = columns.get(score, columns.get(name))
            if values is not None:
                yield columns["step"], values, places.get(row["exp_id"], columns["step"])

    return [
        [_band(list(points(group, *pair))) for group in groups] for pair in zip(scores, names, strict=True)
    ], warnings


def _read_cache(runs: Path, names: Sequence[str], requested: Collection[str]) -> dict[str, _History]:
    """The histories of the runs for which the cache holds all `requested` columns."""
    import numpy as np

    result: dict[str, _History] = {}
    for name, blobs in cache.read(runs, names, [_HEAD, *map(json.dumps, requested)]).items():
        length, size, tail, scores = json.loads(blobs.get(_HEAD, b"[0, 0, 0, []]"))
        columns = {score: np.frombuffer(blobs.get(json.dumps(score), b"")) for score in scores if score in requested}
        if length and all(len(column) == length for column in columns.values()):
            result[name] = _History(size, tail, scores, columns)
    return result


def _pack(history: _History) -> dict[str, bytes]:
    head = [len(history.columns["step"]), history.size, history.tail, history.scores]
    return {_HEAD: json.dumps(head).encode()} | {
        json.dumps(score): column.tobytes() for score, column in history.columns.items()
    }


def _read_history(path: Path, cached: _History | None) -> _History:
    """The history of the run in `path`: `cached` itself if no row was appended, else one with all columns.

    Raises:
        DataError: the scores are damaged.
        RunError: they cannot be read.
    """
    import numpy as np

    piece = read_appended(path / SCORES, cached.size, cached.tail) if cached else read_appended(path / SCORES)
    if cached and piece.start:
        if not piece.lines:
            return cached
        complete = _read_cache(path.parent, [path.name], cached.scores).get(path.name)
        if complete is None or complete.tail != cached.tail:
            return _read_history(path, None)
        try:
            new = _columns(parse_rows(piece, path / SCORES))
        except DataError:
            return _read_history(path, None)  # counts lines from the start of the file, for the message
        lengths = len(complete.columns["step"]), len(new["step"])
        absent = [np.full(length, np.nan) for length in lengths]
        names = dict.fromkeys([*complete.columns, *new])
        columns = {
            name: np.concatenate([complete.columns.get(name, absent[0]), new.get(name, absent[1])]) for name in names
        }
    elif not piece.lines and not (path / SCORES).exists() and (path / SCORE_LIST).exists():
        columns = _columns(read_score_list(path / SCORE_LIST))
    else:
        columns = _columns(parse_rows(piece, path / SCORES))
    return _History(piece.end, piece.tail, list(columns), columns)


def _columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row if isinstance(name, str) and name != "step")
    steps = [row.get("step", number) for number, row in enumerate(rows)]
    return {"step": _column(steps)} | {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: list[Any]) -> "np.ndarray":
    import numpy as np

    try:
        column = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        column = None
    if column is None or column.ndim != 1:  # haven's rows can contain anything
        return np.array([float(value) if is_finite(value) else np.nan for value in values])
    return column


def _x_values(path: Path, columns: Columns, x: str) -> "np.ndarray":
    """The value of each row of a run on the axis `x`, NaN if unknown. Empty if all are unknown."""
    import numpy as np

    if x in columns:
        return columns[x]
    if x != "seconds":
        return np.array([])
    try:
        rows = parse_rows(read_appended(path / PERF), path / PERF)
    except UserError:
        return np.array([])
    took = {
        row["step"]: row["seconds"] for row in rows if is_finite(row.get("seconds"))
    }  # the last row of a repeated step counts
    at = dict(zip(sorted(took), np.cumsum([took[step] for step in sorted(took)]).tolist(), strict=True))
    return np.array([at.get(int(step), np.nan) for step in columns["step"]]) if at else np.array([])


def _band(runs: Sequence[tuple[Any, Any, Any]]) -> Band:
    """The band of `runs`: (steps, values, positions on the x axis) of each."""
    import numpy as np

    points = []
    for steps, values, places in runs:
        if len(places) == len(steps):
            mask = np.isfinite(values) & np.isfinite(places)
            points.append((steps[mask], values[mask], places[mask]))
    if not points:
        return Band(*(np.array([]) for _ in range(4)))
    steps, values, places = (np.concatenate(column) for column in zip(*points, strict=True))
    grid, at = np.unique(steps, return_inverse=True)
    count = np.bincount(at)
    mean = np.bincount(at, values) / count
    squares = np.bincount(at, (values - mean[at]) ** 2)
    std = np.sqrt(np.divide(squares, count - 1, out=np.full(len(grid), np.nan), where=count > 1))
    return Band(np.bincount(at, places) / count, mean, std, count)
