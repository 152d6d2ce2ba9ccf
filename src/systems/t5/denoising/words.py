"""Word boundaries in a row of tokens, by the tokenizer's marks: SentencePiece's "▁" or byte-level BPE's "Ġ"."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import DataError
from src.files import read_json

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_ERRORS = "surrogateescape"  # for characters that are split between tokens


class Words:
    """Finds words in rows of tokens.

    A word starts at a token that starts with white space or punctuation, after a token that ends with punctuation or a
    newline, and at the start of a row. Control tokens are separate words.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Raises DataError if the tokenizer does not mark spaces."""
        import numpy as np

        size = len(tokenizer)
        spell = _speller(json.loads(tokenizer.backend_tokenizer.to_str()), str(tokenizer.name_or_path))
        controls = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        tokens = tokenizer.convert_ids_to_tokens(list(range(size)))
        self.texts = ["" if index in controls or token is None else spell(token) for index, token in enumerate(tokens)]
        """Text of each id; empty for a control token."""
        self.control = np.array([index in controls for index in range(size)])
        """(V,) bool, True for control tokens."""
        self._begins = np.array([not text or not _in_word(text[0]) for text in self.texts])
        self._ends = np.array([not text or not (_in_word(text[-1]) or text[-1] == " ") for text in self.texts])

    def starts(self, ids: "np.ndarray") -> "np.ndarray":
        """(length,) bool, True on the first token of each word."""
        starts = self._begins[ids]
        starts[1:] |= self._ends[ids[:-1]]
        starts[:1] = True
        return starts

    def word_texts(self, ids: "np.ndarray", bounds: "np.ndarray") -> list[str]:
        """Lower-case text of each word, with the space before it.
        bounds: (words + 1,), starts of the words, and the length of the row."""
        cuts = bounds.tolist()
        texts = [self.texts[index] for index in ids.tolist()]
        words = [texts[start] if end - start == 1 else "".join(texts[start:end]) for start, end in pairwise(cuts)]
        return [
            word if word.isascii() else word.encode(errors=_BYTE_ERRORS).decode(errors="replace").lower()
            for word in words
        ]


def _in_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_" or "\udc80" <= letter <= "\udcff"


def require_in_folder(folder: Path) -> None:
    """Like `Words`, but reads tokenizer.json without loading the tokenizer. Passes if the file is missing or damaged,
    which loading the tokenizer reports.

    Raises:
        DataError: the tokenizer does not mark spaces.
    """
    try:
        parts = read_json(folder / "tokenizer.json", DataError)
    except DataError:
        return
    if isinstance(parts, dict) and parts.keys() >= {"pre_tokenizer", "decoder"}:
        _speller(parts, str(folder))


def _speller(parts: Mapping[str, Any], where: str) -> Callable[[str], str]:
    """A function from a token to its text. parts: the content of tokenizer.json."""
    marks = json.dumps([parts["pre_tokenizer"], parts["decoder"]], ensure_ascii=False)
    if '"ByteLevel"' in marks:
        return _byte_level
    if _SPACE in marks:
        return _sentence_piece
    raise DataError(
        f"{where}: the tokenizer does not mark spaces, so word boundaries are unknown. "
        "Use a SentencePiece or byte-level BPE tokenizer, or remove ngrams and whole_words."
    )


def _sentence_piece(token: str) -> str:
    if byte := _BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)]).decode(errors=_BYTE_ERRORS).lower()
    return token.replace(_SPACE, " ").lower()


def _byte_level(token: str) -> str:
    letters = _letters()
    return bytes(letters[letter] for letter in token if letter in letters).decode(errors=_BYTE_ERRORS).lower()


@cache
def _letters() -> dict[str, int]:
    """GPT-2's letter for each byte -> the byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
