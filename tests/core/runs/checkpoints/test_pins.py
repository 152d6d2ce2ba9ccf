"""Checkpoints that somebody works on: pinned while he is alive, here or elsewhere; neither a training nor a cleaning
deletes them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src.errors import RunError
from src.files import new_directory, write_json
from src.runs.checkpoints import checkpoints, pins, retention
from src.runs.checkpoints.pins import Pin, StalenessProbe
from src.runs.checkpoints.retention import RotationRule
from src.runs.history.journal import manifest_hash
from src.runs.lease import LEASE, Lease, directory_lock
from tests.conftest import ROOT
from tests.core.runs.checkpoints.test_rotation import train

HOLD = """
import sys
from pathlib import Path
from src.runs.lease import Lease
lease = Lease.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def save(run: Path, step: int) -> Path:
    with new_directory(checkpoints.folder(run, step)) as folder:
        (folder / "model.safetensors").write_text(f"weights of {step}")
    return checkpoints.folder(run, step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Done at step 4, with checkpoints 1 to 4."""
    run = tmp_path / ("a" * 32)
    for step in (1, 2, 3, 4):
        save(run, step)
    write_json(run / "status.json", {"state": "done", "step": 4, "attempt": 1})
    return run


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    lease = Lease.acquire(tmp_path / "holder")
    yield lease
    lease.release()


def pinned_steps(run: Path, silence: StalenessProbe | None = None) -> list[int]:
    return sorted(
        checkpoints.step_of(path)
        for path in pins.find_pinned(run, checkpoints.list_all(run), silence or StalenessProbe())
    )


def elsewhere(folder: Path, beat: int) -> None:
    """The lease of a process on a machine that cannot be asked."""
    facts = {
        "host": "far",
        "boot_id": "other",
        "pid_namespace": "x",
        "pid": 1,
        "started": 1,
        "token": "t",
        "beat": beat,
    }
    write_json(folder / LEASE, facts)


def test_nobody_holds_anything_where_there_are_no_pins(run: Path):
    assert pinned_steps(run) == []


def test_multiples_and_single_ones(run: Path, holder: Lease):
    pins.place(run, "one", Pin("../holder", every=2))
    assert pinned_steps(run) == [2, 4]
    pins.place(run, "other", Pin("../holder", steps={"step-00000001": str(manifest_hash(checkpoints.folder(run, 1)))}))
    assert pinned_steps(run) == [1, 2, 4]
    save(run, 6)
    assert pinned_steps(run) == [1, 2, 4, 6], "those to come among them"
    pins.remove(run, "one")
    pins.remove(run, "one")
    assert pinned_steps(run) == [1]


def test_another_checkpoint_of_the_same_step_is_another(run: Path, holder: Lease):
    hashes = {"step-00000002": str(manifest_hash(checkpoints.folder(run, 2)))}
    pins.place(run, "ended", Pin("../holder", every=2, finished=hashes))
    assert pinned_steps(run) == [4]
    pins.place(run, "ended", Pin("../holder", steps=hashes))
    assert pinned_steps(run) == [2]
    with new_directory(checkpoints.folder(run, 2)) as folder:
        (folder / "model.safetensors").write_text("of another branch")
    assert pinned_steps(run) == []
    pins.place(run, "ended", Pin("../holder", every=2, finished=hashes))
    assert pinned_steps(run) == [2, 4]


def test_the_holder_of_a_pin_is_named(run: Path, holder: Lease):
    pins.place(run, "one", Pin("../holder", every=4))
    host = json.loads((holder.path / LEASE).read_text())["host"]
    assert pins.find_pinned(run, checkpoints.list_all(run), StalenessProbe()) == {
        checkpoints.folder(run, 4): f"{run / 'pins/one.json'}, for {host}"
    }


def test_the_dead_hold_nothing(run: Path, tmp_path: Path):
    pins.place(run, "one", Pin("../holder", every=2))
    assert pinned_steps(run) == [], "nobody has taken the lease"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "holder")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    silence = StalenessProbe(stale_seconds=0.0)
    process.send_signal(signal.SIGSTOP)
    assert [pinned_steps(run, silence) for _ in range(3)] == [[2, 4]] * 3, (
        "who stands still on this machine is not dead"
    )
    process.kill()
    process.communicate()
    assert (tmp_path / "holder" / LEASE).exists()
    assert pinned_steps(run) == []


def test_one_elsewhere_is_dead_when_he_was_seen_standing_still(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0
    monkeypatch.setattr(pins, "time", SimpleNamespace(monotonic=lambda: now))
    (tmp_path / "holder").mkdir()
    elsewhere(tmp_path / "holder", 0)
    pins.place(run, "one", Pin("../holder", every=2))
    silence = StalenessProbe(stale_seconds=20.0)
    assert pinned_steps(run, silence) == [2, 4]
    for beat in range(1, 6):
        now += 15
        elsewhere(tmp_path / "holder", beat)
        assert pinned_steps(run, silence) == [2, 4]
    now += 19
    assert pinned_steps(run, silence) == [2, 4]
    now += 1
    assert pinned_steps(run, silence) == []
    elsewhere(tmp_path / "holder", 6)
    assert pinned_steps(run, silence) == [2, 4], "he was only asleep"
    assert pinned_steps(run, StalenessProbe()) == [2, 4], "one look tells nothing"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"one\.json:1: not valid JSON"),
        ('{"holder": "x"}', r"one\.json: not a pin: got \{\"holder\": \"x\"\}"),
        ('{"holder": "x", "every": 0, "finished": {}, "steps": {}}', "not a pin"),
        ('{"holder": "x", "every": true, "finished": {}, "steps": {}}', "not a pin"),
        ('{"holder": "x", "every": 1, "finished": {"a": 1}, "steps": {}}', "not a pin"),
        ('{"holder": 1, "every": 1, "finished": {}, "steps": {}}', "not a pin"),
    ],
)
def test_a_damaged_pin_is_named(run: Path, content: str, message: str):
    (run / "pins").mkdir()
    (run / "pins" / "one.json").write_text(content)
    with pytest.raises(
        RunError, match=rf"{message}.*\. Delete it, if nobody evaluates or uploads the checkpoints of this run\."
    ):
        pinned_steps(run)


def test_a_pin_of_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="No such file or directory"):
        pins.place(tmp_path / "gone", "one", Pin("../holder", every=1))


def test_a_pin_waits_for_the_guard(run: Path, holder: Lease):
    script = (
        "import sys; from pathlib import Path; from src.runs.checkpoints.pins import Pin, place; print(1, flush=True); "
    )
    script += "place(Path(sys.argv[1]), 'one', Pin('../holder', every=2))"
    with directory_lock(run):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(run)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        assert pinned_steps(run) == [], "what is looked for under the guard holds for as long"
    assert process.wait(timeout=300) == 0
    process.stdout.close()
    assert pinned_steps(run) == [2, 4]


EVERYTHING = retention.CleanupRule(keep_last=0, keep_best=False)


def test_cleaning_skips_pinned_checkpoints(run: Path, holder: Lease):
    pins.place(run, "one", Pin("../holder", every=2))
    cleanup = retention.plan(run, EVERYTHING, set(), time.time() + 1)
    assert [checkpoints.step_of(path) for path in cleanup.deletable] == [1, 3]
    retention.remove(cleanup)
    cleanup = retention.plan(run, EVERYTHING, set(), time.time() + 1)
    assert (cleanup.deletable, [checkpoints.step_of(path) for path in checkpoints.list_all(run)]) == ((), [2, 4])
    assert cleanup.reason_to_keep.startswith(f"all deletable checkpoints are in use: see {run / 'pins/one.json'}, for ")


def test_a_cleaning_is_called_off_when_something_is_pinned_since_the_look(run: Path, holder: Lease):
    cleanup = retention.plan(run, EVERYTHING, set(), time.time() + 1)
    pins.place(run, "one", Pin("../holder", every=4))
    message = r"step-00000004: pinned meanwhile \(see .*one\.json, for .*\), so nothing in"
    with pytest.raises(RunError, match=message):
        retention.remove(cleanup)
    assert len(checkpoints.list_all(run)) == 4


def test_copies_that_were_set_aside_are_nobodys(run: Path, holder: Lease):
    checkpoints.set_aside_newer(run, 3)
    pins.place(run, "one", Pin("../holder", every=4))
    assert len(retention.plan(run, EVERYTHING, set(), time.time() + 1).deletable) == 4


def test_rotation_skips_pinned_checkpoints_until_the_holder_ends(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    holder = Lease.acquire(tmp_path / "holder")
    try:
        pins.place(run, "one", Pin("../holder", every=4))
        assert train(run, dict.fromkeys(range(1, 11), 0.0), RotationRule(last=1)) == [2, 4, 8, 10]
        pins.place(
            run,
            "one",
            Pin("../holder", every=4, finished={"step-00000004": str(manifest_hash(checkpoints.folder(run, 4)))}),
        )
        assert train(run, {11: 0.0}, RotationRule(last=1)) == [8, 11]
    finally:
        holder.release()
    assert train(run, {12: 0.0}, RotationRule(last=1)) == [12]


def test_rotation_deletes_nothing_if_a_pin_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "one.json").write_text("[]")
    assert train(tmp_path, dict.fromkeys((1, 3, 5), 0.0), RotationRule()) == [1, 3, 5]
    assert (
        "one.json: not a pin: got []. Delete it, if nobody evaluates or uploads the checkpoints of this run. Until this"
        in caplog.text
    )
