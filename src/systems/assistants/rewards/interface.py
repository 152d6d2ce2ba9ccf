"""The interface of rewards, and rollouts: the answers of a policy to prompts."""

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
    """An answer of a policy to a prompt, as rewards read it."""

    messages: Sequence[Mapping[str, Any]]
    """The prompt as in rows: {"role", "content"}, "tool_calls" and "reasoning_content" of each message.
    The policy answers the last."""
    text: str
    """The answer, without control tokens."""
    row: Mapping[str, Any]
    """The prompt's row of the prepared data: more keys, such as "answer" or "tests", are for rewards."""
    ids: Sequence[int]
    """Token ids of prompt and answer, as the policy reads them."""
    sampled: int
    """How many of `ids`, at the end, the policy has sampled."""
    is_complete: bool
    """Whether the answer ended by itself, before the token limit."""


Scorer = Callable[[Sequence[Rollout]], Sequence[float]]
"""Scores of rollouts, in order."""


@dataclass(frozen=True)
class RewardSetting:
    """Services of a training for its rewards."""

    places: Places
    device: Any
    """The torch.device of this process."""
    micro_batch: int
    """Maximum sequences per forward pass."""
    tokenizer: Any
    """The policy's."""
    load_tokenizer: Callable[[str, Sequence[str]], Any]
    """(folder, control tokens to add) -> a tokenizer."""
    write_with: Callable[[Any, str], Callable[[Rollout], list[int]]]
    """(tokenizer, template) -> how a rollout is written as text, for a model of another vocabulary."""
    wait: Callable[[str, float], None]
    """Called at least every second during a wait, with its name and the time.monotonic() of its start.
    Raises if the run must stop."""


class RewardConfig(Component):
    """Scores an answer."""

    weight: float = 1.0
    """Weight of this reward in the sum."""

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
        """Maximum tokens of a rollout with its prompt; None if unknown or unlimited."""
        return None

    def check(self, places: Places) -> None:
        """Raises a UserError for what `scorer` would refuse, as far as it is known without loading anything."""


RewardField = Annotated[RewardConfig, PlainValidator(partial(bind, REWARDS)), PlainSerializer(resolved_dict)]


def row_entry(row: Mapping[str, Any], key: str, where: str = "a row") -> Any:
    """The value of `key` in the row of a prompt. where: names the row in the error.

    Raises:
        DataError: it has no such entry, or an empty one.
    """
    if row.get(key) in (None, "", []):
        if key in row:
            raise DataError(
                f"{where}: a reward reads {key!r}, which is {row[key]!r}. Remove the row, or fill the column."
            )
        keys = ", ".join(map(repr, row)) or "nothing"
        raise DataError(
            f"{where}: a reward reads {key!r}; the row has {keys}. Add it: prepare_conversations --keep {key}."
        )
    return row[key]


def final_answer(text: str) -> str:
    """The text after the last `####`, where GSM8K's rows have the answer; without it, all of the text."""
    return text.rpartition("####")[2].strip()
