"""Documents with metadata as pieces of token ids: a prefix of what is known of the whole, and the text with its markers in blocks.

Each piece repeats the prefix. The text is tokenised apart from prefix and markers ("nested"), so that its tokens are the same with and
without them; or together with its markers and the space before it ("compatible"), as bsmetadata/metadata_utils.py does.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from src.config import Config, added_field, unknown_text
from src.data.metadata.annotations import KEYS, Annotated, Item
from src.data.metadata.linearise import Linearisation, insert, markers
from src.data.metadata.processors import PROMPT_TITLES, Address, HtmlFilter, Separators, global_text, local_markers
from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError

_NO_CHARACTERS = 0xFDD0
"""The first of 32 code points that Unicode keeps from ever being characters."""
_MOST_MARKERS = 1 << 16
"""Whose ids are remembered."""


class Writing(Config):
    """How metadata are written."""

    keys: list[str] = Field(default=list(KEYS), min_length=1)
    """Which are written, in the order of the prefix."""
    own_keys: list[str] = added_field([])
    """Those among `keys` that this project does not know: items of them are written as "KEY: VALUE" and [KEY: VALUE]."""
    style: Literal["prefix", "prompt"] = "prefix"
    """prompt: all metadata are named in words before the text, and nothing is marked in it."""
    linearisation: Linearisation = "nested"
    separators: Separators = Separators()
    url: Address = added_field("whole")
    """host: "URL: docs.python.org", as metadata conditioning then cooldown has it (Gao et al. 2025, arXiv 2501.01956)."""
    html: HtmlFilter = HtmlFilter()
    entity_position: Literal["beginning", "end"] = "beginning"
    """Where in a paragraph an entity is named."""
    announce: bool = False
    """Whether the prefix names the local keys that follow."""
    announced: dict[str, str] = {}
    """What it calls them, where not by their keys."""
    run_starts: dict[str, str] = {}
    run_ends: dict[str, str] = {}
    """By key, what is put around each run of markers with relative positions."""
    special_tokens: bool = False
    """Whether `run_starts` and `run_ends` are tokens of their own, which the tokenizer must have."""
    prefix_share: float = Field(default=0.5, gt=0, lt=1)
    """Most of a row that the prefix may take, without the space behind it; a longer one loses its end, but for the separator."""

    @model_validator(mode="after")
    def _keys_are_known(self) -> "Writing":
        if len(set(self.keys)) < len(self.keys):
            raise ValueError(f"keys: {max(self.keys, key=self.keys.count)!r} stands there twice.")
        for key in self.keys:
            if key not in {*KEYS, *self.own_keys}:
                raise ValueError(f"keys: {unknown_text('key', key, KEYS)} One of your own is declared in own_keys.")
        for name, by_key in (("announced", self.announced), ("run_starts", self.run_starts), ("run_ends", self.run_ends)):
            for key in by_key:
                if key not in self.keys:
                    raise ValueError(f"{name}: {unknown_text('key', key, self.keys)}")
        if self.announced and not self.announce:
            raise ValueError(
                "announced: it says what local keys are called in the prefix, and announce is off. Leave it out, or turn it on."
            )
        if self.special_tokens and not (self.run_starts and self.run_ends):
            raise ValueError("special_tokens: run_starts and run_ends say which, and one of them is empty.")
        return self

    def new_tokens(self) -> list[str]:
        """Special tokens that the tokenizer must have, without blanks around them."""
        given = [*self.run_starts.values(), *self.run_ends.values()] if self.special_tokens else []
        return list(dict.fromkeys(given))


Span = tuple[int, int]
"""Characters of a text, half open."""
Tokens = tuple[list[int], list[Span | None]]
"""Ids, and the span of each."""


class Piece(NamedTuple):
    """Part of a document, with its prefix. Lists of one length."""

    ids: list[int]
    learned: list[bool]
    """Never the first."""
    spans: list[Span | None]
    """Which characters of the text a token is of, the end being behind the last; None where it is of metadata."""

    @property
    def of_text(self) -> list[bool]:
        """Whether each token is of the text, not of metadata."""
        return [span is not None for span in self.spans]


class ExampleMaker:
    """Makes pieces of at most `room` tokens."""

    def __init__(self, writing: Writing, encoder: SafeTokenizer, room: int, metadata_loss: bool = False, end_token: bool = True) -> None:
        """metadata_loss: markers are learned. end_token: documents end with the end token.

        Raises:
            ConfigError: the tokenizer lacks a special token or one for the separator, or the rows are too short for it.
        """
        self._writing, self._encoder, self._room = writing, encoder, room
        self._given = metadata_loss, end_token
        self._metadata_loss, self._end = metadata_loss, [encoder.eos_id] if end_token else []
        specials = writing.new_tokens()
        # Until they are ids, new tokens are characters that no text has, so that nothing that is said can spell one.
        self._specials = {chr(_NO_CHARACTERS + number): token for number, token in enumerate(specials)}
        spelled = {token: character for character, token in self._specials.items()}
        self._around: dict[str, tuple[str, str]] = {}
        for key in {*writing.run_starts, *writing.run_ends}:
            start, end = writing.run_starts.get(key, ""), writing.run_ends.get(key, "")
            self._around[key] = spelled.get(start, start), spelled.get(end, end)
        if missing := [token for token in specials if encoder.control_id(token) is None]:
            raise ConfigError(f"data.writing.special_tokens: the model's tokenizer has no token {missing[0]!r}. Take one that has them.")
        self._marker_ids: dict[str, list[int]] = {}
        self._special = re.compile(f"[{''.join(self._specials)}]") if specials else None
        self._nested = writing.linearisation == "nested"
        self._separator = encoder.encode(writing.separators.prefix_end)
        self._space = encoder.encode(" ")
        self._behind = [] if writing.separators.prefix_end[-1:].isspace() else self._space  # the prefix, where the text is apart
        if writing.separators.prefix_end and not self._separator:
            raise ConfigError(f"data.writing.separators.prefix_end: the tokenizer makes nothing of {writing.separators.prefix_end!r}.")
        self._most = int(room * writing.prefix_share)
        if len(self._separator) >= self._most:
            raise ConfigError(f"data.sequence_tokens: {room} tokens leave no room for a prefix and its separator.")
        if self._most + len(self._space) >= room:
            raise ConfigError(f"data.writing.prefix_share: {writing.prefix_share:g} of {room} tokens leaves no room for the text.")

    def rewritten(self, **changes: Any) -> "ExampleMaker":
        """Another maker, with `changes` of the writing."""
        return ExampleMaker(self._writing.model_copy(update=changes), self._encoder, self._room, *self._given)

    def prefix(self, document: Annotated) -> str:
        """What is said of the whole document, without the separator at its end; empty where nothing is known. Of a key the last counts."""
        writing, by_key = self._writing, dict[str, str]()
        if writing.style == "prompt":
            return prompt(document, writing.keys, writing.separators)
        for item in document.items:
            if item.start is None:
                by_key[item.key] = global_text(item, writing.separators, writing.url)
        local = {item.key for item in document.items if item.start is not None}
        said = []
        for key in writing.keys:
            if key in by_key:
                said.append(by_key[key])
            if writing.announce and key in local:
                said.append(writing.announced.get(key, key))
        return writing.separators.prefix_start + writing.separators.item.join(said) if said else ""

    def pieces(self, document: Annotated, written: bool = True) -> list[Piece]:
        """The document, cut where it is with its metadata. Pieces with nothing to learn are left out.

        written: whether the metadata are. Without them it is the text alone, cut at the same characters.
        """
        prefix = self.prefix_ids(document)
        text = self._nested_text(document) if self._nested else self._compatible_text(document, " " if prefix else "")
        end = [(len(document.text), len(document.text) + 1)] * len(self._end)
        ids, spans = [*text[0], *self._end], [*text[1], *end]
        blocks, begin = list[tuple[list[int], list[int], list[Span | None]]](), 0
        while begin < len(ids):
            # With the first block of "compatible" the space is a part of the text.
            before = [*prefix, *self._space] if prefix and begin and not self._nested else prefix
            block = slice(begin, begin := begin + self._room - len(before))
            blocks.append((before, ids[block], spans[block]))
        if not written:
            blocks = [([], *block) for block in self._cut_text(document, [own for _, _, own in blocks])]
        found = (self._piece(*block) for block in blocks)
        return [piece for piece in found if any(piece.learned)]

    def _piece(self, prefix: list[int], ids: list[int], spans: list[Span | None]) -> Piece:
        learned = [False] * len(prefix) + [span is not None or self._metadata_loss for span in spans]
        return Piece([*prefix, *ids], [False, *learned[1:]] if learned else [], [None] * len(prefix) + spans)

    def _cut_text(self, document: Annotated, blocks: Sequence[Sequence[Span | None]]) -> Iterator[Tokens]:
        """The text alone, in blocks that begin with the same characters as `blocks`."""
        ids, spans = self._encoder.encode_spans(document.text)
        ids, spans = [*ids, *self._end], [*spans, *([(len(document.text), len(document.text) + 1)] * len(self._end))]
        begins = [next((span[0] for span in block if span), None) for block in blocks]
        read = 0
        for number in range(len(blocks)):
            following = next((begin for begin in begins[number + 1 :] if begin is not None), None)
            end = len(ids) if following is None else bisect_left(spans, following, read, key=lambda span: span[0])
            yield ids[read:end], list(spans[read:end])
            read = end

    def prefix_ids(self, document: Annotated) -> list[int]:
        """Of what stands before each block of a document; none where nothing is known of the whole."""
        text, most = self.prefix(document), self._most - len(self._separator)
        if not text:
            return []
        if self._nested:
            return [*self._encoder.encode(text)[:most], *self._separator, *self._behind]
        ids = self._encoder.encode(text + self._writing.separators.prefix_end)
        return ids if len(ids) <= self._most else [*ids[:most], *self._separator]

    def text_ids(self, document: Annotated) -> list[int]:
        """Of the text and its markers, as they stand behind the prefix."""
        return (self._nested_text(document) if self._nested else self._compatible_text(document, " " if self.prefix(document) else ""))[0]

    def _markers(self, document: Annotated) -> list:
        writing = self._writing
        if writing.style == "prompt":
            return []

        def process(item: Item) -> tuple[str, str] | None:
            texts = local_markers(item, writing.html, writing.entity_position, escape=self._nested)
            if texts is None or self._special is None:
                return texts
            return self._special.sub("", texts[0]), self._special.sub("", texts[1])

        return markers(document, writing.keys, process, self._around, writing.linearisation)

    def _nested_text(self, document: Annotated) -> Tokens:
        """Markers go between the tokens of the text: one that opens before the token of its character, one that closes behind it."""
        ids, spans = self._encoder.encode_spans(document.text)
        starts, ends = zip(*spans, strict=True) if spans else ((), ())
        at, place = dict[int, str](), 0
        for index, text, closes in self._markers(document):
            place = max(place, bisect_left(starts, index) if closes else bisect_right(ends, index))
            at[place] = at.get(place, "") + text
        found, found_spans, read = list[int](), list[Span | None](), 0
        for place, text in at.items():
            marker = self._encode_marker(text)
            found += [*ids[read:place], *marker]
            found_spans += [*spans[read:place], *[None] * len(marker)]
            read = place
        return found + ids[read:], found_spans + spans[read:]

    def _encode_marker(self, text: str) -> list[int]:
        """As every other time: the same markers come again and again."""
        if (known := self._marker_ids.get(text)) is not None:
            return known
        ids, read = list[int](), 0
        for match in self._special.finditer(text) if self._special else ():
            ids += [*self._encoder.encode(text[read : match.start()]), *self._encoder.encode_token(self._specials[match[0]])]
            read = match.end()
        if len(self._marker_ids) == _MOST_MARKERS:
            self._marker_ids.clear()
        self._marker_ids[text] = ids = ids + self._encoder.encode(text[read:])
        return ids

    def _compatible_text(self, document: Annotated, space: str) -> Tokens:
        """Tokens with a character of a marker are of metadata; the space before the text is of its first character."""
        text, mask = insert(document.text, self._markers(document))
        text, mask = space + text, [False] * len(space) + mask
        marked = [0, *accumulate(mask)]  # characters of markers before each
        found, found_spans, read = list[int](), list[Span | None](), 0
        specials = [match for match in self._special.finditer(text) if mask[match.start()]] if self._special else []
        for match in [*specials, None]:
            ids, spans = self._encoder.encode_spans(text[read : match.start() if match else None])
            found += ids
            for first, last in ((read + first, read + last) for first, last in spans):
                before = marked[first] + len(space)
                found_spans.append((max(first - before, 0), last - before) if marked[first] == marked[last] else None)
            if match:
                own = self._encoder.encode_token(self._specials[match[0]])
                found, found_spans, read = found + own, found_spans + [None] * len(own), match.end()
        return found, found_spans


def prompt(document: Annotated, keys: Sequence[str], separators: Separators) -> str:
    """What a prompt says of a document: its metadata in words, those of spans too."""
    said, named = dict[str, str](), dict[str, list[str]]()
    lists = {"entity": "Entities", "entity_paragraph": "Entity Paragraphs"}
    for item in document.items:
        if item.start is None:
            title = PROMPT_TITLES.get(item.key)
            said[item.key] = f"{title}{separators.key_value}{item.value}" if title else global_text(item, separators)
        elif item.key in lists:
            named.setdefault(item.key, []).append(item.value.replace("_", " "))
            said[item.key] = f"{lists[item.key]}{separators.key_value}{', '.join(dict.fromkeys(named[item.key]))}"
        else:
            said[item.key] = item.key.title()
    return separators.item.join(said[key] for key in keys if key in said)


PROMPT = Separators(item="; ", prefix_end="")
"""Separators of BigScience's prompts."""
