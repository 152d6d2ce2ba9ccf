"""`max_running` and hostile paths on a real Slurm."""

from pathlib import Path

import pytest

from src.launch.job import Job
from src.launch.slurm import launcher
from tests.slurm.real import Cluster, wait_until
from tests.slurm.test_launcher import ends, job, log, submit

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_the_limit_holds_for_several_arrays(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Eight tasks in five arrays: of two sizes, cut at two tasks, with a child."""
    monkeypatch.setattr(launcher, "_largest_array", lambda _: 2)
    config = launcher.Config(patience_seconds=300.0, max_running=2, cpus_per_task=1)
    small = config.model_copy(update={"mem": "100M"})
    code = "import time; a = time.time(); time.sleep(1.5); print(a, time.time())"
    jobs = [job(folder, f"a{i}", code) for i in range(4)] + [
        job(folder, f"b{i}", code, resources=small) for i in range(3)
    ]
    ids = submit([*jobs, job(folder, "child", code, after=("b0",))], folder, config)
    assert len({each.partition("_")[0] for each in ids}) == 5
    result = ends(config, ids)
    assert {outcome.state for outcome in result.values()} == {"completed"}
    spans = [tuple(map(float, log(folder, exp_id).split())) for exp_id in (*(each.exp_id for each in jobs), "child")]
    overlaps = [sum(start <= begin < end for start, end in spans) for begin, _ in spans]
    assert max(overlaps) == 2


def test_a_failed_array_does_not_block_the_next(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "_largest_array", lambda _: 1)
    config = launcher.Config(patience_seconds=300.0, max_running=1, cpus_per_task=1)
    ids = submit([job(folder, "fails", "raise SystemExit(3)"), job(folder, "works", "pass")], folder, config)
    result = ends(config, ids)
    assert [result[each].state for each in ids] == ["failed", "completed"]


@pytest.mark.parametrize("name", ["100%A", "a%%b", "%j %x", "b\\%A", "two\\\\x", "quo\"t'e"])
def test_any_path_works(cluster: Cluster, tmp_path: Path, name: str):
    folder = tmp_path / name / "submissions" / "batch-1"
    folder.mkdir(parents=True)
    config = launcher.Config(patience_seconds=300.0, cpus_per_task=1)
    ids = submit(
        [Job("a", ("-c", "print('hello')"), folder, tmp_path / "runs" / "a", tmp_path / name / "logs")], folder, config
    )
    assert ends(config, ids)[ids[0]].state == "completed"
    assert (tmp_path / name / "logs" / "a.out.log").read_text() == "hello\n"


def test_a_folder_that_the_node_does_not_see(cluster: Cluster, tmp_path: Path):
    folder = tmp_path / "runs" / "batch-1"
    folder.mkdir(parents=True)
    config = launcher.Config(patience_seconds=300.0, cpus_per_task=1, options={"hold": True})
    ids = submit([job(folder, "a", "pass")], folder, config)
    (tmp_path / "runs").rename(tmp_path / "moved")
    config.release(ids)
    wait_until(lambda: config.states(ids)[ids[0]].state == "failed", "the failure")
    assert "output" in config.states(ids)[ids[0]].reason
