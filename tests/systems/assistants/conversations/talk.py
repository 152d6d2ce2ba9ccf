"""Small conversations, and a tokenizer of bytes with the control tokens of the templates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from src.files import new_directory
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.conversations.rendering import Rendered, Role
from src.systems.assistants.conversations.templates import CHATML_TOKENS, OASST_TOKENS

TOKENS = [*OASST_TOKENS, *CHATML_TOKENS]


Merges = Sequence[tuple[str, str]]


def tokenizer(
    tokens: Sequence[str] = TOKENS, template: str | None = None, strips: bool = False, merges: Merges = ()
) -> Any:
    """A tokenizer of bytes. tokens: control tokens other than the end and the padding. template: a Jinja template.
    strips: whether control
    tokens strip blanks: those of assistants and users after them, the rest before them. merges: pairs of letters that
    are one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(pieces)}, merges=[*merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    after = [token.startswith(("<|a", "<|p", "<|im_s")) for token in tokens]
    added_tokens = [
        AddedToken(t, special=True, rstrip=strips and a, lstrip=strips and not a)
        for t, a in zip(tokens, after, strict=True)
    ]
    fast_tokenizer.add_special_tokens({"extra_special_tokens": added_tokens}, replace_extra_special_tokens=False)
    fast_tokenizer.chat_template = template
    return fast_tokenizer


def metaspace_tokenizer(scheme: str, merges: Merges = ()) -> Any:
    """A tokenizer of letters that prepends a blank: "first" only to a complete text, as Llama's; "always" also after
    control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "\u2581", *map(chr, range(33, 127)), "\n", *map("".join, merges)]
    backend = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[*merges], unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", unk_token="<unk>"
    )
    fast_tokenizer.add_special_tokens({"extra_special_tokens": TOKENS}, replace_extra_special_tokens=False)
    return fast_tokenizer


def messages(*contents: str, system: str | None = None) -> list[Message]:
    """Messages of a user and the assistant in turn."""
    turns = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(contents)]
    return [Message("system", system), *turns] if system is not None else turns


def mark_roles(sample: Rendered, tokenizer: Any, roles: Sequence[Role]) -> str:
    """The text of the tokens of some roles."""
    return tokenizer.decode([token for token, role in zip(sample.ids, sample.roles, strict=True) if role in roles])


def row(*contents: str, **more: Any) -> dict[str, Any]:
    """A row of `messages`, whose last may have tags."""
    talk: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    talk[-1] |= more
    return {"messages": talk}


def write_rows(folder: Path, splits: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """A prepared folder."""
    with new_directory(folder) as directory:
        for split, rows in splits.items():
            (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
