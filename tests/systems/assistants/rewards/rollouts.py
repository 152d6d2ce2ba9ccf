"""Rollouts and settings for tests of rewards."""

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from src.experiments.config import Places
from src.systems.assistants.rewards.interface import RewardSetting, Rollout


def rollout(text: str, prompt: str = "?", sampled: int = 1, is_complete: bool = True, **row: Any) -> Rollout:
    """An answer to a prompt whose row has `row`."""
    return Rollout([{"role": "user", "content": prompt}], text, row, [0] * (sampled + 1), sampled, is_complete)


def setting(tokenizer: Any = None) -> RewardSetting:
    """Two sequences at once on the CPU, and a tokenizer for whatever folder is named."""
    nowhere = Path("/nonexistent")
    return RewardSetting(
        Places(nowhere, nowhere), "cpu", 2, tokenizer, lambda *_: tokenizer, lambda *_: lambda _: [], lambda _: None
    )


@functools.cache
def has_namespaces() -> bool:
    """Whether bubblewrap is here and works, asked without our code."""
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    return (
        shutil.which("bwrap") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


needs_bubblewrap = pytest.mark.skipif(
    not has_namespaces(), reason="bubblewrap is missing or may not make namespaces; see .ci/bubblewrap"
)
