"""What every launcher promises: the life of a job, its end by kill, and that a lost submission is found again."""

import fcntl
import hashlib
import os
import stat
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from src.errors import ConfigError
from src.experiments.config import load
from src.launch.job import Job, LauncherConfig
from src.launch.local import launcher
from src.launch.ray.launcher import Config as RayConfig
from src.launch.slurm import shared_tasks
from src.launch.toolkit.launcher import Config as ToolkitConfig
from src.runs.environment import JOBS_PER_GPU
from tests.core.launch.fakes.fake_ray.server import FakeRay
from tests.core.launch.fakes.fake_slurm.cluster import SOON, Cluster

CODE = """
import os, sys, time
while not os.path.exists("go"):
    time.sleep(0.02)
sys.exit(int(sys.argv[1]))
"""


class World(ABC):
    """A scheduler in which submitted jobs wait until `start`, and run until `finish`."""

    config: LauncherConfig
    unknown: str

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.submission = folder / "submissions" / f"20260101-{folder.name}"  # its name is the test's own
        self.submission.mkdir(parents=True)
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Make `config`."""

    @abstractmethod
    def start(self, ids: Sequence[str]) -> None:
        """Let the queued jobs run."""

    def finish(self, codes: Mapping[str, int]) -> None:
        """Let the running jobs end. codes: the exit code of each, which its command gives by itself where it is a real
        process."""
        (self.folder / "go").touch()

    def close(self) -> None:  # noqa: B027  most leave nothing running
        """Leave nothing running."""

    def job(self, name: str, code: int = 0) -> Job:
        exp_id = hashlib.md5(name.encode()).hexdigest()
        return Job(exp_id, ("-c", CODE, str(code)), self.folder, self.folder / "runs" / exp_id, self.folder / "logs")

    def states(self, ids: Sequence[str]) -> list[str]:
        states = self.config.states(ids)
        return [states[job_id].state for job_id in ids]

    def wait_for(self, ids: Sequence[str], *expected_states: str) -> None:
        end = time.monotonic() + 300
        while (seen := self.states(ids)) != list(expected_states):
            assert time.monotonic() < end, seen
            time.sleep(0.02)


class Local(World):
    """The test holds the only slots until `start`."""

    unknown = "gone.0"

    def open(self) -> None:
        self.config = launcher.Config(submissions=str(self.submission.parent), slots=2, grace_seconds=300.0)
        (self.submission.parent / "slots").mkdir()
        self.slots = [os.open(self.submission.parent / "slots" / f"slot-{n}", os.O_RDWR | os.O_CREAT) for n in range(2)]
        for slot in self.slots:
            fcntl.flock(slot, fcntl.LOCK_EX)

    def start(self, ids: Sequence[str]) -> None:
        while self.slots:
            os.close(self.slots.pop())

    def close(self) -> None:
        self.start(())
        self.config.kill([f"{self.submission.name}.{index}" for index in range(2)])


class Slurm(World):
    unknown = "4711_0"
    config = SOON

    def open(self) -> None:
        self.cluster = Cluster(self.folder / "slurm", self.monkeypatch)

    def start(self, ids: Sequence[str]) -> None:
        for job_id in ids:
            self.cluster.set(job_id, state="RUNNING", node="n1")

    def finish(self, codes: Mapping[str, int]) -> None:
        for job_id, code in codes.items():
            self.cluster.set(job_id, state="FAILED" if code else "COMPLETED", exit=f"{code}:0")


class SharedSlurm(Slurm):
    """Both experiments in one task, whose script runs them."""

    unknown = "4711_0+1of2"

    def open(self) -> None:
        super().open()
        self.config = SOON.model_copy(update={"jobs_per_task": 2, "submissions": str(self.submission.parent)})

    def start(self, ids: Sequence[str]) -> None:
        assert [shared_tasks.task_of(job_id) for job_id in ids] == ["1_0", "1_0"]
        self.cluster.start("1_0")

    def finish(self, codes: Mapping[str, int]) -> None:
        World.finish(self, codes)

    def states(self, ids: Sequence[str]) -> list[str]:
        self.cluster.reap()
        return super().states(ids)

    def close(self) -> None:
        self.cluster.close()


class Toolkit(World):
    """The emulator keeps jobs queued until the test runs them."""

    unknown = "0-gone"

    def open(self) -> None:
        self.monkeypatch.setenv("FAKE_TOOLKIT_HOLD", "1")
        raw = {"account": "a", "image": "b:1", "data": [f"a:{self.folder}"], "max_run_seconds": 3600}
        self.config = load(ToolkitConfig, raw | {"backoff_seconds": 0.01}, "toolkit")
        self.runners: list[subprocess.Popen[bytes]] = []

    def start(self, ids: Sequence[str]) -> None:
        import eai_toolkit_client as client  # pyright: ignore[reportMissingImports]

        self.runners += [client.jobs.start(job_id) for job_id in ids]

    def close(self) -> None:
        self.finish({})
        for runner in self.runners:
            runner.wait(300)


class Ray(World):
    unknown = "gone.0"

    def open(self) -> None:
        self.cluster = FakeRay()
        self.config = RayConfig(
            address=self.cluster.address, submissions=str(self.submission.parent), patience_seconds=300.0
        )

    def start(self, ids: Sequence[str]) -> None:
        self.cluster.release()

    def close(self) -> None:
        self.cluster.close()


@pytest.fixture(params=[Local, Slurm, SharedSlurm, Toolkit, Ray])
def world(
    request: pytest.FixtureRequest, client: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    kind: Callable[[Path, pytest.MonkeyPatch], World] = request.param
    world = kind(tmp_path, monkeypatch)
    yield world
    world.close()


def test_the_life_of_a_job(world: World):
    jobs, noted_ids = [world.job("good"), world.job("bad", 3)], dict[str, str]()
    ids = world.config.submit(jobs, world.submission, noted_ids.update)
    assert noted_ids == dict(zip([job.exp_id for job in jobs], ids, strict=True))
    assert world.states(ids) == ["queued", "queued"]
    world.start(ids)
    world.wait_for(ids, "running", "running")
    world.finish(dict(zip(ids, (0, 3), strict=True)))
    world.wait_for(ids, "completed", "failed")
    assert world.config.states(ids)[ids[1]].reason.partition(".")[0] in ("exit code 3", ""), (
        "a listing of the toolkit has no codes"
    )
    world.config.kill(ids)  # what has ended stays as it is
    assert world.states(ids) == ["completed", "failed"]


@pytest.mark.slow
@pytest.mark.parametrize("running", [False, True])
def test_a_killed_job_is_cancelled_once_and_for_all(world: World, running: bool):
    ids = world.config.submit([world.job("a"), world.job("b")], world.submission, lambda _: None)
    if running:
        world.start(ids)
        world.wait_for(ids, "running", "running")
    world.config.kill([ids[0], world.unknown])
    world.wait_for(ids, "cancelled", "running" if running else "queued")
    world.config.kill(ids)
    world.config.kill(ids)
    world.wait_for(ids, "cancelled", "cancelled")
    assert world.states(ids) == ["cancelled", "cancelled"], "for all"


class PowerCut(BaseException):
    """The submitter is gone between the submission and the note."""


def test_jobs_of_a_lost_submission_are_found(world: World):
    lost_ids: dict[str, str] = {}

    def note(ids: Mapping[str, str]) -> NoReturn:
        lost_ids.update(ids)
        raise PowerCut

    exp_ids = [world.job(name).exp_id for name in "ab"]
    with pytest.raises(PowerCut):
        world.config.submit([world.job(name) for name in "ab"], world.submission, note)
    found_ids = world.config.find(world.submission, [*exp_ids, "f" * 32])
    assert lost_ids.items() <= found_ids.items()
    assert set(found_ids) <= set(exp_ids)
    assert set(world.states(list(found_ids.values()))) == {"queued"}
    assert world.config.find(world.submission, exp_ids[:1]).keys() <= {exp_ids[0]}
    assert world.config.find(world.submission.parent / "other", exp_ids) == {}
    world.config.kill(list(found_ids.values()))
    assert world.config.find(world.submission, exp_ids) == found_ids


def test_files_of_a_submission_are_private(world: World):
    """Scripts and queues hold the variables of jobs."""
    world.config.submit([world.job("a")], world.submission, lambda _: None)
    written_files = [
        path for path in world.submission.iterdir() if path.is_file() and path.suffix != ".lock" and path.stat().st_size
    ]
    assert written_files
    assert {stat.filemode(path.stat().st_mode) for path in written_files} == {"-rw-------"}


BEGINNINGS = [
    "hf_",
    "sk-",
    "ghp_",
    "gho_",
    "ghs_",
    "github_pat_",
    "glpat-",
    "npm_",
    "AKIA",
    "ASIA",
    "AIza",
    "xoxa-",
    "xoxb-",
    "xoxp-",
]
KEYS = [
    *(("A", f"{begin}xyzzy-xyzzy_xyzzy") for begin in BEGINNINGS),
    *(("A", key) for key in ("-----BEGIN RSA PRIVATE KEY-----", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2ln")),
    *(("A", "redis://:xyzzy@host"), ("PROXY", "http://me:xyzzy@host"), ("TOKEN", "1234567")),
    *((name, "xyzzy-xyzzy") for name in ("DB_PASS", "HFTOKEN")),
    *(
        (name, "xyzzy")
        for name in [
            "HF_TOKEN",
            "apikey",
            "API_KEY",
            "AWS_ACCESS_KEY_ID",
            "MY_SECRET_2",
            "my_password",
            "CREDENTIAL",
            "AUTH",
        ]
    ),
    *(("AWS_SECRET_ACCESS_KEY", value) for value in ("/xyzzyxyzzy+xyzzy", "xyzzy/xyzzy+xyzzy")),  # no path of a file
    ("AWS_SECRET_ACCESS_KEY", "/xyzzy/xyzzy+xyzzy"),
    ("A", "http://10.0.0.7:8010/RUN?token=xyzzy"),
    ("A", '{"Authorization": "Bearer xyzzy"}'),
    *((name, "123456") for name in ("PASSWORD", "PASSWD", "SECRET")),
]


def test_a_value_that_looks_like_a_key_is_refused(world: World):
    kind = type(world.config)
    raw = {name: value for name, value in world.config.model_dump().items() if name not in ("environment", "launcher")}
    for name, value in KEYS:
        with pytest.raises(ConfigError, match=rf"environment: {name} looks like a secret") as error_info:
            load(kind, {**raw, "environment": {name: value}}, "here")
        assert "xyzzy" not in str(error_info.value)
    harmless = {
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "WANDB_API_KEY_FILE": "/home/me/.key",
        "DB_PASSWORD_FILE": "/run/secrets/db",
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "12",
        "AUTHOR": "x",
        "GIT_COMMIT": "0f" * 20,
    }
    harmless |= {
        "KEYBOARD": "xyzzy",
        "MONKEY": "xyzzy",
        "SSH_KEY": "~/.ssh/id",
        "TOKEN": "",
        "A": "task-12345678",
        "URL": "http://host:80/a@b",
    }
    assert load(kind, {**raw, "environment": harmless}, "here").model_dump()["environment"] == harmless


@pytest.mark.parametrize(
    ("kind", "options", "expected_share"),
    [
        (Local, {"gpus": [0], "gpus_per_job": 0.5}, "2"),
        (Local, {"gpus": [0]}, "1"),
        (SharedSlurm, {}, "2"),
        (SharedSlurm, {}, "2/4"),  # four GPUs
        (Ray, {"num_gpus": 0.25}, "4"),
        (Ray, {"num_gpus": 2}, "1"),
    ],
)
def test_a_job_knows_how_many_share_its_gpus(
    kind: Callable[[Path, pytest.MonkeyPatch], World],
    options: dict[str, Any],
    expected_share: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """What its GPU-hours are divided by. Not what a job that submits others was told."""
    monkeypatch.setenv(JOBS_PER_GPU, "12")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", expected_share.partition("/")[2])
    world = kind(tmp_path, monkeypatch)
    try:
        world.config = world.config.model_copy(update=options)
        code = f"import os; print(os.environ['{JOBS_PER_GPU}'], flush=True)\n{CODE}"
        jobs = [replace(world.job(name), args=("-c", code, "0")) for name in "ab"]
        ids = world.config.submit(jobs, world.submission, lambda _: None)
        world.finish({})
        world.start(ids)
        world.wait_for(ids, "completed", "completed")
        assert [(world.folder / "logs" / f"{job.exp_id}.out.log").read_text() for job in jobs] == [
            f"{expected_share}\n"
        ] * 2
    finally:
        world.close()


def test_a_job_that_nobody_knows(world: World):
    assert world.config.states([world.unknown]) == {}
    assert world.config.states([]) == {}
    world.config.kill([world.unknown])
    assert world.config.find(world.submission, ["a" * 32]) == {}
