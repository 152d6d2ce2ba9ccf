"""Write a run as an offline HTML file, with curves, speed, layers and events:
`python -m results.pages.run_page RUN [-o FILE]`."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from results import answers, report
from results.pages import layers, legend, markup, overview
from results.plot import PLOTS, place_legend
from src.errors import UserError, print_errors
from src.evaluation.metrics.answers import GAIN, INFERENCE, WRONG
from src.experiments.config import flatten
from src.runs import jsonl_records, ledger
from src.runs.scores import SCORES, Scores
from src.runs.store import PERF, SavedRun
from src.runs.summary import Summary
from src.support.command_line import make_parser
from src.tables import results, run_arguments

MAX_EVENTS = 200
MAX_ANSWERS = 30
_EVENT_COLUMNS = ("event", "when", "who", "id")
_TITLES = {
    "grad_norm": "gradient norm before clipping",
    "clip_rate": "share of clipped steps",
    "learning_rate": "learning rate",
    "skipped_steps": "skipped steps",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU",
    "model_flops_per_second": "model FLOP per second",
    "data_wait_rate": "share of time waiting for data",
    "data_wait_seconds": "seconds waiting for data",
    "peak_memory_bytes": "peak GPU memory, bytes",
    "peak_host_memory_bytes": "peak host memory, bytes",
    "watts": "watts",
}
"""Score -> title, for panels with one line, in display order."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and print its path. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    (run,) = run_arguments.paths(options, at_least=1, at_most=1)
    output = options.output or PLOTS / f"{run.resolve().name}.html"
    page = render(run)
    run_arguments.write_page(output, page)
    return 0


def render(run: Path) -> str:
    """The page of save directory `run` as HTML.

    Raises:
        UserError: it is not a save directory, or a required file cannot be read.
    """
    saved = SavedRun(run)
    exp = saved.foreign_exp if saved.is_foreign else saved.exp
    rows = Scores(run / SCORES, read_only=True).rows()
    perf, warnings = read_perf(run)
    kinds, layer_warnings = layers.read(run)
    title, facts = _introduce(run, exp)
    answers, unread = _answers(run)
    body = "".join(
        [
            _header(saved, title, rows),
            report.section("", markup.warnings(warnings + layer_warnings + unread), "warned"),
            report.section("Configuration", markup.plain_table((), facts) if facts else ""),
            report.section("Scores", _last_scores(rows)),
            report.section("Losses", _panels({"loss": _lines_by_name(rows, _is_loss)}, size=(10, 3.6)) if rows else ""),
            report.section(
                "Training",
                _panel_grid(
                    {
                        title: _lines_by_name(rows, name.__eq__) or _lines_by_name(perf, name.__eq__)
                        for name, title in _TITLES.items()
                    }
                ),
            ),
            report.section(
                "Loss by source",
                _panels(
                    {"by source": _lines_by_name([*perf, *rows], lambda name: name.startswith("loss/"))}, size=(10, 3.2)
                ),
            ),
            report.section(
                "Other scores", _panel_grid({name: _lines_by_name(rows, name.__eq__) for name in _other_scores(rows)})
            ),
            report.section("Answers", answers, "only-wrong"),
            report.section("Layers", _layers(kinds)),
            report.section("Events", _events(run)),
            report.section(
                "Experiment",
                markup.plain_table(("key", "value"), [(k, overview.format_value(v)) for k, v in flatten(exp).items()]),
            ),
        ]
    )
    return report.page(title, body)


def _introduce(run: Path, exp: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    """A title and a list of facts: the run's group and its distinguishing config values, or its recipe and model."""
    run = run.resolve()
    content = overview.load(run.parent)
    row = content.row(run.name)
    if row is None or not row["group"]:
        model = exp.get("model")
        components = [str(exp.get("recipe", "run")), str(model.get("name", "")) if isinstance(model, Mapping) else ""]
        return " ".join(filter(None, components)) + f" · {run.name[:8]}", []
    members = [other for other in content.rows if other["group"] == row["group"]]
    keys = results.varying_keys(members)
    facts = [("group", row["group"]), *((key, overview.format_value(row[key])) for key in keys if key in row)]
    facts += [("notes", remark)] if (remark := overview.remarks(content)[run.name]) else []
    items = legend.label([row], keys)
    return f"{row['group']}: {items or run.name[:8]}", facts


def _last_scores(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of the last values of headline scores."""
    summary = Summary()
    summary.add(rows)
    last = summary.last
    names = sorted(results.headline_scores(list(last)), key=lambda name: not name.startswith(INFERENCE))
    ends = [end for end in ("", WRONG, GAIN) if any(name.endswith(end) for name in names)]
    firsts = [name for name in names if not name.endswith((WRONG, GAIN))]
    cells = {name: "NaN" if value is None else f"{value:.4g}" for name, value in last.items()}
    lines = [[name, *(cells.get(name + end, "") for end in ends)] for name in firsts]
    return (
        markup.plain_table(("", *("last" if not end else end.strip("_").replace("_", " ") for end in ends)), lines)
        if lines
        else ""
    )


def _answers(run: Path) -> tuple[str, list[str]]:
    """Samples of answered questions as HTML, with a switch to show only wrong answers; and warnings."""
    try:
        files = answers.samples(run)
    except UserError as error:
        return "", [str(error)]
    pieces = [
        markup.note(f"{name}: {answers.describe_score(content)}")
        + answers.page(answers.choose(content, MAX_ANSWERS, wrong=False))
        for name, content in files.items()
    ]
    switch = '<label><input type="checkbox"> only wrong answers</label>'
    return "".join([switch, *pieces]) if pieces else "", []


def read_perf(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the rows of perf.jsonl, sorted by step; also returns a warning about malformed lines.
    The last row of a repeated step is used.

    Raises:
        RunError: the file cannot be read.
    """
    path, by_step, wrong = run / PERF, {}, 0
    for line in jsonl_records.complete_lines(path):
        row = jsonl_records.parse_object(line)
        if row is not None and type(row.get("step")) is int:
            by_step[row["step"]] = row
        else:
            wrong += 1
    return [by_step[step] for step in sorted(by_step)], [
        f"{path}: {wrong} of its lines are no rows and are left out."
    ] if wrong else []


Line = tuple[list[int], list[float]]


def _lines_by_name(rows: Sequence[Mapping[str, Any]], fits: Any) -> dict[str, Line]:
    """Steps and finite values of each column with a name that satisfies `fits`."""
    lines: dict[str, Line] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and fits(name) and isinstance(value, int | float) and math.isfinite(value):
                steps, values = lines.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    return lines


def _is_loss(name: str) -> bool:
    return name.endswith("loss")


def _other_scores(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        name
        for name in names
        if name not in ("step", "tokens", *_TITLES) and not _is_loss(name) and not name.startswith("loss/")
    ]


def _panel_grid(panels: Mapping[str, Mapping[str, Line]]) -> str:
    """Pictures of varying values, and a folded list of constant values."""
    constant = {
        title: lines
        for title, lines in panels.items()
        if lines and all(len(set(values)) == 1 for _, values in lines.values())
    }
    content = _panels({title: lines for title, lines in panels.items() if title not in constant}, size=(5, 2.3))
    items = [
        (title, ", ".join(f"{values[0]:.4g}" for _, values in lines.values())) for title, lines in constant.items()
    ]
    folded_rows = (
        f"<details><summary>{len(items)} of one value</summary>{markup.plain_table((), items)}</details>"
        if items
        else ""
    )
    return (f'<div class="panels">{content}</div>' if content else "") + folded_rows


def _panels(panels: Mapping[str, Mapping[str, Line]], size: tuple[float, float]) -> str:
    """A picture for each non-empty panel."""
    return "".join(_figure(title, _curves(title, lines, size)) for title, lines in panels.items() if lines)


def _figure(title: str, picture: str) -> str:
    return (
        f'<figure><figcaption>{markup.escape(title)}</figcaption><img alt="{markup.escape(title)} over steps" '
        f'src="data:image/svg+xml;base64,{picture}"></figure>'
    )


def _curves(title: str, lines: Mapping[str, Line], size: tuple[float, float]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=7)
    for name, (steps, values) in lines.items():
        axes.plot(steps, values, label=f" {name}", linewidth=1.3, marker="o" if len(steps) < 20 else None, markersize=3)
    if len(lines) > 1:
        place_legend(figure)
    return report.encode_svg(figure, title)


def _layers(kinds: Sequence[layers.Layers]) -> str:
    if not kinds:
        return ""
    pictures = [_figure(kind.title, report.encode_svg(layers.draw(kind), kind.title)) for kind in kinds]
    note = markup.note("Largest first; grey is zero, red is not finite.")
    return note + markup.plain_table(("what", "layer", "number"), layers.notable(kinds)) + "".join(pictures)


def _events(run: Path) -> str:
    events = ledger.read(run)
    items = [
        (event.get("when", ""), event.get("event", ""), event.get("who", ""), _facts(event))
        for event in events[-MAX_EVENTS:]
    ]
    more = f"The first {len(events) - MAX_EVENTS} events are left out." if len(events) > MAX_EVENTS else ""
    return markup.note(more) + markup.plain_table(("when", "event", "who", "what"), items) if items else ""


def _facts(event: Mapping[str, Any]) -> str:
    return "\n".join(
        f"{key}: {overview.format_value(value)}" for key, value in event.items() if key not in _EVENT_COLUMNS
    )


def _header(run: SavedRun, title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    state, status = "foreign" if run.is_foreign else run.state, run.status
    step, steps = rows[-1]["step"] if rows else status.get("step"), status.get("steps")
    place = (
        f"step {step} of {steps}"
        if step is not None and steps is not None
        else f"step {step}"
        if step is not None
        else "no steps yet"
    )
    reason = run.holder.lost_contact if state == "lost" else ""
    reason = reason or status.get("reason")
    return (
        f"<header><h1>{markup.escape(title)}</h1>"
        f'<div class="where">run {markup.escape(run.path.resolve().name)} · {markup.escape(run.path)} '
        f'· {markup.escape(place)} · written {now}</div><div class="chips">{markup.chip(state, state)}</div>'
        f"{f'<p>{markup.escape(reason)}</p>' if reason else ''}</header>\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.pages.run_page", __doc__)
    run_arguments.add(parser, output=f"the file (default: {PLOTS}/ID.html)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
