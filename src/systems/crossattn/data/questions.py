"""Rows of questions, answers and contexts: the common part of the data sets made of them."""

import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict

from pydantic import Field

from src.data import jsonl
from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError, DataError
from src.evaluation.metrics import answers
from src.experiments.batches import TokenBatch
from src.experiments.config import Places
from src.systems.crossattn.data import templates
from src.systems.crossattn.data.subsets import (
    FIELDS,
    OPTIONAL,
    Row,
    RowsConfig,
    Subset,
    require_equal_lengths,
    row_number,
    select_sources,
    sources_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
RULES = "questions 1"
"""Version of the rows' checks and groups. If it changes, files are checked again."""


def read(places: Places, config: RowsConfig, split: str) -> tuple[Sequence[Row], str, str]:
    """The rows of a split that `config` selects, and digests of the data set and of the split.

    Raises:
        DataError: the data set is missing, incomplete or malformed, or has fewer than `val_samples` rows.
        ConfigError: a source has no rows.
    """
    folder = jsonl.corpus_folder(places, config.corpus)
    path = jsonl.require_file(folder, f"{split}.jsonl")
    rows = select_sources(
        config, split, jsonl.read_rows(path, FIELDS, OPTIONAL, require_equal_lengths, answers.source, RULES)
    )
    if split == "val" and config.val_samples is not None:
        rows = Subset(rows, jsonl.select_validation_rows(len(rows), config.val_samples, path))
    return rows, jsonl.fingerprint(folder), jsonl.fingerprint(folder, split)


def useful_contexts(row: Row) -> list[str]:
    """The contexts that are marked as useful, or all if no context is marked."""
    contexts = answers.contexts(row)
    return [contexts[i] for i in useful_indices(row)]


def useful_indices(row: Row) -> list[int]:
    """Indices of the contexts that are marked as useful, or all if no context is marked."""
    marked_indices = [i for i, mark in enumerate(row.get("useful_contexts") or []) if mark]
    return marked_indices or list(range(len(answers.contexts(row))))


class TruncationCounter:
    """Counts the contexts that this process truncates, and warns at the first, the 100th, the 10,000th and so on."""

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why
        self.read = self.cut = 0
        self._next = 1

    def count(self, read: int, cut: int) -> None:
        """Add `read` contexts, of which `cut` were truncated."""
        self.read += read
        self.cut += cut
        if self.cut >= self._next:
            log.warning(
                "%s: truncated %d of %d contexts read by this process: %s.",
                self._name,
                self.cut,
                self.read,
                self._why,
            )
            while self._next <= self.cut:
                self._next *= 100


@cache
def truncation_counter(name: str, field: str, most: int) -> TruncationCounter:
    """The counter of all data sets called `name` in this process.
    field: the config field with the maximum number of tokens, `most`."""
    return TruncationCounter(name, f"data.{field} is {most} and data.too_long is 'truncate'")


class Questions:
    """Questions, each with its own contexts or, as a control, with another row's."""

    stored_bytes_per_token: int | None = None
    """Bytes on disk per token of contexts that are encoded in advance; None if contexts are read as text."""

    def __init__(self, rows: Sequence[Row], seed: int, name: str, fingerprint: str, contexts: str = "all") -> None:
        """contexts: which contexts of a row to read: "all", "useful" or "none"."""
        self.fingerprint = self.content = fingerprint
        self.reads_contexts = contexts != "none"
        self._rows = rows
        self._seed = seed
        self._name = name
        self._texts_of: Callable[[Row], list[str]] = useful_contexts if contexts == "useful" else answers.contexts
        self._context_rows: Sequence[int] = range(len(rows))

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows)

    @property
    def num_questions(self) -> int:
        """Number of questions."""
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Question `index` as it is in the prepared data, with its own contexts."""
        return self._rows[index]

    def source(self, index: int) -> str:
        """Name of the score group: the row's dataset and its kind of question, if any, for example "stdlib_calls"."""
        return answers.source(self._rows[index % len(self._rows)])

    def sample_source(self, epoch: int, index: int) -> str:
        """`source` of a sample."""
        return self.source(index)

    @cached_property
    def sources(self) -> list[str]:
        """Every `source`, sorted."""
        return sources_of(self._rows)

    def with_shuffled_contexts(self) -> Self:
        """The same questions, each with another row's context of different text.

        A control: a model that uses its contexts has a higher loss. Depends only on the rows and the seed.

        Raises:
            DataError: all rows have the same context.
        """
        by_text: dict[tuple[str, ...], int] = {}
        for index, row in enumerate(self._rows):
            by_text.setdefault(tuple(self._texts_of(row)), index)
        if len(by_text) < 2:
            raise DataError(
                f"{self._name}: all {len(self._rows)} rows have the same context, "
                "so shuffled contexts cannot be scored. "
                "Use validation rows with two or more contexts."
            )
        order = list(by_text)
        Random(f"contexts/{self._seed}").shuffle(order)
        partner = {text: by_text[order[i - 1]] for i, text in enumerate(order)}
        shuffled = copy.copy(self)
        shuffled._context_rows = [partner[tuple(self._texts_of(row))] for row in self._rows]
        return shuffled

    def _context_row(self, index: int) -> Row:
        """The row that provides the contexts of question `index`."""
        return self._rows[self._context_rows[index]]

    def _check_rows(self, check: Callable[[Row], object]) -> None:
        """Call `check` with each row, and add the row's number to its DataErrors."""
        for index, row in enumerate(self._rows):
            try:
                check(row)
            except DataError as error:
                raise DataError(f"{self._name}: row {row_number(self._rows, index) + 1}: {error}") from None


def require_room(field: str, allowed_tokens: int, needed_tokens: int) -> None:
    """Raises ConfigError if the template leaves no tokens for text."""
    if allowed_tokens < needed_tokens:
        raise ConfigError(
            f"data.{field}: expected at least {needed_tokens} tokens for the template in this vocabulary, "
            f"got {allowed_tokens}."
        )


class DecoderConfig(RowsConfig):
    """Questions and answers that a decoder reads in a chat template."""

    same_length_advice: ClassVar[str] = "Set data.fixed_length: true, or remove loop.compile."
    sequence_tokens: int = Field(gt=0)
    """Maximum tokens of question and answer. Longer questions are truncated from the left; an answer that is too long
    by itself is truncated at the end."""
    loss_on: Literal["answer", "all"]
    """Whether the loss is on the answer and the end token, or on every token but the first."""
    template: templates.Name = "assistant"
    """Chat template of question and answer."""
    fixed_length: bool = False
    """Whether to pad every batch to the maximum length, instead of its longest sequence, for `loop.compile`."""

    @abstractmethod
    def longest(self) -> int:
        """Maximum tokens of a sequence."""

    def batch_lengths(self) -> tuple[int, ...] | None:
        return (self.longest(),) if self.fixed_length else None


class Sample(TypedDict):
    """One training sample, or one prompt."""

    input_ids: list[int]
    loss_mask: list[bool]
    """One per token of input_ids; True on tokens in the loss."""


class DecoderQuestions(Questions):
    """Questions and answers in a template, as ids."""

    def __init__(
        self,
        config: DecoderConfig,
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerFast",
        seed: int,
        fingerprint: str,
        contexts: str = "all",
    ) -> None:
        super().__init__(rows, seed, config.corpus, fingerprint, contexts)
        self._encoder = SafeTokenizer(tokenizer)
        self._prompter = templates.Prompter(self._encoder, config.template)
        self._most, self._loss_on, self.shuffle = config.sequence_tokens, config.loss_on, config.shuffle
        self._length = config.longest() if config.fixed_length else None
        require_room("sequence_tokens", config.sequence_tokens, self._prompter.fixed_tokens + 2)

    def _prompt_ids(self, index: int, max_tokens: int) -> list[int]:
        """Ids before the answer. Question and template have at most `max_tokens`."""
        return self._prompter.prompt(self._rows[index]["question"], max_tokens)

    def sample(self, epoch: int, index: int) -> Sample:
        """Question and answer, the same in every epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        answer = self._prompter.answer(self._rows[index]["answer"], self._most - self._prompter.fixed_tokens)
        prompt = self._prompt_ids(index, self._most - len(answer))
        first_scored = len(prompt) if self._loss_on == "answer" else 1
        return {
            "input_ids": prompt + answer,
            "loss_mask": [i >= first_scored for i in range(len(prompt) + len(answer))],
        }

    def prompt(self, index: int) -> Sample:
        """The sample without its answer, for generation."""
        ids = self._prompt_ids(index, self._most - 1)
        return {"input_ids": ids, "loss_mask": [False] * len(ids)}

    def collate(self, samples: Sequence[Any]) -> TokenBatch:
        """Pad on the right."""
        return self._collate(samples, pad_left=False)

    def collate_prompts(self, samples: Sequence[Any]) -> TokenBatch:
        """Pad prompts on the left, for generation, and contexts on the right."""
        return self._collate(samples, pad_left=True)

    def _collate(self, samples: Sequence[Any], pad_left: bool) -> TokenBatch:
        from src.data import collate

        ids, masks = [s["input_ids"] for s in samples], [s["loss_mask"] for s in samples]
        return collate.pad_tokens(ids, masks, self._encoder.pad_id, pad_left, None if pad_left else self._length)
