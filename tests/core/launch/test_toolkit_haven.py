"""The toolkit through haven's own code. The closed client that haven needs is one that records its calls."""

import hashlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from src.errors import LaunchError
from src.experiments import config as configs
from src.launch.job import Job, SchedulerState
from src.launch.toolkit.launcher import Config

FAKE = Path(__file__).parent / "fakes"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recording client, empty."""
    monkeypatch.setenv("PATH", f"{FAKE / 'fake_eai'}:{os.environ['PATH']}")
    monkeypatch.setenv("EAI_TOKEN", "token-1")
    monkeypatch.syspath_prepend(FAKE / "fake_client")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # haven imports deprecated modules
        import eai_toolkit_client as client
        from haven.haven_jobs import toolkit_manager  # noqa: F401
    for recorded in (client.jobs, client.calls, client.faults):
        recorded.clear()
    return client


def configured(tmp_path: Path, **values: Any) -> Config:
    raw = {
        "via": "haven",
        "account": "account-1",
        "image": "python:3.11",
        "data": [f"a.b@main:{tmp_path}"],
        "max_run_seconds": 3600,
    }
    raw |= {"backoff_seconds": 0.01, "retries": 2, "kill_seconds": 0.2, "timeout_seconds": 20}
    return configs.load(Config, raw | values, "toolkit")


def job(tmp_path: Path, name: str) -> Job:
    identity = hashlib.md5(name.encode()).hexdigest()
    code = f"print({name!r})"
    return Job(identity, ("-c", code), tmp_path, tmp_path / "runs" / identity, tmp_path / "runs" / "logs")


def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "sub missions" / "s-1"
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_what_haven_submits_runs(tmp_path: Path, client: ModuleType):
    noted: dict[str, str] = {}
    item = job(tmp_path, "it's")
    values = {"gpus": 1, "gpu_mem_gb": 40, "gpu_model": "A100", "bid": 3, "environment": {"A": "b"}}
    (job_id,) = configured(tmp_path, **values).submit([item], folder(tmp_path), noted.update)
    assert noted == {item.exp_id: job_id}
    (made,) = client.jobs
    facts = dict(made.spec.facts)
    assert facts.pop("resources").facts == {
        "cpu": 4,
        "mem": 16,
        "gpu": 1,
        "gpu_mem": 40,
        "gpu_model": "A100",
        "replicas": None,
    }
    command = facts.pop("command")
    assert facts == {
        "name": f"hv_{item.exp_id}_s_1",
        "image": "python:3.11",
        "data": [f"a.b@main:{tmp_path}"],
        "environment_vars": ["A=b"],
        "preemptable": True,
        "restartable": True,
        "max_run_time": 3600,
        "bid": 3,
        "workdir": str(tmp_path),
    }
    assert client.ApiClient.headers == {"Authorization": "Bearer token-1"}
    subprocess.run(command, check=True)
    assert (item.log_dir / f"{item.exp_id}.out.log").read_text() == "it's\n"


def test_states_in_two_calls(tmp_path: Path, client: ModuleType):
    config = configured(tmp_path)
    jobs = [job(tmp_path, name) for name in "abc"]
    ids = config.submit(jobs, folder(tmp_path), lambda _: None)
    client.jobs[0].state, client.jobs[1].state = "REBALANCING", "CANCELLING"
    client.calls.clear()
    meant = {"REBALANCING": "unknown", "CANCELLING": "running", "QUEUED": "queued"}
    assert config.states([*ids, "gone"]) == {
        made.id: SchedulerState(meant[made.state], made.state) for made in client.jobs
    }  # type: ignore[arg-type]
    assert [method for method, _ in client.calls] == ["v1_account_job_get", "v1_cluster_job_get"]


@pytest.mark.parametrize(("status", "after"), [(None, False), (401, False), (500, False), (500, True), (502, True)])
def test_one_job_through_faults(tmp_path: Path, client: ModuleType, status: int | None, after: bool):
    error = client.rest.ApiException(status, "no", after) if status else ConnectionError("dial tcp: connection refused")
    client.faults += [("v1_account_job_post", error), ("v1_account_job_get", client.rest.ApiException(503))]
    ids = configured(tmp_path).submit([job(tmp_path, "a")], folder(tmp_path), lambda _: None)
    assert ids == [made.id for made in client.jobs]


def test_an_outage_is_no_state(tmp_path: Path, client: ModuleType):
    config = configured(tmp_path)
    ids = config.submit([job(tmp_path, "a")], folder(tmp_path), lambda _: None)
    client.faults += [("v1_account_job_get", SystemExit("haven gives up"))] * 3
    with pytest.raises(LaunchError, match="toolkit, list through haven: haven gives up"):
        config.states(ids)
    client.faults += [("v1_account_job_post", client.rest.ApiException(403, "Forbidden"))]
    with pytest.raises(LaunchError, match=r"\(403\) Reason: Forbidden Nothing was queued"):
        config.submit([job(tmp_path, "b")], folder(tmp_path), lambda _: None)


def test_the_token_of_the_login(tmp_path: Path, client: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("EAI_TOKEN")
    monkeypatch.setenv("FAKE_EAI_STATE", str(tmp_path / "service"))
    configured(tmp_path).states(["x"])
    assert client.ApiClient.headers == {"Authorization": "Bearer fake-token"}


def test_without_the_client(tmp_path: Path):
    code = """if True:
        from src.launch.toolkit.launcher import Config
        config = Config(via="haven", account="a", image="b:1", max_run_seconds=3600)
        try:
            config.states(["x"])
        except Exception as error:
            print(type(error).__name__, error)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=FAKE.parents[1], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "LaunchError toolkit: via 'haven' needs the client eai_toolkit_client, which is not installed"
    )
