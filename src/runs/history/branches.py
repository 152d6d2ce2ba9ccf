"""Overrides after a rewind (learning rate, data order, optimizer reset): branch.json, and how it changes each step.

The file lists the branches that led to the current state, the oldest first. The overrides of a branch apply to the
optimizer steps after `from_step`. They depend only on the step, so a restart at any point of a branch repeats the same
steps.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from src.errors import ConfigError, RunError
from src.experiments.config import Config, load
from src.files import read_json

FILE = "branch.json"
LEARNING_RATES = (
    "'x0.75' (a factor), '=1e-4' (the first step's, and the schedule's shape from there) or 'hold0:20' (0 for 20 steps)"
)
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?|\.[0-9]+(?:e[-+]?[0-9]+)?"
_COUNT = r"[1-9][0-9]{0,11}"
_DENY_WORDS = {"source": 2, "shard": 3, "document": 4}
_DATA = re.compile(rf"same|reshuffle|skip:{_COUNT}(?:\+{_COUNT})*")


class Rate(Config):
    """A change of the learning rate: exactly one of these."""

    factor: float | None = Field(default=None, gt=0)
    """Multiplies the rate of the schedule and of earlier branches."""
    value: float | None = Field(default=None, gt=0)
    """The rate of the first step of the branch; later steps follow the shape of the schedule."""
    hold_steps: int | None = Field(default=None, gt=0)
    """The rate is 0 for this many steps, then unchanged."""

    @model_validator(mode="after")
    def _exactly_one(self) -> "Rate":
        if sum(item is not None for item in (self.factor, self.value, self.hold_steps)) != 1:
            raise ValueError("expected exactly one of factor, value and hold_steps.")
        return self


class Branch(Config):
    """The overrides of one rewind."""

    number: int = Field(gt=0)
    """Never reused in a run, not even after `undo`."""
    from_step: int = Field(gt=0)
    """Number of finished steps at the start of the branch."""
    data: Annotated[str, Field(pattern=f"^(?:{_DATA.pattern})$")] = "same"
    """"same"; "skip:K": skip the data of K steps; "reshuffle": the rest of the epoch in another order.

    "skip:K+L": skip the data that K steps read from here, and then that of L steps: two rewinds to the same step.
    """
    learning_rate: Rate | None = None
    reset_optimizer: bool = False
    """Whether the optimizer's moments are reset at the start of the branch."""
    deny_list: list[str] | None = None
    """Documents, shards and sources to skip from here on, as lines of a deny list: see `parse_denied`."""
    wandb: str | None = None
    """Id of a new Weights & Biases run for the branch."""

    @property
    def skips(self) -> list[int]:
        """The numbers of "skip:"; empty for other values."""
        return (
            [int(steps) for steps in self.data.removeprefix("skip:").split("+")]
            if self.data.startswith("skip:")
            else []
        )

    @property
    def skipped_steps(self) -> int:
        """Number of steps with skipped data."""
        return sum(self.skips)


class Branches(Config):
    """The content of branch.json."""

    branches: list[Branch]

    @model_validator(mode="after")
    def _in_order(self) -> "Branches":
        for before, after in zip(self.branches, self.branches[1:], strict=False):
            if after.number <= before.number or after.from_step <= before.from_step:
                raise ValueError(
                    f"branch {after.number} from step {after.from_step} cannot follow branch {before.number} from "
                    f"step {before.from_step}."
                )
        return self


def read(run: Path) -> tuple[Branch, ...]:
    """The branches of the save directory `run`, the oldest first; empty without a rewind.

    Raises:
        RunError: branch.json is damaged. Without it the training would differ.
    """
    if not (run / FILE).exists():
        return ()
    raw = read_json(run / FILE, RunError)
    try:
        return tuple(load(Branches, raw, str(run / FILE)).branches)
    except ConfigError as error:
        raise RunError(
            f"{error} `python -m src.operations.interventions undo {run}` restores the state before."
        ) from None


def chain(before: Sequence[Branch], new: Branch) -> tuple[Branch, ...]:
    """The branches of `before` that start before `new`, followed by `new`.
    A rewind to the first step of a branch drops that branch.

    `new` inherits the denied entries of dropped branches.
    """
    earlier = [branch for branch in before if branch.from_step < new.from_step]
    denied_entries = dict.fromkeys(
        entry for branch in (*before[len(earlier) :], new) for entry in branch.deny_list or ()
    )
    return (*earlier, new.model_copy(update={"deny_list": [*denied_entries] or None}))


def parse_denied(text: str, where: str) -> list[str]:
    """The entries of a deny list, with single blanks, without empty lines and comments (#).

    Each is "source NAME", "shard SOURCE URL" or "document NUMBER SOURCE URL", with the number of a document in its
    shard, counted from 0.

    Raises:
        ConfigError: there are no entries, or a line is malformed; names `where` and the line.
    """
    entries = list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        words = [] if line.lstrip().startswith("#") else line.split()
        if words and (words[0] not in _DENY_WORDS or len(words) < _DENY_WORDS[words[0]]):
            raise ConfigError(
                f'{where}:{number}: expected "source NAME", "shard SOURCE URL" or "document NUMBER SOURCE URL", got '
                f"{line.strip()[:80]!r}."
            )
        if words and words[0] == "document" and not (words[1].isascii() and words[1].isdigit() and len(words[1]) < 12):
            raise ConfigError(f"{where}:{number}: expected the number of a document, counted from 0, got {words[1]!r}.")
        if words:
            entries.append(
                " ".join([*words[: _DENY_WORDS[words[0]] - 1], line.strip().split(None, _DENY_WORDS[words[0]] - 1)[-1]])
            )
    if not entries:
        raise ConfigError(f'{where}: has no entries. Add a line such as "source NAME".')
    return [*dict.fromkeys(entries)]


def parse_data(text: str) -> str:
    """Validate the value of --data.

    Raises:
        ConfigError: it is malformed.
    """
    if not _DATA.fullmatch(text):
        raise ConfigError(
            f"--data: expected 'same', 'skip:K' with K steps of at least 1, or 'reshuffle', got {text!r}."
        )
    return text


def parse_rate(text: str) -> Rate:
    """The value of --lr.

    Raises:
        ConfigError: it is malformed, or the number is not positive and finite.
    """
    if match := re.fullmatch(rf"hold0:({_COUNT})", text):
        return Rate(hold_steps=int(match[1]))
    match = re.fullmatch(rf"([x=])({_NUMBER})", text, re.IGNORECASE)
    number = float(match[2]) if match else 0.0
    if match is None or not 0 < number < float("inf"):
        raise ConfigError(f"--lr: expected {LEARNING_RATES}, with a number above 0, got {text!r}.")
    return Rate(factor=number) if match[1] in "xX" else Rate(value=number)


def override_learning_rate(base: Callable[[int], float], branches: Sequence[Branch]) -> Callable[[int], float]:
    """The learning rate of the optimizer step after `step` finished steps. base: the schedule without branches.

    Factors multiply along the chain. A value replaces earlier overrides. A hold ends early if a later branch sets a
    rate.

    Raises:
        ConfigError: a branch sets a value where the schedule is 0, so that it has no shape to follow.
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
                    f"branch {branch.number}: the schedule's learning rate is 0 after step {first}, "
                    f"so it cannot be scaled to --lr ={change.value:g}. "
                    "Undo the rewind, then rewind to another step or use --lr xFACTOR."
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
    """Whether a start from the checkpoint of `step` must reset the moments (also after a crash early in the branch)."""
    return any(branch.reset_optimizer and branch.from_step == step for branch in branches)


def check_start(branches: Sequence[Branch], step: int) -> None:
    """Check that a start from the checkpoint of `step` does not miss a reset of the optimizer,
    which happens only at the start of a branch.

    Raises:
        RunError: a branch that resets the optimizer starts later, and its first checkpoint is missing or damaged.
    """
    later = [branch for branch in branches if branch.reset_optimizer and branch.from_step > step]
    if later:
        raise RunError(
            f"branch {later[0].number}: it resets the optimizer at step {later[0].from_step}, but the checkpoint of "
            f"that step is damaged or missing: the newest complete one is of step {step}. "
            "Undo the rewind, or rewind to an earlier step with --reset-optimizer."
        )


def branch_numbers(branches: Sequence[Branch], step: int) -> list[int]:
    """Numbers of the branches within the first `step` steps. They distinguish checkpoints of a step by branch."""
    return [branch.number for branch in branches if branch.from_step < step]
