"""Log to Weights & Biases. The key comes from the environment or netrc and is never written."""

import contextlib
import logging
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from torch import nn

from src.errors import RunError
from src.files import read_json, write_json
from src.runs import context
from src.runs.store import DELETED_FOLDER
from src.support.parsing import parse_json

ID = "wandb.json"
INSPECT_SECONDS = 300
log = logging.getLogger(__name__)


class Wandb:
    """One wandb run per experiment, with the rows of scores.jsonl. A restart resumes it by id and logs no step twice.

    Offline, each start writes a folder <run>/wandb/offline-run-*; `wandb sync --id` joins them into one run.

    A trial of `wandb agent` is always online, with the run id set by the agent, as the sweep needs its scores.

    Raises:
        RunError: wandb fails, such as without a key; or a trial is offline.
    """

    def __init__(self, run: context.Run, options: context.Wandb, model: nn.Module) -> None:
        trial = "WANDB_SWEEP_ID" in os.environ  # then the agent has also set entity, project and id
        if trial and (mode := os.environ.get("WANDB_MODE", "online")) not in ("online", "shared"):
            raise RunError(
                f"wandb: WANDB_MODE is {mode!r}, but the sweep of this trial needs its scores. "
                "Unset it, or run python -m src.sweeps."
            )
        online = trial or (options.entity is not None and options.project is not None)
        identity = _identity(run)
        self.last_step = -1 if online else _last_step(run.path, identity)
        """Last step that is already logged."""
        # env.json records command, code and machine without secrets; wandb would send the full command and diff.
        settings = wandb.Settings(disable_git=True, disable_code=True, disable_job_creation=True, x_disable_meta=True)
        try:
            self.wandb = wandb.init(
                entity=options.entity,
                project=options.project or (None if trial else "trainval"),
                name=options.name or run.dir.exp_id,
                id=None if trial else identity,
                resume="allow" if online and not trial else None,
                mode="online" if online else "offline",
                dir=str(run.path),
                config=read_json(run.path / "config.json", RunError),
                settings=settings,
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            raise RunError(
                f"wandb: {reason} Run `wandb login`, or leave out --wandb_entity_name to log to files."
            ) from None
        if online and self.wandb.resumed:
            self.last_step = self.wandb.step - 1
        for row in run.dir.scores.rows():  # rows that a killed process did not send to wandb
            self._log(row)
        if options.gradients:
            self.wandb.watch(model, log="gradients", log_freq=run.options.log_every or 100)

    def on_row(self, row: Mapping[str, Any], perf: Mapping[str, float], is_durable: bool) -> None:
        """Log the row at its step."""
        self._log({**row, **{f"perf/{name}": value for name, value in perf.items()}})

    def on_end(self, scores: Mapping[str, float]) -> None:
        """Add the scores to wandb's summary, as their step is already logged."""
        self.wandb.summary.update(dict(scores))

    def close(self) -> None:
        """Flush and finish the wandb run."""
        self.wandb.finish()

    def _log(self, row: Mapping[str, Any]) -> None:
        if row["step"] > self.last_step:
            self.wandb.log(
                {name: math.nan if value is None else value for name, value in row.items()}, step=row["step"]
            )
            self.last_step = row["step"]


def _identity(run: context.Run) -> str:
    """The wandb run id, saved in wandb.json: the experiment id, with a number after -r 1, which starts another wandb
    run."""
    file = run.path / ID
    if file.exists():
        saved = read_json(file, RunError)
        if isinstance(saved, dict) and isinstance(saved.get("id"), str):
            return saved["id"]
        raise RunError(f'{file}: expected {{"id": ...}}. Delete it to start another wandb run.')
    resets = list((run.places.runs / DELETED_FOLDER).glob(f"{run.dir.exp_id}*"))
    number = max([len(resets), *(1 + _reset_number(path / ID) for path in resets)])  # older runs can have been deleted
    identity = f"{run.dir.exp_id}-{number}" if number else run.dir.exp_id
    write_json(file, {"id": identity})
    return identity


def _reset_number(file: Path) -> int:
    """The number at the end of the id in a wandb.json; 0 without a number."""
    with contextlib.suppress(RunError):
        saved = read_json(file, RunError, None)
        number = str(saved.get("id", "")).partition("-")[2] if isinstance(saved, dict) else ""
        return int(number) if number.isdecimal() else 0
    return 0


def _last_step(path: Path, identity: str) -> int:
    """The last step logged offline by earlier attempts in the save directory `path`; -1 without such a step."""
    last = -1
    for file in sorted((path / "wandb").glob(f"offline-run-*/run-{identity}.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file.parent)]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=INSPECT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            process = None
        if process is None or process.returncode:
            log.warning("%s: wandb cannot read it, so repeated steps can be logged twice.", file)
            continue
        for line in process.stdout.splitlines():
            if '"history"' in line and (record := parse_json(line, file, RunError))["type"] == "history":
                last = max(last, int(record["history"]["item"]["_step"]))
    return last
