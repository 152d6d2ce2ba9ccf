"""Conversations as samples, with loss on the assistant's answers."""

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from pydantic import Field, model_validator

from src.data import jsonl, row_counts
from src.data.orders import ShuffledConfig
from src.errors import DataError
from src.experiments.batches import TokenBatch
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places, drop_absences
from src.experiments.dataset_protocols import NUM_CHECKED_QUESTIONS, Prediction
from src.experiments.interfaces import require_fit
from src.experiments.kinds import TokenizerSource
from src.support.call_once import call_once
from src.systems.assistants.conversations import templates
from src.systems.assistants.conversations.choices import Tags, draws, window
from src.systems.assistants.conversations.entries import Entry, Message, check_row, read_entry
from src.systems.assistants.conversations.refusals import refuses
from src.systems.assistants.conversations.rendering import Rendered, Renderer
from src.systems.assistants.conversations.rows import (
    ANSWERED_ROW,
    EMPTY_ROW,
    OTHER_ROW,
    PROMPT_ROW,
    RANKED_ROW,
    SCORED_ROW,
    ConversationRows,
    kind_of,
    read_rows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
NUM_CHECKED_REPLIES = 256
"""Number of replies that are rendered at the start, to find errors early."""


class Writing(StrictConfig):
    """How conversations are written."""

    template: Literal["oasst", "chatml", "tokenizer"] = "oasst"
    """oasst: Open-Assistant's v2.5. tokenizer: the tokenizer's chat template."""
    system: str | None = Field(default=None, min_length=1)
    """System message for conversations without one."""
    tags: Tags | None = None
    """Properties written before answers; None: nothing."""

    @model_validator(mode="after")
    def _tags_have_a_place(self) -> "Writing":
        if self.tags and self.template == "tokenizer":
            raise ValueError(
                "tags: a tokenizer's chat template cannot write them. Remove them, or use template 'oasst' or 'chatml'."
            )
        return self


_CONTROLS = ("shuffled_answers", "shuffled_ranks", "shuffled_labels")
"""Fields that change only training samples, so that a run and its control are compared on the same validation data."""


class ConversationConfig(ShuffledConfig):
    """Source and format of conversations; the base of `conversations` and `ranked_replies`."""

    writer: ClassVar[str | None] = "conversation"
    kinds: ClassVar[Sequence[str]] = (ANSWERED_ROW, RANKED_ROW, SCORED_ROW, OTHER_ROW)
    """Kinds of rows that are samples."""

    corpus: str = Field(min_length=1)
    """Folder below `--data_path` with train.jsonl and val.jsonl; rows: see
    src/systems/assistants/conversations/entries.py."""
    sequence_tokens: int = Field(gt=1)
    """Maximum tokens per sample."""
    writing: Writing = Writing()
    val_samples: int | None = Field(default=None, gt=0)
    """Number of validation rows to use, the same rows for every seed; None for all."""

    @property
    def is_measured(self) -> bool:
        return True

    def check(self, places: Places) -> None:
        for split in jsonl.SPLITS:
            self.check_split(places, split, self.kinds)

    def check_split(self, places: Places, split: str, kinds: Collection[str]) -> None:
        """Raise a UserError if a split has too few rows for `val_samples`, or none of these kinds."""
        path = jsonl.require_file(jsonl.corpus_folder(places, self.corpus), f"{split}.jsonl")
        if split == "val":
            row_counts.require_lines("data.val_samples", self.val_samples, path)
        if not self._count(path, kinds, 1):
            raise DataError(f"{path}: no row of the kinds that {self.name!r} data read: {', '.join(kinds)}.")

    @staticmethod
    def _count(path: Path, kinds: Collection[str], most: int) -> int:
        """Number of rows of these kinds, at most `most`."""
        rows = row_counts.iterate(path, {}, check=check_row)
        return sum(1 for _ in islice((row for row in rows if kind_of(row) in kinds), most))

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        if source:
            call_once(self._check_writing, source)

    def _check_writing(self, source: TokenizerSource) -> None:
        """Raises DataError if the tokenizer has no end token or not the template's tokens, or its template cannot be
        trained with."""
        from src.data.text import tokenizers

        name = self.writing.template
        controls = {*templates.CONTROLS.get(name, ())} - {*source.new_tokens}
        if (
            name != "tokenizer"
            and tokenizers.names_end_token(source.folder)
            and tokenizers.spells(source.folder, controls)
        ):
            return  # without importing transformers, which is slow
        template = templates.find(name, tokenizers.load(source.folder, source.new_tokens))
        if name == "tokenizer":
            system = [Message("system", self.writing.system)] if self.writing.system else []
            template.spans([*system, Message("user", "?")], answering=True)

    def most_samples(self, places: Places) -> int | None:
        """See `parts.CountedConfig`."""
        return jsonl.count_lines(jsonl.require_file(jsonl.corpus_folder(places, self.corpus), "train.jsonl"))

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens, max_positions, new_tokens)

    def read(self, places: Places, split: str) -> ConversationRows:
        """The rows of a split, parsed on access."""
        path = jsonl.require_file(jsonl.corpus_folder(places, self.corpus), f"{split}.jsonl")
        rows = read_rows(path)
        count = self.val_samples if split == "val" else None
        return ConversationRows(rows, None if count is None else jsonl.select_validation_rows(len(rows), count, path))

    def digest(self, places: Places) -> str:
        """Digest of the rows and of their format."""
        return self._digest(jsonl.fingerprint(jsonl.corpus_folder(places, self.corpus)), ())

    def content(self, places: Places, split: str) -> str:
        """Digest of the rows of one split and of their format."""
        return self._digest(jsonl.fingerprint(jsonl.corpus_folder(places, self.corpus), split), _CONTROLS)

    def _digest(self, rows: str, without: Collection[str]) -> str:
        """without: fields that do not count."""
        options = self.model_dump(mode="json", exclude={"corpus", "val_samples", "shuffle", *without})
        parts = [rows, drop_absences(options, self)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Config(ConversationConfig):
    """Conversations and plain text."""

    has_questions: ClassVar[bool] = True

    random_offset: float = Field(default=0.0, ge=0, le=1)
    """Share of too-long conversations that start at a random token; the rest are truncated at the end."""
    without_refusals: bool = False
    """Whether to skip conversations in which the assistant refuses or says that it is a model."""
    shuffled_answers: bool = False
    """Whether to replace the last answer of each training conversation with another conversation's: a control."""
    train_all_roles: bool = False
    """Whether to learn the tokens of all roles."""

    def count_questions(self, places: Places, most: int) -> int:
        path = jsonl.require_file(jsonl.corpus_folder(places, self.corpus), "val.jsonl")
        return min(self._count(path, [ANSWERED_ROW], most), self.val_samples or most)

    def first_questions(self, places: Places) -> list[Prediction]:
        path = jsonl.require_file(jsonl.corpus_folder(places, self.corpus), "val.jsonl")
        rows = (row for row in row_counts.iterate(path, {}, check=check_row) if kind_of(row) == ANSWERED_ROW)
        turns = [read_entry(row, str(path)).messages for row in islice(rows, NUM_CHECKED_QUESTIONS)]
        return [Prediction(answer.full_text, [answer.full_text], before[-1].full_text) for *before, answer in turns]

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "Conversations":
        return Conversations(self, places, tokenizer, split, seed)


class Sample(TypedDict):
    """One conversation."""

    input_ids: list[int]
    loss_mask: list[bool]


class ConversationSamples:
    """Base of data sets with samples of rows of conversations, tokenised on access."""

    replies_per_sample = 1
    """Maximum replies in a sample, to find the samples of `NUM_CHECKED_REPLIES`."""

    def __init__(
        self, config: Any, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int | None
    ) -> None:
        """seed: for the random choices of a training split; None for the same choices in every epoch.

        Raises:
            DataError: the data set is missing, incomplete or malformed; the template does not fit the tokenizer; or
                there is no sample.
        """
        self.config, self.shuffle = config, config.shuffle
        self.renderer = Renderer(tokenizer, templates.find(config.writing.template, tokenizer, config.writing.system))
        self._rows, self._seed = config.read(places, split), seed if split == "train" else None
        self.fingerprint, self._name = config.digest(places), str(places.data / config.corpus)
        self.content = config.content(places, split)
        self._contents: Sequence[Any] = self._select()
        """By sample: the index of its row, or the numbers of its replies."""
        for index in range(min(len(self), -(-NUM_CHECKED_REPLIES // self.replies_per_sample))):
            self.sample(0, index)  # templates refuse some messages: fail before the first step

    def _select(self) -> Sequence[Any]:
        """The value of `_contents`. Raises DataError if there are no samples."""
        raise NotImplementedError

    def sample(self, epoch: int, index: int) -> Any:
        """Sample `index` of an epoch."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._contents)

    def _content(self, index: int) -> Any:
        """The entry of `_contents` for sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._contents[index]


class Conversations(ConversationSamples):
    """Samples of conversations. Conversations with nothing to learn are skipped."""

    collation = "conversations"
    config: Config

    def _select(self) -> Sequence[int]:
        if prompts := self._rows.numbers_of(PROMPT_ROW):
            raise DataError(
                f"{self._rows.location(prompts[0])}: prompt without an answer. Use data 'rollouts', or add an answer."
            )
        total = range(len(self._rows))
        nonempty = total if self.config.train_all_roles else self._rows.numbers_of(EMPTY_ROW, invert=True)
        if not nonempty:
            raise DataError(f"{self._name}: all answers of the assistant are empty, so there is nothing to learn.")
        if len(nonempty) < len(total):
            counts = len(total) - len(nonempty), len(total)
            log.info("%s: %d of %d conversations have only empty answers and are skipped.", self._name, *counts)
        if not self.config.without_refusals:
            return nonempty
        row_indices = [i for i in nonempty if not refuses(self._rows.entry(i).conversation)]
        counts = len(nonempty) - len(row_indices), len(nonempty)
        log.info("%s: %d of %d conversations are refusals and are skipped.", self._name, *counts)
        if not row_indices:
            raise DataError(f"{self._name}: every conversation is a refusal. Set without_refusals: false.")
        return row_indices

    def length(self, epoch: int, index: int) -> int:
        """Tokens of sample `index` of an epoch."""
        return len(self.render(epoch, index).ids)

    def render(self, epoch: int, index: int) -> Rendered:
        """Sample `index` of an epoch with its roles."""
        config, row = self.config, self._content(index)
        entry = self._rows.entry(row)
        key = None if self._seed is None else (self._seed, epoch, index)
        if entry.text is not None:
            return window(self.renderer.render_text(entry.text), config.sequence_tokens, 0.0, None)
        messages = self._another_answer(index, entry) if config.shuffled_answers and key else entry.conversation
        messages = with_system(messages, config.writing.system)
        tags = (
            config.writing.tags.write_all(messages, draws("tags", *key) if key else None) if config.writing.tags else ()
        )
        with self._rows.add_location(row):
            rendered = self.renderer.render(messages, tags)
        return window(
            rendered, config.sequence_tokens, config.random_offset, (lambda: draws("window", *key)) if key else None
        )

    def _another_answer(self, index: int, entry: Entry) -> Sequence[Message]:
        """The conversation with its last answer replaced by another conversation's, the same one in every epoch."""
        messages = entry.conversation
        step = draws("answers", self._seed, index).randrange(1, len(self)) if len(self) > 1 else 0
        others = self._rows.entry(self._contents[(index + step) % len(self)]).conversation
        place = max(place for place, message in enumerate(messages) if message.role == "assistant")
        answer = next((message for message in reversed(others) if message.role == "assistant"), messages[place])
        return [*messages[:place], replace(answer, tags={}, tools=()), *messages[place + 1 :]]

    def sample(self, epoch: int, index: int) -> Sample:
        """Sample `index` of an epoch."""
        rendered = self.render(epoch, index)
        loss_mask = (
            [place > 0 for place in range(len(rendered.ids))] if self.config.train_all_roles else rendered.loss_mask
        )
        return {"input_ids": rendered.ids, "loss_mask": loss_mask}

    @property
    def num_questions(self) -> int:
        """Number of conversations that end with an answer."""
        return len(self._answered_indices)

    @cached_property
    def _answered_indices(self) -> Sequence[int]:
        numbers = self._rows.numbers_of(ANSWERED_ROW)
        if isinstance(self._contents, range):
            return numbers
        import numpy as np

        return np.flatnonzero(np.isin(np.asarray(self._contents), np.asarray(numbers))).tolist()

    def row(self, index: int) -> dict[str, Any]:
        """The last question of conversation `index` and its answer."""
        *before, answer = self._rows.entry(self._contents[self._answered_indices[index]]).messages
        return {
            "question": before[-1].full_text,
            "answer": answer.full_text,
            "context": "",
            "dataset": self.config.corpus,
        }

    def source(self, index: int) -> str:
        """Name of the score group: the corpus."""
        return self.config.corpus

    def prompt(self, index: int) -> Sample:
        """A conversation up to its last answer, truncated from the left if too long."""
        *before, answer = self._rows.entry(self._contents[self._answered_indices[index]]).messages
        ids = render_prompt(self.renderer, self.config.writing, before, answer)[-self.config.sequence_tokens :]
        return {"input_ids": ids, "loss_mask": [False] * len(ids)}

    def collate_prompts(self, samples: Sequence[Sample]) -> TokenBatch:
        """Pad on the left, for `generate`."""
        return self.collate(samples, pad_left=True)

    def collate(self, samples: Sequence[Sample], pad_left: bool = False) -> TokenBatch:
        """Pad on one side. Padding is masked, so its id does not matter."""
        from src.data import collate

        ids, masks = [s["input_ids"] for s in samples], [s["loss_mask"] for s in samples]
        return collate.pad_tokens(ids, masks, self.renderer.safe.pad_id, pad_left)


def render_prompt(
    renderer: Renderer, writing: Writing, messages: Sequence[Message], answer: Message | None = None
) -> list[int]:
    """Ids of messages, up to the answer to the last message. answer: the answer that the tags describe, if known."""
    messages = with_system(messages, writing.system)
    tags = (
        [*writing.tags.write_all(messages, None), writing.tags.write(answer or Message("assistant", ""), None)]
        if writing.tags
        else ()
    )
    return renderer.render(messages, tags, answering=True).ids


def with_system(messages: Sequence[Message], system: str | None) -> Sequence[Message]:
    """Prepend the system message `system` unless there is one."""
    if system is None or (messages and messages[0].role == "system"):
        return messages
    return [Message("system", system), *messages]
