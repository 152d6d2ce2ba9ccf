"""Documents of text and images in packed rows, streamed from tars of one or several sources."""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeInt, model_validator

from src.data.orders import Order, RankShare
from src.data.packing.lanes import LaneOrder, Packing
from src.data.text import tokenizers
from src.errors import ConfigError, DataError, check_all
from src.experiments.batches import InterleavedBatch
from src.experiments.config import Places, operational_field
from src.experiments.interfaces import DatasetConfig, require_fit
from src.experiments.kinds import VISION_LANGUAGE, TokenizerSource
from src.runs.history.branches import Branch
from src.systems.interleaved.streaming import chats, manifest
from src.systems.interleaved.streaming.arrangement import PERIOD, JoinedSources, Source, Streams, arrange
from src.systems.interleaved.streaming.documents import Content, Documents, Piece, Rules, Swaps
from src.systems.interleaved.streaming.images import ImagesConfig, ImageTokens
from src.systems.interleaved.streaming.quarantine import ErrorPolicy, Quarantine
from src.systems.interleaved.streaming.read_ahead import ReadAhead
from src.systems.interleaved.streaming.remote.transfer import REMOTE
from src.systems.interleaved.streaming.shard_files import open_files
from src.systems.interleaved.streaming.texts import TextTokens

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from src.systems.interleaved.streaming.validation import ValidationRows

COUNTS = ("documents", "images", "image_tokens", "text_tokens", "left_out_parts", "unreadable")
"""Counters per source. A document and its dropped parts are counted in the row where the document ends."""
SPLITS = ("train", "val")


class Config(DatasetConfig):
    """Document sources, and how documents are packed into rows."""

    has_order: ClassVar[bool] = True
    has_questions: ClassVar[bool] = True

    sources: dict[str, manifest.SourceConfig] = Field(min_length=1)
    """Sources by name; losses and counts are reported under these names."""
    images: ImagesConfig
    sequence_tokens: int = Field(gt=1)
    """Tokens per row."""
    max_frames: int = Field(gt=0)
    """Maximum frames per row."""
    open_rows: int = Field(default=16, gt=0)
    """Rows that each lane fills at a time. More rows leave less padding."""
    shuffle: Literal["none", "shards", "window"] = "window"
    """Shuffling of each epoch of a source. shards: shuffle the tars.
    window: shuffle the tars, then the documents within windows of `window` documents."""
    window: int = Field(default=10_000, gt=1)
    """Documents per shuffle window. Their tars are open at the same time."""
    rules: Rules = Rules()
    errors: ErrorPolicy = operational_field(ErrorPolicy())
    """Errors that stop a training. Not part of the id."""
    prefetch_shards: NonNegativeInt = operational_field(2)
    """Remote tars to download ahead, within the cache size. Not part of the id."""
    val_documents: int | None = Field(default=None, gt=0)
    """Validation reads the first `val_documents` documents of each source; None for all."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        without_rate = [name for name, source in self.sources.items() if source.rate is None]
        if without_rate and len(without_rate) < len(self.sources):
            raise ValueError(f"sources.{without_rate[0]}.rate: missing. Write a rate for each source, or for none.")
        if any(source.chat for source in self.sources.values()) and self.rules.too_long == "cut":
            raise ValueError("rules.too_long: 'cut', but conversations are not cut. Set it to 'drop'.")
        return self

    @property
    def reader(self) -> str:
        return VISION_LANGUAGE

    @property
    def reads_contexts(self) -> bool:
        return True

    def check(self, places: Places) -> None:
        def check_split(name: str, split: str) -> None:
            shard_list = manifest.load(places.data / self.sources[name].path / split)
            for shard in shard_list.shards:
                if not (shard_list.folder / shard.index).is_file():
                    raise DataError(
                        f"data.sources.{name}: {shard_list.folder / shard.index}: no such file. "
                        "Index the tars again with python -m data_prep.interleaved.index."
                    )
            self.sources[name].check(name, shard_list)
            if self.sources[name].chat:
                chats.check_documents(f"data.sources.{name}", shard_list)

        parts = [(name, split) for name in sorted(self.sources) for split in SPLITS]
        check_all(*(lambda name=name, split=split: check_split(name, split) for name, split in parts))

    def count_questions(self, places: Places, most: int) -> int:
        lists = [manifest.load(places.data / source.path / "val") for source in self.sources.values()]
        # A document has at most one question.
        return min(most, sum(min(each.documents, self.val_documents or each.documents) for each in lists))

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens, max_positions, new_tokens)
        frame = self.images.image_tokens + 3
        if frame > self.sequence_tokens:
            raise ConfigError(
                f"data.sequence_tokens: {self.sequence_tokens}, but a frame and the tokens around it need {frame}. "
                f"Set it to at least {frame}."
            )

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        for name, each in self.sources.items():
            if source and each.chat:
                texts = self._texts(name, tokenizers.load(source.folder, source.new_tokens))
                chats.check_system(texts, [places.data / each.path / split for split in SPLITS])

    def _texts(self, name: str, tokenizer: "PreTrainedTokenizerFast") -> TextTokens:
        return chats.make_tokens(tokenizer, self.images.style, self.sources[name].chat, f"data.sources.{name}.chat")

    def batch_lengths(self) -> tuple[int, ...]:
        return (self.sequence_tokens,)

    def tars_at_once(self, shard_list: manifest.Manifest) -> int:
        """Number of tars that are read at the same time: those of a window, else one."""
        if self.shuffle != "window":
            return 1
        shards = len(shard_list.shards)
        return min(shards, math.ceil(self.window * shards / shard_list.documents) + 1)

    def build(
        self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int
    ) -> "StreamedDataset | ValidationRows":
        """The rows of one split.

        Raises:
            DataError: a list of shards or an index is missing or damaged, the tokenizer has no image tokens or no
                chat template, or a source is too small for its rate.
        """
        from src.systems.interleaved.streaming.validation import ValidationRows

        images = ImageTokens(self.images, tokenizer)
        sources = dict[str, Documents]()
        for name in sorted(self.sources):
            shard_list = manifest.load(places.data / self.sources[name].path / split)
            self.sources[name].check(name, shard_list)
            files = open_files(shard_list.folder, places.data, len(self.sources), self.tars_at_once(shard_list))
            sources[name] = Documents(shard_list, files, self._texts(name, tokenizer), images, self.rules)
        data = StreamedDataset(self, sources)
        return data if split == "train" else ValidationRows(data, sorted(sources))


@dataclass
class Sample:
    """One row."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each document."""
    source_ids: list[int] = field(default_factory=list)
    frames: "list[np.ndarray]" = field(default_factory=list)
    """Per image, (frames, 3, E, E) float32."""
    counts: list[list[int]] = field(default_factory=list)
    """(sources, COUNTS)."""
    cached: tuple[int, int] = (0, 0)
    """Reads of remote shards: cache hits, and all reads."""

    def until_answer(self) -> "Sample":
        """The row of a single document up to its first learned token."""
        end = [*self.loss_mask, True].index(True)
        ids, mask, sources = self.input_ids[:end], self.loss_mask[:end], self.source_ids[:end]
        return replace(self, input_ids=ids, loss_mask=mask, lengths=[end], source_ids=sources)


class StreamedDataset:
    """Rows of documents.
    A key is (epoch, document, piece, epoch, document, piece, ...); (epoch, document) means the first piece.

    Documents are numbered across all sources, which are sorted by name.
    """

    decodes: ClassVar[bool] = True

    def __init__(self, config: Config, sources: Mapping[str, Documents]) -> None:
        self.config, self.documents = config, list(sources.values())
        self.source_names = list(sources)
        self._starts = [sum(map(len, self.documents[:i])) for i in range(len(self.documents))]
        options = config.model_dump(mode="json", exclude={"errors", "prefetch_shards", "val_documents", "sources"})
        rates = [config.sources[name].model_dump(mode="json", exclude={"path"}) for name in sources]
        facts = [[documents.fingerprint for documents in self.documents], options, rates]
        self.fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.weights = [config.sources[name].loss_weight for name in sources]
        shards = sum(len(documents.manifest.shards) for documents in self.documents)
        self.quarantine = Quarantine(config.errors, len(self), shards)
        self._room = (config.sequence_tokens, config.max_frames)

    def __len__(self) -> int:
        """Documents of all sources."""
        return sum(map(len, self.documents))

    def locate(self, document: int) -> tuple[int, int]:
        """The source of a document, and its number within the source."""
        source = bisect_right(self._starts, document) - 1
        return source, document - self._starts[source]

    def first(self, source: int) -> int:
        """The number of the first document of a source."""
        return self._starts[source]

    def pieces(self, document: int) -> list[Piece]:
        """The pieces of a document; empty if it is dropped."""
        source, local = self.locate(document)
        return self.documents[source].pieces(local, self._room)

    def sizes(self, epoch: int, document: int) -> list[tuple[int, int]]:
        """Tokens and frames of each piece of a document."""
        return [(piece.tokens, piece.frames) for piece in self.pieces(document)]

    def packing(self, arrangement: "JoinedSources | Streams", digest: str = "") -> Packing:
        """Packing of the documents in the order of `arrangement`."""
        names, rows = self.source_names, self.config.open_rows
        source_of = lambda document: self.locate(document)[0]  # noqa: E731
        return Packing(arrangement, self.sizes, self._room, rows, "data", digest, names, source_of, self.find)

    def find(self, entry: str) -> range:
        """The documents that match an entry of a deny list; see `branches.parse_denied` for the syntax.

        Raises:
            ConfigError: no document matches.
        """
        kind, _, rest = entry.partition(" ")
        number, _, rest = rest.partition(" ") if kind == "document" else ("", "", rest)
        name, _, url = rest.partition(" ")
        if name in self.source_names:
            source = self.source_names.index(name)
            first = self._starts[source]
            if kind == "source":
                return range(first, first + len(self.documents[source]))
            for shard in self.documents[source].manifest.shards:
                if shard.url == url and not number:
                    return range(first, first + shard.documents)
                if shard.url == url and int(number) < shard.documents:
                    return range(first + int(number), first + int(number) + 1)
                first += shard.documents
        raise ConfigError(
            f"deny list: {entry!r}: the data have no such {kind}. "
            "Undo it: python -m src.operations.interventions undo RUN."
        )

    def arrangement(self, seed: int) -> JoinedSources | Streams:
        """Order of the documents of all sources.

        Raises:
            DataError: the share of a source is less than one document per period of the schedule.
        """
        config = self.config
        sources = [
            Source(documents.sizes, config.shuffle, config.window, f"{seed}/{name}")
            for name, documents in zip(self.source_names, self.documents, strict=True)
        ]
        rates = [rate for name in self.source_names if (rate := config.sources[name].rate) is not None]
        order = arrange(sources, rates)
        if isinstance(order, Streams) and 0 in order.counts:
            name = self.source_names[order.counts.index(0)]
            raise DataError(
                f"data.sources.{name}.rate: its share is less than one document of {PERIOD}. Write a larger rate."
            )
        return order

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> LaneOrder:
        """See `orders.OrderedDataset`. Rows do not depend on `steps`."""
        digest = hashlib.sha256(f"{self.fingerprint}/{seed}".encode()).hexdigest()[:16]
        return LaneOrder(self.packing(self.arrangement(seed), digest), per_step, branches)

    def read_ahead(self, order: Order, share: RankShare) -> ReadAhead | None:
        """See `orders.ReadAheadDataset`."""
        if not isinstance(order, LaneOrder) or not self.config.prefetch_shards:
            return None
        lists = [documents.manifest for documents in self.documents]
        remote = [each for each in lists if any(shard.url.startswith(REMOTE) for shard in each.shards)]
        if not remote:
            return None
        cache = self.documents[lists.index(remote[0])].files.cache
        assert cache, "made by open_files"
        count = sum(map(self.config.tars_at_once, remote)) + self.config.prefetch_shards
        return ReadAhead(order.packing.arrangement, share, self.shard_of, count, cache)

    def shard_of(self, document: int) -> manifest.Shard:
        """The tar of a document."""
        source, local = self.locate(document)
        return self.documents[source].shard(local)

    def sample(self, epoch: int, index: int, *more: int, swaps: Swaps | None = None) -> Sample:
        """The row of a key. swaps: replacements of images; document numbers are within the source.

        Unreadable pieces become padding without loss and are recorded in the quarantine.

        Raises:
            DataError: too many documents are unreadable, or the error policy stops the training.
        """
        row = Sample(counts=[[0] * len(COUNTS) for _ in self.documents])
        key = (epoch, index, *(more or (0,)))
        for _, document, number in zip(key[::3], key[1::3], key[2::3], strict=True):
            if not 0 <= document < len(self):
                raise IndexError(f"sample {document} of {len(self)}")
            pieces = self.pieces(document)
            if pieces:
                self._add(row, document, pieces[number], number, swaps)
        return row

    def read_piece(self, document: int, piece: Piece, swaps: Swaps | None = None) -> Sample:
        """A row with a single piece of a document."""
        row = Sample(counts=[[0] * len(COUNTS) for _ in self.documents])
        self._add(row, document, piece, 0, swaps)
        return row

    def _add(self, row: Sample, document: int, piece: Piece, place: int, swaps: Swaps | None) -> None:
        """Append a piece to a row. place: number of the piece in its document."""
        source, local = self.locate(document)
        counters = self.documents[source].files.counters
        before = counters["hits"], counters["misses"]
        content = self._read(source, local, piece, place, swaps)
        hits, misses = counters["hits"] - before[0], counters["misses"] - before[1]
        row.cached = row.cached[0] + hits, row.cached[1] + hits + misses
        counts = row.counts[source]
        if content is None:
            filler = self.documents[source].texts.filler
            content = Content([filler] * piece.tokens, [False] * piece.tokens, [], [piece.tokens])
            counts[-1] += 1
        else:
            images = [element for element in piece.elements if element.grid]
            image_tokens = sum(element.image_tokens for element in images)
            for i, increment in enumerate(
                (piece.ends, len(images), image_tokens, piece.tokens - image_tokens, piece.left_out)
            ):
                counts[i] += increment
        row.input_ids += content.ids
        row.loss_mask += content.loss_mask
        row.frames += content.images
        row.lengths += content.lengths
        row.source_ids += [source] * len(content.ids)

    def _read(self, source: int, local: int, piece: Piece, place: int, swaps: Swaps | None) -> Content | None:
        documents, name = self.documents[source], self.source_names[source]
        shard, number = documents.locate(local)
        url = documents.manifest.shards[shard].url
        if self.quarantine.holds(name, url, number, place):
            return None
        try:
            content = documents.read(local, piece, swaps)
        except DataError as error:
            if not swaps:  # a swapped image can belong to another document
                self.quarantine.add(error, name, url, number, place, documents.offset(local))
            return None
        self.quarantine.note_success()
        return content

    def is_unreadable(self, document: int, piece: int) -> bool:
        """Whether a piece of a document is in the quarantine."""
        source, local = self.locate(document)
        shard, number = self.documents[source].locate(local)
        return self.quarantine.holds(
            self.source_names[source], self.documents[source].manifest.shards[shard].url, number, piece
        )

    def collate(self, samples: Sequence[Sample]) -> InterleavedBatch:
        """Batch of rows, padded to `sequence_tokens`. Padding is masked, so its id does not matter."""
        import numpy as np
        import torch

        from src.data import collate

        ids, masks = [row.input_ids for row in samples], [row.loss_mask for row in samples]
        length = self.config.sequence_tokens
        side = self.config.images.frame_size
        images = [frames for row in samples for frames in row.frames]
        frames = np.concatenate(images) if images else np.zeros((0, 3, side, side), dtype=np.float32)
        source_ids, _ = collate.pad_ids([row.source_ids for row in samples], 0, length)
        batch: InterleavedBatch = {
            **collate.pack_tokens(ids, masks, [row.lengths for row in samples], 0, length),
            "frames": torch.from_numpy(frames),
            "source_ids": source_ids,
            "source_counts": torch.tensor([row.counts for row in samples]).sum(0),
            "cached": torch.tensor([row.cached for row in samples]).sum(0),
        }
        if set(self.weights) != {1.0}:
            batch["loss_weights"] = torch.tensor(self.weights, dtype=torch.float32)[source_ids]
        return batch
