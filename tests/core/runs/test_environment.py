"""What env.json says of a start, and what it must never say."""

import json
import os
import sys
import time

import pytest

from src.runs import environment
from src.support.redaction import redact


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
    ("command", "expected_words"),
    [
        (["--api_key", "abc", "-e", "g"], ["--api_key", "***", "-e", "g"]),
        (["--hub-token=abc"], ["--hub-token=***"]),
        (["WANDB_API_KEY=abc", "python"], ["WANDB_API_KEY=***", "python"]),
        (["--set", "model.auth=abc"], ["--set", "model.auth=***"]),
        (["--token", "--steps", "5"], ["--token", "--steps", "5"]),
        (["https://me:secret@host/x"], ["https://***@host/x"]),
        (["pipe:curl -u me:secret URL", "https://host/x?X-Amz-Signature=secret"], ["***", "***"]),
        (
            ["--set", "data.context_tokens=2048", "--savedir_base", "monkey"],
            ["--set", "data.context_tokens=2048", "--savedir_base", "monkey"],
        ),
    ],
)
def test_secrets_in_the_command_are_hidden(command: list[str], expected_words: list[str]):
    assert redact(command) == expected_words


def test_only_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    facts = environment.describe([])
    assert facts["variables"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "hush-hush" not in json.dumps({**facts, "diff": ""})


def test_missing_git_is_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    facts = environment.describe(["x"])
    assert (facts["commit"], facts["dirty"], facts["diff"], facts["gpus"]) == (None, None, None, [])
