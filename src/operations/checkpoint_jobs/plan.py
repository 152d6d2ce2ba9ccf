"""A plan for the checkpoints of a run: convert, evaluate, upload, clean up. Read from YAML and validated.

Commands are templates for /bin/sh; values of placeholders are quoted. A literal brace is doubled: {{ }}.
"""

from pathlib import Path
from string import Formatter
from typing import Literal

from fsspec import AbstractFileSystem, available_protocols
from fsspec.core import url_to_fs
from pydantic import Field, model_validator

from src.errors import RunError
from src.experiments import config
from src.experiments.config import Problems, unknown_text
from src.files import read_yaml

Stage = Literal["convert", "evaluate", "upload", "clean_up"]
Folder = Literal["checkpoint", "converted"]
STAGES: tuple[Stage, ...] = ("convert", "evaluate", "upload", "clean_up")
PLACEHOLDERS = ("run", "exp_id", "checkpoint", "converted", "step", "branch")
"""Placeholders in all commands."""
OBJECT_STORES = ("s3", "gs", "az")
"""Protocols that obstore serves to fsspec."""


class Checkpoints(config.Config):
    """Selects checkpoints that match any of these rules."""

    every: int | None = Field(default=None, ge=1)
    """Checkpoints at multiples of this step."""
    last: bool = False
    """The last checkpoint of a run that is done."""
    best: bool = False
    """The best checkpoint so far."""

    @model_validator(mode="after")
    def _check_selection(self) -> "Checkpoints":
        if self.every is None and not self.last and not self.best:
            raise ValueError("selects no checkpoint. Set every: N, last: true or best: true.")
        return self


class Trials(config.Config):
    """Retries of a stage."""

    attempts: int = Field(default=3, ge=1)
    """Failures in a row after which it is not retried."""
    retry_seconds: float = Field(default=60.0, ge=0)
    """Pause before the second attempt; doubled for each later one."""
    timeout_seconds: float = Field(default=86_400.0, gt=0)
    """Timeout of a command."""


class Convert(Trials):
    """Convert {checkpoint} to another format, in the new folder {output}."""

    command: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_placeholders(self) -> "Convert":
        _check_template(self.command, "output")
        return self


class Task(Trials):
    """One evaluation. Its command writes a JSON object of numbers by name to the file {scores}."""

    command: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_placeholders(self) -> "Task":
        _check_template(self.command, "scores", "task")
        return self


class Evaluate(config.Config):
    """Evaluations by name; each runs, and is retried, separately."""

    tasks: dict[str, Task] = Field(min_length=1)

    @model_validator(mode="after")
    def _names(self) -> "Evaluate":
        for name in self.tasks:
            if not name or name.startswith(".") or not all(c.isalnum() or c in "._-" for c in name):
                raise ValueError(f"tasks: {name!r}: expected a name of letters, digits, '.', '_' and '-'.")
        return self


class Upload(Trials):
    """Copy folders to a remote place, file by file, and verify size and sha256 of each."""

    folders: list[Folder] = Field(default=["checkpoint"], min_length=1)
    to: str
    """Destination for fsspec: an existing folder (file:///archive or /archive), s3://bucket/prefix, hf://owner/model."""

    @model_validator(mode="after")
    def _check_destination(self) -> "Upload":
        protocol, separator, _ = self.to.partition("://")
        if separator and protocol not in available_protocols() and protocol not in OBJECT_STORES:
            raise Problems([("to", unknown_text("protocol", protocol, [*available_protocols(), *OBJECT_STORES]))])
        if not separator and not self.to.startswith("/"):
            raise Problems([("to", f"expected /FOLDER or a URL such as s3://BUCKET/PREFIX, got {self.to!r}.")])
        return self


class CleanUp(Trials):
    """Delete uploaded folders, except those that are still needed."""

    delete: list[Folder] = Field(default=["checkpoint"], min_length=1)
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are not deleted."""


class Plan(config.Config):
    """The keys of a plan file."""

    checkpoints: Checkpoints
    convert: Convert | None = None
    evaluate: Evaluate | None = None
    upload: Upload | None = None
    clean_up: CleanUp | None = None

    @property
    def stages(self) -> list[Stage]:
        """The stages of the plan, in order."""
        return [stage for stage in STAGES if getattr(self, stage) is not None]

    def prerequisites(self, stage: Stage) -> list[Stage]:
        """The stages of the plan that must be done before `stage`."""
        earlier = self.stages[: self.stages.index(stage)]
        return earlier if stage == "clean_up" else [one for one in earlier if one == "convert"]

    @model_validator(mode="after")
    def _check_stages(self) -> "Plan":
        mistakes: list[tuple[str, str]] = []
        if not self.stages:
            mistakes.append(("", f"has no stage. Known: {', '.join(STAGES)}."))
        if self.upload and "converted" in self.upload.folders and not self.convert:
            mistakes.append(("upload.folders", "'converted' is made by the stage convert, which is not in the plan."))
        if self.clean_up and not self.upload:
            mistakes.append(("clean_up", "deletes only uploaded folders: the stage upload must be in the plan."))
        elif self.clean_up and self.upload and (extra := set(self.clean_up.delete) - set(self.upload.folders)):
            mistakes.append(
                ("clean_up.delete", f"{', '.join(sorted(extra))}: not in upload.folders, so it would be lost.")
            )
        if mistakes:
            raise Problems(mistakes)
        return self


def _check_template(template: str, required_name: str, *optional_names: str) -> None:
    """Raise Problems for unknown placeholders, or if `required_name` is missing."""
    placeholders = (*PLACEHOLDERS, required_name, *optional_names)
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise Problems([("command", f"{template!r}: {error}. Write a literal brace twice.")]) from None
    mistakes = [
        ("command", f"{{{name}}}: {unknown_text('placeholder', name, placeholders)}")
        for name in names
        if name not in placeholders
    ]
    if required_name not in names:
        mistakes.append(("command", f"has no {{{required_name}}} in it: {template!r}."))
    if mistakes:
        raise Problems(mistakes)


def open_destination(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of `url`, and the path in it.

    Raises:
        RunError: it cannot be opened, or the folder does not exist.
    """
    if url.partition("://")[0] in OBJECT_STORES:
        try:
            from obstore.fsspec import register
        except ImportError:
            raise RunError(f"{url}: obstore is not installed: pip install -r requirements/streaming.txt") from None
        register(list(OBJECT_STORES))
    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise RunError(f"{url}: cannot be opened ({error}). Check the URL and the credentials.") from None
    if "file" in files.protocol and not files.isdir(path):
        raise RunError(f"{path}: no such folder to upload to. Check that it is mounted, or create it.")
    return files, path.rstrip("/")


def read(path: Path) -> Plan:
    """The plan in the file `path`.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is invalid; names the file, and the line or the key.
    """
    return config.load(Plan, read_yaml(path, f"the keys of a plan (checkpoints, {', '.join(STAGES)})"), str(path))
