"""Random choices by (seed, epoch, index): the window of a long conversation, and the tags before answers."""

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
    """Random numbers that depend only on `key`: the same in every process and under every PYTHONHASHSEED."""
    return Random(hashlib.sha256("/".join(map(str, key)).encode()).digest())


class Tags(StrictConfig):
    """Properties of an answer that are written before it, like Open-Assistant's system tag."""

    dropout: float = Field(default=0.5, ge=0, le=1)
    """Probability of dropping each property in training. Evaluations write all of them."""
    length: bool = False
    """Whether to write the length too: number of words // 5 + 1."""

    def write(self, message: Message, draw: Random | None) -> str:
        """Write a message's properties as "key: value" lines; "" without properties.

        draw: source of the dropout; None writes all properties. With dropout the lines are shuffled, except for the
        context, which is last. Shares have one decimal.
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
        """The text before each message; empty except before the assistant's messages."""
        return [self.write(message, draw) if message.role == "assistant" else "" for message in messages]


def window(
    rendered: Rendered, max_tokens: int, offset_probability: float, draw: Callable[[], Random] | None
) -> Rendered:
    """Cut a conversation to `max_tokens`, with at least one learned token if there is one.

    With `offset_probability` the window starts at a random token that leaves a token to learn, else at the first token.
    If the first learned token comes later than `max_tokens`, half of the window precedes that token. draw: None in
    evaluations, which never start at a random token.
    """
    if len(rendered.ids) <= max_tokens:
        return rendered
    learned_positions = [place for place, is_learned in enumerate(rendered.loss_mask) if is_learned]
    if not learned_positions:
        return rendered.part(0, max_tokens)
    last = min(
        len(rendered.ids) - max_tokens, learned_positions[-1] - 1
    )  # the first token of a sequence is never learned
    if draw is not None and (rng := draw()).random() < offset_probability:
        earliest = max(0, learned_positions[0] - max_tokens + 1)
        begin = rng.choice([i for i in range(earliest, last + 1) if _learns(learned_positions, i, i + max_tokens)])
    else:
        begin = 0 if learned_positions[0] < max_tokens else learned_positions[0] - max_tokens // 2
        begin = min(begin, len(rendered.ids) - max_tokens)
    return rendered.part(begin, begin + max_tokens)


def _learns(learned_positions: Sequence[int], begin: int, end: int) -> bool:
    """Whether a learned token is within the range, after its first token."""
    after = bisect_right(learned_positions, begin)
    return after < len(learned_positions) and learned_positions[after] < end
