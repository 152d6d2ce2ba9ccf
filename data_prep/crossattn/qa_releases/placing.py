"""Choose distractors and order passages, as pure functions of the seed and the question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from data_prep.crossattn.qa_releases.question import UNANSWERABLE, Passage, Question
from src.errors import DataError
from src.support.command_line import require_at_least

POSITIONS = ("given", "first", "middle", "last", "random")

_TRIES = 50  # draws per distractor; most draws succeed


@dataclass(frozen=True)
class Placing:
    """Rules for choosing and ordering the passages of questions."""

    seed: int
    distractors: int | None = None
    """Maximum number of passages that are not useful; the first ones of the release are used. None: all."""
    position: str = "given"
    """Position of the useful passages: one of POSITIONS, or the number of passages before them."""
    pool: Sequence[Passage] = ()
    """Passages of other questions to draw from if the release has too few distractors."""

    def __post_init__(self) -> None:
        """Raises DataError for an invalid position or number."""
        if self.position not in POSITIONS and not (self.position.isascii() and self.position.isdigit()):
            raise DataError(
                f"--position: expected one of {', '.join(POSITIONS)}, or a number from 0, got {self.position!r}."
            )
        require_at_least(0, distractors=self.distractors)

    def place(self, question: Question) -> Question:
        """Choose and order the passages of a question. If no passage is marked useful, only "random" changes the order.

        Raises:
            DataError: distractors or a position are requested, but the release does not mark the useful passages.
        """
        has_unmarked = any(passage.useful is None for passage in question.passages)
        if has_unmarked and (self.distractors is not None or self.position not in {"given", "random"}):
            raise DataError(
                f"{question.where}: this release does not mark useful passages, which --distractors and --position "
                "need. Remove the options."
            )
        useful = [passage for passage in question.passages if passage.useful]
        others = [passage for passage in question.passages if not passage.useful]
        if self.distractors is not None:
            others = others[: self.distractors]
            others += self._draw_distractors(question, self.distractors - len(others)) if self.pool else []
        if self.position == "random":
            order = useful + others
            self._random("order", question).shuffle(order)
        elif self.position == "given":
            distractor_ids = {id(passage) for passage in others}
            order = [p for p in question.passages if p.useful or id(p) in distractor_ids]
            order += [p for p in others if not any(p is own_passage for own_passage in question.passages)]
        else:
            offsets = {"first": 0, "middle": len(others) // 2, "last": len(others)}
            before = offsets[self.position] if self.position in offsets else int(self.position)
            order = others[:before] + useful + others[before:]
        return replace(question, passages=tuple(order))

    def _draw_distractors(self, question: Question, count: int) -> list[Passage]:
        """Draw distinct passages from the pool that are not in the question and contain no accepted answer."""
        used_texts = {passage.text for passage in question.passages}
        answers = [answer.lower() for answer in question.answers if answer not in {UNANSWERABLE, "Yes", "No"}]
        random, distractors = self._random("pool", question), []
        for _ in range(_TRIES * count):
            if len(distractors) == count:
                break
            passage = random.choice(self.pool)
            text = passage.text.lower()
            if passage.text not in used_texts and not any(answer in text for answer in answers):
                used_texts.add(passage.text)
                distractors.append(replace(passage, useful=False))
        return distractors

    def _random(self, use: str, question: Question) -> Random:
        return Random(f"{use}/{self.seed}/{question.dataset}/{question.id or question.text}")
