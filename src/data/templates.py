"""How a question, an answer and a context are written for a model, and the ids that come of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from src.data.tokenizers import Encoder

Name = Literal["assistant", "instruct"]
CONTEXT_TOKEN = "<|C|>"


@dataclass(frozen=True)
class Template:
    """Pieces before and after the question, and what stands between them and the answer.

    A piece that is one of `controls` becomes one id where the vocabulary has it; everything else is text.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    before_answer: str = ""


# ServiceNow/xc-cache, format_qa_task.py: the user-assistant template and the instruct template.
TEMPLATES: dict[str, Template] = {
    "assistant": Template(before=("<|user|>", "\n"), after=("\n", "<|assistant|>", "\n")),
    "instruct": Template(before=("[INST]", " "), after=(" ", "[/INST]"), before_answer=" "),
}


class Prompter:
    """Writes prompts and encoder inputs in one template with one tokenizer."""

    def __init__(self, encoder: Encoder, template: Name) -> None:
        self._encoder = encoder
        self._template = TEMPLATES[template]
        self.fixed_tokens = len(self._assemble([], []))
        self._marker = encoder.token(CONTEXT_TOKEN)
        self.fixed_context_tokens = self.fixed_tokens + len(self._marker)

    def prompt(self, question: str, max_tokens: int) -> list[int]:
        """Ids up to where the answer begins, at most `max_tokens`; a longer question loses its beginning."""
        ids = self._joined(question, "")
        if len(ids) <= max_tokens:
            return ids
        question_ids = self._encoder.text(question)
        room = max(0, max_tokens - self.fixed_tokens)
        return self._assemble(question_ids[max(0, len(question_ids) - room) :], [])

    def answer(self, answer: str, max_tokens: int) -> list[int]:
        """Ids of the answer and the end token; an answer longer than `max_tokens` loses its end, and the end token with it."""
        return [*self._encoder.text(self._template.before_answer + answer), self._encoder.eos_id][:max_tokens]

    def context(self, context: str, question: str, max_tokens: int) -> list[int]:
        """Encoder input: the template with <|C|> for the question, `question` (or "") before it, the context for the answer.

        At most `max_tokens`: a longer context loses its end, then the question its beginning.
        """
        head = self._joined(question, CONTEXT_TOKEN)
        if len(head) > max_tokens:
            question_ids = self._encoder.text(question)
            room = max(0, max_tokens - self.fixed_context_tokens)
            head = self._assemble(question_ids[max(0, len(question_ids) - room) :], self._marker)
        return (head + self._encoder.text(self._template.before_answer + context if context else ""))[:max_tokens]

    def _joined(self, question: str, marker: str) -> list[int]:
        """Tokenised as the whole text would be: runs of text between control tokens are not cut further."""
        ids, run = list(self._encoder.start), ""
        pieces = [*((p, True) for p in self._template.before), (question, False), (marker, True)]
        pieces += [(p, True) for p in self._template.after]
        for piece, is_ours in pieces:
            control = self._encoder.control(piece) if is_ours else None
            if control is None:
                run += piece
            else:
                ids += [*self._encoder.text(run), control]
                run = ""
        return ids + self._encoder.text(run)

    def _assemble(self, question_ids: Sequence[int], marker_ids: Sequence[int]) -> list[int]:
        """The same from a question that is tokenised already."""
        before = [i for piece in self._template.before for i in self._encoder.token(piece)]
        after = [i for piece in self._template.after for i in self._encoder.token(piece)]
        return [*self._encoder.start, *before, *question_ids, *marker_ids, *after]
