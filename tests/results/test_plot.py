"""Learning curves: the lines that are drawn are the means of the rows."""

import statistics
from pathlib import Path

import pytest
from matplotlib.collections import PolyCollection

from results import plot
from src.errors import ConfigError
from src.experiments import results
from src.experiments.rundir import RunDir


def test_one_line_and_one_band_for_each_configuration(runs: Path):
    rows, _ = results.load_rows(runs)
    (axes,) = plot.draw(runs, rows).axes
    assert axes.get_ylabel() == "val_loss"
    assert sorted(line.get_label() for line in axes.lines) == ["stride=1 (3)", "stride=2 (3)"]
    for line in axes.lines:
        stride = int(line.get_label()[7])
        values = [[stride / step + 0.1 * seed + 1 / 3 for seed in range(3)] for step in range(1, 5)]
        assert list(line.get_xdata()) == [1, 2, 3, 4]
        assert list(line.get_ydata()) == [statistics.fmean(v) for v in values]
    bands = [c for c in axes.collections if isinstance(c, PolyCollection)]
    assert len(bands) == 2


def test_a_panel_for_each_metric(runs: Path):
    rows, _ = results.load_rows(runs)
    assert [axes.get_ylabel() for axes in plot.draw(runs, rows, ["em", "train_loss"]).axes] == ["em", "train_loss"]


def test_a_curve_skips_what_is_missing_and_not_finite():
    histories = [[{"step": 1, "a": 1.0}, {"step": 2, "a": None}], [{"step": 1, "a": 3.0}, {"step": 3, "a": 5.0}, {"step": 4, "b": 1.0}]]
    assert plot.curve(histories, "a") == [(1, 2.0, statistics.stdev([1.0, 3.0])), (3, 5.0, None)]
    assert plot.curve([[{"a": 1.0}, {"a": 2.0}]], "score.a") == [(0, 1.0, None), (1, 2.0, None)]


def test_the_picture_is_written_whole(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "new" / "tiny.png"
    assert plot.main([str(runs), "-e", "tiny", "--metric", "val_loss", "em", "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "los"], "unknown score 'los'."),
        (["-e", "tny"], "unknown group 'tny'. Did you mean 'tiny'?"),
        (["--output", "/proc/version/sub/x.png"], "x.png: cannot write: Not a directory"),
        (["--output", "x.docx"], "--output x.docx: expected a name that ends with one of avif, "),
    ],
)
def test_mistakes_are_one_line(runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert plot.main([str(runs), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_scores_is_said(tmp_path: Path):
    with RunDir.open(tmp_path, {"a": 1}, {}) as run:
        run.set_status("done")
    with pytest.raises(ConfigError, match="no run has any score yet"):
        plot.draw(tmp_path, results.load_rows(tmp_path)[0])
