"""The part of a conversation that an epoch reads, and what it tells of answers, by (seed, epoch, index)."""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from random import Random

from pydantic import Field

from src.experiments.config import Config as StrictConfig
from src.systems.assistants.conversations.entries import SHARES, Message
from src.systems.assistants.conversations.rendering import Rendered

_WORD = re.compile(r"\w+")


def draws(*key: object) -> Random:
    """Random numbers that depend on `key` alone: the same in every process and under every PYTHONHASHSEED."""
    return Random(hashlib.sha256("/".join(map(str, key)).encode()).digest())


class Tags(StrictConfig):
    """What is told about an answer before it is written, as Open-Assistant's system tag does."""

    dropout: float = Field(default=0.5, ge=0, le=1)
    """Share of the properties that are not told, each drawn by itself; in evaluations all are told."""
    length: bool = False
    """Whether the length is told, too: a fifth of the words, and one."""

    def write(self, message: Message, draw: Random | None) -> str:
        """Lines "key: value" about a message, which end with an end of line;
        "" if there is nothing to tell. draw: None to tell all.

        Where some are dropped they are shuffled, but for the context, which comes last. Shares have one decimal.
        """
        lines = [f"{name}: {float(message.tags[name]):.1f}" if name in SHARES else f"{name}: {message.tags[name]}"
                 for name in ("lang", *SHARES) if str(message.tags.get(name, "")).strip()]  # fmt: skip
        if self.length:
            lines.append(f"length: {len(_WORD.findall(message.content)) // 5 + 1}")
        if draw is not None and self.dropout:  # with 0 all epochs read the same
            lines = [line for line in lines if draw.random() >= self.dropout]
            draw.shuffle(lines)
        context = str(message.tags.get("context", "")).strip()
        if context and (draw is None or draw.random() >= self.dropout):
            lines.append(f"context: {context}")
        return "".join(f"{line}\n" for line in lines)

    def write_all(self, messages: Sequence[Message], draw: Random | None) -> list[str]:
        """What is told before each message: something before those of the assistant alone."""
        return [self.write(message, draw) if message.role == "assistant" else "" for message in messages]


def window(
    rendered: Rendered, max_tokens: int, offset_probability: float, draw: Callable[[], Random] | None
) -> Rendered:
    """A conversation of at most `most` tokens, in which something is learned if anything is.

    With `offset_probability` it begins at a random token, as long as that leaves something to learn; else at its own
    beginning. Where all that would be learned comes later, it begins so that half of it is before the first token that
    is learned. draw: None in evaluations, which read the beginning.
    """
    if len(rendered.ids) <= max_tokens:
        return rendered
    learned_positions = [place for place, is_learned in enumerate(rendered.loss_mask) if is_learned]
    if not learned_positions:
        return rendered.part(0, max_tokens)
    last = min(
        len(rendered.ids) - max_tokens, learned_positions[-1] - 1
    )  # the first token of a sequence is never learned
    if draw is not None:
        rng = draw()
        if rng.random() < offset_probability:
            starts = [
                begin
                for begin in range(max(0, learned_positions[0] - max_tokens + 1), last + 1)
                if _learns(learned_positions, begin, begin + max_tokens)
            ]
            return _part(rendered, rng.choice(starts), max_tokens)
    begin = 0 if learned_positions[0] < max_tokens else learned_positions[0] - max_tokens // 2
    return _part(rendered, min(begin, len(rendered.ids) - max_tokens), max_tokens)


def _part(rendered: Rendered, begin: int, max_tokens: int) -> Rendered:
    return rendered.part(begin, begin + max_tokens)


def _learns(learned_positions: Sequence[int], begin: int, end: int) -> bool:
    """Whether a token that is learned is within, behind the first."""
    after = bisect_right(learned_positions, begin)
    return after < len(learned_positions) and learned_positions[after] < end
