"""The launcher ray: parents, restarts, stops, and whatever may answer in Ray's place. tests/ray runs the first half on
a real Ray, too."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError, LaunchError
from src.experiments.config import load
from src.launch import actions, resources, status
from src.launch.job import Job
from src.launch.ray import launcher
from src.launch.tracking import QueryPolicy
from src.runs.store import RunStore
from tests.core.launch.fakes.fake_ray.server import Answer, FakeRay
from tests.core.launch.test_status import World as Suite
from tests.core.launch.test_status import make_item

STOPPABLE = """
import signal, sys, time
def stop(*_):
    print("told", flush=True)
    time.sleep(0.3)
    print("stopped", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True:
    time.sleep(0.02)
"""
ENDS = 'import sys; print("start", flush=True); n = len(open(sys.argv[1]).readlines()); sys.exit(int(sys.argv[1 + n]))'
"""Exits with the n-th code at the n-th start, which it counts in its own log."""
DONE = (
    "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.mkdir(parents=True); (p / "
    '"status.json").write_text(\'{"state": "done"}\')'
)


class World:
    """A folder of runs, and a Ray with room for two jobs."""

    def __init__(self, address: str, folder: Path) -> None:
        self.folder = folder
        self.submission = folder / "submissions" / f"20260101-{folder.name.split()[0]}"  # its name is the test's own
        self.submission.mkdir(parents=True)
        self.config = launcher.Config(
            address=address,
            submissions=str(self.submission.parent),
            resources={"slot": 1},
            parent_poll_seconds=0.05,
            patience_seconds=300.0,
            grace_seconds=300,
        )

    def job(self, name: str, code: str, *args: str, after: tuple[str, ...] = (), **settings: Any) -> Job:
        """A job that runs Python `code`. settings: of its config."""
        job_config = self.config.model_copy(update=settings) if settings else None
        run = self.folder / "runs" / name
        return Job(name, ("-c", code, *args), self.folder, run, self.folder / "logs", after=after, resources=job_config)

    def ends(self, name: str, *codes: int, **settings: Any) -> Job:
        return self.job(name, ENDS, str(self.folder / "logs" / f"{name}.out.log"), *map(str, codes), **settings)

    def done(self, name: str, after: tuple[str, ...] = ()) -> Job:
        """A job that ends well, as an experiment does."""
        return self.job(name, DONE, str(self.folder / "runs" / name), after=after)

    def submit(self, *jobs: Job) -> list[str]:
        return self.config.submit(jobs, self.submission, lambda _: None)

    def log(self, name: str, stream: str = "out") -> list[str]:
        path = self.folder / "logs" / f"{name}.{stream}.log"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, job_id: str, state: str, reason: str = "") -> None:
        self.wait(lambda: self.config.states([job_id])[job_id].state == state, f"{job_id} to be {state}")
        assert self.config.states([job_id])[job_id].reason == reason

    def wait(self, condition: Callable[[], object], what: str) -> None:
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, what
            time.sleep(0.02)


@pytest.fixture
def cluster() -> Iterator[FakeRay]:
    fake = FakeRay()
    fake.release()
    yield fake
    fake.close()


@pytest.fixture
def world(cluster: FakeRay, tmp_path: Path) -> World:
    return World(cluster.address, tmp_path)


def test_a_child_starts_after_its_parent_and_never_after_one_that_failed(world: World):
    ids = world.submit(
        world.done("good"),
        world.ends("bad", 3),
        world.done("of_both", ("good", "bad")),
        world.job("of_good", 'import os; print(os.listdir("runs"))', after=("good",)),
    )
    world.wait_for(ids[0], "completed", "exit code 0")
    world.wait_for(ids[1], "failed", "exit code 3")
    world.wait_for(ids[2], "cancelled", "not started, because bad did not complete")
    world.wait_for(ids[3], "completed", "exit code 0")
    assert world.log("of_good") == ["['good']"]
    assert world.log("of_both", "err") == ["not started, because bad did not complete"]
    later = world.submission.with_name(f"{world.submission.name}-later")
    late = world.job("late", "print(1)"), world.job("too_late", "print(1)")
    parents = (("good", ids[0]), ("bad", ids[1]))
    jobs = [
        replace(job, after=(name,), after_jobs=(job_id,)) for job, (name, job_id) in zip(late, parents, strict=True)
    ]
    then = world.config.submit(jobs, later, lambda _: None)
    world.wait_for(then[0], "completed", "exit code 0")
    world.wait_for(then[1], "cancelled", "not started, because bad did not complete")


def test_stopped_jobs_restart_and_failed_jobs_restart_up_to_a_limit(world: World):
    ids = world.submit(
        world.ends("stops", 75, 75, 0),
        world.ends("fails", 9, 75, 9, 9, retries=2),
        world.ends("once", 9, 0),
        world.ends("by_a_person", 130, 0, retries=1),
    )
    world.wait_for(ids[0], "completed", "exit code 0")
    world.wait_for(ids[1], "failed", "exit code 9")
    world.wait_for(ids[2], "failed", "exit code 9")
    world.wait_for(ids[3], "cancelled", "stopped in order")
    assert [len(world.log(name)) for name in ("stops", "fails", "once", "by_a_person")] == [3, 4, 1, 1]
    assert world.log("stops", "err") == ["== ray: exit code 75, started again"] * 2


def test_a_killed_job_stops_in_order_and_does_not_start_again(world: World):
    waits = world.job("waits", "print('never')", after=("runs",))
    ids = world.submit(world.job("runs", STOPPABLE), waits)
    world.wait(lambda: world.log("runs") == ["up"], "the start")
    world.wait(lambda: world.config.states(ids)[ids[1]].state == "running", "the child")
    world.config.kill(ids)
    for job_id in ids:
        world.wait_for(job_id, "cancelled", "stopped")
    assert world.log("runs") == ["up", "told", "stopped"]
    assert world.log("waits") == []


def test_a_job_that_is_stopped_in_rays_dashboard_does_not_start_again(world: World):
    (job_id,) = world.submit(world.job("runs", STOPPABLE, retries=1))
    world.wait(lambda: world.log("runs") == ["up"], "the start")
    launcher.call_api(world.config.address, "POST", f"/api/jobs/{job_id}/stop", {})
    world.wait_for(job_id, "cancelled", "stopped")
    assert world.log("runs") == ["up", "told", "stopped"]


def test_a_job_submitted_twice_runs_once(world: World):
    assert world.submit(world.ends("a", 0)) == world.submit(world.ends("a", 0))
    world.wait_for(f"{world.submission.name}.a", "completed", "exit code 0")
    assert world.log("a") == ["start"]


def test_a_request_that_arrives_after_its_submission_was_given_up_starts_nothing(cluster: FakeRay, world: World):
    """The submitter is gone, and so is the answer; what is found then is all that will ever run."""
    (job_id,) = world.submit(world.ends("a", 0))
    world.wait_for(job_id, "completed", "exit code 0")
    late = cluster.jobs.pop(job_id)
    assert world.config.find(world.submission, ["a"]) == {}
    world.config.forbid(world.submission, ["a"])
    (world.folder / "logs" / "a.out.log").unlink()
    launcher.call_api(
        cluster.address,
        "POST",
        "/api/jobs/",
        {name: value for name, value in late.items() if name not in ("status", "driver_exit_code")},
    )
    world.wait_for(job_id, "cancelled", "stopped")
    assert world.log("a") == []


def test_a_look_that_got_no_answer_in_time_forbids_nothing_later(cluster: FakeRay, tmp_path: Path):
    """Its answer, which is older than the job, comes when another command has found the job."""
    suite = Suite(tmp_path)
    item = make_item("end", waits=True)
    target = resources.load(
        "there", {"launcher": "ray", "address": cluster.address, "patience_seconds": 300.0}, suite.runs
    )
    cluster.is_held = True
    actions.run(suite.request([item]), target)
    (folder,) = suite.submissions()
    (folder / "jobs.json").unlink()
    answer = threading.Event()

    def answer_late(true: Answer) -> Answer:
        answer.wait(300)
        return 200, {}, b"[]"

    before = set(threading.enumerate())
    cluster.faults.append(answer_late)
    (row,) = status.table(RunStore(suite.runs), [item.exp_id], QueryPolicy(seconds=0.2))
    assert "was interrupted, and its jobs are unknown" in row.reason
    late = [thread for thread in threading.enumerate() if thread not in before and thread.name.endswith("(work)")]
    assert late
    assert suite.states([item]) == ["queued"]
    answer.set()
    for thread in late:
        thread.join()
    cluster.release()
    suite.go()
    assert suite.final_states([item]) == ["done"]


def test_a_restarted_cluster_has_no_jobs(cluster: FakeRay, world: World):
    cluster.is_held = True
    (job_id,) = world.submit(world.ends("a", 0))
    cluster.jobs.clear()
    assert world.config.states([job_id]) == {}
    world.config.kill([job_id])


def test_a_parent_that_shows_no_sign_of_life_is_given_up(world: World):
    (job_id,) = world.config.submit(
        [
            replace(
                world.job("a", "print(1)", parent_wait_seconds=1), after=("gone",), after_jobs=("20260101-other.gone",)
            )
        ],
        world.submission,
        lambda _: None,
    )
    world.wait_for(job_id, "cancelled", "not started, because gone has shown no sign of life for 1 seconds")


HTML: Answer = (200, {"Content-Type": "text/html"}, b"<!doctype html><title>Sign in</title>")
LOGIN: Answer = (302, {"Location": "https://login.example/?next=\x1b[31m"}, b"")
BUSY: Answer = (
    500,
    {},
    b"Traceback (most recent call last):\nTimeoutError: No available agent\x1b[0m to submit job.\n.\n",
)


def cut(answer: Answer) -> Answer:
    """Half an answer, though the request was carried out."""
    status, headers, data = answer
    return status, {**headers, "Content-Length": str(len(data))}, data[: len(data) // 2]


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (HTML, "expected JSON of Ray, got '<!doctype.*'. Is it the address of the dashboard, and are you logged in"),
        ((502, {}, b"<html>Bad gateway"), "Ray fails with status 502: <html>Bad gateway"),
        (
            LOGIN,
            r"a redirection to https://login.example/\?next= ?\[31m. Put the required header into RAY_JOB_HEADERS",
        ),
        (
            (401, {}, b"Unauthorized"),
            "refused with status 401: Unauthorized. Put the required header into RAY_JOB_HEADERS",
        ),
        (BUSY, r"Ray fails with status 500: TimeoutError: No available agent ?\[0m to submit job"),
        ((200, {}, b"[" * 200_000), "expected JSON of Ray"),
        ((200, {}, b'{"a": '), "expected JSON of Ray, got '{\"a\":'"),
        ((200, {}, b'{"jobs": []}'), "expected a list of jobs, got"),
        ((404, {}, b"404: Not Found"), "refused with status 404: 404: Not Found"),
    ],
)
def test_other_answers_are_one_line(cluster: FakeRay, world: World, fault: Answer, match: str):
    impatient = world.config.model_copy(update={"patience_seconds": 0.3})
    cluster.faults = [fault] * 20
    with pytest.raises(LaunchError, match=match) as error_info:
        impatient.states(["20260101-batch.a"])
    assert str(error_info.value).isprintable()
    assert len(str(error_info.value)) < 500


def test_a_cluster_that_is_not_there(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9/")
    with pytest.raises(
        LaunchError, match=r"^http://127.0.0.1:9: Ray does not answer: .*refused\. Does its dashboard run there\?$"
    ):
        launcher.Config(patience_seconds=0.3).check()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert launcher.Config().scheduler() == "http://127.0.0.1:8265", "the address of the GCS is none of the dashboard"


@pytest.mark.parametrize(
    "address", ["https://me:hush@ray.example.com", "HTTP://ray.example.com:x", "https://host?x=1", "me:hush@host:8265"]
)
def test_an_address_that_cannot_be_used_is_not_ignored(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(LaunchError, match=r"^RAY_ADDRESS: ") as error:
        launcher.Config().scheduler()
    assert "hush" not in str(error.value)


def test_a_server_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = launcher.Config(address=f"http://127.0.0.1:{silent.getsockname()[1]}", patience_seconds=0.4)
        with pytest.raises(LaunchError, match="Ray does not answer: timed out"):
            config.check()


@pytest.mark.slow
def test_a_lost_answer_queues_nothing_twice(cluster: FakeRay, world: World):
    cluster.is_held = True
    cluster.faults = [cut, BUSY, cut, None, BUSY]
    assert world.submit(world.ends("a", 0), world.ends("b", 0)) == list(cluster.jobs)


@pytest.mark.parametrize(
    "fault", [(400, {}, b"TypeError: entrypoint_num_gpus must be a number"), (403, {}, b"Forbidden")]
)
def test_a_refusal_leaves_nothing_queued(cluster: FakeRay, world: World, fault: Answer):
    cluster.is_held = True
    cluster.faults = [None, fault]
    with pytest.raises(
        LaunchError, match=r"refused with status 40[03]: (TypeError: entrypoint_num_gpus must be a number|Forbidden)"
    ):
        world.submit(world.ends("a", 0), world.ends("b", 0))
    first = f"{world.submission.name}.a"
    assert world.config.states([first])[first].state == "cancelled"
    cluster.release()
    world.wait(lambda: cluster.jobs[first]["status"] == "STOPPED", "its end")
    assert list(cluster.jobs) == [first]
    assert world.log("a") == []


def test_queued_jobs_of_a_stopped_cluster_do_not_start(cluster: FakeRay, world: World):
    cluster.is_held = True
    impatient = world.config.model_copy(update={"patience_seconds": 0.3})
    cluster.faults = [None, *[BUSY] * 30]
    with pytest.raises(
        LaunchError,
        match=r"No available agent.*\n.*will not start, but running ones could not be stopped: .*No available agent",
    ):
        impatient.submit(
            [world.ends("a", 0, patience_seconds=0.3), world.ends("b", 0, patience_seconds=0.3)],
            world.submission,
            lambda _: None,
        )
    cluster.faults = []
    cluster.release()
    world.wait_for(f"{world.submission.name}.a", "cancelled", "stopped")
    assert world.log("a") == []


def test_an_id_of_somebody_else_is_refused(cluster: FakeRay, world: World):
    cluster.is_held = True
    world.submit(world.ends("a", 0))
    cluster.jobs[f"{world.submission.name}.a"]["entrypoint"] = "rm -rf /"
    with pytest.raises(LaunchError, match="belongs to a job that this submission has not queued"):
        world.submit(world.ends("a", 0))


def test_headers_come_from_the_environment_and_stay_with_ray(
    cluster: FakeRay, world: World, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_JOB_HEADERS", '{"Authorization": "Bearer secret-of-mine"}')
    other = FakeRay()
    try:
        cluster.faults = [(302, {"Location": f"{other.address}/api/jobs/"}, b"")]
        with pytest.raises(LaunchError, match="redirection"):
            world.config.check()
        world.config.check()
        assert cluster.requests[-1][2]["Authorization"] == "Bearer secret-of-mine"
        assert other.requests == []
    finally:
        other.close()
    for wrong in (
        "Bearer secret-of-mine",
        '["secret-of-mine"]',
        '{"Authorization": "secret-of-mine\\r\\nX: y"}',
        '{"A:": "secret-of-mine"}',
    ):
        monkeypatch.setenv("RAY_JOB_HEADERS", wrong)
        with pytest.raises(LaunchError, match=r"^RAY_JOB_HEADERS: ") as error_info:
            world.config.check()
        assert "secret-of-mine" not in str(error_info.value)


DEATH_MESSAGE = (
    "Job supervisor actor died: The actor died.\n\tpid: 1\nThe actor died because its node has died.\n\thealth "
    "check failed\x1b[2J"
)


@pytest.mark.parametrize(
    ("facts", "state", "reason"),
    [
        (
            {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": DEATH_MESSAGE},
            "failed",
            "Ray lost it: health check failed [2J",
        ),
        (
            {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "message": "x"},
            "cancelled",
            "RAY_JOB_START_TIMEOUT_SECONDS",
        ),
        ({"status": "FAILED", "driver_exit_code": 75, "message": "x"}, "cancelled", "stopped in order"),
        ({"status": "FAILED", "driver_exit_code": "0", "message": ["x"]}, "failed", ""),
        ({"status": "PENDING", "message": "wait " * 1000}, "queued", "wait wait"),
        ({"status": "SLEEPING\n"}, "unknown", "Ray's status is 'SLEEPING'"),
        ({"status": ["RUNNING"]}, "unknown", "Ray's status is \"['RUNNING']\""),
        ({}, "unknown", "Ray's status is 'None'"),
    ],
)
def test_states_of_jobs(cluster: FakeRay, world: World, facts: dict[str, Any], state: str, reason: str):
    name = "20260101-batch.a"
    cluster.jobs = {
        name: {"submission_id": name, "driver_agent_http_address": "http://[fe80::1]:52365", **facts},
        "b": {"submission_id": 3},
    }
    job_state = world.config.states([name])[name]
    assert (job_state.state, job_state.node) == (state, "fe80::1")
    assert reason in job_state.reason
    assert job_state.reason.isprintable()
    assert len(job_state.reason) < 400


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({"address": "ray://head:10001"}, "expected http://HOST:PORT of Ray's dashboard"),
        ({"address": "http://me:secret@head:8265"}, r"without a user or a password, got 'http://\*\*\*@head:8265'"),
        ({"num_gpus": 1.5}, "expected an integer above 1, got 1.5"),
        ({"resources": {"GPU": 1}}, "num_gpus instead of 'GPU'"),
        ({"processes": {"starter": "torchrun", "nodes": 2}}, "a job of Ray runs on one node"),
    ],
)
def test_mistakes_in_a_job_config(raw: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        load(launcher.Config, raw, "JOB_CONFIGS['ray']")


def test_overrides_choose_resources_but_no_other_cluster(cluster: FakeRay, world: World):
    cluster.is_held = True
    world.submit(world.ends("a", 0, num_gpus=0.5, mem_gb=2, resources={"a b": 0.1}))
    request = cluster.jobs[f"{world.submission.name}.a"]
    assert (request["entrypoint_num_gpus"], request["entrypoint_memory"], request["entrypoint_resources"]) == (
        0.5,
        2 << 30,
        {"a b": 0.1},
    )
    assert json.loads(json.dumps(request["runtime_env"])) == {
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300", "RAY_JOB_STOP_SIGNAL": "SIGTERM"}
    }
    with pytest.raises(LaunchError, match="a: overrides cannot change address of the launcher ray"):
        world.submit(world.ends("a", 0, address="http://127.0.0.1:9"))


def test_a_parent_that_could_wait_for_what_its_children_hold(cluster: FakeRay, world: World):
    """A waiting child holds its resources."""
    big, small = world.ends("big", 0, num_gpus=8), world.job("small", "print(1)", after=("big",), num_gpus=0.5)
    with pytest.raises(
        LaunchError,
        match=r"^small: its parent big needs num_gpus 8, and .* children hold 0\.5 each .* Submit the parents first",
    ):
        world.submit(big, small)
    assert cluster.jobs == {}
    cluster.is_held = True
    world.submit(
        replace(big, resources=None), small, world.job("elsewhere", "print(1)", after=("big",), resources={"other": 1})
    )
    assert len(cluster.jobs) == 3


def test_paths_with_blanks_and_quotes(cluster: FakeRay, tmp_path: Path):
    world = World(cluster.address, tmp_path / "batch it's a $HOME `id`\n folder")
    (job_id,) = world.submit(world.ends("a", 0))
    world.wait_for(job_id, "completed", "exit code 0")
    assert world.log("a") == ["start"]
