"""What the encoder reads of a row: its contexts in the template, joined or as chunks, none longer than is allowed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from src.data.qa import templates
from src.data.qa.questions import Row, all_contexts
from src.errors import DataError

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
    """Writes encoder inputs by `rules`."""

    def __init__(self, prompter: templates.Prompter, rules: EncodingOptions) -> None:
        self.rules = rules
        self._prompter = prompter

    def chunks(self, row: Row, question: str) -> list[list[int]]:
        """Encoder inputs of a row's contexts: at least one, none empty, none longer than `context_tokens`.

        question: read before each context where `questions_on_contexts` says so.

        Raises:
            DataError: a context is too long, and `too_long` is "refuse".
        """
        return self.chunks_and_cuts(row, question)[0]

    def chunks_and_cuts(self, row: Row, question: str) -> tuple[list[list[int]], int]:
        """The `chunks`, and how many of the contexts did not fit as they are: they were cut short, or cut in chunks."""
        fitted = [self._fit(text, question) for text in self._texts(row)]
        return [chunk for chunks, _ in fitted for chunk in chunks], sum(cut for _, cut in fitted)

    def _texts(self, row: Row) -> Sequence[str]:
        contexts = all_contexts(row)
        return contexts if self.rules.chunked_contexts else [" ".join(contexts)]

    def _used_question(self, question: str) -> str:
        return question if self.rules.questions_on_contexts else ""

    def _encode_whole(self, text: str, question: str) -> list[int]:
        return self._prompter.context(text, self._used_question(question), _ALL)

    def _fit(self, text: str, question: str) -> tuple[list[list[int]], bool]:
        """Encoder inputs of one context, and whether it had to be cut."""
        most, whole = self.rules.context_tokens, self._encode_whole(text, question)
        if len(whole) <= most:
            return [whole], False
        if self.rules.too_long == "refuse":
            raise DataError(
                f"a context of {len(whole)} tokens with its template, but data.context_tokens is {most}, and too_long is 'refuse'. "
                f"It begins {text[:60]!r}. Allow more tokens, or write 'truncate' or 'chunk'."
            )
        if self.rules.too_long == "truncate":
            return [self._prompter.context(text, self._used_question(question), most)], True
        return self._split(text, question, whole), True

    def _split(self, text: str, question: str, whole: list[int]) -> list[list[int]]:
        """The context in pieces that fill the room, each behind the same template. A long question leaves half of it to the context."""
        most, prompter = self.rules.context_tokens, self._prompter
        ids = whole[len(prompter.context("", self._used_question(question), _ALL)) :]
        fixed = prompter.fixed_context_tokens
        head = prompter.context("", self._used_question(question), fixed + (most - fixed) // 2)
        room = most - len(head)
        return [[*head, *ids[first : first + room]] for first in range(0, max(len(ids), 1), room)]
