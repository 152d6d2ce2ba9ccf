"""A configuration has one label and one colour, wherever it is shown."""

import base64
import random
import re
from pathlib import Path

import pytest

from results import plot, report
from results.dashboard import ALL, Dashboard
from results.pages import learning_curves, legend, overview
from src.runs.run_dir import RunDir
from src.tables import results

# panel 1.9.4 calls pandas in a way that pandas 3.1 announces the end of
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:pandas.errors.Pandas4Warning")


def by_stride(by_run: dict[tuple[str, str | None], str], rows: list[results.Row]) -> dict[int, set[str]]:
    return {
        stride: {by_run[row["exp_id"], row["group"]] for row in rows if row["model.stride"] == stride}
        for stride in (1, 2)
    }


def test_colours_follow_only_from_the_values_of_configurations(runs: Path):
    rows, _ = results.load_rows(runs)
    expected = {1: {legend.COLOURS[0]}, 2: {legend.COLOURS[1]}}
    random.Random(0).shuffle(rows)
    assert by_stride(legend.colours(rows), rows) == expected
    some = [row for row in rows if row["model.stride"] == 2]
    configurations = legend.Configurations(some, among=rows)
    assert [configurations.colour(group) for group in configurations.groups] == [legend.COLOURS[1]], (
        "a filter must not give it another"
    )


def test_any_number_of_configurations_have_distinct_colours():
    rows = [results.Row({"exp_id": str(n), "group": "g", "model.stride": n}) for n in range(60)]
    by_run = legend.colours(rows)
    assert len(set(by_run.values())) == 60
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in by_run.values())


def test_plot_report_and_dashboard_draw_a_configuration_in_one_colour(runs: Path, tmp_path: Path):
    label = "stride=2 (3)"
    page = Dashboard(runs, ALL)
    page.where.value = "model.stride == 2 or seed == 0"
    (line,) = [line for line in learning_curves.build(page.selection, "val_loss").lines if line.label == label]
    dot = page.results.value[page.results.value["stride"] == "2"]["colour"].tolist()
    (axes,) = plot.draw(runs, results.load_rows(runs)[0]).axes
    plot_colours = {str(each.get_label()).strip(): each.get_color() for each in axes.lines}
    output = tmp_path / "report.html"
    assert report.main([str(runs), "--metric", "val_loss", "-o", str(output)]) == 0
    text = output.read_text()
    picture = base64.b64decode(re.findall(r"base64,([A-Za-z0-9+/=]+)", text)[0]).decode()
    assert line.colour == plot_colours[label] == legend.COLOURS[1]
    assert legend.COLOURS[1] in dot[0]
    assert re.findall(r'"dot" style="background:(#\w+)"', text) == list(legend.COLOURS[:2]), "the rows, best first"
    assert all(colour in picture for colour in legend.COLOURS[:2])


def test_varying_keys_are_those_within_a_group(runs: Path):
    exp = {"recipe": "other", "seed": 0, "optimizer": "none", "model": {"name": "x"}}
    with RunDir.open(runs, exp, exp, facts={"groups": ["later"]}) as run:
        run.scores.append({"step": 1, "val_loss": 9.0})
    rows, _ = results.load_rows(runs)
    assert results.distinguishing_keys(rows) == ["group", "model.stride"]
    overview_table = overview.tabulate(overview.load(runs))
    assert overview_table.headings[-5:] == ["group", "stride", "runs", "state", "step"]
    assert len(overview_table.lines) == 3
    _, labels = overview.differing(overview.load(runs))
    assert labels[run.exp_id] == ""
    assert max(labels.values()) == "stride=2, seed=2"


def test_long_values_are_clipped():
    group = [{"model.name": "a" * 40, "seed": 1}]
    assert legend.label(group, ["model.name", "seed"]) == f"name={'a' * 15}…, seed=1"


def test_a_single_value_has_more_room_in_a_label():
    group = [{"group": "smollm2_crossattn"}]
    assert legend.label(group, ["group"]) == "group=smollm2_crossattn"
