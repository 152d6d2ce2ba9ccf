"""The command that deletes: dry first, by rule, and never code that a job may still run from."""

import json
import os
import time
from pathlib import Path

import pytest

from results import clean
from src.files import new_directory, write_json
from src.launch import submissions
from src.runs.checkpoints import checkpoints, retention
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun


def make(runs: Path, seed: int, state: str = "done", group: str = "g") -> Path:
    exp = {"recipe": "toy", "seed": seed}
    with RunDir.open(runs, exp, exp, facts={"groups": [group]}) as run:
        for step in (1, 2, 3):
            with new_directory(checkpoints.folder(run.path, step)) as folder:
                (folder / "model.safetensors").write_bytes(b"w" * 1_000_000)
        checkpoints.mark_best(run.path, 1)
        run.set_status(state, step=3)  # type: ignore[arg-type]
        return run.path


def steps(run: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.list_all(run)]


def test_a_dry_run_deletes_nothing_and_says_what_would_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make(tmp_path, 0)
    before = sorted(path for path in tmp_path.rglob("*") if not path.name.startswith("index.sqlite"))
    assert clean.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"1.0 MB  {checkpoints.folder(run, 2)}\n" in out
    assert "Would go: 1 folders, 1.0 MB. Nothing was deleted; add --apply." in out
    assert sorted(path for path in tmp_path.rglob("*") if not path.name.startswith("index.sqlite")) == before


def test_apply_deletes_by_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, other, failed = make(tmp_path, 0), make(tmp_path, 1, group="h"), make(tmp_path, 2, "failed")
    assert clean.main([str(tmp_path), "-e", "g", "--where", "state == 'done'", "--no-keep-best", "--apply"]) == 0
    assert [steps(run) for run in (one, other, failed)] == [[3], [1, 2, 3], [1, 2, 3]]
    assert "Deleted: 2 folders, 2.0 MB." in capsys.readouterr().out
    assert clean.main([str(tmp_path), "--keep-last", "0", "--no-keep-best", "--older-than", "1", "--apply"]) == 0
    assert [steps(run) for run in (one, other, failed)] == [[3], [1, 2, 3], [1, 2, 3]], "all are younger than a day"
    assert clean.main([str(tmp_path), "--keep-last", "0", "--no-keep-best", "--apply"]) == 0
    assert [steps(run) for run in (one, other, failed)] == [[], [], [1, 3]]
    assert clean.main([str(tmp_path)]) == 0
    assert "Nothing would go." in capsys.readouterr().out


def test_a_checkpoint_with_a_new_child_stays(tmp_path: Path):
    parent, other = make(tmp_path, 0), make(tmp_path, 1)
    cleanup = clean.look(tmp_path, retention.CleanupRule(keep_last=0, keep_best=False))
    exp = {"recipe": "toy", "seed": 2, "model": {"name": "experiment", "exp_id": parent.name, "checkpoint": "best"}}
    with RunDir.open(tmp_path, exp, exp):
        (message,) = clean.delete(tmp_path, cleanup)
    assert message.startswith(f"{parent}: another experiment starts from it")
    assert (steps(parent), steps(other)) == ([1, 2, 3], [])


def test_running_and_damaged_runs_are_named_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    live, damaged_run, other = (make(tmp_path, seed) for seed in range(3))
    (damaged_run / "checkpoints" / "best.json").write_text("[]")
    (make(tmp_path, 3) / "exp_dict.json").write_text("{")
    exp = {"recipe": "toy", "seed": 0}
    with RunDir.open(tmp_path, exp, exp):
        assert clean.main([str(tmp_path), "--apply"]) == 0
    assert [steps(run) for run in (live, damaged_run, other)] == [[1, 2, 3], [1, 2, 3], [1, 2, 3]]
    error = capsys.readouterr().err
    assert f"{live}: nothing is deleted: it is running" in error
    assert "best.json: expected" in error
    assert "Its parent is unknown" in error


def submit(runs: Path, name: str, digest: str, experiments: list[str]) -> None:
    intent = {
        "launcher": {"launcher": "local"},
        "job_config": "local",
        "snapshot": digest,
        "experiments": experiments,
        "commands": {},
    }
    (runs / submissions.FOLDER / name).mkdir(parents=True)
    write_json(runs / submissions.FOLDER / name / submissions.INTENT, intent)


def snapshot(runs: Path, digest: str, days_old: float = 3) -> Path:
    folder = runs / clean.SNAPSHOTS / digest
    folder.mkdir(parents=True)
    (folder / "trainval.py").write_text("x")
    os.utime(folder, (time.time() - days_old * 86_400,) * 2)
    return folder


def test_snapshots_that_no_job_runs_from_go(tmp_path: Path):
    done, failed, retried_run = make(tmp_path, 0), make(tmp_path, 1, "failed"), make(tmp_path, 2, "failed")
    for path, name in ((done, "s1"), (failed, "s2"), (retried_run, "s3")):
        SavedRun(path).write_job("1", "c", name)
    submit(tmp_path, "s1", "finished", [done.name])
    submit(tmp_path, "s2", "unfinished", [done.name, failed.name])
    submit(tmp_path, "s0", "overtaken", [retried_run.name])
    submit(tmp_path, "s3", "again", [retried_run.name])
    submit(tmp_path, "s4", "never-started", ["0" * 32])
    for digest in ("finished", "unfinished", "overtaken", "again", "never-started", "unnamed"):
        snapshot(tmp_path, digest)
    snapshot(tmp_path, "new", days_old=0.5)
    assert clean.main([str(tmp_path), "-e", "g", "--apply"]) == 0
    assert len(os.listdir(tmp_path / clean.SNAPSHOTS)) == 7, "not where runs are chosen"
    assert clean.main([str(tmp_path), "--apply"]) == 0
    assert sorted(os.listdir(tmp_path / clean.SNAPSHOTS)) == ["again", "never-started", "new", "unfinished"]


def test_where_a_submission_cannot_be_read_all_snapshots_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make(tmp_path, 0)
    folder = snapshot(tmp_path, "old")
    (tmp_path / submissions.FOLDER / "s1").mkdir(parents=True)
    (tmp_path / submissions.FOLDER / "s1" / submissions.INTENT).write_text("{")
    assert clean.main([str(tmp_path), "--apply"]) == 0
    assert folder.exists()
    assert "All snapshots of code stay." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep-last", "-1"], "--keep-last: expected at least 0, got -1."),
        (["-e", "x"], "unknown group 'x'"),
        (["--where", "seed =="], "--where, character"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    run = make(tmp_path, 0)
    assert clean.main([str(tmp_path), *arguments, "--apply"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert steps(run) == [1, 2, 3]
    assert json.loads((run / "checkpoints" / "best.json").read_text()) == {"step": 1}


def test_a_missing_folder_is_named_and_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert clean.main([str(tmp_path / "none"), "--apply"]) == 1
    assert "none: no such folder of runs" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
