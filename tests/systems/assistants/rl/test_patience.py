"""How long a run waits for a server."""

import time
from pathlib import Path

import pytest

from src.experiments.config import Places
from src.runs.context import Run
from src.runs.run_dir import RunDir
from src.systems.assistants.rl.scoring import MAX_WAIT_SECONDS, Patience, ServerUnavailableError


def test_long_wait_raises_but_many_short_waits_do_not(tmp_path: Path):
    exp = {"recipe": "toy"}
    with RunDir.open(tmp_path, exp, exp) as run_dir:
        patience = Patience(Run(run_dir, Places(tmp_path, tmp_path)))
        now = time.monotonic()
        for _ in range(3):
            patience.wait("the judge", now)
        with pytest.raises(ServerUnavailableError, match=r"waited 900 s for the judge"):
            patience.wait("the judge", now - MAX_WAIT_SECONDS - 1)
        patience.wait("the judge", now)
