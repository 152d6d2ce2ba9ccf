"""Encoder inputs of a row: its contexts in a template, joined or in chunks, with a maximum length."""

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
    """The options of a data set that define the encoder inputs."""

    context_tokens: int
    template: templates.Name
    questions_on_contexts: bool
    chunked_contexts: bool
    too_long: TooLong


class EncoderInputs:
    """Makes encoder inputs with the options `rules`."""

    def __init__(self, prompter: templates.Prompter, rules: EncodingOptions) -> None:
        self.rules = rules
        self._prompter = prompter

    def chunks(self, row: Row, question: str) -> list[list[int]]:
        """Encoder inputs of a row's contexts: at least one, each with 1 to `context_tokens` tokens.

        question: with `questions_on_contexts`, precedes each context.

        Raises:
            DataError: a context is too long and `too_long` is "refuse".
        """
        return self.chunks_and_cuts(row, question)[0]

    def chunks_and_cuts(self, row: Row, question: str) -> tuple[list[list[int]], int]:
        """The `chunks`, and the number of contexts that were truncated or split because they were too long."""
        contexts = answers.contexts(row)
        texts = contexts if self.rules.chunked_contexts else [" ".join(contexts)]
        results = [self._fit(text, question if self.rules.questions_on_contexts else "") for text in texts]
        return [chunk for chunks, _ in results for chunk in chunks], sum(cut for _, cut in results)

    def _fit(self, text: str, question: str) -> tuple[list[list[int]], bool]:
        """Encoder inputs of one context, and whether it was truncated or split."""
        most, all_ids = self.rules.context_tokens, self._prompter.context(text, question, _ALL)
        if len(all_ids) <= most:
            return [all_ids], False
        if self.rules.too_long == "refuse":
            raise DataError(
                f"the context {text[:60]!r}... has {len(all_ids)} tokens with its template, but data.context_tokens is "
                f"{most}. Raise it, or set data.too_long to 'truncate' or 'chunk'."
            )
        if self.rules.too_long == "truncate":
            return [self._prompter.context(text, question, most)], True
        return self._split(text, question, all_ids), True

    def _split(self, text: str, question: str, all_ids: list[int]) -> list[list[int]]:
        """Split the context into pieces, each after the same template.
        A long question is truncated to leave half of the tokens to the context."""
        most, prompter = self.rules.context_tokens, self._prompter
        ids = all_ids[len(prompter.context("", question, _ALL)) :]
        num_fixed_tokens = prompter.fixed_context_tokens
        head = prompter.context("", question, num_fixed_tokens + (most - num_fixed_tokens) // 2)
        room = most - len(head)
        return [[*head, *ids[first : first + room]] for first in range(0, max(len(ids), 1), room)]
