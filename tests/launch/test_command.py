"""The words of a command arrive as they were given, through a real bash."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from src.launch.command import Job, argv, shell_line

ECHO = "import json, sys; print(json.dumps(sys.argv[1:]))"
NASTY = [
    "plain",
    "two words",
    "",
    " ",
    "it's",
    'say "hi"',
    "$HOME",
    "$(exit 3)",
    "`exit 3`",
    "${PATH}",
    "a\nb",
    "\n",
    "tab\there",
    "back\\slash",
    "trailing\\",
    "*",
    "~",
    "a;b&c|d>e<f",
    "#no comment",
    "!history",
    "{a,b}",
    "-e",
    "--",
    "naïve 漢字 🙂",
    "NGPUS",
    "$GPUS_HERE",
    "'",
    "%s",
    "[0.1, 1e-4]",
]


def received(job: Job, **env: str) -> list[str]:
    done = subprocess.run(argv(job), cwd=job.cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def python(prefix: str = "") -> str:
    return f'{prefix}{sys.executable} -c "{ECHO}" '


@pytest.mark.parametrize("python_binary", [None, "with prefix"])
def test_every_value_arrives_unchanged(tmp_path: Path, python_binary: str | None):
    script = tmp_path / "echo it.py"
    script.write_text(ECHO)
    binary = f"X=1 ; {sys.executable}" if python_binary else None
    job = Job("id", (script.name, *NASTY), tmp_path, binary)
    assert received(job) == NASTY


def test_random_values_arrive_unchanged(tmp_path: Path):
    draw = random.Random(0)
    alphabet = "ab '\"$`\\\n\t*?!#&|;<>(){}[]~^=%-é漢🙂\x01\x7f"
    words = tuple("".join(draw.choices(alphabet, k=draw.randrange(12))) for _ in range(400))
    assert received(Job("id", words, tmp_path, python())) == list(words)


def test_the_default_is_this_python(tmp_path: Path):
    job = Job("id", ("-c", "import sys, json; print(json.dumps([sys.executable]))"), tmp_path)
    assert received(job) == [sys.executable]


def test_a_prefix_is_bash(tmp_path: Path):
    """The launch command of the seed: activate an environment, then start by its path."""
    (tmp_path / "activate").write_text("export GREETING=hello\n")
    code = 'import json, os, sys; print(json.dumps([os.environ["GREETING"], *sys.argv[1:]]))'
    environment = f"source {tmp_path}/activate ENV ; {sys.executable} -c '{code}' "
    assert received(Job("id", ("--x", "a b"), tmp_path, environment)) == ["hello", "--x", "a b"]


@pytest.mark.parametrize(
    ("visible", "count"), [("0", "1"), ("0,1", "2"), ("3,5,7", "3"), ("GPU-1a,GPU-2b", "2"), ("", "1"), ("-1", "1"), ("0, 1", "2")]
)
def test_ngpus_counts_the_visible_devices_of_the_node(tmp_path: Path, visible: str, count: str):
    job = Job("id", ("NGPUS",), tmp_path, python() + "--nproc-per-node NGPUS ")
    assert received(job, CUDA_VISIBLE_DEVICES=visible) == ["--nproc-per-node", count, "NGPUS"]


def fake_smi(folder: Path, text: str, code: int = 0) -> str:
    folder.mkdir()
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncat << 'END'\n{text}\nEND\nexit {code}\n")
    smi.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("listing", "code", "count"),
    [
        ("GPU 0: NVIDIA H100 (UUID: GPU-a)\nGPU 1: NVIDIA H100 (UUID: GPU-b)", 0, "2"),
        ("GPU 0: NVIDIA H100 (UUID: GPU-a)\n  MIG 1g.10gb Device 0: (UUID: MIG-a)", 0, "1"),
        ("No devices were found", 6, "1"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "1"),
    ],
)
def test_ngpus_asks_nvidia_smi_where_nothing_is_set(tmp_path: Path, monkeypatch, listing: str, code: int, count: str):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = fake_smi(tmp_path / "bin", listing, code)
    assert received(Job("id", (), tmp_path, python() + "NGPUS "), PATH=path) == [count]


def test_ngpus_is_a_whole_word_and_may_stand_in_quotes(tmp_path: Path):
    """A variable of the user's own keeps its value; a nested bash sees the count too."""
    quoted = f"""MY_NGPUS=9 bash -c '{sys.executable} -c "{ECHO}" NGPUS "$MY_NGPUS" "$@"' _ "$NGPUS" "${{NGPUS}}" "NGPUS" """
    assert received(Job("id", ("x",), tmp_path, quoted), CUDA_VISIBLE_DEVICES="4,5,6", NGPUS="7") == ["3", "9", "7", "7", "3", "x"]


def test_a_command_without_ngpus_counts_nothing(tmp_path: Path):
    assert shell_line(Job("id", ("trainval.py", "a b"), tmp_path, "torchrun")) == "torchrun trainval.py 'a b'"


def test_the_exit_code_is_that_of_the_command(tmp_path: Path):
    job = Job("id", ("-c", "raise SystemExit(7)"), tmp_path)
    assert subprocess.run(argv(job), check=False).returncode == 7
