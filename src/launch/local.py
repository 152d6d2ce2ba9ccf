"""Runs jobs on this machine as child processes, a few at a time."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pydantic import Field

from src import config as configs
from src.errors import LaunchError
from src.files import writing
from src.launch.command import argv
from src.launch.job import Job

log = logging.getLogger(__name__)
_OF_TORCHRUN = re.compile(r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables that a job must not inherit: it is no rank of the torchrun that this process may run under."""


class Config(configs.Config):
    """Resources of this machine."""

    slots: int = Field(default=1, ge=1)
    """How many jobs run at a time."""
    grace_seconds: float = Field(default=60.0, ge=0)
    """How long a job that was told to stop may take to end before it is killed."""


def submit(config: Config, jobs: Sequence[Job], log_dir: Path) -> list[str]:
    """Run `jobs` and wait for all; returns their process ids, in the same order.

    What a job prints is appended to <log_dir>/<exp_id>.out.log and .err.log. A failing job does not stop
    the others, except those that come `after` it. A job inherits the environment, without what torchrun put there.
    SIGINT, SIGTERM and SIGHUP stop all of them, with everything that they started.

    Raises:
        LaunchError: at the end, naming each job that failed, how it ended and its log.
        RunError: `log_dir` cannot be written; nothing was started.
    """
    with writing(log_dir):
        log_dir.mkdir(parents=True, exist_ok=True)
    crew = _Crew(log_dir, jobs)
    with _signals_raise(), ThreadPoolExecutor(config.slots) as pool:
        try:
            ends = list(pool.map(crew.run, jobs))
        except BaseException:
            crew.stop(config.grace_seconds)
            raise
    failed = [f"{job.exp_id}: {reason}." for job, (_, reason) in zip(jobs, ends, strict=True) if reason]
    if failed:
        raise LaunchError("\n".join([f"{len(failed)} of {len(jobs)} jobs failed:", *failed]))
    return [str(pid) for pid, _ in ends]


class _Crew:
    """The children that run now, each the leader of a process group of its own."""

    def __init__(self, log_dir: Path, jobs: Sequence[Job]) -> None:
        self.log_dir = log_dir
        self.changed = threading.Condition()
        self.children: set[int] = set()
        self.stopped = False
        self.well: dict[str, bool] = {}
        """Ended jobs, True for those that ended well."""
        # Only what stands before a job is waited for: the pool takes jobs in their order, so that cannot wait in a circle.
        self.place = {job.exp_id: place for place, job in enumerate(jobs)}

    def run(self, job: Job) -> tuple[int, str | None]:
        """Run one job to its end, once its turn has come. Gives its process id and, if it failed, how it ended."""
        parents = {exp_id for exp_id in job.after if self.place.get(exp_id, len(self.place)) < self.place[job.exp_id]}
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or parents <= self.well.keys())
            failed = sorted(parent for parent in parents if not self.well.get(parent))
        pid, reason = (0, f"not started, because {failed[0]} did not end well") if failed else self._start(job)
        with self.changed:
            self.children.discard(pid)
            self.well[job.exp_id] = reason is None
            self.changed.notify_all()
        return pid, reason

    def _start(self, job: Job) -> tuple[int, str | None]:
        out_path, err_path = (self.log_dir / f"{job.exp_id}.{stream}.log" for stream in ("out", "err"))
        try:
            with open(out_path, "ab") as out, open(err_path, "ab") as err, self.changed:
                if self.stopped:
                    return 0, "not started"
                child = subprocess.Popen(
                    argv(job), cwd=job.cwd, env=_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
                )
                self.children.add(child.pid)
        except OSError as error:
            return 0, f"could not be started: {error}"
        log.info("%s: started as process %d, writing to %s", job.exp_id, child.pid, err_path)
        code = child.wait()
        log.info("%s: ended with exit code %d", job.exp_id, code)
        return child.pid, f"{_ending(code)}. See {err_path}" if code else None

    def stop(self, grace_seconds: float) -> None:
        """Start nothing more, ask every child to end, and kill those that have not after the grace, or at a second interruption."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
            self._signal(signal.SIGTERM)
            try:
                self.changed.wait_for(lambda: not self.children, timeout=grace_seconds)
            finally:
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt: children in sessions of their own hear neither.

    A signal that is ignored (nohup) stays ignored.
    """

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)}
    here = threading.current_thread() is threading.main_thread()
    replaced = {s: old for s, old in before.items() if here and old is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.fullmatch(name)}


def _ending(code: int) -> str:
    """bash reports a command that was killed by signal n, as the out-of-memory killer does, as exit code 128 + n."""
    number = -code if code < 0 else code - 128
    name = f" ({signal.Signals(number).name})" if number in set(signal.Signals) else ""
    return f"exit code {code}{name}"
