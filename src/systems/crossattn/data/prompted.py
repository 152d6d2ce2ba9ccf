"""Questions for a decoder alone, with the contexts in the prompt or without."""

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
    """How contexts are read in the prompt, before the question."""

    contexts: Literal["all", "useful", "none"]
    """Which of a row's contexts are in the prompt, joined by spaces. useful: all of them where none is marked."""
    context_tokens: int | None = Field(default=None, gt=0)
    """Most tokens that the contexts add to a prompt."""
    too_long: Literal["truncate", "refuse"] = "truncate"
    """Contexts of more tokens lose their end, or are refused when the data are read."""

    @model_validator(mode="after")
    def _tokens_for_contexts(self) -> "Config":
        if self.contexts == "none" and (self.context_tokens is not None or self.too_long != "truncate"):
            ignored = "context_tokens" if self.context_tokens is not None else "too_long"
            raise ValueError(
                f"{ignored}: with contexts 'none' there is nothing to read, so it would be ignored. Remove it."
            )
        if self.contexts != "none" and self.context_tokens is None:
            raise ValueError(
                f"context_tokens: missing. With contexts {self.contexts!r} it says how much of them is read."
            )
        return self

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        field = "data.sequence_tokens" + ("" if self.context_tokens is None else " + data.context_tokens")
        require_fit(field, self.longest() + new_tokens, max_positions)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "PromptedQADataset":
        """The rows of one split, tokenised on access.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or what is used of it smaller than
                `val_samples`; or a context is too long and refused.
            ConfigError: too few tokens are allowed for the template alone, or no row is of one of the sources.
        """
        rows, fingerprint = questions.read(places, self, split)
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
        """Raises DataError where the contexts of a row would be cut."""
        num_tokens = self._context_tokens(" ".join(self._texts_of(row)))
        if self._max_context is not None and num_tokens > self._max_context:
            raise DataError(
                f"its contexts take {num_tokens} tokens, more than data.context_tokens, {self._max_context}. "
                "Allow more, or write too_long 'truncate'."
            )

    def _context_tokens(self, context: str) -> int:
        """Tokens that a context adds to a prompt where it is not cut."""
        return len(self._encoder.encode(context)) + self._prompter.fixed_reading_tokens

    def _prompt_ids(self, index: int, max_tokens: int) -> list[int]:
        question, most = self._rows[index]["question"], self._max_context
        if most is None:
            return self._prompter.prompt(question, max_tokens)
        context = " ".join(self._texts_of(self._context_row(index)))
        ids = self._prompter.prompt(question, max_tokens, context, most)
        # Only then it may have been cut, and tokens are counted once more.
        full = len(ids) >= most + self._prompter.fixed_tokens
        self._truncations.count(1, full and self._context_tokens(context) > most)
        return ids
