"""What env.json says of a start, and what it must never say."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from src.runs import environment


def test_everything_is_there_quickly_and_fits_json():
    start = time.process_time()
    facts = environment.describe(["trainval.py", "-e", "g"])
    assert time.process_time() - start < 1.0
    json.dumps(facts, allow_nan=False)
    assert facts["command"] == ["trainval.py", "-e", "g"]
    assert facts["packages"]["pydantic"] == __import__("importlib.metadata").metadata.version("pydantic")
    assert facts["python"] == sys.version.split()[0]
    assert facts["cpus"] >= 1
    assert facts["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--api_key", "abc", "-e", "g"], ["--api_key", "***", "-e", "g"]),
        (["--hub-token=abc"], ["--hub-token=***"]),
        (["WANDB_API_KEY=abc", "python"], ["WANDB_API_KEY=***", "python"]),
        (["--set", "model.auth=abc"], ["--set", "model.auth=***"]),
        (["--token", "--steps", "5"], ["--token", "--steps", "5"]),
        (["https://me:secret@host/x"], ["https://***@host/x"]),
        (
            ["--set", "data.context_tokens=2048", "--savedir_base", "monkey"],
            ["--set", "data.context_tokens=2048", "--savedir_base", "monkey"],
        ),
    ],
)
def test_secrets_in_the_command_are_hidden(command: list[str], shown: list[str]):
    assert environment.redact(command) == shown


def test_only_listed_variables_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    facts = environment.describe([])
    assert facts["variables"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "hush-hush" not in json.dumps(facts)


def copy_of_the_module(root: Path) -> list[str]:
    """A command that describes the environment of the checkout `root`, where the module is put."""
    folder = root / "src" / "runs"
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text(Path(environment.__file__).read_text())
    code = "import json; from src.runs.environment import describe; print(json.dumps(describe(['x'])))"
    return [sys.executable, "-c", code]


def described(command: list[str], root: Path, path: str) -> dict:
    done = subprocess.run(command, cwd=root, env={"PATH": path}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_no_git_is_no_reason_to_fail(tmp_path: Path):
    facts = described(copy_of_the_module(tmp_path), tmp_path, "/nowhere")
    assert (facts["commit"], facts["dirty"], facts["diff"], facts["gpus"]) == (None, None, None, [])


def test_commit_and_changes_without_secret_files(tmp_path: Path):
    command = copy_of_the_module(tmp_path)
    for name in (".env", "code.py"):
        (tmp_path / name).write_text("OLD = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-f", ".env", "code.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    clean = described(command, tmp_path, os.environ["PATH"])
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "code.py").write_text("NEW = 2\n")
    (tmp_path / ".env").write_text("KEY=hush-hush\n")
    dirty = described(command, tmp_path, os.environ["PATH"])
    assert dirty["dirty"] is True
    assert "+NEW = 2" in dirty["diff"]
    assert "hush-hush" not in dirty["diff"]


def test_a_huge_diff_is_cut():
    cut = environment._shorten("é" * environment.MAX_DIFF_BYTES)
    assert len(cut.encode()) < environment.MAX_DIFF_BYTES + 100
    assert cut.endswith(f"[cut: {2 * environment.MAX_DIFF_BYTES} bytes in all]\n")
