"""What Slurm says of jobs, killing and finding them, and the settings, against a stand-in for its commands."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError, LaunchError
from src.experiments import config
from src.launch.slurm import launcher, states
from src.launch.slurm.commands import collapse, expand
from src.launch.slurm.states import STATES
from tests.core.launch.fakes.fake_slurm.cluster import IMPATIENT, SOON, Cluster, job, submit

AWAY = "squeue: error: slurm_receive_msgs: Socket timed out on send/recv operation"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
# Job states of `man squeue` and of `man sacct`, 22.05 to 24.05.
WORDS = (
    "BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY "
    "PENDING POWER_UP_NODE "
    "PREEMPTED RECONFIG_FAIL REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING RESV_DEL_HOLD REVOKED RUNNING SIGNALING "
    "SPECIAL_EXIT STAGE_OUT "
    "STOPPED SUSPENDED TIMEOUT UPDATE_DB"
)


@pytest.mark.parametrize("word", WORDS.split())
def test_every_word_of_slurm_has_a_state(word: str):
    assert STATES[word] in {"queued", "running", "completed", "failed", "cancelled"}


@pytest.mark.parametrize(
    ("task", "seen"),
    [
        ({"state": "PENDING", "reason": "Dependency"}, ("queued", "PENDING", "Dependency", "", None, 0)),
        (
            {"state": "PENDING", "reason": "DependencyNeverSatisfied"},
            ("cancelled", "PENDING", "DependencyNeverSatisfied", "", 0.0, 0),
        ),
        (
            {"state": "PENDING", "reason": "BeginTime", "restarts": 2, "node": "n1"},
            ("queued", "PENDING", "BeginTime", "n1", None, 2),
        ),
        ({"state": "RUNNING", "node": "n[1-2]", "seconds": 75}, ("running", "RUNNING", "", "n[1-2]", 75.0, 0)),
        ({"state": "COMPLETING", "node": "n1"}, ("running", "COMPLETING", "", "n1", 0.0, 0)),
        ({"state": "COMPLETED", "seconds": 9}, ("completed", "COMPLETED", "", "", 9.0, 0)),
        (
            {"state": "FAILED", "exit": "75:0", "reason": "NonZeroExitCode"},
            ("failed", "FAILED", "exit code 75", "", 0.0, 0),
        ),
        ({"state": "FAILED", "exit": "0:9"}, ("failed", "FAILED", "killed by SIGKILL", "", 0.0, 0)),
        ({"state": "FAILED", "exit": "0:99"}, ("failed", "FAILED", "killed by signal 99", "", 0.0, 0)),
        (
            {"state": "FAILED", "exit": "0:0", "reason": "JobLaunchFailure"},
            ("failed", "FAILED", "JobLaunchFailure", "", 0.0, 0),
        ),
        ({"state": "TIMEOUT"}, ("failed", "TIMEOUT", "time limit reached", "", 0.0, 0)),
        ({"state": "NODE_FAIL"}, ("failed", "NODE_FAIL", "a node failed", "", 0.0, 0)),
        ({"state": "OUT_OF_MEMORY", "exit": "0:125"}, ("failed", "OUT_OF_MEMORY", "out of memory", "", 0.0, 0)),
        ({"state": "CANCELLED by 0", "reason": "None"}, ("cancelled", "CANCELLED", "", "", 0.0, 0)),
        ({"state": "BRAND_NEW", "reason": "None"}, ("unknown", "BRAND_NEW", "", "", 0.0, 0)),
    ],
)
@pytest.mark.parametrize("how_forgotten", ["", "controller"])
def test_states(cluster: Cluster, folder: Path, task: dict[str, Any], seen: tuple[Any, ...], how_forgotten: str):
    """The controller and, for what it has forgotten, accounting say the same; but what accounting thinks alive then is
    not known."""
    submit([job(folder, "a")], folder)
    cluster.set("1_0", **{"reason": "None", **task, "forgotten": how_forgotten})
    state = SOON.states(["1_0"])["1_0"]
    if how_forgotten and seen[0] in ("queued", "running"):
        assert state.state == "unknown"
        assert f"accounting reports {seen[1]}, but the controller does not know" in state.reason
        return
    assert (state.state, state.word, state.reason, state.node, state.seconds, state.restarts) == seen


def test_when_a_waiting_job_is_expected_to_start(cluster: Cluster, folder: Path):
    submit([job(folder, "a"), job(folder, "b")], folder)
    cluster.set("1_0", start="2026-01-01T12:30:00")
    cluster.set("1_1", start="2026-01-01T12:30:00", state="RUNNING")
    job_states = SOON.states(["1_0", "1_1"])
    assert [job_states[name].reason for name in ("1_0", "1_1")] == [
        "Priority; expected to start 2026-01-01T12:30:00",
        "",
    ]


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_MEMORY_SECONDS", 300.0)


@pytest.mark.usefixtures("_patience")
@pytest.mark.parametrize("how_forgotten", ["", "controller"])
@pytest.mark.parametrize(
    ("task", "memory", "reason"),
    [
        ({"state": "FAILED", "exit": "0:9"}, ("531620K", "500M"), "out of memory: MaxRSS 531620K of 500M"),
        ({"state": "FAILED", "exit": "0:9"}, ("531620K", "500Mn"), "out of memory: MaxRSS 531620K of 500M"),
        ({"state": "OUT_OF_MEMORY", "exit": "0:125"}, ("1.5G", "2G"), "out of memory: MaxRSS 1.5G of 2G"),
        ({"state": "FAILED", "exit": "0:9"}, ("1.5G", "2G"), "killed by SIGKILL"),
        ({"state": "FAILED", "exit": "0:9"}, ("1.5G", "0"), "killed by SIGKILL"),
        ({"state": "OUT_OF_MEMORY", "exit": "0:125"}, ("1.5G", "500Mc"), "out of memory: MaxRSS 1.5G"),
        ({"state": "FAILED", "exit": "0:9"}, None, "killed by SIGKILL"),
        ({"state": "FAILED", "exit": "1:0"}, ("3G", "2G"), "exit code 1"),
    ],
)
def test_a_job_over_its_memory_limit_reports_it(
    cluster: Cluster, folder: Path, task: dict[str, Any], memory: Any, reason: str, how_forgotten: str
):
    submit([job(folder, "a")], folder)
    cluster.set("1_0", **task, memory=memory, forgotten=how_forgotten)
    assert SOON.states(["1_0"])["1_0"].reason == reason


@pytest.mark.parametrize("wrong", ["disabled", "absent", "slow", "garbage"])
def test_without_an_answer_of_accounting_a_killed_job_is_killed(
    cluster: Cluster, folder: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
):
    ids, _ = submit([job(folder, "a"), job(folder, "b")], folder)
    cluster.set("1_0", state="FAILED", exit="0:9", memory=("3G", "2G"))
    if wrong == "disabled":
        cluster.configure(accounting=False)
    elif wrong == "absent":
        (cluster.bin / "sacct").unlink()
        monkeypatch.setenv("PATH", str(cluster.bin))
    elif wrong == "slow":
        monkeypatch.setattr(states, "_MEMORY_SECONDS", 0.5)
        cluster.fail("sacct", "hang")
    else:
        cluster.fail("sacct", "garbage", text="1_0.batch|\nwhat is this\n||\n9_9.batch|3G|2G\n")
    job_states = SOON.states(ids)
    assert [job_states[i].reason for i in ids] == ["killed by SIGKILL", "Priority"]


def test_accounting_is_queried_only_for_the_memory_of_killed_jobs(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, f"e{i}") for i in range(3)], folder)
    cluster.set("1_0", state="FAILED", exit="1:0")
    cluster.forget_calls()
    SOON.states(ids)
    assert [call[0] for call in cluster.calls()] == ["squeue"]
    cluster.set("1_1", state="OUT_OF_MEMORY")
    SOON.states(ids)
    assert "--jobs=1_1" in cluster.calls()[-1]


def test_the_last_record_of_a_requeued_job_counts(cluster: Cluster, folder: Path):
    submit([job(folder, "a")], folder)
    cluster.set("1_0", state="COMPLETED", restarts=3, forgotten="controller")
    state = SOON.states(["1_0"])["1_0"]
    assert (state.state, state.restarts) == ("completed", 3)


def test_a_forgotten_array_is_absent(cluster: Cluster, folder: Path):
    submit([job(folder, "a")], folder)
    (other,), _ = submit([job(folder, "b")], folder)
    cluster.set("1_0", forgotten="everywhere")
    cluster.forget_calls()
    assert list(SOON.states(["1_0", other, "4711_0"])) == [other]
    assert len(cluster.calls()) == 2
    assert SOON.states(["4711_0"]) == {}


def test_without_accounting_the_controller_decides(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a"), job(folder, "b")], folder)
    cluster.configure(accounting=False)
    cluster.set("1_0", forgotten="controller")
    assert list(SOON.states(ids)) == ["1_1"]
    assert SOON.find(folder, ["a", "b"]) == {"a": "1_0", "b": "1_1"}


def test_accounting_that_is_down_makes_no_job_gone(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a"), job(folder, "b")], folder)
    cluster.set("1_0", forgotten="controller")
    cluster.fail("sacct", "say", "sacct: error: Problem talking to the database: Connection refused", times=99)
    job_states = IMPATIENT.states(ids)
    assert (job_states["1_0"].state, job_states["1_1"].state) == ("unknown", "queued")
    assert "Connection refused" in job_states["1_0"].reason


def test_a_controller_that_does_not_answer_is_an_error_not_a_state(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a")], folder)
    cluster.fail("squeue", "say", DOWN, times=99)
    with pytest.raises(LaunchError, match=r"does not answer: .*Unable to contact slurm controller"):
        IMPATIENT.states(ids)


def test_a_lost_answer_is_retried(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, "a")], folder)
    cluster.fail("squeue", "say", AWAY)
    assert SOON.states(ids)["1_0"].state == "queued"


def test_settings_of_the_shell_do_not_change_the_question(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The stand-in cannot show what SQUEUE_STATES does to a real squeue; that it does not arrive can be seen."""
    path = cluster.bin / "squeue"
    path.write_text(path.read_text().replace("exec", f"env > {folder}/seen; exec"))
    foreign = {
        "SQUEUE_STATES",
        "SQUEUE_FORMAT",
        "SLURM_TIME_FORMAT",
        "SLURM_JOB_ID",
        "RANK",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
    }
    for name in foreign:
        monkeypatch.setenv(name, "RUNNING")
    monkeypatch.setenv("SLURM_CONF", "/kept")
    ids, _ = submit([job(folder, "a")], folder)
    SOON.states(ids)
    names = {line.partition("=")[0] for line in (folder / "seen").read_text().splitlines()}
    assert not foreign & names
    assert {"SLURM_CONF", "PATH", "HOME"} <= names


def test_killing_ending_jobs_is_no_error_but_a_refusal_is(cluster: Cluster, folder: Path):
    submit([job(folder, "a")], folder)
    cluster.fail(
        "scancel", "say", "scancel: error: Kill job error on job id 1_0: Job/step already completing or completed"
    )
    SOON.kill(["1_0"])
    cluster.fail("scancel", "say", "scancel: error: Kill job error on job id 1_0: Access/permission denied")
    with pytest.raises(LaunchError, match="permission denied"):
        SOON.kill(["1_0"])


def test_jobs_cancelled_before_their_start_are_not_lost(cluster: Cluster, folder: Path):
    ids, _ = submit([job(folder, f"e{i}") for i in range(4)], folder)
    cluster.set("1_0", state="RUNNING")
    SOON.kill(ids[:3])
    job_states = SOON.states(ids)
    assert [job_states[i].state for i in ids] == ["cancelled"] * 3 + ["queued"]
    assert job_states["1_1"].reason == "cancelled before it started"
    SOON.kill(ids[3:])
    assert [SOON.states([i])[i].state for i in ids] == ["cancelled"] * 4
    cluster.configure(accounting=False)
    assert list(SOON.states(ids)) == ["1_0"]


def test_find_queries_slurm_for_unrecorded_jobs(cluster: Cluster, folder: Path):
    jobs = [job(folder, "a"), job(folder, "b"), job(folder, "c", after=("a",))]
    submit(jobs, folder)
    cluster.set("2_0", forgotten="controller")
    assert SOON.find(folder, ["a", "b", "c", "d"]) == {"a": "1_0", "b": "1_1", "c": "2_0"}
    assert SOON.find(folder / "empty", ["a"]) == {}
    (folder / "array-002.tasks").write_bytes(b"d\0")  # written, and never queued
    assert SOON.find(folder, ["b", "d"]) == {"b": "1_1"}


def test_check(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    launcher.Config().check()
    launcher.Config(partition="low,high").check()
    assert [call[0] for call in cluster.calls()] == ["scontrol", "scontrol"]
    with pytest.raises(LaunchError, match=r"unknown partition 'hihg'. Did you mean 'high'"):
        launcher.Config(partition="hihg").check()
    (cluster.bin / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(cluster.bin))
    with pytest.raises(LaunchError, match="sbatch: no such command on PATH"):
        launcher.Config().check()


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({"time": "soon"}, r"time: expected minutes as an int, 'HH:MM:SS' or 'D-HH:MM:SS', got 'soon'"),
        ({"time": 0}, "longer than 0"),
        ({"time": True}, "time"),
        ({"time": 1}, r"signal_seconds: expected less than .time., 1, got 120 seconds"),
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
        (
            {"setup": ["module load cuda", "export A=hf_xyzzyxyzzyxyzzy"]},
            r"\.setup\[1\]: contains what looks like a key",
        ),
        (
            {"processes": {"arguments": ["--x=hf_xyzzyxyzzyxyzzy"]}},
            r"\.processes\.arguments\[0\]: contains what looks like a key",
        ),
        ({"options": {"comment": "hf_xyzzyxyzzyxyzzy"}}, r"\.options: contains what looks like a key"),
        ({"setup": ["curl http://me:xyzzy@host"]}, r"\.setup\[0\]: contains what looks like a key"),
        ({"setup": ["a\0b"]}, r"\.setup\[0\]"),
    ],
)
def test_mistakes_in_the_job_config(raw: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        config.load(launcher.Config, raw, "JOB_CONFIGS['slurm']")


def test_ids_collapse_and_expand():
    ids = ["7_0", "7_1", "7_2", "7_5", "9", "8_3"]
    assert collapse(ids) == ["7_[0-2,5]", "8_[3]", "9"]
    assert list(itertools.chain(*map(expand, collapse(ids)))) == ["7_0", "7_1", "7_2", "7_5", "8_3", "9"]
    assert list(expand("7_[0-1,4%2]")) == ["7_0", "7_1", "7_4"]
    assert list(expand("7_[0-1,...")) == ["7_0", "7_1"]
    assert list(expand("nonsense")) == []
