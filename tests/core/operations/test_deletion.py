"""Deletion of complete runs: chosen ones only, after a confirmation, and never a live run or a parent of a run that
stays."""

import io
import json
import os
import socket
import time
from pathlib import Path

import pytest

from results import clean
from src.files import write_json
from src.launch import submissions
from src.operations import deletion
from src.runs.checkpoints import checkpoints, pins
from src.runs.lease import Lease
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun


def make(runs: Path, seed: int, group: str = "g", parent: Path | None = None, state: str = "done") -> Path:
    exp = {"recipe": "toy", "seed": seed} | (
        {"model": {"name": "experiment", "exp_id": parent.name, "checkpoint": "last"}} if parent else {}
    )
    with RunDir.open(runs, exp, exp, facts={"groups": [group]}) as run:
        run.scores.append({"step": 1, "loss": 1.0})
        checkpoints.folder(run.path, 1).mkdir(parents=True)
        (checkpoints.folder(run.path, 1) / "model.safetensors").write_bytes(b"w" * 1_000_000)
        run.set_status(state, step=1)  # type: ignore[arg-type]
    (runs / "logs").mkdir(exist_ok=True)
    (runs / "logs" / f"{run.exp_id}.out.log").write_text("log")
    return run.path


def answers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_group_is_deleted_after_a_confirmation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    one, other = make(tmp_path, 0), make(tmp_path, 1, group="h")
    for text in ("n\n", "\n", "what?\n"):
        answers(monkeypatch, text)
        assert clean.main([str(tmp_path), "-e", "g", "--delete"]) == 0
        captured = capsys.readouterr()
        assert f"1.0 MB  {one}\n" in captured.out
        assert "1 run," in captured.out
        assert str(other) not in captured.out
        assert one.exists()
    answers(monkeypatch, "y\n")
    assert clean.main([str(tmp_path), "-e", "g", "--delete"]) == 0
    assert "Deleted: 1 run, 1.0 MB." in capsys.readouterr().out
    assert not one.exists()
    assert sorted(os.listdir(tmp_path / "logs")) == [f"{other.name}.out.log"]
    assert other.exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_without_an_answer_nothing_is_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = make(tmp_path, 0)
    answers(monkeypatch, "")
    assert clean.main([str(tmp_path), "-e", "g", "--delete"]) == 1
    assert "--yes" in capsys.readouterr().err
    assert run.exists()


@pytest.mark.parametrize(
    "words", [["--where", "seed == 1"], ["--older-than", "2"], ["ID"], ["--where", "seed < 2", "--older-than", "2"]]
)
def test_runs_are_chosen_by_expression_age_or_id(tmp_path: Path, words: list[str]):
    new, old = make(tmp_path, 0), make(tmp_path, 1)
    past = time.time() - 3 * 86_400
    for path in old.iterdir():
        os.utime(path, (past, past))
    words = [old.name[:10] if word == "ID" else word for word in words]
    assert clean.main([str(tmp_path), *words, "--delete", "--yes"]) == 0
    assert (new.exists(), old.exists()) == (True, False)


def test_runs_that_are_too_young_are_counted_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed in range(3):
        make(tmp_path, seed)
    assert clean.main([str(tmp_path), "--older-than", "2", "--delete", "--yes"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "3 of 3 runs" in line
    assert "--older-than" in line


def test_the_other_groups_of_deleted_runs_are_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make(tmp_path, 0)
    write_json(run / "groups.json", ["g", "paper"])
    make(tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        answers(patch, "n\n")
        assert clean.main([str(tmp_path), "-e", "g", "--delete"]) == 0
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "paper" in text]
    assert line.startswith("1 of 2 runs")


def test_restarted_runs_are_deleted_and_no_run_without_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make(tmp_path, 0)
    exp = json.loads((run / "exp_dict.json").read_text())
    RunDir.open(tmp_path, exp, exp, reset=1).close()
    (tmp_path / f".{'a' * 32}.{'b' * 8}.old").mkdir()
    assert os.listdir(tmp_path / "deleted") == [run.name]
    assert clean.main([str(tmp_path), "--delete", "--yes"]) == 0
    captured = capsys.readouterr()
    assert str(tmp_path / "deleted" / run.name) in captured.out
    assert "no run is chosen" in captured.err
    assert os.listdir(tmp_path / "deleted") == []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert run.exists()
    assert clean.main([str(tmp_path), "--delete", "--yes"]) == 0
    assert "nothing to delete" in capsys.readouterr().out


def test_an_ancestor_of_a_run_that_stays_is_never_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first = make(tmp_path, 0)
    second = make(tmp_path, 1, parent=first)
    third = make(tmp_path, 2, group="kept", parent=second)
    alone = make(tmp_path, 3)
    assert clean.main([str(tmp_path), "-e", "g", "--delete", "--yes"]) == 0
    error = capsys.readouterr().err
    assert [run.exists() for run in (first, second, third, alone)] == [True, True, True, False]
    assert f"{second}: not deleted: {third.name}" in error
    assert f"{first}: not deleted: {second.name}" in error
    assert clean.main([str(tmp_path), "-e", "g", "kept", "--delete", "--yes"]) == 0
    assert not any(run.exists() for run in (first, second, third))


def test_no_run_is_deleted_while_the_parents_of_another_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, damaged_run = make(tmp_path, 0), make(tmp_path, 1)
    (damaged_run / "exp_dict.json").write_text("{")
    assert clean.main([str(tmp_path), "-e", "g", "--delete", "--yes"]) == 0
    assert one.exists()
    assert str(damaged_run) in capsys.readouterr().err
    assert clean.main([str(damaged_run), "--delete", "--yes"]) == 0
    assert clean.main([str(tmp_path), "-e", "g", "--delete", "--yes"]) == 0
    assert not one.exists()
    assert not damaged_run.exists()


def test_a_live_run_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    live, elsewhere, pinned, other = (make(tmp_path, seed) for seed in range(4))
    facts = {"host": socket.gethostname(), "boot_id": "another", "pid": 1, "token": "t", "beat": 1}
    (elsewhere / "lease").write_text(json.dumps(facts))
    exp = json.loads((live / "exp_dict.json").read_text())
    evaluation = Lease.acquire(pinned / "evaluation")
    pins.place(pinned, "evaluation", pins.Pin(holder="evaluation", every=1))
    with RunDir.open(tmp_path, exp, exp):
        assert clean.main([str(tmp_path), "-e", "g", "--delete", "--yes"]) == 0
    evaluation.release()
    assert [run.exists() for run in (live, elsewhere, pinned, other)] == [True, True, True, False]
    error = capsys.readouterr().err
    assert all(f"{run}: not deleted: " in error for run in (live, elsewhere, pinned))


def test_a_run_with_a_job_that_can_still_start_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    waiting, finished = make(tmp_path, 0, state="stopped"), make(tmp_path, 1)
    folder = tmp_path / submissions.FOLDER / "s1"
    folder.mkdir(parents=True)
    (folder / submissions.INTENT).write_text("{")  # which launcher has the job is not known
    for run in (waiting, finished):
        SavedRun(run).write_job("1", "c", "s1")
    assert clean.main([str(tmp_path), "-e", "g", "--delete", "--yes"]) == 0
    assert (waiting.exists(), finished.exists()) == (True, False)
    assert f"{waiting}: not deleted: " in capsys.readouterr().err


def test_a_parent_of_a_child_that_appears_before_the_confirmation_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parent = make(tmp_path, 0)

    def answer() -> str:
        make(tmp_path, 1, group="late", parent=parent)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    assert clean.main([str(tmp_path), "-e", "g", "--delete"]) == 1
    assert parent.exists()


def test_a_directory_of_another_program_stays(tmp_path: Path):
    foreign = tmp_path / ("ab" * 16)
    foreign.mkdir()
    write_json(foreign / "exp_dict.json", {"recipe": "toy"})
    (foreign / "score_list.pkl").write_bytes(b"")
    result = deletion.plan(tmp_path, [foreign], time.time() + 9)
    assert (result.runs, len(result.warnings)) == ([], 1)


def test_a_link_to_a_run_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, disk = make(tmp_path / "runs", 0), tmp_path / "disk"
    run.rename(disk)
    run.symlink_to(disk)
    assert clean.main([str(run.parent), "-e", "g", "--delete", "--yes"]) == 0
    assert (run / "scores.jsonl").exists()
    assert f"{run}: not deleted: it is a link to {disk}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--delete", "--apply"], ["--yes"], ["--delete", "-e", "x"], ["--delete", "--where", "seed =="]]
)
def test_contradictions_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]):
    run = make(tmp_path, 0)
    assert clean.main([str(tmp_path), *words]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert run.exists()
    assert clean.main([str(tmp_path / "none"), "--delete"]) == 1
    assert not (tmp_path / "none").exists()
