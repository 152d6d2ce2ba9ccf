"""Encoder inputs of a row: its contexts in the template, joined or as chunks, within the allowed length."""

from dataclasses import dataclass
from typing import Literal

from src.errors import DataError
from src.evaluation.metrics import answers
from src.systems.crossattn.data import templates
from src.systems.crossattn.data.questions import Row

TooLong = Literal["truncate", "chunk", "refuse"]
_ALL = 2**62


@dataclass(frozen=True)
class EncodingOptions:
    """The options of a data set that decide what is encoded."""

    context_tokens: int
    template: templates.Name
    questions_on_contexts: bool
    chunked_contexts: bool
    too_long: TooLong


class EncoderInputs:
    """Makes encoder inputs by `rules`."""

    def __init__(self, prompter: templates.Prompter, rules: EncodingOptions) -> None:
        self.rules = rules
        self._prompter = prompter

    def chunks(self, row: Row, question: str) -> list[list[int]]:
        """Encoder inputs of a row's contexts: at least one, none empty, none longer than `context_tokens`.

        question: written before each context with `questions_on_contexts`.

        Raises:
            DataError: a context is too long, and `too_long` is "refuse".
        """
        return self.chunks_and_cuts(row, question)[0]

    def chunks_and_cuts(self, row: Row, question: str) -> tuple[list[list[int]], int]:
        """The `chunks`, and how many of the contexts were too long: truncated or cut into chunks."""
        contexts = answers.contexts(row)
        texts = contexts if self.rules.chunked_contexts else [" ".join(contexts)]
        results = [self._fit(text, question if self.rules.questions_on_contexts else "") for text in texts]
        return [chunk for chunks, _ in results for chunk in chunks], sum(cut for _, cut in results)

    def _fit(self, text: str, question: str) -> tuple[list[list[int]], bool]:
        """Encoder inputs of one context, and whether it had to be cut."""
        most, all_ids = self.rules.context_tokens, self._prompter.context(text, question, _ALL)
        if len(all_ids) <= most:
            return [all_ids], False
        if self.rules.too_long == "refuse":
            raise DataError(
                f"a context of {len(all_ids)} tokens with its template, but data.context_tokens is {most}, and "
                f"too_long is 'refuse'. "
                f"It begins {text[:60]!r}. Allow more tokens, or write 'truncate' or 'chunk'."
            )
        if self.rules.too_long == "truncate":
            return [self._prompter.context(text, question, most)], True
        return self._split(text, question, all_ids), True

    def _split(self, text: str, question: str, all_ids: list[int]) -> list[list[int]]:
        """The context in pieces, each after the same template.
        A long question leaves half of the room to the context."""
        most, prompter = self.rules.context_tokens, self._prompter
        ids = all_ids[len(prompter.context("", question, _ALL)) :]
        num_fixed_tokens = prompter.fixed_context_tokens
        head = prompter.context("", question, num_fixed_tokens + (most - num_fixed_tokens) // 2)
        room = most - len(head)
        return [[*head, *ids[first : first + room]] for first in range(0, max(len(ids), 1), room)]
