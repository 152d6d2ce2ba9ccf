"""Documents of one source: split into pieces from the indexes of its tars, and read on demand."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from src.errors import DataError
from src.experiments.config import Config as StrictConfig
from src.systems.interleaved.streaming import tar_index
from src.systems.interleaved.streaming.images import Grid, ImageTokens
from src.systems.interleaved.streaming.manifest import Manifest, Shard, ShardError
from src.systems.interleaved.streaming.shard_files import ShardFiles
from src.systems.interleaved.streaming.tar_index import GOOD, IMAGE, PROMPT, TEXT, TEXTS, TarIndex
from src.systems.interleaved.streaming.texts import TextTokens

if TYPE_CHECKING:
    import numpy as np

_MAX_INDEXES = 64
"""Maximum number of cached shard indexes."""
_MAX_PLANS = 4096
"""Maximum number of documents with cached pieces; packing needs them repeatedly."""
_WEB_TOKENS = 5
Swaps = Mapping[tuple[int, int], tuple[int, int]]
"""(document, part) -> (document, part) of the image that replaces it, which has the same size."""


class Rules(StrictConfig):
    """Selection of documents, and treatment of documents longer than a row."""

    which: Literal["all", "web"] = "all"
    """all: every document with a text. web: m4's rules for web pages: at least one image, one text and 5 tokens; no
    three images in a row, no two images at the end, and the only image of a page is not at the end."""
    max_images: int | None = Field(default=None, gt=0)
    """Documents with more images are dropped."""
    too_long: Literal["cut", "drop"] = "cut"
    """cut: split a document longer than a row between its parts, but not between a prompt and its answer. A text
    longer than a row is split after any token, as in data set 'packed'; the first tokens of an answer stay with its
    prompt. Dropped and counted: an image or a prompt larger than a row, a prompt that leaves no space for its answer,
    and rows without text. Conversations are not cut. drop: drop documents longer than a row."""


class Element(NamedTuple):
    """A part of a document, or a token range of a text."""

    part: int
    kind: int
    tokens: int
    grid: Grid | None
    """Tiles of an image."""
    first: int = 0
    """Number of tokens of the text before this range."""
    rest: int = 0
    """Number of tokens of the text after this range."""
    template: int = 0
    """Number of tokens of the chat template before an image, within `tokens`."""

    @property
    def image_tokens(self) -> int:
        return self.tokens - self.template if self.grid else 0


class Piece(NamedTuple):
    """A document, or a part of it, that fits into one row."""

    elements: Sequence[Element]
    begins: bool
    """Whether it is the first piece of the document."""
    ends: bool
    tokens: int
    frames: int
    left_out: int = 0
    """For the last piece: number of parts of the document that were dropped."""


class _Plan(NamedTuple):
    """Columns of an index as lists, which are faster to read than arrays."""

    bad: list[int]
    first_parts: list[int]
    """First part of each document, followed by the total number of parts."""
    tokens: list[int]
    """Token counts; empty if they were not counted with this tokenizer."""
    kinds: list[int]
    widths: list[int]
    heights: list[int]


@dataclass
class Content:
    """Model input of a piece."""

    ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    images: "list[np.ndarray]" = field(default_factory=list)
    """Frames of each image, (frames, 3, E, E) float32."""
    lengths: list[int] = field(default_factory=list)
    """Tokens per document: documents do not attend to each other. A text can contain the border of two documents."""


class Documents:
    """The documents of a manifest, numbered across its shards."""

    def __init__(
        self, manifest: Manifest, files: ShardFiles, texts: TextTokens, images: ImageTokens, rules: Rules
    ) -> None:
        self.manifest, self.files, self.texts, self.images, self.rules = manifest, files, texts, images, rules
        self.sizes = [shard.documents for shard in manifest.shards]
        self._ends = list(accumulate(self.sizes))
        shard_facts = [
            [shard.documents, shard.bytes, shard.sha256 or shard.etag, shard.index_digest] for shard in manifest.shards
        ]
        options = [rules.model_dump(mode="json"), images.config.model_dump(mode="json"), texts.digest]
        self.content, self.fingerprint = (
            hashlib.sha256(json.dumps(facts).encode()).hexdigest() for facts in (shard_facts, [shard_facts, options])
        )
        self._make_caches()

    def _make_caches(self) -> None:
        self._index = lru_cache(_MAX_INDEXES)(self._load_index)
        self._plan = lru_cache(_MAX_INDEXES)(self._load_plan)
        self.elements = lru_cache(_MAX_PLANS)(self._make_elements)
        """Document number -> its elements, in order; empty if the document is dropped."""
        self.pieces = lru_cache(_MAX_PLANS)(self._make_pieces)
        """(document, (tokens, frames) of a row) -> its pieces.
        Reads no document if the index has token counts."""

    def __getstate__(self) -> dict[str, object]:
        return {
            name: value for name, value in vars(self).items() if name not in ("_index", "_plan", "elements", "pieces")
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._make_caches()

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, document: int) -> tuple[int, int]:
        """The shard of a document, and its number within the shard."""
        shard = bisect_right(self._ends, document)
        return shard, document - self._ends[shard] + self.sizes[shard]

    def shard(self, document: int) -> Shard:
        """The shard of a document."""
        return self.manifest.shards[self.locate(document)[0]]

    def offset(self, document: int) -> int:
        """Byte offset of a document in its shard."""
        shard, number = self.locate(document)
        return int(self._index(shard).documents["offset"][number])

    def _make_pieces(self, document: int, room: tuple[int, int]) -> list[Piece]:
        elements = self.elements(document)
        num_markers = len(self.texts.begin) + len(self.texts.end)

        def fit(group: Sequence[Element]) -> bool:
            tokens, frames = _size(group)
            return num_markers + tokens <= room[0] and frames <= room[1]

        if fit(elements):
            groups = [elements] if elements else []
        elif self.rules.too_long == "drop" or self.texts.is_chat:
            return []
        else:
            groups = [group for group in self._split(elements, fit) if any(element.kind == TEXT for element in group)]
        left_out = len(elements) - len({element.part for group in groups for element in group})
        last = len(groups) - 1
        return [
            self._piece(group, number == 0, number == last, left_out if number == last else 0)
            for number, group in enumerate(groups)
        ]

    def _piece(self, group: Sequence[Element], begins: bool, ends: bool, left_out: int) -> Piece:
        tokens, frames = _size(group)
        return Piece(
            group, begins, ends, tokens + begins * len(self.texts.begin) + ends * len(self.texts.end), frames, left_out
        )

    def _split(self, elements: Sequence[Element], fit: Callable[[Sequence[Element]], bool]) -> list[list[Element]]:
        """Split elements into groups that each fit into a row."""
        groups: list[list[Element]] = [[]]
        for original in elements:
            element = original
            if not fit([*groups[-1], element]):
                count = 0  # prompts at the end of the last group
                while count < len(groups[-1]) and groups[-1][-1 - count].kind == PROMPT:
                    count += 1
                earlier, prompts = groups[-1][: len(groups[-1]) - count], groups[-1][len(groups[-1]) - count :]
                if fit([*prompts, element]):
                    groups[-1:] = [earlier, prompts]
                elif element.kind == TEXT:
                    self._split_text(element, prompts, groups, fit)
                    continue
                elif fit([element]):  # the prompts and the element do not fit into one row
                    groups[-1:] = [earlier, []]
                else:
                    continue
            if element.grid and not groups[-1]:  # restore the token shared with the previous image
                element = element._replace(tokens=len(self.images.token_ids(element.grid)))
            groups[-1].append(element)
        return groups

    @staticmethod
    def _split_text(
        text: Element, prompts: Sequence[Element], groups: list[list[Element]], fit: Callable[[Sequence[Element]], bool]
    ) -> None:
        """Add the tokens of a text to the last group while they fit, then to new groups.
        prompts: the prompts of this text, at the end of the last group."""
        while text.tokens:
            room = bisect_right(
                range(1, text.tokens + 1), False, key=lambda n: not fit([*groups[-1], text._replace(tokens=n)])
            )
            if room:
                groups[-1].append(text._replace(tokens=room, rest=text.rest + text.tokens - room))
                text, prompts = text._replace(tokens=text.tokens - room, first=text.first + room), []
            elif len(groups[-1]) > len(prompts):
                groups[-1:] = [groups[-1][: len(groups[-1]) - len(prompts)], list(prompts)]
            else:  # the prompts and one token do not fit into a row
                groups[-1] = []
                return

    def read(self, document: int, piece: Piece, swaps: Swaps | None = None) -> Content:
        """Read a piece of a document. swaps: replacements of its images.

        Raises:
            ShardError: the shard cannot be read.
            DataError: an image or a text cannot be decoded, or differs from the index.
        """
        shard, number = self.locate(document)
        parts = self._index(shard).parts_of(number)
        part_contents = self._read_parts(shard, parts)
        part_ids, part_masks = self._encode(parts, part_contents)
        content = Content(list(self.texts.begin) if piece.begins else [])
        content.loss_mask = [False] * len(content.ids)
        for element in piece.elements:
            if element.grid is not None:
                image_ids = self.images.token_ids(element.grid)
                ids = [*part_ids[element.part], *image_ids[len(image_ids) - element.image_tokens :]]
                loss_mask = [*part_masks[element.part], *[False] * element.image_tokens]
                image = self._image(document, element.part, part_contents, swaps)
                content.images.append(self.images.config.frames(image, self._index(shard).max_pixels))
                if len(content.images[-1]) != element.grid.frames:
                    raise DataError("the size of an image differs from the index")
            else:
                ids = part_ids[element.part]
                if len(ids) != element.first + element.tokens + element.rest:
                    raise DataError("the tokens of a text differ from the index")
                ids = ids[element.first : element.first + element.tokens]
                loss_mask = part_masks[element.part][element.first : element.first + element.tokens]
            content.ids += ids
            content.loss_mask += loss_mask
        if piece.ends:
            content.ids += self.texts.end
            content.loss_mask += [True] * len(self.texts.end)
        ends = [
            place
            for place, token in enumerate(content.ids, 1)
            if not self.texts.is_chat and token == self.texts.end[0] and place < len(content.ids)
        ]
        for place in (0, *ends):
            content.loss_mask[place] = False
        content.lengths = [end - begin for begin, end in pairwise([0, *ends, len(content.ids)])]
        return content

    def text(self, document: int, part: int) -> str:
        """A text of a document."""
        return self._read_part(*self.locate(document), part).decode("utf-8-sig")

    def _read_part(self, shard: int, number: int, part: int) -> bytes:
        index, shard_entry = self._index(shard), self.manifest.shards[shard]
        (content,) = index.contents(
            index.parts_of(number)[part : part + 1], lambda at, size: self.files.read(shard_entry, at, size)
        )
        return content

    def _image(self, document: int, part: int, part_contents: Sequence[bytes], swaps: Swaps | None) -> bytes:
        other = swaps.get((document, part)) if swaps else None
        if other is None:
            return part_contents[part]
        return self._read_part(*self.locate(other[0]), other[1])

    def _make_elements(self, document: int) -> list[Element]:
        shard, number = self.locate(document)
        plan = self._plan(shard)
        if plan.bad[number] != GOOD:
            return []
        first, end = plan.first_parts[number], plan.first_parts[number + 1]
        counts = plan.tokens[first:end]
        if not counts:
            parts = self._index(shard).parts_of(number)
            try:
                counts = [len(ids) for ids in self._encode(parts, self._read_parts(shard, parts, TEXTS))[0]]
            except ShardError:  # the tar is unavailable; the document itself is not bad
                raise
            except DataError:
                counts = [0] * (end - first)
        elements = []
        for part in range(end - first):
            kind = plan.kinds[first + part]
            if kind == IMAGE:
                grid, tokens = self.images.grid_and_tokens(plan.widths[first + part], plan.heights[first + part])
                lead = counts[part]
                shared = self.images.shared_tokens if elements and elements[-1].grid else 0
                elements.append(Element(part, kind, lead + tokens - shared, grid, template=lead))
            elif counts[part]:
                elements.append(Element(part, kind, counts[part], None))
        return elements if self._is_read(elements) else []

    def _is_read(self, elements: Sequence[Element]) -> bool:
        """Whether the rules select a document with these elements."""
        images = "".join("i" if element.grid else "t" for element in elements)
        if "t" not in images or images.count("i") > (self.rules.max_images or len(elements)):
            return False
        if self.rules.which == "all":
            return True
        is_long_enough = sum(element.tokens for element in elements) >= _WEB_TOKENS
        # No text follows these images.
        has_unread_images = images.endswith("ii") or (images.endswith("i") and images.count("i") == 1)
        return "i" in images and "iii" not in images and not has_unread_images and is_long_enough

    def _read_parts(self, shard: int, parts: "np.ndarray", kinds: Sequence[int] = (*TEXTS, IMAGE)) -> list[bytes]:
        """The contents of parts of these kinds, b"" for other parts. Makes a single read."""
        records = zip(*(parts[name].tolist() for name in ("offset", "size", "kind")), strict=True)
        spans = [(begin, begin + size) for begin, size, kind in records if kind in kinds]
        if not spans:
            return [b""] * len(parts)
        first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
        content = self.files.read(self.manifest.shards[shard], first, last - first)
        return self._index(shard).contents(
            parts, lambda offset, size: content[offset - first : offset - first + size], kinds
        )

    def _encode(self, parts: "np.ndarray", contents: Sequence[bytes]) -> tuple[list[list[int]], list[list[bool]]]:
        try:
            return self.texts.encode_with_loss(parts["kind"].tolist(), contents)
        except UnicodeDecodeError as error:
            raise DataError(f"a text is not UTF-8 ({error.reason})") from None

    def _load_plan(self, shard: int) -> "_Plan":
        index = self._index(shard)
        has_tokens = index.tokens is not None and index.facts.get("tokenizer") == self.texts.digest
        return _Plan(
            index.documents["bad"].tolist(),
            [*index.documents["first_part"].tolist(), len(index.parts)],
            index.tokens.tolist() if has_tokens and index.tokens is not None else [],
            *(index.parts[name].tolist() for name in ("kind", "width", "height")),
        )

    def _load_index(self, shard: int) -> TarIndex:
        shard_entry = self.manifest.shards[shard]
        index = tar_index.load_file(
            self.manifest.folder / shard_entry.index, shard_entry.bytes, shard_entry.url, shard_entry.index_digest
        )
        if len(index) != shard_entry.documents:
            raise DataError(
                f"{shard_entry.index}: has {len(index)} documents, but shards.json lists {shard_entry.documents}. "
                "Index the tars again with python -m data_prep.interleaved.index."
            )
        return index


def _size(elements: Sequence[Element]) -> tuple[int, int]:
    """Number of tokens and frames."""
    return sum(element.tokens for element in elements), sum(element.grid.frames for element in elements if element.grid)
