"""Questions for Fusion-in-Decoder: the encoder reads the question with one passage at a time, the decoder writes the
answer.

The format of a passage is "question: … title: … context: …" and the end token (Izacard & Grave 2021, arXiv 2007.01282).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field, model_validator

from src.data.text.tokenizers import SafeTokenizer
from src.evaluation.metrics import answers
from src.experiments.batches import ContextBatch
from src.experiments.config import Places
from src.experiments.interfaces import NewTokens, require_fit
from src.experiments.kinds import FUSION_IN_DECODER
from src.systems.crossattn.data import questions
from src.systems.crossattn.data.subsets import RowsConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(RowsConfig):
    """Format of passages and answers."""

    contexts: Literal["all", "useful", "none"]
    """Contexts of a row to use as passages. useful: the ones marked as useful, or all if no context is marked. none: a
    single passage with only the question."""
    num_passages: int | None = Field(default=None, gt=0)
    """Maximum number of passages per question, from the first; None for all."""
    keep_gold: bool = False
    """Whether `num_passages` should, in training, first drop contexts that are not marked as useful."""
    passage_tokens: int = Field(gt=0)
    """Maximum tokens of a passage with question, title and end token. In longer passages, first the question is
    truncated from the left to half of the tokens and the title to a quarter; for the context see `too_long`."""
    too_long: Literal["truncate", "split"] = "truncate"
    """Whether to truncate contexts that are too long, or split them into several passages with question and title."""
    answer_tokens: int = Field(gt=0)
    """Maximum tokens of an answer with its end token; longer answers are truncated."""

    @model_validator(mode="after")
    def _passages_are_read(self) -> "Config":
        if self.keep_gold and self.num_passages is None:
            raise ValueError("keep_gold: has no effect without num_passages. Remove it.")
        if self.contexts == "none" and (self.num_passages is not None or self.too_long != "truncate"):
            raise ValueError(
                "contexts: with 'none' there is one passage, so num_passages and too_long would be ignored. "
                "Remove them."
            )
        return self

    @property
    def reader(self) -> str:
        return FUSION_IN_DECODER

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.passage_tokens", self.passage_tokens, max_positions)
        require_fit("data.answer_tokens", self.answer_tokens + 1, max_positions)
        require_fit(NewTokens.name(new_tokens), new_tokens + 1, max_positions)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "FidQADataset":
        """The rows of one split, tokenised on access.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or has fewer than `val_samples` rows.
            ConfigError: `passage_tokens` is too small for the format, or a source has no rows.
        """
        rows, fingerprint, content = questions.read(places, self, split)
        dataset = self.open(rows, tokenizer, seed, fingerprint, split)
        dataset.content = content
        return dataset

    def open(
        self,
        rows: Sequence[questions.Row],
        tokenizer: "PreTrainedTokenizerFast",
        seed: int,
        fingerprint: str,
        split: str,
    ) -> "FidQADataset":
        data = FidQADataset(self, rows, tokenizer, seed, fingerprint)
        data.keeps_useful = self.keep_gold and split == "train"
        return data


class Sample(questions.Sample):
    """One training sample, or one prompt.
    `input_ids`: a placeholder for the model's start token, and the answer."""

    passages: list[list[int]]
    """One or more passages."""


class _Words(NamedTuple):
    """Ids of the words before question, title and context."""

    question: list[int]
    title: list[int]
    context: list[int]

    def count(self, with_title: bool) -> int:
        """Number of fixed tokens in a passage: these words and the end token."""
        return len(self.question) + with_title * len(self.title) + len(self.context) + 1


class FidQADataset(questions.Questions):
    """Samples are the same in every epoch."""

    def __init__(
        self,
        config: Config,
        rows: Sequence[questions.Row],
        tokenizer: "PreTrainedTokenizerFast",
        seed: int,
        fingerprint: str,
    ) -> None:
        super().__init__(rows, seed, config.corpus, fingerprint, config.contexts)
        self._config, self.shuffle = config, config.shuffle
        self._encoder = SafeTokenizer(tokenizer)
        self._words = _Words(*(self._encoder.encode(word) for word in ("question:", " title:", " context:")))
        self._truncations = questions.truncation_counter(config.corpus, "passage_tokens", config.passage_tokens)
        self.keeps_useful = False
        questions.require_room("passage_tokens", config.passage_tokens, self._words.count(with_title=True) + 4)

    def sample(self, epoch: int, index: int) -> Sample:
        """Passages and answer, the same in every epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        answer = [*self._encoder.encode(self._rows[index]["answer"]), self._encoder.eos_id][
            : self._config.answer_tokens
        ]
        return {
            **self.prompt(index),
            "input_ids": [self._encoder.pad_id, *answer],
            "loss_mask": [False] + [True] * len(answer),
        }

    def prompt(self, index: int) -> Sample:
        """The sample without its answer, for generation."""
        return {"input_ids": [self._encoder.pad_id], "loss_mask": [False], "passages": self._passages(index)}

    def collate(self, samples: Sequence[Sample]) -> ContextBatch:
        """Pad answers to (B, T) and passages to (B, C, S), on the right. Missing passages are empty."""
        from src.data import collate

        ids, masks = [s["input_ids"] for s in samples], [s["loss_mask"] for s in samples]
        context_ids, context_mask = collate.pad_chunks([s["passages"] for s in samples], self._encoder.pad_id)
        return {
            **collate.pad_tokens(ids, masks, self._encoder.pad_id),
            "context_ids": context_ids,
            "context_mask": context_mask,
        }

    def collate_prompts(self, samples: Sequence[Sample]) -> ContextBatch:
        """See `collate`. The decoder input is one token, so left padding is not needed."""
        return self.collate(samples)

    def _passages(self, index: int) -> list[list[int]]:
        """Passages of a row, in the order of its contexts. The parts of a split context are consecutive."""
        question = self._encoder.encode(f" {self._rows[index]['question']}")
        if not self.reads_contexts:
            most = self._config.passage_tokens - 1 - len(self._words.question)
            return [[*self._words.question, *question[max(0, len(question) - most) :], self._encoder.eos_id]]
        row = self._context_row(index)
        titles, contexts = row.get("titles_list") or [], answers.contexts(row)
        indices = questions.useful_indices(row) if self._config.contexts == "useful" else range(len(contexts))
        if self.keeps_useful:
            useful = {*questions.useful_indices(row)}
            first = sorted(indices, key=lambda i: (i not in useful, i))[: self._config.num_passages]
            indices = sorted(first)
        indices = indices[: self._config.num_passages]  # each context gives at least one passage
        passages = [part for i in indices for part in self._parts(question, titles[i] if titles else "", contexts[i])]
        return passages[: self._config.num_passages]

    def _parts(self, question: Sequence[int], title: str, context: str) -> list[list[int]]:
        """The passage of one context, or several if it is split."""
        words, context_ids = self._words, self._encoder.encode(f" {context}" if context else "")
        title_ids = self._encoder.encode(f" {title}" if title else "")
        room = self._config.passage_tokens - words.count(bool(title_ids))
        if len(question) + len(title_ids) + len(context_ids) > room:
            question, title_ids = question[max(0, len(question) - room // 2) :], title_ids[: room // 4]
        head = [*words.question, *question, *(words.title if title_ids else ()), *title_ids, *words.context]
        context_room = room - len(question) - len(title_ids)
        if self._config.too_long == "truncate":
            self._truncations.count(1, len(context_ids) > context_room)
        starts = range(0, max(1, len(context_ids)), context_room) if self._config.too_long == "split" else [0]
        return [[*head, *context_ids[start : start + context_room], self._encoder.eos_id] for start in starts]
