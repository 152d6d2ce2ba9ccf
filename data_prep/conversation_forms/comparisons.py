"""Releases of replies that people compared: scored, chosen one of two, of dialogues, of endings, or with replies of a model added.

Replies of equal scores are ties. What several rows of a group tell of one reply is put together.
"""

import re
from collections.abc import Iterator, Sequence

from pydantic import Field

from data_prep.conversation_forms.columns import fill, look_up, remove_references
from data_prep.conversation_forms.layouts import pair
from data_prep.conversation_forms.rows import (
    Form,
    Row,
    add_change,
    alternate,
    column,
    objects_of,
    pick,
    rank_replies,
    rows_of,
    text_of,
    texts_of,
)
from src.errors import DataError

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


class Scored(Form):
    """Pairs of replies with a score each. A reply of several rows has the mean of its scores."""

    prompt: str
    """What they answer, such as "{question.full_text}"."""
    replies: Sequence[Sequence[str]] = Field(min_length=2)
    """[column of a reply, column of its score] of each."""
    most: int = Field(default=5, gt=1)
    """Replies that are kept: the best ones, and the worst."""
    unreferenced: bool = False
    """Whether marks of references such as [1] are removed from replies."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. Pairs that say the same, or of which one says nothing, are left out."""
        rows, scores = rows_of(row), dict[str, list[float]]()
        for each in rows:
            told = [(self._reply(each, name, where), _number(each, score, where)) for name, score in self.replies]
            if all(text.strip() for text, _ in told) and len({text for text, _ in told}) > 1:
                for text, score in told:
                    scores.setdefault(text, []).append(score)
        asked = fill(self.prompt, rows[0], where)
        if scores and asked.strip():
            replies = rank_replies({text: sum(several) / len(several) for text, several in scores.items()})
            few = replies if len(replies) <= self.most else [*replies[: self.most - 1], replies[-1]]
            yield {"messages": [{"role": "user", "content": asked}], "replies": few}

    def _reply(self, row: Row, name: str, where: str) -> str:
        text = row.get(name)
        if text is None and name in row:
            return ""
        text = text_of(row, name, where)
        return remove_references(text) if self.unreferenced else text


class Wins(Form):
    """Two summaries of a text, of which one was chosen. Of a group of rows: all its summaries, by how often each was."""

    texts: Sequence[str] = Field(min_length=1)
    """Columns of the text, of which the first counts that is not null."""
    prompts: Sequence[str] = Field(min_length=1)
    """What is asked, with {text} in it: of several one."""
    least_confidence: int | None = None
    """Of those who chose; None: any. Rows that do not tell it count."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        rows, wins = rows_of(row), dict[str, int]()
        for each in rows:
            chosen = column(each, "choice", where)
            told = [text_of(summary, "text", f"{where}: summaries") for summary in objects_of(each, "summaries", where)]
            if chosen not in (0, 1) or len(set(told)) != 2 or len(told) != 2 or not self._is_sure(each):
                continue
            for place, summary in enumerate(told):
                wins[summary] = wins.get(summary, 0) + (place == chosen)
        text = next((found for path in self.texts if (found := look_up(rows[0], path, where))), None)
        if wins and text is not None:
            if not isinstance(text, str):
                raise DataError(f"{where}: columns {', '.join(self.texts)}: expected text, got {type(text).__name__}.")
            asked = pick(self.prompts, text).replace("{text}", text)
            yield {"messages": [{"role": "user", "content": asked}], "replies": rank_replies(wins)}

    def _is_sure(self, row: Row) -> bool:
        extra = row.get("extra")
        confidence = extra.get("confidence") if isinstance(extra, dict) else None
        return self.least_confidence is None or not isinstance(confidence, int | float) or confidence >= self.least_confidence


def _number(row: Row, name: str, where: str) -> float:
    value = column(row, name, where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: column {name!r}: expected a number, got {type(value).__name__}.")
    return float(value)


class Dialogues(Form):
    """{"chosen", "rejected"}: texts of a dialogue whose turns begin with "Human:" and "Assistant:" after an empty line."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. A paragraph that begins with neither belongs to the turn above it."""
        chosen, rejected = (self._turns(text_of(row, name, where)) for name in ("chosen", "rejected"))
        if len(chosen) > 1 and chosen[:-1] == rejected[:-1] and chosen[-1]["role"] == rejected[-1]["role"] == "assistant":
            yield from pair(chosen[:-1], chosen[-1]["content"], rejected[-1]["content"])

    def _turns(self, text: str) -> list[Row]:
        _, *parts = _TURN.split(text)
        found = list[Row]()
        for speaker, said in zip(parts[::2], parts[1::2], strict=True):
            role = "user" if speaker == "Human" else "assistant"
            if found and found[-1]["role"] == role:
                found[-1]["content"] += f"\n\n{said.strip()}"
                add_change(found[-1], "joined")
            else:
                found.append({"role": role, "content": said.strip()})
        return found if found and found[0]["role"] == "user" else []


class Endings(Form):
    """{"ctx", "endings", "label"}: the text with its right ending against the text with one of the others. Nobody asks anything."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        text, endings, label = text_of(row, "ctx", where), texts_of(row, "endings", where), str(column(row, "label", where))
        if not label.isdigit() or int(label) >= len(endings):
            raise DataError(f"{where}: column 'label': expected the number of one of {len(endings)} endings, got {label!r}.")
        others = [ending for place, ending in enumerate(endings) if place != int(label)]
        told = endings[int(label)], pick(others, row)
        good, bad = (f"{text}{'' if ending[:1].isspace() else ' '}{ending}" for ending in told)
        yield from pair([], good, bad)


class Augmented(Form):
    """{"prefixes", "responses", "augmented"}: a conversation, replies to it, best first, and worse ones that a model wrote, one of which
    comes last. Rows whose "split" is "val" have none of these."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        replies = texts_of(row, "responses", where)
        worse = [text for text in texts_of(row, "augmented", where) if text not in replies] if row.get("augmented") else []
        if worse and row.get("split") != "val":
            replies = [*replies, pick(worse, row)]
        told = {text: -float(place) for place, text in enumerate(replies)}
        yield {"messages": alternate(texts_of(row, "prefixes", where)), "replies": rank_replies(told)}
