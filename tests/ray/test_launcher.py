"""What every launcher promises, and what the launcher ray does, on a real Ray: what its stand-in in the fast tests
assumes is so."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from src.launch.ray import launcher
from src.launch.ray.api import call_api
from tests.core.launch import test_every_launcher, test_ray
from tests.ray.real import Cluster, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Real(test_every_launcher.World):
    """A job that holds all resources keeps the others waiting until `start`."""

    unknown = "gone.0"
    address = ""

    def open(self) -> None:
        self.config = launcher.Config(
            address=self.address,
            submissions=str(self.submission.parent),
            num_cpus=0,
            resources={"slot": 1},
            patience_seconds=300.0,
            grace_seconds=300,
        )
        self.blocker = f"blocker.{self.folder.name}"
        content = {"submission_id": self.blocker, "entrypoint": "exec sleep 1000", "entrypoint_resources": {"slot": 2}}
        call_api(self.address, "POST", "/api/jobs/", content)
        self.wait_for([self.blocker], "running")

    def start(self, ids: Sequence[str]) -> None:
        call_api(self.address, "POST", f"/api/jobs/{self.blocker}/stop", {})

    def close(self) -> None:
        """The cluster ends them."""


@pytest.fixture
def every_world(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Real]:
    monkeypatch.setattr(Real, "address", cluster.address)
    world = Real(tmp_path, monkeypatch)
    yield world
    world.close()


@pytest.fixture
def own_world(cluster: Cluster, tmp_path: Path) -> test_ray.World:
    return test_ray.World(cluster.address, tmp_path)


def test_the_life_of_a_job(every_world: Real):
    test_every_launcher.test_the_life_of_a_job(every_world)


def test_a_killed_job_is_cancelled(every_world: Real):
    test_every_launcher.test_a_killed_job_is_cancelled_once_and_for_all(every_world, running=True)


def test_a_lost_submission_and_jobs_that_wait(cluster: Cluster, every_world: Real):
    """Whose jobs are found, killed while they wait for resources, and never start."""
    test_every_launcher.test_jobs_of_a_lost_submission_are_found(every_world)
    every_world.start(())
    wait_until(lambda: not cluster.alive(), "Ray to start the killed jobs for their end")
    assert not list((every_world.folder / "logs").iterdir())
    test_every_launcher.test_a_job_that_nobody_knows(every_world)


@pytest.mark.parametrize(
    "promise",
    [
        test_ray.test_a_child_starts_after_its_parent_and_never_after_one_that_failed,
        test_ray.test_stopped_jobs_restart_and_failed_jobs_restart_up_to_a_limit,
        test_ray.test_a_killed_job_stops_in_order_and_does_not_start_again,
        test_ray.test_a_job_that_is_stopped_in_rays_dashboard_does_not_start_again,
        test_ray.test_a_job_submitted_twice_runs_once,
    ],
)
def test_promises_of_its_own(own_world: test_ray.World, promise: "test_ray.Callable[[test_ray.World], None]"):
    promise(own_world)
