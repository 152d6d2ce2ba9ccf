"""Runs on a live web page: `python -m results.dashboard [RUNS] [-e GROUP] [--port P]`, or `app()` in a notebook."""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import panel as pn

from results import answers, progress
from results.pages import chart, learning_curves, markup, overview, panes, run_page
from src.errors import ConfigError, UserError, print_errors
from src.support.command_line import make_parser, parse_arguments
from src.support.served_page import add_address, serve_page
from src.tables import curves, results
from src.tables.run_arguments import RUNS

PORT = 5006
SECONDS = (2, 5, 15, 60)
"""Choices of the refresh interval, in seconds."""
ALL = "all"
EXTRA_PAGES = (
    *("group", "states", "where", "text", "by", "scores", "sorted", "spread", "over", "value", "at_step"),
    *("metrics", "x", "smoothing", "logarithmic", "experiment", "other", "wrong"),
)
"""Widgets with their value in the page's address."""
LOG_LINES = 300
MAX_ANSWERS = 50
MAX_PICTURES = 4
"""Maximum number of metrics drawn at the same time."""
_FIRST = ("failed", "lost", "unknown", "stopped", "running", "queued")
"""States that need attention, which the table of jobs lists first."""
_saved: dict[Path, overview.Saved] = {}
"""Cached values by folder of runs, shared by all open pages."""
_BODY_CSS = markup.CSS + "body { margin: 0; background: var(--page); }"


def app(
    runs: Path = RUNS, group: str | None = None, live: bool = True, has_links: bool = False
) -> pn.viewable.Viewable:
    """Create the page. live: start with automatic refresh, which a switch on the page can stop.
    has_links: link to pages of runs, which the server must have."""
    pn.extension("tabulator", inline=True, notifications=False)
    dashboard = Dashboard(runs, group, live, has_links)
    if pn.state.location is not None:
        dashboard.restore(pn.state.location)
    return dashboard.view()


class Dashboard:
    """Widgets and their data. Only `reload` and `tick` read the folder; all other updates use the data in memory."""

    def __init__(
        self, runs: Path = RUNS, group: str | None = None, live: bool = False, has_links: bool = False
    ) -> None:
        self.runs, self.has_links = runs, has_links
        self.content = self.selection = overview.Overview(runs)
        self._saved = _saved.setdefault(runs.resolve(), overview.Saved(runs))
        group = group or overview.newest_group(overview.load(runs, None, self._saved)) or ALL
        kinds = (pn.widgets.Select, pn.widgets.MultiChoice, pn.widgets.TextInput, pn.widgets.FloatSlider)
        select, many, text, slider = (partial(kind, stylesheets=[panes.CSS]) for kind in kinds)
        self.group = select(label="Group", options=list(dict.fromkeys([ALL, group])), value=group, width=190)
        self.states = many(label="States", css_classes=["states"], width=240, placeholder="all", solid=False)
        self.where = text(label="Expression", placeholder="model.stride > 2 and state == 'done'", css_classes=["grow"])
        self.text = text(label="Search", placeholder="in ids, configs, reasons, notes", width=230)
        self.live = pn.widgets.Switch(value=live, css_classes=["live-switch"], width=34, margin=(7, 4, 0, 0))
        self.seconds = select(options={f"every {n} s": n for n in SECONDS}, value=5, width=105, margin=(0, 5))
        self.by = many(label="Rows by", css_classes=["by"], placeholder="all varying keys except the seed", solid=False)
        self.scores = many(label="Scores", css_classes=["scores"], placeholder="headline scores", solid=False)
        self.sorted = select(label="Sorted by", width=170)
        self.spread = select(label="Spread", options={"± std": "std", "95 % interval": "ci95"}, width=120)
        self.over = select(label="Means over", options={"done runs": False, "all runs": True}, width=110)
        self.value = select(label="Value", options=list(curves.VALUES), width=80)
        self.at_step = pn.widgets.IntInput(label="At step", value=None, start=0, width=90, stylesheets=[panes.CSS])
        self.metrics = many(label="Metrics", css_classes=["metrics"], placeholder="the first metric", solid=False)
        self.by.sizing_mode = self.scores.sizing_mode = self.metrics.sizing_mode = "stretch_width"
        self.x = select(label="x axis", options=["step"], sizing_mode="stretch_width")
        self.smoothing = slider(label="Smoothing", start=0, end=0.95, step=0.05, value=0)
        self.logarithmic = pn.widgets.Checkbox(label="log y", width=70, margin=(26, 5, 0, 5))
        self.experiment, self.other = (
            select(label=label, sizing_mode="stretch_width") for label in ("Experiment", "Compare with")
        )
        self.log_file = select(label="Log file", width=200)
        self.answer_file = select(label="File", width=200)
        self.wrong = pn.widgets.Checkbox(label="only wrong answers", margin=(26, 5, 0, 5))
        self.head, self.time, self.problem, self.warnings, self.result_note, self.curve_note = (
            panes.page() for _ in range(6)
        )
        self.legend = panes.page(css_classes=["legend"], sizing_mode=None)
        self.details = [panes.page() for _ in range(5)]
        dot = panes.COLOUR
        self.results = panes.Table("results", 10, self._light, html=[dot], widths={dot: 34}, sortable={dot: False})
        html = ["state", *(["experiment"] if has_links else [])]
        self.jobs = panes.Table("jobs", 8, self._select, html=html, wrapped=["configuration", "reason", "notes"])
        self.plot = chart.Plot(self._mark)
        self.tabs = self._tabs()
        self.ticking = pn.state.add_periodic_callback(
            self.tick,  # pyright: ignore[reportArgumentType]  a coroutine function works, too
            period=1000 * self.seconds.value,
            start=False,
        )
        self._busy = False
        self._curve_inputs: Any = None
        self._detail_inputs: Any = None
        self._ids: list[str] = []
        self._lines: dict[str, tuple[tuple[overview.Job, str, str], list[str]]] = {}
        self._colours: list[str] = []
        self._watch()
        self.reload()
        if live:
            self.ticking.start()

    def view(self) -> pn.viewable.Viewable:
        """Lay out all widgets on one page."""
        box, title = panes.box, lambda text: panes.page(f"<h2>{text}</h2>")
        results_bar = box(self.sorted, self.scores, self.by, kind="bar", row=True)
        values_bar = box(self.over, self.value, self.at_step, self.spread, kind="bar", row=True)
        curves_bar = box(self.metrics, self.x, self.smoothing, self.logarithmic, kind="bar", row=True)
        return box(
            box(self.head, box(self.time, self.live, self.seconds, kind="live", row=True), kind="head", row=True),
            box(box(self.group, self.states, self.where, self.text, kind="bar", row=True), self.problem),
            self.warnings,
            box(
                box(title("Results"), results_bar, values_bar, self.results.pane, self.result_note, kind="card wide"),
                box(
                    title("Learning curves"),
                    curves_bar,
                    box(self.plot.pane, self.legend, kind="drawn", row=True),
                    self.curve_note,
                ),
                kind="split",
                row=True,
            ),
            box(title("Jobs"), self.jobs.pane),
            box(self.experiment, self.tabs),
            kind="page",
        )

    def restore(self, location: Any) -> None:
        """Synchronize the widgets with the page's address, so that a link opens the same view."""
        for name in EXTRA_PAGES:
            widget = getattr(self, name)
            before = widget.value
            location.sync(widget, {"value": name})
            if isinstance(widget, pn.widgets.Select) and widget.value not in widget.values:
                widget.value = before  # the address has an invalid value
        location.sync(self.tabs, {"active": "tab"})

    def reload(self) -> None:
        """Read the folder and show the changes."""
        self._show_overview(
            overview.load(self.runs, None if self.group.value == ALL else self.group.value, self._saved)
        )

    async def tick(self) -> None:
        """Run `reload` in a thread, as schedulers can be slow. Does nothing while another call is running."""
        if self._busy:
            return
        self._busy = True
        try:
            group = self.group.value
            content = await asyncio.to_thread(overview.load, self.runs, None if group == ALL else group, self._saved)
            if group == self.group.value:
                self._show_overview(content)
        finally:
            self._busy = False

    @pn.io.hold()
    def filter(self) -> None:
        """Apply the filters and send all updates at once. If the expression is invalid, only show the error."""
        try:
            selection = overview.select(self.content, self.states.value, self.where.value, self.text.value)
        except ConfigError as error:
            panes.show_html(self.problem, markup.error(str(error)))
            return
        self.over.disabled = self.value.disabled = (
            self.at_step.value is not None
        )  # with a step, values are those at the step, of all runs
        self.selection = overview.choose_values(selection, self.over.value, self.value.value, self.at_step.value)
        panes.show_html(self.problem, "")
        panes.show_html(self.warnings, markup.warnings(self.selection.warnings))
        panes.show_html(
            self.head,
            panes.head("Experiments" if self.group.value == ALL else self.group.value, self.content, self.selection),
        )
        scores = overview.metrics(self.selection)
        panes.offer(self.metrics, scores)
        keys, _ = overview.differing(self.selection)
        panes.offer(self.x, ["step", "seconds", *(name for name in scores if name not in self.chosen_metrics()), *keys])
        panes.offer(self.by, ["group", *keys])
        panes.offer(self.sorted, list(dict.fromkeys([*overview.headline(self.selection), *scores])))
        panes.offer(self.scores, results.score_names(self.selection.rows))
        self.show_results()
        self.show_curves()
        self.show_jobs()

    def show_results(self) -> None:
        """Update the table of results, best first by the chosen score."""
        table = overview.tabulate(
            self.selection, self.by.value, self.scores.value, self.sorted.value, self.spread.value
        )
        coloured_lines = zip(
            table.colours, table.lines, strict=bool(table.lines)
        )  # there are no lines if all values are in `same`
        lines = [[markup.dot(colour), *line] for colour, line in coloured_lines]
        self._colours = table.colours
        self.results.fill([panes.COLOUR, *table.headings] if lines else [], lines, [set[int](), *table.best_lines])
        same = f"In all rows: {', '.join(table.same)}." if table.same else ""
        has_page = self.has_links and self.group.value != ALL
        link = markup.link(f"progress/{quote(self.group.value, '')}", "Progress of the group") if has_page else ""
        panes.show_html(self.result_note, "".join(map(markup.note, filter(None, [same, *table.remarks]))) + link)

    def show_curves(self) -> None:
        """Update the learning curves if a row or an option has changed."""
        metrics, x = self.chosen_metrics(), self.x.value
        look = learning_curves.Look(x, self.spread.value, self.smoothing.value, self.by.value)
        inputs = (self.selection.rows, self.selection.unfinished, metrics, self.logarithmic.value, look)
        if inputs == self._curve_inputs:
            return
        self._curve_inputs = inputs
        pictures = {metric: learning_curves.build(self.selection, metric, look) for metric in metrics[:MAX_PICTURES]}
        self.plot.show(pictures, x, self.logarithmic.value)
        panes.show_html(self.legend, chart.legend(pictures))
        self._mark(self.plot.lit)
        more = [f"The first {MAX_PICTURES} metrics are drawn."] if len(metrics) > MAX_PICTURES else []
        notes = dict.fromkeys([*more, *(note for picture in pictures.values() for note in picture.notes)])
        panes.show_html(self.curve_note, "".join(map(markup.note, notes)))

    def chosen_metrics(self) -> list[str]:
        """The metrics to draw as curves; by default the first one."""
        return self.metrics.value or overview.metrics(self.selection)[:1]

    def show_jobs(self) -> None:
        """Update the table of jobs, with states that need attention first, and the choice of experiments."""
        places = {state: place for place, state in enumerate(_FIRST)}
        jobs = sorted(self.selection.jobs, key=lambda job: places.get(job.state, len(places)))
        _, labels = overview.differing(self.selection)
        self._ids = [job.exp_id for job in jobs]
        remarks = overview.remarks(self.selection)
        lines = [self._job_line(job, labels.get(job.exp_id, ""), remarks.get(job.exp_id, "")) for job in jobs]
        self.jobs.fill(overview.JOB_HEADINGS, lines)
        names = {f"{name[:8]}  {labels.get(name, '')}".strip(): name for name in self._ids}
        names = names if len(names) == len(self._ids) else {name: name for name in self._ids}
        panes.offer(self.experiment, names)
        panes.offer(self.other, names)
        self.show_detail()

    def _job_line(self, job: overview.Job, label: str, remark: str) -> list[str]:
        """The cells of a job, cached until they change."""
        cell_inputs = (job, label, remark)
        if (saved := self._lines.get(job.exp_id)) is not None and saved[0] == cell_inputs:
            return saved[1]
        line, state = overview.job_cells(job, label, remark), overview.JOB_HEADINGS.index("state")
        line[0] = markup.link(f"run/{job.exp_id}", line[0]) if self.has_links else line[0]
        line[state] = markup.chip(line[state], line[state])
        self._lines[job.exp_id] = cell_inputs, line
        return line

    def show_detail(self) -> None:
        """Update the open tab if the chosen experiment, an option or the data changed."""
        name = self.experiment.value
        if name in self._ids:
            self.jobs.select(self._ids.index(name))
        tab = self.tabs.active
        inputs = (tab, name, self.other.value, self.log_file.value, self.answer_file.value, self.wrong.value)
        if inputs == self._detail_inputs:
            return
        self._detail_inputs = inputs
        show = (
            self._log,
            self._answers,
            partial(panes.config, self.content),
            partial(panes.differences, self.runs, self.other.value),
            partial(panes.ancestry, self.runs),
        )[tab]
        panes.show_html(self.details[tab], show(name) if name else markup.note("No experiment is chosen."))

    def _log(self, name: str) -> str:
        files = overview.logs(self.content, name)
        panes.offer(self.log_file, list(files))
        path = files.get(self.log_file.value or "")
        reason = markup.error(next((job.reason for job in self.content.jobs if job.exp_id == name), ""))
        if path is None:
            return reason + markup.note("It has written no log yet.")
        return (
            reason
            + markup.text_block(overview.tail(path, LOG_LINES))
            + markup.note(f"The last {LOG_LINES} lines of {path}")
        )

    def _answers(self, name: str) -> str:
        try:
            files = answers.samples(self.runs / name)
        except UserError as error:
            return markup.error(str(error))
        panes.offer(self.answer_file, list(files))
        samples = files.get(self.answer_file.value or "")
        if samples is None:
            return markup.note("No answers yet: with `inference`, an experiment answers questions after the training.")
        samples_shown = answers.choose(samples, MAX_ANSWERS, self.wrong.value)
        return markup.note(
            f"{answers.describe_score(samples)} {len(samples_shown)} of {len(samples)} answers are shown."
        ) + answers.page(samples_shown)

    def _show_overview(self, content: overview.Overview) -> None:
        unchanged, self.content, self._detail_inputs = content == self.content, content, None
        panes.show_html(self.time, f'<div class="time">live · read at {time.strftime("%H:%M:%S")}</div>')
        if unchanged and self._curve_inputs is not None:
            self.show_detail()
            return
        panes.offer(
            self.group,
            [ALL, *content.groups, *([self.group.value] if self.group.value not in (ALL, *content.groups) else [])],
        )
        panes.offer(self.states, list(content.counts()))
        self.filter()

    def _select(self, row_numbers: Sequence[int]) -> None:
        if row_numbers and row_numbers[0] < len(self._ids):
            self.experiment.value = self._ids[row_numbers[0]]

    def _light(self, row_numbers: Sequence[int]) -> None:
        """Highlight the curve of the selected row, once no other update is being sent."""
        colour = self._colours[row_numbers[0]] if row_numbers and row_numbers[0] < len(self._colours) else None
        pn.state.execute(partial(self.plot.light, colour), schedule=True)

    def _mark(self, colour: str | None) -> None:
        """Select the row of results that belongs to a curve."""
        self.results.select(self._colours.index(colour) if colour in self._colours else None)

    def _tabs(self) -> pn.Tabs:
        log, answers_pane, config, differences, ancestry = self.details
        pages = [
            ("Log", pn.Column(self.log_file, log)),
            ("Answers", pn.Column(pn.Row(self.answer_file, self.wrong), answers_pane, sizing_mode="stretch_width")),
            ("Config", config),
            ("Differences", pn.Column(self.other, differences)),
            ("Lineage", ancestry),
        ]
        return pn.Tabs(*pages, stylesheets=[panes.CSS], sizing_mode="stretch_width", margin=0)

    def _watch(self) -> None:
        def watch(do: Callable[[], None], *widgets: Any) -> None:
            for widget in widgets:
                widget.param.watch(lambda _: do(), "value")

        watch(self.reload, self.group)
        watch(self.filter, self.states, self.where, self.text, self.over, self.value, self.at_step)
        watch(self.show_results, self.by, self.scores, self.spread, self.sorted)
        watch(self.show_curves, self.metrics, self.x, self.smoothing, self.logarithmic, self.spread, self.by)
        watch(self.show_detail, self.experiment, self.other, self.log_file, self.answer_file, self.wrong)
        self.tabs.param.watch(lambda _: self.show_detail(), "active")
        self.live.param.watch(lambda event: self.ticking.start() if event.new else self.ticking.stop(), "value")
        self.seconds.param.watch(lambda event: setattr(self.ticking, "period", 1000 * event.new), "value")


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until interrupted; prints its address when it can be opened. Returns the exit code."""
    options = parse_arguments(_parser(), arguments, has_json=True)
    pn.config.raw_css.append(_BODY_CSS)
    overview.load(
        options.runs, None, _saved.setdefault(options.runs.resolve(), overview.Saved(options.runs))
    )  # fill the cache for the first page
    pages = {
        "run/([0-9a-f]{8,128})": lambda name: run_page.render(options.runs / name),
        "progress/([^/]+)": lambda group: progress.render(options.runs, group),
    }
    serve_page(
        lambda: app(options.runs, options.group, has_links=True),
        options,
        f"Experiments · {options.runs.name}",
        pages,
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.dashboard", __doc__)
    parser.add_argument(
        "runs", nargs="?", type=Path, default=RUNS, help=f"folder of save directories (default: {RUNS})"
    )
    parser.add_argument("-e", "--group", help="the group that is shown first, or all (default: the newest)")
    add_address(parser, PORT, "anyone with the token can read the runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
