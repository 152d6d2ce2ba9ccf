"""What stands around the code: one version and licence everywhere; workflows and containers call what the Makefile
has."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_version_and_licence_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["version"] == citation["version"] == changes[0]
    assert project["license"] == citation["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in licence
    assert "Copyright 2026 the Trainval authors" in licence


def test_the_tree_is_no_package():
    """Jobs run from a copy of the code: an installed `src` would win over it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["packages"] == []
    assert "build-system" not in settings
    assert "dependencies" not in settings["project"], "they are in requirements.txt alone"


def is_there(command: str) -> bool:
    """Whether a command of a workflow or container is a target of the Makefile or a program of ours; git is taken for
    granted."""
    program, *words = command.split()
    if program == "make":
        return set(words) <= targets()
    return program == "git" or os.access(ROOT / program, os.X_OK)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_is_there(path: Path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands
    assert not [command for command in commands if not is_there(command)]


def test_both_workflows_are_there():
    called = {path.stem: path.read_text().rpartition("run: ")[2].strip() for path in WORKFLOWS}
    assert called == {"gate": ".ci/run", "quick": "make test"}


def test_the_image_takes_its_packages_from_the_makefile():
    text = (ROOT / "Dockerfile").read_text()
    made = re.findall(r"^RUN (make .*)$", text, re.MULTILINE)
    assert made == ["make run-environment"]
    assert is_there(made[0])
    assert not re.findall(r"pip3? install|[\w-]+==\S+", text), "versions belong in requirements.txt"
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert copied
    assert not [name for name in copied if not (ROOT / name).exists()]


def test_the_development_container_is_that_image():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    dockerfile = (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve()
    assert dockerfile == ROOT / "Dockerfile"
    assert f"AS {container['build']['target']}\n" in dockerfile.read_text()
    assert is_there(container["postCreateCommand"])
