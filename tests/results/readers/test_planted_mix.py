"""One planted mix of runs, whose truth is written by hand, in every reader.

Finished, crashed, stopped and restarted runs; NaN in the middle and at the end; missing and different metrics; two
groups; unequal steps.
"""

import csv
import io
import json
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from results import diff, plot, report, share, table
from results.dashboard import ALL, Dashboard
from results.pages import learning_curves, legend, overview, run_page
from src.experiments.identity import exp_id
from src.runs.run_dir import RunDir
from src.tables import results

# panel 1.9.4 calls pandas in a way that pandas 3.1 announces the end of
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:pandas.errors.Pandas4Warning")

NAN, INF = math.nan, math.inf
TRUTH: dict[int, tuple[str, float | None, int, int, int | str]] = {
    6: ("0.550", 0.55, 1, 1, 10),
    1: ("0.600 ± 0.100 (3 of 5)", 0.6, 3, 5, 10),
    2: ("0.700 ± 0.071 (2 of 3)", 0.7, 2, 3, "10-20"),
    5: ("0.800", 0.8, 1, 1, 10),
    3: ("-", None, 0, 1, 10),
    4: ("NaN", None, 0, 1, 10),
    7: ("0 of 1 done", None, 0, 1, 5),
}
"""By stride, best first: the cell of val_loss, its mean, the runs in the mean, all runs, and the step."""
POINTS = {(1, 0.5), (1, 0.7), (1, 0.6), (2, 0.65), (2, 0.75), (5, 0.8), (6, 0.55)}


def experiment(stride: int, seed: int = 0) -> dict[str, Any]:
    return {"recipe": "toy", "seed": seed, "model": {"name": "m", "stride": stride}}


def plant(
    runs: Path,
    stride: int,
    seed: int,
    losses: Mapping[int, float],
    state: str = "done",
    groups: Sequence[str] = ("g",),
    **more: float,
) -> None:
    exp = experiment(stride, seed)
    with RunDir.open(runs, exp, exp, reset=1, facts={"groups": list(groups)}) as run:
        for step, loss in losses.items():
            run.scores.append({"step": step, "val_loss": loss})
        if more:
            run.scores.append({"step": 10, **more})
        run.scores.export_haven()
        run.set_status(state)  # type: ignore[arg-type]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    plant(folder, 1, 0, {5: 0.9, 10: 0.5})
    plant(folder, 1, 1, {5: 0.8, 10: 0.7})
    plant(folder, 1, 2, {5: 0.4, 10: NAN})
    plant(folder, 1, 3, {5: NAN, 10: 0.6})
    plant(folder, 1, 4, {5: 0.1}, "failed")
    plant(folder, 2, 0, {5: 0.2, 10: 0.65}, groups=("g", "h"))
    plant(folder, 2, 1, {5: 0.2, 20: 0.75}, groups=("g", "h"))
    plant(folder, 2, 2, {5: 0.2}, "stopped")
    plant(folder, 3, 0, {}, em=0.5)
    plant(folder, 4, 0, {5: 0.01, 10: INF})
    plant(folder, 5, 0, {5: 0.001, 10: 0.002})
    plant(folder, 5, 0, {10: 0.8})
    plant(folder, 6, 0, {5: 0.55}, groups=("h",), em=0.25)
    plant(folder, 7, 0, {5: 0.02}, "stopped")
    return folder


def print_table(capsys: pytest.CaptureFixture[str], runs: Path, *arguments: str) -> tuple[str, str]:
    assert table.main([str(runs), *arguments]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


STRIDES = ("--by", "model.stride", "--scores", "val_loss")


def test_the_table_has_the_truth_in_every_format(runs: Path, capsys: pytest.CaptureFixture[str]):
    out, err = print_table(capsys, runs, *STRIDES, "--json")
    result = {row["model.stride"]: row for row in json.loads(out)["rows"]}
    assert list(result)[:4] == list(TRUTH)[:4]
    keys = ("val_loss", "val_loss_n", "runs", "step")
    assert {stride: tuple(row[key] for key in keys) for stride, row in result.items()} == {
        stride: (mean if mean is None else pytest.approx(mean), *rest) for stride, (_, mean, *rest) in TRUTH.items()
    }
    assert (result[1]["val_loss_std"], result[1]["val_loss_nan"], result[4]["val_loss_nan"]) == (
        pytest.approx(0.1),
        1,
        1,
    )
    assert "2 runs ended in NaN: val_loss." in err

    for row in csv.DictReader(io.StringIO(print_table(capsys, runs, *STRIDES, "--format", "csv")[0])):
        _, mean, count, _, step = TRUTH[int(row["model.stride"])]
        assert float(row["val_loss"] or "nan") == pytest.approx(NAN if mean is None else mean, nan_ok=True)
        assert (row["val_loss_n"], row["step"]) == (str(count), str(step))

    cells = {stride: cell for stride, (cell, *_) in TRUTH.items()}
    for style, split, plus in (("markdown", "|", "±"), ("latex", "&", r"$\pm$"), ("rich", "│", "±")):
        lines = [
            line.strip().strip(split).split(split)
            for line in print_table(capsys, runs, *STRIDES, "--format", style)[0].splitlines()
        ]
        lines = [
            [re.sub(r"\\textbf\{(.*)\}", r"\1", cell.removesuffix(r"\\").strip()) for cell in line] for line in lines
        ]
        key, value = (1, 0) if style == "rich" else (0, -1)
        table_cells = {
            int(line[key]): line[value].replace(plus, "±") for line in lines if len(line) > 1 and line[key].isdigit()
        }
        assert table_cells == cells, style


def test_latex_has_the_best_row_in_bold(runs: Path, capsys: pytest.CaptureFixture[str]):
    out, _ = print_table(capsys, runs, *STRIDES, "--format", "latex")
    bold = [line for line in out.splitlines() if r"\textbf" in line]
    assert len(bold) == 1
    assert bold[0].startswith(r"\textbf{6} & ")
    out, _ = print_table(capsys, runs, *STRIDES, "--best", "max", "--format", "latex")
    assert [line[:11] for line in out.splitlines() if r"\textbf" in line] == [r"\textbf{5} "]


def test_a_pivot_has_the_truth(runs: Path, capsys: pytest.CaptureFixture[str]):
    out, err = print_table(
        capsys, runs, "--pivot", "model.stride", "model.name", "--metric", "val_loss", "--format", "markdown"
    )
    cells = dict(line.strip("| ").split(" | ") for line in out.splitlines()[2:])
    assert cells == {str(stride): cell for stride, (cell, *_) in TRUTH.items()}
    assert "2 runs ended in NaN: val_loss." in err


def test_a_run_in_two_groups_counts_in_each(runs: Path, capsys: pytest.CaptureFixture[str]):
    for words in (["-e", "g", "h"], ["-e", "h", "g"], []):
        out, _ = print_table(capsys, runs, *words, "--by", "group", "--scores", "val_loss", "--json")
        result = {row["group"]: (row["val_loss"], row["val_loss_n"], row["runs"]) for row in json.loads(out)["rows"]}
        assert result == {"g": (pytest.approx(4.0 / 6), 6, 12), "h": (pytest.approx(0.65), 3, 3)}, words
    out, _ = print_table(capsys, runs, "-e", "g", "h", *STRIDES, "--json")
    assert {row["model.stride"]: row["runs"] for row in json.loads(out)["rows"]} == {
        stride: count for stride, (_, _, _, count, _) in TRUTH.items()
    }
    for word, strides in (("h", {2, 6}), ("g", {1, 2, 3, 4, 5, 7})):
        rows = results.filter_rows(results.load_rows(runs)[0], f"group == '{word}'")
        assert {row["model.stride"] for row in rows} == strides
    page = Dashboard(runs, ALL)
    page.by.value = ["group"]
    cells = page.results.value
    assert sorted(zip(cells["group"], (re.sub("<.*?>", "", cell) for cell in cells["val_loss ↓"]), strict=True)) == [
        ("g", "0.67 ± 0.11 (6 of 12)"),
        ("h", "0.65 ± 0.10"),
    ]
    assert overview.load(runs).groups == ["g", "h"]


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        (
            ["--at-step", "10"],
            {1: "0.60 ± 0.10 (3 of 5)", 2: "0.65 (1 of 3)", 3: "0 of 1 at step 10", 4: "0 of 1 at step 10", 5: "0.80"},
        ),
        (["--at-step", "10"], {6: "0 of 1 at step 10", 7: "0 of 1 at step 10"}),
        (
            ["--at-step", "5"],
            {1: "0.55 ± 0.37 (4 of 5)", 2: "0.20 ± 0.00", 4: "0.01", 7: "0.02", 3: "0 of 1 at step 5"},
        ),
        (
            ["--value", "best"],
            {1: "0.60 ± 0.10 (3 of 5)", 4: "NaN", 2: "0.20 ± 0.00 (2 of 3)", 3: "-", 7: "0 of 1 done"},
        ),
        (["--value", "min"], {1: "0.60 ± 0.10 (3 of 5)", 4: "NaN"}),
        (["--unfinished"], {1: "0.475 ± 0.26 (4 of 5)", 4: "NaN", 3: "-", 7: "0.02"}),
    ],
)
def test_values_at_a_step_and_best_values(
    runs: Path, capsys: pytest.CaptureFixture[str], options: list[str], cells: dict[int, str]
):
    out, _ = print_table(capsys, runs, *STRIDES, *options, "--format", "markdown")
    lines = [line.strip("| ").split(" | ") for line in out.splitlines()[2:]]
    cells_by_stride = {int(line[0]): line[-1] for line in lines}

    def numbers(cell: str) -> list[Any]:
        return [
            pytest.approx(float(word), abs=0.006) if re.fullmatch(r"\d+\.\d+", word) else word for word in cell.split()
        ]

    result = {stride: cells_by_stride[stride].split() for stride in cells}
    assert {
        stride: [float(word) if re.fullmatch(r"\d+\.\d+", word) else word for word in words]
        for stride, words in result.items()
    } == {stride: numbers(cell) for stride, cell in cells.items()}
    first = next(iter(cells_by_stride))
    assert first != 4 or options == ["--at-step", "5"], "a run that ended in NaN heads no ranking"


def test_pages_have_the_truth(runs: Path, tmp_path: Path):
    cells = {str(stride): cell for stride, (cell, *_) in TRUTH.items()}
    page = Dashboard(runs, ALL)
    page.by.value = ["model.stride"]
    page.sorted.value = "val_loss"
    frame = page.results.value
    cells_by_stride = dict(
        zip(frame["stride"], (re.sub("<.*?>", "", cell) for cell in frame["val_loss ↓"]), strict=True)
    )
    assert cells_by_stride == cells
    assert "2 runs ended in NaN: val_loss" in page.result_note.object

    result = overview.load(runs)
    ranking = overview.tabulate(result, ["model.stride"], ["val_loss"])
    assert ranking.best.startswith("Best val_loss: 0.550 with stride=6")
    assert report.main([str(runs), "-o", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "2 runs ended in NaN: " in text
    assert "0.400" not in text.partition("Learning curves")[0]

    nan_run = runs / exp_id(experiment(1, 2))
    scores = run_page.render(nan_run).partition("<h2>Scores</h2>")[2].partition("</table>")[0]
    assert re.findall(r"<td[^>]*>(.*?)</td>", scores) == ["val_loss", "NaN"]
    changes, _ = diff.differences(nan_run, runs / exp_id(experiment(1, 0)))
    assert changes["scores"]["val_loss"] == {"a": None, "b": 0.5}


def test_plots_have_the_truth(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    configurations = legend.Configurations(results.load_rows(runs)[0], ["model.stride"])
    figure, _ = plot.points(runs, configurations, "model.stride", "val_loss")
    assert {
        point
        for line in figure.axes[0].lines
        for point in zip(list(line.get_xdata()), list(line.get_ydata()), strict=True)
    } == POINTS
    points = learning_curves.build(
        overview.load(runs), "val_loss", learning_curves.Look("model.stride", by=["model.stride"])
    )
    assert {(x, y) for line in points.lines for x, y in zip(line.x, line.mean, strict=True)} == POINTS
    lines = learning_curves.build(overview.load(runs), "val_loss", learning_curves.Look(by=["model.stride"])).lines
    assert [line.label.split("=")[1].split()[0] for line in lines][:4] == [str(stride) for stride in TRUTH][:4]
    (first,) = [line for line in lines if line.label.startswith("stride=1 ")]
    assert (first.x, first.mean) == ([5, 10], [pytest.approx(0.7), pytest.approx(0.6)]), "0.9, 0.8 and 0.4 at step 5"
    for words in ([], ["--y", "val_loss", "--x", "model.stride"]):
        assert plot.main([str(runs), *words, "--by", "model.stride", "-o", str(tmp_path / "plot.svg")]) == 0
        assert "2 runs ended in NaN: val_loss." in capsys.readouterr().err


def test_a_shared_table_has_the_truth(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert share.main([str(runs), "--where", "group == 'g' and seed == 2", "-o", str(tmp_path / "a.zip")]) == 0
    assert "1 run ended in NaN: val_loss." in capsys.readouterr().err
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        rows = list(csv.DictReader(io.StringIO(archive.read("table.csv").decode())))
    assert [(row["model.stride"], row["val_loss"]) for row in rows] == [("1", ""), ("2", "")]


def test_the_cached_rows_are_those_of_a_full_scan(runs: Path):
    first = results.load_rows(runs)[0]
    again = results.load_rows(runs)[0]
    assert [(dict(row), row.scores, row.groups) for row in first] == [
        (dict(row), row.scores, row.groups) for row in again
    ]
