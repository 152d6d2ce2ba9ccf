"""Detect conversations in which the assistant refuses or calls itself a language model, by fixed phrases."""

import re
from collections.abc import Sequence

from src.systems.assistants.conversations.entries import Message

PHRASES = (
    "as an ai language model",
    "as an ai assistant",
    "as a language model",
    "as a large language model",
    "i am an ai",
    "i'm an ai",
    "i am just an ai",
    "i am a language model",
    "i'm a language model",
    "i do not have personal opinions",
    "i don't have personal opinions",
    "i do not have feelings",
    "i don't have feelings",
    "i cannot fulfil",
    "i cannot fulfill",
    "i can't fulfill",
    "i cannot comply",
    "i cannot assist with that",
    "i can't assist with that",
    "i'm sorry, but i cannot",
    "i'm sorry, but i can't",
    "i am unable to provide",
    "i'm unable to provide",
    "my knowledge cutoff",
    "it is not appropriate for me",
    "it would be unethical for me",
)
"""Phrases in lower case. "OpenAI" or "as a machine learning engineer" must not match."""
_ANY = re.compile("|".join(rf"(?<!\w){re.escape(phrase)}(?!\w)" for phrase in PHRASES))


def refuses(messages: Sequence[Message]) -> bool:
    """Whether the assistant says one of `PHRASES`."""
    return any(
        message.role == "assistant" and _ANY.search(message.content.lower().replace("\u2019", "'"))
        for message in messages
    )
