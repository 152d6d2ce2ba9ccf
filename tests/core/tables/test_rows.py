"""Rows of runs: what is read, what is skipped, how it is averaged and ordered."""

import json
import pickle
import random
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest

from src.errors import ConfigError, DataError
from src.experiments.identity import exp_id
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from src.tables import results, statistics


def experiment(stride: int, seed: int) -> dict:
    return {"recipe": "toy", "seed": seed, "model": {"name": "m", "stride": stride, "sizes": [1, 2]}}


def make(runs: Path, exp: dict, scores: list[dict], group: str = "g", state: str | None = "done") -> Path:
    with RunDir.open(runs, exp, exp, facts={"groups": [group]}) as run:
        for row in scores:
            run.scores.append(row)
        if state:
            run.set_status(state)
        return run.path


def test_a_row_holds_config_facts_and_the_last_value_of_each_score(tmp_path: Path):
    make(
        tmp_path,
        experiment(2, 0),
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "em": 0.5}, {"step": 3, "loss": float("nan")}],
    )
    (row,), warnings = results.load_rows(tmp_path)
    assert warnings == []
    assert row == {
        "exp_id": exp_id(experiment(2, 0)),
        "state": "done",
        "group": "g",
        "step": 3,
        "tags": [],
        "note": "",
        "recipe": "toy",
        "seed": 0,
        "model.name": "m",
        "model.stride": 2,
        "model.sizes": [1, 2],
        "loss": None,
        "em": 0.5,
    }
    assert row.scores == ("loss", "em")
    assert results.config_keys(row) == ["model.name", "model.sizes", "model.stride", "recipe", "seed"]


def test_a_run_without_any_finite_value_shows_none(tmp_path: Path):
    make(tmp_path, experiment(2, 0), [{"step": 1, "loss": float("inf")}])
    (row,), _ = results.load_rows(tmp_path)
    assert row["loss"] is None
    assert statistics.aggregate([row], [], ["loss"])[0]["loss"] is None


def test_a_score_is_not_the_config_key_of_another_run(tmp_path: Path):
    make(tmp_path, {"recipe": "toy", "seed": 0}, [{"step": 1, "loss": 0.2, "em": 0.5}])
    make(tmp_path, {"recipe": "toy", "seed": 1, "loss": "ce"}, [{"step": 1, "loss": 0.4, "em": 0.5}])
    rows, _ = results.load_rows(tmp_path)
    assert sorted((row["seed"], row.get("loss"), row["score.loss"], row["em"]) for row in rows) == [
        (0, None, 0.2, 0.5),
        (1, "ce", 0.4, 0.5),
    ]
    assert all(set(row.scores) == {"score.loss", "em"} for row in rows)
    (mean,) = statistics.aggregate(rows, [], ["score.loss"])
    assert mean["score.loss"] == pytest.approx(0.3)


def test_clashing_names_get_prefixes(tmp_path: Path):
    make(tmp_path, {"recipe": "toy", "state": 1, "seed": 3}, [{"step": 1, "seed": 0.5, "exp_id": 2}])
    (row,), _ = results.load_rows(tmp_path)
    assert (row["state"], row["config.state"], row["seed"], row["score.seed"], row["score.exp_id"]) == (
        "done",
        1,
        3,
        0.5,
        2,
    )


def test_states_follow_the_lease(tmp_path: Path):
    make(tmp_path, experiment(1, 0), [], state=None)
    make(tmp_path, experiment(2, 0), [], state="failed")
    with RunDir.open(tmp_path, experiment(3, 0), experiment(3, 0)):
        rows, _ = results.load_rows(tmp_path)
    assert {row["model.stride"]: row["state"] for row in rows} == {1: "lost", 2: "failed", 3: "running"}


def test_groups_are_chosen_also_if_a_run_is_in_several(tmp_path: Path):
    path = make(tmp_path, experiment(1, 0), [], group="a")
    SavedRun(path).join_groups(["b"])
    make(tmp_path, experiment(2, 0), [], group="b")
    assert [row["model.stride"] for row in results.load_rows(tmp_path, "a")[0]] == [1]
    assert sorted(row["model.stride"] for row in results.load_rows(tmp_path, "b")[0]) == [1, 2]
    assert {row["group"] for row in results.load_rows(tmp_path, "b")[0]} == {"b"}
    with pytest.raises(ConfigError, match=r"unknown group 'aa'\. Did you mean 'a'\? Known: a, b"):
        results.load_rows(tmp_path, "aa")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("exp_dict.json", "{", r"exp_dict\.json:1: not valid JSON"),
        ("status.json", "[]", r"status\.json: expected a dict"),
        ("scores.jsonl", "oops\n", r"scores\.jsonl:1: not a row of scores"),
        ("env.json", "{", r"env\.json:1: not valid JSON"),
    ],
)
def test_a_damaged_directory_is_named_and_skipped(tmp_path: Path, file: str, content: str, message: str):
    make(tmp_path, experiment(1, 0), [{"step": 1, "loss": 1.0}])
    (make(tmp_path, experiment(2, 0), []) / file).write_text(content)
    rows, warnings = results.load_rows(tmp_path)
    assert [row["model.stride"] for row in rows] == [1]
    (warning,) = warnings
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(warning)


def test_other_entries_are_no_runs(tmp_path: Path):
    with RunDir.open(tmp_path, experiment(1, 0), {}):
        pass
    RunDir.open(tmp_path, experiment(1, 0), {}, reset=1).close()
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "snapshots").mkdir()
    assert len(results.load_rows(tmp_path)[0]) == 1


def test_nothing_to_load_is_said(tmp_path: Path):
    with pytest.raises(DataError, match="no runs in this folder"):
        results.load_rows(tmp_path)
    with pytest.raises(DataError, match="nowhere: no such folder of runs"):
        results.load_rows(tmp_path / "nowhere")


def test_directories_that_haven_wrote_are_read(tmp_path: Path):
    exp = {"model": "a", "lr": 0.1}
    path = tmp_path / exp_id(exp)
    path.mkdir()
    (path / "exp_dict.json").write_text(json.dumps(exp))
    (path / "score_list.pkl").write_bytes(
        pickle.dumps([{"epoch": 0, "loss": np.float64(0.5)}, {"epoch": 1, "loss": np.float32(0.25)}])
    )
    (row,), warnings = results.load_rows(tmp_path)
    assert warnings == []
    assert (row["state"], row["step"], row["epoch"], row["loss"], row["lr"]) == ("haven", None, 1, 0.25, 0.1)


def test_varying_names_what_differs(tmp_path: Path):
    one, two = experiment(1, 0), experiment(2, 1)
    two["model"]["base"] = {"name": "experiment", "exp_id": "a" * 32}
    for exp in (one, two):
        make(tmp_path, exp, [{"step": 1, "loss": 1.0 + exp["seed"]}])
    rows, _ = results.load_rows(tmp_path)
    assert sorted(results.varying_keys(rows)) == ["model.base.exp_id", "model.base.name", "model.stride", "seed"]
    assert results.varying_keys(rows[:1]) == []
    assert results.varying_keys([]) == []


def with_parent(stride: int, seed: int, parent: str) -> dict:
    exp = experiment(stride, seed)
    exp["model"]["base"] = {"name": "experiment", "exp_id": parent * 32}
    return exp


@pytest.mark.parametrize(
    ("runs", "keys"),
    [
        ([(1, 0, "a"), (1, 1, "b"), (2, 0, "a"), (2, 1, "b")], ["model.stride"]),  # one parent for each seed
        ([(1, 0, "a"), (1, 1, "b"), (2, 0, "c"), (2, 1, "d")], ["model.stride"]),  # and for each stride
        ([(1, 0, "a"), (1, 1, "b")], []),
        ([(1, 0, "a"), (1, 0, "b")], ["model.base.exp_id"]),  # two parents, one seed
        ([(1, 0, "a"), (1, 1, "a"), (1, 0, "b"), (1, 1, "b")], ["model.base.exp_id"]),
        ([(1, 0, "a"), (1, 1, "b"), (1, 2, "b")], ["model.base.exp_id"]),
        ([(1, 0, "a"), (2, 0, "b")], ["model.base.exp_id", "model.stride"]),  # nothing to do with the seed
    ],
)
def test_a_parent_for_each_seed_belongs_to_the_seed(tmp_path: Path, runs: list[tuple[int, int, str]], keys: list[str]):
    for run in runs:
        make(tmp_path, with_parent(*run), [])
    assert sorted(results.distinguishing_keys(results.load_rows(tmp_path)[0])) == keys


def test_means_are_numpys_to_the_last_digits(tmp_path: Path):
    rng = random.Random(0)
    values = {(stride, seed): rng.random() for stride in (1, 2) for seed in range(5)}
    for (stride, seed), loss in values.items():
        make(tmp_path, experiment(stride, seed), [{"step": 10 + seed, "loss": loss}])
    rows, _ = results.load_rows(tmp_path)
    for row in statistics.aggregate(rows, ["model.stride"], ["loss"]):
        of_stride = [v for (stride, _), v in values.items() if stride == row["model.stride"]]
        assert row["loss"] == pytest.approx(np.mean(of_stride), rel=1e-12)
        assert row["loss_std"] == pytest.approx(np.std(of_stride, ddof=1), rel=1e-12)
        assert (row["runs"], row["loss_n"], row["state"], row["step"]) == (5, 5, "done", "10-14")


def test_missing_scores_and_mixed_states_show(tmp_path: Path):
    make(tmp_path, experiment(1, 0), [{"step": 2, "loss": 1.0, "em": 0.5}])
    make(tmp_path, experiment(1, 1), [{"step": 1, "loss": 2.0}], state="failed")
    rows, _ = results.load_rows(tmp_path)
    (row,) = statistics.aggregate(rows, ["model.stride"], ["loss", "em"])
    assert (row["loss"], row["loss_n"], row["loss_std"], row["done"], row["runs"]) == (1.0, 1, None, 1, 2)
    assert row["step"] == 2, "the step of the run in the mean, not of the failed one"
    (row,) = statistics.aggregate(rows, ["model.stride"], ["loss", "em"], include_unfinished=True)
    assert (row["loss"], row["loss_n"], row["loss_std"]) == (1.5, 2, stdev([1.0, 2.0]))
    assert (row["em"], row["em_n"], row["em_std"]) == (0.5, 1, None)
    assert row["state"] in ("1 done, 1 failed", "1 failed, 1 done")
    assert row["step"] == "1-2"


def test_unknown_keys_and_scores_are_named(tmp_path: Path):
    make(tmp_path, experiment(1, 0), [{"step": 1, "loss": 1.0}])
    rows, _ = results.load_rows(tmp_path)
    with pytest.raises(ConfigError, match=r"unknown key 'model\.strid'\. Did you mean 'model\.stride'"):
        statistics.aggregate(rows, ["model.strid"], [])
    with pytest.raises(ConfigError, match=r"unknown score 'los'\. Did you mean 'loss'"):
        statistics.aggregate(rows, [], ["los"])


@pytest.mark.parametrize(
    "name", ["val_loss", "loss", "val_perplexity", "val_bits_per_byte", "ppl", "train.nll", "word_error_rate/wer"]
)
def test_losses_are_best_when_low(name: str):
    assert results.lower_is_better(name)


@pytest.mark.parametrize("name", ["em", "f1", "accuracy", "lossless", "rouge_l"])
def test_other_scores_are_best_when_high(name: str):
    assert not results.lower_is_better(name)


def test_best_first_with_the_missing_last():
    rows = [{"loss": 2.0}, {"loss": None}, {"loss": 1.0}, {}]
    assert results.sort_best_first(rows, "loss") == [{"loss": 1.0}, {"loss": 2.0}, {"loss": None}, {}]
    assert [r.get("loss") for r in results.sort_best_first(rows, "loss", lowest=False)] == [2.0, 1.0, None, None]
    assert [r["em"] for r in results.sort_best_first([{"em": 0}, {"em": 1}], "em")] == [1, 0]


def test_short_names_stay_distinct():
    keys = ["model.stride", "model.base.name", "model.name", "seed", "name"]
    assert results.short_names(keys) == {
        "model.stride": "stride",
        "model.base.name": "base.name",
        "model.name": "model.name",
        "seed": "seed",
        "name": "name",
    }


def grid(runs: Path, strides: tuple[int, ...] = (1, 2), seeds: tuple[int, ...] = (0, 1, 2)) -> list[results.Row]:
    for stride in strides:
        for seed in seeds:
            make(
                runs,
                experiment(stride, seed),
                [{"step": 1, "loss": stride + seed / 10}],
                state="done" if seed else "failed",
            )
    return results.load_rows(runs)[0]


def test_rows_are_chosen_by_an_expression(tmp_path: Path):
    rows = grid(tmp_path)
    assert {row["model.stride"] for row in results.filter_rows(rows, "model.stride > 1 and status == 'done'")} == {2}
    assert len(results.filter_rows(rows, "state == 'failed' or loss < 1.15")) == 3
    assert results.select(tmp_path, "g", "seed == 0")[0] == results.filter_rows(rows, "seed == 0")
    with pytest.raises(ConfigError, match=r"^--where: unknown name 'model\.strid'\. Did you mean 'model\.stride'\?"):
        results.filter_rows(rows, "model.strid > 1")
    with pytest.raises(ConfigError, match=r"^--where: 'seed > 7' .* 6 runs.* seed is [012], [012], [012]\.$"):
        results.select(tmp_path, None, "seed > 7")


def test_a_config_key_status_takes_precedence(tmp_path: Path):
    make(tmp_path, {"recipe": "toy", "status": "mine"}, [])
    rows, _ = results.load_rows(tmp_path)
    assert results.filter_rows(rows, "status == 'mine'") == rows


def test_missing_seeds_are_named(tmp_path: Path):
    grid(tmp_path)
    make(tmp_path, experiment(1, 10), [])
    rows = grid(tmp_path, (3,), (0,))
    assert sorted(statistics.missing_seeds(rows, ["model.stride"])) == [
        "model.stride=2: no run with seed 10; other rows have it.",
        "model.stride=3: no run with seed 1, 2, 10; other rows have it.",
    ]
    assert statistics.missing_seeds(rows, ["model.stride", "seed"]) == []
    assert statistics.missing_seeds(rows[:1], []) == []
    for row in rows:
        row["group"] = str(row["model.stride"])
    assert statistics.missing_seeds(rows, ["group", "model.stride"]) == []


def test_a_pivot_holds_what_aggregate_holds(tmp_path: Path):
    rows = grid(tmp_path, (10, 2), (0, 1))
    make(tmp_path, experiment(3, 5), [{"step": 1, "loss": 0.5}])
    rows, _ = results.load_rows(tmp_path)
    missing = statistics.pivot(rows, "model.stride", "seed", "loss").cells[0][0]
    assert missing is not None
    assert (missing["loss"], missing["runs"]) == (None, 1), "seed 0 failed"
    result = statistics.pivot(rows, "model.stride", "seed", "loss", include_unfinished=True)
    assert (result.rows, result.columns) == ([2, 3, 10], [0, 1, 5])
    assert [[cell and cell["loss"] for cell in line] for line in result.cells] == [
        [2.0, 2.1, None],
        [None, None, 0.5],
        [10.0, 10.1, None],
    ]
    with pytest.raises(ConfigError, match="unknown key 'stride'"):
        statistics.pivot(rows, "stride", "seed", "loss")


def test_rows_have_intervals_and_deviations(tmp_path: Path):
    (row,) = statistics.aggregate(grid(tmp_path, (1,)), [], ["loss"], include_unfinished=True)
    assert row["loss_ci95"] == pytest.approx(4.302652729911275 * row["loss_std"] / 3**0.5, rel=1e-9)
    (alone,) = statistics.aggregate(grid(tmp_path / "other", (1,), (0,)), [], ["loss"], include_unfinished=True)
    assert alone["loss_ci95"] is None


def test_differences_of_experiments_in_a_group_have_short_names():
    experiments = {"a": ("g", experiment(1, 0)), "b": ("g", experiment(1, 1)), "c": ("h", experiment(2, 0))}
    assert results.describe_differences(experiments) == {"a": "seed=0", "b": "seed=1", "c": ""}


def test_configurations_are_ranked_by_the_mean():
    rows: list[Any] = [{"state": "done", "val_loss": value} for value in (0.0, 0.0, 3.0, None)]
    assert statistics.mean([*rows, {"state": "running", "val_loss": 9.0}], "val_loss") == 1.0
    assert statistics.mean(rows[3:], "val_loss") is None
