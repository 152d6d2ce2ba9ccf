"""A planted group of done, failed, stopped and running seeds: every table, page and file says the same of it."""

import hashlib
import json
import math
import pickle
import re
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from results import clean, plot, report, table
from results.dashboard import ALL, Dashboard
from results.lineage import tree
from results.pages import learning_curves, legend, overview, run_page
from src.errors import RunError
from src.experiments.identity import exp_id
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from src.tables import lineage, results, terminal_table

# panel 1.9.4 calls pandas in a way that pandas 3.1 announces the end of
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:pandas.errors.Pandas4Warning")

DONE = (0.50, 0.51, 0.52)
"""The last losses of the seeds of stride 2 that are done. One more failed at step 68, one was stopped: both far from an
end."""
MEAN, STD = "0.510", "0.010"


def experiment(stride: int, seed: int, **more: object) -> dict:
    return {"recipe": "toy", "seed": seed, "model": {"name": "m", "stride": stride}, **more}


def plant(
    runs: Path, exp: dict, values: Sequence[tuple[int, float]], state: str, name: str = "val_loss", group: str = "g"
) -> str:
    with RunDir.open(runs, exp, exp, facts={"groups": [group]}) as run:
        for step, value in values:
            run.scores.append({"step": step, name: value})
        run.scores.export_haven()
        run.set_status(state)
    return run.exp_id


@pytest.fixture
def planted_runs(tmp_path: Path) -> Path:
    """Stride 2 has the best finished runs and the worst others; of stride 3 none is done; of stride 1 all are."""
    runs = tmp_path / "runs"
    for seed, last in enumerate(DONE):
        plant(runs, experiment(2, seed), [(68, 1.0 + seed), (200, last - 0.25), (300, last)], "done")
    plant(runs, experiment(2, 3), [(68, 1.8)], "failed")
    plant(runs, experiment(2, 4), [(68, 0.9), (100, 0.3)], "stopped")
    for seed in range(2):
        plant(runs, experiment(1, seed), [(68, 2.0), (300, 0.6 + seed / 100)], "done")
    for seed, state in enumerate(("failed", "stopped")):
        plant(runs, experiment(3, seed), [(68, 0.01)], state)
    return runs


def rows_of(runs: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[int, dict]:
    assert table.main([str(runs), "--json", *map(str, arguments)]) == 0
    return {row["model.stride"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_every_view_has_the_means_of_finished_runs(
    planted_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = rows_of(planted_runs, capsys)
    assert list(result) == [2, 1, 3], "the best first, and last what has no result"
    assert [result[2][key] for key in ("val_loss", "val_loss_std", "val_loss_n", "done", "runs")] == [
        *(statistics.fmean(DONE), statistics.stdev(DONE)),
        *(3, 3, 5),
    ]
    assert (result[3]["val_loss"], result[3]["val_loss_n"], result[3]["done"]) == (None, 0, 0)
    cells = [f"{MEAN} ± {STD} (3 of 5)", "0.6050 ± 0.0071", "0 of 2 done"]

    assert table.main([str(planted_runs)]) == 0
    terminal = capsys.readouterr()
    digits = ["0.5100 ± 0.0100 (3 of 5)", *cells[1:]]
    assert [line.split("│")[1].strip() for line in terminal.out.splitlines() if line.startswith("│")] == digits
    assert "4 of 9 runs are not done; the means are over finished runs" in terminal.err

    output = tmp_path / "report.html"
    assert report.main([str(planted_runs), "-o", str(output)]) == 0
    assert all(text in output.read_text() for text in digits)
    assert "Best val_loss: 0.5100 ± 0.0100 (3 of 5) with stride=2" in output.read_text()

    curves = {line.label: line for line in learning_curves.build(overview.load(planted_runs), "val_loss").lines}
    (axes,) = plot.draw(planted_runs, results.load_rows(planted_runs)[0]).axes
    lines = {str(line.get_label()).strip(): line for line in axes.lines}
    assert set(lines) == set(curves) == {"stride=1 (2)", "stride=2 (3 of 5)", "stride=3 (0 of 2 done)"}
    best = "stride=2 (3 of 5)"
    assert curves[best].mean[-1] == list(lines[best].get_ydata())[-1] == result[2]["val_loss"]
    assert curves[best].x == [68, 200, 300], "step 100 is of a run that was stopped"
    assert curves["stride=3 (0 of 2 done)"].mean == [0.01], "what goes on is seen"


def test_haven_has_the_last_values_of_the_same_runs(planted_runs: Path, capsys: pytest.CaptureFixture[str]):
    """It knows no states, so that its rows are those of all runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # haven imports deprecated modules and calls
        from haven.haven_results import ResultManager

        manager = ResultManager(savedir_base=str(planted_runs), verbose=False)
        theirs = manager.get_score_df(
            columns=["exp_id", "model.stride"], show_exp_ids=True, show_meta=False, show_max_min=False
        )
    assert table.main([str(planted_runs), "--unfinished", "--by", "exp_id", "--json"]) == 0
    ours = {row["exp_id"]: (row["val_loss"], row["step"]) for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {row["exp_id"]: (row["val_loss"], row["step"]) for row in theirs.to_dict("records")} == ours
    done = {row["exp_id"] for row in results.load_rows(planted_runs)[0] if row["state"] == "done"}
    of_stride_2 = theirs[theirs["exp_id"].isin(done) & (theirs["model.stride"] == 2)]["val_loss"]
    assert (of_stride_2.mean(), of_stride_2.std()) == pytest.approx((statistics.fmean(DONE), statistics.stdev(DONE)))


def test_a_running_seed_changes_no_mean_in_any_view(
    planted_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Of the best configuration, with a better score than any that is done."""
    exp = experiment(2, 5)
    with RunDir.open(planted_runs, exp, exp, facts={"groups": ["g"]}) as run:
        run.scores.append({"step": 68, "val_loss": 0.001})
        run.scores.export_haven()
        row = rows_of(planted_runs, capsys)[2]
        assert (row["val_loss"], row["val_loss_n"], row["runs"]) == (statistics.fmean(DONE), 3, 6)
        assert "1 running" in row["state"]
        cell = "0.5100 ± 0.0100 (3 of 6)"
        page = Dashboard(planted_runs, ALL)
        assert page.results.value["val_loss ↓"].tolist()[0] == f"<b>{cell}</b>"
        assert page.selection.counts()["running"] == 1
        output = tmp_path / "report.html"
        assert report.main([str(planted_runs), "-o", str(output)]) == 0
        assert all(text in output.read_text() for text in (cell, "1 running"))
        capsys.readouterr()
        test_haven_has_the_last_values_of_the_same_runs(planted_runs, capsys)


def test_the_last_value_of_a_run_that_is_not_done_never_looks_like_a_result(
    planted_runs: Path, capsys: pytest.CaptureFixture[str]
):
    """Not even alone in its row, nor as a point."""
    rows = ("--where", "model.stride == 2", "--by", "seed", "--format", "markdown")
    assert table.main([str(planted_runs), *rows]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[-1] for line in lines] == ["0.5 |", "0.51 |", "0.52 |", "0 of 1 done |", "0 of 1 done |"]
    assert sorted(line[2] for line in lines) == ["done"] * 3 + ["failed", "stopped"]
    figure, left_out = plot.points(
        planted_runs, legend.Configurations(results.load_rows(planted_runs)[0]), "model.stride", "val_loss"
    )
    assert sorted(value for line in figure.axes[0].lines for value in line.get_ydata()) == [*DONE, 0.6, 0.61]
    assert left_out == ["left out: 4 of 9 runs, which are not done."]
    points = learning_curves.build(overview.load(planted_runs), "val_loss", learning_curves.Look("model.stride")).lines
    assert sorted(value for line in points for value in line.mean) == [*DONE, 0.6, 0.61]


@pytest.mark.parametrize(
    ("options", "of_stride_2"),
    [
        ([], DONE),
        (["--unfinished"], [*DONE, 1.8, 0.3]),
        (["--at-step", "68"], [1.0, 2.0, 3.0, 1.8, 0.9]),
        (["--at-step", "100"], [0.3]),
        (["--at-step", "7"], []),
        (["--value", "best"], [0.25, 0.26, 0.27]),
        (["--value", "min"], [0.25, 0.26, 0.27]),
        (["--value", "max"], [1.0, 2.0, 3.0]),
        (["--value", "min", "--unfinished"], [0.25, 0.26, 0.27, 1.8, 0.3]),
    ],
)
def test_other_values_of_other_runs(
    planted_runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    of_stride_2: Sequence[float],
):
    row = rows_of(planted_runs, capsys, *options)[2]
    assert row["val_loss"] == (pytest.approx(statistics.fmean(of_stride_2), rel=1e-12) if of_stride_2 else None)
    assert (row["val_loss_n"], row["runs"]) == (len(of_stride_2), 5)
    (score_cell,) = terminal_table.score_cells([row], "val_loss", "std")
    output = tmp_path / "report.html"
    assert report.main([str(planted_runs), *options, "-o", str(output)]) == 0
    text = output.read_text()
    count = f"({len(of_stride_2)} of 5)"
    assert (count in score_cell) == (count in text.split("Learning curves")[0]) == (0 < len(of_stride_2) < 5)
    assert plot.main(
        [str(planted_runs), *options, "--x", "model.stride", "--y", "val_loss", "--output", str(tmp_path / "a.svg")]
    ) == int(not of_stride_2)
    page = Dashboard(planted_runs, ALL)
    page.over.value = "--unfinished" in options
    page.value.value = options[1] if "--value" in options else "last"
    page.at_step.value = int(options[1]) if "--at-step" in options else None
    assert table.main([str(planted_runs), *options]) == 0
    terminal = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [re.sub("<.*?>", "", cell) for cell in page.results.value.iloc[:, 1]] == terminal


def test_runs_without_the_step_are_counted(planted_runs: Path, capsys: pytest.CaptureFixture[str]):
    assert table.main([str(planted_runs), "--at-step", "100"]) == 0
    assert "8 of 9 runs have no row at step 100; they are left out." in capsys.readouterr().err


def test_the_best_value_is_the_best_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By loop.best_mode for its metric; by the name for others."""
    for mode, best in (("min", 0.2), ("max", 0.9)):
        exp = experiment(1, 0, loop={"best_metric": "skill", "best_mode": mode})
        plant(tmp_path / mode, exp, [(1, 0.5), (2, 0.2), (3, 0.9), (4, 0.4)], "done", "skill")
        rows = json.loads(
            (table.main([str(tmp_path / mode), "--value", "best", "--json"]), capsys.readouterr().out)[1]
        )["rows"]
        assert rows[0]["skill"] == best
    plant(tmp_path / "named", experiment(1, 0), [(1, 0.5), (2, 0.9), (3, 0.4)], "done", "em")
    assert table.main([str(tmp_path / "named"), "--value", "best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["em"] == 0.9


def test_columns_of_tables_are_no_config_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two runs of `runs` 7 and 9 once both showed 1."""
    for runs, deviation in ((7, 0.1), (9, 0.2)):
        exp = {
            "recipe": "toy",
            "runs": runs,
            "val_loss_std": deviation,
            "done": runs,
            "model": {"name": "m", "state": runs},
        }
        plant(tmp_path, exp, [(1, runs / 10)], "done")
    assert table.main([str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    keys = ("config.runs", "config.val_loss_std", "config.done", "model.state", "runs", "val_loss", "val_loss_std")
    assert [[row[key] for key in keys] for row in rows] == [[7, 0.1, 7, 7, 1, 0.7, None], [9, 0.2, 9, 9, 1, 0.9, None]]
    assert table.main([str(tmp_path), "--by", "runs", "model.state", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "| config.runs | model.state | runs | state | step | val_loss |"


def test_a_score_that_is_called_like_a_deviation_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed in range(2):
        exp = experiment(1, seed)
        with RunDir.open(tmp_path, exp, exp) as run:
            run.scores.append({"step": 1, "reward": float(seed), "reward_std": 5.0})
            run.set_status("done")
    assert table.main([str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["reward"], row["reward_std"], row["score.reward_std"]) == (0.5, math.sqrt(0.5), 5.0)


def test_means_over_another_key_than_the_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed in (1, 2):
        for repeat in range(3 if seed == 1 else 2):
            plant(
                tmp_path, experiment(1, seed, runs=repeat, trial={"number": repeat}), [(1, seed + repeat / 10)], "done"
            )
    for key, word in (("runs", "config.runs"), ("config.runs", "config.runs")):
        assert table.main([str(tmp_path), "--seed-key", key, "--by", "seed", "--json"]) == 0
        captured = capsys.readouterr()
        assert [(row["seed"], row["runs"], row["val_loss"]) for row in json.loads(captured.out)["rows"]] == [
            (1, 3, pytest.approx(1.1)),
            (2, 2, pytest.approx(2.05)),
        ]
        assert f"seed=2: no run with {word} 2; other rows have it." in captured.err
    keys = legend.Configurations(results.load_rows(tmp_path)[0], seed="config.runs").keys
    assert sorted(keys) == ["seed", "trial.number"]
    output = tmp_path / "a.svg"
    assert plot.main([str(tmp_path), "--seed-key", "runs", "--output", str(output)]) == 0
    assert report.main([str(tmp_path), "--seed-key", "runs", "-o", str(tmp_path / "a.html")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at-step", "1", "--value", "best"], "--at-step, --value: "),
        (["--seed-key", "sed"], "--seed-key: unknown key 'sed'. Did you mean 'seed'?"),
    ],
)
def test_mistakes_are_one_line(
    planted_runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    for command in (table.main, report.main):
        assert command([str(planted_runs), *arguments]) == 1
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert message in captured.err
    assert plot.main([str(planted_runs), "--value", "best"]) == 1
    assert "--at-step, --value: only for points" in capsys.readouterr().err


def test_runs_of_haven_count_as_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing but scores is known of it."""
    for seed in range(2):
        exp = experiment(1, seed)
        path = tmp_path / exp_id(exp)
        path.mkdir()
        (path / "exp_dict.json").write_text(json.dumps(exp))
        (path / "score_list.pkl").write_bytes(pickle.dumps([{"val_loss": 0.5 + seed}]))
    (row,) = rows_of(tmp_path, capsys, "--by", "model.stride").values()
    assert (row["val_loss"], row["done"], row["state"]) == (1.0, 2, "haven")


@pytest.mark.parametrize("make", [hashlib.md5, hashlib.sha1], ids=["as long as ours", "longer"])
def test_runs_with_the_ids_of_another_program_are_read_and_marked(
    planted_runs: Path, capsys: pytest.CaptureFixture[str], make: Callable
):
    """XC-Cache named them by the MD5 of the JSON of the dict."""
    exp = experiment(9, 0)
    path = planted_runs / make(json.dumps(exp, sort_keys=True).encode()).hexdigest()
    path.mkdir()
    (path / "exp_dict.json").write_text(json.dumps(exp))
    (path / "score_list.pkl").write_bytes(pickle.dumps([{"epoch": 0, "val_loss": 0.4, "image": np.zeros(9)}]))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    row = rows_of(planted_runs, capsys, "--by", "model.stride")[9]
    assert (row["state"], row["val_loss"], row["done"], row["exp_ids"]) == ("foreign", 0.4, 1, [path.name])
    page = Dashboard(planted_runs, ALL)
    assert "foreign" in str(page.jobs.value["state"].tolist())
    assert "foreign" in page.states.options.values()
    assert report.main([str(planted_runs), "-o", str(planted_runs.parent / "report.html")]) == 0
    assert ">foreign<" in run_page.render(path)
    assert f"{path.name[:8]}" in tree(lineage.build(planted_runs).family([path.name, "gone"]))
    with pytest.raises(RunError, match="another program made this directory"):
        SavedRun(path).write_remarks(add=["good"])
    assert clean.main([str(planted_runs), "--keep-last", "0", "--apply"]) == 0
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_dict_of_ours_that_was_changed_is_not_foreign(planted_runs: Path, capsys: pytest.CaptureFixture[str]):
    path = planted_runs / exp_id(experiment(1, 0))
    (path / "exp_dict.json").write_text(json.dumps(experiment(1, 7)))
    assert table.main([str(planted_runs)]) == 0
    assert "not the name of its directory. " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["0" * 32, "0" * 40])
@pytest.mark.parametrize("text", ['{"a": ' * 400 + "1" + "}" * 400, '{"a": NaN}', "[1]", "{"])
def test_a_foreign_dict_that_cannot_be_read_is_one_line(
    planted_runs: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
):
    (planted_runs / name).mkdir()
    (planted_runs / name / "exp_dict.json").write_text(text)
    (planted_runs / name / "score_list.pkl").write_bytes(pickle.dumps([{"val_loss": 0.4}]))
    assert table.main([str(planted_runs), "--unfinished"]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped: ")]
    assert f"{name}/exp_dict.json" in warning
