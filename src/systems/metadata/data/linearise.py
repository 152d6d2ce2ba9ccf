"""Insert local metadata into a text as markers, in one of two orders.

"compatible" is the order of BigScience's metadata project (bsmetadata/metadata_utils.py): markers of keys with relative
positions come between the ends and the starts of other keys, and nothing in the text is escaped. "nested" puts shorter
spans inside longer ones. It escapes everything in the text that looks like a marker with a backslash, which counts as a
marker.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

from src.systems.metadata.data.annotations import Document, Item
from src.systems.metadata.data.processors import ESCAPE, Markers, lookalike

Linearisation = Literal["nested", "compatible"]
Process = Callable[[Item], Markers | None]
"""Returns the markers around the span of an item; None to drop it."""
_MAY_BEGIN = re.compile(r"[<\[|\\]")
"""First characters of markers and escapes."""


class Marker(NamedTuple):
    """A text inserted before a character."""

    character: int
    text: str
    closes: bool
    """Whether it ends a span, and so belongs to the text before it."""


class MarkedText(NamedTuple):
    """A text with markers."""

    text: str
    mask: list[bool]
    """For each character, whether it belongs to a marker."""


def insert(text: str, markers: Iterable[Marker]) -> MarkedText:
    """Insert `markers`, which are sorted, into `text`."""
    pieces, mask, read = list[str](), list[bool](), 0
    for index, marker, _ in markers:
        pieces += text[read:index], marker
        mask += [False] * (index - read) + [True] * len(marker)
        read = index
    return MarkedText("".join([*pieces, text[read:]]), mask + [False] * (len(text) - read))


def markers(
    document: Document,
    keys: Sequence[str],
    process: Process,
    around: Mapping[str, Markers],
    linearisation: Linearisation,
) -> list[Marker]:
    """Return the sorted markers of the local items with one of `keys`.

    around: by key, the texts around each run of markers with relative positions at one character.
    """
    if not document.text:  # like the reference, which marks nothing here
        return []
    items = [item for item in document.items if item.start is not None and item.key in keys]
    if linearisation == "compatible":
        return _collate(items, keys, process, around)
    return _escape(document.text, _nest(items, keys, process, around), {item.key for item in items}, around)


def _collate(
    items: Sequence[Item], keys: Sequence[str], process: Process, around: Mapping[str, Markers]
) -> list[Marker]:
    # Reversed lists: later types come first among `starts` and `runs`.
    ends, runs, empty_ends, starts = (defaultdict[int, list[str]](list) for _ in range(4))
    by_key = defaultdict[str, list[Item]](list)
    for item in items:
        by_key[item.key].append(item)
    for key in keys:
        for item in sorted((item for item in by_key[key] if item.start_place is None), key=lambda item: item.span[1]):
            if texts := process(item):
                (first, last), (opening, closing) = item.span, texts
                (runs if first == last else starts)[first].append(opening)
                (empty_ends if first == last else ends)[last].append(closing)
        at = defaultdict[int, dict[int, str]](dict)
        for item in by_key[key]:
            if item.start_place is not None and (texts := process(item)):
                for character, place, text in zip(
                    item.span, (item.start_place, item.end_place or 0), texts, strict=True
                ):
                    if text:  # like the reference, a run of empty texts is not a run
                        at[character][place] = text
        opening, closing = around.get(key, ("", ""))
        for character, by_place in at.items():
            runs[character].append(opening + "".join(by_place[place] for place in sorted(by_place)) + closing)
    return [
        Marker(character, text, closes)
        for character in sorted({*ends, *runs, *empty_ends, *starts})
        for texts, closes in (
            (ends.get(character, ()), True),
            (reversed(runs.get(character, ())), False),
            (empty_ends.get(character, ()), False),
            (reversed(starts.get(character, ())), False),
        )
        for text in texts
        if text
    ]


class _Side(NamedTuple):
    """One marker of an item, while markers are sorted."""

    character: int
    text: str
    closes: bool
    place: int | None
    key: str


def _nest(items: Sequence[Item], keys: Sequence[str], process: Process, around: Mapping[str, Markers]) -> list[Marker]:
    order = {key: number for number, key in enumerate(keys)}
    # Longer spans first; equal spans by the order of keys, then by relative position.
    spans = sorted(
        (start, -end, order[item.key], item.start_place or 0, number, item, texts)
        for number, item in enumerate(items)
        if (texts := process(item))
        for start, end in (item.span,)
    )
    ends, starts, empty = (defaultdict[int, list[_Side]](list) for _ in range(3))
    closing = defaultdict[int, list[_Side]](list)
    for start, negative_end, *_, item, texts in spans:
        opens = _Side(start, texts[0], False, item.start_place, item.key)
        closes = _Side(-negative_end, texts[1], True, item.end_place, item.key)
        if start < -negative_end:
            starts[start].append(opens)
            ends[-negative_end].append(closes)
        else:
            empty[start].append(opens)
            closing[start].append(closes)
    sorted_markers = list[Marker]()
    for character in sorted({*ends, *starts, *empty}):
        before = _order_places(ends[character][::-1])  # the last span to start ends first
        sides = before + _order_places(starts[character])
        if empty[character]:
            sides = _insert_empty(sides, len(before), empty[character] + closing[character][::-1])
        for key, run in groupby((side for side in sides if side.text), key=attrgetter("key")):
            group = list(run)
            texts = [side.text for side in group]
            if key in around and group[0].place is not None:
                texts[0] = around[key][0] + texts[0]
                texts[-1] += around[key][1]
            sorted_markers += [Marker(character, text, side.closes) for text, side in zip(texts, group, strict=True)]
    return sorted_markers


def _order_places(sides: list[_Side]) -> list[_Side]:
    """Sort the sides of each key by place, in the slots of that key."""
    by_key = defaultdict[str, list[_Side]](list)
    for side in sides:
        by_key[side.key].append(side)
    sides_by_key = {key: iter(sorted(group, key=lambda side: side.place or 0)) for key, group in by_key.items()}
    return [next(sides_by_key[side.key]) for side in sides]


def _insert_empty(sides: Sequence[_Side], default: int, empty: Sequence[_Side]) -> list[_Side]:
    """Insert the sides of empty spans by their key's places; without any, between ends and starts: at `default`."""
    places = defaultdict[str, list[tuple[int, int]]](list)
    for index, side in enumerate(sides):
        if side.place is not None:
            places[side.key].append((side.place, index))
    sides_at = defaultdict[int, list[_Side]](list)
    for side in sorted(empty, key=lambda side: -1 if side.place is None else side.place):
        index = default
        if side.place is not None and (same_key := places.get(side.key)):
            smaller = bisect_left(same_key, (side.place, 0))
            index = same_key[smaller - 1][1] + 1 if smaller else same_key[0][1]
        sides_at[index].append(side)
    return [side for index in range(len(sides) + 1) for side in (*sides_at.get(index, ()), *sides[index : index + 1])]


def _escape(text: str, markers: Sequence[Marker], keys: Iterable[str], around: Mapping[str, Markers]) -> list[Marker]:
    """Escape everything in `text` that looks like an escape, a marker of one of `keys` or a text `around` its runs.

    The search includes the markers: "[" in the text before a marker "[html: b]" looks like "[[".
    """
    keys = sorted(keys)
    patterns = [lookalike(key).pattern for key in keys]
    runs = [re.escape(run.strip()) for key in keys for run in around.get(key, ()) if run.strip()]
    if not patterns or not (_MAY_BEGIN.search(text) or any(re.search(run, text) for run in runs)):
        return list(markers)
    patterns += runs
    looks = re.compile(rf"(?=(?:{'|'.join(patterns)}|\\))")
    marked_text, mask = insert(text, markers)
    places = [match.start() for match in looks.finditer(marked_text) if not mask[match.start()]]
    escapes, index, read = list[Marker](), 0, 0
    for place in places:
        index, read = index + mask[read:place].count(False), place
        escapes.append(Marker(index, ESCAPE, False))
    # Stable: an escape comes after the other markers at its character.
    return sorted([*markers, *escapes], key=attrgetter("character"))
