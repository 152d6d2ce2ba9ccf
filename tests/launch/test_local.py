"""Jobs on this machine: slots, logs, failures, interruptions. Real processes throughout."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from src.errors import LaunchError, RunError
from src.launch.command import Job
from src.launch.local import Config, submit

ROOT = Path(__file__).resolve().parents[2]


def job(name: str, code: str, cwd: Path) -> Job:
    return Job(name, ("-c", textwrap.dedent(code)), cwd)


def test_each_job_has_its_logs_and_its_folder(tmp_path: Path):
    logs = tmp_path / "deep" / "logs"
    code = "import os, sys; print(os.getcwd()); print('warned', file=sys.stderr)"
    ids = submit(Config(), [job("a", code, tmp_path), job("b", code, Path("/"))], logs)
    assert (logs / "a.out.log").read_text() == f"{tmp_path}\n"
    assert (logs / "b.out.log").read_text() == "/\n"
    assert (logs / "a.err.log").read_text() == "warned\n"
    assert len(set(ids)) == 2
    assert all(int(i) > 1 for i in ids)


def test_a_job_is_no_rank_of_the_torchrun_around_the_launcher(tmp_path: Path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "RANKED", "MY_RANK"):
        monkeypatch.setenv(name, "kept")
    code = "import os; print(*sorted(n for n, v in os.environ.items() if v == 'kept' or 'RANK' in n or 'WORLD' in n or 'ROLE' in n))"
    submit(Config(), [job("a", code, tmp_path)], tmp_path)
    assert (tmp_path / "a.out.log").read_text() == "MY_RANK RANKED\n"
    assert os.environ["RANK"] == "1"


def test_logs_are_appended(tmp_path: Path):
    for word in ("first", "second"):
        submit(Config(), [job("a", f"print('{word}')", tmp_path)], tmp_path)
    assert (tmp_path / "a.out.log").read_text() == "first\nsecond\n"


def test_no_jobs_no_work(tmp_path: Path):
    assert submit(Config(), [], tmp_path / "logs") == []


def test_one_failure_does_not_stop_the_others(tmp_path: Path):
    jobs = [
        job("good", "print('done')", tmp_path),
        job("bad", "raise SystemExit(3)", tmp_path),
        job("worse", "import os; os.kill(os.getpid(), 9)", tmp_path),
        job("late", "print('done')", tmp_path),
        job("nowhere", "pass", tmp_path / "missing"),
    ]
    message = (
        r"^3 of 5 jobs failed:\nbad: exit code 3\. See .*/bad\.err\.log\."
        r"\nworse: exit code 137 \(SIGKILL\)\. .*\nnowhere: could not be started: .*missing"
    )
    with pytest.raises(LaunchError, match=message):
        submit(Config(slots=2), jobs, tmp_path / "logs")
    assert (tmp_path / "logs" / "late.out.log").read_text() == "done\n"


def test_as_many_run_at_a_time_as_there_are_slots(tmp_path: Path):
    """With two slots two jobs can meet, each waiting for the other; no third may be there."""
    code = """
        import os, sys, time
        from pathlib import Path
        me, room = sys.argv[1], Path("room")
        (room / me).touch()
        seen = 1
        end = time.monotonic() + 20
        while seen < 2 and time.monotonic() < end:
            seen = max(seen, len(list(room.iterdir())))
        time.sleep(0.2)
        seen = max(seen, len(list(room.iterdir())))
        (room / me).rename(f"left-{me}")
        print(seen)
    """
    (tmp_path / "room").mkdir()
    jobs = [Job(n, ("-c", textwrap.dedent(code), n), tmp_path) for n in "abcd"]
    submit(Config(slots=2), jobs, tmp_path / "logs")
    assert {(tmp_path / "logs" / f"{n}.out.log").read_text() for n in "ab"} == {"2\n"}
    assert max(int((tmp_path / "logs" / f"{n}.out.log").read_text()) for n in "abcd") == 2


def test_one_slot_runs_in_the_order_given(tmp_path: Path):
    code = "import sys; open('order', 'a').write(sys.argv[1])"
    submit(Config(), [Job(n, ("-c", code, n), tmp_path) for n in "dacb"], tmp_path / "logs")
    assert (tmp_path / "order").read_text() == "dacb"


def test_a_child_waits_for_its_parent(tmp_path: Path):
    """Three slots are free, yet the child starts only when the parent has written its file, and the orphan not at all."""
    late = "import time; time.sleep(0.3); open('weights', 'w').close()"
    jobs = [
        job("parent", late, tmp_path),
        job("bad", "raise SystemExit(1)", tmp_path),
        Job("child", ("-c", "open('weights')"), tmp_path, after=("parent", "done long ago")),
        Job("orphan", ("-c", "open('orphan', 'w')"), tmp_path, after=("parent", "bad")),
        Job("grandchild", ("-c", ""), tmp_path, after=("orphan",)),
        Job("first", ("-c", ""), tmp_path, after=("second",)),
        Job("second", ("-c", ""), tmp_path),
    ]
    with pytest.raises(LaunchError) as caught:
        submit(Config(slots=3), jobs, tmp_path / "logs")
    assert re.sub(r" See .*", "", str(caught.value)).splitlines() == [
        "3 of 7 jobs failed:",
        "bad: exit code 1.",
        "orphan: not started, because bad did not end well.",
        "grandchild: not started, because orphan did not end well.",
    ]
    assert not (tmp_path / "orphan").exists()


def test_a_log_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/logs: cannot write: Not a directory"):
        submit(Config(), [job("a", "pass", tmp_path)], tmp_path / "file" / "logs")


PARENT = """
    import logging, signal, sys
    from pathlib import Path
    from src.launch.command import Job
    from src.launch.local import Config, submit
    here = Path(sys.argv[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background has it ignored
    submit(Config(slots=2, grace_seconds=float(sys.argv[3])), [Job(n, (sys.argv[2], n), here) for n in "abc"], here / "logs")
"""
WELL_BEHAVED = """
    import os, signal, subprocess, sys, time
    from pathlib import Path
    def save(*_):
        time.sleep(0.3)
        Path(sys.argv[1] + ".saved").touch()
        raise SystemExit(143)
    signal.signal(signal.SIGTERM, save)
    Path(sys.argv[1] + ".job").write_text(str(os.getpid()))
    helper = subprocess.Popen(["sleep", "300"])
    Path(sys.argv[1] + ".tmp").write_text(str(helper.pid))
    Path(sys.argv[1] + ".tmp").rename(sys.argv[1] + ".pid")
    time.sleep(300)
"""
DEAF = WELL_BEHAVED.replace("raise SystemExit(143)", "").replace(".saved", ".heard")


def interrupt(tmp_path: Path, child: str, number: signal.Signals, grace: float, twice: bool = False) -> int:
    """Start the launcher in a process of its own, send it a signal once two jobs run, and give its exit code.

    `twice`: send it again once both jobs have heard of the first one.
    """
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(child))
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), tmp_path, script, str(grace)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: all((tmp_path / f"{n}.pid").exists() for n in "ab"))
        parent.send_signal(number)
        if twice:
            wait_until(lambda: all((tmp_path / f"{n}.heard").exists() for n in "ab"))
            parent.send_signal(number)
        return parent.wait(timeout=30)
    finally:
        parent.kill()
        parent.wait()


def wait_until(happened) -> None:
    end = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < end, "waited 30 seconds in vain"
        time.sleep(0.02)


def gone(pid_file: Path) -> bool:
    """True once the process has ended; a zombie that nobody has reaped yet has ended too."""
    stat = Path("/proc", pid_file.read_text(), "stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -2)])
def test_an_interruption_lets_children_save_and_leaves_none_behind(tmp_path: Path, number: signal.Signals, code: int):
    assert interrupt(tmp_path, WELL_BEHAVED, number, grace=20) == code
    assert (tmp_path / "a.saved").exists()
    assert (tmp_path / "b.saved").exists()
    assert not (tmp_path / "c.pid").exists()
    wait_until(lambda: all(gone(tmp_path / f"{n}.{who}") for n in "ab" for who in ("pid", "job")))


def test_a_deaf_child_is_killed_after_the_grace(tmp_path: Path):
    assert interrupt(tmp_path, DEAF, signal.SIGTERM, grace=0.6) == 143
    wait_until(lambda: all(gone(tmp_path / f"{n}.job") for n in "ab"))


def test_a_second_interruption_does_not_wait(tmp_path: Path):
    assert interrupt(tmp_path, DEAF, signal.SIGTERM, grace=300, twice=True) == 143
    wait_until(lambda: all(gone(tmp_path / f"{n}.job") for n in "ab"))


def test_the_signal_handlers_of_the_caller_come_back(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    submit(Config(), [job("a", f"import os; os.kill({os.getpid()}, 0)", tmp_path)], tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
