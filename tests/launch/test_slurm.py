"""Slurm arrays, against a stand-in for Slurm's commands that fails on demand and can run the tasks for real."""

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from src import config as configs
from src.errors import ConfigError, LaunchError, RunError
from src.launch import slurm
from src.launch.job import Job
from src.launch.slurm_commands import collapse, expand
from src.launch.slurm_script import write_script, write_tasks
from src.launch.slurm_states import STATES
from tests.launch.fake_slurm.cluster import Cluster

SOON = slurm.Config(patience_seconds=1.0)
AWAY = "squeue: error: slurm_receive_msgs: Socket timed out on send/recv operation"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
# Job states of `man squeue` and of `man sacct`, 22.05 to 24.05.
WORDS = (
    "BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PENDING POWER_UP_NODE "
    "PREEMPTED RECONFIG_FAIL REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING RESV_DEL_HOLD REVOKED RUNNING SIGNALING SPECIAL_EXIT STAGE_OUT "
    "STOPPED SUSPENDED TIMEOUT UPDATE_DB"
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "20260101-batch"
    path.mkdir()
    return path


def job(folder: Path, exp_id: str, *args: str, **more: Any) -> Job:
    """A job that prints its arguments as JSON."""
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    return Job(exp_id, ("-c", code, *args), folder, folder.parent / "runs" / exp_id, folder.parent / "logs", **more)


class Notes(dict[str, str]):
    """What submit told its caller, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, str]] = []

    def __call__(self, ids: Mapping[str, str]) -> None:
        self.calls.append(dict(ids))
        self.update(ids)


def submit(jobs: Sequence[Job], folder: Path, config: slurm.Config = SOON) -> tuple[list[str], Notes]:
    notes = Notes()
    return slurm.submit(config, jobs, folder, notes), notes


def option(call: list[str], name: str) -> str | None:
    """Value of an sbatch option, "" for a flag."""
    return next((word.partition("=")[2] for word in call if word.partition("=")[0] == f"--{name}"), None)


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_a_grid_is_one_array(cluster: Cluster, folder: Path):
    ids, notes = submit([job(folder, f"e{i}") for i in range(12)], folder)
    assert ids == [f"1_{i}" for i in range(12)]
    assert notes.calls == [{f"e{i}": f"1_{i}" for i in range(12)}]
    (call,) = cluster.calls("sbatch")
    assert option(call, "array") == "0-11"
    assert [option(call, name) for name in ("requeue", "kill-on-invalid-dep", "open-mode", "signal", "nodes")] == [
        "",
        "yes",
        "append",
        "B:USR1@120",
        "1",
    ]
    assert option(call, "job-name") == "20260101-batch.array-000"
    assert not [line for line in (folder / "job.sh").read_text().splitlines() if line.startswith("#SBATCH")]


def test_nothing_to_submit_asks_nothing(cluster: Cluster, folder: Path):
    assert submit([], folder)[0] == []
    assert slurm.states(SOON, []) == {}
    slurm.kill(SOON, [])
    assert not cluster.calls()


def test_resources_arrive_at_sbatch(cluster: Cluster, folder: Path):
    config = slurm.Config(
        partition="high",
        account="lab",
        qos="long",
        constraint="a100|h100",
        time="1-02:03:04",
        cpus_per_task=8,
        mem="64G",
        gpus_per_node="a100:4",
        max_running=3,
        signal_seconds=300,
        requeue=False,
        options={"exclude": "node[1-2]", "nice": 10, "exclusive": True},
        processes={"starter": "torchrun", "nodes": 2},  # type: ignore[arg-type]
    )
    submit([job(folder, "a"), job(folder, "b")], folder, config)
    (call,) = cluster.calls("sbatch")
    wanted = {
        "partition": "high",
        "account": "lab",
        "qos": "long",
        "constraint": "a100|h100",
        "time": "1-02:03:04",
        "cpus-per-task": "8",
        "mem": "64G",
        "gpus-per-node": "a100:4",
        "array": "0-1%3",
        "signal": "B:USR1@300",
        "no-requeue": "",
        "exclude": "node[1-2]",
        "nice": "10",
        "exclusive": "",
        "nodes": "2",
        "ntasks-per-node": "1",
    }
    assert {name: option(call, name) for name in wanted} == wanted
    assert option(call, "requeue") is None


def test_what_is_not_said_is_left_to_the_cluster(cluster: Cluster, folder: Path):
    submit([job(folder, "a")], folder, slurm.Config(signal_seconds=0, gpus_per_node=0, options={"exclusive": False}))
    (call,) = cluster.calls("sbatch")
    assert [option(call, name) for name in ("partition", "time", "mem", "signal", "exclusive", "dependency")] == [None] * 6
    assert option(call, "gpus-per-node") == "0"


def test_jobs_with_equal_resources_and_parents_share_an_array(cluster: Cluster, folder: Path):
    big = slurm.Config(mem="99G", patience_seconds=1.0)
    jobs = [
        job(folder, "p0"),
        job(folder, "p1"),
        job(folder, "c0", after=("p0",)),
        job(folder, "c1", after=("p1",)),
        job(folder, "c2", after=("p0",)),
        job(folder, "big", resources=big),
        job(folder, "g", after=("c1", "c0"), after_jobs=("77_3",)),
        job(folder, "same", resources=slurm.Config(patience_seconds=1.0)),
        job(folder, "other", after=("not here",)),
    ]
    ids, notes = submit(jobs, folder)
    assert dict(zip([j.exp_id for j in jobs], ids, strict=True)) == {
        "p0": "1_0",
        "p1": "1_1",
        "same": "1_2",
        "other": "1_3",
        "c0": "2_0",
        "c2": "2_1",
        "c1": "3_0",
        "big": "4_0",
        "g": "5_0",
    }
    assert len(notes.calls) == 5
    assert [option(call, "dependency") for call in cluster.calls("sbatch")] == [
        None,
        "afterok:1_0",
        "afterok:1_1",
        None,
        "afterok:3_0:2_0:77_3",
    ]


def test_thousands_of_jobs_take_few_arrays_and_little_time(cluster: Cluster, folder: Path):
    jobs = [job(folder, f"{i:032x}") for i in range(2500)]
    begin = time.monotonic()
    ids, _ = submit(jobs, folder)
    assert time.monotonic() - begin < 5
    assert [option(call, "array") for call in cluster.calls("sbatch")] == ["0-1000", "0-1000", "0-497"]
    assert ids[1000:1002] == ["1_1000", "2_0"]
    assert len(set(ids)) == 2500
    cluster.forget_calls()
    assert len(slurm.states(SOON, ids[:1000])) == 1000
    assert len(cluster.calls()) == 1
    for array in "123":
        for i in range(0, 400, 7):
            cluster.set(f"{array}_{i}", forgotten="controller", state="COMPLETED")
    cluster.forget_calls()
    assert len(slurm.states(SOON, ids)) == 2500
    assert [call[0] for call in cluster.calls()] == ["squeue", "sacct"]
    cluster.forget_calls()
    slurm.kill(SOON, ids)
    assert len(cluster.calls()) == 1
    assert not cluster.alive()


HOSTILE = [
    "two words",
    "",
    "it's",
    '"',
    "$HOME",
    "$(touch no)",
    "`id`",
    "a\nb",
    "#SBATCH --array=0-9",
    "\\",
    "naïve 漢字",
    "%j %a",
    "-x",
    "{}",
]


def test_values_arrive_unchanged_and_logs_are_appended(cluster: Cluster, tmp_path: Path):
    folder = tmp_path / 'it\'s 100%A $HOME\n"x" ü'
    folder.mkdir()
    cluster.configure(run=True)
    environment = {f"V{i}": value for i, value in enumerate(HOSTILE)}
    config = slurm.Config(environment=environment, setup=["greeting='hello there'; export greeting", "echo $greeting"])
    code = f"import os, json; print(json.dumps([os.environ.get('V%d' % i) for i in range({len(HOSTILE)})]))"
    shows = Job("shows", ("-c", code), folder, tmp_path / "runs" / "shows", folder / "logs")
    for _ in range(2):
        submit([Job("echoes", job(folder, "echoes", *HOSTILE).args, folder, tmp_path / "r", folder / "logs"), shows], folder, config)
    out = (folder / "logs" / "echoes.out.log").read_text().splitlines()
    assert out == ["hello there", json.dumps(HOSTILE)] * 2
    assert (folder / "logs" / "shows.out.log").read_text().splitlines()[1] == json.dumps(HOSTILE)
    assert [cluster.task(i)["state"] for i in ("1_0", "1_1", "2_0", "2_1")] == ["COMPLETED"] * 4
    assert not (folder / "no").exists()


def test_a_failing_parent_keeps_its_children_from_running(cluster: Cluster, folder: Path):
    cluster.configure(run=True)
    fails = Job("fails", ("-c", "raise SystemExit(3)"), folder, folder / "r", folder / "logs")
    ids, _ = submit([fails, job(folder, "child", after=("fails",)), job(folder, "grandchild", after=("child",))], folder)
    found = slurm.states(SOON, ids)
    assert (found[ids[0]].state, found[ids[0]].word, found[ids[0]].reason) == ("failed", "FAILED", "exit code 3")
    assert (found[ids[1]].state, found[ids[1]].reason) == ("cancelled", "DependencyNeverSatisfied")
    assert found[ids[2]].state == "cancelled"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope.*Change 'partition' of the job config"),
        ({"account": "nobody"}, "Invalid account or account/partition combination.*Change 'account'"),
    ],
)
def test_a_refusal_is_passed_on_and_nothing_stays_queued(cluster: Cluster, folder: Path, change: dict[str, str], match: str):
    refused = slurm.Config(patience_seconds=1.0, **change)  # type: ignore[arg-type]
    jobs = [job(folder, "a"), job(folder, "b"), job(folder, "c", resources=refused)]
    with pytest.raises(LaunchError, match=match):
        submit(jobs, folder)
    assert len(cluster.calls("sbatch")) == 2
    assert cluster.task("1_0")["state"].startswith("CANCELLED")
    assert not cluster.alive()


def test_a_disk_that_refuses_cancels_what_was_queued(cluster: Cluster, folder: Path):
    def note(ids: Mapping[str, str]) -> None:
        raise RunError("disk full")

    with pytest.raises(RunError, match="disk full"):
        slurm.submit(SOON, [job(folder, "a")], folder, note)
    assert not cluster.alive()


def test_sbatch_that_timed_out_before_is_run_again(cluster: Cluster, folder: Path):
    cluster.fail("sbatch", "say", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    ids, _ = submit([job(folder, "a")], folder)
    assert ids == ["1_0"]
    assert len(cluster.calls("sbatch")) == 2


@pytest.mark.parametrize("do", ["say_after", "hang_after"])
def test_sbatch_that_timed_out_after_queuing_is_not_run_again(cluster: Cluster, folder: Path, do: str):
    cluster.fail("sbatch", do, "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    ids, notes = submit([job(folder, "a"), job(folder, "b")], folder)
    assert ids == ["1_0", "1_1"]
    assert notes == {"a": "1_0", "b": "1_1"}
    assert len(cluster.calls("sbatch")) == 1
    assert cluster.alive() == ["1_0", "1_1"]


def test_two_lost_answers_still_leave_one_array(cluster: Cluster, folder: Path):
    """sbatch queues and does not say so, and the queue is a moment late: the second sbatch makes a double, which is cancelled."""
    cluster.fail("sbatch", "say_after", "sbatch: error: Socket timed out on send/recv operation")
    cluster.fail("squeue", "garbage", "")
    ids, _ = submit([job(folder, "a")], folder)
    assert ids == ["2_0"]
    assert cluster.alive() == ["2_0"]


@pytest.mark.parametrize("do", ["say", "hang"])
def test_a_controller_that_is_down_is_asked_for_a_while(cluster: Cluster, folder: Path, do: str):
    cluster.fail("scontrol", do, "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)", times=99)
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"scontrol.*(does not answer|no answer).*Is the controller up\?"):
        submit([job(folder, "a")], folder)
    assert time.monotonic() - begin < 5
    assert len(cluster.calls("scontrol")) >= 2
    assert not cluster.calls("sbatch")


def test_sbatch_that_never_answers_leaves_nothing(cluster: Cluster, folder: Path):
    cluster.fail("sbatch", "say_after", "sbatch: error: Batch job submission failed: Unable to contact slurm controller", times=99)
    cluster.fail("squeue", "say", DOWN, times=99)
    with pytest.raises(LaunchError, match="Nothing stays queued"):
        submit([job(folder, "a")], folder)
    assert not cluster.alive()


def test_what_may_have_been_queued_is_said(cluster: Cluster, folder: Path):
    for command in ("sbatch", "squeue", "scancel"):
        cluster.fail(command, "say", DOWN, times=99)
    with pytest.raises(LaunchError, match=r"not known; once Slurm answers, `scancel --name=20260101-batch.array-000` cancels them"):
        submit([job(folder, "a")], folder)


def test_an_answer_that_is_no_id_is_an_error(cluster: Cluster, folder: Path):
    cluster.fail("sbatch", "garbage", "<html>502</html>")
    with pytest.raises(LaunchError, match="expected the id of a job, got '<html>502</html>'"):
        submit([job(folder, "a")], folder)


@pytest.mark.parametrize("word", WORDS.split())
def test_every_word_of_slurm_has_a_state(word: str):
    assert STATES[word] in {"queued", "running", "completed", "failed", "cancelled"}


@pytest.mark.parametrize(
    ("task", "seen"),
    [
        ({"state": "PENDING", "reason": "Dependency"}, ("queued", "PENDING", "Dependency", "", None, 0)),
        (
            {"state": "PENDING", "reason": "BeginTime", "restarts": 2, "node": "n1"},
            ("queued", "PENDING", "BeginTime", "n1", None, 2),
        ),
        ({"state": "RUNNING", "node": "n[1-2]", "seconds": 75}, ("running", "RUNNING", "", "n[1-2]", 75.0, 0)),
        ({"state": "COMPLETING", "node": "n1"}, ("running", "COMPLETING", "", "n1", 0.0, 0)),
        ({"state": "COMPLETED", "seconds": 9}, ("completed", "COMPLETED", "", "", 9.0, 0)),
        ({"state": "FAILED", "exit": "75:0", "reason": "NonZeroExitCode"}, ("failed", "FAILED", "exit code 75", "", 0.0, 0)),
        ({"state": "FAILED", "exit": "0:9"}, ("failed", "FAILED", "killed by SIGKILL", "", 0.0, 0)),
        ({"state": "FAILED", "exit": "0:99"}, ("failed", "FAILED", "killed by signal 99", "", 0.0, 0)),
        ({"state": "FAILED", "exit": "0:0", "reason": "JobLaunchFailure"}, ("failed", "FAILED", "JobLaunchFailure", "", 0.0, 0)),
        ({"state": "TIMEOUT"}, ("failed", "TIMEOUT", "time limit reached", "", 0.0, 0)),
        ({"state": "NODE_FAIL"}, ("failed", "NODE_FAIL", "a node failed", "", 0.0, 0)),
        ({"state": "OUT_OF_MEMORY", "exit": "0:125"}, ("failed", "OUT_OF_MEMORY", "out of memory", "", 0.0, 0)),
        ({"state": "CANCELLED by 0", "reason": "None"}, ("cancelled", "CANCELLED", "", "", 0.0, 0)),
        ({"state": "BRAND_NEW", "reason": "None"}, ("unknown", "BRAND_NEW", "", "", 0.0, 0)),
    ],
)
@pytest.mark.parametrize("forgotten", ["", "controller"])
def test_states(cluster: Cluster, folder: Path, task: dict[str, Any], seen: tuple[Any, ...], forgotten: str):
    """The controller and, for what it has forgotten, accounting say the same; but what accounting thinks alive then is not known."""
    submit([job(folder, "a")], folder)
    cluster.set("1_0", **{"reason": "None", **task, "forgotten": forgotten})
    found = slurm.states(SOON, ["1_0"])["1_0"]
    if forgotten and seen[0] in ("queued", "running"):
        assert found.state == "unknown"
        assert f"accounting says {seen[1]}, but the controller does not know" in found.reason
        return
    assert (found.state, found.word, found.reason, found.node, found.seconds, found.restarts) == seen


def test_the_last_record_of_a_requeued_job_counts(cluster: Cluster, folder: Path):
    submit([job(folder, "a")], folder)
    cluster.set("1_0", state="COMPLETED", restarts=3, forgotten="controller")
    found = slurm.states(SOON, ["1_0"])["1_0"]
    assert (found.state, found.restarts) == ("completed", 3)


def test_a_forgotten_job_is_absent(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a"), job(folder, "b")], folder)
    cluster.set("1_0", forgotten="everywhere")
    cluster.forget_calls()
    assert list(slurm.states(SOON, [*ids, "4711_0"])) == ["1_1"]
    assert len(cluster.calls()) == 2
    assert slurm.states(SOON, ["4711_0"]) == {}


def test_without_accounting_the_controller_decides(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a"), job(folder, "b")], folder)
    cluster.configure(accounting=False)
    cluster.set("1_0", forgotten="controller")
    assert list(slurm.states(SOON, ids)) == ["1_1"]
    assert slurm.find(SOON, folder, ["a", "b"]) == {"a": "1_0", "b": "1_1"}


def test_accounting_that_is_down_makes_no_job_gone(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a"), job(folder, "b")], folder)
    cluster.set("1_0", forgotten="controller")
    cluster.fail("sacct", "say", "sacct: error: Problem talking to the database: Connection refused", times=99)
    found = slurm.states(SOON, ids)
    assert (found["1_0"].state, found["1_1"].state) == ("unknown", "queued")
    assert "Connection refused" in found["1_0"].reason


def test_a_controller_that_does_not_answer_is_an_error_not_a_state(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a")], folder)
    cluster.fail("squeue", "say", DOWN, times=99)
    with pytest.raises(LaunchError, match=r"does not answer: .*Unable to contact slurm controller"):
        slurm.states(SOON, ids)


def test_one_lost_answer_is_asked_for_again(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a")], folder)
    cluster.fail("squeue", "say", AWAY)
    assert slurm.states(SOON, ids)["1_0"].state == "queued"


def test_settings_of_the_shell_do_not_change_the_question(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The stand-in cannot show what SQUEUE_STATES does to a real squeue; that it does not arrive can be seen."""
    path = cluster.bin / "squeue"
    path.write_text(path.read_text().replace("exec", f"env > {folder}/seen; exec"))
    for name in ("SQUEUE_STATES", "SQUEUE_FORMAT", "SLURM_TIME_FORMAT", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "RUNNING")
    monkeypatch.setenv("SLURM_CONF", "/kept")
    ids, _ = submit([job(folder, "a")], folder)
    slurm.states(SOON, ids)
    names = {line.partition("=")[0] for line in (folder / "seen").read_text().splitlines()}
    assert not {"SQUEUE_STATES", "SQUEUE_FORMAT", "SLURM_TIME_FORMAT", "SLURM_JOB_ID"} & names
    assert {"SLURM_CONF", "PATH", "HOME"} <= names


def test_kill_is_idempotent(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, f"e{i}") for i in range(3)], folder)
    slurm.kill(SOON, ids[1:])
    slurm.kill(SOON, [*ids[1:], "4711_0"])
    assert cluster.alive() == ["1_0"]
    cluster.fail("scancel", "say", "scancel: error: Kill job error on job id 1_0: Job/step already completing or completed")
    slurm.kill(SOON, ["1_0"])
    cluster.fail("scancel", "say", "scancel: error: Kill job error on job id 1_0: Access/permission denied")
    with pytest.raises(LaunchError, match="permission denied"):
        slurm.kill(SOON, ["1_0"])


def test_find_asks_slurm_for_what_was_not_noted(cluster: Cluster, folder: Path):
    jobs = [job(folder, "a"), job(folder, "b"), job(folder, "c", after=("a",))]
    submit(jobs, folder)
    cluster.set("2_0", forgotten="controller")
    assert slurm.find(SOON, folder, ["a", "b", "c", "d"]) == {"a": "1_0", "b": "1_1", "c": "2_0"}
    assert slurm.find(SOON, folder / "empty", ["a"]) == {}
    (folder / "array-002").mkdir()  # a crash before its ids were written
    assert slurm.find(SOON, folder, ["b"]) == {"b": "1_1"}


def test_check(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    slurm.check(slurm.Config())
    slurm.check(slurm.Config(partition="low,high"))
    assert [call[0] for call in cluster.calls()] == ["scontrol", "scontrol"]
    with pytest.raises(LaunchError, match=r"unknown partition 'hihg'. Did you mean 'high'"):
        slurm.check(slurm.Config(partition="hihg"))
    (cluster.bin / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(cluster.bin))
    with pytest.raises(LaunchError, match="sbatch: no such command on PATH"):
        slurm.check(slurm.Config())


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({"time": "soon"}, r"time: expected minutes as an int, 'HH:MM:SS' or 'D-HH:MM:SS', got 'soon'"),
        ({"time": 0}, "longer than 0"),
        ({"time": True}, "time"),
        ({"time": 1}, r"signal_seconds: 120 seconds before the time limit lie before the start"),
        ({"partition": "two words"}, "partition"),
        ({"mem": "much"}, "mem"),
        ({"gpus_per_node": "four"}, "gpus_per_node"),
        ({"max_running": 0}, "max_running"),
        ({"options": {"--exclude": "n1"}}, "without its dashes.*'--exclude'"),
        ({"options": {"mem": "1G"}}, r"'mem' cannot be set here. Write 'mem' of the job config"),
        ({"options": {"nodes": 2}}, r"Write 'processes.nodes'"),
        ({"options": {"array": "0-9"}}, "The launcher needs it for itself"),
        ({"options": {"comment": "a\n#SBATCH x"}}, "expected text on one line"),
        ({"environment": {"1X": "y"}}, "environment"),
        ({"partitoin": "x"}, "Did you mean 'partition'"),
    ],
)
def test_mistakes_in_the_job_config(raw: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        configs.load(slurm.Config, raw, "JOB_CONFIGS['slurm']")


def test_ids_collapse_and_expand():
    ids = ["7_0", "7_1", "7_2", "7_5", "9", "8_3"]
    assert collapse(ids) == ["7_[0-2,5]", "8_[3]", "9"]
    assert list(itertools.chain(*map(expand, collapse(ids)))) == ["7_0", "7_1", "7_2", "7_5", "8_3", "9"]
    assert list(expand("7_[0-1,4%2]")) == ["7_0", "7_1", "7_4"]
    assert list(expand("7_[0-1,...")) == ["7_0", "7_1"]
    assert list(expand("nonsense")) == []


WAITS = """
trap 'echo told; [ -n "$DEAF" ] || exit 75' TERM
echo up; touch "$UP"
until [ -e "$LET" ]; do sleep 0.02; done
exit ${CODE:-0}
"""


class Task:
    """One task of the script, running without any Slurm."""

    def __init__(self, folder: Path, requeue: bool, **environment: str) -> None:
        self.job = job(folder, "exp")
        write_tasks(folder / "array-000", [self.job], [WAITS], requeue)
        self.up, self.let = folder / "up", folder / "let"
        names = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "57", "UP": str(self.up), "LET": str(self.let)}
        self.process = subprocess.Popen(
            ["bash", str(write_script(folder)), str(folder / "array-000")],
            env={**os.environ, **names, **environment},
            start_new_session=True,
        )
        wait_until(self.up.exists)

    def out(self) -> str:
        return (self.job.log_dir / "exp.out.log").read_text()


def test_the_time_limit_stops_and_requeues_this_task_alone(cluster: Cluster, folder: Path):
    task = Task(folder, requeue=True)
    task.process.send_signal(signal.SIGUSR1)
    assert task.process.wait(20) == 0
    assert task.out() == "up\ntold\n"
    assert cluster.calls("scontrol") == [["scontrol", "requeue", "41_0"]]


def test_a_requeue_that_is_refused_is_tried_again(cluster: Cluster, folder: Path):
    cluster.fail("scontrol", "say", "slurm_requeue error: Unable to contact slurm controller (connect failure)")
    task = Task(folder, requeue=True)
    task.process.send_signal(signal.SIGUSR1)
    assert task.process.wait(20) == 0
    assert len(cluster.calls("scontrol")) == 2


@pytest.mark.parametrize(("requeue", "deaf", "code"), [(False, "", 75), (True, "1", 0), (True, "1", 3)])
def test_the_time_limit_requeues_no_job_that_shall_not_or_that_ended(cluster: Cluster, folder: Path, requeue: bool, deaf: str, code: int):
    task = Task(folder, requeue, DEAF=deaf, CODE=str(code))
    task.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "told" in task.out())
    task.let.touch()
    assert task.process.wait(20) == code
    assert not cluster.calls("scontrol")


def test_scancel_and_preemption_requeue_nothing(cluster: Cluster, folder: Path):
    """Slurm's TERM reaches every process at once."""
    task = Task(folder, requeue=True)
    children = subprocess.run(["pgrep", "-P", str(task.process.pid)], capture_output=True, text=True, check=True).stdout.split()
    task.process.send_signal(signal.SIGTERM)
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    assert task.process.wait(20) == 75
    assert task.out() == "up\ntold\n"
    assert not cluster.calls("scontrol")
