"""The archive of abandoned branches, <run>/abandoned/branch-K with increasing K, and the changes that add branches.

A branch folder contains the checkpoints and rows after the step; before/ with a copy of every changeable file and links
to the remaining checkpoints (retention can delete the originals); and record.json, which describes the change. Nothing
is deleted or overwritten.
"""

import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.errors import RunError
from src.files import read_bytes, read_json
from src.runs import ledger
from src.runs.history import branches, journal
from src.runs.history.journal import Step
from src.runs.scores import SCORE_LIST
from src.runs.store import STATUS

FOLDER = "abandoned"
RECORD = "record.json"
WANDB = "wandb.json"
BEST = "checkpoints/best.json"
_HISTORIES = {ledger.FILE, "events.jsonl"}
"""Files of rows that are never truncated: they are logs of past events."""


@dataclass(frozen=True)
class Plan:
    """A change of a run, planned from its current state."""

    run: Path
    steps: tuple[Step, ...]
    event: dict[str, Any]
    summary: tuple[str, ...]
    """Lines for display."""

    def apply(self) -> None:
        """Make the change. The caller must hold the lease of the run.

        Raises:
            RunError: the disk refuses; the next process that opens the run finishes the change.
        """
        journal.begin(self.run, self.steps, self.event)


@dataclass
class PlanBuilder:
    """Collects the steps of a plan."""

    run: Path
    number: int
    steps: list[Step] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """sha256 of the files before the change."""
    moved_checkpoints: dict[str, str | None] = field(default_factory=dict)
    """Name of each checkpoint that is moved to the archive -> hash of its manifest."""
    archived_rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{FOLDER}/branch-{self.number}"

    def add_step(self, action: str, to: str, **facts: Any) -> None:
        self.steps.append({"do": action, "to": to, **facts})

    def archive_file(self, name: str) -> None:
        """Copy a file of the run before it is changed."""
        self.files[name] = hashlib.sha256(read_bytes(self.run / name)).hexdigest()
        self.add_step("keep", f"{self.folder}/before/{name}", **{"from": name})

    def archive_rows_after(self, name: str, step: int) -> None:
        """Move the rows after `step` to the archive, from a file that is already copied there."""
        _, later = journal.rows_after(read_bytes(self.run / name), step)
        if later:
            self.archived_rows[name] = {"rows": later.count(b"\n"), "sha256": hashlib.sha256(later).hexdigest()}
            self.add_step(
                "cut", name, rest=f"{self.folder}/{name}", step=step, **{"from": f"{self.folder}/before/{name}"}
            )

    def archive_checkpoint(self, name: str) -> None:
        """Move a checkpoint to the archive."""
        self.moved_checkpoints[name] = journal.manifest_hash(self.run / "checkpoints" / name)
        self.add_step("move", f"{self.folder}/checkpoints/{name}", **{"from": f"checkpoints/{name}"})

    def summary_lines(self) -> list[str]:
        """One line for each moved checkpoint and file."""
        lines = [f"{name} -> {self.folder}/checkpoints" for name in self.moved_checkpoints]
        return lines + [
            f"{facts['rows']} rows of {name} -> {self.folder}/{name}" for name, facts in self.archived_rows.items()
        ]

    def build(self, name: str, facts: Mapping[str, Any], every: Sequence[str] | None, messages: Sequence[str]) -> Plan:
        """The plan for the event `name`. every: names of all checkpoints; None if the plan changes no checkpoint."""
        event = ledger.event(
            name,
            id=uuid.uuid4().hex,
            number=self.number,
            commit=ledger.commit(),
            moved=self.moved_checkpoints,
            archived=self.archived_rows,
            **facts,
        )
        checkpoint_hashes = (
            None if every is None else {item: journal.manifest_hash(self.run / "checkpoints" / item) for item in every}
        )
        record = {**event, "before": {"files": self.files, "checkpoints": checkpoint_hashes}}
        first: Step = {"do": "write", "to": f"{self.folder}/{RECORD}", "json": record}
        return Plan(self.run, (first, *self.steps), event, (*messages, *self.summary_lines()))


def records(run: Path) -> list[dict[str, Any]]:
    """The record.json of each branch in the archive of the save directory `run`, by number.

    Raises:
        RunError: one of them is damaged.
    """
    branch_records = []
    for path in (run / FOLDER).glob(f"branch-*/{RECORD}"):
        record = read_json(path, RunError)
        if not isinstance(record, dict) or not {"number", "event", "step", "who", "when", "before"} <= record.keys():
            raise RunError(f"{path}: not a record of a rewind. Restore it from a copy.")
        branch_records.append(record)
    return sorted(branch_records, key=lambda record: record["number"])


def next_number(run: Path) -> int:
    """The number for the next branch; numbers are never reused."""
    matches = [re.fullmatch(r"branch-(\d+)", path.name) for path in (run / FOLDER).glob("branch-*")]
    return (
        max(
            [*(int(match[1]) for match in matches if match), *(branch.number for branch in branches.read(run))],
            default=0,
        )
        + 1
    )


def files_of_rows(run: Path) -> list[str]:
    """Files of the run with one line per step."""
    return sorted(path.name for path in run.glob("*.jsonl") if path.name not in _HISTORIES)


def changeable_files(run: Path) -> list[str]:
    """The existing files of the run that a training or a rewind changes."""
    return [
        name for name in (*files_of_rows(run), SCORE_LIST, STATUS, branches.FILE, BEST, WANDB) if (run / name).is_file()
    ]
