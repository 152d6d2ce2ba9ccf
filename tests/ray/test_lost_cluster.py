"""The head of a real Ray dies, and with it all that the cluster knew. The last file, as starting another takes long."""

from pathlib import Path

import pytest

from tests.launch.test_status import planned
from tests.ray.real import Cluster, wait_until
from tests.ray.test_cluster import Grid, processes

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_lost_cluster_is_told(cluster: Cluster, tmp_path: Path):
    """It takes its jobs with it. A test after this one would start a new one."""
    grid = Grid(cluster, tmp_path)
    item = planned("end", "lost", waits="nothing")
    grid.run([item])
    wait_until(grid.started, "its start")
    cluster.lose("head")
    wait_until(lambda: not list(processes(item.exp_id)), "its job to die with it")
    (row,) = grid.rows([item])
    assert row.state == "unknown"
    assert "not answer" in row.doubt
