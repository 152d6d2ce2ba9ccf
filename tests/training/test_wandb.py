"""Weights & Biases: one run per experiment whatever happens to it, and a key that is written nowhere."""

import base64
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from tests import toy

EXP: dict[str, Any] = {**toy.BASE, "loop": {**toy.BASE["loop"], "steps": 30, "eval_every": 10}}
KEY = "3f9c1e7ab2d84056f1e0c97d5a6b38e2147f0dc9"
"""Looks like one of theirs, and is none."""
OFFLINE = ["-e", "g", "--log_every", "1", "--wandb_project_name", "p"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    toy.write_data(tmp_path / "data")
    return toy.project(tmp_path, f"EXP_GROUPS = {{'g': [{EXP!r}]}}\n")


def logged(run: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """(id, rows) of each offline run below the save directory, in the order of their start."""
    found = []
    for folder in sorted((run / "wandb").glob("offline-run-*")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        records = [json.loads(line) for line in lines]
        (file,) = folder.glob("run-*.wandb")
        identity = file.stem.removeprefix("run-")
        assert {record["run"]["run_id"] for record in records if record["type"] == "run"} <= {identity}  # none where a kill lost all
        found.append((identity, [record["history"]["item"] for record in records if record["type"] == "history"]))
    return found


def start(root: Path, arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    env = {k: v for k, v in toy.environment().items() if not k.startswith("WANDB_")} | {"HOME": str(root.parent / "home"), **environment}
    (root.parent / "home").mkdir(exist_ok=True)
    command = toy.command(root, arguments, root.parent)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=root)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_continues_the_run_and_logs_no_step_twice(root: Path, number: signal.Signals):
    """Also the rows that a killed process could not hand over any more are there."""
    run = root.parent / "runs" / exp_id(EXP)
    first = start(root, OFFLINE)
    end = time.monotonic() + 60
    while not (run / "scores.jsonl").exists() or len((run / "scores.jsonl").read_text().splitlines()) < 7:
        assert time.monotonic() < end
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.01)
    first.send_signal(number)
    first.communicate(timeout=60)
    second = start(root, OFFLINE)
    _, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    found = logged(run)
    assert len(found) == 2
    assert {identity for identity, _ in found} == {exp_id(EXP)}
    rows = [row for _, rows in found for row in rows]
    assert [row["_step"] for row in rows] == [*range(1, 31)]
    scores = toy.rows(root.parent, exp_id(EXP))
    assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in scores]
    assert found[0][1] or number == signal.SIGKILL
    assert "perf/tokens_per_second" in rows[-1]


def test_starting_over_is_another_run(root: Path):
    run = root.parent / "runs" / exp_id(EXP)
    for reset in ("0", "1"):
        process = start(root, [*OFFLINE, "--steps", "2", "-r", reset])
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    run = next(path.parent for path in (root.parent / "runs").glob("*/wandb.json"))
    ((identity, _),) = logged(run)
    assert identity == f"{run.name}-1"


def test_a_damaged_id_is_named(root: Path):
    run = root.parent / "runs" / exp_id(EXP)
    run.mkdir(parents=True)
    (run / "wandb.json").write_text("[]")
    process = start(root, OFFLINE)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f'{run}/wandb.json: expected {{"id": ...}}. Delete it to begin another wandb run.' in err


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


@pytest.mark.parametrize("place", ["environment", "netrc"])
def test_the_key_is_written_nowhere(root: Path, refusing: str, place: str):
    """Neither offline nor online: no save directory, log, snapshot, cache or home holds it, and nothing prints it."""
    secret = {"WANDB_API_KEY": KEY} if place == "environment" else {}
    if place == "netrc":
        (root.parent / "home").mkdir()
        (root.parent / "home" / ".netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
        (root.parent / "home" / ".netrc").chmod(0o600)
    Refusal.keys.clear()
    printed = ""
    for arguments, code in (([*OFFLINE, "--steps", "2"], 0), ([*OFFLINE, "--steps", "3", "--wandb_entity_name", "e"], 1)):
        process = start(root, arguments, WANDB_BASE_URL=refusing, **secret)
        out, err = process.communicate(timeout=240)
        assert process.returncode == code, err
        printed += out + err
    coded = base64.b64encode(f"{'api' if place == 'environment' else 'user'}:{KEY}".encode()).decode()
    assert f"Basic {coded}" in Refusal.keys, "the key was never used, so nothing was shown"
    assert "error: g[0]: wandb: " in printed
    assert "Traceback" not in printed
    for text in (KEY, coded):
        assert text not in printed
        assert [path for path in holders(root.parent, text) if path.name != ".netrc"] == []
    assert any(path.suffix == ".wandb" for path in (root.parent / "runs").rglob("*"))
    assert os.path.exists(root.parent / "home")
