# PYTHON_ARGCOMPLETE_OK
"""The scores of runs as a table, mean ± deviation over seeds: `python -m results.table [RUN ..] [-e GROUP ..]`."""

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

from src.errors import ConfigError, print_errors
from src.evaluation.metrics.answers import GAIN, INFERENCE, WRONG
from src.runs.store import CODE_VERSIONS
from src.support import documents
from src.support.command_line import make_parser
from src.tables import results, run_arguments, statistics
from src.tables.gpu_hours import gpu_hours
from src.tables.terminal_table import arrange, choose, draw, draw_rich, facts, plain, score_cells

FORMATS = ("rich", "markdown", "csv", "latex")
INTERVALS = {"std": "standard deviation", "ci95": "half the 95 % interval of the mean"}
"""Choices for the value after ±, by name in `src.tables.statistics.aggregate`."""
MAX_REMARKS = 5
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that spreadsheets treat as the start of a formula."""
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",  # in the default encoding of fonts, < > | are other characters
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{character: "\\" + character for character in "&%$#_{}"},
}
Table = list[dict[str, Any]]


class Document(documents.Document):
    """Means over seeds, best first. With --pivot, a row for each cell with runs."""

    schema: Literal["results.table/1"]
    keys: list[str]
    """Dotted config keys that group the runs."""
    scores: list[str]
    rows: Table
    """Values of the keys, `exp_ids` and facts; for each score its mean, and with endings `_std`, `_ci95` and `_n` the
    deviation, half the 95 % interval and the number of runs."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; warnings about unreadable and unfinished runs go to stderr. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    rows, warnings = run_arguments.select(options)
    rows, unread = run_arguments.choose_values(options, rows)
    names = results.score_names(rows)
    metric = _score_name(options.metric, names) if options.metric else None
    output: Callable[[], None]
    if options.pivot:
        if options.by or options.scores or options.best or options.columns or options.gpu_hours:
            raise ConfigError(
                "--pivot: shows one score (--metric) over two keys. Remove --by, --scores, --best, --columns and "
                "--gpu-hours."
            )
        keys = statistics.grouping_keys(rows, options.pivot)
        cross, score = pivot_score(rows, keys[0], keys[1], metric, options.include_unfinished)
        scores_shown = scores = [score]
        table = [cell for line in cross.cells for cell in line if cell]
        output = partial(print_pivot, cross, keys, score, options.format, options.interval)
    else:
        if options.columns and options.format != "rich":
            raise ConfigError(f"--columns: ignored with --format {options.format}. Use --by and --scores.")
        columns_shown = [name for name in (_score_name(name, names) for name in options.columns or ()) if name in names]
        requested = [_score_name(name, names) for name in options.scores or ()]
        is_complete = options.format == "csv" or options.json
        selected = requested or (["all"] if is_complete else columns_shown or None)
        by = statistics.grouping_keys(rows, options.by, options.seed_key)
        table, keys, scores = tabulate(rows, by, selected, metric, options.best, options.include_unfinished)
        scores_shown = scores if options.scores or options.columns else headline(results.headline_scores(scores))
        if options.gpu_hours:
            for row in table:
                row["gpu_hours"] = sum(gpu_hours(options.runs / name) for name in row["exp_ids"])
        if options.format == "rich":
            lowest = None if options.best is None else options.best == "min"
            columns, same = arrange(
                table, keys, scores, metric or next(iter(headline(scores)), None), lowest, options.interval
            )
            if options.columns:
                columns = choose([*columns, *same], options.columns)
            text = ", ".join(column.constant for column in same if column not in columns)
            about = f"Mean ± {INTERVALS[options.interval]}, best first.{f' In all rows: {text}.' if text else ''}"
            output = partial(draw, columns, [about])
        else:
            best = best_rows(table, metric or next(iter(headline(scores)), None), options.best)
            output = partial(print_table, table, keys, scores, options.format, options.interval, best)
    nan = statistics.nan_remarks(rows, scores_shown, options.include_unfinished)
    run_arguments.warn([*warnings, *unread, *remarks(rows, keys, options.include_unfinished, options.seed_key), *nan])
    content = {"keys": keys, "scores": scores, "rows": table}
    run_arguments.show(options.output, "results.table/1", content, output)
    return 0


def remarks(
    rows: Sequence[results.Row], keys: Sequence[str], unfinished: bool = False, seed: str = results.SEED
) -> list[str]:
    """Remarks on means grouped by `keys`: unfinished runs, missing seeds, and other differing config values."""
    sentences = []
    num_unfinished = len(rows) - len(statistics.averaged_rows(rows))
    if num_unfinished:
        advice = (
            "the means are over these, too"
            if unfinished
            else "the means are over finished runs; --unfinished takes all"
        )
        text = advice if results.score_names(rows) else "none has a score yet"
        sentences.append(f"{num_unfinished} of {len(rows)} runs are not done; {text}.")
    if others := [
        key for key in results.distinguishing_keys(rows, seed) if key not in [*keys, "group"] and "exp_id" not in keys
    ]:
        sentences.append(f"the means are over different {', '.join(others)}.")
    missing = statistics.missing_seeds(rows, keys, seed)
    more = [f"… and {len(missing) - MAX_REMARKS} more have missing seeds."] if len(missing) > MAX_REMARKS else []
    return sentences + missing[:MAX_REMARKS] + more


def tabulate(
    rows: Sequence[results.Row],
    by: Sequence[str] | None = None,
    scores: Sequence[str] | None = None,
    metric: str | None = None,
    best: str | None = None,
    unfinished: bool = False,
) -> tuple[Table, list[str], list[str]]:
    """Aggregate rows, best first. Returns the table, and its columns of keys and scores.

    by: dotted config keys; None: those that vary, without the seed and keys that depend on it. scores: None: headline
    scores, without diagnostics of the loop and parts such as "em/nq"; ["all"]: all.
    metric: sort key; None: the first of `headline`. best: "min" or "max"; None: by the name of the metric.
    unfinished: see `statistics.aggregate`.

    Raises:
        ConfigError: no run has the requested key or score.
    """
    names = results.score_names(rows)
    keys = statistics.grouping_keys(rows, by)
    if scores is None:
        score_names = [*headline(results.headline_scores(names)), *(name for name in [CODE_VERSIONS] if name in names)]
    else:
        score_names = names if list(scores) == ["all"] else list(scores)
    if metric is None:
        metric = next(iter(headline(score_names)), None)
    elif metric not in score_names:
        score_names = [metric, *score_names]
    table = statistics.aggregate(rows, keys, score_names, unfinished)
    if metric is not None:
        table = results.sort_best_first(table, metric, None if best is None else best == "min")
    return table, keys, score_names


def headline(scores: Sequence[str]) -> list[str]:
    """Scores in display order: first answer score with its control and gain, val_loss, other validation, the rest."""
    answers = [name for name in scores if name.startswith(f"{INFERENCE}/")]
    first = [answers[0], answers[0] + WRONG, answers[0] + GAIN] if answers else []
    ranks = {"val_loss": 1} | dict.fromkeys(answers, 4) | dict.fromkeys(first, 0)
    return sorted(scores, key=lambda name: ranks.get(name, 2 if name.startswith("val_") else 3))


def _score_name(name: str, names: Sequence[str]) -> str:
    """Resolve an abbreviated score name: "em" is inference/em, unless a score "em" exists."""
    return f"{INFERENCE}/{name}" if name not in names and f"{INFERENCE}/{name}" in names else name


def default_metric(scores: Sequence[str]) -> str | None:
    """The default score of curves."""
    preferences = (
        [name for name in scores if name == "val_loss"]
        or [name for name in scores if name.startswith("val_")]
        or scores
    )
    return preferences[0] if preferences else None


def pivot_score(
    rows: Sequence[results.Row], index: str, columns: str, metric: str | None = None, unfinished: bool = False
) -> tuple[statistics.Pivot, str]:
    """Pivot one score over two dotted keys; also returns its name: `metric`, or the default.

    Raises:
        ConfigError: no run has the requested key or score, or any score.
    """
    score = metric or next(iter(headline(results.headline_scores(results.score_names(rows)))), None)
    if score is None:
        raise ConfigError("--pivot: no run has a score yet. Wait for the first evaluation.")
    return statistics.pivot(rows, index, columns, score, unfinished), score


def best_rows(table: Table, metric: str | None, best: str | None = None) -> set[int]:
    """Numbers of the rows with the best mean of `metric`; empty for fewer than two rows.
    best: "min" or "max"; None: by the name of the metric."""
    values = [row[metric] for row in table if row[metric] is not None] if metric is not None else []
    if metric is None or len(table) < 2 or not values:
        return set()
    lowest = results.lower_is_better(metric) if best is None else best == "min"
    return {number for number, row in enumerate(table) if row[metric] == (min if lowest else max)(values)}


def print_table(
    table: Table,
    keys: Sequence[str],
    scores: Sequence[str],
    style: str,
    interval: str = "std",
    best: Collection[int] = (),
) -> None:
    """Print `render` to stdout."""
    print(render(table, keys, scores, style, interval, best), end="")


def render(
    table: Table,
    keys: Sequence[str],
    scores: Sequence[str],
    style: str,
    interval: str = "std",
    best: Collection[int] = (),
) -> str:
    """The table as text, in any of `FORMATS` except rich. csv has all digits; markdown and latex round.

    interval: the value after ±, one of `INTERVALS`. best: numbers of the rows to print in bold in latex.
    """
    if style == "csv":
        ends = _ends(interval)
        columns = [*keys, *facts(table), *(name + end for name in scores for end in ends)]
        return _csv([columns, *([row[column] for column in columns] for row in table)])
    headings, lines = _cells(table, keys, scores, interval)
    return markdown(headings, lines) if style == "markdown" else _latex(headings, lines, len(keys), best)


def print_pivot(cross: statistics.Pivot, keys: Sequence[str], score: str, style: str, interval: str = "std") -> None:
    """Print a pivot table to stdout."""
    index, columns = (results.short_names(keys)[key] for key in keys)
    if style == "csv":
        ends = _ends(interval)
        head = [keys[0], *(f"{keys[1]}={_raw(value)}{end}" for value in cross.columns for end in ends)]
        lines = [
            [value, *(cell and cell[score + end] for cell in line for end in ends)]
            for value, line in zip(cross.rows, cross.cells, strict=True)
        ]
        print(_csv([head, *lines]), end="")
    else:
        headings = [index, *(f"{columns}={plain(value)}" for value in cross.columns)]
        texts = iter(score_cells([cell for line in cross.cells for cell in line if cell], score, interval, count=True))
        rows = zip(cross.rows, cross.cells, strict=True)
        lines = [[plain(value), *("-" if cell is None else next(texts) for cell in line)] for value, line in rows]
        if style == "rich":
            draw_rich(headings, lines, f"{score}: mean ± {INTERVALS[interval]} (number of runs)")
        else:
            print(markdown(headings, lines) if style == "markdown" else _latex(headings, lines, 1), end="")


def _cells(
    table: Table, keys: Sequence[str], scores: Sequence[str], interval: str
) -> tuple[list[str], list[list[str]]]:
    names = results.short_names(keys)
    headings = [*(names[key] for key in keys), *facts(table), *scores]
    cells = [score_cells(table, name, interval) for name in scores]
    lines = [
        [
            *(plain(row[key]) for key in keys),
            *(plain(row[fact]) for fact in facts(table)),
            *(column[number] for column in cells),
        ]
        for number, row in enumerate(table)
    ]
    return headings, lines


def _ends(interval: str) -> tuple[str, ...]:
    """Suffixes of a score's csv columns. "_std" is always present, as columns have the same meaning in all files."""
    return ("", "_std", "_n") if interval == "std" else ("", "_std", f"_{interval}", "_n")


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(
        [
            _text(value) if isinstance(value, str) else value if isinstance(value, float) else _raw(value)
            for value in row
        ]
        for row in rows
    )
    return text.getvalue()


def _text(value: str) -> str:
    """Escape a text that a spreadsheet would treat as a formula."""
    return f"'{value}" if value[:1] in _FORMULA else value


def _raw(value: Any) -> str:
    return "" if value is None else json.dumps(value)


def markdown(headings: list[str], lines: list[list[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    rows = [headings, ["---"] * len(headings), *lines]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |\n" for row in rows
    )


def _latex(headings: list[str], lines: list[list[str]], num_keys: int, bold: Collection[int] = ()) -> str:
    columns = "l" * num_keys + "r" * (len(headings) - num_keys)
    cells = [
        [rf"\textbf{{{_escape(cell)}}}" if number in bold else _escape(cell) for cell in row]
        for number, row in enumerate(lines)
    ]
    rows = [" & ".join(row) + r" \\" for row in (map(_escape, headings), *cells)]
    rows = [
        "{}" + row if row.startswith(("[", "*")) else row for row in rows
    ]  # LaTeX would parse these as options of \\
    parts = [
        r"\begin{tabular}{" + columns + "}",
        r"\toprule",
        rows[0],
        r"\midrule",
        *rows[1:],
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(parts) + "\n"


def _escape(cell: str) -> str:
    return "".join(_LATEX.get(character, character) for character in cell).replace(" ± ", r" $\pm$ ").replace("\n", " ")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.table", __doc__)
    run_arguments.add(parser)
    parser.add_argument(
        "--by", nargs="+", metavar="KEY", help="dotted config keys (default: all that vary, but the seed)"
    )
    parser.add_argument("--metric", help="score to sort by, best first (default: of answers, else val_loss)")
    parser.add_argument(
        "--best", choices=("min", "max"), help="which end of the metric is best (default: min for losses and errors)"
    )
    parser.add_argument(
        "--scores", nargs="+", metavar="NAME", help="scores to show, or all (default: all for csv and --json)"
    )
    parser.add_argument(
        "--columns", nargs="+", metavar="NAME", help="on a terminal: scores, keys and facts to show, in this order"
    )
    parser.add_argument("--pivot", nargs=2, metavar=("ROW", "COLUMN"), help="the metric over two dotted keys")
    parser.add_argument(
        "--interval",
        choices=tuple(INTERVALS),
        default="std",
        help="the value after ± (default: std; ci95: Student's t)",
    )
    run_arguments.add_values(parser)
    parser.add_argument(
        "--gpu-hours", action="store_true", help="a column with the GPU-hours of each row, over all attempts"
    )
    parser.add_argument("--format", choices=FORMATS, default="rich")
    return parser


if __name__ == "__main__":
    sys.exit(main())
