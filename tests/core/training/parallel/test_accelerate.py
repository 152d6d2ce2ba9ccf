"""`accelerate launch trainval.py` trains as our own options do, on two processes without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from src.experiments.identity import exp_id
from tests import toy

EXP = {**toy.BASE, "loop": {**toy.BASE["loop"], "steps": 4, "eval_every": 4, "micro_batch": 4}}
pytestmark = pytest.mark.slow


class World:
    """One experiment, started by accelerate and by torchrun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        toy.write_data(folder / "data")
        self.root = toy.project(folder, f"EXP_GROUPS = {{'g': [{EXP!r}]}}\n")
        self.run = folder / "runs" / exp_id(EXP)

    def launch(self, line: str, *ours: str) -> subprocess.CompletedProcess[str]:
        """`accelerate launch` with the options of `line`, and our own after the script."""
        words = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *line.split(),
            "--num_machines",
            "1",
            "--main_process_port",
            "0",
        ]
        words += toy.command(self.root, ["-e", "g", *ours], self.folder)[1:]
        env = toy.environment() | {"HF_HOME": str(self.folder)}
        return toy.finished(words, env)

    def result(self) -> tuple[str, str, bytes]:
        """How the model was shared, the scores and the weights of the run, which is moved out of the way."""
        start = next(
            event
            for line in (self.run / "ledger.jsonl").read_text().splitlines()
            if (event := json.loads(line))["event"] == "start"
        )
        weights = (self.run / "checkpoints" / "step-00000004" / "model.safetensors").read_bytes()
        result = f"{start['engine']} {start['world_size']}", (self.run / "scores.jsonl").read_text(), weights
        self.run.rename(self.folder / f"run-{len(list(self.folder.iterdir()))}")
        return result


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def ours(world: World) -> tuple[str, str, bytes]:
    done = toy.run(world.root, ["-e", "g"], world.folder, processes=2)
    assert done.returncode == 0, done.stderr
    return world.result()


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("--multi_gpu", "replicated 2"),
        ("--use_fsdp --fsdp_version 2", "fsdp 2"),
        (f"--use_deepspeed --deepspeed_config_file {toy.ROOT / 'resources' / 'ds_config_zero2.json'}", "zero2 2"),
    ],
)
def test_its_options_choose_how_the_model_is_shared(world: World, ours: tuple[str, str, bytes], line: str, engine: str):
    """Where one micro-batch makes the step of a process, every way ends with the same bits."""
    done = world.launch(f"{line} --num_processes 2")
    assert done.returncode == 0, done.stderr
    assert world.result() == (engine, *ours[1:])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--multi_gpu --num_processes 2 --mixed_precision bf16",
            "loop.precision: float32, but accelerate launch has --mixed_precision bfloat16.",
        ),
        ("--cpu --num_processes 2", "accelerate launch --cpu starts one process whatever --num_processes says."),
    ],
)
def test_conflicting_options_are_rejected_before_the_first_step(world: World, line: str, message: str):
    done = world.launch(line)
    assert done.returncode == 1
    assert done.stderr.count(message) == 1, done.stderr
    assert not list(world.run.glob("checkpoints/step-*"))
