"""--job_option through trainval.py: real trainings, submitted, watched, ended, repaired."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.runs.store import SavedRun
from tests import toy


def experiment(seed: int, steps: int = 4, **data: Any) -> dict[str, Any]:
    return {
        **toy.BASE,
        "seed": seed,
        "data": {**toy.BASE["data"], **data},
        "loop": {**toy.BASE["loop"], "steps": steps},
    }


QUICK, LONG = experiment(0), experiment(1, steps=100_000)
JOB_CONFIGS = """JOB_CONFIGS = {
    "here": {"launcher": "local", "slots": 2, "wait": False},
    "two": {"launcher": "local", "wait": False, "processes": {"starter": "torchrun", "per_node": 2}},
    "wrong": {"launcher": "local", "slots": 1, "overrides": [{"where": "seed == 0", "slits": 2}]},
    "stay": {"launcher": "local"},
}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_data(tmp_path_factory.mktemp("data"))


class World:
    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        (folder / "data").symlink_to(data)
        self.root = toy.project(
            folder, f"EXP_GROUPS = {{'quick': [{QUICK!r}], 'long': [{LONG!r}], 'both': [{QUICK!r}, {LONG!r}]}}\n"
        )
        (self.root / "job_configs.py").write_text(JOB_CONFIGS)

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = toy.run(self.root, words, self.folder)
        assert done.returncode == code, done.stderr
        return done

    def states(self, group: str) -> list[str]:
        lines = self.run("-e", group, "--job_option", "status").stdout.splitlines()
        assert lines[0].startswith("id ")
        states = [line.split()[2] for line in lines[1:-1]]
        assert lines[-1].startswith(f"{len(states)} experiment")
        assert all(f"{states.count(state)} {state}" in lines[-1] for state in states)
        return states


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} seconds in vain"
        time.sleep(0.1)


@pytest.fixture
def world(tmp_path: Path, data: Path) -> Iterator[World]:
    world = World(tmp_path, data)
    yield world
    world.run("-e", "both", "--job_option", "kill")


@pytest.mark.slow
def test_a_group_is_submitted_watched_killed_continued_and_reset(world: World):
    assert world.states("both") == ["never", "never"]
    world.run("-e", "both", "-j", "here")  # which does not wait for the long one
    again = world.run("-e", "both", "-j", "here")
    assert again.stderr.count("already") + again.stderr.count("it is done") == 2
    scores = world.runs / exp_id(LONG) / "scores.jsonl"
    wait_until(lambda: scores.exists() and scores.read_text())
    assert world.states("both")[1] == "running"
    world.run("-e", "long", "--job_option", "kill")
    table = world.run("-e", "long", "--job_option", "status").stdout
    assert table.splitlines()[1].split()[2] == "stopped"
    assert "SIGTERM: stopped at step" in table
    before = scores.read_text()
    world.run("-e", "long", "-j", "here")
    wait_until(lambda: len(scores.read_text()) > len(before))
    assert scores.read_text().startswith(before)
    wait_until(lambda: SavedRun(world.runs / exp_id(QUICK)).state == "done")
    assert world.states("quick") == ["done"]
    world.run("-e", "long", "--job_option", "kill")
    assert len(list((world.runs / "submissions").glob("*/submission.json"))) == 2
    assert len(list((world.runs / "snapshots").iterdir())) == 1
    env = json.loads((world.runs / exp_id(QUICK) / "env.json").read_text())
    assert str(world.runs) in " ".join(env["command"])
    world.run("-e", "quick", "-j", "stay", "-r", "1")  # which starts over once, not at each start of the job
    assert world.states("quick") == ["done"]
    assert [path.name for path in (world.runs / "deleted").iterdir()] == [exp_id(QUICK)]
    command = json.loads((world.runs / exp_id(QUICK) / "job_dict.json").read_text())["command"]
    assert "-r" not in command.split()


@pytest.mark.slow
def test_two_processes_stop_at_one_step_and_their_job_is_continued_not_failed(world: World):
    """torchrun turns 75 into 1; the job tells the two apart."""
    world.run("-e", "long", "-j", "two")
    scores = world.runs / exp_id(LONG) / "scores.jsonl"
    wait_until(lambda: scores.exists() and scores.read_text())
    (pid_file,) = (world.runs / "submissions").glob("*/jobs/0.1.pid")
    subprocess.run(["kill", "-TERM", "--", f"-{pid_file.read_text().split()[0]}"], check=True)
    (code_file,) = [pid_file.with_name("0.1.code")]
    wait_until(code_file.exists)
    assert code_file.read_text() == "75\n"
    wait_until(lambda: pid_file.with_name("0.2.pid").exists())
    assert world.states("long") == ["running"]
    world.run("-e", "long", "--job_option", "kill")
    assert world.states("long") == ["stopped"]


@pytest.mark.slow
def test_a_failure_is_reported_and_repaired(world: World, monkeypatch: pytest.MonkeyPatch):
    """The program breaks in the job, not where it is submitted."""
    program = world.root / "trainval.py"
    parsed, rest = program.read_text().split("from src.errors import UserError\n", 1)
    hook = 'import os\n    if "TOY_BREAKS" in os.environ and args.exp_id:\n        sys.exit("broken")'
    program.write_text(f"{parsed}from src.errors import UserError\n    {hook}\n{rest}")
    with monkeypatch.context() as patch:
        patch.setenv("TOY_BREAKS", "1")
        done = world.run("-e", "quick", "-j", "stay", code=1)
    assert "1 of 1 jobs did not complete" in done.stderr
    assert world.states("quick") == ["failed"]
    assert "--job_option retry" in world.run("-e", "quick", "-j", "stay").stderr
    assert "broken" in world.run("-e", "quick", "--job_option", "logs").stdout
    world.run("-e", "quick", "-j", "stay", "--job_option", "retry")
    assert world.states("quick") == ["done"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-e", "quick", "--job_option", "retry"], "--job_option retry: submits jobs. Add -j NAME"),
        (
            ["-e", "quick", "-j", "wrong", "--dry-run"],
            "JOB_CONFIGS['wrong'].overrides[0]: unknown key 'slits'. Did you mean 'slots'?",
        ),
        (["--job_option", "status"], "nothing to run. Name a group with -e"),
    ],
)
def test_mistakes_on_the_command_line(world: World, words: list[str], message: str):
    assert message in world.run(*words, code=1).stderr


def test_status_is_quick_and_loads_nothing_heavy(world: World):
    command = [
        sys.executable,
        "-X",
        "importtime",
        *toy.command(world.root, ["-e", "both", "--job_option", "status"], world.folder)[1:],
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=toy.environment(), check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "numpy", "pandas", "transformers"}
