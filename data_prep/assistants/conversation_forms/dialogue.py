"""Layouts of conversations that are specific to one release."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pydantic import Field

from data_prep.assistants.conversation_forms.columns import remove_references
from data_prep.assistants.conversation_forms.rows import (
    Form,
    Row,
    add_change,
    add_message,
    alternate,
    column,
    missing_column,
    objects_of,
    pick,
    reasoning_of,
    text_of,
    texts_of,
    up_to_last_answer,
    up_to_length,
)
from src.errors import DataError
from src.experiments.config import unknown_text

_REQUESTS = ("Go on.", "Please continue.", "And then?")


class ShareGPT(Form):
    """{"conversations": [{"from": "human" or "gpt", "value"}]}, as in Vicuna's release.

    Conversations that start with the assistant, or with an empty answer, are skipped. An empty user message
    becomes a request to continue.
    """

    characters: int = Field(default=32_768, gt=0)
    """Maximum length of a message; the rest is removed."""
    lang: str | None = None

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. Removes Markdown escapes and reference marks."""
        messages = list[Row]()
        for place, each in enumerate(objects_of(row, "conversations", where)):
            here = f"{where}: conversations[{place}]"
            if column(each, "from", here) not in ("human", "gpt"):
                raise DataError(f"{here}: {unknown_text('role', str(each['from']), ('human', 'gpt'))}")
            if "value" not in each:
                raise missing_column(each, "value", here)
            text = text_of(each, "value", here) if each["value"] else ""
            if not text and each["from"] == "gpt":
                return
            text = (
                remove_references(text.replace(r"\_", "_").replace(r"\*", "*")).strip()
                if text
                else pick(_REQUESTS, row, place)
            )
            add_message(messages, "user" if each["from"] == "human" else "assistant", text, more=reasoning_of(each))
        messages = up_to_last_answer(messages)
        if messages and messages[0]["role"] == "user":
            lang = {"lang": self.lang} if self.lang else {}
            yield {"messages": [{**up_to_length(message, self.characters), **lang} for message in messages]}


class Soda(Form):
    """{"narrative", "dialogue", "speakers"}: two speakers who alternate.
    The first turn starts with the narrative and the name of the second speaker."""

    characters: int = Field(default=32_768, gt=0)
    """Maximum length of a turn; the rest is removed."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. Skips rows with more than two speakers or with speakers who do not alternate."""
        speakers, lines = texts_of(row, "speakers", where), texts_of(row, "dialogue", where)
        narrative = text_of(row, "narrative", where)
        first, second = len(set(speakers[::2])) == 1, len(set(speakers[1::2])) == 1
        if not (first and second and len(set(speakers)) == 2 and len(speakers) == len(lines) and len(lines) % 2 == 0):
            return
        texts = [f"{narrative} You are {speakers[1]}. {lines[0]}", *lines[1:]]
        yield {"messages": [up_to_length(message, self.characters) for message in alternate(texts)]}


class MarkedTurns(Form):
    """A conversation as text, with a mark before each turn such as "<human>: " or "<bot>: "."""

    text: str = "text"
    """Column of the text."""
    marks: Sequence[str] = Field(default=["<human>:", "<bot>:"], min_length=2, max_length=2)
    """Marks of the user and of the assistant."""
    whole: bool = True
    """Whether to skip a conversation with a malformed turn; False: remove only the malformed turns."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        user, assistant = map(re.escape, self.marks)
        _, *parts = re.split(rf"\s*({user}|{assistant})\s*", text_of(row, self.text, where))
        turns = [
            ("user" if mark == self.marks[0] else "assistant", text.strip())
            for mark, text in zip(parts[::2], parts[1::2], strict=True)
        ]
        messages, valid = list[Row](), turns if self.whole else [*_good_pairs(turns)]
        for role, text in valid:
            add_message(messages, role, text)
        if messages and len(valid) < len(turns):
            add_change(messages[-1], "removed", len(turns) - len(valid))
        if (
            messages
            and messages[0]["role"] == "user"
            and len(messages) % 2 == 0
            and all(each["content"] for each in messages)
        ):
            yield {"messages": messages}


def _good_pairs(turns: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield each user turn that has exactly one answer, with the answer."""
    begins = [place for place, (role, _) in enumerate(turns) if role == "user"]
    for begin, end in pairwise([*begins, len(turns)]):
        if end == begin + 2 and all(text for _, text in turns[begin:end]):
            yield from turns[begin:end]


class GPT4All(Form):
    """{"prompt", "response"}, or {"conversation": [{"User", "Bot"}]}, where one of "User" and "Bot" is null."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. Conversations that start with the assistant are skipped."""
        if row.get("conversation") is None:
            prompt, answer = (text_of(row, name, where) for name in ("prompt", "response"))
            if prompt.strip() and answer.strip():
                yield {"messages": alternate([prompt, answer])}
            return
        messages = list[Row]()
        for place, each in enumerate(objects_of(row, "conversation", where)):
            here = f"{where}: conversation[{place}]"
            if not each.keys() & {"User", "Bot"}:
                raise missing_column(each, "User", here, "Bot")
            user, bot = (text_of(each, name, here) if each.get(name) else "" for name in ("User", "Bot"))
            if user and bot:
                raise DataError(f"{here}: expected either User or Bot in each message, got both.")
            if user or bot:
                add_message(messages, "user" if user else "assistant", (user or bot).strip())
        messages = up_to_last_answer(messages)
        if messages and messages[0]["role"] == "user":
            yield {"messages": messages}


class Rounds(Form):
    """A list of {question, answer} in one column, and a system message in another."""

    rounds: str
    """Column of the list."""
    user: str
    assistant: str
    system: str | None = None
    """Column of the system message."""
    skip: dict[str, str] = {}
    """{column: text}. Rows with this text in the column are skipped."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        if any(text in text_of(row, name, where) for name, text in self.skip.items()):
            return
        value = column(row, self.rounds, where)
        rounds = objects_of(value, "samples", where) if isinstance(value, dict) else objects_of(row, self.rounds, where)
        texts = [
            text_of(each, name, f"{where}: {self.rounds}") for each in rounds for name in (self.user, self.assistant)
        ]
        system = text_of(row, self.system, where) if self.system else ""
        if texts and all(text.strip() for text in texts):
            yield {
                "messages": [*([{"role": "system", "content": system}] if system.strip() else []), *alternate(texts)]
            }


class Prosocial(Form):
    """{"context", "rots", "safety_annotations", "safety_annotation_reasons"}: a statement, and rules as answers."""

    with_explanations: bool = False
    """Whether the rows ask for the reason of each annotation instead."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        statement = text_of(row, "context", where)
        if not self.with_explanations:
            yield from (
                {"messages": alternate([statement, rule])} for rule in texts_of(row, "rots", where) if rule.strip()
            )
            return
        annotations, reasons = (
            texts_of(row, name, where) for name in ("safety_annotations", "safety_annotation_reasons")
        )
        for annotation, reason in zip(annotations, reasons, strict=False):
            if reason.strip():
                label = annotation.strip("_ ").replace("_", " ")
                prompt, answer = pick(_WHY, statement, annotation)
                yield {
                    "messages": alternate(
                        [text.format(statement=statement, label=label, reason=reason) for text in (prompt, answer)]
                    )
                }


_WHY = (
    ('Somebody says: "{statement}"\nThis was marked "{label}". Why?', 'It was marked "{label}" because: {reason}'),
    ('Why would one mark this as "{label}"?\n\n{statement}', "The reason is: {reason}"),
    ('"{statement}"\n\nExplain why the label of this message is "{label}".', "{reason}"),
)
