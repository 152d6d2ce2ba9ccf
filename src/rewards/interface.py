"""What a reward is, and what it reads: rollouts, the answers of a policy to prompts."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from src.config import Places
from src.errors import DataError
from src.interfaces import Component
from src.registry import REWARDS, bind, resolved_dict


@dataclass(frozen=True)
class Rollout:
    """What a policy has said to a prompt, as rewards read it."""

    messages: Sequence[Mapping[str, Any]]
    """The prompt as rows have it: {"role", "content"}, "tool_calls" and "reasoning_content" of each message. The policy answers the last."""
    text: str
    """The answer, without control tokens."""
    row: Mapping[str, Any]
    """The row of the prepared data that the prompt is from: what more it has, such as "answer" or "tests", is for rewards."""
    ids: Sequence[int]
    """Token ids of prompt and answer, as the policy reads them."""
    sampled: int
    """How many of `ids`, at the end, the policy has sampled."""
    ended: bool
    """Whether the answer ended by itself, not at the most tokens that it may have."""


Scorer = Callable[[Sequence[Rollout]], Sequence[float]]
"""Scores of rollouts, in order."""


@dataclass(frozen=True)
class RewardSetting:
    """What a training offers its rewards."""

    places: Places
    device: Any
    """The torch.device of this process."""
    micro_batch: int
    """Most sequences of one forward pass."""
    tokenizer: Any
    """The policy's."""
    load_tokenizer: Callable[[str, Sequence[str]], Any]
    """(folder, control tokens to add) -> a tokenizer."""
    write_with: Callable[[Any, str], Callable[[Rollout], list[int]]]
    """(tokenizer, template) -> how a rollout is written as text, for a model with another vocabulary than the policy's."""
    wait: Callable[[str, float], None]
    """Called every second or oftener while something is waited for: what, and the time.monotonic() at which that wait began. Raises where
    the run has to stop."""


class RewardConfig(Component):
    """What is good about an answer, as a number."""

    weight: float = 1.0
    """Of this reward in the sum."""

    @property
    def row_key(self) -> str | None:
        """The key of a prompt's row that it reads, such as "answer"; None for none."""
        return None

    @abstractmethod
    def scorer(self, setting: RewardSetting) -> Scorer:
        """Make what scores rollouts. Batches have a fixed composition, whatever the number of processes.

        Raises:
            UserError: something that it needs is missing on this machine.
        """

    def longest_rollout(self, places: Places) -> int | None:
        """Most tokens of a rollout, with its prompt, that it can read; None if that is not known or unlimited."""
        return None

    def check(self, places: Places) -> None:
        """Raises a UserError for what `scorer` would refuse, as far as it is known without loading anything."""


RewardField = Annotated[RewardConfig, PlainValidator(partial(bind, REWARDS)), PlainSerializer(resolved_dict)]


def row_entry(row: Mapping[str, Any], key: str, where: str = "a row") -> Any:
    """What the row of a prompt has under `key`. where: names the row in the error.

    Raises:
        DataError: it has no such entry, or an empty one.
    """
    if row.get(key) in (None, "", []):
        known = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where}: a reward reads {key!r} of each row, and this one has none. Its keys: {known}.")
    return row[key]


def final_answer(text: str) -> str:
    """What is behind the last `####`, where GSM8K's rows have the answer; all of a text without."""
    return text.rpartition("####")[2].strip()
