"""What is queued on Slurm, against a stand-in for its commands that fails on demand and can run the tasks for real."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from src.errors import LaunchError, RunError
from src.launch.job import Job
from src.launch.slurm import launcher
from tests.core.launch.fakes.fake_slurm.cluster import HUNG, IMPATIENT, SOON, Cluster, job, submit

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def option(call: list[str], name: str) -> str | None:
    """Value of an sbatch option, "" for a flag."""
    return next((word.partition("=")[2] for word in call if word.partition("=")[0] == f"--{name}"), None)


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


def test_submitting_no_jobs_runs_no_command(cluster: Cluster, folder: Path):
    assert submit([], folder)[0] == []
    assert SOON.states([]) == {}
    SOON.kill([])
    assert not cluster.calls()


def test_resources_arrive_at_sbatch(cluster: Cluster, folder: Path):
    config = launcher.Config(
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
    expected = {
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
    assert {name: option(call, name) for name in expected} == expected
    assert option(call, "requeue") is None


def test_unset_resources_use_the_cluster_defaults(cluster: Cluster, folder: Path):
    submit([job(folder, "a")], folder, launcher.Config(signal_seconds=0, gpus_per_node=0, options={"exclusive": False}))
    (call,) = cluster.calls("sbatch")
    assert [option(call, name) for name in ("partition", "time", "mem", "signal", "exclusive", "dependency")] == [
        None
    ] * 6
    assert option(call, "gpus-per-node") == "0"


def test_jobs_with_equal_resources_and_parents_share_an_array(cluster: Cluster, folder: Path):
    big = launcher.Config(mem="99G", patience_seconds=300.0)
    jobs = [
        job(folder, "p0"),
        job(folder, "p1"),
        job(folder, "c0", after=("p0",)),
        job(folder, "c1", after=("p1",)),
        job(folder, "c2", after=("p0",)),
        job(folder, "big", resources=big),
        job(folder, "g", after=("c1", "c0"), after_jobs=("77_3",)),
        job(folder, "same", resources=launcher.Config(patience_seconds=300.0)),
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


@pytest.mark.slow
def test_thousands_of_jobs_take_few_arrays_and_little_time(cluster: Cluster, folder: Path):
    jobs = [job(folder, f"{i:032x}") for i in range(2500)]
    begin = time.process_time()
    ids, _ = submit(jobs, folder)
    assert time.process_time() - begin < 2.5, "seconds of our own"
    assert [option(call, "array") for call in cluster.calls("sbatch")] == ["0-1000", "0-1000", "0-497"]
    assert ids[1000:1002] == ["1_1000", "2_0"]
    assert len(set(ids)) == 2500
    cluster.forget_calls()
    assert len(SOON.states(ids[:1000])) == 1000
    assert len(cluster.calls()) == 1
    for array in "123":
        for i in range(0, 400, 7):
            cluster.set(f"{array}_{i}", forgotten="controller", state="COMPLETED")
    cluster.forget_calls()
    assert len(SOON.states(ids)) == 2500
    assert [call[0] for call in cluster.calls()] == ["squeue", "sacct"]
    cluster.forget_calls()
    SOON.kill(ids)
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
    config = launcher.Config(
        environment=environment, setup=["greeting='hello there'; export greeting", "echo $greeting"]
    )
    code = f"import os, json; print(json.dumps([os.environ.get('V%d' % i) for i in range({len(HOSTILE)})]))"
    shows = Job("shows", ("-c", code), folder, tmp_path / "runs" / "shows", folder / "logs")
    for _ in range(2):
        submit(
            [Job("echoes", job(folder, "echoes", *HOSTILE).args, folder, tmp_path / "r", folder / "logs"), shows],
            folder,
            config,
        )
    out = (folder / "logs" / "echoes.out.log").read_text().splitlines()
    assert out == ["hello there", json.dumps(HOSTILE)] * 2
    assert (folder / "logs" / "shows.out.log").read_text().splitlines()[1] == json.dumps(HOSTILE)
    assert [cluster.task(i)["state"] for i in ("1_0", "1_1", "2_0", "2_1")] == ["COMPLETED"] * 4
    assert not (folder / "no").exists()


def test_children_of_a_failed_parent_do_not_run(cluster: Cluster, folder: Path):
    cluster.configure(run=True)
    fails = Job("fails", ("-c", "raise SystemExit(3)"), folder, folder / "r", folder / "logs")
    ids, _ = submit(
        [fails, job(folder, "child", after=("fails",)), job(folder, "grandchild", after=("child",))], folder
    )
    result = SOON.states(ids)
    assert (result[ids[0]].state, result[ids[0]].word, result[ids[0]].reason) == ("failed", "FAILED", "exit code 3")
    assert (result[ids[1]].state, result[ids[1]].reason) == ("cancelled", "DependencyNeverSatisfied")
    assert result[ids[2]].state == "cancelled"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope.*Change 'partition' of the job config"),
        ({"account": "nobody"}, "Invalid account or account/partition combination.*Change 'account'"),
    ],
)
def test_a_refusal_is_passed_on_and_nothing_stays_queued(
    cluster: Cluster, folder: Path, change: dict[str, str], match: str
):
    bad_config = launcher.Config(patience_seconds=300.0, **change)  # type: ignore[arg-type]
    jobs = [job(folder, "a"), job(folder, "b"), job(folder, "c", resources=bad_config)]
    with pytest.raises(LaunchError, match=match):
        submit(jobs, folder)
    assert len(cluster.calls("sbatch")) == 2
    assert cluster.task("1_0")["state"].startswith("CANCELLED")
    assert not cluster.alive()


def test_a_full_disk_cancels_queued_jobs(cluster: Cluster, folder: Path):
    def note(ids: Mapping[str, str]) -> None:
        raise RunError("disk full")

    with pytest.raises(RunError, match="disk full"):
        SOON.submit([job(folder, "a")], folder, note)
    assert not cluster.alive()


def test_sbatch_that_timed_out_before_is_run_again(cluster: Cluster, folder: Path):
    cluster.fail("sbatch", "say", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    ids, _ = submit([job(folder, "a")], folder)
    assert ids == ["1_0"]
    assert len(cluster.calls("sbatch")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("do", ["say_after", "hang_after"])
def test_sbatch_that_timed_out_after_queuing_is_not_run_again(cluster: Cluster, folder: Path, do: str):
    cluster.fail("sbatch", do, "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    ids, notes = submit([job(folder, "a"), job(folder, "b")], folder, HUNG)
    assert ids == ["1_0", "1_1"]
    assert notes == {"a": "1_0", "b": "1_1"}
    assert len(cluster.calls("sbatch")) == 1
    assert cluster.alive() == ["1_0", "1_1"]


def test_two_lost_answers_still_leave_one_array(cluster: Cluster, folder: Path):
    """sbatch queues and does not say so, and the queue is a moment late: the second sbatch makes a double, which is
    cancelled."""
    cluster.fail("sbatch", "say_after", "sbatch: error: Socket timed out on send/recv operation")
    cluster.fail("squeue", "garbage", "")
    ids, _ = submit([job(folder, "a")], folder)
    assert ids == ["2_0"]
    assert cluster.alive() == ["2_0"]


@pytest.mark.slow
@pytest.mark.parametrize("do", ["say", "hang"])
def test_a_controller_that_is_down_is_retried(cluster: Cluster, folder: Path, do: str):
    cluster.fail(
        "scontrol", do, "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)", times=99
    )
    patience = launcher.Config(patience_seconds=2.5) if do == "hang" else IMPATIENT
    with pytest.raises(LaunchError, match=r"scontrol.*(does not answer|no answer).*scontrol ping"):
        submit([job(folder, "a")], folder, patience)
    assert cluster.clock.now < patience.patience_seconds
    assert len(cluster.calls("scontrol")) >= 2
    assert not cluster.calls("sbatch")


def test_sbatch_that_never_answers_leaves_nothing(cluster: Cluster, folder: Path):
    cluster.fail(
        "sbatch",
        "say_after",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller",
        times=99,
    )
    cluster.fail("squeue", "say", DOWN, times=99)
    with pytest.raises(LaunchError, match="No job is queued"):
        submit([job(folder, "a")], folder, IMPATIENT)
    assert not cluster.alive()


def test_an_unknown_outcome_is_reported(cluster: Cluster, folder: Path):
    for command in ("sbatch", "squeue", "scancel"):
        cluster.fail(command, "say", DOWN, times=99)
    with pytest.raises(
        LaunchError,
        match=r"The jobs can be queued; once Slurm answers, `scancel --name=20260101-batch.array-000` cancels them",
    ):
        submit([job(folder, "a")], folder, IMPATIENT)


def test_an_answer_that_is_no_id_is_an_error(cluster: Cluster, folder: Path):
    cluster.fail("sbatch", "garbage", "<html>502</html>")
    with pytest.raises(LaunchError, match="expected the id of a job, got '<html>502</html>'"):
        submit([job(folder, "a")], folder)
