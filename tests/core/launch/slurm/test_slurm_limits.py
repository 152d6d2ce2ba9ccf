"""Limits of a submission to Slurm, and refusals, against the stand-in for its commands."""

import os
import re
from pathlib import Path

import pytest

from src.errors import ConfigError, LaunchError
from src.launch import actions, resources
from src.launch.slurm import launcher, sbatch
from src.launch.slurm.states import _bytes, _scheduler_state
from tests.core.launch.fakes.fake_slurm.cluster import SOON, Cluster, job, submit
from tests.core.launch.test_status import World, make_item

LIMIT = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)"


def config(max_running: int | None, **more: object) -> launcher.Config:
    return launcher.Config(patience_seconds=300.0, max_running=max_running, **more)  # type: ignore[arg-type]


def queued_arrays(cluster: Cluster) -> list[tuple[str, str]]:
    """Tasks and dependency of each array."""
    calls = [
        dict(word.removeprefix("--").partition("=")[::2] for word in call if word.startswith("--"))
        for call in cluster.calls("sbatch")
    ]
    return [(call["array"], call.get("dependency", "")) for call in calls]


def test_arrays_over_the_limit_run_one_after_another(cluster: Cluster, folder: Path):
    cluster.configure(max_array=4)
    submit([job(folder, str(i)) for i in range(10)], folder, config(3))
    assert queued_arrays(cluster) == [("0-3%3", ""), ("0-3%3", "afterany:1"), ("0-1%3", "afterany:2")]


def test_small_arrays_run_together_within_the_limit(cluster: Cluster, folder: Path):
    jobs = [job(folder, f"{mem}{i}", resources=config(4, mem=f"{mem}G")) for mem in (1, 2, 3) for i in range(2)]
    submit(jobs, folder, config(4))
    assert queued_arrays(cluster) == [("0-1%4", ""), ("0-1%4", ""), ("0-1%4", "afterany:1:2")]


def test_children_wait_for_their_parents_and_for_the_arrays_before(cluster: Cluster, folder: Path):
    children = [job(folder, f"child{i}", after=(parent,)) for i, parent in enumerate(("a", "b"))]
    submit([job(folder, "a"), job(folder, "b"), *children], folder, config(2))
    assert queued_arrays(cluster) == [
        ("0-1%2", ""),
        ("0-0%2", "afterok:1_0,afterany:1"),
        ("0-0%2", "afterok:1_1,afterany:1"),
    ]


def test_an_override_has_a_lower_limit(cluster: Cluster, folder: Path):
    cluster.configure(max_array=2)
    jobs = [job(folder, f"small{i}") for i in range(2)] + [
        job(folder, f"big{i}", resources=config(1, mem="99G")) for i in range(3)
    ]
    submit(jobs, folder, config(8))
    assert queued_arrays(cluster) == [("0-1%8", ""), ("0-1%1", ""), ("0-0%1", "afterany:1:2")]


def test_without_a_limit_no_array_waits(cluster: Cluster, folder: Path):
    cluster.configure(max_array=2)
    submit([job(folder, str(i)) for i in range(4)], folder, config(None))
    assert queued_arrays(cluster) == [("0-1", ""), ("0-1", "")]


def test_shared_tasks_count_as_tasks(cluster: Cluster, folder: Path, tmp_path: Path):
    cluster.configure(max_array=2)
    shared = config(2, jobs_per_task=2, submissions=str(tmp_path))
    submit([job(folder, str(i)) for i in range(6)], folder, shared)
    assert queued_arrays(cluster) == [("0-1%2", ""), ("0-0%2", "afterany:1")]


def test_throttle_is_shared_by_the_arrays_that_run_together(cluster: Cluster, folder: Path):
    ids, _ = submit(
        [job(folder, f"{mem}{i}", resources=config(None, mem=f"{mem}G")) for mem in (1, 2) for i in range(4)],
        folder,
        config(None),
    )
    SOON.throttle(ids, 3)
    assert [cluster.state["arrays"][array]["throttle"] for array in ("1", "2")] == ["2", "1"]
    with pytest.raises(LaunchError, match="--max_running 1"):
        SOON.throttle(ids, 1)
    SOON.throttle(ids, 0)
    assert [cluster.state["arrays"][array]["throttle"] for array in ("1", "2")] == ["0", "0"]


@pytest.mark.parametrize(
    ("path", "output"),
    [("/a/100%A/b.log", "/a/100%%A/b.log"), ("/a/b\\%j/c", "/a/b\\\\%j/c"), ("/a/%%", "/a/%%%%"), ("/a b/c", "/a b/c")],
)
def test_paths_are_escaped_for_slurm(path: str, output: str):
    assert sbatch._escape(path) == output


def test_an_output_that_cannot_be_opened_is_explained():
    state = _scheduler_state("FAILED", "NonZeroExitCode", "n1", "0:53", 0.0, 0)
    assert "output" in state.reason
    assert "node" in state.reason
    assert "signal" not in state.reason


def test_a_refusal_by_sbatch_leaves_no_save_directories(cluster: Cluster, tmp_path: Path):
    world = World(tmp_path)
    items = [make_item("end", str(n)) for n in range(3)]
    old = world.runs / items[0].exp_id
    target = resources.load("there", {"launcher": "slurm"}, world.runs)
    cluster.fail("sbatch", "say", LIMIT)
    with pytest.raises(LaunchError) as error_info:
        actions.run(world.request(items), target)
    assert re.search(r"The job config exceeds a limit of the cluster: .*'time'", str(error_info.value))
    assert not [name for name in os.listdir(world.runs) if len(name) == 32]
    old.mkdir()
    (old / "scores.jsonl").write_text("")
    cluster.fail("sbatch", "say", LIMIT)
    with pytest.raises(LaunchError):
        actions.run(world.request(items), target)
    assert [name for name in os.listdir(world.runs) if len(name) == 32] == [old.name], "used before"
    actions.run(world.request(items), target)
    assert len([name for name in os.listdir(world.runs) if len(name) == 32]) == 3


def test_an_unknown_job_config_names_the_examples(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"'slurn'.*job_configs\.py.*resources/job_configs/slurm\.md"):
        resources.load_named("slurn", tmp_path, [])


@pytest.mark.parametrize(("text", "expected"), [("531620K", 531_620 * 2**10), ("4G", 2**32), ("12", 12), ("500Mc", 0)])
def test_memory_of_sacct_is_read_in_bytes(text: str, expected: int):
    assert _bytes(text) == expected
