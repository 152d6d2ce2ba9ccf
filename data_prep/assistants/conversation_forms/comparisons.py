"""Layouts with compared replies: scores, choices of one of two, dialogues, endings, and added model replies.

Replies with equal scores are ties. The rows of a group are merged by reply.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic import Field

from data_prep.assistants.conversation_forms.columns import fill, look_up, remove_references
from data_prep.assistants.conversation_forms.layouts import pair
from data_prep.assistants.conversation_forms.rows import (
    Form,
    Row,
    add_change,
    alternate,
    changes_of,
    column,
    number_of,
    objects_of,
    pick,
    rank_replies,
    rows_of,
    text_of,
    texts_of,
)
from src.errors import DataError
from src.experiments.config import shorten

T = TypeVar("T")
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def _only(prompts: Sequence[T], where: str) -> T:
    """The prompt that all rows of a group have."""
    for other in prompts:
        if other != prompts[0]:
            raise DataError(
                f"{where}: the rows of a group have different prompts, such as {shorten(prompts[0])} and "
                f"{shorten(other)}. Change group_by, or the rows."
            )
    return prompts[0]


class ScoredReplies(Form):
    """Replies with one score each. A reply that appears in several rows gets the mean of its scores."""

    prompt: str
    """The prompt, such as "{question.full_text}"."""
    replies: Sequence[Sequence[str]] = Field(min_length=2)
    """[column of a reply, column of its score] for each reply."""
    most: int = Field(default=5, gt=1)
    """Maximum number of replies: the best ones plus the worst one."""
    strip_references: bool = False
    """Whether to remove reference marks such as [1] from replies."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. Skips pairs of equal replies and pairs with an empty reply."""
        rows, scores = rows_of(row), dict[str, list[float]]()
        for each in rows:
            texts = [(self._reply(each, name, where), number_of(each, score, where)) for name, score in self.replies]
            if all(text.strip() for text, _ in texts) and len({text for text, _ in texts}) > 1:
                for text, score in texts:
                    scores.setdefault(text, []).append(score)
        prompt = _only([fill(self.prompt, each, where) for each in rows], where)
        if scores and prompt.strip():
            replies = rank_replies({text: sum(several) / len(several) for text, several in scores.items()})
            few = replies if len(replies) <= self.most else [*replies[: self.most - 1], replies[-1]]
            yield {"messages": [{"role": "user", "content": prompt}], "replies": few}

    def _reply(self, row: Row, name: str, where: str) -> str:
        text = row.get(name)
        if text is None and name in row:
            return ""
        text = text_of(row, name, where)
        return remove_references(text) if self.strip_references else text


class Wins(Form):
    """Two summaries of a text and the preferred one. The summaries of a group are ranked by their number of wins."""

    texts: Sequence[str] = Field(min_length=1)
    """Columns of the text; the first one that is not null is used."""
    prompts: Sequence[str] = Field(min_length=1)
    """Prompt templates with {text}; one is chosen for each text."""
    least_confidence: int | None = None
    """Minimum confidence of the annotator; None: no minimum. Rows without a confidence are used."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        rows, wins = rows_of(row), dict[str, int]()
        for each in rows:
            choice = column(each, "choice", where)
            texts = [
                text_of(summary, "text", f"{where}: summaries") for summary in objects_of(each, "summaries", where)
            ]
            if choice not in (0, 1) or len(set(texts)) != 2 or len(texts) != 2 or not self._is_sure(each):
                continue
            for place, summary in enumerate(texts):
                wins[summary] = wins.get(summary, 0) + (place == choice)
        text = _only([self._text(each, where) for each in rows], where)
        if wins and text is not None:
            if not isinstance(text, str):
                raise DataError(f"{where}: columns {', '.join(self.texts)}: expected text, got {type(text).__name__}.")
            prompt = pick(self.prompts, text).replace("{text}", text)
            yield {"messages": [{"role": "user", "content": prompt}], "replies": rank_replies(wins)}

    def _text(self, row: Row, where: str) -> Any:
        return next((value for path in self.texts if (value := look_up(row, path, where))), None)

    def _is_sure(self, row: Row) -> bool:
        extra = row.get("extra")
        confidence = extra.get("confidence") if isinstance(extra, dict) else None
        return (
            self.least_confidence is None
            or not isinstance(confidence, int | float)
            or confidence >= self.least_confidence
        )


class Dialogues(Form):
    """{"chosen", "rejected"}: dialogues as text. A turn starts with "Human:" or "Assistant:" after an empty line."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`. A paragraph without a speaker continues the previous turn."""
        chosen_turns, rejected_turns = (self._turns(text_of(row, name, where)) for name in ("chosen", "rejected"))
        if (
            len(chosen_turns) > 1
            and chosen_turns[:-1] == rejected_turns[:-1]
            and chosen_turns[-1]["role"] == rejected_turns[-1]["role"] == "assistant"
        ):
            replies = (
                {"content": talk[-1]["content"], **changes_of(talk[-1])} for talk in (chosen_turns, rejected_turns)
            )
            yield from pair(chosen_turns[:-1], *replies)

    def _turns(self, text: str) -> list[Row]:
        _, *parts = _TURN.split(text)
        turns = list[Row]()
        for speaker, content in zip(parts[::2], parts[1::2], strict=True):
            role = "user" if speaker == "Human" else "assistant"
            if turns and turns[-1]["role"] == role:
                turns[-1]["content"] += f"\n\n{content.strip()}"
                add_change(turns[-1], "joined")
            else:
                turns.append({"role": role, "content": content.strip()})
        return turns if turns and turns[0]["role"] == "user" else []


class Endings(Form):
    """{"ctx", "endings", "label"}: pairs of the text with the right ending and with a wrong one, without a prompt."""

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        text, endings, label = (
            text_of(row, "ctx", where),
            texts_of(row, "endings", where),
            str(column(row, "label", where)),
        )
        if not label.isdecimal() or int(label) >= len(endings):
            raise DataError(
                f"{where}: column 'label': expected the index of one of {len(endings)} endings, got {label!r}."
            )
        others = [ending for place, ending in enumerate(endings) if place != int(label)]
        texts = endings[int(label)], pick(others, row)
        good, bad = (f"{text}{'' if ending[:1].isspace() else ' '}{ending}" for ending in texts)
        yield from pair([], good, bad)


class AugmentedReplies(Form):
    """{"prefixes", "responses", "augmented"}: conversation, replies from best to worst, worse replies by a model.

    One of the worse replies is appended as the last. Rows with "split" = "val" have no worse replies.
    """

    def read(self, row: Row, where: str) -> Iterator[Row]:
        """See `Form.read`."""
        replies = texts_of(row, "responses", where)
        worse = (
            [text for text in texts_of(row, "augmented", where) if text not in replies] if row.get("augmented") else []
        )
        if worse and row.get("split") != "val":
            replies = [*replies, pick(worse, row)]
        scores = {text: -float(place) for place, text in enumerate(replies)}
        yield {"messages": alternate(texts_of(row, "prefixes", where)), "replies": rank_replies(scores)}
