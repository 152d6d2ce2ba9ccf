"""Make token ids of documents with metadata: a prefix of global metadata, and the text with its markers, in blocks.

Each piece repeats the prefix. "nested" tokenises the text separately from prefix and markers, so that its tokens do not
depend on them. "compatible" tokenises the text with its markers and the space before it, like
bsmetadata/metadata_utils.py.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError
from src.experiments.config import Config, unknown_text
from src.systems.metadata.data.annotations import KEYS, Document, Item
from src.systems.metadata.data.linearise import Linearisation, insert, markers
from src.systems.metadata.data.processors import (
    PROMPT_TITLES,
    Address,
    HtmlFilter,
    Separators,
    global_text,
    local_markers,
)

_NO_CHARACTERS = 0xFDD0
"""The first of 32 code points that are never characters in Unicode."""
_MAX_MARKERS = 1 << 16
"""Size of the cache of marker ids."""


class Writing(Config):
    """The form of metadata."""

    keys: list[str] = Field(default=list(KEYS), min_length=1)
    """Keys to write, in the order of the prefix."""
    custom_keys: list[str] = []
    """Keys among `keys` that this project does not define. Their items are written as "KEY: VALUE" and [KEY: VALUE]."""
    style: Literal["prefix", "prompt"] = "prefix"
    """prompt: all metadata are written in words before the text, which has no markers."""
    linearisation: Linearisation = "nested"
    """How HTML tags with the same position are ordered."""
    separators: Separators = Separators()
    url: Address = "whole"
    """host: "URL: docs.python.org", as in metadata conditioning then cooldown (Gao et al. 2025, arXiv 2501.01956)."""
    html: HtmlFilter = HtmlFilter()
    entity_position: Literal["beginning", "end"] = "beginning"
    """Position of entity names in a paragraph."""
    list_local_keys: bool = False
    """Whether the prefix lists the local keys of the document."""
    local_key_names: dict[str, str] = {}
    """Names of local keys in that list, where they differ from the keys."""
    run_starts: dict[str, str] = {}
    """Text before each run of markers with relative positions, by key."""
    run_ends: dict[str, str] = {}
    """By key, the texts around each run of markers with relative positions."""
    special_tokens: bool = False
    """Whether `run_starts` and `run_ends` are special tokens, which the tokenizer must have."""
    prefix_share: float = Field(default=0.5, gt=0, lt=1)
    """Maximum share of a row for the prefix, without the space after it.
    A longer prefix is truncated before its separator."""

    @model_validator(mode="after")
    def _keys_are_known(self) -> "Writing":
        if len(set(self.keys)) < len(self.keys):
            raise ValueError(f"keys: {max(self.keys, key=self.keys.count)!r} appears twice. Remove one.")
        for key in self.keys:
            if key not in {*KEYS, *self.custom_keys}:
                raise ValueError(f"keys: {unknown_text('key', key, KEYS)} Declare a key of yours in custom_keys.")
        for name, by_key in (
            ("local_key_names", self.local_key_names),
            ("run_starts", self.run_starts),
            ("run_ends", self.run_ends),
        ):
            for key in by_key:
                if key not in self.keys:
                    raise ValueError(f"{name}: {unknown_text('key', key, self.keys)}")
        if self.local_key_names and not self.list_local_keys:
            raise ValueError(
                "local_key_names: renames the keys of list_local_keys, which is off. Remove it, or set list_local_keys."
            )
        if self.special_tokens and not (self.run_starts and self.run_ends):
            raise ValueError("special_tokens: needs run_starts and run_ends, but one of them is empty. Set both.")
        return self

    def new_tokens(self) -> list[str]:
        """List the special tokens that the tokenizer must have."""
        tokens = [*self.run_starts.values(), *self.run_ends.values()] if self.special_tokens else []
        return list(dict.fromkeys(tokens))


Span = tuple[int, int]
"""Range of characters, half open."""
Tokens = tuple[list[int], list[Span | None]]
"""Ids, and their spans."""


class Piece(NamedTuple):
    """Part of a document with its prefix, as lists of equal length."""

    ids: list[int]
    loss_mask: list[bool]
    """Whether each token is in the loss; False for the first."""
    spans: list[Span | None]
    """Characters of each text token; the end token follows the last character. None for metadata."""

    @property
    def of_text(self) -> list[bool]:
        """Whether each token belongs to the text, not to metadata."""
        return [span is not None for span in self.spans]


class ExampleMaker:
    """Makes pieces of at most `room` tokens."""

    def __init__(
        self, writing: Writing, encoder: SafeTokenizer, room: int, metadata_loss: bool = False, end_token: bool = True
    ) -> None:
        """Prepare the tokens of separators. metadata_loss: markers are in the loss.
        end_token: documents end with the end token.

        Raises:
            ConfigError: the tokenizer has no token for a special token or the separator, or the rows are too short.
        """
        self._writing, self._encoder, self._room = writing, encoder, room
        self._settings = metadata_loss, end_token
        self._metadata_loss, self._end = metadata_loss, [encoder.eos_id] if end_token else []
        specials = writing.new_tokens()
        # Until tokenisation, special tokens are characters that no text has, so that no text can spell one.
        self._specials = {chr(_NO_CHARACTERS + number): token for number, token in enumerate(specials)}
        characters = {token: character for character, token in self._specials.items()}
        self._around: dict[str, tuple[str, str]] = {}
        for key in {*writing.run_starts, *writing.run_ends}:
            start, end = writing.run_starts.get(key, ""), writing.run_ends.get(key, "")
            self._around[key] = characters.get(start, start), characters.get(end, end)
        if missing := [token for token in specials if encoder.control_id(token) is None]:
            raise ConfigError(
                f"data.writing.special_tokens: the tokenizer has no token {missing[0]!r}. Add it to model.extra_tokens."
            )
        self._marker_ids: dict[str, list[int]] = {}
        self._special = re.compile(f"[{''.join(self._specials)}]") if specials else None
        self._nested = writing.linearisation == "nested"
        self._separator = encoder.encode(writing.separators.prefix_end)
        self._space = encoder.encode(" ")
        self._after_prefix = [] if writing.separators.prefix_end[-1:].isspace() else self._space
        if writing.separators.prefix_end and not self._separator:
            raise ConfigError(
                "data.writing.separators.prefix_end: "
                f"the tokenizer cannot encode {writing.separators.prefix_end!r}. Use another text."
            )
        self._most = int(room * writing.prefix_share)
        if len(self._separator) >= self._most:
            raise ConfigError(
                f"data.sequence_tokens: {room} tokens leave no room for a prefix and its separator. Raise it."
            )
        if self._most + len(self._space) >= room:
            raise ConfigError(
                f"data.writing.prefix_share: {writing.prefix_share:g} of {room} tokens leaves no room for the text. "
                "Lower it."
            )

    @property
    def room(self) -> int:
        """Maximum number of tokens in a piece."""
        return self._room

    def rewritten(self, **changes: Any) -> "ExampleMaker":
        """Return a maker with `changes` of the writing."""
        return ExampleMaker(self._writing.model_copy(update=changes), self._encoder, self._room, *self._settings)

    def with_room(self, room: int) -> "ExampleMaker":
        """Return a maker of pieces of at most `room` tokens."""
        return ExampleMaker(self._writing, self._encoder, room, *self._settings)

    def prefix(self, document: Document) -> str:
        """Write the prefix without the separator at its end; empty without metadata. The last item of a key counts."""
        writing, by_key = self._writing, dict[str, str]()
        if writing.style == "prompt":
            return prompt(document, writing.keys, writing.separators)
        for item in document.items:
            if item.start is None:
                by_key[item.key] = global_text(item, writing.separators, writing.url)
        local = {item.key for item in document.items if item.start is not None}
        parts = []
        for key in writing.keys:
            if key in by_key:
                parts.append(by_key[key])
            if writing.list_local_keys and key in local:
                parts.append(writing.local_key_names.get(key, key))
        return writing.separators.prefix_start + writing.separators.item.join(parts) if parts else ""

    def pieces(self, document: Document, with_metadata: bool = True) -> list[Piece]:
        """Cut the document into pieces; those without a token in the loss are dropped.

        written: False for pieces without metadata, cut at the same characters.
        """
        prefix = self.prefix_ids(document)
        text = self._nested_text(document) if self._nested else self._compatible_text(document, " " if prefix else "")
        end = [(len(document.text), len(document.text) + 1)] * len(self._end)
        ids, spans = [*text[0], *self._end], [*text[1], *end]
        blocks, begin = list[tuple[list[int], list[int], list[Span | None]]](), 0
        while begin < len(ids):
            # In the first block of "compatible" the space is part of the text.
            before = [*prefix, *self._space] if prefix and begin and not self._nested else prefix
            block = slice(begin, begin := begin + self._room - len(before))
            blocks.append((before, ids[block], spans[block]))
        if not with_metadata:
            blocks = [([], *block) for block in self._cut_text(document, [block_spans for _, _, block_spans in blocks])]
        pieces = (self._piece(*block) for block in blocks)
        return [piece for piece in pieces if any(piece.loss_mask)]

    def _piece(self, prefix: list[int], ids: list[int], spans: list[Span | None]) -> Piece:
        learned_mask = [False] * len(prefix) + [span is not None or self._metadata_loss for span in spans]
        return Piece([*prefix, *ids], [False, *learned_mask[1:]] if learned_mask else [], [None] * len(prefix) + spans)

    def _cut_text(self, document: Document, blocks: Sequence[Sequence[Span | None]]) -> Iterator[Tokens]:
        """Cut the text without metadata at the first characters of `blocks`."""
        ids, spans = self._encoder.encode_spans(document.text)
        ids, spans = [*ids, *self._end], [*spans, *([(len(document.text), len(document.text) + 1)] * len(self._end))]
        begins = [next((span[0] for span in block if span), None) for block in blocks]
        read = 0
        for number in range(len(blocks)):
            following = next((begin for begin in begins[number + 1 :] if begin is not None), None)
            end = len(ids) if following is None else bisect_left(spans, following, read, key=lambda span: span[0])
            yield ids[read:end], list(spans[read:end])
            read = end

    def prefix_ids(self, document: Document) -> list[int]:
        """Tokenise the prefix of each block of a document; empty without global metadata."""
        text, most = self.prefix(document), self._most - len(self._separator)
        if not text:
            return []
        if self._nested:
            return [*self._encoder.encode(text)[:most], *self._separator, *self._after_prefix]
        ids = self._encoder.encode(text + self._writing.separators.prefix_end)
        return ids if len(ids) <= self._most else [*ids[:most], *self._separator]

    def text_ids(self, document: Document) -> list[int]:
        """Tokenise the text and its markers, as they follow the prefix."""
        return (
            self._nested_text(document)
            if self._nested
            else self._compatible_text(document, " " if self.prefix(document) else "")
        )[0]

    def _markers(self, document: Document) -> list:
        writing = self._writing
        if writing.style == "prompt":
            return []

        def process(item: Item) -> tuple[str, str] | None:
            texts = local_markers(item, writing.html, writing.entity_position, escape=self._nested)
            if texts is None or self._special is None:
                return texts
            return self._special.sub("", texts[0]), self._special.sub("", texts[1])

        return markers(document, writing.keys, process, self._around, writing.linearisation)

    def _nested_text(self, document: Document) -> Tokens:
        """Insert markers between the tokens of the text: starts before the token of their character, ends after it."""
        ids, spans = self._encoder.encode_spans(document.text)
        starts, ends = zip(*spans, strict=True) if spans else ((), ())
        at, place = dict[int, list[str]](), 0
        for index, text, closes in self._markers(document):
            place = max(place, bisect_left(starts, index) if closes else bisect_right(ends, index))
            at.setdefault(place, []).append(text)
        marked_ids, marked_spans, read = list[int](), list[Span | None](), 0
        for place, texts in at.items():
            marker = self._encode_marker("".join(texts))
            marked_ids += [*ids[read:place], *marker]
            marked_spans += [*spans[read:place], *[None] * len(marker)]
            read = place
        return marked_ids + ids[read:], marked_spans + spans[read:]

    def _encode_marker(self, text: str) -> list[int]:
        """Tokenise a marker, with a cache: the same markers are frequent."""
        if (cached := self._marker_ids.get(text)) is not None:
            return cached
        ids, read = list[int](), 0
        for match in self._special.finditer(text) if self._special else ():
            ids += [
                *self._encoder.encode(text[read : match.start()]),
                *self._encoder.encode_token(self._specials[match[0]]),
            ]
            read = match.end()
        if len(self._marker_ids) == _MAX_MARKERS:
            self._marker_ids.clear()
        self._marker_ids[text] = ids = ids + self._encoder.encode(text[read:])
        return ids

    def _compatible_text(self, document: Document, space: str) -> Tokens:
        """Tokenise text and markers together.
        A token with a character of a marker is metadata; the space before the text belongs to it."""
        text, mask = insert(document.text, self._markers(document))
        text, mask = space + text, [False] * len(space) + mask
        marker_characters = [0, *accumulate(mask)]  # characters of markers before each
        all_ids, all_spans, read = list[int](), list[Span | None](), 0
        specials = [match for match in self._special.finditer(text) if mask[match.start()]] if self._special else []
        for match in [*specials, None]:
            ids, spans = self._encoder.encode_spans(text[read : match.start() if match else None])
            all_ids += ids
            for first, last in ((read + first, read + last) for first, last in spans):
                before = marker_characters[first] + len(space)
                all_spans.append(
                    (max(first - before, 0), last - before)
                    if marker_characters[first] == marker_characters[last]
                    else None
                )
            if match:
                token_ids = self._encoder.encode_token(self._specials[match[0]])
                all_ids, all_spans, read = all_ids + token_ids, all_spans + [None] * len(token_ids), match.end()
        return all_ids, all_spans


def prompt(document: Document, keys: Sequence[str], separators: Separators) -> str:
    """Write all metadata of a document in words, local metadata included."""
    phrases, names = dict[str, str](), dict[str, list[str]]()
    lists = {"entity": "Entities", "entity_paragraph": "Entity Paragraphs"}
    for item in document.items:
        if item.start is None:
            title = PROMPT_TITLES.get(item.key)
            phrases[item.key] = f"{title}{separators.key_value}{item.value}" if title else global_text(item, separators)
        elif item.key in lists:
            names.setdefault(item.key, []).append(item.value.replace("_", " "))
            phrases[item.key] = f"{lists[item.key]}{separators.key_value}{', '.join(dict.fromkeys(names[item.key]))}"
        else:
            phrases[item.key] = item.key.title()
    return separators.item.join(phrases[key] for key in keys if key in phrases)


PROMPT = Separators(item="; ", prefix_end="")
"""Separators of BigScience's prompts."""
