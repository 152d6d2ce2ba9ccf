"""What `accelerate launch` was told: its variables, written by accelerate itself, become our own options or are
refused."""

import json
import os
import sys
from pathlib import Path

import pytest

from src.errors import ConfigError
from src.launch.accelerate_env import RESOURCES, Choices, take_choices
from tests import toy

PRINT = """
import json, os
from pathlib import Path
Path(f"got.{os.environ.get('RANK', 0)}").write_text(json.dumps(dict(os.environ)))
"""
NO = "--mixed_precision no --dynamo_backend no --num_machines 1 --main_process_port 0"


def launch(folder: Path, line: str) -> list[dict[str, str]]:
    """The environment of each process that `accelerate launch` starts."""
    (folder / "print.py").write_text(PRINT)
    command = [sys.executable, "-m", "accelerate.commands.launch", *NO.split(), *line.split(), "print.py"]
    ours = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")} | {
        "HF_HOME": str(folder)
    }
    done = toy.finished(command, ours, folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("got.*"))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--multi_gpu --num_processes 2", Choices()),
        ("--cpu --num_processes 1", Choices()),
        (
            "--use_fsdp --fsdp_version 2 --num_processes 2 --mixed_precision bf16",
            Choices(None, True, {"precision": "bfloat16"}),
        ),
        ("--use_deepspeed --num_processes 2 --deepspeed_config_file a/z.json", Choices(Path("a/z.json"))),
        ("--use_deepspeed --num_processes 2", Choices(RESOURCES / "ds_config_zero2.json")),
        (
            "--use_deepspeed --num_processes 1 --zero_stage 3 --gradient_accumulation_steps 4 --gradient_clipping 0.5",
            Choices(
                RESOURCES / "ds_config_zero3.json", False, {"gradient_accumulation_steps": 4, "max_grad_norm": 0.5}
            ),
        ),
        (
            (
                "--use_deepspeed --num_processes "
                "1 --zero_stage 3 --offload_optimizer_device cpu --offload_param_device cpu"
            ),
            Choices(RESOURCES / "ds_config_zero3_offload.json"),
        ),
    ],
)
def test_its_options_are_ours(tmp_path: Path, line: str, expected: Choices):
    """Through accelerate itself; afterwards neither it nor transformers finds a choice of its own."""
    environments = launch(tmp_path, line)
    assert f"--num_processes {len(environments)}" in line
    for environment in environments:
        assert take_choices(environment, len(environments)) == expected
        assert [name for name in environment if name.startswith(("ACCELERATE_", "FSDP_"))] == []
        assert take_choices(environment, len(environments)) == Choices(), "nothing is left to take"
        if "--cpu" in line:
            assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert expected.deepspeed is None or expected.deepspeed.parent != RESOURCES or expected.deepspeed.is_file()


def test_many_processes_that_accelerate_would_not_start_are_refused(tmp_path: Path):
    (environment,) = launch(tmp_path, "--cpu --num_processes 2")
    with pytest.raises(
        ConfigError, match=r"--cpu starts one process whatever --num_processes says\. Write --multi_gpu"
    ):
        take_choices(environment, 1)


def test_our_options_apply_unless_accelerate_sets_them():
    environment = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DEBUG_MODE": "true",
        "FSDP_OF_MINE": "1",
        "HOME": "/",
    }
    assert take_choices(environment, 2, deepspeed=Path("z.json")) == Choices(Path("z.json"))
    assert environment == {"ACCELERATE_DEBUG_MODE": "true", "FSDP_OF_MINE": "1", "HOME": "/"}
    assert take_choices({}, 1, fsdp=True) == Choices(None, True)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {**FSDP, "FSDP_VERSION": "1"},
            r"--fsdp_version: expected 2, got 1\. Only the number of processes, the precision",
        ),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, "--fsdp_offload_params: expected false, got true"),
        (
            {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "True"},
            "--fsdp_activation_checkpointing: expected false, got true",
        ),
        ({**FSDP, "FSDP_IGNORED_MODULES": "head"}, "--fsdp_ignored_modules: expected nothing, got head"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "--dynamo_backend: expected no, got inductor"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "--use_megatron_lm: expected false, got true"),
        (
            {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"},
            "--zero_stage 0 .*expected one of 1 none none, 2 none none, .*give a JSON file",
        ),
        (
            {**ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"},
            "--zero_stage 2 --offload_optimizer_device nvme",
        ),
        (
            {**ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "z.json", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "--deepspeed_config_file z.json: --zero_stage belong in that file",
        ),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"},
            "--gradient_accumulation_steps: expected a number or auto, got 'many'",
        ),
    ],
)
def test_ignored_settings_are_refused(environment: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        take_choices(environment, 2)


@pytest.mark.parametrize(("theirs", "option"), [(FSDP, "--use_fsdp"), (ZERO, "--use_deepspeed")])
def test_two_choices_are_refused(theirs: dict[str, str], option: str):
    for ours, word in ((Path("z.json"), "--deepspeed"), (None, "--fsdp")):
        with pytest.raises(ConfigError, match=f"accelerate launch {option} and trainval.py {word}: give one of them"):
            take_choices(dict(theirs), 2, ours, ours is None)
