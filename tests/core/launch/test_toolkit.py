"""The toolkit: one job for each experiment, whatever fails on the way. The closed client is an emulator, its jobs are
real processes."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from src.errors import ConfigError, LaunchError
from src.experiments.config import load
from src.experiments.registry import resolved_dict
from src.launch import resources
from src.launch.command import Processes
from src.launch.job import Job, SchedulerState, bind_launcher
from src.launch.toolkit.launcher import LEFTOVERS, Config

ROOT = Path(__file__).resolve().parents[3]
SUBMIT, LIST, GET, KILL = "v1_account_job_post", "v1_account_job_get", "v1_cluster_job_get", "v1_job_delete_by_id"


@pytest.fixture(autouse=True)
def _logged_in(client: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAI_ACCOUNT_ID", "account-1")
    for name in ("HOLD", "CANCEL_SECONDS"):
        monkeypatch.delenv(f"FAKE_TOOLKIT_{name}", raising=False)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs stay queued."""
    monkeypatch.setenv("FAKE_TOOLKIT_HOLD", "1")


def make_config(tmp_path: Path, **values: Any) -> Config:
    raw = {
        "account": "$EAI_ACCOUNT_ID",
        "image": "registry:5000/python:3.11",
        "data": [f"a.b@main:{tmp_path}:rw"],
        "max_run_seconds": 3600,
    }
    raw |= {
        "backoff_seconds": 0.01,
        "retries": 3,
        "kill_seconds": 30,
        "parent_poll_seconds": 0.05,
    }
    return load(Config, raw | values, "toolkit")


def job(tmp_path: Path, name: str, code: str = "print('hello')", *words: str, **values: Any) -> Job:
    identity = hashlib.md5(name.encode()).hexdigest()
    runs = tmp_path / "runs"
    return Job(identity, ("-c", textwrap.dedent(code), *words), tmp_path, runs / identity, runs / "logs", **values)


def folder(tmp_path: Path, name: str = "20261121-1f") -> Path:
    path = tmp_path / "runs" / "submissions" / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def submit_jobs(tmp_path: Path, jobs: Sequence[Job], **values: Any) -> tuple[Config, list[str], dict[str, str]]:
    config, noted_ids = make_config(tmp_path, **values), {}
    ids = config.submit(jobs, folder(tmp_path), noted_ids.update)
    return config, ids, noted_ids


def wait_until(condition: Callable[[], Any], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} seconds in vain"
        time.sleep(0.03)


def wait_for(config: Config, job_id: str, *expected_states: str) -> SchedulerState:
    wait_until(
        lambda: config.states([job_id])[job_id].state in (expected_states or ("completed", "failed", "cancelled"))
    )
    return config.states([job_id])[job_id]


def log(item: Job, stream: str = "out") -> str:
    path = item.log_dir / f"{item.exp_id}.{stream}.log"
    return path.read_text() if path.exists() else ""


def status(tmp_path: Path, item: Job, state: str) -> None:
    item.run.mkdir(parents=True, exist_ok=True)
    (item.run / "status.json").write_text(
        json.dumps({"attempt": 1, "reason": '"state": "no"', "state": state}, indent=4, sort_keys=True)
    )


class TestConfig:
    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"image": "python:latest"}, r"toolkit\.image: expected an image with a fixed tag"),
            ({"image": "registry:5000/python"}, r"toolkit\.image: expected an image with a fixed tag"),
            ({"account": ""}, r"toolkit\.account: expected text that is not empty"),
            ({"data": ["no mount"]}, r"toolkit\.data\[0\]: expected 'account\.name@branch:/folder'"),
            ({"data": ["a:/b:rx"]}, r"toolkit\.data\[0\]: expected"),
            ({"environment": {"A B": "c"}}, "expected the name of an environment variable"),
            ({"gpu_model": "A100"}, "gpu_mem_gb and gpu_model need gpus"),
            ({"bid": 10_000}, r"toolkit\.bid: expected a number <= 9999"),
            ({"max_run_seconds": 100}, "stop_before_seconds is 300, expected less than max_run_seconds, 100"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, values: dict[str, Any], message: str):
        with pytest.raises(ConfigError, match=message):
            make_config(tmp_path, **values)

    def test_the_length_of_a_job_must_be_said(self):
        with pytest.raises(ConfigError, match=r"toolkit\.max_run_seconds: missing"):
            load(Config, {"account": "a", "image": "b:1"}, "toolkit")

    def test_the_registry_leads_here(self, tmp_path: Path):
        raw = {
            "launcher": "toolkit",
            "account": "a",
            "image": "b:1",
            "max_run_seconds": 600,
            "processes": {"starter": "torchrun", "nodes": 2},
        }
        part = bind_launcher(raw)
        assert part.scheduler() == ("a", True)
        assert bind_launcher(resolved_dict(part, "launcher")) == part


class TestSubmit:
    def test_a_job_runs_and_its_logs_are_appended(self, tmp_path: Path, client: ModuleType):
        code = "import os, sys; print(os.getcwd(), os.environ['EAI_RUN_INDEX'], os.environ['A'], *sys.argv[1:])"
        words = ("it's", 'say "hi"', "$HOME `id`", "\\", "*", "--", "", "naïve 漢字", "#x;y&z")
        item = job(tmp_path, "a", f"{code}; print('w', file=sys.stderr)", *words)
        item.log_dir.mkdir(parents=True)
        (item.log_dir / f"{item.exp_id}.out.log").write_text("before\n")
        config, (job_id,), noted_ids = submit_jobs(tmp_path, [item], environment={"A": "x y$z"})
        assert wait_for(config, job_id) == SchedulerState("completed", "SUCCEEDED")
        assert log(item) == f"before\n{tmp_path} 0 x y$z {' '.join(words)}\n"
        assert log(item, "err").splitlines()[-1] == "w"
        assert f"job {job_id} run 0" in log(item, "err")
        assert noted_ids == {item.exp_id: job_id}
        assert client.ApiClient.headers == {"Authorization": "Bearer token-1"}

    @pytest.mark.usefixtures("hold")
    def test_haven_submits_the_same_job(self, tmp_path: Path, client: ModuleType):
        item, big = job(tmp_path, "a"), job(tmp_path, "big", resources=make_config(tmp_path, mem_gb=99))
        values = {"gpus": 2, "gpu_mem_gb": 80, "gpu_model": "!A100", "bid": 7, "cpu": 8}
        processes = {"starter": "torchrun", "nodes": 2, "per_node": "gpus"}
        flags = {"preemptable": False, "restartable": False, "environment": {"A": "b=c"}}
        submit_jobs(tmp_path, [item, big], **values, **flags, processes=processes)
        one, other = sorted(client.jobs.records(), key=lambda record: record["resources"]["mem"])
        assert {name: one[name] for name in client.JobSpec.FIELD_NAMES if name in one} == {
            "name": f"hv_{item.exp_id}_20261121_1f",
            "image": "registry:5000/python:3.11",
            "data": [f"a.b@main:{tmp_path}:rw"],
            "environment_vars": ["A=b=c"],
            "workdir": str(tmp_path),
            "command": ["/bin/bash", "-c", f"/bin/bash {folder(tmp_path)}/{item.exp_id}.sh"],
            "preemptable": False,
            "restartable": False,
            "bid": 7,
            "max_run_time": 3600,
            "resources": {"cpu": 8, "mem": 16, "gpu": 2, "gpu_mem": 80, "gpu_model": "!A100", "replicas": 2},
        }
        assert other["resources"]["mem"] == 99

    def test_a_job_without_a_mount_is_refused(self, tmp_path: Path, client: ModuleType):
        item = job(tmp_path, "a")
        with pytest.raises(
            LaunchError, match=r"a job writes to .*, which is below no writable mount of `data` \(none\)"
        ):
            submit_jobs(tmp_path, [item], data=[])
        with pytest.raises(LaunchError, match="a job writes to"):
            submit_jobs(tmp_path, [item], data=[f"a:{tmp_path}:ro"])
        with pytest.raises(LaunchError, match=r"a job reads .*, which is below no mount"):
            submit_jobs(tmp_path, [item], data=[f"a:{tmp_path / 'runs'}:rw"])
        assert client.calls == []

    def test_an_account_that_is_not_set(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delenv("EAI_ACCOUNT_ID")
        with pytest.raises(LaunchError, match=r"account is '\$EAI_ACCOUNT_ID', but EAI_ACCOUNT_ID is not set"):
            submit_jobs(tmp_path, [job(tmp_path, "a")])
        with pytest.raises(LaunchError, match="EAI_ACCOUNT_ID is not set"):
            make_config(tmp_path).check()

    def test_without_the_client(self, tmp_path: Path, client: ModuleType, monkeypatch: pytest.MonkeyPatch):
        make_config(tmp_path).check()
        assert client.calls == []
        monkeypatch.setitem(sys.modules, "eai_toolkit_client", None)
        with pytest.raises(LaunchError, match="needs the client eai_toolkit_client, which is not installed"):
            make_config(tmp_path).check()
        with pytest.raises(LaunchError, match="needs the client eai_toolkit_client, which is not installed"):
            submit_jobs(tmp_path, [job(tmp_path, "a")])

    def test_the_token_of_the_login(self, tmp_path: Path, client: ModuleType, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delenv("EAI_TOKEN")
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(LaunchError, match="Log in with `eai login`, or set EAI_TOKEN"):
            make_config(tmp_path).states(["x"])
        (tmp_path / "eai").write_text('#!/bin/sh\n[ "$*" = "login token -H" ] && echo Authorization: Bearer token-2\n')
        (tmp_path / "eai").chmod(0o755)
        make_config(tmp_path).states(["x"])
        assert client.ApiClient.headers == {"Authorization": "Bearer token-2"}

    def test_a_refusal_leaves_nothing_queued(self, tmp_path: Path, client: ModuleType):
        """The second job is refused: the message is passed on, and the first is cancelled."""
        slow = job(tmp_path, "slow", "import time; time.sleep(300)")
        refused_job = job(tmp_path, "b", resources=make_config(tmp_path, image="refused:1"))
        with pytest.raises(LaunchError, match=r"you may not use this image The 1 jobs queued before were cancelled\."):
            submit_jobs(tmp_path, [slow, refused_job], max_parallel_calls=1)
        assert [record["state"] for record in client.jobs.records()] == ["CANCELLED"]

    @pytest.mark.usefixtures("hold")
    def test_the_same_submission_twice_queues_nothing_twice(self, tmp_path: Path, client: ModuleType):
        jobs = [job(tmp_path, name) for name in "abc"]
        config, first, _ = submit_jobs(tmp_path, jobs)
        assert submit_jobs(tmp_path, jobs)[1] == first
        assert len(client.jobs.records()) == 3
        config.kill(first[:1])
        again = submit_jobs(tmp_path, jobs)[1]
        assert again[1:] == first[1:]
        assert again[0] != first[0]
        assert f"hv_{jobs[0].exp_id}_20261121_1f_2" in {record["name"] for record in client.jobs.records()}
        assert config.find(folder(tmp_path), [item.exp_id for item in jobs]) == dict(
            zip([j.exp_id for j in jobs], again, strict=True)
        )

    @pytest.mark.usefixtures("hold")
    def test_a_name_of_another_job_is_refused(self, tmp_path: Path, client: ModuleType):
        _, (job_id,), _ = submit_jobs(tmp_path, [job(tmp_path, "a")])
        client.jobs.edit(job_id, command=["/bin/bash", "-c", f"/bin/bash other/{job(tmp_path, 'a').exp_id}.sh"])
        with pytest.raises(LaunchError, match=f"belongs to job {job_id}, which this submission has not queued"):
            submit_jobs(tmp_path, [job(tmp_path, "a")])


FAULTS: dict[str, dict[str, Any] | None] = {
    "no connection": None,
    "401": {"status": 401},
    "500": {"status": 500},
    "502 after the call": {"status": 502, "reason": "Bad Gateway", "after": True},
}


def fail(client: ModuleType, name: str, *methods: str, **options: Any) -> None:
    """Let the next call of each method fail, or each one with always=True."""
    for method in methods:
        facts = FAULTS[name]
        error = ConnectionError("Connection refused") if facts is None else client.rest.ApiException(**facts, **options)
        error.always = options.get("always", False)  # type: ignore[attr-defined]
        client.faults.append((method, error))


@pytest.mark.usefixtures("hold")
@pytest.mark.parametrize("fault", FAULTS)
class TestFaults:
    """On each verb, each way to fail: no job twice, none forgotten, and no state made up."""

    def test_submitting_through_a_fault(self, tmp_path: Path, client: ModuleType, fault: str):
        fail(client, fault, SUBMIT, SUBMIT, LIST)
        jobs = [job(tmp_path, name) for name in "abc"]
        _, ids, noted_ids = submit_jobs(tmp_path, jobs)
        queued_jobs = {record["id"]: record for record in client.jobs.records()}
        assert sorted(ids) == sorted(queued_jobs)
        assert len(queued_jobs) == 3
        assert noted_ids == {item.exp_id: job_id for item, job_id in zip(jobs, ids, strict=True)}
        assert all(item.exp_id in queued_jobs[job_id]["name"] for item, job_id in zip(jobs, ids, strict=True))

    def test_submitting_into_an_outage(self, tmp_path: Path, client: ModuleType, fault: str):
        """Every submission fails, but the rest answers: a job that was created is found, never forgotten."""
        fail(client, fault, SUBMIT, always=True)
        jobs = [job(tmp_path, name) for name in "ab"]
        if "after" in fault:
            _, ids, _ = submit_jobs(tmp_path, jobs)
            assert sorted(ids) == sorted(record["id"] for record in client.jobs.records())
        else:
            with pytest.raises(LaunchError, match="Nothing was queued"):
                submit_jobs(tmp_path, jobs, retries=1)
            assert client.jobs.records() == []

    def test_a_failed_poll_is_no_failed_job(self, tmp_path: Path, client: ModuleType, fault: str):
        config, ids, _ = submit_jobs(tmp_path, [job(tmp_path, name) for name in "ab"], retries=1)
        fail(client, fault, LIST)
        assert {seen.state for seen in config.states(ids).values()} == {"queued"}
        fail(client, fault, LIST, always=True)
        with pytest.raises(LaunchError):
            config.states(ids)
        with pytest.raises(LaunchError):
            config.find(folder(tmp_path), ["a" * 32])
        client.faults.clear()
        fail(client, fault, GET, always=True)
        client.jobs.edit(ids[1], old=True)
        seen = config.states(ids)
        assert (seen[ids[0]].state, seen[ids[1]].state) == ("queued", "unknown")

    def test_killing_through_a_fault(self, tmp_path: Path, client: ModuleType, fault: str):
        config, ids, _ = submit_jobs(tmp_path, [job(tmp_path, name) for name in "ab"])
        fail(client, fault, KILL, LIST)
        config.kill(ids)
        assert {record["state"] for record in client.jobs.records()} == {"CANCELLED"}


@pytest.mark.usefixtures("hold")
class TestOutages:
    def test_an_outage_in_which_nothing_can_be_undone(self, tmp_path: Path, client: ModuleType):
        fail(client, "502 after the call", SUBMIT, always=True)
        fail(client, "no connection", LIST, always=True)
        item = job(tmp_path, "a")
        with pytest.raises(
            LaunchError,
            match=r"(?s)Bad Gateway.*The lookup of .* failed: .*Cancelling .*failed; .*left\.json",
        ):
            submit_jobs(tmp_path, [item], retries=1)
        (record,) = client.jobs.records()
        assert json.loads((folder(tmp_path) / LEFTOVERS).read_text())["names"] == {item.exp_id: record["name"]}
        client.faults.clear()
        assert make_config(tmp_path).find(folder(tmp_path), [item.exp_id]) == {item.exp_id: record["id"]}
        assert submit_jobs(tmp_path, [item])[1] == [record["id"]]

    def test_an_outage_is_not_queried_once_per_job(self, tmp_path: Path, client: ModuleType):
        fail(client, "no connection", GET, always=True)
        config = make_config(tmp_path, retries=1, max_parallel_calls=2)
        assert {seen.state for seen in config.states([f"old-{i}" for i in range(50)]).values()} == {"unknown"}
        assert client.calls.count(GET) <= 6

    def test_a_kill_that_is_not_confirmed_is_reported(self, tmp_path: Path, client: ModuleType):
        config, ids, _ = submit_jobs(tmp_path, [job(tmp_path, "a")], retries=0, kill_seconds=0.2)
        fail(client, "500", KILL, always=True)
        with pytest.raises(
            LaunchError, match=f"1 of 1 killed jobs are not known to have ended after 0.2 s: {ids[0]}. .*500"
        ):
            config.kill(ids)
        fail(client, "no connection", LIST, always=True)
        with pytest.raises(LaunchError, match=rf"not known to have ended after 0\.2 s: {ids[0]}\. .*500"):
            config.kill(ids)


class TestStates:
    @pytest.mark.usefixtures("hold")
    @pytest.mark.parametrize(
        ("word", "state"),
        [
            ("QUEUING", "queued"),
            ("pending", "queued"),
            ("RUNNING", "running"),
            ("CANCELLING", "running"),
            ("CANCELLED", "cancelled"),
            ("SUCCEEDED", "completed"),
            ("FAILED", "failed"),
            ("INTERRUPTED", "queued"),
            ("PREEMPTED", "queued"),
            ("REBALANCING", "unknown"),
        ],
    )
    def test_words(self, tmp_path: Path, client: ModuleType, word: str, state: str):
        config, (job_id,), _ = submit_jobs(tmp_path, [job(tmp_path, "a")])
        client.jobs.edit(job_id, state=word)
        assert config.states([job_id]) == {job_id: SchedulerState(state, word.upper())}  # type: ignore[arg-type]
        if word in ("INTERRUPTED", "PREEMPTED"):
            assert make_config(tmp_path, restartable=False).states([job_id])[job_id].state == "failed"

    @pytest.mark.usefixtures("hold")
    def test_many_jobs_in_one_call_and_an_old_one_in_another(self, tmp_path: Path, client: ModuleType):
        config, ids, _ = submit_jobs(tmp_path, [job(tmp_path, str(i)) for i in range(20)])
        client.jobs.edit(ids[0], old=True, state="FAILED", runs=[{"exit_code": 1}, {"exit_code": 3}])
        client.calls.clear()
        seen = config.states([*ids, "0-gone"])
        assert seen[ids[0]] == SchedulerState("failed", "FAILED", "exit code 3", restarts=1)
        assert [seen[name] for name in ids[1:]] == [SchedulerState("queued", "QUEUED")] * 19
        assert len(seen) == 20
        assert sorted(client.calls) == [LIST, GET, GET]
        assert config.states([]) == {}


TRAINING = """
    import json, os, signal, sys, time
    run = sys.argv[1]
    os.makedirs(run, exist_ok=True)
    if os.path.exists(run + "/step"):
        print("continued")
        sys.exit()
    def stop(number, frame):
        name = signal.Signals(number).name
        open(run + "/step", "w").close()
        json.dump({"reason": name, "state": "stopped"}, open(run + "/status.json", "w"))
        print("saved on", name, flush=True)
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    print("training", flush=True)
    while True:
        time.sleep(0.05)
"""


def training(tmp_path: Path, **values: Any) -> Job:
    item = job(tmp_path, "training", TRAINING, **values)
    return Job(item.exp_id, (*item.args, str(item.run)), item.cwd, item.run, item.log_dir, **values)


class TestEndings:
    @pytest.mark.slow
    def test_a_killed_job_saves_first_and_killing_again_is_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("FAKE_TOOLKIT_CANCEL_SECONDS", "2.5")
        item = training(tmp_path)
        config, ids, _ = submit_jobs(tmp_path, [item])
        wait_until(lambda: "training" in log(item))
        config.kill(ids)
        assert config.states(ids)[ids[0]] == SchedulerState("cancelled", "CANCELLED")
        assert log(item) == "training\nsaved on SIGTERM\n"
        config.kill([*ids, "0-gone"])
        config.kill([])

    @pytest.mark.slow
    def test_only_what_fails_by_itself_counts_as_a_quick_failure(self, tmp_path: Path):
        code = (
            TRAINING.replace('"stopped"', '"failed"')
            .replace("exit(75)", "exit(1)")
            .replace("sys.argv[1]", "os.environ['RUN']")
        )
        killed_job = job(tmp_path, "killed", code)
        config, ids, _ = submit_jobs(tmp_path, [killed_job], environment={"RUN": str(killed_job.run)})
        wait_until(lambda: "training" in log(killed_job))
        config.kill(ids)
        assert "saved on SIGTERM" in log(killed_job)
        assert not (folder(tmp_path) / "quick_failures").exists()
        _, ids, _ = submit_jobs(tmp_path, [job(tmp_path, "bad", "1 / 0")])
        assert wait_for(config, ids[0]).state == "failed"
        assert (folder(tmp_path) / "quick_failures").exists()

    def test_a_preempted_job_saves_and_resumes(self, tmp_path: Path, client: ModuleType):
        item = training(tmp_path)
        config, (job_id,), _ = submit_jobs(tmp_path, [item])
        wait_until(lambda: "training" in log(item))
        (folder(tmp_path) / "quick_failures").write_text("1\n" * 9)  # of others, since it began
        client.jobs.preempt(job_id)
        assert wait_for(config, job_id).state == "completed"
        assert log(item) == "training\nsaved on SIGTERM\ncontinued\n"
        assert f"job {job_id} run 1" in log(item, "err")
        (record,) = client.jobs.records()
        assert [(run["state"], run["exit_code"]) for run in record["runs"]] == [("INTERRUPTED", 75), ("SUCCEEDED", 0)]

    def test_a_job_that_is_not_restartable_fails_when_interrupted(self, tmp_path: Path, client: ModuleType):
        item = training(tmp_path)
        config, (job_id,), _ = submit_jobs(tmp_path, [item], restartable=False)
        wait_until(lambda: "training" in log(item))
        client.jobs.preempt(job_id)
        assert wait_for(config, job_id) == SchedulerState("failed", "INTERRUPTED", "exit code 75")

    @pytest.mark.slow
    def test_the_training_is_signalled_before_the_time_limit(self, tmp_path: Path, client: ModuleType):
        item = training(tmp_path)
        config, (job_id,), _ = submit_jobs(tmp_path, [item], max_run_seconds=60, stop_before_seconds=54)
        assert wait_for(config, job_id).state == "failed"
        assert log(item) == "training\nsaved on SIGUSR1\n"
        assert client.jobs.records()[0]["runs"][-1]["exit_code"] == 75

    def test_the_clock_ends_with_the_job(self, tmp_path: Path):
        item = job(tmp_path, "a")
        config, (job_id,), _ = submit_jobs(
            tmp_path, [item], max_run_seconds=os.getpid() * 100 + 99, stop_before_seconds=1
        )
        wait_for(config, job_id)
        sleeping = subprocess.run(
            ["pgrep", "-f", f"sleep {os.getpid()}[0-9][0-9]$"], capture_output=True, text=True, check=False
        ).stdout
        assert sleeping == ""

    def test_a_node_that_is_not_the_first_has_logs_of_its_own(self, tmp_path: Path):
        """What the toolkit tells of nodes becomes what torchrun is told, and no training takes it for its own."""
        names = ("NODE_RANK", "NNODES", "MASTER_PORT", "RANK", "WORLD_SIZE")
        item = job(
            tmp_path, "a", f"import os; print([os.environ.get(n) for n in {names}])", python_binary=sys.executable
        )
        processes = Processes(starter="torchrun", nodes=3)
        make_config(tmp_path, processes=processes.model_dump()).submit([item], folder(tmp_path), lambda _: None)
        path = item.log_dir / f"{item.exp_id}.out.log"
        wait_until(lambda: log(item))
        env = os.environ | {"RANK": "2", "WORLD_SIZE": "3"}
        subprocess.run(["/bin/bash", folder(tmp_path) / f"{item.exp_id}.sh"], env=env, check=True)
        assert path.read_text() == "['0', '3', '29501', None, None]\n"
        assert Path(f"{path}.node2").read_text() == "['2', '3', '29501', None, None]\n"


def pauses(seconds: str) -> bool:
    """Whether a job has looked at its parent, and looks again after so many seconds."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == ["sleep", seconds] and process.environ().get("HOME", "").startswith(
                os.environ["FAKE_TOOLKIT"]
            ):
                return True
    return False


class TestParents:
    def test_a_child_waits_for_its_parent(self, tmp_path: Path):
        parent = job(tmp_path, "parent", "print('ran')")
        child = job(tmp_path, "child", "print('ran')", after=(parent.exp_id, "f" * 32))
        config, (one, other), _ = submit_jobs(tmp_path, [parent, child])
        wait_for(config, one)
        status(tmp_path, parent, "running")
        wait_until(lambda: "job" in log(child, "err"))
        time.sleep(0.3)  # a child that did not wait would have run by now
        assert log(child) == ""
        status(tmp_path, parent, "done")
        assert wait_for(config, other).state == "completed"
        assert log(child) == "ran\n"

    @pytest.mark.parametrize(
        ("state", "message"),
        [("failed", "is failed for 0"), ("stopped", "is stopped for 0"), (None, "is not started for 0")],
    )
    def test_a_child_of_a_parent_that_fails_names_it(self, tmp_path: Path, state: str | None, message: str):
        parent = job(tmp_path, "parent", "raise SystemExit(1)")
        child = job(tmp_path, "child", "print('ran')", after=(parent.exp_id,))
        patience = {"parent_patience_seconds": 0} if state else {"parent_wait_seconds": 0}
        config, (_, other), _ = submit_jobs(tmp_path, [parent, child], **patience)
        if state:
            status(tmp_path, parent, state)
        assert wait_for(config, other).state == "failed"
        assert (
            f"not started: it starts from experiment {parent.exp_id}, which {message} seconds; see {parent.run}"
            in log(child, "err")
        )
        assert log(child) == ""

    @pytest.mark.slow
    def test_a_failure_of_a_parent_that_is_submitted_again_does_not_count(self, tmp_path: Path):
        parent = job(tmp_path, "parent", "import time; time.sleep(60)")
        child = job(tmp_path, "child", "print('ran')", after=(parent.exp_id,))
        status(tmp_path, parent, "failed")
        config, (first, other), _ = submit_jobs(
            tmp_path, [parent, child], parent_patience_seconds=0, parent_poll_seconds=0.617
        )
        wait_until(lambda: pauses("0.617") or config.states([other])[other].state == "failed")
        status(tmp_path, parent, "done")
        assert wait_for(config, other).state == "completed", log(child, "err")
        config.kill([first])

    def test_parents_of_earlier_submissions_are_waited_for(self, tmp_path: Path):
        parent = job(tmp_path, "parent")
        child = job(tmp_path, "child", "print('ran')", after=(parent.exp_id,), after_jobs=("some-job",))
        config, (job_id,), _ = submit_jobs(tmp_path, [child])
        wait_for(config, job_id, "running")
        status(tmp_path, parent, "done")
        assert wait_for(config, job_id).state == "completed"

    @pytest.mark.slow
    def test_a_waiting_child_can_be_killed(self, tmp_path: Path, client: ModuleType):
        parent = job(tmp_path, "parent")
        child = job(tmp_path, "child", after=(parent.exp_id,))
        config, ids, _ = submit_jobs(tmp_path, [parent, child], parent_poll_seconds=300)
        wait_until(lambda: "job" in log(child, "err"))
        config.kill(ids)
        record = next(record for record in client.jobs.records() if record["id"] == ids[1])
        assert (record["state"], record["runs"][-1]["exit_code"]) == ("CANCELLED", 75)


@pytest.mark.parametrize("launcher", ["toolkit", "slurm"])
def test_the_examples_are_valid(tmp_path: Path, launcher: str):
    text = (ROOT / "resources" / "job_configs" / f"{launcher}.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    configs: dict[str, Any] = {}
    exec(block, configs)
    for name, raw in configs["JOB_CONFIGS"].items():
        assert resources.load(name, raw, tmp_path).launcher.name == launcher


@pytest.mark.net
@pytest.mark.skipif(
    os.environ.get("EAI_LIVE") != "1",
    reason="EAI_LIVE=1 runs a job on the real toolkit: EAI_ACCOUNT_ID, EAI_IMAGE, EAI_DATA",
)
def test_the_real_toolkit(monkeypatch: pytest.MonkeyPatch):
    """A short job on one CPU: queued, found, seen running, killed. EAI_DATA: "name@branch:/folder:rw", where /folder is
    here too."""
    monkeypatch.undo()
    mount = os.environ["EAI_DATA"]
    home = Path(mount.split(":")[1]) / f"smoke-{os.getpid()}"
    raw = {
        "account": "$EAI_ACCOUNT_ID",
        "image": os.environ["EAI_IMAGE"],
        "data": [mount],
        "max_run_seconds": 900,
        "cpu": 1,
        "mem_gb": 1,
    }
    config = load(Config, raw, "toolkit")
    item = job(home, "live", python_binary="sleep 600; true")
    submission_folder = folder(home, f"smoke{int(time.time())}")
    (job_id,) = config.submit([item], submission_folder, lambda _: None)
    try:
        assert config.find(submission_folder, [item.exp_id]) == {item.exp_id: job_id}
        wait_until(lambda: config.states([job_id])[job_id].state == "running", seconds=600)
    finally:
        config.kill([job_id])
    assert config.states([job_id])[job_id].state == "cancelled"
