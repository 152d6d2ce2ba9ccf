"""Tokenize the texts of documents, in the same way for token counts of an index and for training."""

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from src.data.text.tokenizers import SafeTokenizer
from src.errors import DataError
from src.systems.interleaved.streaming.tar_index import IMAGE, TEXT, TEXTS, TarIndex
from src.systems.interleaved.streaming.tars.indexing import unread_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RULES = 2
"""Version of the tokenization rules below. Token counts of other versions are ignored."""
END = "END_OF_DOCUMENT_TOKEN_TO_BE_REPLACED"
"""Border of two documents within a text, as in m4's tars."""


class TextTokens:
    """Tokenizes the texts of documents."""

    is_chat = False
    """Whether documents are conversations, which are not cut."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", style: str = "idefics3") -> None:
        """style: see `ImagesConfig`. With "idefics2", a text after an image also starts with a space."""
        self._adds_spaces = style == "idefics2"
        self._safe = SafeTokenizer(tokenizer)
        bos = tokenizer.bos_token_id
        self.begin: list[int] = [bos] if isinstance(bos, int) and bos != self._safe.eos_id else []
        """First tokens of a document: the BOS token, if the tokenizer has one that differs from EOS."""
        self.filler = self._safe.eos_id
        self.end = [self._safe.eos_id]
        """Last tokens of a document."""
        self.answer_ends: list[int] = []
        """Ids besides the end token that end an answer."""
        rules = (
            f"{RULES}/{self.begin}/{self.end}/{_plain_text_rules(tokenizer)}{'/spaced' if self._adds_spaces else ''}"
        )
        self.digest = hashlib.sha256(rules.encode()).hexdigest()[:16]
        """Digest of the rules and of how the tokenizer encodes plain text; independent of control tokens."""

    def encode_with_loss(
        self, kinds: Sequence[int], contents: Sequence[bytes | None]
    ) -> tuple[list[list[int]], list[list[bool]]]:
        """See `encode`; also whether each id is learned."""
        ids = self.encode(kinds, contents)
        return ids, [[kind == TEXT] * len(part) for kind, part in zip(kinds, ids, strict=True)]

    def encode(self, kinds: Sequence[int], contents: Sequence[bytes | None]) -> list[list[int]]:
        """Ids of each part of a document; empty for images and dropped texts.

        A text after a text starts with a space. Empty texts, and texts that spell image tokens, are dropped.

        Raises:
            UnicodeDecodeError: a text is not UTF-8.
        """
        encoded, after_text, after_image = list[list[int]](), False, False
        for kind, content in zip(kinds, contents, strict=True):
            ids = list[int]()
            if kind in TEXTS and content is not None:
                text = content.decode("utf-8-sig")
                if not unread_text(text):
                    first, *more = text.split(END)
                    has_space = after_text or (
                        after_image and self._adds_spaces and not (first[:1].isspace() or first[:1] == "<")
                    )
                    ids = self._safe.encode(f" {first}" if has_space else first)
                    for piece in more:
                        ids = [*ids, *self.end, *self.begin, *self._safe.encode(piece.lstrip())]
            elif kind == IMAGE:
                after_text, after_image = False, True
            if ids:
                after_text, after_image = True, False
            encoded.append(ids)
        return encoded


def _plain_text_rules(tokenizer: "PreTrainedTokenizerFast") -> str:
    tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
    added_tokens = [token for token in tokenizer_json["added_tokens"] if not token["special"]]
    return json.dumps(
        [tokenizer_json["normalizer"], tokenizer_json["pre_tokenizer"], tokenizer_json["model"], added_tokens],
        sort_keys=True,
    )


def count_tokens(index: TarIndex, tar: "memoryview | Any", texts: TextTokens, where: str = "documents") -> None:
    """Add the token count of each text of a tar to its index. where: the tar, for a DataError on a conversation."""
    import numpy as np

    counts: np.ndarray = np.zeros(len(index.parts), dtype=np.uint32)
    for number in range(len(index)):
        if index.documents["bad"][number]:
            continue
        first = int(index.documents["first_part"][number])
        parts = index.parts_of(number)
        contents = index.contents(parts, lambda offset, size: bytes(tar[offset : offset + size]), TEXTS)
        try:
            encoded, _ = texts.encode_with_loss(parts["kind"].tolist(), contents)
        except DataError as error:
            raise DataError(f"{where}: document {number}: {error}") from None
        counts[first : first + len(parts)] = [len(ids) for ids in encoded]
    index.tokens, index.facts["tokenizer"] = counts, texts.digest
