"""`make` sets up .venv once, again when the requirements change, and never trusts half an installation."""

import argparse
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.assistants import win_rate
from data_prep.crossattn import prepare_qa
from exp_configs import EXP_GROUPS
from results import plot, table
from src.launch import arguments
from src.tables import run_arguments

ROOT = Path(__file__).resolve().parents[3]
# stands for python3 and, copied by `-m venv`, for .venv/bin/python: it writes down what it was asked to do
LOCKS = ("requirements.lock", "requirements-dev.lock")
RECORDER = """#!/bin/bash
echo "$*" >> "$RECORD"
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python;;
  *"$FAIL_ON"*) exit 1;;
esac
"""


@pytest.fixture
def make(tmp_path: Path):
    """Run a target in a copy of the Makefile and the requirements; gives what was asked of Python and pip. What make
    printed last is in `stdout`."""
    for name in ("Makefile", "requirements.txt", *LOCKS, "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    recorder = tmp_path / "python"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)

    def run(target: str, fail_on: str = "nothing at all", **variables: str) -> list[str]:
        record = tmp_path / "record"
        record.write_text("")
        environment = {**os.environ, "RECORD": str(record), "FAIL_ON": fail_on, "PYTHON": str(recorder)}
        done = subprocess.run(
            ["make", f"PYTHON={recorder}", *(f"{k}={v}" for k, v in variables.items()), target],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        (tmp_path / "stdout").write_text(done.stdout)
        assert (done.returncode != 0) == (fail_on in record.read_text()), done.stderr
        return [
            line.replace(" --quiet --no-compile --disable-pip-version-check", "")
            for line in record.read_text().splitlines()
        ]

    return run


HASH_OPTIONS = "--no-deps --require-hashes -r "


def torch_pin() -> str:
    return next(
        line.split()[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch==")
    )


def installed_packages(lines: list[str]) -> list[str]:
    return [line.removeprefix("-m pip install ").removeprefix(HASH_OPTIONS) for line in lines if "pip install" in line]


def test_torch_comes_first_and_the_second_time_nothing_is_done(make):
    lines = make("run-environment")
    assert "-m venv .venv" in lines
    assert installed_packages(lines) == [torch_pin(), "requirements.lock"]
    assert f"-m pip install {HASH_OPTIONS}requirements.lock" in lines
    assert make("run-environment") == []


def test_the_tests_need_the_second_file_too(make):
    assert "requirements-dev.lock" in installed_packages(make("test"))
    assert make("test") == [FAST]


FAST, SLOW = (
    f"-m pytest -n 2 --dist loadfile --no-loadscope-reorder -m {tier} and not matrix" for tier in ("not slow", "slow")
)


def test_all_tests_run_once(make):
    make("dev-environment")
    assert make("test-all") == [FAST, SLOW]
    assert make("test-slow", WORKERS="8") == [SLOW.replace("-n 2", "-n 8")]


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("requirements.txt", ["requirements.lock"]),
        ("requirements.lock", ["requirements.lock"]),
        ("requirements-dev.lock", ["requirements-dev.lock"]),
    ],
)
def test_a_changed_file_is_installed_again(make, tmp_path: Path, changed: str, again: list[str]):
    make("dev-environment")
    with open(tmp_path / changed, "a") as file:
        file.write("another==1.0\n")
    lines = make("dev-environment")
    assert "-m venv .venv" not in lines
    assert installed_packages(lines) == [word for name in again for word in (torch_pin(), name)]
    assert make("dev-environment") == []


@pytest.mark.parametrize("broken_step", ["torch==", "-r requirements.lock"])
def test_half_an_installation_is_done_again(make, tmp_path: Path, broken_step: str):
    make("run-environment")
    with open(tmp_path / "requirements.txt", "a") as file:
        file.write("another==1.0\n")
    make("run-environment", fail_on=broken_step)
    assert installed_packages(make("run-environment"))[-1] == "requirements.lock"
    assert make("run-environment") == []


def test_an_environment_without_pip_is_recreated(make, tmp_path: Path):
    """As an interrupted `python3 -m venv` leaves it."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy("/bin/false", tmp_path / ".venv" / "bin" / "python")
    assert "-m venv .venv" in make("run-environment")


def test_a_model_that_is_there_is_named_and_not_made_again(make, tmp_path: Path):
    make("run-environment")
    assert any("data_prep.gguf" in line for line in make("smollm2"))
    folder = "results/data/HuggingFaceTB/SmolLM2-135M-Instruct"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "manifest.json").write_text("{}")
    assert make("smollm2") == []
    (line,) = (tmp_path / "stdout").read_text().splitlines()
    assert folder in line


def test_the_study_does_not_start_without_its_data(make):
    assert make("study", fail_on="", TRAINVAL_DATA="") == []


def test_every_line_of_the_study_is_understood(make):
    """The recorder ran no Python: here the real parsers read what it was asked."""
    lines = [
        shlex.split(line) for target in ("study-rates", "study") for line in make(target, TRAINVAL_DATA="released")
    ]
    trained = [set(arguments.parse(words[1:], "", ROOT).exp_group) for words in lines if words[0] == "trainval.py"]
    assert set().union(*trained) <= EXP_GROUPS.keys()
    for module in (plot, table):
        requests = [words[2:] for words in lines if words[:2] == ["-m", module.__name__]]
        options = [run_arguments.parse(module._parser(), request) for request in requests]
        assert [each.runs for each in options] == [run_arguments.RUNS] * len(requests)
        assert all(set(each.groups) in trained for each in options)
    assert len(trained) == sum(words[:2] == ["-m", table.__name__] for words in lines) == 5
    (request,) = (words[2:] for words in lines if words[:2] == ["-m", win_rate.__name__])
    comparison = win_rate.options().parse_args(request)
    assert {comparison.judges, *comparison.groups} <= trained[-1]
    preparations = [words[2:] for words in lines if words[:2] == ["-m", prepare_qa.__name__]]
    prepare_qa._add_options(parser := argparse.ArgumentParser())
    sources = [path.split("/")[0] for each in preparations for path in parser.parse_args(each).train]
    assert sources == ["results", "released", "released"]
