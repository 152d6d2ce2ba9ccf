"""Learning curves: the lines that are drawn are the means of the rows."""

import json
import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from PIL import Image

from results import plot
from results.pages import legend
from src.errors import ConfigError, DataError
from src.runs.run_dir import RunDir
from src.tables import curves, results
from tests.conftest import ROOT


def test_one_line_and_one_band_for_each_configuration(runs: Path):
    rows, _ = results.load_rows(runs)
    (axes,) = plot.draw(runs, rows).axes
    assert axes.get_ylabel() == "val_loss"
    assert sorted(line.get_label() for line in axes.lines) == [" stride=1 (3)", " stride=2 (3)"]
    for line in axes.lines:
        stride = int(line.get_label()[8])
        values = [[stride / step + 0.1 * seed + 1 / 3 for seed in range(3)] for step in range(1, 5)]
        assert list(line.get_xdata()) == [1, 2, 3, 4]
        assert list(line.get_ydata()) == [statistics.fmean(v) for v in values]
    bands = [c for c in axes.collections if isinstance(c, PolyCollection)]
    assert len(bands) == 2


def test_smoothed_curves(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    configurations = legend.Configurations(results.load_rows(runs)[0])
    (axes,) = plot.draw_panels(runs, configurations, ["val_loss"], smoothing=0.9)[0].axes
    for line in axes.lines:
        stride, (first, second, *_) = int(line.get_label()[8]), line.get_ydata()
        assert first == pytest.approx(stride + 0.1 + 1 / 3)
        assert second == pytest.approx((0.09 * first + 0.1 * (stride / 2 + 0.1 + 1 / 3)) / 0.19)
    assert plot.main([str(runs), "--smooth", "1", "--output", str(tmp_path / "x.png")]) == 1
    assert "--smooth: expected a number from 0 (no smoothing) to less than 1, got 1.0." in capsys.readouterr().err


def test_a_panel_for_each_metric(runs: Path):
    rows, _ = results.load_rows(runs)
    assert [axes.get_ylabel() for axes in plot.draw(runs, rows, ["em", "train_loss"]).axes] == ["em", "train_loss"]


def test_a_curve_skips_missing_and_non_finite_values(tmp_path: Path):
    for seed, lines in enumerate(
        (['{"step": 1, "a": 1.0}', '{"step": 2, "a": null}'], ['{"step": 1, "a": 3.0}', '{"step": 3, "a": 5.0}'])
    ):
        exp = {"recipe": "toy", "seed": seed}
        with RunDir.open(tmp_path, exp, exp) as run:
            run.scores.path.write_text("".join(f"{line}\n" for line in lines))
            run.set_status("done")
    (((band,),), _) = curves.bands(tmp_path, [results.load_rows(tmp_path)[0]], ["a"])
    assert (list(band.x), list(band.mean), list(band.count)) == ([1, 3], [2.0, 5.0], [2, 1])
    assert band.std[0] == statistics.stdev([1.0, 3.0])


def test_no_text_of_a_run_is_read_as_mathematics_or_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for note in ("$x_{", "$$ \\frac", "_hidden"):
        exp = {"recipe": "toy", "_note": note}
        with RunDir.open(tmp_path, exp, exp) as run:
            run.scores.append({"step": 1, "$loss_{": 1.0})
            run.set_status("done")
    output = tmp_path / "a.svg"
    assert plot.main([str(tmp_path), "--output", str(output)]) == 0, capsys.readouterr().err
    (axes,) = plot.draw(tmp_path, results.load_rows(tmp_path)[0]).axes
    assert sorted(text.get_text() for text in axes.figure.legends[0].get_texts()) == [
        " _note=$$ \\frac",
        " _note=$x_{",
        " _note=_hidden",
    ]


def test_the_picture_is_written_with_its_folder(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
    with pytest.raises(ConfigError, match="no run has a score yet"):
        plot.draw(tmp_path, results.load_rows(tmp_path)[0])


def heights(axes) -> list[float]:
    """Half the height of the first band at each step."""
    band = next(c for c in axes.collections if isinstance(c, PolyCollection))
    points = band.get_paths()[0].vertices
    return [(points[points[:, 0] == x, 1].max() - points[points[:, 0] == x, 1].min()) / 2 for x in (1, 2, 3, 4)]


def test_bands_are_deviations_or_intervals(runs: Path):
    rows, _ = results.load_rows(runs)
    (axes,) = plot.draw_panels(runs, legend.Configurations(rows))[0].axes
    assert heights(axes) == pytest.approx([0.1] * 4, rel=1e-9)
    (axes,) = plot.draw_panels(runs, legend.Configurations(rows), interval="ci95")[0].axes
    assert heights(axes) == pytest.approx([4.302652729911275 * 0.1 / 3**0.5] * 4, rel=1e-9)


def test_another_axis(runs: Path):
    for number, path in enumerate(sorted(path for path in runs.iterdir() if len(path.name) == 32)):
        rows = [{"step": step, "seconds": 1.0 + number, "steps_per_second": 1.0} for step in range(1, 5)]
        (path / "perf.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in [rows[0] | {"seconds": 99.0}, *rows])
        )
    rows, _ = results.load_rows(runs)
    (axes,) = plot.draw_panels(runs, legend.Configurations(rows), x="em")[0].axes
    assert axes.get_xlabel() == "em"
    assert sorted(tuple(line.get_xdata()) for line in axes.lines) == [(0.25,), (0.5,)], "where em is known"
    (axes,) = plot.draw_panels(runs, legend.Configurations(rows), x="seconds")[0].axes
    places = {row["exp_id"]: 1.0 + number for number, row in enumerate(sorted(rows, key=lambda row: row["exp_id"]))}
    for line in axes.lines:
        took = statistics.fmean(
            places[row["exp_id"]] for row in rows if row["model.stride"] == int(line.get_label()[8])
        )
        assert list(line.get_xdata()) == pytest.approx([took * step for step in range(1, 5)], rel=1e-12)


def test_seconds_that_nobody_measured(runs: Path):
    with pytest.raises(DataError, match=r"no run has 'seconds' in its scores or its perf\.jsonl"):
        plot.draw_panels(runs, legend.Configurations(results.load_rows(runs)[0]), x="seconds")
    with pytest.raises(ConfigError, match=r"unknown axis 'tokns'"):
        plot.draw_panels(runs, legend.Configurations(results.load_rows(runs)[0]), x="tokns")


@pytest.mark.parametrize("seed", range(3))
def test_curves_are_numpys_to_the_last_digits(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    histories = {}
    for number in range(7):
        exp = {"recipe": "toy", "seed": number}
        rows = [{"step": step, "loss": rng.uniform(-1e3, 1e3)} for step in range(1, 30) if rng.random() < 0.7]
        with RunDir.open(tmp_path, exp, exp) as run:
            run.scores.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            run.set_status("done")
            histories[run.exp_id] = rows
    rows, _ = results.load_rows(tmp_path)
    (((band,),), _) = curves.bands(tmp_path, [rows], ["loss"])
    at = {
        step: [row["loss"] for of_run in histories.values() for row in of_run if row["step"] == step] for step in band.x
    }
    assert list(band.x) == sorted({row["step"] for of_run in histories.values() for row in of_run})
    np.testing.assert_allclose(band.mean, [np.mean(values) for values in at.values()], rtol=1e-12)
    np.testing.assert_allclose(band.std, [np.std(v, ddof=1) if len(v) > 1 else np.nan for v in at.values()], rtol=1e-12)
    assert list(band.count) == [len(values) for values in at.values()]


def test_the_runs_that_answer_a_question(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = str(tmp_path / "a.svg")
    assert (
        plot.main([str(runs), "--where", "model.stride == 1", "--x", "step", "--interval", "ci95", "--output", output])
        == 0
    )
    assert "stride" not in Path(output).read_text(), "one configuration needs no legend"
    assert plot.main([str(runs), "--where", "stride == 1", "--output", output]) == 1
    assert "--where: unknown name 'stride'" in capsys.readouterr().err


def test_one_point_for_each_experiment(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The last values: em is a quarter of the stride, val_loss stride / 4 + 0.1 seed + 1 / 3."""
    rows, _ = results.load_rows(runs)
    for x in ("em", "model.stride"):
        figure, left_out = plot.points(runs, legend.Configurations(rows), x, "val_loss")
        (axes,) = figure.axes
        assert (axes.get_xlabel(), axes.get_ylabel(), left_out) == (x, "val_loss", [])
        assert sorted(text.get_text() for text in axes.figure.legends[0].get_texts()) == [
            " stride=1 (3)",
            " stride=2 (3)",
        ]
        for line in axes.lines:
            stride = int(line.get_label()[8])
            assert set(line.get_xdata()) == {stride / 4 if x == "em" else stride}
            assert sorted(line.get_ydata()) == pytest.approx([stride / 4 + 0.1 * seed + 1 / 3 for seed in range(3)])
            assert line.get_linestyle() == "None"
    output = tmp_path / "points.svg"
    assert plot.main([str(runs), "--x", "em", "--y", "val_loss", "--log_x", "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert "stride=2" in output.read_text()
    figure, _ = plot.points(runs, legend.Configurations(rows), "model.stride", "val_loss", log_x=True)
    figure.draw_without_rendering()
    ticks = figure.axes[0].get_xticklabels(which="both")
    assert {"1", "2"} <= (texts := {tick.get_text() for tick in ticks})
    assert "$" not in "".join(texts)


@pytest.mark.slow
def test_long_names_leave_room_for_the_plot(runs: Path):
    """Two recipes have many keys that only one of them has: a label names its own, in short lines."""
    for seed in range(2):
        exp = {"recipe": "other", "seed": seed, **{f"a_rather_long_key_{i}": f"with_a_value_{i}" for i in range(6)}}
        with RunDir.open(runs, exp, exp, facts={"groups": ["tiny"]}) as run:
            run.scores.append({"step": 1, "val_loss": 1.0 + seed, "em": 0.5})
            run.set_status("done")
    configurations = legend.Configurations(results.load_rows(runs)[0])
    for figure in (plot.points(runs, configurations, "em", "val_loss")[0], plot.draw_panels(runs, configurations)[0]):
        figure.canvas.draw()  # a legend that leaves nothing of the axes is a warning, and so an error
        texts = [text.get_text() for text in figure.legends[0].get_texts()]
        assert max(len(line) for text in texts for line in text.splitlines()) <= plot.LABEL_CHARACTERS + 1
        (other,) = [text for text in texts if "other" in text]
        assert "with_a_value_5" in other
        assert "stride" not in other


def test_by_chooses_the_keys_of_configurations(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    configurations = legend.Configurations(results.load_rows(runs)[0], ["recipe"])
    for figure in (plot.points(runs, configurations, "em", "val_loss")[0], plot.draw_panels(runs, configurations)[0]):
        assert [text.get_text() for text in figure.legends[0].get_texts()] == [" recipe=toy (6)"]
    assert plot.main([str(runs), "--by", "model.strde", "--output", str(tmp_path / "x.png")]) == 1
    assert "unknown key 'model.strde'. Did you mean 'model.stride'?" in capsys.readouterr().err


def test_points_of_runs_without_a_number_are_left_out(runs: Path):
    exp = {"recipe": "toy", "seed": 0, "model": {"name": "m", "stride": 4, "kind": "a_b & 50%"}}
    with RunDir.open(runs, exp, exp) as run:
        run.scores.append({"step": 1, "val_loss": 1.0})
        run.set_status("done")
    rows, _ = results.load_rows(runs)
    figure, left_out = plot.points(runs, legend.Configurations(rows), "em", "val_loss")
    assert sum(len(line.get_xdata()) for line in figure.axes[0].lines) == 6
    assert left_out == ["left out: 1 of 7 runs, which have no number for 'em' or 'val_loss'."]
    with pytest.raises(DataError, match=r"no run has a number for both 'model\.kind' and 'em'"):
        plot.points(runs, legend.Configurations(rows), "model.kind", "em")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--y", "ems"], "unknown score 'ems'. Did you mean 'em'?"),
        (["--y", "em", "--x", "model.strides"], "unknown axis 'model.strides'. Did you mean 'model.stride'?"),
        (["--y", "em", "--metric", "em"], "--y, --metric: --y draws points, --metric curves."),
        (["--log_x"], "--log_x: only for points."),
    ],
)
def test_mistakes_in_points(runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert plot.main([str(runs), *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    """100 configurations of one run each, with long names; the best are the middle ones. One more has no finished
    run."""
    for number in range(101):
        exp = {
            "recipe": "toy",
            "model": {"name": "m", "kind": f"a rather long name of a kind {number:03d}", "stride": number},
        }
        with RunDir.open(tmp_path, exp, exp, facts={"groups": ["many"]}) as run:
            for step in (1, 2):
                run.scores.append(
                    {"step": step, "val_loss": abs(number - 50) + 1 / step, "em": 1 / (1 + abs(number - 50))}
                )
            run.set_status("done" if number < 100 else "stopped")
    return tmp_path


def strides(figure) -> set[int]:
    return {
        int(line.get_label().partition("stride=")[2].split()[0])
        for axes in figure.axes
        for line in axes.lines
        if "stride=" in line.get_label()
    }


@pytest.mark.parametrize(("metric", "top"), [("val_loss", 12), ("em", 12), ("val_loss", 3)])
def test_the_best_configurations_are_drawn_and_all_counted(hundred: Path, metric: str, top: int):
    figure, remarks = plot.draw_panels(
        hundred, legend.Configurations(results.load_rows(hundred)[0], most=top), [metric]
    )
    best = sorted(range(100), key=lambda number: (abs(number - 50), number))
    assert len(strides(figure)) == top
    assert strides(figure) >= set(best[: top - 1])
    assert [f"{top} of 101 configurations" in text and "--top" in text for text in remarks] == [True]
    assert figure.legends[0].get_title().get_text() == f"{top} of 101 configurations"


def is_below_the_axes(figure) -> bool:
    figure.canvas.draw()
    (box,) = [legend_box.get_window_extent() for legend_box in figure.legends]
    lowest = min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert min(axes.get_window_extent().height for axes in figure.axes) > 0.6 * plot.HEIGHT * figure.dpi, (
        "the axes keep their size"
    )
    return box.y1 <= lowest + 1 and box.x0 >= -1 and box.x1 <= figure.bbox.width + 1 and box.y0 >= -1


@pytest.mark.slow
@pytest.mark.parametrize("top", [1, 2, 5, 12, 101])
def test_the_legend_is_below_the_axes_and_inside_the_picture(hundred: Path, top: int):
    configurations = legend.Configurations(results.load_rows(hundred)[0], most=top)
    assert is_below_the_axes(plot.draw_panels(hundred, configurations)[0])
    assert is_below_the_axes(plot.draw_panels(hundred, configurations, ["val_loss", "em"])[0])
    assert is_below_the_axes(plot.points(hundred, configurations, "model.stride", "val_loss")[0])


def test_points_of_all_configurations_and_the_names_of_the_best(hundred: Path):
    figure, remarks = plot.points(
        hundred, legend.Configurations(results.load_rows(hundred)[0]), "model.stride", "val_loss"
    )
    assert sum(len(line.get_xdata()) for line in figure.axes[0].lines) == 100
    assert len(figure.legends[0].get_texts()) == len(strides(figure)) == 12
    assert any("12 of 100 configurations" in text for text in remarks)


@pytest.mark.slow
def test_the_command_prints_no_warning_of_matplotlib(hundred: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "many.png"
    for words in (["--top", "101"], [], ["--y", "em", "--x", "val_loss"]):
        assert plot.main([str(hundred), *words, "-o", str(output)]) == 0
        captured = capsys.readouterr()
        assert captured.out == f"{output}\n"
        assert "Warning" not in captured.err
        assert all(line.split()[0] in ("left", "the", "12") for line in captured.err.splitlines())
    assert plot.main([str(hundred), "--top", "0", "-o", str(output)]) == 1
    assert "--top: expected at least 1, got 0" in capsys.readouterr().err


def test_characters_without_a_glyph_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for kind in ("\u6f22\u5b57", "b"):
        exp = {"recipe": "toy", "kind": kind}
        with RunDir.open(tmp_path, exp, exp) as run:
            run.scores.append({"step": 1, "a": 1.0})
            run.set_status("done")
    assert plot.main([str(tmp_path), "-o", str(tmp_path / "a.png")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith(f"{tmp_path / 'a.png'}: ") for line in lines)


def colored_pixels(picture: Path, colour: str) -> tuple[int, int, int]:
    """The pixels of a plot in the color of a line: of the line, of its band, and of its line in the legend."""
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    line = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)])
    band = np.rint(255 * 0.8 + 0.2 * line)
    is_line, is_band = (pixels == line).all(axis=2), (abs(pixels - band) <= 1).all(axis=2)
    below = int(0.95 * len(pixels))  # the legend of some lines is one row of text at the lower edge
    return int(is_line[:below].sum()), int(is_band.sum()), int(is_line[below:].sum())


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_a_written_picture_has_the_colors_of_the_plot(runs: Path, tmp_path: Path, suffix: str):
    output = tmp_path / f"plot.{suffix}"
    assert plot.main([str(runs), "-o", str(output)]) == 0
    assert all(min(colored_pixels(output, colour)) >= 10 for colour in legend.COLOURS[:2])
    assert max(colored_pixels(output, legend.COLOURS[2])) == 0


@pytest.mark.parametrize(("name", "lines"), [("demo.png", 4), ("policies.webp", 3)])
def test_pictures_of_docs_have_the_colors_of_the_plot(name: str, lines: int):
    present = [colour for colour in legend.COLOURS if min(colored_pixels(ROOT / "docs" / name, colour)) >= 10]
    assert len(present) == lines


def test_pictures_of_docs_are_in_full_color():
    for path in (ROOT / "docs").glob("*.[pw]*[gp]"):
        with Image.open(path) as picture:
            assert picture.mode == "RGB", path
