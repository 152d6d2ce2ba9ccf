# PYTHON_ARGCOMPLETE_OK
"""Experiments in order of time, with the best so far and each decision: `python -m results.progress -e GROUP ..`.

Each experiment is compared with the best one before it, as `results.compare` does; it becomes the best only if it is
better. With -o FILE.png, also draws the picture.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from results import plot, report
from results.compare import add_verdict_options
from results.pages import markup
from src.errors import ConfigError, RunError, print_errors
from src.files import ROOT, read_json
from src.runs.code_version import Git
from src.runs.store import ENV, SavedRun
from src.runs.summary import is_finite
from src.support import documents
from src.support.command_line import make_parser
from src.tables import comparability, results, run_arguments, statistics
from src.tables.comparability import Family
from src.tables.comparison import BETTER, compare, require_min_effect
from src.tables.terminal_table import draw_rich

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST, UNFINISHED, OTHER = "first", "not finished", "not comparable"
MAX_CHANGES = 4
"""Maximum number of changes in a row of the table."""
_GREEN, _GREY = "#2e9e5b", "#8a8f98"


@dataclass
class Step:
    """One experiment of a search."""

    number: int
    exp_ids: list[str]
    start: str
    """Time of the first start of its runs; empty if unknown."""
    changes: dict[str, list[Any]]
    """Config key -> [value of the best before, its own]."""
    mean: float | None
    interval: float | None
    """Half the 95 % interval of the mean over seeds; None for a single seed."""
    seeds: int
    difference: float | None
    """From the best before."""
    verdict: str
    """Of `results.compare`, or `FIRST`, `UNFINISHED` or `OTHER`."""
    is_accepted: bool
    best: float | None
    """Mean of the best, after the decision."""


class Document(documents.Document):
    """The experiments of a search in order of time."""

    schema: Literal["results.progress/1"]
    metric: str
    steps: list[Step]
    picture: str | None
    """Path of the picture."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and write the picture. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    rows, warnings = run_arguments.select(options)
    rows = rows if options.branch is None else select_branch(rows, options.runs, options.branch)
    steps, remarks = find_steps(options.runs, rows, options.metric, options.lowest, options.min_effect)
    if options.output is not None:
        remarks += plot.save(draw(steps, options.metric), options.output)
    run_arguments.warn([*warnings, *remarks])

    def write() -> None:
        draw_rich(*table(steps, options.metric), f"{options.metric}: mean ± half the 95 % interval over seeds")
        if options.output is not None:
            print(options.output)

    content = {"metric": options.metric, "steps": steps, "picture": options.output}
    documents.show("results.progress/1", content, write)
    return 0


def find_steps(
    runs: Path, rows: Sequence[results.Row], metric: str, lowest: bool | None = None, min_effect: float = 0.0
) -> tuple[list[Step], list[str]]:
    """The experiments of `rows` in order of their first start, and remarks on those that cannot be compared, or whose
    start is unknown.

    Raises:
        ConfigError: no run has the metric, or `min_effect` is negative.
    """
    require_min_effect(min_effect)
    results.check_known("score", [metric], results.score_names(rows), "--metric")
    families = comparability.families(rows, results.load_rows(runs)[0], runs)
    steps, remarks, best = list[Step](), list[str](), list[Family]()
    for start, family in _in_order(families, remarks):
        values = [row[metric] for row in statistics.averaged_rows(family.rows) if row.get(metric) is not None]
        mean = sum(values) / len(values) if values else None
        changes = comparability.differences(best[-1], family).get("experiment", {}) if best else {}
        difference, verdict = None, FIRST
        if len(statistics.averaged_rows(family.rows)) < len(family.rows) and not family.diverged_ids:
            verdict = UNFINISHED
        elif not best and len(values) < len(family.rows):
            verdict = OTHER  # a seed ended in NaN
        elif best:
            try:
                comparability.require_same_evaluation(best[-1], family, metric)
                (result,) = compare(best[-1], [family], metric, lowest, min_effect)
                difference, verdict = result.difference, result.verdict
            except ConfigError as error:
                remarks.append(str(error))
                verdict = OTHER
        is_accepted = verdict in (BETTER, FIRST)
        if is_accepted:
            best.append(family)
        best_mean = mean if is_accepted else steps[-1].best if steps else None
        ids = [row["exp_id"] for row in family.rows]
        interval = statistics.ci95(values)
        facts = (changes, mean, interval, len(values), difference, verdict, is_accepted, best_mean)
        steps.append(Step(len(steps) + 1, ids, start, *facts))
    return steps, remarks


def select_branch(rows: Sequence[results.Row], runs: Path, branch: str) -> list[results.Row]:
    """The rows of runs with code of a git branch, or of a range of commits.

    Raises:
        ConfigError: there is no such branch or range, or no run is from it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            commits = Git(ROOT, Path(scratch))("rev-list", "--end-of-options", branch, "--").decode().split()
        except (OSError, subprocess.SubprocessError):
            raise ConfigError(
                f"--branch {branch}: not known to git in {ROOT}. Name a branch, or main..BRANCH."
            ) from None
    chosen_rows = [row for row in rows if SavedRun(runs / row["exp_id"]).env.get("commit") in set(commits)]
    if not chosen_rows:
        raise ConfigError(f"--branch {branch}: none of {len(rows)} runs has one of its {len(commits)} commits.")
    return chosen_rows


def _in_order(families: Iterable[Family], remarks: list[str]) -> list[tuple[str, Family]]:
    """The time of the first start of each experiment, the earliest first. Unknown times are empty and last, and
    `remarks` gets a line with their runs."""
    starts, unknown_ids = [], []
    for family in families:
        times = {row["exp_id"]: _first_start(family.folder / row["exp_id"]) for row in family.rows}
        unknown_ids += [exp_id for exp_id, time in times.items() if not time]
        start = min(filter(None, times.values()), default="")
        starts.append((not start, start, min(times), family))
    if unknown_ids:
        remarks.append(f"{', '.join(unknown_ids)}: no time of the first start is recorded, so the order can be wrong.")
    return [(start, family) for _, start, _, family in sorted(starts)]


def _first_start(run: Path) -> str:
    env = read_json(run / "attempts" / "001" / ENV, RunError, {})
    return str(env.get("time") or "") if isinstance(env, dict) else ""


def table(steps: Sequence[Step], metric: str) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    lines = []
    for step in steps:
        changes = [f"{key.rpartition('.')[2]}={new}" for key, (_, new) in step.changes.items()]
        more = f", … {len(changes) - MAX_CHANGES} more" if len(changes) > MAX_CHANGES else ""
        mean = "-" if step.mean is None else f"{step.mean:.4g}"
        interval = "" if step.interval is None else f" ± {step.interval:.2g}"
        few = f" ({step.seeds} of {len(step.exp_ids)})" if step.seeds < len(step.exp_ids) else ""
        difference = f"{step.difference:+.3g}" if is_finite(step.difference) else ""
        best = "" if step.best is None else f"{step.best:.4g}"
        verdict = f"{step.verdict}{', accepted' * step.is_accepted}"
        text = ", ".join(changes[:MAX_CHANGES]) + more
        lines.append([str(step.number), step.exp_ids[0][:8], text, f"{mean}{interval}{few}", difference, verdict, best])
    return ["#", "experiment", "changes to the best", metric, "difference", "verdict", "best"], lines


def draw(steps: Sequence[Step], metric: str) -> "Figure":
    """Each experiment with its interval, accepted ones in green, and the best so far as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, plot.HEIGHT), layout="constrained", dpi=120)
    axes = figure.add_subplot(xlabel="experiment", ylabel=metric)
    axes.grid(alpha=0.3)
    for is_accepted, colour, label in ((False, _GREY, "not accepted"), (True, _GREEN, "accepted")):
        points = [step for step in steps if step.mean is not None and step.is_accepted == is_accepted]
        if points:
            axes.errorbar(
                [step.number for step in points],
                [step.mean for step in points],  # pyright: ignore[reportArgumentType]  no None is left
                yerr=[step.interval or 0.0 for step in points],
                fmt="o",
                color=colour,
                label=label,
                capsize=3,
            )
    best = [step for step in steps if step.best is not None]
    numbers, values = [step.number for step in best], [step.best for step in best]
    axes.step(numbers, values, where="post", color=_GREEN, label="best so far")  # pyright: ignore[reportArgumentType]
    axes.legend()
    return figure


def render(runs: Path, group: str) -> str:
    """The page of a group for the dashboard, as HTML, by the default metric.

    Raises:
        UserError: the group has no runs, or no score.
    """
    rows, warnings = results.load_rows(runs, group)
    names = results.score_names(rows)
    metric = comparability.PER_BYTE if comparability.PER_BYTE in names else plot.default_metric(names)
    if metric is None:
        raise ConfigError(f"{runs}: no run of {group} has a score yet. Wait for the first evaluation.")
    steps, remarks = find_steps(runs, rows, metric)
    picture = report.encode_svg(draw(steps, metric), group)
    body = f"<header><h1>{markup.escape(f'Progress: {group}')}</h1>{markup.warnings([*warnings, *remarks])}</header>"
    body += report.section("", f'<img alt="progress" src="data:image/svg+xml;base64,{picture}">')
    headings, lines = table(steps, metric)
    return report.page(f"Progress: {group}", body + report.section("", markup.plain_table(headings, lines)))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.progress", __doc__)
    run_arguments.add(parser, output="also draw the picture into this file, such as progress.png")
    parser.add_argument(
        "--branch", metavar="NAME", help="only runs with code of this git branch, or of a range such as main..NAME"
    )
    add_verdict_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
