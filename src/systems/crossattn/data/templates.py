"""Templates of questions, answers and contexts, and their token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError

Name = Literal["assistant", "instruct", "chat"]
"""chat: the tokenizer's chat template; a context in the prompt precedes the question."""
CONTEXT_TOKEN = "<|C|>"


@dataclass(frozen=True)
class Template:
    """Pieces of text around the question.

    A piece that is a control token of the vocabulary becomes one id. Everything else is text.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    before_answer: str = ""
    before_context: tuple[str, ...] = ()
    """A context in the prompt goes between this and `after_context`; the three together replace `before`."""
    after_context: tuple[str, ...] = ()


# From ServiceNow/xc-cache, format_qa_task.py: the user-assistant template, Tulu 2's template with a context, and the
# instruct template.
TEMPLATES: dict[str, Template] = {
    "assistant": Template(
        before=("<|user|>", "\n"),
        after=("\n", "<|assistant|>", "\n"),
        before_context=("<|system|>", "\n"),
        after_context=("\n", "<|user|>", "\n"),
    ),
    "instruct": Template(
        before=("[INST]", " "),
        after=(" ", "[/INST]"),
        before_answer=" ",
        before_context=("[INST]", " "),
        after_context=("\n",),
    ),
}


def _chat(encoder: SafeTokenizer) -> Template:
    if encoder.chat is None:
        raise ConfigError(f"data.template: the tokenizer has no usable chat template. Use {' or '.join(TEMPLATES)}.")
    before, after = encoder.chat
    return Template(before=before, after=after, before_context=before, after_context=("\n\n",))


class Prompter:
    """Writes prompts and encoder inputs with one template and tokenizer."""

    def __init__(self, encoder: SafeTokenizer, template: Name) -> None:
        self._encoder = encoder
        self._template = _chat(encoder) if template == "chat" else TEMPLATES[template]
        self.fixed_tokens = len(self._assemble([], []))
        self._marker = encoder.encode_token(CONTEXT_TOKEN)
        self.fixed_context_tokens = self.fixed_tokens + len(self._marker)
        self.fixed_reading_tokens = len(self._assemble([], [], [])) - self.fixed_tokens
        """Tokens that a context in the prompt adds in addition to its own."""

    def prompt(self, question: str, max_tokens: int, context: str | None = None, context_tokens: int = 0) -> list[int]:
        """Ids before the answer: at most `max_tokens`, plus `context_tokens` for a context before the question.

        A longer question is truncated from the left, a longer context at the end. They do not share their limits.
        """
        context_ids = None if context is None else self._encoder.encode(context)
        context_room = max(0, context_tokens - self.fixed_reading_tokens)
        if len(context_ids or ()) <= context_room and len(self._tokenise(question, "")) <= max_tokens:
            ids = self._tokenise(question, "", context)
            if len(ids) <= context_tokens + max_tokens:
                return ids
        question_ids = self._encoder.encode(question)
        room = max(0, max_tokens - self.fixed_tokens)
        truncated_ids = question_ids[max(0, len(question_ids) - room) :]
        return self._assemble(truncated_ids, [], None if context_ids is None else context_ids[:context_room])

    def answer(self, answer: str, max_tokens: int) -> list[int]:
        """Ids of the answer and the end token, truncated to `max_tokens`."""
        return [*self._encoder.encode(self._template.before_answer + answer), self._encoder.eos_id][:max_tokens]

    def context(self, context: str, question: str, max_tokens: int) -> list[int]:
        """Encoder input: the template with `question` (or "") and <|C|> as the question, and the context as the answer.

        Has at most `max_tokens`: first the context is truncated at the end, then the question from the left.
        """
        head = self._tokenise(question, CONTEXT_TOKEN)
        if len(head) > max_tokens:
            question_ids = self._encoder.encode(question)
            room = max(0, max_tokens - self.fixed_context_tokens)
            head = self._assemble(question_ids[max(0, len(question_ids) - room) :], self._marker)
        return (head + self._encoder.encode(self._template.before_answer + context if context else ""))[:max_tokens]

    def _tokenise(self, question: str, marker: str, context: str | None = None) -> list[int]:
        """Tokenise the complete text: text between control tokens is encoded in one piece."""
        ids, run = list(self._encoder.start), ""
        for piece, is_ours in self._pieces(question, marker, context):
            control = self._encoder.control_id(piece) if is_ours else None
            if control is None:
                run += piece
            else:
                ids += [*self._encoder.encode(run), control]
                run = ""
        return ids + self._encoder.encode(run)

    def _pieces(self, question: str, marker: str, context: str | None) -> list[tuple[str, bool]]:
        """The pieces of text in order, each with whether it is the template's. context: None without a context."""
        ours = self._template
        before = [(piece, True) for piece in (ours.before if context is None else ours.before_context)]
        if context is not None:
            before += [(context, False), *((piece, True) for piece in ours.after_context)]
        return [*before, (question, False), (marker, True), *((piece, True) for piece in ours.after)]

    def _assemble(
        self, question_ids: Sequence[int], marker_ids: Sequence[int], context_ids: Sequence[int] | None = None
    ) -> list[int]:
        """Ids of the template with a question and a context that are already tokenised."""
        ours = self._template
        before = self._encode_pieces(ours.before)
        if context_ids is not None:
            before = [*self._encode_pieces(ours.before_context), *context_ids, *self._encode_pieces(ours.after_context)]
        return [*self._encoder.start, *before, *question_ids, *marker_ids, *self._encode_pieces(ours.after)]

    def _encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        return [i for piece in pieces for i in self._encoder.encode_token(piece)]
