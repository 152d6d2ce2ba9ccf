"""Whole histories as columns of numbers, kept in the index, and their means and deviations over seeds."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import DataError, UserError
from src.files import reading
from src.runs.scores import SCORE_LIST, SCORES, read_score_list
from src.runs.summary import Piece, is_finite, read_on, rows_of
from src.tables.index import Index, Record
from src.tables.intervals import t_975
from src.tables.scan import file_key

if TYPE_CHECKING:
    import numpy as np

PERF = "perf.jsonl"
_BATCH = 500
_READ = (SCORES, SCORE_LIST)
Columns = dict[str, "np.ndarray"]
"""float64 by score, NaN where a row lacks it, and "step"; all of one length."""


@dataclass
class Band:
    """A mean curve over runs; all arrays of one length, in the order of `x`."""

    x: "np.ndarray"
    mean: "np.ndarray"
    std: "np.ndarray"
    """Sample standard deviation (n - 1); NaN where there is one run."""
    count: "np.ndarray"
    """Runs that have a finite value."""

    def half(self, interval: str = "std") -> "np.ndarray":
        """Half the width of the band: "std", or "ci95", the 95 % interval of the mean. NaN where there is one run."""
        import numpy as np

        if interval == "std":
            return self.std
        wide = {int(n): t_975(int(n) - 1) / n**0.5 for n in np.unique(self.count) if n > 1}
        return self.std * np.array([wide.get(int(n), np.nan) for n in self.count])


def histories(runs: Path, names: Iterable[str], scores: Sequence[str]) -> tuple[dict[str, Columns], list[str]]:
    """Columns of `scores`, as far as a run has them, and its "step"s, by the name of the run; and a warning for each that cannot be read.

    A run that haven wrote counts its rows where they have no step. Rows that were appended since the last time are all that is read.
    """
    found: dict[str, Columns] = {}
    warnings: list[str] = []
    names, wanted = list(names), ["step", *scores]
    with Index(runs) as index:
        known = index.records("curves", names)
        for start in range(0, len(names), _BATCH):
            some = names[start : start + _BATCH]
            kept = _kept(index, {name: known[name] for name in some if name in known}, wanted)
            changes: dict[str, tuple[Record, Columns]] = {}
            for name in some:
                try:
                    with reading(runs / name):
                        key, settled = file_key(runs / name, _READ)
                    if name not in kept or known[name].key != key:
                        record, columns = _read(runs / name, index, known.get(name))
                        changes[name] = Record(key if settled else "", record), columns
                        kept[name] = columns
                    found[name] = {score: kept[name][score] for score in wanted if score in kept[name]}
                except UserError as error:
                    warnings.append(f"not plotted: {error}")
            packed = {name: {json.dumps(score): c.tobytes() for score, c in columns.items()} for name, (_, columns) in changes.items()}
            index.keep_columns({name: record for name, (record, _) in changes.items()}, packed)
    return found, warnings


def bands(
    runs: Path, groups: Sequence[Sequence[Mapping[str, Any]]], scores: Sequence[str], x: str = "step"
) -> tuple[list[list[Band]], list[str]]:
    """For each score a band for each group of rows (`results.load_rows`), at each step that any of its runs has a finite value at.

    x: "step"; a score, such as "tokens", or "seconds" of training: at each step its mean over the runs.

    Raises:
        DataError: no run has any `x`.
    """
    names = [name.removeprefix("score.") for name in scores]
    wanted = list(dict.fromkeys([*scores, *names, x]))
    found, warnings = histories(runs, [row["exp_id"] for group in groups for row in group], wanted)
    if x != "step":
        places = {name: _places(runs / name, columns, x) for name, columns in found.items()}
        if not any(len(of_run) for of_run in places.values()):
            raise DataError(f"{runs}: no run has {x!r} in its scores, nor in its {PERF}, to be drawn over.")
    else:
        places = {}

    def points(group: Sequence[Mapping[str, Any]], score: str, name: str) -> Iterator[tuple[Any, Any, Any]]:
        for row in group:
            columns = found.get(row["exp_id"], {})
            values = columns.get(score, columns.get(name))
            if values is not None:
                yield columns["step"], values, places.get(row["exp_id"], columns["step"])

    return [[_band(list(points(group, *pair))) for group in groups] for pair in zip(scores, names, strict=True)], warnings


def _kept(index: Index, known: Mapping[str, Record], wanted: Sequence[str]) -> dict[str, Columns]:
    """The columns that the index holds, of runs of which it holds all that is wanted."""
    import numpy as np

    blobs = index.columns(list(known), [json.dumps(score) for score in wanted])
    found: dict[str, Columns] = {}
    for name, record in known.items():
        length, _, _, scores = record.body
        has = {score: blobs.get((name, json.dumps(score))) for score in wanted if score in scores}
        if all(blob is not None and len(blob) == 8 * length for blob in has.values()):
            found[name] = {score: np.frombuffer(blob) for score, blob in has.items() if blob is not None}
    return found


def _read(path: Path, index: Index, known: Record | None) -> tuple[list[Any], Columns]:
    """The body of the record, and all columns of the run: those known, and what was appended since.

    Raises:
        DataError: the scores are damaged.
        RunError: they cannot be read.
    """
    import numpy as np

    if not (path / SCORES).exists() and (path / SCORE_LIST).exists():
        columns = _columns(read_score_list(path / SCORE_LIST))
        return [len(columns["step"]), 0, "", list(columns)], columns
    before: Columns = {}
    piece = Piece(0, b"", "")
    if known is not None and known.body[1]:
        _, size, tail, scores = known.body
        before = _kept(index, {path.name: known}, scores).get(path.name, {})
        piece = read_on(path / SCORES, size, tail) if before else piece
    if piece.start == 0:
        before, piece = {}, read_on(path / SCORES)
    try:
        columns = _columns(rows_of(piece, path / SCORES))
    except DataError:
        if piece.start:
            return _read(path, index, None)  # which counts its lines from the beginning
        raise
    if before:
        old, new = len(before["step"]), len(columns["step"])
        absent_before, absent_now = np.full(old, np.nan), np.full(new, np.nan)
        names = dict.fromkeys([*before, *columns])
        columns = {name: np.concatenate([before.get(name, absent_before), columns.get(name, absent_now)]) for name in names}
    return [len(columns["step"]), piece.end, piece.tail, list(columns)], columns


def _columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row if isinstance(name, str) and name != "step")
    steps = [row.get("step", number) for number, row in enumerate(rows)]
    return {"step": _column(steps)} | {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: list[Any]) -> "np.ndarray":
    import numpy as np

    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([float(value) if is_finite(value) and abs(value) < 1e308 else np.nan for value in values])


def _places(path: Path, columns: Columns, x: str) -> "np.ndarray":
    """Where each row of a run stands on the axis `x`; NaN where that is not known. Empty where it is nowhere known."""
    import numpy as np

    if x in columns:
        return columns[x]
    if x != "seconds":
        return np.array([])
    try:
        rows = rows_of(read_on(path / PERF), path / PERF)
    except UserError:
        return np.array([])
    took = {row["step"]: row["seconds"] for row in rows if is_finite(row.get("seconds"))}  # the last word on a step that was repeated
    at = dict(zip(sorted(took), np.cumsum([took[step] for step in sorted(took)]).tolist(), strict=True))
    return np.array([at.get(int(step), np.nan) for step in columns["step"]]) if at else np.array([])


def _band(runs: Sequence[tuple[Any, Any, Any]]) -> Band:
    """runs: (steps, values, places) of each."""
    import numpy as np

    chosen = []
    for steps, values, places in runs:
        if len(places) == len(steps):
            mask = np.isfinite(values) & np.isfinite(places)
            chosen.append((steps, values, places) if mask.all() else (steps[mask], values[mask], places[mask]))
    if not chosen:
        return Band(*(np.array([]) for _ in range(4)))
    first = chosen[0][0]
    alike = all(len(steps) == len(first) and (steps == first).all() for steps, _, _ in chosen)
    rising = alike and (np.diff(first) > 0).all()
    grid = first if rising else np.unique(np.concatenate([steps for steps, _, _ in chosen]))
    at = [np.searchsorted(grid, steps) for steps, _, _ in chosen]
    count = np.bincount(np.concatenate(at), minlength=len(grid))
    mean = _sum(at, [values for _, values, _ in chosen], len(grid)) / count
    squares = _sum(at, [(values - mean[where]) ** 2 for where, (_, values, _) in zip(at, chosen, strict=True)], len(grid))
    with np.errstate(divide="ignore", invalid="ignore"):
        std = np.where(count > 1, np.sqrt(squares / (count - 1)), np.nan)
    x = grid if all(steps is places for steps, _, places in chosen) else _sum(at, [p for _, _, p in chosen], len(grid)) / count
    return Band(x, mean, std, count)


def _sum(at: "Sequence[np.ndarray]", values: "Sequence[np.ndarray]", size: int) -> "np.ndarray":
    """Sums of values by their places, each as good as rounded once (Neumaier, 1974): two lists of runs give the same curve in any order."""
    import numpy as np

    total, lost = np.zeros(size), np.zeros(size)
    for where, of_run in zip(at, values, strict=True):
        if not (np.diff(where) > 0).all():  # rows of haven's may repeat a step
            np.add.at(total, where, of_run)
            continue
        before = total[where]
        after = before + of_run
        lost[where] += np.where(np.abs(before) >= np.abs(of_run), (before - after) + of_run, (of_run - after) + before)
        total[where] = after
    return total + lost
