# PYTHON_ARGCOMPLETE_OK
"""Groups of runs as an offline HTML file without scripts: `python -m results.report [RUNS] [-e GROUP ..] [-o FILE]`."""

import argparse
import base64
import io
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from results.lineage import tree
from results.pages import learning_curves, markup, overview
from results.pages.legend import NEUTRAL
from results.plot import PLOTS, draw_line, place_legend, write_plainly
from src.errors import DataError, UserError, print_errors
from src.experiments.config import unknown
from src.runs.store import list_command
from src.support.command_line import make_parser
from src.tables import lineage, results, run_arguments
from src.tables.gpu_hours import gpu_hours

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = 3
"""Default number of scores drawn as curves."""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content security policy: a browser loads nothing for the page."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its path. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    output = options.output or PLOTS / f"{run_arguments.title(options.groups)}.html"
    content = overview.load(options.runs, options.groups)
    if options.where or options.paths:
        exp_ids = {row["exp_id"] for row in run_arguments.select(options)[0]}
        jobs = [job for job in content.jobs if job.exp_id in exp_ids]
        content = replace(content, rows=[row for row in content.rows if row["exp_id"] in exp_ids], jobs=jobs)
    rows, unread = run_arguments.choose_values(options, content.rows)
    content = replace(
        content,
        rows=rows,
        warnings=[*content.warnings, *unread],
        unfinished=options.include_unfinished,
        seed=options.seed_key,
    )
    page = render(content, options.groups, options.metric)
    run_arguments.write_page(output, page)
    return 0


def render(
    content: overview.Overview, groups: Sequence[str] | None = None, metrics: Sequence[str] | None = None
) -> str:
    """The report as HTML. metrics: scores to draw as curves; None: the first headline scores.

    Raises:
        DataError: there is no run to show.
        ConfigError: no run has the requested score.
    """
    if not content.rows and not content.jobs:
        raise DataError(
            content.warnings[0] if content.warnings else f"{content.runs}: no runs in this folder. Check --runs."
        )
    scores = results.score_names(content.rows)
    for name in metrics or ():
        if name not in scores:
            raise unknown("score", name, scores, str(content.runs), list_command(content.runs))
    score_names = list(metrics) if metrics else results.headline_scores(overview.metrics(content))[:PANELS]
    title = f"Experiments: {', '.join(groups)}" if groups else "Experiments"
    body = "".join(
        [
            _header(content, title),
            section("", markup.warnings(content.warnings), "warned"),
            section("Results", _results(content)),
            section("Learning curves", _curves(content, score_names)),
            section("Experiments", _experiments(content)),
            section("Configuration", "".join(map(_configuration, results.group_rows(content.rows, ["group"])))),
            section("Lineage", _lineage(content)),
            section("Environment", _environment(content)),
        ]
    )
    return page(title, body)


def page(title: str, body: str) -> str:
    """A self-contained HTML file."""
    style = markup.CSS + markup.style("report")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{markup.escape(title)}</title><style>{style}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def section(title: str, content: str, kind: str = "") -> str:
    """A box with a heading; empty without content."""
    heading = f"<h2>{markup.escape(title)}</h2>" if title else ""
    return f'<section class="{kind}">{heading}{content}</section>\n' if content else ""


def _header(content: overview.Overview, title: str) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    best = overview.tabulate(content).best
    hours = sum(gpu_hours(content.runs / row["exp_id"]) for row in content.rows)
    cost = f" · {hours:.1f} GPU-hours over all attempts" if hours else ""
    return (
        f'<header><h1>{markup.escape(title)}</h1><div class="where">{markup.escape(content.runs)} · '
        f"{len(content.jobs)} experiments · written {now}{cost}</div>"
        f"{markup.chips(content.counts())}{f'<p>{markup.escape(best)}</p>' if best else ''}</header>\n"
    )


def _results(content: overview.Overview) -> str:
    table, intervals = overview.tabulate(content), overview.tabulate(content, spread="ci95").lines
    if not table.lines:
        return ""
    cells = [
        [
            cell if cell == wide or "±" not in cell else f"{cell}\n95 %: ±{wide.partition('±')[2]}"
            for cell, wide in zip(*pair, strict=True)
        ]
        for pair in zip(table.lines, intervals, strict=True)
    ]
    runs = "runs" if content.unfinished else "runs that are done"
    about = f"Mean ± standard deviation over the {runs} and 95 % interval of the mean, best first."
    same = f" In all rows: {', '.join(table.same)}." if table.same else ""
    notes = "".join(map(markup.note, [about + same, *table.remarks]))
    return markup.plain_table(table.headings, cells, colours=table.colours) + notes


def _curves(content: overview.Overview, metrics: Sequence[str]) -> str:
    pictures = []
    for metric in metrics:
        curves = learning_curves.build(content, metric)
        if curves.lines:
            pictures.append(
                f'<img alt="{markup.escape(metric)} by step" '
                f'src="data:image/svg+xml;base64,{_picture(curves.lines, metric)}">'
            )
        pictures += map(markup.note, curves.notes)
    return "".join(pictures)


def _picture(lines: Sequence[learning_curves.Line], metric: str) -> str:
    """Learning curves as an SVG in base64."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    for line in lines:
        draw_line(axes, line.x, line.mean, (line.low, line.high), line.label, line.colour)
    if any(line.label for line in lines):
        place_legend(figure)
    return encode_svg(figure, metric)


def encode_svg(figure: "Figure", salt: str) -> str:
    """The figure as an SVG in base64; the same figure and `salt` give the same bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    write_plainly(figure)
    paint_neutrally(figure)
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore missing glyphs, which are drawn as boxes
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def paint_neutrally(figure: "Figure") -> None:
    """Remove the background; draw text and axes in a colour that is readable on light and dark pages."""
    from matplotlib.spines import Spine
    from matplotlib.text import Text

    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        axes.tick_params(color=NEUTRAL)
    for text in figure.findobj(Text):
        text.set_color(NEUTRAL)
    for spine in figure.findobj(Spine):
        spine.set_edgecolor(NEUTRAL)


def _experiments(content: overview.Overview) -> str:
    (_, labels), remarks = overview.differing(content), overview.remarks(content)
    cells = [overview.job_cells(job, labels.get(job.exp_id, ""), remarks.get(job.exp_id, "")) for job in content.jobs]
    return markup.plain_table(overview.JOB_HEADINGS, cells, chips=overview.JOB_HEADINGS.index("state"))


def _configuration(rows: Sequence[results.Row]) -> str:
    """Config values of a group: the shared ones once, the differing ones per experiment."""
    varying = results.varying_keys(rows)
    names = results.short_names(varying)
    shared = [(key, overview.format_value(rows[0][key])) for key in results.config_keys(rows[0]) if key not in varying]
    different = [
        [row["exp_id"][:8], *(overview.format_value(row[key]) if key in row else "–" for key in varying)]
        for row in rows
    ]
    group_text = f"in {rows[0]['group'] or 'all'}"
    tables = markup.plain_table((group_text, ""), shared) if shared else ""
    return tables + (markup.plain_table(("different", *(names[key] for key in varying)), different) if varying else "")


def _lineage(content: overview.Overview) -> str:
    try:
        family = lineage.build(content.runs)
        family = family.family(row["exp_id"] for row in content.rows)
    except UserError as error:
        return markup.error(str(error))
    return markup.text_block(tree(family)) + markup.warnings(family.problems) if family.edges else ""


def _environment(content: overview.Overview) -> str:
    """Each fact with its values; if they differ, also the number of experiments per value."""
    counts: dict[str, Counter[str]] = {}
    for row in content.rows:
        for name, value in overview.environment(content.runs, row["exp_id"]).items():
            counts.setdefault(name, Counter())[value] += 1
    counts.pop("time", None)
    counts.pop("command", None)
    return (
        markup.plain_table(
            ("fact", "value"), [(name, _spell_counts(values.most_common())) for name, values in counts.items()]
        )
        if counts
        else ""
    )


def _spell_counts(values: Iterable[tuple[str, int]]) -> str:
    values = list(values)
    return values[0][0] if len(values) == 1 else "\n".join(f"{value} ({number})" for value, number in values)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.report", __doc__)
    run_arguments.add(parser, output=f"the file (default: {PLOTS}/GROUP.html)")
    parser.add_argument(
        "--metric", nargs="+", metavar="NAME", help=f"scores to draw as curves (default: the first {PANELS})"
    )
    run_arguments.add_values(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
