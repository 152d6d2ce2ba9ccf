"""What a plan means stays in the run until the plan is done with it: the training that goes on meanwhile does not
delete it."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.files import write_json
from src.runs.checkpoints import checkpoints, pins, retention
from src.runs.checkpoints.retention import Rotation, RotationRule
from src.runs.store import STATUS
from tests.core.operations.test_checkpoint_jobs import World, poll


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A run that is trained, with a checkpoint at step 10; each evaluation waits for its gate."""
    world = World(tmp_path, steps=(10,))
    write_json(world.run / STATUS, {"state": "running", "step": 10, "attempt": 1})
    gate = f"while ! test -e {tmp_path}/gate-{{step}} -o -e {tmp_path}/over; do sleep 0.02; done"
    world.raw = {
        "checkpoints": {"every": 10},
        "evaluate": {
            "tasks": {
                "size": {"command": f"{gate}; echo '{{{{\"x\": 1}}}}' > {{scores}}", "retry_seconds": 0, "attempts": 1}
            }
        },
    }
    yield world
    (tmp_path / "over").touch()  # the commands of watchers that were killed go on


@pytest.fixture
def watcher(world: World) -> Iterator[subprocess.Popen[bytes]]:
    process = world.start("--every", "0.1")
    poll(lambda: pinned(world))
    yield process
    process.kill()
    process.wait()


def pinned(world: World) -> list[Path]:
    return list((world.run / pins.FOLDER).glob("[!.]*.json"))


def go_on(world: World, *steps: int) -> list[int]:
    """Write more checkpoints as a training does; what is left then."""
    rotation = Rotation(world.run, RotationRule(last=1), "val_loss", "min")
    for step in steps:
        world.checkpoint(step)
        rotation.rotate(step, None)
    return world.steps()


def test_a_training_deletes_evaluated_checkpoints(world: World, watcher: subprocess.Popen[bytes]):
    assert go_on(world, 15, 20, 25, 30, 31) == [10, 20, 30, 31]
    (world.folder / "gate-10").touch()
    poll(lambda: "step-00000010" in json.loads(pinned(world)[0].read_text())["finished"])
    assert go_on(world, 32) == [20, 30, 32]
    for step in (20, 30):
        (world.folder / f"gate-{step}").touch()
    poll(lambda: "step-00000030" in json.loads(pinned(world)[0].read_text())["finished"])
    assert go_on(world, 33) == [33]
    assert sorted(step for step, one in world.outcomes("evaluate.size").items() if one["done"]) == [10, 20, 30]


def test_a_dead_watcher_holds_nothing(world: World, watcher: subprocess.Popen[bytes]):
    assert go_on(world, 20, 21) == [10, 20, 21]
    watcher.kill()
    watcher.wait()
    assert len(pinned(world)) == 1
    assert go_on(world, 22) == [22]


def test_one_that_ends_in_order_takes_its_pins_away(world: World, watcher: subprocess.Popen[bytes]):
    watcher.send_signal(signal.SIGTERM)
    watcher.wait(timeout=300)
    assert pinned(world) == []
    assert list((world.runs / "checkpoint_jobs").iterdir()) == []


def test_the_pins_of_the_dead_are_taken_away_by_the_next(world: World, watcher: subprocess.Popen[bytes]):
    watcher.kill()
    watcher.wait()
    before = pinned(world)
    (world.folder / "gate-10").touch()
    assert world.once() == 0
    assert len(before) == 1
    assert pinned(world) == []
    assert list((world.runs / "checkpoint_jobs").iterdir()) == []


def test_cleaning_skips_checkpoints_under_evaluation(world: World):
    write_json(world.run / STATUS, {"state": "done", "step": 10, "attempt": 1})
    rule = retention.CleanupRule(keep_last=0, keep_best=False)
    process = world.start("--every", "0.1")
    try:
        poll(lambda: pinned(world))
        cleanup = retention.plan(world.run, rule, set(), time.time() + 1)
        assert cleanup.deletable == ()
        assert "all deletable checkpoints are in use" in cleanup.reason_to_keep
        (world.folder / "gate-10").touch()
        poll(lambda: not pinned(world))
        assert retention.plan(world.run, rule, set(), time.time() + 1).deletable == (checkpoints.folder(world.run, 10),)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stage", ["evaluate", "upload"])
def test_only_an_upload_that_was_given_up_is_still_waited_for(world: World, stage: str):
    if stage == "evaluate":
        world.raw["evaluate"]["tasks"]["size"]["command"] = "false {scores}"
    else:
        world.raw = {
            "checkpoints": {"every": 10},
            "upload": {"to": "/no_such_folder", "attempts": 1},
        }
    process = world.start("--every", "0.1")
    try:
        poll(lambda: world.outcomes("evaluate.size" if stage == "evaluate" else stage).get(10, {}).get("failures"))
        if stage == "evaluate":
            poll(lambda: "step-00000010" in json.loads(pinned(world)[0].read_text())["finished"])
        assert go_on(world, 11) == ([11] if stage == "evaluate" else [10, 11])
    finally:
        process.kill()
        process.wait()


def test_a_dry_run_pins_nothing(world: World):
    assert world.once("--dry-run") == 0
    assert not (world.run / pins.FOLDER).exists()
    assert not (world.runs / "checkpoint_jobs").exists()
