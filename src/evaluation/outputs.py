"""Resumable outputs of a trained model: files <run>/<folder>/<name>.jsonl, written atomically.

Texts are first collected in <run>/<folder>.part.jsonl, from which an interrupted run resumes with any number of
processes. Its first line, like the manifest of the folder, has the key of the outputs: weights, inputs of the training,
data and settings. Outputs are reused only if the key is equal.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import RunError
from src.files import defect, new_directory, read_manifest, reading, write_atomic, writing
from src.runs import heartbeat
from src.runs.checkpoints import checkpoints
from src.runs.context import Run
from src.support import distributed
from src.support.parsing import parse_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutputFile:
    """One file of outputs."""

    name: str
    """File name without ".jsonl"."""
    count: int
    """Number of inputs."""
    generate: Callable[[int], Iterator[list[str]]]
    """(first) -> outputs from input number `first` on, in order, in batches over all processes. Collective."""
    line: Callable[[int, str], str]
    """(number, output) -> line: a JSON object with the output in the field `ResumableOutputs.field`."""


@dataclass(frozen=True)
class ResumableOutputs:
    """The outputs of the trained model of a run, in one folder."""

    run: Run
    folder: str
    field: str
    """Field of a line that has the output."""
    files: Sequence[OutputFile]
    batch_size: int
    """Inputs per batch. An interrupted run repeats the unfinished batch."""
    write_more: Callable[[Path, Sequence[Sequence[str]]], None] = lambda _folder, _texts: None
    """(folder being written, outputs by file): writes further files into the folder."""
    best: bool = False
    """Whether to use the best checkpoint, if there is one, instead of the last."""

    def make(self, inputs: Mapping[str, str], settings: Mapping[str, Any]) -> list[list[str]]:
        """Return the outputs of each file, generated if missing. Collective.

        Call it after the last checkpoint is written, as the weights are part of the key. inputs:
        `training.state.fingerprints` of the run. settings: everything else that the outputs depend on.

        Raises:
            distributed.StopTraining: a process received a stop signal. The outputs so far are saved.
            RunError: the disk refuses, or another process has taken over the save directory.
        """
        key = distributed.broadcast_from_rank0(lambda: self._key(inputs, settings))
        texts = distributed.broadcast_from_rank0(lambda: self._read_finished(key))
        if texts is None:
            texts = self._generate(key)
            distributed.broadcast_from_rank0(lambda: self._write(texts, key))
        return self._split_by_file(texts)

    @property
    def part(self) -> Path:
        """File that collects outputs."""
        return self.run.path / f"{self.folder}.part.jsonl"

    def _key(self, inputs: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
        best = checkpoints.best(self.run.path) if self.best else None
        folder = best or checkpoints.newest_complete(self.run.path)  # None if nothing is trained
        return {
            "step": checkpoints.step_of(folder) if folder else 0,
            "weights": read_manifest(folder, RunError)["files"]["model.safetensors"]["sha256"] if folder else None,
            "inputs": dict(inputs),
            "batch_size": self.batch_size,
            **settings,
        }

    def _read_finished(self, key: dict[str, Any]) -> list[str] | None:
        """Outputs of a complete folder with this key; None if there is no such folder."""
        folder = self.run.path / self.folder
        if (
            not folder.is_dir()
            or defect(folder) is not None
            or not key.items() <= read_manifest(folder, RunError).items()
        ):
            return None
        texts = []
        for path in (folder / f"{file.name}.jsonl" for file in self.files):
            with reading(path):
                lines = path.read_bytes().splitlines()
            texts += [
                parse_json(line, f"{path}:{number}", RunError)[self.field] for number, line in enumerate(lines, 1)
            ]
        return texts

    def _generate(self, key: dict[str, Any]) -> list[str]:
        """Generate the outputs, continuing after those of an interrupted run."""
        texts = distributed.broadcast_from_rank0(lambda: self._begin(key))
        if texts:
            log.info(
                "%s: resumes after %d of %d inputs.", self.part, len(texts), sum(file.count for file in self.files)
            )
        for file, local in list(zip(self.files, self._split_by_file(texts), strict=True)):
            for batch in file.generate(len(local)) if len(local) < file.count else ():
                distributed.broadcast_from_rank0(lambda batch=batch: self._append(batch))
                texts += batch
        return texts

    def _begin(self, key: dict[str, Any]) -> list[str]:
        """Read the outputs in `part`, truncated to complete batches; start over if it has another key."""
        self.run.dir.confirm()
        try:
            with reading(self.part):
                lines = self.part.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            lines = []
        head = json.dumps(key, sort_keys=True).encode()
        texts = list(_texts(lines[1:])) if lines and lines[0] == head else []
        del texts[self._in_whole_batches(len(texts)) :]
        write_atomic(
            self.part, b"".join(line + b"\n" for line in (head, *(json.dumps(text).encode() for text in texts)))
        )
        return texts

    def _in_whole_batches(self, count: int) -> int:
        """Number of the first `count` outputs that are in complete batches of an uninterrupted run."""
        total = 0
        for file in self.files:
            if count < file.count:
                return total + count // self.batch_size * self.batch_size
            count -= file.count
            total += file.count
        return total

    def _append(self, batch: Sequence[str]) -> None:
        with writing(self.part), open(self.part, "ab") as file:
            file.write("".join(json.dumps(text) + "\n" for text in batch).encode())
        folders = checkpoints.list_all(self.run.path)
        heartbeat.refresh(self.run.path, self.run.dir.attempt, checkpoints.step_of(folders[-1]) if folders else 0)

    def _write(self, texts: Sequence[str], key: dict[str, Any]) -> None:
        self.run.dir.confirm()
        by_file = self._split_by_file(texts)
        with new_directory(self.run.path / self.folder, key) as folder:
            for file, local in zip(self.files, by_file, strict=True):
                with open(folder / f"{file.name}.jsonl", "w", encoding="utf-8", newline="\n") as out:
                    out.writelines(file.line(i, text) + "\n" for i, text in enumerate(local))
            self.write_more(folder, by_file)
        with writing(self.part):
            self.part.unlink(missing_ok=True)

    def _split_by_file(self, texts: Sequence[str]) -> list[list[str]]:
        """Split outputs by file; the last ones can be missing."""
        by_file, start = [], 0
        for file in self.files:
            by_file.append(list(texts[start : start + file.count]))
            start += file.count
        return by_file


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield texts up to the first line that is not a JSON string, as after a power failure."""
    for line in lines:
        try:
            text = parse_json(line, "", RunError)
        except RunError:
            return
        if not isinstance(text, str):
            return
        yield text
