"""Questions for a decoder, with or without contexts in the prompt."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from src.errors import DataError
from src.experiments.config import Places
from src.experiments.interfaces import require_fit
from src.systems.crossattn.data import questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(questions.DecoderConfig):
    """Questions, and the contexts in the prompt before them."""

    contexts: Literal["all", "useful", "none"]
    """Contexts of a row to join by spaces in the prompt. useful: the ones marked as useful, or all if no context is
    marked."""
    context_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens that the contexts add to a prompt."""
    too_long: Literal["truncate", "refuse"] = "truncate"
    """Whether to truncate longer contexts, or raise an error when the data is loaded."""

    @model_validator(mode="after")
    def _tokens_for_contexts(self) -> "Config":
        if self.contexts == "none" and (self.context_tokens is not None or self.too_long != "truncate"):
            ignored = "context_tokens" if self.context_tokens is not None else "too_long"
            raise ValueError(f"{ignored}: would be ignored with contexts 'none'. Remove it.")
        if self.contexts != "none" and self.context_tokens is None:
            raise ValueError(f"context_tokens: missing. Set the maximum tokens of contexts {self.contexts!r}.")
        return self

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        field = "data.sequence_tokens" + ("" if self.context_tokens is None else " + data.context_tokens")
        require_fit(field, self.longest(), max_positions, new_tokens)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "PromptedQADataset":
        """The rows of one split, tokenised on access.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or has fewer than `val_samples` rows; or a
                context is too long and `too_long` is "refuse".
            ConfigError: the token limits are too small for the template, or a source has no rows.
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
    ) -> "PromptedQADataset":
        return PromptedQADataset(self, rows, tokenizer, seed, fingerprint)

    def longest(self) -> int:
        return self.sequence_tokens + (self.context_tokens or 0)


class PromptedQADataset(questions.DecoderQuestions):
    """Samples are the same in every epoch."""

    def __init__(
        self,
        config: Config,
        rows: Sequence[questions.Row],
        tokenizer: "PreTrainedTokenizerFast",
        seed: int,
        fingerprint: str,
    ) -> None:
        super().__init__(config, rows, tokenizer, seed, fingerprint, config.contexts)
        self._max_context = config.context_tokens
        if config.context_tokens is not None:
            questions.require_room("context_tokens", config.context_tokens, self._prompter.fixed_reading_tokens + 1)
            self._truncations = questions.truncation_counter(config.corpus, "context_tokens", config.context_tokens)
            if config.too_long == "refuse":
                self._check_rows(self._require_short_contexts)

    def _require_short_contexts(self, row: questions.Row) -> None:
        """Raises DataError if the contexts of a row would be truncated."""
        num_tokens = self._context_tokens(" ".join(self._texts_of(row)))
        if self._max_context is not None and num_tokens > self._max_context:
            raise DataError(
                f"the contexts have {num_tokens} tokens, but data.context_tokens is {self._max_context}. "
                "Raise it, or set data.too_long to 'truncate'."
            )

    def _context_tokens(self, context: str) -> int:
        """Number of tokens that a context adds to a prompt if it is not truncated."""
        return len(self._encoder.encode(context)) + self._prompter.fixed_reading_tokens

    def _prompt_ids(self, index: int, max_tokens: int) -> list[int]:
        question, most = self._rows[index]["question"], self._max_context
        if most is None:
            return self._prompter.prompt(question, max_tokens)
        context = " ".join(self._texts_of(self._context_row(index)))
        ids = self._prompter.prompt(question, max_tokens, context, most)
        # Count the context's tokens again only if it can have been truncated.
        full = len(ids) >= most + self._prompter.fixed_tokens
        self._truncations.count(1, full and self._context_tokens(context) > most)
        return ids
