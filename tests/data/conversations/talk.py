"""Small conversations, and a tokenizer of bytes with the control tokens of the templates."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from src.data.conversations.entries import Message
from src.data.conversations.rendering import Rendered, Role
from src.data.conversations.templates import CHATML_TOKENS, OASST_TOKENS
from src.files import new_directory

TOKENS = [*OASST_TOKENS, *CHATML_TOKENS]


def tokenizer(tokens: Sequence[str] = TOKENS, template: str | None = None, strips: bool = False) -> Any:
    """Of bytes. tokens: control tokens besides the end and the padding. template: of Jinja. strips: whether blanks beside control tokens
    are taken away: behind assistants' and user's tokens, and before the others."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    behind = [token.startswith(("<|a", "<|p", "<|im_s")) for token in tokens]
    told = [AddedToken(t, special=True, rstrip=strips and b, lstrip=strips and not b) for t, b in zip(tokens, behind, strict=True)]
    made.add_special_tokens({"extra_special_tokens": told}, replace_extra_special_tokens=False)
    made.chat_template = template
    return made


def metaspace_tokenizer(scheme: str) -> Any:
    """Of letters, with a blank that is put before texts: "first" before whole texts alone, as Llama's; "always" before all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", "\u2581", *map(chr, range(33, 127)), "\n"]
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", unk_token="<unk>")
    made.add_special_tokens({"extra_special_tokens": TOKENS}, replace_extra_special_tokens=False)
    return made


def messages(*said: str, system: str | None = None) -> list[Message]:
    """What a user and the assistant say in turn."""
    talk = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(said)]
    return [Message("system", system), *talk] if system is not None else talk


def shown(found: Rendered, made: Any, roles: Sequence[Role]) -> str:
    """The text of the tokens of some roles."""
    return made.decode([token for token, role in zip(found.ids, found.roles, strict=True) if role in roles])


def row(*said: str, **more: Any) -> dict[str, Any]:
    """A row of `messages`, whose last may have tags."""
    talk: list[dict[str, Any]] = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    talk[-1] |= more
    return {"messages": talk}


def write_rows(folder: Path, splits: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """A prepared folder."""
    with new_directory(folder) as made:
        for split, rows in splits.items():
            (made / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
