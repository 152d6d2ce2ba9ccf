"""The interface of rewards, and rollouts: a policy's answers to prompts."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from src.errors import DataError
from src.experiments.config import Places
from src.experiments.interfaces import Component
from src.experiments.registry import REWARDS, bind, resolved_dict


@dataclass(frozen=True)
class Rollout:
    """A policy's answer to a prompt, as rewards read it."""

    messages: Sequence[Mapping[str, Any]]
    """The prompt, in the format of rows: each message has "role", "content", and optionally "tool_calls" and
    "reasoning_content". The policy answers the last message."""
    text: str
    """The answer, without control tokens."""
    row: Mapping[str, Any]
    """The prompt's row of the prepared data, including keys for rewards such as "answer" or "tests"."""
    ids: Sequence[int]
    """Token ids of prompt and answer, as the policy reads them."""
    sampled: int
    """Number of sampled tokens, at the end of `ids`."""
    is_complete: bool
    """Whether the answer has an end token; False if it was truncated at the token limit."""


Scorer = Callable[[Sequence[Rollout]], Sequence[float]]
"""Scores of rollouts, in order."""


@dataclass(frozen=True)
class RewardSetting:
    """The training's resources, for its rewards."""

    places: Places
    device: Any
    """The torch.device of this process."""
    micro_batch: int
    """Maximum sequences per forward pass."""
    tokenizer: Any
    """The policy's tokenizer."""
    load_tokenizer: Callable[[str, Sequence[str]], Any]
    """(folder, control tokens to add) -> a tokenizer."""
    write_with: Callable[[Any, str], Callable[[Rollout], list[int]]]
    """(tokenizer, template) -> a function that renders rollouts, for a model with another vocabulary."""
    wait: Callable[[str, float], None]
    """(description, time.monotonic() of its start): call at least every second during a wait.
    Raises if the run must stop."""


class RewardConfig(Component):
    """Scores an answer."""

    weight: float = 1.0
    """Weight of this reward in the sum."""

    @property
    def row_key(self) -> str | None:
        """The key of a prompt's row that the reward reads, such as "answer"; None if it reads no key."""
        return None

    @abstractmethod
    def scorer(self, setting: RewardSetting) -> Scorer:
        """Make the function that scores rollouts. Its batches are the same for any number of processes.

        Raises:
            UserError: a requirement is missing on this machine.
        """

    def longest_rollout(self, places: Places) -> int | None:
        """Maximum tokens of a rollout with its prompt; None if unknown or unlimited."""
        return None

    def check(self, places: Places) -> None:
        """Raises a UserError if `scorer` would fail, as far as this is known without loading anything."""


RewardField = Annotated[RewardConfig, PlainValidator(partial(bind, REWARDS)), PlainSerializer(resolved_dict)]


def row_entry(row: Mapping[str, Any], key: str, where: str = "a row") -> Any:
    """The value of `key` in a prompt's row. where: describes the row in errors.

    Raises:
        DataError: the value is missing or empty.
    """
    if row.get(key) in (None, "", []):
        if key in row:
            raise DataError(
                f"{where}: {key!r} is {row[key]!r}, but a reward reads it. Remove the row, or fill in the value."
            )
        keys = ", ".join(map(repr, row)) or "(none)"
        raise DataError(
            f"{where}: a reward reads {key!r}, but the row has the keys {keys}. "
            f"Add it: prepare_conversations --keep {key}."
        )
    return row[key]
