"""The dashboard without a browser: the values of its widgets after each choice, and damaged folders."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, Request, build_opener, urlopen

import pandas as pd
import panel as pn
import pytest

from results import dashboard
from results.dashboard import Dashboard
from results.pages import chart, learning_curves, legend, overview, panes
from src.errors import ConfigError
from src.experiments.identity import exp_id
from src.files import write_atomic
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from src.support import read_cache
from tests.conftest import ROOT
from tests.servers import running_server

# panel 1.9.4 calls pandas in a way that pandas 3.1 announces the end of
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:pandas.errors.Pandas4Warning")


@pytest.fixture
def page(runs: Path) -> Dashboard:
    return Dashboard(runs, dashboard.ALL)


def cells(frame: pd.DataFrame, column: str) -> list[str]:
    return frame[column].tolist()


def fail(runs: Path, stride: int = 7, reason: str = "out of memory") -> str:
    exp = {"recipe": "toy", "seed": 0, "model": {"name": "m", "stride": stride, "kind": "other"}}
    with RunDir.open(runs, exp, exp, facts={"groups": ["repair"]}) as run:
        run.scores.append({"step": 1, "val_loss": 9.0})
        run.set_status("failed", reason=reason, step=1)
    return run.exp_id


def test_the_table_of_results_is_that_of_the_command_line(page: Dashboard):
    table_value = page.results.value
    assert list(table_value.columns) == ["colour", "val_loss ↓", "em", "stride"]
    assert table_value.iloc[0, 1:].tolist() == ["<b>0.68 ± 0.10</b>", "0.25", "1"]
    assert "In all rows: train_loss 1, runs 3, state done, step 4." in page.result_note.object
    page.spread.value = "ci95"
    assert page.results.value.iloc[0, 1] == "<b>0.68 ± 0.25</b>"


def test_columns_and_keys_of_rows_can_be_chosen(page: Dashboard):
    page.by.value = ["seed"]
    page.scores.value = ["em"]
    page.sorted.value = "em"
    assert list(page.results.value.columns) == ["colour", "em ↑", "seed"]
    assert "runs 2" in page.result_note.object


def test_the_curves_are_means_with_their_deviation(page: Dashboard):
    best, other = page.plot._sources
    assert (best.data["label"][0], other.data["label"][0]) == ("stride=1 (3)", "stride=2 (3)")
    assert best.data["x"] == [1, 2, 3, 4]
    assert best.data["mean"] == pytest.approx([1 / step + 0.1 + 1 / 3 for step in range(1, 5)])
    assert [m - low for m, low in zip(best.data["mean"], best.data["low"], strict=True)] == pytest.approx([0.1] * 4)
    page.x.value = "train_loss"
    assert page.plot._sources[0].data["x"] == [1.0] * 4


def test_smoothing_averages_with_earlier_values(page: Dashboard):
    means = page.plot._sources[0].data["mean"]
    page.smoothing.value = 0.5
    first, second, *_ = page.plot._sources[0].data["mean"]
    assert first == means[0], "no bias at the start"
    assert second == pytest.approx((0.25 * means[0] + 0.5 * means[1]) / 0.75)


def test_a_config_key_on_the_x_axis_gives_a_point_for_each_run(page: Dashboard):
    page.x.value = "model.stride"
    one, two = sorted(page.plot._sources, key=lambda source: source.data["label"][0])
    assert (one.data["x"], two.data["x"]) == ([1, 1, 1], [2, 2, 2])
    assert sorted(one.data["mean"]) == pytest.approx([1 / 4 + 1 / 3 + 0.1 * seed for seed in range(3)])
    (picture,) = page.plot.pane.object.children
    assert not [glyph for glyph in picture.renderers if type(glyph.glyph).__name__ == "Line"]
    for row in page.selection.rows:
        row["model.kind"] = f"kind {row['model.stride']}"
    page.by.value = ["model.stride"]
    curves = learning_curves.build(page.selection, "val_loss", learning_curves.Look("model.kind"))
    chart.Plot(lambda _: None).show({"val_loss": curves}, "model.kind", False)
    assert sorted(line.x for line in curves.lines) == [["kind 1"] * 3, ["kind 2"] * 3]


def test_new_points_are_sent_into_the_picture_that_is_there(page: Dashboard):
    before = page.plot.pane.object
    exp_id = page.selection.rows[0]["exp_id"]
    row = page.content.row(exp_id)
    assert row is not None
    with (page.runs / exp_id / "scores.jsonl").open("a") as scores:
        scores.write(json.dumps({"step": 5, "val_loss": 0.01}) + "\n")
    page.reload()
    assert page.plot.pane.object is before, "a reader's zoom is gone"
    assert any(source.data["x"] == [1, 2, 3, 4, 5] for source in page.plot._sources)


def test_nothing_is_sent_where_nothing_changed(page: Dashboard):
    sent_events: list[str] = []
    for widget in (page.results.widget, page.jobs.widget):
        widget.param.watch(lambda event: sent_events.append(event.name), ["value", "selection", "titles"])
    for table in (page.results, page.jobs):
        table.pane.param.watch(lambda event: sent_events.append(event.name), "objects")
    for widget in (page.metrics, page.experiment, page.states, page.group):
        widget.param.watch(lambda event: sent_events.append(event.name), ["options", "value"])
    page.plot.pane.param.watch(lambda event: sent_events.append(event.name), "object")
    page.reload()
    assert sent_events == []


def test_a_finished_run_that_joins_another_group_is_shown_in_it(page: Dashboard):
    fail(page.runs)
    page.reload()
    page.by.value = ["group"]
    add_to_group(page.runs, page.content.rows[0]["exp_id"], "repair")
    page.reload()
    runs = dict(zip(page.results.value["group"], page.results.value["runs"], strict=True))
    assert runs == {"tiny": "6", "repair": "2"}


def test_means_over_unfinished_runs_change_the_curves(page: Dashboard):
    fail(page.runs, stride=1)
    page.by.value = ["model.stride"]
    page.reload()
    before = page.legend.object
    page.over.value = True
    assert "(3 of 4)" in before
    assert "(3 of 4)" not in page.legend.object


def test_filters(page: Dashboard):
    fail(page.runs)
    page.reload()
    assert page.group.options == ["all", "repair", "tiny"]
    page.group.value = "repair"
    assert len(page.jobs.value) == 1
    page.group.value = "all"
    page.states.value = ["failed"]
    assert cells(page.jobs.value, "reason") == ["out of memory"]
    page.states.value = []
    page.where.value = "model.stride == 2 and status == 'done'"
    assert len(page.jobs.value) == 3
    page.text.value = "SEED=1"
    assert len(page.jobs.value) == 1


def test_it_opens_on_the_newest_group(runs: Path):
    assert Dashboard(runs).group.value == "tiny"
    newest = fail(runs)
    for path in runs.glob("*/exp_dict.json"):
        os.utime(path, (2e9, 2e9 if path.parent.name == newest else 1e9))
    page = Dashboard(runs)
    assert (page.group.value, len(page.jobs.value)) == ("repair", 1)
    assert "<h1>repair</h1>" in page.head.object
    page.group.value = dashboard.ALL
    assert len(page.jobs.value) == 7


def test_scores_of_answers_come_first_and_the_configuration_last(demo_runs: Path):
    page = Dashboard(demo_runs, "demo")
    page.sorted.value = "inference/em"
    assert list(page.results.value.columns) == ["colour", "em ↑", "context_tokens", "num_layers"]
    for part in ("em_wrong_context 0.25", "em_gain 0.25", "val_loss 0.6"):
        assert part in page.result_note.object
    assert overview.headline(page.content)[:4] == [
        "inference/em",
        "inference/em_wrong_context",
        "inference/em_gain",
        "val_loss",
    ]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("model.strid > 1", "expression: unknown name 'model.strid'. Did you mean 'model.stride'?"),
        ("model.stride >", "expression, character"),
        ("__import__('os')", "expression, character"),
    ],
)
def test_a_wrong_expression_is_reported_and_changes_nothing_else(page: Dashboard, expression: str, message: str):
    page.where.value = "model.stride == 2"
    page.where.value = expression
    assert message in page.problem.object.replace("&#x27;", "'").replace("&gt;", ">")
    assert len(page.jobs.value) == 3
    page.where.value = ""
    assert page.problem.object == ""
    assert len(page.jobs.value) == 6


def test_jobs_that_need_attention_come_first_and_are_chosen(page: Dashboard):
    exp_id = fail(page.runs)
    page = Dashboard(page.runs, dashboard.ALL)
    assert cells(page.jobs.value, "experiment")[0] == exp_id[:8]
    assert page.experiment.value == exp_id
    page.jobs.widget.selection = [1]
    assert page.experiment.value == page._ids[1]


def test_the_choice_of_an_experiment_survives_a_new_run_above_it(page: Dashboard):
    page.jobs.widget.selection = [2]
    selected_id = page.experiment.value
    fail(page.runs)
    page.reload()
    assert page.experiment.value == selected_id
    assert page._ids[page.jobs.widget.selection[0]] == selected_id


def test_details(page: Dashboard, runs: Path):
    one, other = (
        next(row["exp_id"] for row in page.content.rows if row["model.stride"] == stride and row["seed"] == 0)
        for stride in (1, 2)
    )
    (runs / "logs").mkdir()
    (runs / "logs" / f"{one}.out.log").write_text("".join(f"<b>line {n}</b>\n" for n in range(1000)))
    page.experiment.value = one
    log = page.details[0].object
    assert "&lt;b&gt;line 999&lt;/b&gt;" in log
    assert "line 1&lt;" not in log
    page.tabs.active = 1
    assert "`inference`" in page.details[1].object
    page.tabs.active = 2
    assert '<td class="key">model.stride</td><td>1</td>' in page.details[2].object
    page.tabs.active = 3
    page.other.value = other
    assert '<td class="key">experiment: model.stride</td><td>1</td><td>2</td>' in page.details[3].object
    page.tabs.active = 4
    assert one[:8] in page.details[4].object


def test_experiments_that_wait_are_shown_before_there_is_a_score(tmp_path: Path):
    """Of one configuration: nothing differs between its rows."""
    for seed in (0, 1):
        exp = {"recipe": "lm", "seed": seed}
        SavedRun(tmp_path / exp_id(exp)).write_exp(exp, ["g"])
    page = Dashboard(tmp_path, None)
    assert len(page.jobs.value) == 2
    assert "runs 2" in page.result_note.object


def test_a_refresh_shows_new_lines_of_a_log(page: Dashboard, runs: Path):
    one = page.experiment.value
    (runs / "logs").mkdir()
    log = runs / "logs" / f"{one}.out.log"
    for line in ("first", "second"):
        log.write_text(line)
        page.reload()
        assert line in page.details[0].object


def test_answers_are_shown_all_or_only_wrong_ones(demo_runs: Path):
    page = Dashboard(demo_runs, "demo")
    page.tabs.active = 1
    text = page.details[1].object
    assert "20 of 60 questions are answered right. 50 of 60 answers are shown." in text
    for part in (
        "Which exceptions does this function raise?",
        "def function_0(",
        "<td>ValueError</td>",
        "em 1, f1 1",
        "with another",
    ):
        assert part in text
    page.wrong.value = True
    assert "40 of 60 answers are shown" in page.details[1].object
    assert 'class="sample right"' not in page.details[1].object


def test_damaged_directories_are_warned_of_and_the_rest_is_shown(runs: Path):
    names = sorted(path.name for path in runs.iterdir() if len(path.name) == 32)
    (runs / names[0] / "exp_dict.json").write_text("{")
    (runs / names[1] / "status.json").write_text("[]")
    with (runs / names[2] / "scores.jsonl").open("a") as scores:
        scores.write("garbage\n")
    shutil.rmtree(runs / names[3])
    (runs / names[3]).write_text("a file")
    page = Dashboard(runs)
    assert page.warnings.visible
    assert all(name in page.warnings.object for name in names[:3])
    assert len(page.jobs.value) >= 5
    assert 2 <= len(page.content.rows) <= 4
    assert len(page.results.value) >= 1


def test_experiments_that_are_only_queued_are_listed_without_a_warning(runs: Path):
    waiting = runs / ("cd" * 16)
    waiting.mkdir()
    page = Dashboard(runs, dashboard.ALL)
    assert "cdcdcdcd" in cells(page.jobs.value, "experiment")
    assert not page.warnings.visible


@pytest.mark.parametrize("there", [True, False])
def test_an_empty_folder_is_a_page_that_says_so(tmp_path: Path, there: bool):
    folder = tmp_path / "nothing"
    if there:
        folder.mkdir()
    page = Dashboard(folder)
    assert ("no runs in this folder" if there else "no such folder") in page.warnings.object
    assert len(page.results.value) == 0
    page.where.value = "seed == 0"
    fail(folder)
    page.reload()
    assert len(page.jobs.value) == 1


def test_an_unknown_group_is_reported(runs: Path):
    page = Dashboard(runs, "tny")
    assert "Did you mean &#x27;tiny&#x27;?" in page.warnings.object
    assert page.group.value == "tny"


def test_a_tick_reads_the_folder_and_never_two_at_once(page: Dashboard):
    fail(page.runs)

    async def twice() -> None:
        first = asyncio.ensure_future(page.tick())
        await asyncio.sleep(0)
        assert page._busy
        await page.tick()
        assert len(page.jobs.value) == 6, "the second one must not have read"
        await first

    asyncio.run(twice())
    assert len(page.jobs.value) == 7
    assert not page._busy


@pytest.mark.slow
def test_the_switch_and_the_interval_rule_the_ticks(runs: Path):
    async def live() -> None:
        page = Dashboard(runs, live=True)
        assert page.ticking.running
        page.live.value = False
        assert not page.ticking.running
        page.live.value = True
        page.seconds.value = 2
        assert (page.ticking.running, page.ticking.period) == (True, 2000)
        page.ticking.stop()

    asyncio.run(live())
    assert not Dashboard(runs).ticking.running


def test_many_configurations_are_cut_to_the_best(tmp_path: Path):
    for stride in range(legend.LINES + 3):
        exp = {"recipe": "toy", "model": {"stride": stride}}
        with RunDir.open(tmp_path, exp, exp) as run:
            run.scores.append({"step": 1, "em": 1.0 * stride})
            run.set_status("done")
    curves = learning_curves.build(overview.load(tmp_path), "em")
    assert [line.mean for line in curves.lines] == [[float(stride)] for stride in range(legend.LINES + 2, 2, -1)]
    assert curves.notes == [f"The best {legend.LINES} of {legend.LINES + 3} configurations; filter to see more."]


def test_durations_are_short_words():
    times = {None: "–", 0.4: "0 s", 59: "59 s", 61: "1 min 1 s", 4000: "1 h 6 min", 200_000: "2 d 7 h"}
    assert {seconds: overview.duration(seconds) for seconds in times} == times


def test_a_curve_without_lines_is_an_empty_picture():
    plot = chart.Plot(lambda _: None)
    plot.show({"val_loss": learning_curves.Curves()}, "step", False)
    assert len(plot.pane.object.children) == 1
    assert chart.legend({"val_loss": learning_curves.Curves()}) == ""


def change_note(runs: Path, name: str) -> None:
    SavedRun(runs / name).write_remarks(["kept"], [], "a note")


def change_state(runs: Path, name: str) -> None:
    exp = SavedRun(runs / name).exp
    with RunDir.open(runs, exp, exp, reset=1) as run:
        run.scores.append({"step": 1, "val_loss": 5.0})
        run.set_status("failed", reason="out of memory")


def remove(runs: Path, name: str) -> None:
    shutil.rmtree(runs / name)


def damage(runs: Path, name: str) -> None:
    write_atomic(runs / name / "status.json", b"{")


def add_run(runs: Path, name: str) -> None:
    fail(runs)


def add_to_group(runs: Path, name: str, group: str = "late") -> None:
    exp = SavedRun(runs / name).exp
    with RunDir.open(runs, exp, exp, facts={"groups": [group]}):
        pass


@pytest.mark.parametrize("change", [change_note, change_state, remove, damage, add_run, add_to_group])
@pytest.mark.parametrize("group", [None, "tiny"])
def test_a_load_with_saved_values_shows_each_change(
    runs: Path, group: str | None, change: Callable[[Path, str], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(read_cache, "SETTLED_SECONDS", 0.0)
    saved = overview.Saved(runs)
    before = overview.load(runs, group, saved)
    again = overview.load(runs, group, saved)
    assert again == before
    assert any(one is other for one, other in zip(again.rows, before.rows, strict=True)), "nothing was reused"
    name = before.rows[2]["exp_id"]
    change(runs, name)
    after, fresh = overview.load(runs, group, saved), overview.load(runs, group)
    assert after == fresh != before
    for by in ([], ["model.stride"], ["seed"]):
        assert overview.tabulate(after, by) == overview.tabulate(fresh, by)
    assert overview.differing(after) == overview.differing(fresh)


def test_only_changed_cells_of_jobs_are_sent(page: Dashboard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(panes, "BUILDING_SECONDS", 0.0)
    page.reload()
    widget, sent_changes = page.jobs.widget, []
    monkeypatch.setattr(
        widget,
        "patch",
        lambda changes, as_index: sent_changes.append(changes) or type(widget).patch(widget, changes, as_index),
    )
    SavedRun(page.runs / page._ids[1]).write_remarks(["kept"], [], None)
    page.reload()
    assert page.jobs.widget is widget
    assert sent_changes == [{"notes": [(1, "#kept")]}]
    assert cells(page.jobs.value, "notes")[1] == "#kept"


def test_several_metrics_are_drawn_above_one_axis(page: Dashboard, monkeypatch: pytest.MonkeyPatch):
    page.metrics.value = ["val_loss", "em"]
    one, other = page.plot.pane.object.children
    assert [picture.yaxis[0].axis_label for picture in (one, other)] == ["val_loss", "em"]
    assert one.x_range is other.x_range
    assert page.legend.object.count("entry") == 2, "each line is named once"
    monkeypatch.setattr(dashboard, "MAX_PICTURES", 1)
    page.metrics.value = ["em", "val_loss"]
    assert len(page.plot.pane.object.children) == 1
    assert "The first 1 metrics are drawn." in page.curve_note.object


def test_a_row_and_its_curve_light_up_together(page: Dashboard):
    def lit() -> set[str]:
        return {
            page.plot._colours[place]
            for place, glyph, _ in page.plot._opacities
            if getattr(glyph, "line_alpha", 0) == 1
        }

    colours = page._colours
    assert lit() == set(colours)
    page.results.widget.selection = [1]
    assert lit() == {colours[1]}
    page._mark(colours[0])
    assert page.results.widget.selection == [0]
    assert lit() == {colours[0]}
    page.plot.light("#000000")
    assert lit() == set(colours), "a row without a curve, as only the best are drawn"
    page.results.widget.selection = [1]
    page.results.widget.selection = []
    assert lit() == set(colours)
    highlights: list[set[str]] = []
    page.plot._nearest.on_change("data", lambda _, __, ___: highlights.append(lit()))
    page.plot.light(colours[1])
    assert highlights == [set(colours)], (
        "the browser knows what is lit before it paints that, as it then asks what is below the mouse"
    )


def test_several_highlights_at_once_end_with_the_last(page: Dashboard, monkeypatch: pytest.MonkeyPatch):
    """Lighting one must not tell it again."""
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(type(pn.state), "execute", lambda self, work, schedule: waiting.append(work))
    first, second = page._colours
    for colour in (first, second):
        page.plot._nearest.data = {"colour": [colour]}
    for _ in range(2):
        waiting.pop(0)()
    assert not waiting
    assert (page.plot.lit, page.results.widget.selection) == (second, [1])


def test_numbers_are_right_aligned_and_the_best_of_each_score_is_bold(page: Dashboard):
    assert page.results.widget.text_align == {"val_loss ↓": "right", "em": "right", "stride": "right"}
    assert [cell.startswith("<b>") for cell in cells(page.results.value, "val_loss ↓")] == [True, False]
    alignment = page.jobs.widget.text_align
    assert {"step", "loss", "starts"} <= alignment.keys()
    assert not {"experiment", "configuration", "state", "reason"} & alignment.keys()
    fail(page.runs, reason="a reason that is long " * 30)
    page.reload()
    assert page.jobs.widget.formatters["reason"] == {"type": "textarea"}, "it wraps"


def test_a_filter_that_removes_and_restores_a_column_reuses_the_table(page: Dashboard):
    """A table that is built anew takes a browser longer than all else that a filter does."""
    page.where.value = "model.stride == 1"
    page.where.value = ""
    page.results._creation_time = 0  # long ago: the browser has built it
    table, before = page.results.widget, page.results.value
    page.where.value = "model.stride == 1"
    assert "stride" not in page.results.value.columns
    assert len(page.results.value) == 1
    page.where.value = ""
    assert page.results.widget is table
    pd.testing.assert_frame_equal(page.results.value, before)
    assert page.results.widget.text_align["stride"] == "right"


def test_an_overview_selects_without_rows(tmp_path: Path):
    tmp_path.joinpath("ab" * 16).mkdir()
    content = overview.load(tmp_path)
    assert overview.select(content, where="a == 1").jobs == []
    with pytest.raises(ConfigError, match="expression"):
        overview.select(content, where="a ==")


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(runs: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-m", "results.dashboard", str(runs), "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: --port {port}: cannot listen on 127.0.0.1: Address already in use. Choose another port, or 0 for "
        f"a free one.\n"
    )


@pytest.mark.slow
def test_sigterm_ends_a_server_with_a_closed_output(runs: Path):
    """As in `python -m results.dashboard | head -1`."""
    command = [sys.executable, "-m", "results.dashboard", str(runs), "--port", "0"]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("http://127.0.0.1:")
            server.stdout.close()
            server.terminate()
            server.wait(timeout=60)
        finally:
            server.kill()


@pytest.mark.slow
def test_a_page_requires_its_token(runs: Path):
    with running_server(["results.dashboard", str(runs), "-e", "all", "--port", "0"]) as address:
        bare, _, token = address.partition("?token=")
        assert len(token) > 20
        run = next(path.name for path in sorted(runs.iterdir()) if len(path.name) == 32)
        for path in ("", f"run/{run}", "?token=wrong"):
            with pytest.raises(HTTPError, match="403"):
                urlopen(bare + path)
        opener = build_opener(HTTPCookieProcessor())
        assert opener.open(address).status == 200
        assert opener.open(bare).status == 200, "the cookie has it"
        assert run in opener.open(f"{bare}run/{run}").read().decode()
        with pytest.raises(HTTPError, match="404"):
            opener.open(f"{bare}run/{'0' * 32}")
        for host in ("[::1]", "[::1]:80", "a.b"):
            answer = urlopen(
                Request(f"{bare}run/{run}?token={token}", headers={"Host": host})
            )  # Panel's own page knows no IPv6
            assert re.match(r"trainval_\w+=", answer.headers["Set-Cookie"]), (
                "whatever the host, its name is one that a cookie can have"
            )


def test_the_help_needs_no_server():
    namespace = dashboard._parser().parse_args(["RUNS", "-e", "g", "--port", "0"])
    expected = {"runs": Path("RUNS"), "group": "g", "port": 0, "address": "127.0.0.1", "origin": None, "token": None}
    assert SimpleNamespace(**vars(namespace)) == SimpleNamespace(**expected)


def test_other_lines_are_drawn_by_the_picture_that_is_there(page: Dashboard):
    """Which keeps the zoom, and takes a browser a third of the time."""
    before = page.plot.pane.object
    (figure,) = before.children

    def visible() -> list[str]:
        return sorted(
            part.glyph.line_color
            for part in figure.renderers
            if part.visible and getattr(part.glyph, "line_width", 0) == 2
        )

    both = visible()
    assert both == sorted(page._colours)
    page.where.value = "model.stride == 2"
    (colour,) = page._colours
    assert visible() == [colour]
    (marker,) = (part for part in figure.renderers if part.visible and part.name)
    assert (marker.name, marker.data_source.data["mean"]) == (colour, page.plot._sources[0].data["mean"]), (
        "the mouse finds it"
    )
    page.where.value = ""
    assert visible() == both
    assert page.plot.pane.object is before


def test_a_row_stays_with_its_curve_when_more_are_added_and_removed(page: Dashboard):
    def alphas() -> dict[str, float]:
        (figure,) = page.plot.pane.object.children
        lines = (part for part in figure.renderers if part.visible and getattr(part.glyph, "line_width", 0) == 2)
        return {line.glyph.line_color: line.glyph.line_alpha for line in lines}

    first, last = page._colours
    page.results.widget.selection = [1]
    page.where.value = "model.stride == 1"
    assert alphas() == {first: 1.0}, "what is lit is not there, and nothing else is dimmed"
    assert page.results.widget.selection == []
    page.where.value = ""
    page.results.widget.selection = [page._colours.index(last)]
    page.sorted.value = "em"
    page.by.value = ["model.stride"]
    page.reload()
    assert page.plot.lit == last
    assert page.results.widget.selection == [page._colours.index(last)]


def test_at_a_step_value_choices_are_disabled_and_missing_runs_are_reported(page: Dashboard):
    page.at_step.value = 99
    assert (page.over.disabled, page.value.disabled) == (True, True)
    assert "6 of 6 runs have no row at step 99; they are left out." in page.warnings.object
    page.at_step.value = None
    assert (page.over.disabled, page.value.disabled, page.warnings.object) == (False, False, "")


def test_an_address_with_unknown_choices_changes_nothing(page: Dashboard):
    from panel.io.location import Location

    location = Location(search="?over=maybe&value=nope&spread=ci95")
    page.restore(location)
    assert (page.over.value, page.value.value, page.spread.value) == (False, "last", "ci95")
