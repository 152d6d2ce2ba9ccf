"""What a run does otherwise since a person went back in it: branch.json, and what follows from it as pure functions of the step.

The file lists the branches that lead to where the run is, the oldest first. What a branch says holds for the optimizer steps that
follow `from_step` finished ones. Nothing in it is ever used up: a restart before the first checkpoint of a branch does what the first
start did, and one behind it finds all of it done.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from src.config import Config, load
from src.errors import ConfigError, RunError
from src.files import read_json

FILE = "branch.json"
LEARNING_RATES = "'x0.75' (a factor), '=1e-4' (the first step's, and the schedule's shape from there) or 'hold0:20' (0 for 20 steps)"
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?|\.[0-9]+(?:e[-+]?[0-9]+)?"
_COUNT = r"[1-9][0-9]{0,11}"
_DATA = re.compile(rf"same|reshuffle|skip:({_COUNT})")


class Rate(Config):
    """A change of the learning rate: exactly one of these."""

    factor: float | None = Field(default=None, gt=0)
    """On what the schedule, and earlier branches, say."""
    value: float | None = Field(default=None, gt=0)
    """Of the first step of the branch; later ones follow the shape of the schedule from there."""
    hold_steps: int | None = Field(default=None, gt=0)
    """For so many steps the rate is 0; then it is what it would have been."""

    @model_validator(mode="after")
    def _exactly_one(self) -> "Rate":
        if sum(item is not None for item in (self.factor, self.value, self.hold_steps)) != 1:
            raise ValueError("expected exactly one of factor, value and hold_steps.")
        return self


class Branch(Config):
    """One departure from what the run would have done."""

    number: int = Field(gt=0)
    """Never given twice in a run, not even after `undo`."""
    from_step: int = Field(gt=0)
    """Steps that were finished where it begins."""
    data: Annotated[str, Field(pattern=f"^(?:{_DATA.pattern})$")] = "same"
    """"same"; "skip:K": K steps' worth of data is passed over; "reshuffle": what is left of the epoch comes in another order."""
    learning_rate: Rate | None = None
    reset_optimizer: bool = False
    """Whether its moments begin anew with the branch."""
    wandb: str | None = None
    """Id of the Weights & Biases run that begins with the branch."""

    @property
    def skipped_steps(self) -> int:
        """K of "skip:K", else 0."""
        return int(self.data.removeprefix("skip:")) if self.data.startswith("skip:") else 0


class Branches(Config):
    """The content of branch.json."""

    branches: list[Branch]

    @model_validator(mode="after")
    def _in_order(self) -> "Branches":
        for before, after in zip(self.branches, self.branches[1:], strict=False):
            if after.number <= before.number or after.from_step <= before.from_step:
                raise ValueError(
                    f"branch {after.number} from step {after.from_step} cannot follow branch {before.number} from step {before.from_step}."
                )
        return self


def read(run: Path) -> tuple[Branch, ...]:
    """The branches of the save directory `run`, the oldest first; none where nobody ever went back.

    Raises:
        RunError: branch.json is damaged: going on without it would train something else.
    """
    if not (run / FILE).exists():
        return ()
    raw = read_json(run / FILE, RunError)
    try:
        return tuple(load(Branches, raw, str(run / FILE)).branches)
    except ConfigError as error:
        raise RunError(f"{error} `python -m src.operations.interventions undo {run}` restores what was before.") from None


def chain(before: Sequence[Branch], new: Branch) -> tuple[Branch, ...]:
    """`before` as far as it leads to the beginning of `new`, and `new`.

    A branch changes the steps after its beginning. Who goes back to that very checkpoint is before the change, so it no longer holds.
    """
    return (*(branch for branch in before if branch.from_step < new.from_step), new)


def parse_data(text: str) -> str:
    """Check what --data says.

    Raises:
        ConfigError: it is none of the three.
    """
    if not _DATA.fullmatch(text):
        raise ConfigError(f"--data: expected 'same', 'skip:K' with K steps of at least 1, or 'reshuffle', got {text!r}.")
    return text


def parse_rate(text: str) -> Rate:
    """What --lr says.

    Raises:
        ConfigError: it is none of the three, or not a positive finite number.
    """
    if match := re.fullmatch(rf"hold0:({_COUNT})", text):
        return Rate(hold_steps=int(match[1]))
    match = re.fullmatch(rf"([x=])({_NUMBER})", text, re.IGNORECASE)
    number = float(match[2]) if match else 0.0
    if match is None or not 0 < number < float("inf"):
        raise ConfigError(f"--lr: expected {LEARNING_RATES}, with a number above 0, got {text!r}.")
    return Rate(factor=number) if match[1] in "xX" else Rate(value=number)


def override_learning_rate(base: Callable[[int], float], branches: Sequence[Branch]) -> Callable[[int], float]:
    """The learning rate of the optimizer step that follows `step` finished ones. base: the same without branches.

    Factors multiply along the chain. A value replaces what was before it. A hold ends early where a later branch names a rate.

    Raises:
        ConfigError: a branch names a value where the schedule is at 0, so that it has no shape to follow.
    """
    rate = base
    holds: list[tuple[int, int]] = []
    for branch in branches:
        change, first = branch.learning_rate, branch.from_step
        if change is None:
            continue
        holds = [(begin, min(end, first)) for begin, end in holds]
        if change.hold_steps is not None:
            holds.append((first, first + change.hold_steps))
        elif change.factor is not None:
            rate = _scale(rate, first, change.factor)
        elif change.value is not None:
            if rate(first) == 0:
                error = ConfigError(
                    f"branch {branch.number}: the schedule's learning rate is 0 after step {first}, so none can be derived from "
                    f"--lr ={change.value:g}. Undo the rewind, and go back to another step or use --lr xFACTOR."
                )
                error.everywhere = True  # the branches are the same on every rank
                raise error
            rate = _override(rate, first, change.value)
    if not holds:
        return rate
    return lambda step: 0.0 if any(begin <= step < end for begin, end in holds) else rate(step)


def _scale(rate: Callable[[int], float], first: int, factor: float) -> Callable[[int], float]:
    return lambda step: rate(step) * factor if step >= first else rate(step)


def _override(rate: Callable[[int], float], first: int, value: float) -> Callable[[int], float]:
    return lambda step: value * (rate(step) / rate(first)) if step >= first else rate(step)


def must_reset_optimizer(branches: Sequence[Branch], step: int) -> bool:
    """Whether a start that restored `step` finished steps must forget the optimizer's moments.

    Also after a crash before the first checkpoint of the branch: the steps that are made again must be the same ones.
    """
    return any(branch.reset_optimizer and branch.from_step == step for branch in branches)


def branch_numbers(branches: Sequence[Branch], step: int) -> list[int]:
    """Numbers of the branches that the first `step` steps were made under: what tells a checkpoint of one branch from another's."""
    return [branch.number for branch in branches if branch.from_step < step]
