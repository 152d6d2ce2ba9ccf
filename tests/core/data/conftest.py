"""A tokenizer with one id for each byte, and small prepared folders, so that expected ids can be read off the text."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from src.experiments.config import Places
from src.files import new_directory

CONTROLS = (
    "<|endoftext|>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<|user|>",
    "<|assistant|>",
    "<|C|>",
    "<|pad|>",
)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Build a tokenizer: control tokens first, then the 256 bytes in order, so that byte b is id len(controls) + b."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(controls: Sequence[str] = CONTROLS, pad: str | None = "<|pad|>") -> Any:
        letters = [_letter_of_byte(b) for b in range(256)]
        vocab = {token: i for i, token in enumerate([*controls, *letters])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(controls))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token=pad)

    return make


def _letter_of_byte(byte: int) -> str:
    """GPT-2's printable stand-in for a byte: itself where it is printable, else the next free letter from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(b not in printable for b in range(byte)))


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    """The byte tokenizer with all control tokens and a padding token of its own."""
    return make_tokenizer()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Empty places."""
    return Places(data=tmp_path / "data", runs=tmp_path / "runs")


@pytest.fixture
def write_corpus(places: Places) -> Callable[..., Path]:
    """Write rows as a prepared folder; val is like train where it is not given."""

    def write(name: str, train: Sequence[Mapping[str, Any]], val: Sequence[Mapping[str, Any]] | None = None) -> Path:
        with new_directory(places.data / name) as folder:
            for split, rows in (("train", train), ("val", train if val is None else val)):
                (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return places.data / name

    return write
