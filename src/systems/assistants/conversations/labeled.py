"""Single replies with a label, desirable or not: a sample is a group of replies, for recipe `kto`.

A row is a conversation that ends with an answer, and "label", true or false; or a row of ranked replies, whose best
replies are desirable and whose worst are not. TRL estimates the KL divergence of a batch from its prompts, each with
another prompt's reply. Here the batch is a sample: a group that depends on the data only, so that neither the
micro-batch nor the number of processes changes the estimate.
"""

import logging
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field

from src.data import row_counts
from src.errors import DataError
from src.experiments.batches import RankedBatch
from src.experiments.config import Places
from src.systems.assistants.conversations.choices import draws
from src.systems.assistants.conversations.entries import Message, check_row
from src.systems.assistants.conversations.ranked import Replies, RepliesConfig, RepliesSample, render_reply
from src.systems.assistants.conversations.rendering import Rendered
from src.systems.assistants.conversations.rows import ANSWERED_ROW, RANKED_ROW, SCORED_ROW, kind_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
LABELED_ROW = "labeled"
DESIRABLE, UNDESIRABLE = 0, 1
"""Values of `ranks` in a batch."""
_GROUPS_SEED = 5_368_709
"""Seed of the groups, so that all experiments read the same ones."""


class Config(RepliesConfig):
    """Source of labeled replies, and the size of their groups."""

    kinds: ClassVar[Sequence[str]] = (LABELED_ROW, RANKED_ROW, SCORED_ROW)

    group_size: int = Field(default=8, gt=0)
    """Replies per sample; the last groups can have one fewer. Each prompt is also read with the reply to another one,
    to estimate the KL divergence. 1: without these, for a loss without the KL divergence."""
    shuffled_labels: bool = False
    """Whether to shuffle the labels of all replies in training: a control."""

    @staticmethod
    def _count(path: Path, kinds: Collection[str], most: int) -> int:
        rows = row_counts.iterate(path, {}, check=check_row)
        return sum(1 for _ in islice((row for row in rows if _answers(row, str(path))), most))

    def most_samples(self, places: Places) -> int | None:
        return None  # a row of ranked replies has two or more

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "LabeledReplies":
        return LabeledReplies(self, places, tokenizer, split, seed)


class Item(NamedTuple):
    """A reply with a label."""

    row: int
    place: int
    """Index in the replies of its row; 0 for the answer of a conversation."""
    label: int
    """DESIRABLE or UNDESIRABLE."""


class Sample(RepliesSample):
    """A group of replies, and the prompts of the group with the replies to other prompts. `ranks` has DESIRABLE and
    UNDESIRABLE."""

    mismatch_mask: list[bool]


class LabeledReplies(Replies):
    """Groups of labeled replies, the same ones for every seed and epoch. Other rows are skipped."""

    collation = "labeled"
    config: Config

    def _select(self) -> list[list[int]]:
        import numpy as np

        config, rows, name = self.config, self._rows, self._name
        self.replies_per_sample = config.group_size
        answers = [_answers(rows[row], rows.location(row)) for row in range(len(rows))]
        self._items = [Item(row, *answer) for row, labels in enumerate(answers) for answer in labels]
        if len(self._items) < min(2, config.group_size):
            raise DataError(
                f"{name}: {len(self._items)} replies with a label; a group needs {min(2, config.group_size)}. "
                'Add rows with "label", or ranked replies.'
            )
        if without := answers.count([]):
            log.info("%s: %d of %d rows have no label and are skipped.", name, without, len(rows))
        labels = [item.label for item in self._items]
        if config.shuffled_labels and self._seed is not None:
            draws("labels", self._seed).shuffle(labels)
            self._items = [item._replace(label=label) for item, label in zip(self._items, labels, strict=True)]
        count = len(self._items)
        groups = max(1, min(-(-count // config.group_size), count // min(2, config.group_size)))
        order = np.random.default_rng(_GROUPS_SEED).permutation(count)
        return [group.tolist() for group in np.array_split(order, groups)]

    def render(self, epoch: int, index: int) -> list[Rendered]:
        """Group `index` of an epoch: each prompt with its reply, and their roles."""
        return [self._render(item, item, epoch) for item in self._content(index)]

    def sample(self, epoch: int, index: int) -> Sample:
        """Group `index` of an epoch: its replies, then its prompts with the replies to other prompts."""
        group = self._content(index)
        others = self._mismatched_replies(group) if self.config.group_size > 1 else []
        rows = [*zip(group, group, strict=True), *zip(group, others, strict=False)]
        rendered = [self._render(prompt, reply, epoch) for prompt, reply in rows]
        return {
            "input_ids": [each.ids for each in rendered],
            "loss_mask": [each.loss_mask for each in rendered],
            "ranks": [self._items[reply].label for _, reply in rows],
            "mismatch_mask": [place >= len(group) for place in range(len(rows))],
        }

    def _mismatched_replies(self, group: Sequence[int]) -> list[int]:
        """For each item of a group the closest item before it, cyclically, of another conversation; as in TRL the one
        before if all are of one."""
        cycles = [[group[place - step] for step in range(1, len(group))] for place in range(len(group))]
        return [
            next((other for other in before if self._items[other].row != self._items[item].row), before[0])
            for item, before in zip(group, cycles, strict=True)
        ]

    def _render(self, prompt: int, reply: int, epoch: int) -> Rendered:
        """The prompt of an item with the reply of an item."""
        row, place = self._items[prompt][:2]
        key = None if self._seed is None else (self._seed, epoch, prompt)
        messages, answer = self._read(prompt)[0], self._read(reply)[1]
        with self._rows.add_location(row):
            return render_reply(self.config, self.renderer, messages, answer, key, place)

    def _read(self, number: int) -> tuple[Sequence[Message], Message]:
        """The prompt and the reply of an item."""
        item = self._items[number]
        entry = self._rows.entry(item.row)
        if entry.replies:
            return entry.messages, entry.replies[item.place].message
        return entry.messages[:-1], entry.messages[-1]

    def collate(self, samples: Sequence[Sample]) -> RankedBatch:
        import torch

        mismatch_mask = torch.tensor([each for sample in samples for each in sample["mismatch_mask"]])
        return {**super().collate(samples), "mismatch_mask": mismatch_mask}


def _answers(row: dict[str, Any], where: str) -> list[tuple[int, int]]:
    """(place, label) of each labeled reply of a valid row; empty for a row without one.

    Raises:
        DataError: the label of an answer is not true or false.
    """
    kind = kind_of(row)
    if kind in (RANKED_ROW, SCORED_ROW):
        ranks = [reply["rank"] for reply in row["replies"]]
        ends = {min(ranks): DESIRABLE, max(ranks): UNDESIRABLE}
        return [(place, ends[rank]) for place, rank in enumerate(ranks) if rank in ends]
    if kind != ANSWERED_ROW or "label" not in row:
        return []
    if not isinstance(row["label"], bool):
        raise DataError(f"{where}: label: expected true or false, got {row['label']!r:.60}.")
    return [(0, DESIRABLE if row["label"] else UNDESIRABLE)]
