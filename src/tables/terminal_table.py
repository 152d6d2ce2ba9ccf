"""A table of scores that fits the terminal: scores first, digits by their spread, and a list of omitted columns."""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from src.evaluation.metrics.answers import INFERENCE
from src.experiments.config import unknown
from src.tables import results, statistics

FACTS = ("runs", "state", "step")
_DIGITS = 6
"""Maximum number of decimals."""
_NARROW = 12
"""Minimum width to which headings are folded; wider cells allow more."""
_EDGES = 3
"""Characters between the texts of two columns."""


@dataclass(frozen=True)
class Column:
    """One column.
    rank: if the terminal is too narrow, the last column with the highest rank is left out first."""

    name: str
    heading: str
    cells: Sequence[str]
    rank: int

    @property
    def constant(self) -> str:
        """The common value of all rows: "step 200"."""
        return f"{self.name} {self.cells[0]}"

    @property
    def width(self) -> int:
        """Width in characters."""
        return max(map(len, [*self.folded_heading.split("\n"), *self.cells]))

    @property
    def folded_heading(self) -> str:
        """The heading, with line breaks after "_", "/" and "."."""
        room, lines = max([_NARROW, *map(len, self.cells)]), [""]
        for word in re.findall(r"[^_/.]*[_/.]?", self.heading):
            if lines[-1] and len(lines[-1] + word) > room:
                lines.append("")
            lines[-1] += word
        return "\n".join(lines)


def arrange(
    table: Sequence[dict[str, Any]],
    keys: Sequence[str],
    scores: Sequence[str],
    metric: str | None,
    lowest: bool | None,
    interval: str,
) -> tuple[list[Column], list[Column]]:
    """The columns for rows of `statistics.aggregate`, the `metric` first; and the columns that are equal in all rows.

    lowest: whether the lowest value of the metric is the best; None: decide by its name. interval: "std" or "ci95".
    """
    ordered_scores = sorted(scores, key=lambda name: name != metric)
    lowest = results.lower_is_better(metric or "") if lowest is None else lowest
    marks = {metric: " ↓" if lowest else " ↑"}
    columns = [
        Column(
            name,
            plain_score(name, scores) + marks.get(name, ""),
            score_cells(table, name, interval),
            0 if name == ordered_scores[0] else 2,
        )
        for name in ordered_scores
    ]
    short = results.short_names(keys)
    columns += [Column(key, short[key], [plain(row[key]) for row in table], 1) for key in keys]
    columns += [Column(fact, fact, [plain(row[fact]) for row in table], 3) for fact in facts(table)]
    remarks = {"tags": [", ".join(row["tags"]) for row in table], "note": [row["note"] for row in table]}
    columns += [Column(name, name, cells, 3) for name, cells in remarks.items() if any(cells)]
    same = [
        column
        for column in columns
        if column.rank > 1 and len(set(column.cells)) == 1 and (len(table) > 1 or column.rank == 3)
    ]
    return [column for column in columns if column not in same], same


def facts(table: Sequence[dict[str, Any]]) -> list[str]:
    """The columns other than keys and scores: `FACTS`, and the GPU-hours if they were counted."""
    return [*FACTS, *(["gpu_hours"] if table and "gpu_hours" in table[0] else [])]


def plain_score(name: str, candidates: Sequence[str]) -> str:
    """The name of a score without "inference/", unless another of `candidates` has that name."""
    short = name.removeprefix(f"{INFERENCE}/")
    return name if short in candidates else short


def score_cells(table: Sequence[dict[str, Any]], name: str, interval: str, count: bool = False) -> list[str]:
    """Mean ± deviation of a score, to two digits of the smallest deviation, with "3 of 5" if not over all runs.
    If that would be too many digits, each number has four or two significant ones.

    count: add the number of runs also if the mean is over all runs.
    """
    spreads = [half for row in table if (half := row[f"{name}_{interval}"])]
    digits = max(0, 1 - math.floor(math.log10(min(spreads)))) if spreads else _DIGITS + 1
    plain, spread = (f".{digits}f", f".{digits}f") if digits <= _DIGITS else (".4g", ".2g")

    def cell(row: dict[str, Any]) -> str:
        mean, half, run_count = row[name], row[f"{name}_{interval}"], statistics.count_runs(row, name)
        if mean is None:
            return run_count
        run_count = run_count or (str(row["runs"]) if count and half is not None else "")
        text = f"{mean:{plain}}"
        text += f" ± {half:{spread}}" if spreads and half is not None else ""
        return f"{text} ({run_count})" if run_count else text

    return [cell(row) for row in table]


def choose(columns: Sequence[Column], names: Sequence[str]) -> list[Column]:
    """The columns `names`, in this order.

    Raises:
        ConfigError: there is no such column.
    """
    candidates = {column.heading.split(" ")[0]: column for column in columns} | {
        column.name: column for column in columns
    }
    for name in names:
        if name not in candidates:
            raise unknown("column", name, candidates, "--columns", "--json")
    return [candidates[name] for name in names]


def fit(columns: Sequence[Column], width: int) -> tuple[list[Column], list[str]]:
    """The columns that fit into `width` characters, and the headings of the rest. Shows a minimum of one column."""
    visible = list(columns)
    while len(visible) > 1 and sum(column.width + _EDGES for column in visible) + 1 > width:
        highest = max(column.rank for column in visible)
        visible.remove([column for column in visible if column.rank == highest][-1])
    return visible, [column.heading for column in columns if column not in visible]


def draw(columns: Sequence[Column], notes: Sequence[str], width: int | None = None) -> None:
    """Print the columns that fit to stdout, then the lines of `notes`.
    width: None: width of the terminal, or all columns without a terminal."""
    from rich.console import Console

    console = Console()
    width = width or (console.width if console.is_terminal else 10_000)
    visible, hidden = fit(columns, width)
    lines = [list(line) for line in zip(*(column.cells for column in visible), strict=True)]
    draw_rich([column.folded_heading for column in visible], lines)
    for note in [
        *notes,
        *([f"Not shown, as the terminal is too narrow: {', '.join(hidden)}. Select with --columns."] if hidden else []),
    ]:
        sys.stdout.write(f"{note}\n")


def draw_rich(headings: Sequence[str], lines: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print a table to stdout, at full width if that is not a terminal."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(caption=caption or None)
    for heading in headings:
        table.add_column(Text(heading))
    for line in lines:
        table.add_row(*map(Text, line))
    console = Console()
    if not console.is_terminal:  # a log file has no width limit
        wide = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        console = Console(width=max(console.width, wide))
    console.print(table)


def plain(value: Any) -> str:
    """A config value or a fact as a cell; ids are shortened."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value[:8] if len(value) == 32 and set(value) <= set("0123456789abcdef") else value
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value)
