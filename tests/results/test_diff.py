"""The difference of two runs names what differs, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from results import diff
from src.experiments.identity import exp_id
from src.files import new_directory
from src.runs.checkpoints import checkpoints
from src.runs.run_dir import RunDir

FACTS = {
    "commit": "a" * 40,
    "dirty": True,
    "python": "3.11.7",
    "packages": {"torch": "2.6", "numpy": "2.4"},
    "host": "one",
    "command": ["trainval.py", "-e", "g"],
    "pid": 1,
    "time": "now",
}


def make(runs: Path, exp: dict[str, Any], loss: float = 1.0, data: str = "d1", rate: float = 0.5, **facts: Any) -> Path:
    with RunDir.open(runs, exp, exp | {"rate": rate}, facts={**FACTS, **facts}) as run:
        run.scores.append({"step": 1, "loss": loss})
        with new_directory(checkpoints.folder(run.path, 1)) as folder:
            (folder / "state.json").write_text(json.dumps({"inputs": {"train": data, "tokenizer": "t"}}))
        run.set_status("done", step=1)
        return run.path


def experiment(seed: int, **more: Any) -> dict[str, Any]:
    return {"recipe": "toy", "seed": seed, "model": {"name": "m", **more}}


def compare(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    arguments = ["--runs", str(paths[0].parent), "--json"]
    assert diff.main([*(path.name for path in paths), *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)["sections"]


def test_only_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = make(tmp_path, experiment(0, stride=2), diff="+old line\n same\n")
    other = make(
        tmp_path,
        experiment(1, depth=3),
        loss=2.0,
        data="d2",
        rate=0.25,
        commit="b" * 40,
        host="two",
        packages={"torch": "2.7", "numpy": "2.4"},
        command=["trainval.py", "-e", "g", "--steps", "1"],
        diff="+new line\n same\n",
        pid=2,
        time="then",
    )
    assert compare(capsys, one, other) == {
        "experiment": {"model.stride": {"a": 2}, "seed": {"a": 0, "b": 1}, "model.depth": {"b": 3}},
        "config": {"rate": {"a": 0.5, "b": 0.25}},
        "code": {
            "commit": {"a": "a" * 40, "b": "b" * 40},
            "diff.patch": {"a": ["+old line", " same"], "b": ["+new line", " same"]},
        },
        "environment": {
            "host": {"a": "one", "b": "two"},
            "packages.torch": {"a": "2.6", "b": "2.7"},
            "command": {"a": FACTS["command"], "b": [*FACTS["command"], "--steps", "1"]},
        },
        "data": {"train": {"a": "d1", "b": "d2"}},
        "scores": {"loss": {"a": 1.0, "b": 2.0}},
    }
    assert diff.main([one.name[:8], other.name[:8], "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for line in (
        "    seed: 0 -> 1",
        "    model.depth: absent -> 3",
        "    -+old line",
        "    ++new line",
        '    train: "d1" -> "d2"',
    ):
        assert f"{line}\n" in text
    assert "numpy" not in text


def test_nothing_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = make(tmp_path, experiment(0))
    assert compare(capsys, one, one) == {}
    assert diff.main([one.name, one.name, "--runs", str(tmp_path)]) == 0
    assert "nothing differs" in capsys.readouterr().out


def test_unreadable_files_are_named_and_the_rest_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, other = make(tmp_path, experiment(0)), make(tmp_path, experiment(1))
    (other / "env.json").write_text("{")
    (one / "config.json").write_text("3")
    (one / "scores.jsonl").write_text("oops\n")
    (checkpoints.folder(other, 1) / "state.json").unlink()
    assert diff.main([one.name, other.name, "--runs", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["sections"]["experiment"] == {"seed": {"a": 0, "b": 1}}
    for message in (
        "config.json: expected a dict, got int.",
        "code not compared: ",
        "env.json:1: not valid JSON",
        "scores not compared: ",
        "data not compared: ",
        "no checkpoint is left",
    ):
        assert message in captured.err


def test_ids_can_be_short_but_not_ambiguous(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = {}
    number = 0
    while len(runs) < 17:  # two of 17 begin with the same digit
        runs[exp_id(experiment(number))] = (tmp_path / exp_id(experiment(number))).mkdir()
        number += 1
    first = next(digit for digit in "0123456789abcdef" if sum(name.startswith(digit) for name in runs) > 1)
    both = sorted(name for name in runs if name.startswith(first))
    for start, values in [
        (first, [f"{first}: ", str(len(both)), ", ".join(both[:3])]),
        ("f" * 31, [str(tmp_path), "f" * 31]),
        ("../x", ["../x"]),
        ("", ["''"]),
        (f"{tmp_path}/none/{both[0][:6]}", [f"{tmp_path}/none/{both[0][:6]}: "]),
        (f"{tmp_path}/{'f' * 31}", [f"{tmp_path}/{'f' * 31}: "]),
    ]:
        assert diff.main([start, both[0], "--runs", str(tmp_path)]) == 1
        captured = capsys.readouterr().err
        assert captured.count("\n") == 1
        assert all(value in captured for value in values), captured
    assert diff.main(["a", "b", "--runs", str(tmp_path / "none")]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_runs_of_different_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, other = make(tmp_path / "a", experiment(0)), make(tmp_path / "b", experiment(1))
    file = tmp_path / "diff.json"
    for words in ([str(one), str(other)], [f"{one.parent}/{one.name[:6]}", f"{other.parent}/{other.name[:4]}"]):
        assert diff.main([*words, "--json", "-o", str(file)]) == 0
        assert json.loads(capsys.readouterr().out)["path"] == str(file)
        assert json.loads(file.read_text())["sections"]["experiment"] == {"seed": {"a": 0, "b": 1}}
    assert diff.main([f"{one.parent}/{one.name[:6]}", f"{other.parent}/{one.name}"]) == 1
    assert f"{other.parent}/{one.name}: " in capsys.readouterr().err


def test_two_runs_chosen_by_an_expression(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed in range(3):
        make(tmp_path, experiment(seed))
    assert diff.main([str(tmp_path), "--where", "seed in [0, 2]", "--json"]) == 0
    assert {*json.loads(capsys.readouterr().out)["sections"]["experiment"]["seed"].values()} == {0, 2}
    assert diff.main([str(tmp_path)]) == 1
    assert "got 3" in capsys.readouterr().err
