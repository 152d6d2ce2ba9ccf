# PYTHON_ARGCOMPLETE_OK
"""Learning curves, one line per configuration with a band over seeds: `python -m results.plot [RUNS] [-e GROUP ..]`.

With --y, plot one point per experiment instead: `--x cache_bytes_per_context_token --y inference/f1`.
"""

import argparse
import io
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results.pages import legend
from results.table import INTERVALS, default_metric
from src.errors import ConfigError, DataError, print_errors
from src.experiments.config import unknown
from src.files import encodable, write_atomic, writing
from src.runs.summary import is_finite
from src.support.command_line import make_parser, require_at_least
from src.tables import curves, results, run_arguments, statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTS = Path("results/plots")
HEIGHT = 4.8
"""Height of a panel in inches, without the legend."""
LABEL_CHARACTERS = 48
"""Maximum characters per line of the legend."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the plot and print its path. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    require_at_least(1, top=options.top)
    if not 0 <= options.smooth < 1:
        raise ConfigError(f"--smooth: expected a number from 0 (no smoothing) to less than 1, got {options.smooth}.")
    output = options.output or PLOTS / f"{run_arguments.title(options.groups)}.png"
    rows, unreadable = run_arguments.select(options)
    all_rows = results.load_rows(options.runs, options.groups)[0] if options.where or options.paths else rows
    if options.y is None and (options.at_step is not None or options.value != "last"):
        raise ConfigError(
            "--at-step, --value: only for points, as curves show every step. Set --y to the score of the points."
        )
    rows, left_out = run_arguments.choose_values(options, rows)
    configs = legend.Configurations(
        rows, options.by, all_rows, options.include_unfinished, options.seed_key, options.top
    )
    if options.y is None:
        if options.log_x:
            raise ConfigError("--log_x: only for points. Set --y to their score, or remove --log_x.")
        figure, unread = draw_panels(options.runs, configs, options.metric, options.x, options.interval, options.smooth)
    else:
        if options.metric:
            raise ConfigError("--y, --metric: --y draws points, --metric curves. Remove one of the two.")
        figure, unread = points(options.runs, configs, options.x, options.y, options.log_x)
    unread += save(figure, output)
    drawn_scores = options.metric or [options.y or default_metric(results.score_names(rows)) or ""]
    run_arguments.warn(
        [*unreadable, *left_out, *unread, *statistics.nan_remarks(rows, drawn_scores, options.include_unfinished)]
    )
    run_arguments.show_file(output)
    return 0


def save(figure: "Figure", output: Path) -> list[str]:
    """Write the picture atomically, in the format of its suffix; returns matplotlib's warnings, one line each.

    Raises:
        ConfigError: the suffix is not a known format.
        RunError: the disk refuses.
    """
    formats = figure.canvas.get_supported_filetypes()
    if output.suffix[1:].lower() not in formats:
        raise ConfigError(f"--output {output}: expected a name that ends with one of {', '.join(sorted(formats))}.")
    picture = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        if output.suffix.lower() == ".webp":
            figure.savefig(picture, format="webp", pil_kwargs={"lossless": True})
        else:
            figure.savefig(picture, format=output.suffix[1:].lower())
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, picture.getvalue())
    return list(dict.fromkeys(f"{output}: {' '.join(str(warning.message).split())}" for warning in caught_warnings))


def draw(runs: Path, rows: Sequence[results.Row], metrics: Sequence[str] | None = None) -> "Figure":
    """For notebooks: `draw_panels` over steps, with standard deviations."""
    return draw_panels(runs, legend.Configurations(rows), metrics)[0]


def draw_panels(
    runs: Path,
    configs: legend.Configurations,
    metrics: Sequence[str] | None = None,
    x: str = "step",
    interval: str = "std",
    smoothing: float = 0.0,
) -> tuple["Figure", list[str]]:
    """Draw one panel per metric and one line per configuration; also returns remarks on missing data.

    metrics: default: the first score of the table. x: "step", a score such as "tokens", or "seconds" of training.
    interval: half the height of the bands, "std" or "ci95". smoothing: see `curves.Band.smooth`.
    If there are more than `configs.most` configurations, the best ones by the first metric are drawn.

    Raises:
        ConfigError: no run has the requested metric.
        DataError: no run has values of `x`.
    """
    import numpy
    from matplotlib.figure import Figure

    names = results.score_names(configs.rows)
    default = default_metric(names)
    if default is None:
        raise ConfigError(f"{runs}: no run has a score yet. Wait for the first evaluation.")
    metric_names = list(metrics or [default])
    for metric in metric_names:
        if metric not in names:
            raise unknown("score", metric, names, str(runs))
    if x not in ("step", "seconds", *names):
        raise unknown("axis", x, ["step", "seconds", *names], str(runs))
    groups = (
        configs.sort_best_first(metric_names[0])[: configs.most]
        if len(configs.groups) > configs.most
        else configs.groups
    )
    bands_by_metric, remarks = curves.bands(runs, [configs.curve_rows(group) for group in groups], metric_names, x)
    figure = Figure(figsize=(6.4 * len(metric_names), HEIGHT), layout="constrained", dpi=120)
    for place, (metric, bands) in enumerate(zip(metric_names, bands_by_metric, strict=True), start=1):
        axes = figure.add_subplot(1, len(metric_names), place, xlabel=x, ylabel=metric)
        axes.grid(alpha=0.3)
        for group, raw_band in zip(groups, bands, strict=True):
            band = raw_band.smooth(smoothing)
            half_width = numpy.nan_to_num(band.half_width(interval))
            draw_line(
                axes,
                band.x,
                band.mean,
                (band.mean - half_width, band.mean + half_width),
                configs.label(group),
                configs.colour(group),
            )
    remark = _count_remark(len(groups), len(configs.groups))
    if configs.keys or len(statistics.averaged_rows(configs.rows, configs.unfinished)) < len(configs.rows):
        place_legend(figure, remark)
    write_plainly(figure)
    return figure, [*remarks, *([f"{remark}; filter or --top N."] if remark else [])]


def _count_remark(num_drawn: int, count: int) -> str:
    return f"{num_drawn} of {count} configurations" if num_drawn < count else ""


def points(
    runs: Path, configs: legend.Configurations, x: str, y: str, log_x: bool = False
) -> tuple["Figure", list[str]]:
    """Draw score `y` over `x`: a point per finished experiment, a colour per configuration. Also returns remarks.

    x: a score, or a dotted config key such as "model.stride". The legend has the best `configs.most` configurations by
    `y`.

    Raises:
        ConfigError: no run has the requested name.
        DataError: no run has numbers for both.
    """
    from matplotlib.figure import Figure

    rows, scores = configs.rows, results.score_names(configs.rows)
    if y not in scores:
        raise unknown("score", y, scores, str(runs))
    names = ["step", *scores, *dict.fromkeys(key for row in rows for key in results.config_keys(row))]
    if x not in names:
        raise unknown("axis", x, names, str(runs))
    done_rows = statistics.averaged_rows(rows, configs.unfinished)
    point_rows = [row for row in done_rows if is_finite(row.get(x)) and is_finite(row.get(y))]
    if not point_rows:
        hint = (
            ""
            if len(done_rows) == len(rows)
            else f" {len(rows) - len(done_rows)} are not done. Add --unfinished to include them."
        )
        raise DataError(f"{runs}: no run has a number for both {x!r} and {y!r}.{hint or ' Choose other scores.'}")
    remarks = [f"left out: {n} of {len(rows)} runs, which are not done." for n in [len(rows) - len(done_rows)] if n]
    remarks += [
        f"left out: {n} of {len(rows)} runs, which have no number for {x!r} or {y!r}."
        for n in [len(done_rows) - len(point_rows)]
        if n
    ]
    figure = Figure(figsize=(6.4, HEIGHT), layout="constrained", dpi=120)
    axes = figure.add_subplot(xlabel=x, ylabel=y, xscale="log" if log_x else "linear")
    axes.grid(alpha=0.3)
    by_colour = {configs.colour(group): group for group in results.group_rows(point_rows, configs.keys)}
    best = [colour for group in configs.sort_best_first(y) if (colour := configs.colour(group)) in by_colour][
        : configs.most
    ]
    for colour in dict.fromkeys([*best, *by_colour]):
        group = by_colour[colour]
        text = in_legend(configs.label(group) or group[0]["exp_id"][:8]) if colour in best else "_"  # without an entry
        axes.plot([row[x] for row in group], [row[y] for row in group], "o", label=text, color=colour)
    remark_text = _count_remark(len(best), len(by_colour))
    place_legend(figure, remark_text)
    write_plainly(figure)
    return figure, [*remarks, *([f"the legend names {remark_text}; filter or --top N."] if remark_text else [])]


def place_legend(figure: "Figure", title: str = "") -> None:
    """Add a legend below the axes, in as many columns as fit, and enlarge the figure by its height."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if not entries:
        return
    width, renderer = figure.bbox.width, FigureCanvasAgg(figure).get_renderer()
    for columns in range(min(4, len(entries)), 0, -1):
        legend = figure.legend(
            entries.values(),
            entries,
            loc="outside lower left",
            ncols=columns,
            fontsize="small",
            frameon=False,
            title=title or None,
            alignment="left",
        )
        write_plainly(legend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `save` reports missing glyphs
            box = legend.get_window_extent(renderer)
        if box.width <= width or columns == 1:
            figure.set_size_inches(max(width, box.width) / figure.dpi, (figure.bbox.height + box.height) / figure.dpi)
            return
        legend.remove()


def in_legend(text: str) -> str:
    """Wrap a label for the legend. Starts with a space, as legends omit labels that start with _."""
    return " " + textwrap.fill(text, LABEL_CHARACTERS)


def draw_line(axes: Any, x: Any, mean: Any, band: tuple[Any, Any], text: str, colour: str) -> None:
    """Draw a line with its (low, high) band."""
    axes.plot(x, mean, label=in_legend(text), color=colour, marker="o" if len(x) < 20 else None, markersize=3)
    axes.fill_between(x, *band, alpha=0.2, color=colour, linewidth=0)


def write_plainly(figure: Any) -> None:
    """Draw texts literally: disable $ mathematics, and escape halves of surrogate pairs."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(encodable(text.get_text()))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.plot", __doc__)
    run_arguments.add(parser, output=f"PNG, or another format that matplotlib knows (default: {PLOTS}/GROUP.png)")
    parser.add_argument(
        "--x", default="step", metavar="NAME", help="step, seconds, or a score such as tokens (default: step)"
    )
    parser.add_argument(
        "--y", metavar="NAME", help="one point for each experiment: its last value of this score over that of --x"
    )
    parser.add_argument(
        "--by", nargs="+", metavar="KEY", help="dotted config keys (default: all that vary, but the seed)"
    )
    run_arguments.add_values(parser)
    parser.add_argument("--log_x", action="store_true", help="the x axis of points is logarithmic")
    parser.add_argument(
        "--interval", choices=tuple(INTERVALS), default="std", help="of the bands (default: std; ci95: Student's t)"
    )
    parser.add_argument(
        "--smooth", type=float, default=0.0, metavar="W", help="weight, below 1, of a moving average (default: none)"
    )
    parser.add_argument(
        "--top", type=int, default=legend.LINES, metavar="N", help="lines to draw, the best ones (default: %(default)s)"
    )
    parser.add_argument(
        "--metric", nargs="+", metavar="NAME", help="scores to plot, one panel per score (default: that of the table)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
