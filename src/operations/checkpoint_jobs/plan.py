"""A plan of what is done with the checkpoints of a run: convert, evaluate, upload, clean up.
Read from YAML and checked as a whole.

Commands are templates for /bin/sh; what stands for a placeholder is quoted. A brace that is none is written twice: {{
}}.
"""

from collections.abc import Iterable
from pathlib import Path
from string import Formatter
from typing import Literal

from pydantic import Field, model_validator

from src.experiments import config as configs
from src.experiments.config import Problems, unknown_text
from src.files import read_yaml

Stage = Literal["convert", "evaluate", "upload", "clean_up"]
Folder = Literal["checkpoint", "converted"]
STAGES: tuple[Stage, ...] = ("convert", "evaluate", "upload", "clean_up")
PLACEHOLDERS = ("run", "exp_id", "checkpoint", "converted", "step", "branch")
"""Placeholders of every command."""


class Checkpoints(configs.Config):
    """Which checkpoints: those for which any of these holds."""

    every: int | None = Field(default=None, ge=1)
    """At multiples of so many steps."""
    last: bool = False
    """The last one of a run that is done."""
    best: bool = False
    """The best one, as it stands when it is looked at."""

    @model_validator(mode="after")
    def _check_selection(self) -> "Checkpoints":
        if self.every is None and not self.last and not self.best:
            raise ValueError("names no checkpoint: expected every: N, last: true or best: true.")
        return self


class Trials(configs.Config):
    """How often a stage is tried."""

    attempts: int = Field(default=3, ge=1)
    """Failures in a row after which it is left alone."""
    retry_seconds: float = Field(default=60.0, ge=0)
    """Until the second attempt; doubled each time after."""
    timeout_seconds: float = Field(default=86_400.0, gt=0)
    """After so long a command is ended."""


class Convert(Trials):
    """Makes of {checkpoint} what others read, in the new folder {output}."""

    command: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_placeholders(self) -> "Convert":
        _check_templates({"command": (self.command, (*PLACEHOLDERS, "output"), ("output",))})
        return self


class Task(Trials):
    """One evaluation. Its command writes a JSON object of numbers by name to the file {scores}."""

    command: str = Field(min_length=1)

    @model_validator(mode="after")
    def _check_placeholders(self) -> "Task":
        _check_templates({"command": (self.command, (*PLACEHOLDERS, "scores", "task"), ("scores",))})
        return self


class Evaluate(configs.Config):
    """Evaluations by name; each is done, and tried again, by itself."""

    tasks: dict[str, Task] = Field(min_length=1)
    after: list[Literal["convert"]] | None = None
    """Stages that come first; None: those of the plan that it may need."""

    @model_validator(mode="after")
    def _names(self) -> "Evaluate":
        for name in self.tasks:
            if not name or name.startswith(".") or not all(c.isalnum() or c in "._-" for c in name):
                raise ValueError(f"tasks: {name!r}: expected a name of letters, digits, '.', '_' and '-'.")
        return self


class Upload(Trials):
    """Copies folders elsewhere, file by file, and reads size and sha256 of each back.
    Either `to`, or `command` and `readback`."""

    folders: list[Folder] = Field(default=["checkpoint"], min_length=1)
    to: str | None = None
    """A folder that exists: file:///archive or /archive."""
    command: str | None = Field(default=None, min_length=1)
    """Copies the file {file} to {name} there."""
    readback: str | None = Field(default=None, min_length=1)
    """Prints sha256 and size in bytes of what is there as {name}, read from there; fails if nothing is."""
    after: list[Literal["convert", "evaluate"]] | None = None

    @model_validator(mode="after")
    def _check_destination(self) -> "Upload":
        if (self.to is None) == (self.command is None) or (self.command is None) != (self.readback is None):
            raise ValueError(
                "expected either `to: FOLDER`, or both `command` and `readback`: what is not read back does not count."
            )
        if self.to is not None and (
            not self.to.removeprefix("file://").startswith("/") or "://" in self.to.removeprefix("file://")
        ):
            raise Problems(
                [
                    (
                        "to",
                        (
                            f"expected file:///FOLDER or /FOLDER, got {self.to!r}. "
                            "Anything else takes `command` and `readback`."
                        ),
                    )
                ]
            )
        if self.command is not None and self.readback is not None:
            _check_templates(
                {
                    "command": (self.command, (*PLACEHOLDERS, "file", "name"), ("file", "name")),
                    "readback": (self.readback, (*PLACEHOLDERS, "name"), ("name",)),
                }
            )
        return self


class CleanUp(Trials):
    """Deletes folders that were uploaded, but none that something else needs."""

    delete: list[Folder] = Field(default=["checkpoint"], min_length=1)
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that stay."""
    after: list[Literal["convert", "evaluate", "upload"]] | None = None


class Plan(configs.Config):
    """The keys of a plan file."""

    checkpoints: Checkpoints
    convert: Convert | None = None
    evaluate: Evaluate | None = None
    upload: Upload | None = None
    clean_up: CleanUp | None = None

    @property
    def stages(self) -> list[Stage]:
        """Those of the plan, in their order."""
        return [stage for stage in STAGES if self.stage(stage) is not None]

    def stage(self, name: Stage) -> Convert | Evaluate | Upload | CleanUp | None:
        """What the plan says of a stage; None where it has none."""
        return {"convert": self.convert, "evaluate": self.evaluate, "upload": self.upload, "clean_up": self.clean_up}[
            name
        ]

    def prerequisites(self, stage: Stage) -> list[Stage]:
        """The stages of the plan that must be done before `stage`."""
        named = getattr(self.stage(stage), "after", None)
        if named is None:
            here = self.stages[: self.stages.index(stage)]
            return [one for one in here if stage == "clean_up" or one == "convert"]
        return list(named)

    @model_validator(mode="after")
    def _check_stages(self) -> "Plan":
        found: list[tuple[str, str]] = []
        if not self.stages:
            found.append(("", f"names no stage. Known: {', '.join(STAGES)}."))
        for stage in self.stages:
            found += [
                (f"{stage}.after", f"{one!r} is not in this plan.")
                for one in self.prerequisites(stage)
                if one not in self.stages
            ]
        if (
            self.upload
            and "converted" in self.upload.folders
            and not (self.convert and "convert" in self.prerequisites("upload"))
        ):
            found.append(
                (
                    "upload.folders",
                    "'converted' is made by the stage convert, which must be in the plan and come first.",
                )
            )
        if self.clean_up:
            if self.upload is None or "upload" not in self.prerequisites("clean_up"):
                found.append(
                    ("clean_up", "deletes only what was uploaded: the stage upload must be in the plan and come first.")
                )
            elif extra := set(self.clean_up.delete) - set(self.upload.folders):
                found.append(
                    ("clean_up.delete", f"{', '.join(sorted(extra))}: not in upload.folders, so it would be lost.")
                )
        if found:
            raise Problems(found)
        return self


def _check_templates(templates: dict[str, tuple[str, Iterable[str], Iterable[str]]]) -> None:
    """Each template's placeholders: key -> (template, those that are known, those that must be there)."""
    found = []
    for key, (template, known, needed) in templates.items():
        try:
            used = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        except ValueError as error:
            found.append((key, f"{error}: a brace that begins no placeholder is written twice, in {template!r}."))
            continue
        found += [
            (key, f"{{{name}}}: {unknown_text('placeholder', name, known)}") for name in used if name not in set(known)
        ]
        found += [(key, f"has no {{{name}}} in it: {template!r}.") for name in needed if name not in used]
    if found:
        raise Problems(found)


def read(path: Path) -> Plan:
    """The plan in the file `path`.

    Raises:
        ConfigError: it cannot be read, is no YAML, or has a mistake; names the file, and the line or the key.
    """
    return configs.load(Plan, read_yaml(path, f"the keys of a plan (checkpoints, {', '.join(STAGES)})"), str(path))
