"""Learning curves, one line for each configuration with a band over its seeds: `python -m results.plot [RUNS] [-e GROUP]`."""

import argparse
import io
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results.table import RUNS, default_metric
from src.config import unknown
from src.errors import ConfigError, UserError
from src.experiments import results
from src.files import write_atomic, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS = Path("results/plots")
Curve = list[tuple[int, float, float | None]]
"""(step, mean, sample standard deviation or None) in the order of steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the plot and print its path. Returns the exit code."""
    options = _parser().parse_args(arguments)
    output = options.output or PLOTS / f"{options.group or 'all'}.png"
    try:
        rows, warnings = results.load_rows(options.runs, options.group)
        save(draw(options.runs, rows, options.metric), output)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    for warning in warnings:
        print(warning, file=sys.stderr)
    print(output)
    return 0


def save(figure: "Figure", output: Path) -> None:
    """Write the picture, whole or not at all, in the format that its name ends with.

    Raises:
        ConfigError: a name without a known ending.
        RunError: the disk refuses.
    """
    formats = figure.canvas.get_supported_filetypes()
    if output.suffix[1:].lower() not in formats:
        raise ConfigError(f"--output {output}: expected a name that ends with one of {', '.join(sorted(formats))}.")
    picture = io.BytesIO()
    figure.savefig(picture, format=output.suffix[1:].lower())
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, picture.getvalue())


def draw(runs: Path, rows: Sequence[results.Row], metrics: Sequence[str] | None = None) -> "Figure":
    """One panel for each metric (default: that of the table), one line for each configuration but the seed.

    Raises:
        ConfigError: a metric that no run has.
        DataError: damaged scores.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = results.score_names(rows)
    default = default_metric(known)
    if default is None:
        raise ConfigError(f"{runs}: no run has any score yet, so there is nothing to plot.")
    chosen = list(metrics or [default])
    for metric in chosen:
        if metric not in known:
            raise unknown("score", metric, known, str(runs))
    keys = results.distinguishing(rows)
    histories = {row["exp_id"]: results.history(runs / row["exp_id"]) for row in rows}
    figure = Figure(figsize=(6.4 * len(chosen), 4.8), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    for place, metric in enumerate(chosen, start=1):
        axes = figure.add_subplot(1, len(chosen), place, xlabel="step", ylabel=metric)
        axes.grid(alpha=0.3)
        for group in results.grouped(rows, keys):
            _draw_line(axes, curve([histories[row["exp_id"]] for row in group], metric), label(group, keys))
        if keys:
            axes.legend(fontsize="small")
    return figure


def curve(histories: Sequence[Sequence[dict[str, Any]]], metric: str) -> Curve:
    """Mean and deviation of `metric` over the runs that have it, at each step."""
    name = metric.removeprefix("score.")
    values: dict[int, list[float]] = {}
    for history in histories:
        for index, row in enumerate(history):
            value = row.get(metric, row.get(name))
            if isinstance(value, (int, float)) and value - value == 0:
                values.setdefault(row.get("step", index), []).append(value)
    return [(step, statistics.fmean(at), statistics.stdev(at) if len(at) > 1 else None) for step, at in sorted(values.items())]


def label(group: Sequence[results.Row], keys: Sequence[str]) -> str:
    """What tells this configuration from the others, and over how many runs its line is."""
    names = results.short_names(keys)
    told = ", ".join(f"{names[key]}={str(group[0].get(key, '-'))[:16]}" for key in keys)
    return f"{told} ({len(group)})" if len(group) > 1 else told


def _draw_line(axes: Any, points: Curve, text: str) -> None:
    steps, means = [p[0] for p in points], [p[1] for p in points]
    (line,) = axes.plot(steps, means, label=text, marker="o" if len(points) < 20 else None, markersize=3)
    if any(std is not None for _, _, std in points):
        low = [mean - (std or 0.0) for _, mean, std in points]
        high = [mean + (std or 0.0) for _, mean, std in points]
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), linewidth=0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m results.plot", description=__doc__)
    parser.add_argument("runs", nargs="?", type=Path, default=RUNS, help=f"folder of save directories (default: {RUNS})")
    parser.add_argument("-e", "--group", help="only the runs of this group")
    parser.add_argument("--metric", nargs="+", metavar="NAME", help="scores to plot, a panel for each (default: what the table sorts by)")
    parser.add_argument("--output", type=Path, help=f"PNG, or another format that matplotlib knows (default: {PLOTS}/GROUP.png)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
