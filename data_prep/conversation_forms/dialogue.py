"""Releases of conversations in layouts of their own."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pydantic import Field

from data_prep.conversation_forms.columns import remove_references
from data_prep.conversation_forms.rows import (
    Form,
    Row,
    add_change,
    add_message,
    alternate,
    column,
    objects_of,
    pick,
    reasoning_of,
    text_of,
    texts_of,
    up_to_last_answer,
    up_to_length,
)
from src.errors import DataError

_GO_ON = ("Go on.", "Please continue.", "And then?")


class ShareGPT(Form):
    """{"conversations": [{"from": "human" or "gpt", "value"}]}, as Vicuna's release has them.

    Left out: conversations that the assistant begins, or in which it says nothing once. A person who says nothing asks to go on.
    """

    characters: int = Field(default=32_768, gt=0)
    """Of a message; the rest is left out."""
    lang: str | None = None

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. Signs that Markdown escapes, and marks of references, are undone."""
        messages = list[Row]()
        for place, each in enumerate(objects_of(row, "conversations", where)):
            said = text_of(each, "value", where) if each.get("value") else ""
            if each.get("from") not in ("human", "gpt"):
                raise DataError(f"{where}: conversations[{place}]: expected 'from' to be human or gpt, got {each.get('from')!r}.")
            if not said and each["from"] == "gpt":
                return
            said = remove_references(said.replace(r"\_", "_").replace(r"\*", "*")).strip() if said else pick(_GO_ON, row, place)
            add_message(messages, "user" if each["from"] == "human" else "assistant", said, more=reasoning_of(each))
        messages = up_to_last_answer(messages)
        if messages and messages[0]["role"] == "user":
            lang = {"lang": self.lang} if self.lang else {}
            yield {"messages": [{**up_to_length(message, self.characters), **lang} for message in messages]}


class Soda(Form):
    """{"narrative", "dialogue", "speakers"}: two who speak in turns; what happens, and who the second is, stands before the first turn."""

    characters: int = Field(default=32_768, gt=0)
    """Of a turn; the rest is left out."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. More speakers, and such as do not alternate, are left out."""
        speakers, said = texts_of(row, "speakers", where), texts_of(row, "dialogue", where)
        narrative = text_of(row, "narrative", where)
        first, second = len(set(speakers[::2])) == 1, len(set(speakers[1::2])) == 1
        if not (first and second and len(set(speakers)) == 2 and len(speakers) == len(said) and len(said) % 2 == 0):
            return
        texts = [f"{narrative} You are {speakers[1]}. {said[0]}", *said[1:]]
        yield {"messages": [up_to_length(message, self.characters) for message in alternate(texts)]}


class Marked(Form):
    """A text with marks before what is said, such as "<human>: " and "<bot>: "."""

    text: str = "text"
    """Its column."""
    marks: Sequence[str] = Field(default=["<human>:", "<bot>:"], min_length=2, max_length=2)
    """Of the person and of the assistant."""
    whole: bool = True
    """Whether a conversation is left out that has something wrong; or else, what is wrong in it."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        user, assistant = map(re.escape, self.marks)
        _, *parts = re.split(rf"\s*({user}|{assistant})\s*", text_of(row, self.text, where))
        turns = [
            ("user" if mark == self.marks[0] else "assistant", said.strip()) for mark, said in zip(parts[::2], parts[1::2], strict=True)
        ]
        messages, valid = list[Row](), turns if self.whole else [*_good_pairs(turns)]
        for role, said in valid:
            add_message(messages, role, said)
        if messages and len(valid) < len(turns):
            add_change(messages[-1], "removed", len(turns) - len(valid))
        if messages and messages[0]["role"] == "user" and len(messages) % 2 == 0 and all(each["content"] for each in messages):
            yield {"messages": messages}


def _good_pairs(turns: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Turns of a person that are followed by one of the assistant alone, and those."""
    begins = [place for place, (role, _) in enumerate(turns) if role == "user"]
    for begin, end in pairwise([*begins, len(turns)]):
        if end == begin + 2 and all(said for _, said in turns[begin:end]):
            yield from turns[begin:end]


class GPT4All(Form):
    """{"prompt", "response"}, or {"conversation": [{"User", "Bot"}]}, of each of which one is null."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. Conversations that the assistant begins are left out."""
        if row.get("conversation") is None:
            asked, answer = (text_of(row, name, where) for name in ("prompt", "response"))
            if asked.strip() and answer.strip():
                yield {"messages": alternate([asked, answer])}
            return
        messages = list[Row]()
        for each in objects_of(row, "conversation", where):
            user, bot = (text_of(each, name, where) if each.get(name) else "" for name in ("User", "Bot"))
            if user and bot:
                raise DataError(f"{where}: conversation: expected User or Bot in each message, got both.")
            if user or bot:
                add_message(messages, "user" if user else "assistant", (user or bot).strip())
        messages = up_to_last_answer(messages)
        if messages and messages[0]["role"] == "user":
            yield {"messages": messages}


class Rounds(Form):
    """A list of {question, answer} in one column, with what the system says in another."""

    rounds: str
    """The list's column."""
    user: str
    assistant: str
    system: str | None = None
    """Column of what the system says first."""
    skip: dict[str, str] = {}
    """Text by column: rows are left out whose column has it."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        if any(text in text_of(row, name, where) for name, text in self.skip.items()):
            return
        told = column(row, self.rounds, where)
        rounds = objects_of(told, "samples", where) if isinstance(told, dict) else objects_of(row, self.rounds, where)
        texts = [text_of(each, name, f"{where}: {self.rounds}") for each in rounds for name in (self.user, self.assistant)]
        system = text_of(row, self.system, where) if self.system else ""
        if texts and all(text.strip() for text in texts):
            yield {"messages": [*([{"role": "system", "content": system}] if system.strip() else []), *alternate(texts)]}


class Prosocial(Form):
    """{"context", "rots", "safety_annotations", "safety_annotation_reasons"}: what somebody says, answered by each rule of thumb."""

    explained: bool = False
    """Whether the question is rather why what they say was annotated so, and the answer the reason."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        said = text_of(row, "context", where)
        if not self.explained:
            yield from ({"messages": alternate([said, rule])} for rule in texts_of(row, "rots", where) if rule.strip())
            return
        annotations, reasons = (texts_of(row, name, where) for name in ("safety_annotations", "safety_annotation_reasons"))
        for annotation, reason in zip(annotations, reasons, strict=False):
            if reason.strip():
                label = annotation.strip("_ ").replace("_", " ")
                asked, answer = pick(_WHY, said, annotation)
                yield {"messages": alternate([text.format(said=said, label=label, reason=reason) for text in (asked, answer)])}


_WHY = (
    ('Somebody says: "{said}"\nThis was marked "{label}". Why?', 'It was marked "{label}" because: {reason}'),
    ('Why would one mark this as "{label}"?\n\n{said}', "The reason is: {reason}"),
    ('"{said}"\n\nExplain why the label of this message is "{label}".', "{reason}"),
)
