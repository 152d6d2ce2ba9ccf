"""The lock of a save directory, with real processes that race, die, stand still and beat."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from src.errors import RunError
from src.runs.lease import GUARD, LEASE, Lease, directory_lock, holder_of, this_process

ROOT = Path(__file__).resolve().parents[3]
STALE = 0.4

# Reads a folder for each round, tries to lock it, answers, and holds what it won until the next line.
RACER = """
import sys
from pathlib import Path
from src.errors import RunError
from src.runs.lease import Lease
held = None
print("ready", flush=True)
for line in sys.stdin:
    if held:
        held.release()
        held = None
    try:
        held = Lease.acquire(Path(line.strip()), stale_seconds=0.3)
        print("won", flush=True)
    except RunError as error:
        print(error, flush=True)
"""


class Racer:
    """A process that locks what it is told to lock."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RACER],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def tell(self, path: Path) -> None:
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def racers(number: int) -> Iterator[list[Racer]]:
    processes = [Racer() for _ in range(number)]
    try:
        assert [racer.answer() for racer in processes] == ["ready"] * number
        yield processes
    finally:
        for racer in processes:
            racer.end()


def dead_process() -> dict:
    """Facts of a process of this machine that is gone."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return {**this_process(), "pid": child.pid, "started": 1, "token": "dead", "since": "2026-01-01", "beat": 0}


def foreign(beat: int = 0) -> str:
    facts = {"host": "far", "boot_id": "other", "pid_namespace": "x", "pid": 1, "started": 1}
    return json.dumps({**facts, "token": "far", "since": "2026-01-01", "beat": beat})


@pytest.mark.slow
def test_exactly_one_of_eight_racers_wins_every_round(tmp_path: Path):
    with racers(8) as processes:
        dead, elsewhere = json.dumps(dead_process()), foreign()
        for number in range(45):
            path = tmp_path / str(number)
            if number % 3 == 1:  # left behind by a killed process
                path.mkdir()
                (path / LEASE).write_text(dead)
            if number % 15 == 2:  # left behind on another machine
                path.mkdir()
                (path / LEASE).write_text(elsewhere)
            for racer in processes:
                racer.tell(path)
            answers = [racer.answer() for racer in processes]
            assert answers.count("won") == 1, answers
            assert sum("held by process" in answer for answer in answers) == 7


def test_the_refusal_names_the_holder(tmp_path: Path):
    with racers(1) as (owner,):
        owner.tell(tmp_path)
        assert owner.answer() == "won"
        message = (
            rf"{tmp_path}: held by process {owner.process.pid} on host .* since 20.*; it trains .* Wait for it, "
            rf"or stop it"
        )
        with pytest.raises(RunError, match=message):
            Lease.acquire(tmp_path)


def test_a_killed_owner_is_replaced_at_once(tmp_path: Path):
    with racers(1) as (owner,):
        owner.tell(tmp_path)
        assert owner.answer() == "won"
        os.kill(owner.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, owner.process.pid, os.WEXITED | os.WNOWAIT)  # dead, but still in the process table
        start = time.monotonic()
        lease = Lease.acquire(tmp_path, stale_seconds=300)
        assert time.monotonic() - start < 150
        lease.release()


def test_a_stopped_owner_on_this_machine_is_alive(tmp_path: Path):
    with racers(1) as (owner,):
        owner.tell(tmp_path)
        assert owner.answer() == "won"
        os.kill(owner.process.pid, signal.SIGSTOP)
        with pytest.raises(RunError, match="held by process"):
            Lease.acquire(tmp_path, stale_seconds=0.0)
        assert holder_of(tmp_path).is_dead is False


def test_a_recycled_pid_is_not_the_holder(tmp_path: Path):
    (tmp_path / LEASE).write_text(json.dumps({**this_process(), "started": 1, "token": "t", "beat": 0}))
    assert holder_of(tmp_path).is_dead is True
    Lease.acquire(tmp_path).release()


def test_a_silent_foreign_holder_is_replaced_after_the_watch(tmp_path: Path):
    (tmp_path / LEASE).write_text(foreign())
    assert holder_of(tmp_path).is_dead is None
    start = time.monotonic()
    lease = Lease.acquire(tmp_path, stale_seconds=STALE)
    assert time.monotonic() - start >= STALE
    lease.confirm()
    lease.release()


def test_a_foreign_holder_with_a_heartbeat_retains_the_lease(tmp_path: Path):
    (tmp_path / LEASE).write_text(foreign())
    done = threading.Event()

    def beat() -> None:
        number = 0
        while not done.wait(0.02):
            number += 1
            (tmp_path / "new").write_text(foreign(number))
            os.replace(tmp_path / "new", tmp_path / LEASE)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunError, match="held by process 1 on host far"):
            Lease.acquire(tmp_path, stale_seconds=5.0)
    finally:
        done.set()
        thread.join()


def test_another_pid_namespace_or_boot_is_elsewhere(tmp_path: Path):
    for changed in ({"pid_namespace": "pid:[1]"}, {"boot_id": "other"}):
        (tmp_path / LEASE).write_text(json.dumps({**this_process(), **changed, "token": "t", "beat": 0}))
        assert holder_of(tmp_path).is_dead is None


@pytest.mark.parametrize("content", [b"", b'{"pid": 1', b"[]", b"\xff\x00"])
def test_an_unreadable_lease_is_replaced_after_the_watch(tmp_path: Path, content: bytes):
    (tmp_path / LEASE).write_bytes(content)
    start = time.monotonic()
    lease = Lease.acquire(tmp_path, stale_seconds=STALE)
    assert time.monotonic() - start >= STALE
    lease.release()


def test_the_same_process_cannot_hold_it_twice(tmp_path: Path):
    lease = Lease.acquire(tmp_path)
    with pytest.raises(RunError, match=f"held by process {os.getpid()} "):
        Lease.acquire(tmp_path)
    lease.release()
    lease.release()
    assert not (tmp_path / LEASE).exists()
    Lease.acquire(tmp_path).release()


def test_the_heart_beats(tmp_path: Path):
    lease = Lease.acquire(tmp_path, beat_seconds=0.01)
    beats = wait_for(lambda: json.loads((tmp_path / LEASE).read_text())["beat"] >= 3)
    assert beats
    lease.confirm()
    lease.release()


def wait_for(condition, seconds: float = 300) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def test_a_lost_lease_is_noticed_by_the_heart_and_by_confirm(tmp_path: Path):
    lease = Lease.acquire(tmp_path, beat_seconds=0.01)
    foreign_lease = foreign()
    with directory_lock(tmp_path):  # between two beats
        (tmp_path / "new").write_text(foreign_lease)
        os.replace(tmp_path / "new", tmp_path / LEASE)
    # The next beat notices. One that does not puts our lease back.
    assert wait_for(lambda: lease.is_lost or (tmp_path / LEASE).read_text() != foreign_lease)
    assert lease.is_lost
    with pytest.raises(RunError, match=r"no longer holds the lease \(now held by process 1 on host far"):
        lease.confirm()
    assert json.loads((tmp_path / LEASE).read_text())["token"] == "far"
    lease.release()
    assert (tmp_path / LEASE).read_text() == foreign_lease


def test_confirm_notices_without_the_heart(tmp_path: Path):
    lease = Lease.acquire(tmp_path)
    (tmp_path / LEASE).unlink()
    with pytest.raises(RunError, match=r"no longer holds the lease \(deleted\)"):
        lease.confirm()
    lease.release()
    with pytest.raises(RunError, match="was released"):
        lease.confirm()


def test_a_forked_child_does_not_let_go(tmp_path: Path):
    lease = Lease.acquire(tmp_path)
    child = os.fork()
    if child == 0:
        lease.release()
        os._exit(0)
    os.waitpid(child, 0)
    lease.confirm()
    lease.release()
    assert not (tmp_path / LEASE).exists()


def test_moving_the_directory_leaves_the_place_free(tmp_path: Path):
    run, old = tmp_path / "run", tmp_path / "old"
    lease = Lease.acquire(run, beat_seconds=0.01)
    (run / "weights").write_text("w")
    lease.move_directory(old)
    assert (old / "weights").read_text() == "w"
    assert not (old / LEASE).exists()
    other = Lease.acquire(run)
    lease.release()
    other.confirm()
    other.release()
    assert sorted(p.name for p in run.iterdir()) == [GUARD]


def test_the_guard_of_a_directory_that_was_moved_away_is_not_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, flock = tmp_path / "run", fcntl.flock

    def moved_just_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        run.rename(tmp_path / "old")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", moved_just_before)
    with directory_lock(run), open(run / GUARD, "wb") as other, pytest.raises(BlockingIOError):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_removed_directory_is_not_made_again(tmp_path: Path):
    run = tmp_path / "run"
    lease = Lease.acquire(run)
    shutil.rmtree(run)
    with pytest.raises(RunError, match="no longer holds the lease"):
        lease.confirm()
    lease.release()
    assert not run.exists()


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("dangling", r"/dangling: a link to .*/nowhere, which does not exist\. Create it, or remove the link\.$"),
        ("dangling/deeper", r"/dangling: a link to .*/nowhere, which does not exist"),
        ("loop/deeper", r"/loop/deeper/run: cannot write: Too many levels of symbolic links\.$|/loop: a link to "),
        ("n" * 300, r"/run: cannot write: File name too long\.$"),
        ("file", r"/file(/run)?: (cannot write: Not a directory|a file stands)"),
        ("/proc/no_such", r"^/proc/no_such/run: cannot write: No such file or directory\.$"),
    ],
)
def test_a_save_directory_that_cannot_be_made_is_one_line(tmp_path: Path, base: str, message: str):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=message):
        Lease.acquire(tmp_path / base / "run")


def test_a_directory_that_vanishes_each_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("src.runs.lease.GUARD_SECONDS", 0.05)
    monkeypatch.setattr(
        "src.runs.lease._make_directory", lambda path: None
    )  # as if another process moved it away each time
    with pytest.raises(RunError, match=r"/run: cannot create the save directory"):
        Lease.acquire(tmp_path / "run")


@pytest.mark.parametrize(("name", "verb"), [(LEASE, "read"), (GUARD, "write")])
def test_a_folder_where_the_lease_should_be_is_one_line(tmp_path: Path, name: str, verb: str):
    (tmp_path / name).mkdir()
    with pytest.raises(RunError, match=rf"cannot {verb}: Is a directory"):
        Lease.acquire(tmp_path)
