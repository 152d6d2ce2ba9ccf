"""Weights & Biases: one run per experiment whatever happens to it, and a key that is written nowhere."""

import base64
import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from src.errors import RunError
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.runs import context
from src.runs.run_dir import RunDir
from tests import toy, warm

EXP: dict[str, Any] = {**toy.BASE, "loop": {**toy.BASE["loop"], "steps": 30, "eval_every": 10}}
KEY, NETRC_KEY = (hashlib.sha1(name.encode()).hexdigest() for name in ("environment", "netrc"))
"""Look like theirs, and are none; not in this file, of which diff.patch of a run may hold a part."""
OFFLINE = ["-e", "g", "--log_every", "1", "--wandb_project_name", "p"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project beside data, runs and a home with a key in its .netrc."""
    folder = tmp_path_factory.mktemp("wandb")
    toy.write_data(folder / "data")
    (folder / "home").mkdir()
    (folder / "home" / ".netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {NETRC_KEY}\n")
    (folder / "home" / ".netrc").chmod(0o600)
    return toy.project(folder, f"EXP_GROUPS = {{'g': [{EXP!r}]}}\n")


def logged(run: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """(id, rows) of each offline run below the save directory, in the order of their start."""
    result = []
    for folder in sorted((run / "wandb").glob("offline-run-*")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        records = [json.loads(line) for line in lines]
        (file,) = folder.glob("run-*.wandb")
        identity = file.stem.removeprefix("run-")
        assert {record["run"]["run_id"] for record in records if record["type"] == "run"} <= {
            identity
        }  # none where a kill lost all
        result.append((identity, [record["history"]["item"] for record in records if record["type"] == "history"]))
    return result


def environment(root: Path, **more: str) -> dict[str, str]:
    """Nothing of W&B but `more`, and the home beside the project."""
    return {k: v for k, v in toy.environment().items() if not k.startswith("WANDB_")} | {
        "HOME": str(root.parent / "home"),
        **more,
    }


def start(root: Path, arguments: list[str], **variables: str) -> warm.Process:
    """What it prints goes to `printed` beside the project, after what others have."""
    command = toy.command(root, arguments, root.parent)
    return warm.Process(command, environment(root, **variables), root, root.parent / "printed")


def wait_for_end(root: Path, process: warm.Process, code: int) -> str:
    """What all have printed, when it has ended."""
    result = process.wait(timeout=600)
    output = (root.parent / "printed").read_text()
    assert result == code, output
    return output


@pytest.fixture(scope="module")
def killed_and_stopped(root: Path) -> tuple[Path, str]:
    """(save directory, all printed) of a run that was killed, then told to stop, and ended in its third start. It knows
    two keys."""
    run = root.parent / "runs" / exp_id(EXP)
    for number, rows in ((signal.SIGKILL, 7), (signal.SIGTERM, 16), (None, 30)):
        process = start(root, OFFLINE, WANDB_API_KEY=KEY)
        end = time.monotonic() + 300
        while number and (
            not (run / "scores.jsonl").exists() or len((run / "scores.jsonl").read_text().splitlines()) < rows
        ):
            assert time.monotonic() < end
            assert process.poll() is None, (root.parent / "printed").read_text()
            time.sleep(0.01)
        if number:
            os.kill(process.pid, number)
        output = wait_for_end(root, process, {signal.SIGKILL: -9, signal.SIGTERM: 75, None: 0}[number])
    return run, output


@pytest.mark.slow
def test_restarts_continue_the_run_and_log_no_step_twice(root: Path, killed_and_stopped: tuple[Path, str]):
    """Also the rows that a killed process could not hand over any more are there."""
    result = logged(killed_and_stopped[0])
    assert [identity for identity, _ in result] == [exp_id(EXP)] * 3
    assert result[1][1], "the one that was told to stop lost its rows"
    rows = [row for _, rows in result for row in rows]
    assert [row["_step"] for row in rows] == [*range(1, 31)]
    scores = toy.rows(root.parent, exp_id(EXP))
    assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in scores]
    assert "perf/tokens_per_second" in rows[-1]


class Refusal(http.server.BaseHTTPRequestHandler):
    """A server that knows nobody."""

    keys: list[str] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.keys.append(self.headers.get("Authorization", ""))
        self.send_response(401)
        self.end_headers()

    do_GET = do_POST  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  as the base class calls it
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def holders(folder: Path, secret: str) -> list[Path]:
    """Files below `folder` that hold the secret in any way that a reader would recognise."""
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


@pytest.mark.slow
def test_the_key_is_written_nowhere(root: Path, killed_and_stopped: tuple[Path, str], refusing: str):
    """Neither offline nor online, from the environment or netrc: no save directory, log, cache or home holds it, and
    nothing prints it."""
    Refusal.keys.clear()
    output = killed_and_stopped[1]
    command = toy.command(root, [*OFFLINE, "--steps", "3", "--wandb_entity_name", "e"], root.parent)
    for secret in ({"WANDB_API_KEY": KEY}, {}):
        env = environment(root, WANDB_BASE_URL=refusing, **secret)
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 1, done.stderr
        assert "error: g[0]: wandb: " in done.stderr
        output += done.stdout + done.stderr
    assert "Traceback" not in output
    for user, key in (("api", KEY), ("user", NETRC_KEY)):
        encoded_key = base64.b64encode(f"{user}:{key}".encode()).decode()
        assert f"Basic {encoded_key}" in Refusal.keys, "the key was never used, so nothing was shown"
        for text in (key, encoded_key):
            assert text not in output
            assert [path for path in holders(root.parent, text) if path.name != ".netrc"] == []
    assert any(path.suffix == ".wandb" for path in (root.parent / "runs").rglob("*"))


@pytest.mark.slow
def test_starting_over_is_another_run(root: Path, killed_and_stopped: tuple[Path, str]):
    run = killed_and_stopped[0]
    process = start(root, [*OFFLINE, "-r", "1"])
    wait_for_end(root, process, 0)
    ((identity, rows),) = logged(run)
    assert identity == f"{run.name}-1"
    assert [row["_step"] for row in rows] == [*range(1, 31)]


def test_a_damaged_id_is_named(tmp_path: Path):
    from src.training.monitoring.wandb import Wandb

    with RunDir.open(tmp_path / "runs", EXP, {}) as run_dir:
        (run_dir.path / "wandb.json").write_text("[]")
        options = context.Wandb(None, "p", None, False)
        message = f'{run_dir.path}/wandb.json: expected {{"id": ...}}. Delete it to start another wandb run.'
        with pytest.raises(RunError, match=re.escape(message)):
            Wandb(
                context.Run(run_dir, Places(tmp_path, tmp_path / "runs"), context.Options(None, options)),
                options,
                nn.Linear(1, 1),
            )


def test_a_trial_of_an_agent_is_online_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the run that the agent has named, without any option for wandb."""
    import wandb

    from src.launch import arguments
    from src.training.monitoring.wandb import Wandb

    args = arguments.parse(["-e", "t5_tiny"], "", tmp_path)
    assert arguments.training_options(args, 1).wandb is None
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    options = arguments.training_options(args, 1).wandb
    assert options is not None
    arguments_of_init: dict[str, Any] = {}

    def init(**settings: Any) -> None:
        arguments_of_init.update(settings)
        raise wandb.Error("no key")

    monkeypatch.setattr(wandb, "init", init)
    for mode, message in (
        (None, "wandb: no key Run `wandb login`"),
        ("offline", "WANDB_MODE is 'offline', but the sweep of this trial needs its"),
    ):
        if mode is None:
            monkeypatch.delenv("WANDB_MODE", raising=False)
        else:
            monkeypatch.setenv("WANDB_MODE", mode)
        with RunDir.open(tmp_path / "runs", EXP, {}) as run_dir, pytest.raises(RunError, match=re.escape(message)):
            Wandb(
                context.Run(run_dir, Places(tmp_path, tmp_path / "runs"), context.Options(None, options)),
                options,
                nn.Linear(1, 1),
            )
    assert {name: arguments_of_init[name] for name in ("mode", "entity", "project", "id", "resume")} == {
        "mode": "online",
        "entity": None,
        "project": None,
        "id": None,
        "resume": None,
    }
