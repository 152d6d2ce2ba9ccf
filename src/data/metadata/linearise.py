"""Local metadata as markers in a text: where each stands, and the text with all of them.

"compatible" is the order of BigScience's metadata project (bsmetadata/metadata_utils.py): markers of keys with relative positions stand
between the ends and the starts of the others, and nothing in the text is escaped. "nested" puts shorter spans inside longer ones, and a
backslash, which counts as a marker, before everything in the text that looks like a marker.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

from src.data.metadata.annotations import Annotated, Item
from src.data.metadata.processors import Markers, lookalike

Linearisation = Literal["nested", "compatible"]
Process = Callable[[Item], Markers | None]
"""What is put around the span of an item; None where it is left out."""
ESCAPE = "\\"
_MAY_BEGIN = re.compile(r"[<\[|\\]")
"""What markers and escapes begin with."""


class Marker(NamedTuple):
    """A text that stands before a character."""

    character: int
    text: str
    closes: bool
    """Whether it ends a span: then it belongs to what stands before it."""


class Marked(NamedTuple):
    """A text with markers."""

    text: str
    mask: list[bool]
    """For each character, whether it is of a marker."""


def insert(text: str, markers: Iterable[Marker]) -> Marked:
    """`text` with `markers`, which are in the order in which they are to stand."""
    pieces, mask, read = list[str](), list[bool](), 0
    for index, marker, _ in markers:
        pieces += text[read:index], marker
        mask += [False] * (index - read) + [True] * len(marker)
        read = index
    return Marked("".join([*pieces, text[read:]]), mask + [False] * (len(text) - read))


def markers(
    document: Annotated, keys: Sequence[str], process: Process, around: Mapping[str, Markers], linearisation: Linearisation
) -> list[Marker]:
    """Markers of the local items whose key is in `keys`, in their order.

    around: by key, what is put around each run of markers with relative positions at one character.
    """
    if not document.text:  # as the original: nothing can be marked
        return []
    items = [item for item in document.items if item.start is not None and item.key in keys]
    if linearisation == "compatible":
        return _collate(items, keys, process, around)
    return _escape(document.text, _nest(items, keys, process, around), {item.key for item in items})


def _collate(items: Sequence[Item], keys: Sequence[str], process: Process, around: Mapping[str, Markers]) -> list[Marker]:
    ends, runs, empty_ends, starts = (defaultdict[int, list[str]](list) for _ in range(4))
    placed = {key: [item for item in items if item.key == key and item.start_place is not None] for key in keys}
    for key in keys:
        for item in sorted((item for item in items if item.key == key and item.start_place is None), key=lambda item: item.span[1]):
            if found := process(item):
                (first, last), (before, behind) = item.span, found
                (runs if first == last else starts)[first].insert(0, before)
                (empty_ends if first == last else ends)[last].append(behind)
        at = defaultdict[int, dict[int, str]](dict)
        for item in placed[key]:
            if found := process(item):
                (first, last), (before, behind) = item.span, found
                at[first][item.start_place or 0], at[last][item.end_place or 0] = before, behind
        opening, closing = around.get(key, ("", ""))
        for index, by_place in sorted(at.items()):
            runs[index].insert(0, opening + "".join(by_place[place] for place in sorted(by_place)) + closing)
    return [
        Marker(index, text, closes)
        for index in sorted({*ends, *runs, *empty_ends, *starts})
        for texts, closes in ((ends, True), (runs, False), (empty_ends, False), (starts, False))
        for text in texts.get(index, ())
        if text
    ]


class _Side(NamedTuple):
    """One marker of an item, before markers are put in order."""

    character: int
    text: str
    closes: bool
    place: int | None
    key: str


def _nest(items: Sequence[Item], keys: Sequence[str], process: Process, around: Mapping[str, Markers]) -> list[Marker]:
    order = {key: place for place, key in enumerate(keys)}
    # Longer spans first, and of one span those that begin first, then those whose key is named first.
    opened = [
        (start, -end, item.start_place or 0, order[item.key], number, item, found)
        for number, item in enumerate(items)
        if (found := process(item))
        for start, end in (item.span,)
    ]
    opened.sort()
    at = defaultdict[int, list[_Side]](list)
    for start, negative_end, _, _, _, item, found in reversed(opened):  # what was opened last is closed first
        if start < -negative_end:
            at[-negative_end].append(_Side(-negative_end, found[1], True, item.end_place, item.key))
    ends = {index: len(sides) for index, sides in at.items()}
    empty = defaultdict[int, list[tuple[Item, Markers]]](list)
    for start, negative_end, _, _, _, item, found in opened:
        if start < -negative_end:
            at[start].append(_Side(start, found[0], False, item.start_place, item.key))
        else:
            empty[start].append((item, found))
    for index, here in sorted(empty.items()):
        sides = [_Side(index, found[0], False, item.start_place, item.key) for item, found in here]
        sides += [_Side(index, found[1], True, item.end_place, item.key) for item, found in reversed(here)]
        if all(side.place is not None and side.key == sides[0].key for side in (*at[index], *sides)):
            places = [side.place or 0 for side in at[index]]
            if places == sorted(places):  # as those of a page are: thousands of empty tags may stand at one character
                at[index] = sorted([*at[index], *sides], key=lambda side: side.place or 0)
                continue
        default = ends.get(index, 0)
        for side in sorted(sides, key=lambda side: side.place if side.place is not None else -1):
            place = _position(at[index], side, default)
            at[index].insert(place, side)
            default = max(default, place + 1) if side.place is None or place == default else default
    found_markers = list[Marker]()
    for index in sorted(at):
        for key, run in groupby((side for side in at[index] if side.text), key=attrgetter("key")):
            sides = list(run)
            texts = [side.text for side in sides]
            if key in around and sides[0].place is not None:
                texts[0] = around[key][0] + texts[0]
                texts[-1] += around[key][1]
            found_markers += [Marker(index, text, side.closes) for text, side in zip(texts, sides, strict=True)]
    return found_markers


def _position(sides: Sequence[_Side], side: _Side, default: int) -> int:
    """Where a marker of an empty span goes among `sides` of its character: by the places of its key's others, if it has one."""
    others = [i for i, other in enumerate(sides) if other.key == side.key and other.place is not None]
    if side.place is None or not others:
        return default
    smaller = [i for i in others if (sides[i].place or 0) < side.place]
    return smaller[-1] + 1 if smaller else others[0]


def _escape(text: str, found: Sequence[Marker], keys: Iterable[str]) -> list[Marker]:
    """With an escape before all of `text` that looks like a marker of one of `keys`, or like an escape of one.

    It is looked for with the markers in their places: "[" of the text before a marker "[html: b]" looks like "[[".
    """
    patterns = [lookalike(key).pattern for key in sorted(keys)]
    if not patterns or not _MAY_BEGIN.search(text):
        return list(found)
    looks = re.compile(rf"(?=(?:{'|'.join(patterns)}|\\))")
    marked, mask = insert(text, found)
    places = [match.start() for match in looks.finditer(marked) if not mask[match.start()]]
    escapes, index, read = list[Marker](), 0, 0
    for place in places:
        index, read = index + mask[read:place].count(False), place
        escapes.append(Marker(index, ESCAPE, False))
    return sorted([*found, *escapes], key=attrgetter("character"))  # stable: an escape stands behind the other markers of its character
