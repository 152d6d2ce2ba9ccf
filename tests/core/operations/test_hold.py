"""Holding the job of a run, against a stand-in for Slurm's command; the ledger says who and why."""

import os
from pathlib import Path

import pytest

from src.experiments.identity import exp_id
from src.files import write_json
from src.launch import submissions
from src.operations import interventions
from src.runs import ledger
from src.runs.store import SavedRun

EXP = {"recipe": "toy", "seed": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / exp_id(EXP)
    SavedRun(path).write_exp(EXP, ["g"])
    return path


@pytest.fixture(autouse=True)
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """scontrol on PATH: notes its arguments, a call a line; refuses job 13 as Slurm does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "scontrol"
    command.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$2" != 13 ] && exit 0\n'
        'echo "slurm_suspend error: Invalid job id specified" >&2\nexit 1\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "calls"


def submit(run: Path, job_id: str, launcher: str = "slurm") -> None:
    """As trainval.py -j leaves it."""
    submission = submissions.create(run.parent, {"launcher": launcher}, "j", "", {run.name: ["trainval.py"]})
    submissions.note(submission, {run.name: job_id}, complete=True)


def test_hold_and_release_are_recorded_with_person_and_reason(
    run: Path, calls: Path, capsys: pytest.CaptureFixture[str]
):
    submit(run, "7_3")
    assert interventions.main(["hold", str(run), "--why", "the data moves"]) == 0
    assert capsys.readouterr().out == f"{run}: held job 7_3\n"
    assert interventions.main(["release", str(run)]) == 0
    assert calls.read_text() == "hold 7_3\nrelease 7_3\n"
    hold_event, release_event = ledger.read(run)
    assert (hold_event["event"], hold_event["job"], hold_event["who"], hold_event["why"]) == (
        "hold",
        "7_3",
        ledger.user_and_host(),
        "the data moves",
    )
    assert (release_event["event"], release_event["job"]) == ("release", "7_3")
    assert (
        capsys.readouterr().out
        == f"{run}: released job 7_3, which {ledger.user_and_host()} held since {hold_event['when']} (the data moves)\n"
    )


def test_a_job_that_haven_submitted_is_held(run: Path, calls: Path):
    SavedRun(run).write_job("12", "bash run.sh")
    assert interventions.main(["hold", str(run)]) == 0
    assert calls.read_text() == "hold 12\n"


@pytest.mark.parametrize(
    ("variables", "job_id"),
    [
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "4"}, "12_4"),
    ],
)
def test_a_job_that_was_written_by_hand_is_held(run: Path, calls: Path, variables: dict[str, str], job_id: str):
    write_json(run / "env.json", {"variables": variables})
    assert interventions.main(["hold", str(run)]) == 0
    assert calls.read_text() == f"hold {job_id}\n"


def test_a_refusal_is_reported_and_not_recorded_as_done(run: Path, capsys: pytest.CaptureFixture[str]):
    submit(run, "13")
    assert interventions.main(["hold", str(run)]) == 1
    assert "scontrol: slurm_suspend error: Invalid job id specified" in capsys.readouterr().err
    assert ledger.read(run) == []


def test_without_a_job_there_is_nothing_to_hold(run: Path, calls: Path, capsys: pytest.CaptureFixture[str]):
    assert interventions.main(["hold", str(run)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {run}: it was not submitted")
    assert not calls.exists()


def test_other_launchers_have_no_queue_to_wait_in(run: Path, capsys: pytest.CaptureFixture[str]):
    submit(run, "4", "local")
    assert interventions.main(["hold", str(run)]) == 1
    assert "the launcher 'local' of job 4 cannot hold it." in capsys.readouterr().err


def test_a_submission_that_cannot_be_read_is_named(run: Path, capsys: pytest.CaptureFixture[str]):
    submit(run, "4")
    (file,) = run.parent.glob("submissions/*/submission.json")
    file.write_text(file.read_text().replace('"slurm"', '"slurmm"'))
    assert interventions.main(["release", str(run)]) == 1
    assert f"{file}.launcher: unknown launcher 'slurmm'" in capsys.readouterr().err
