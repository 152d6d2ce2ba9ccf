"""Going back in a run and back again, on save directories as a training leaves them; killed at every change of the
disk."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results import lineage
from src.experiments.identity import exp_id
from src.files import new_directory, write_json
from src.operations import interventions
from src.runs import ledger
from src.runs.checkpoints import checkpoints, retention
from src.runs.checkpoints.retention import Rotation, RotationRule
from src.runs.history import branches, journal
from src.runs.lease import Lease
from src.runs.run_dir import RunDir
from src.runs.scores import read_score_list
from tests.conftest import ROOT

EXP = {"recipe": "toy", "seed": 1}


def save(run: Path, step: int, words: str, best: int | None = None) -> None:
    with new_directory(checkpoints.folder(run, step)) as folder:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocabulary").write_text("a b c")
        (folder / "model.safetensors").write_text(f"{words} at {step}")
        (folder / "state.json").write_text(json.dumps({"step": step, "selection": {"best_step": best}}))


def train(run: Path, first: int, last: int, words: str = "weights") -> None:
    """What steps after `first` to `last` leave in a run: a row and a checkpoint each 10 steps, the best at 20."""
    with RunDir.open(run.parent, EXP, EXP) as directory:
        for step in range(first + 10, last + 10, 10):
            directory.scores.append({"step": step, "train_loss": 1 / step})
            with open(run / "perf.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "tokens_per_second": 5.0}) + "\n")
            with open(run / "evaluations.jsonl", "a", encoding="utf-8") as file:
                file.write(
                    json.dumps(
                        {"model_name_or_path": f"{run}/checkpoints/step-{step:08d}", "score": words, "task": "é"}
                    )
                    + "\n"
                )
            save(run, step, words, best=20 if step >= 20 else None)
            if step == 20:
                checkpoints.mark_best(run, 20)
        directory.scores.export_haven()
        directory.set_status("stopped", step=last, steps=100, loss=1 / last, reason="SIGTERM")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / exp_id(EXP)
    train(path, 0, 50)
    return path


def tell(run: Path, *arguments: str) -> int:
    """The command, on this run."""
    command, *others = arguments
    return interventions.main([command, str(run), *others])


def state(run: Path) -> dict[str, str]:
    """Hashes of all that a training reads or a person looks at."""
    left_out = ("abandoned/", "attempts/", "lease", ledger.FILE, "env.json")
    files = {str(path.relative_to(run)): path for path in sorted(run.rglob("*")) if path.is_file()}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        if not name.startswith(left_out)
    }


def steps(folder: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in sorted(folder.glob("step-*"))]


def rows(path: Path) -> list[int]:
    return [journal.step_of(line) or -1 for line in path.read_bytes().splitlines()]


def test_a_rewind_to_before_the_start_of_a_child_is_refused(run: Path, capsys: pytest.CaptureFixture[str]):
    retention.mark_continued(run, 40)
    before = state(run)
    assert tell(run, "rewind", "--to", "30") == 1
    assert "continued.json: " in (message := capsys.readouterr().err)
    assert "step 40" in message
    assert state(run) == before
    assert tell(run, "rewind", "--to", "40") == 0


def test_a_rewind_puts_everything_after_the_step_aside(run: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        tell(run, "rewind", "--to", "30", "--data", "skip:5", "--lr", "x0.75", "--reset-optimizer", "--why", "spike")
        == 0
    )
    aside = run / "abandoned" / "branch-1"
    assert (steps(run / "checkpoints"), steps(aside / "checkpoints")) == ([10, 20, 30], [40, 50])
    for name in ("scores.jsonl", "perf.jsonl", "evaluations.jsonl"):
        assert (rows(run / name), rows(aside / name)) == ([10, 20, 30], [40, 50]), name
    assert [row["step"] for row in read_score_list(run / "score_list.pkl")] == [10, 20, 30]
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"], status["attempt"]) == ("stopped", 30, 100, 1)
    assert status["reason"] == f"rewound to step 30 by {ledger.user_and_host()} (spike); restart it to resume"
    assert "loss" not in status
    assert checkpoints.best(run) == checkpoints.folder(run, 20)
    (branch,) = branches.read(run)
    assert branch.model_dump(exclude_none=True) == {
        "number": 1,
        "from_step": 30,
        "data": "skip:5",
        "learning_rate": {"factor": 0.75},
        "reset_optimizer": True,
    }
    output = capsys.readouterr().out
    assert "to step 30: 5 steps of data skipped, learning rate x0.75, the optimizer's moments are reset" in output
    assert "step-00000050 -> abandoned/branch-1/checkpoints" in output
    assert not (run / journal.FILE).exists()
    assert not (run / "lease").exists()


def test_the_ledger_records_person_time_reason_and_hashes(run: Path):
    hashes = {
        name: hashlib.sha256((run / "checkpoints" / name / "manifest.json").read_bytes()).hexdigest() for name in NEWER
    }
    later = b"".join((run / "scores.jsonl").read_bytes().splitlines(keepends=True)[3:])
    assert tell(run, "rewind", "--to", "30", "--why", "loss spike at 41") == 0
    (event,) = ledger.read(run)
    assert (event["event"], event["who"], event["why"], event["step"], event["was_at"]) == (
        "rewind",
        ledger.user_and_host(),
        "loss spike at 41",
        30,
        50,
    )
    assert event["moved"] == hashes
    assert event["archived"]["scores.jsonl"] == {"rows": 2, "sha256": hashlib.sha256(later).hexdigest()}
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    assert (event["commit"] or "").rstrip("+") == head


NEWER = ["step-00000040", "step-00000050"]


def test_undo_restores_every_byte(run: Path):
    before = state(run)
    assert tell(run, "rewind", "--to", "30", "--data", "reshuffle", "--new-wandb-run") == 0
    assert state(run) != before
    assert tell(run, "undo") == 0
    assert state(run) == before


def test_undo_archives_later_training(run: Path):
    before = state(run)
    assert tell(run, "rewind", "--to", "30") == 0
    train(run, 30, 60, "others")
    Rotation(run, RotationRule(), "val_loss", "min").rotate(
        60, 20
    )  # retention deletes what was there before the rewind
    assert steps(run / "checkpoints") == [20, 50, 60]
    trained = {name: value for name, value in state(run).items() if "step-" in name and "00020" not in name}
    assert tell(run, "undo") == 0
    assert state(run) == before
    since = run / "abandoned" / "branch-2"
    assert steps(since / "checkpoints") == [50, 60]
    assert {name: value for name, value in state(since).items() if name.startswith("checkpoints/")} == trained
    assert rows(since / "before" / "scores.jsonl") == [10, 20, 30, 40, 50, 60]


def test_two_rewinds_are_undone_one_after_the_other(run: Path, capsys: pytest.CaptureFixture[str]):
    states = [state(run)]
    assert tell(run, "rewind", "--to", "40", "--lr", "x0.5") == 0
    train(run, 40, 60, "others")
    states.append(state(run))
    assert tell(run, "rewind", "--to", "50", "--lr", "x0.5") == 0
    assert [branch.from_step for branch in branches.read(run)] == [40, 50]
    train(run, 50, 70, "again")
    for before in reversed(states):
        assert tell(run, "undo") == 0
        assert state(run) == before
    capsys.readouterr()
    assert tell(run, "undo") == 1
    assert "there is nothing to undo. The last rewind was undone at 20" in capsys.readouterr().err
    assert tell(run, "rewind", "--to", "40", "--data", "reshuffle") == 0
    assert [branch.number for branch in branches.read(run)] == [5], (
        "a number is never given twice, so this is another order"
    )


def test_a_further_rewind_drops_later_branches(run: Path, capsys: pytest.CaptureFixture[str]):
    assert tell(run, "rewind", "--to", "40", "--lr", "x0.5") == 0
    train(run, 40, 60, "others")
    assert tell(run, "rewind", "--to", "40", "--lr", "x0.25") == 0
    assert "branch 1 started here or later, so its changes no longer apply" in capsys.readouterr().out
    assert [(branch.number, branch.from_step) for branch in branches.read(run)] == [(2, 40)]
    assert steps(run / "abandoned" / "branch-1" / "checkpoints") == [50]
    assert steps(run / "abandoned" / "branch-2" / "checkpoints") == [50, 60]


def test_a_dry_run_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*"))
    assert tell(run, "rewind", "--to", "30", "--dry-run") == 0
    output = capsys.readouterr().out
    assert "2 rows of scores.jsonl -> abandoned/branch-1/scores.jsonl" in output
    assert output.endswith("Nothing was changed.\n")
    assert sorted((str(path), path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_a_rewind_to_the_last_step_changes_only_later_steps(run: Path):
    assert tell(run, "rewind", "--to", "50", "--lr", "=1e-4") == 0
    assert steps(run / "checkpoints") == [10, 20, 30, 40, 50]
    assert rows(run / "scores.jsonl") == [10, 20, 30, 40, 50]
    assert len(branches.read(run)) == 1


def test_the_best_is_that_of_the_step_or_none(run: Path, capsys: pytest.CaptureFixture[str]):
    assert tell(run, "rewind", "--to", "10") == 0
    assert checkpoints.best(run) is None
    assert tell(run, "undo") == 0
    assert checkpoints.best(run) == checkpoints.folder(run, 20)
    shutil.rmtree(checkpoints.folder(run, 20))
    assert tell(run, "rewind", "--to", "30") == 0
    assert checkpoints.best(run) is None, "a pointer to nothing would be called damage"
    assert "the best checkpoint at that time, step 20, is missing" in capsys.readouterr().out


def test_a_new_wandb_run_records_its_origin(run: Path, capsys: pytest.CaptureFixture[str]):
    write_json(run / "wandb.json", {"id": "first"})
    assert tell(run, "rewind", "--to", "30") == 0
    assert "without --new-wandb-run, repeated steps are not shown there" in capsys.readouterr().out
    assert tell(run, "undo") == 0
    assert tell(run, "rewind", "--to", "30", "--new-wandb-run") == 0
    wandb_json = json.loads((run / "wandb.json").read_text())
    assert wandb_json == {"id": f"{run.name}-branch-3", "forked_from": {"run": "first", "step": 30}}
    assert tell(run, "undo") == 0
    assert json.loads((run / "wandb.json").read_text()) == {"id": "first"}


def test_a_rollback_changes_only_evaluations(run: Path, capsys: pytest.CaptureFixture[str]):
    path = run / "evaluations.jsonl"
    path.write_bytes(path.read_bytes() + b"{not json\n" + b'{"step": 60, "task": "\xc3\xa9"}\n{"step": 7')
    before = path.read_bytes()
    assert tell(run, "rollback-evals", "--to", "40") == 0
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:4]) + b"{not json\n"
    assert (run / "abandoned/branch-1/evaluations.jsonl").read_bytes().splitlines()[-2:] == before.splitlines()[-2:]
    assert steps(run / "checkpoints") == [10, 20, 30, 40, 50]
    assert tell(run, "rollback-evals", "--to", "40") == 1
    assert "evaluations*.jsonl have no rows after step 40" in capsys.readouterr().err
    assert tell(run, "rollback-evals", "--to", "30") == 0
    assert rows(run / "abandoned/branch-2/evaluations.jsonl") == [40], "the first archive is not overwritten"
    assert [tell(run, "undo"), tell(run, "undo"), tell(run, "undo")] == [0, 0, 1]
    assert path.read_bytes() == before


def test_rows_without_a_step_and_what_happened_stay(run: Path):
    (run / "events.jsonl").write_text('{"step": 45, "event": "node failure"}\n')
    (run / "statistics.jsonl").write_text('{"name": "a"}\n{"name": "b", "step": 30}\n{"name": "b", "step": 31}\n')
    assert tell(run, "rewind", "--to", "30") == 0
    assert (run / "events.jsonl").read_text() == '{"step": 45, "event": "node failure"}\n'
    assert (run / "statistics.jsonl").read_text() == '{"name": "a"}\n{"name": "b", "step": 30}\n'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "35"], "--to 35: no such checkpoint in .*There are: 10, 20, 30, 40, 50"),
        (["--to", "0"], r"--to: expected a step of at least 1, got 0\. To start over"),
        (["--to", "30", "--lr", "0.5"], r"--lr: expected 'x0\.75' .* got '0\.5'"),
        (["--to", "30", "--data", "skip"], r"--data: expected 'same', .* got 'skip'"),
    ],
)
def test_invalid_interventions_change_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    before = state(run)
    for dry in ([], ["--dry-run"]):
        assert tell(run, "rewind", *arguments, *dry) == 1
        capsys.readouterr().err.splitlines()
    with pytest.raises(AssertionError, match=message):
        assert tell(run, "rewind", *arguments) == 0, capsys.readouterr().err
    assert state(run) == before
    assert not (run / "abandoned").exists()
    assert ledger.read(run) == []


def run_refused(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says while it changes nothing."""
    before = state(run)
    capsys.readouterr()
    assert tell(run, *arguments) == 1
    assert state(run) == before
    return capsys.readouterr().err


def test_a_damaged_checkpoint_is_no_place_to_go_back_to(run: Path, capsys: pytest.CaptureFixture[str]):
    (checkpoints.folder(run, 30) / "model.safetensors").write_text("weightz at 30")
    message = run_refused(run, capsys, "rewind", "--to", "30")
    assert "its sha256 is not the one that was written). Choose another step." in message
    (checkpoints.folder(run, 30) / "manifest.json").unlink()
    assert "manifest.json: no such file" in run_refused(run, capsys, "rewind", "--to", "30")


def test_a_damaged_newer_checkpoint_is_put_aside_like_any_other(run: Path):
    (checkpoints.folder(run, 50) / "manifest.json").unlink()
    before = state(run)
    assert tell(run, "rewind", "--to", "40") == 0
    assert steps(run / "abandoned/branch-1/checkpoints") == [50]
    assert tell(run, "undo") == 0
    assert state(run) == before


def test_damaged_scores_are_named_before_anything_is_changed(run: Path, capsys: pytest.CaptureFixture[str]):
    lines = (run / "scores.jsonl").read_bytes().splitlines(keepends=True)
    (run / "scores.jsonl").write_bytes(b"".join([*lines[:2], b"nonsense\n", *lines[3:]]))
    assert "scores.jsonl:3: not a row of scores" in run_refused(run, capsys, "rewind", "--to", "40")
    assert not (run / "abandoned").exists()


def test_a_live_run_is_not_changed(run: Path, capsys: pytest.CaptureFixture[str]):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for arguments in (["rewind", "--to", "30"], ["undo"], ["rollback-evals", "--to", "30"]):
            assert "it trains this experiment now. Wait for it, or stop it." in run_refused(run, capsys, *arguments)
        assert "trains it now. Stop it first." in run_refused(run, capsys, "rewind", "--to", "30", "--dry-run")
    finally:
        holder.communicate("\n", timeout=300)
    assert tell(run, "rewind", "--to", "30") == 0


HOLD = """
import sys
from pathlib import Path
from src.runs.lease import Lease
lease = Lease.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
lease.release()
"""


def test_nothing_to_undo_is_said(run: Path, capsys: pytest.CaptureFixture[str]):
    assert run_refused(run, capsys, "undo") == f"error: {run}: there is nothing to undo.\n"


def test_undo_without_required_files_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]):
    assert tell(run, "rewind", "--to", "30") == 0
    shutil.rmtree(run / "abandoned/branch-1/checkpoints/step-00000040")
    assert "branch-1/checkpoints/step-00000040: missing, so the run cannot be restored" in run_refused(
        run, capsys, "undo"
    )


def test_a_step_of_a_branch_that_was_left_is_found(run: Path, capsys: pytest.CaptureFixture[str]):
    assert tell(run, "rewind", "--to", "30") == 0
    message = run_refused(run, capsys, "rewind", "--to", "50")
    assert "There are: 10, 20, 30." in message
    assert "abandoned/branch-1/checkpoints/step-00000050 is on an abandoned branch: `undo` restores it." in message


def test_a_run_is_found_by_a_prefix_of_its_id(run: Path, capsys: pytest.CaptureFixture[str]):
    runs = str(run.parent)
    assert interventions.main(["rewind", run.name[:6], "--runs", runs, "--to", "30"]) == 0
    assert steps(run / "checkpoints") == [10, 20, 30]
    capsys.readouterr()
    assert interventions.main(["rewind", "zzz", "--runs", runs, "--to", "30"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: zzz: ")
    assert run.name in error
    assert runs in error


def test_the_ledger_is_shown(run: Path, capsys: pytest.CaptureFixture[str]):
    assert tell(run, "rewind", "--to", "30", "--why", "spike") == 0
    capsys.readouterr()
    assert tell(run, "ledger") == 0
    assert capsys.readouterr().out.endswith(f"  rewind step 30  {ledger.user_and_host()} (spike)\n")


CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}


def run_killed(action: Callable[[], Any], run: Path, moment: int) -> bool:
    """Do `action` in a process that is killed just before its change number `moment` of the disk; False where it made
    fewer."""
    child = os.fork()
    if child == 0:
        num_changes = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal num_changes
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if (event in CHANGES or writes) and str(run) in str(arguments[0]):
                num_changes += 1
                if num_changes > moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        with open(os.devnull, "w") as nowhere:
            sys.stdout = sys.stderr = nowhere
            os._exit(action())
    _, exit_status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(exit_status) or os.WEXITSTATUS(exit_status) == 0
    return os.WIFSIGNALED(exit_status)


def content(run: Path) -> dict[str, Any]:
    """All of a run, but for moments, ids of events, and the folder's place."""
    files: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        swept_later = re.fullmatch(r"\.[^/]+\.[0-9a-f]{8}", name)  # by the next start
        if path.is_file() and not swept_later and not name.startswith(("lease", "attempts/")):
            files[name] = path.read_bytes().replace(str(run).encode(), b"")
            if path.name in ("record.json", "status.json", ledger.FILE):
                files[name] = [
                    timeless(line)
                    for line in (path.read_text().splitlines() if name == ledger.FILE else [path.read_text()])
                ]
    return files


def timeless(text: str) -> Any:
    value = json.loads(text)
    undone = {"undone": "then"} if value.get("undone") else {}
    return {
        k: v for k, v in value.items() if k not in ("when", "id", "updated", "undone", "started", "before", "archived")
    } | undone


def copies(source: Path, folder: Path, number: int) -> Path:
    copy = folder / str(number) / source.name
    shutil.copytree(source, copy)
    return copy


def kill_everywhere(run: Path, folder: Path, *arguments: str) -> int:
    """Kill the command before each change of the disk, call it again, and compare; the number of moments."""
    reference = copies(run, folder, 0)
    initial_content = content(reference)
    assert tell(reference, *arguments) == 0
    expected_content = content(reference)
    assert expected_content != initial_content
    moment = 0
    while True:
        one = copies(run, folder, moment + 1)
        if not run_killed(lambda one=one: tell(one, *arguments), one, moment):
            break
        if (one / journal.FILE).exists() or content(
            one
        ) == initial_content:  # else it was over, but for letting go of the lease
            assert tell(one, *arguments) == 0
        assert content(one) == expected_content, f"killed before change {moment}"
        assert not list(one.rglob(".*.linking"))
        shutil.rmtree(one.parent)
        moment += 1
    assert content(one) == expected_content
    return moment


@pytest.fixture
def _without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves what it wrote to the system, synced or not; a hundred times syncing takes minutes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("_without_sync")
@pytest.mark.slow
def test_a_rewind_that_is_killed_anywhere_is_finished_by_the_next_call(tmp_path: Path):
    run = tmp_path / "runs" / exp_id(EXP)
    train(run, 0, 20)
    assert (
        kill_everywhere(
            run, tmp_path / "copies", "rewind", "--to", "10", "--data", "skip:2", "--new-wandb-run", "--why", "x"
        )
        > 40
    )


@pytest.mark.usefixtures("_without_sync")
@pytest.mark.slow
def test_an_undo_that_is_killed_anywhere_is_finished_by_the_next_call(tmp_path: Path):
    run = tmp_path / "runs" / exp_id(EXP)
    train(run, 0, 20)
    before = state(run)
    assert tell(run, "rewind", "--to", "10") == 0
    train(run, 10, 20, "others")
    shutil.rmtree(checkpoints.folder(run, 10))  # as retention does
    assert kill_everywhere(run, tmp_path / "copies", "undo", "--why", "x") > 40
    assert tell(run, "undo") == 0
    assert state(run) == before


def test_the_next_command_first_finishes_an_interrupted_one(run: Path, capsys: pytest.CaptureFixture[str]):
    before = state(run)
    assert run_killed(lambda: tell(run, "rewind", "--to", "30"), run, 30)
    assert (run / journal.FILE).exists()
    assert tell(run, "rewind", "--to", "30", "--dry-run") == 0
    assert "was interrupted: rewind by" in capsys.readouterr().out
    assert tell(run, "undo") == 0
    assert "finished an interrupted rewind to step 30" in capsys.readouterr().out
    assert state(run) == before


def test_a_full_disk_is_finished_later(run: Path, capsys: pytest.CaptureFixture[str]):
    """The folder for what is left cannot be made: the journal waits until it can."""
    (run / "abandoned").write_text("in the way")
    assert tell(run, "rewind", "--to", "30") == 1
    assert "cannot write" in capsys.readouterr().err
    assert steps(run / "checkpoints") == [10, 20, 30, 40, 50]
    (run / "abandoned").unlink()
    assert tell(run, "rewind", "--to", "30") == 0
    assert steps(run / "checkpoints") == [10, 20, 30]
    assert len(ledger.read(run)) == 1


def test_a_lease_that_a_dead_process_left_is_taken_over(run: Path):
    child = os.fork()
    if child == 0:
        Lease.acquire(run)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (run / "lease").exists()
    assert tell(run, "rewind", "--to", "30") == 0


def test_the_next_start_finishes_an_interrupted_command(run: Path):
    assert run_killed(lambda: tell(run, "rewind", "--to", "30"), run, 30)
    with RunDir.open(run.parent, EXP, EXP) as directory:
        assert not (run / journal.FILE).exists()
        assert steps(run / "checkpoints") == [10, 20, 30]
        assert (directory.status()["state"], directory.status()["step"]) == ("running", 30)


def test_rows_added_during_an_unfinished_rewind_are_not_lost(run: Path):
    """Who evaluates checkpoints holds no lease."""
    moment = 30
    while (
        not (run / "abandoned/branch-1/before/evaluations.jsonl").exists()
        or (run / "abandoned/branch-1/evaluations.jsonl").exists()
    ):
        shutil.rmtree(run)
        train(run, 0, 50)
        assert run_killed(lambda at=moment: tell(run, "rewind", "--to", "30"), run, moment)
        moment += 1
    with open(run / "evaluations.jsonl", "ab") as file:
        file.write(b'{"step": 20, "task": "late"}\n{"step": 40, "task": "late"}\n')
    assert tell(run, "rewind", "--to", "30") == 0
    assert rows(run / "evaluations.jsonl") == [10, 20, 30, 20]
    assert rows(run / "abandoned/branch-1/evaluations.jsonl") == [40, 50, 40]


def test_a_checkpoint_that_retention_deletes_meanwhile_stops_nothing(run: Path):
    assert run_killed(lambda: tell(run, "rewind", "--to", "30"), run, 20)
    shutil.rmtree(checkpoints.folder(run, 50))
    shutil.rmtree(checkpoints.folder(run, 20))
    assert tell(run, "rewind", "--to", "30") == 0
    assert steps(run / "checkpoints") == [10, 30]


def test_lineage_shows_where_a_rewound_run_comes_from(run: Path, capsys: pytest.CaptureFixture[str]):
    assert tell(run, "rewind", "--to", "30") == 0
    capsys.readouterr()
    for form in ("table", "tree", "mermaid", "dot"):
        assert lineage.main([str(run.parent), "--format", form]) == 0
        assert "(branch 1 from step 30)" in capsys.readouterr().out
    assert lineage.main([str(run.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["branches"] == [[1, 30]]


def test_undo_brings_back_the_checkpoint_that_a_stop_before_the_first_step_replaced(run: Path):
    before = state(run)
    assert tell(run, "rewind", "--to", "30", "--reset-optimizer") == 0
    save(run, 30, "without moments", best=20)
    assert tell(run, "undo") == 0
    assert state(run) == before
    assert (
        run / "abandoned/branch-2/checkpoints/step-00000030/model.safetensors"
    ).read_text() == "without moments at 30"


def test_numbers_of_deleted_branches_are_not_reused(run: Path):
    assert tell(run, "rewind", "--to", "30", "--data", "reshuffle") == 0
    shutil.rmtree(run / "abandoned")
    assert tell(run, "rewind", "--to", "30", "--data", "reshuffle") == 0
    assert [branch.number for branch in branches.read(run)] == [2]
