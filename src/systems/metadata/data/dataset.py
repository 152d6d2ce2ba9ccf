"""Data set of documents with metadata, for language models; rows are single blocks or packed."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, ClassVar, Literal, TypedDict

from pydantic import Field, model_validator

from src.data import jsonl, row_counts
from src.data.packing.dataset import require_tested_model
from src.data.packing.lanes import LaneOrder, Packing, PermutedArrangement
from src.data.text.tokenizers import SafeTokenizer
from src.errors import DataError
from src.experiments.batches import TokenBatch
from src.experiments.config import Places, unknown_text
from src.experiments.interfaces import Architecture, DatasetConfig, require_fit
from src.runs.history.branches import Branch
from src.systems.metadata.data.annotations import COLUMNS, KEYS, Document, key_of, read_row
from src.systems.metadata.data.examples import ExampleMaker, Piece, Writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(DatasetConfig):
    """Documents, their metadata and the layout of rows."""

    has_order: ClassVar[bool] = True
    writer: ClassVar[str | None] = "metadata"

    corpus: str = Field(min_length=1)
    """Folder below `--data_path` with train.jsonl and val.jsonl of rows as `annotations.read_row` reads them."""
    sequence_tokens: int = Field(gt=1)
    """Maximum number of tokens in a block, prefix included."""
    open_rows: int = Field(default=0, ge=0)
    """0: each block is a padded row.
    Above 0: blocks are packed into rows, like in `packed`, and do not attend to each other."""
    columns: list[str] | None = None
    """Columns to read, which every row must have. None: all columns."""
    probability: float = Field(default=1.0, ge=0, le=1)
    """Probability that a training document has its metadata."""
    sampling: Literal["all", "weighted", "independent"] = "all"
    """Columns per training document. weighted: draw a number from 1 to all, then that many columns in proportion to
    `weights`.
    independent: draw each column with its weight as the probability."""
    weights: dict[str, float] = {}
    """Weights by column. Columns without a weight are never drawn."""
    html_rate: float = Field(default=1.0, ge=0, le=1)
    """Probability that a document has its HTML, before columns are drawn. With 0.25 and BigScience's weights, 13 % of
    the documents have HTML. In the reference it is 87 %: its `html_overall_sample_rate` works the wrong way round."""
    with_metadata: bool = True
    """False: a baseline without metadata, with the same text in every block."""
    metadata_loss: bool = False
    """Whether markers in the text are in the loss. Prefixes never are."""
    end_token: bool = True
    """Whether documents end with the end token."""
    writing: Writing = Writing()
    val_documents: int | None = Field(default=None, gt=0)
    """Number of validation documents, the same ones for all seeds; None for all."""

    @model_validator(mode="after")
    def _columns_are_known(self) -> "Config":
        for field, names in (("columns", self.columns or []), ("weights", self.weights)):
            for column in names:
                self.require_written(field, column)
        if bool(self.weights) != (self.sampling != "all"):
            raise ValueError(
                "weights: ignored by sampling 'all'. Remove them."
                if self.weights
                else f"weights: missing, but sampling {self.sampling!r} needs them. Add one for each column."
            )
        if self.weights and not any(self.weights.values()):
            raise ValueError(
                "weights: all are 0, so no metadata would ever be drawn. Give one a weight, or set probability to 0."
            )
        most, expected = (1, "probabilities") if self.sampling == "independent" else (float("inf"), "numbers from 0 on")
        for column, weight in self.weights.items():
            if not 0 <= weight <= most:
                raise ValueError(
                    f"weights: expected {expected} for sampling {self.sampling!r}, got {column}: {weight:g}."
                )
        return self

    def require_written(self, field: str, column: str) -> None:
        """Raise ValueError if a column named by `field` is unknown, is not read, or is not written."""
        known_columns = {*COLUMNS, *KEYS, *self.writing.custom_keys}
        if column not in known_columns:
            raise ValueError(f"{field}: {unknown_text('column', column, known_columns)}")
        if self.columns is not None and key_of(column) not in map(key_of, self.columns):
            raise ValueError(f"{field}: {column!r} is not among data.columns: {', '.join(self.columns)}. Add it there.")
        if key_of(column) not in self.writing.keys:
            raise ValueError(
                f"{field}: {column!r} would never be written: {key_of(column)!r} is not among writing.keys. "
                "Add it there."
            )

    def column_weight(self, column: str) -> float:
        """Weight of a column, by its name or its key."""
        return self.weights.get(column, self.weights.get(key_of(column), 0.0))

    def check(self, places: Places) -> None:
        jsonl.require_splits(places, self.corpus)
        for split in jsonl.SPLITS:
            next(self.iterate(places, split), None)
        row_counts.require_lines("data.val_documents", self.val_documents, places.data / self.corpus / "val.jsonl")

    def iterate(self, places: Places, split: str) -> Iterator[Document]:
        """Yield the documents of a split, read one by one.

        Raises:
            DataError: the data set is missing or incomplete, or a row is malformed.
        """
        path = jsonl.require_file(jsonl.corpus_folder(places, self.corpus), f"{split}.jsonl")
        for number, row in enumerate(row_counts.iterate(path, {"text": str}), 1):
            yield read_row(row, f"{path}:{number}", self.columns)

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens, max_positions, new_tokens)

    def check_model(self, sizes: Architecture | None) -> None:
        if self.open_rows:
            require_tested_model(sizes)

    def batch_lengths(self) -> tuple[int, ...] | None:
        return (self.sequence_tokens,) if self.open_rows else None

    def build(
        self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int
    ) -> "MetadataDataset | MetadataBlocks":
        """Load the documents of a split. Validation has every block, with all metadata.

        Raises:
            DataError: the data set is missing, incomplete, malformed, or too small for `val_documents`.
            ConfigError: the rows are too short for a prefix.
        """
        folder = jsonl.corpus_folder(places, self.corpus)
        path = jsonl.require_file(folder, f"{split}.jsonl")
        rules = f"metadata 2 {json.dumps(self.columns)}"
        rows = jsonl.read_rows(
            path, {"text": str}, check=lambda row, where: read_row(row, where, self.columns), rules=rules
        )
        digests = jsonl.fingerprint(folder), jsonl.fingerprint(folder, split)
        documents = Documents(self, rows, *digests, self.make_maker(tokenizer))
        if split == "train":
            return MetadataDataset(documents, seed)
        most = self.val_documents
        row_numbers = range(len(rows)) if most is None else jsonl.select_validation_rows(len(rows), most, path)
        return MetadataBlocks(documents, row_numbers)

    def make_maker(self, tokenizer: "PreTrainedTokenizerFast") -> ExampleMaker:
        """The maker of pieces.

        Raises:
            ConfigError: the tokenizer has no token for a special token or the separator, or the rows are too short.
        """
        return ExampleMaker(
            self.writing, SafeTokenizer(tokenizer), self.sequence_tokens, self.metadata_loss, self.end_token
        )


class Documents:
    """Documents by number, and the maker of their pieces."""

    def __init__(self, config: Config, rows: jsonl.Rows, corpus: str, content: str, maker: ExampleMaker) -> None:
        """corpus: digest of all rows. content: of those of this split."""
        self.config, self.maker, self.content, self._rows = config, maker, content, rows
        options = config.model_dump(mode="json", exclude={"corpus", "val_documents"})
        self.fingerprint = hashlib.sha256(json.dumps([corpus, options], sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self) -> Iterator[Document]:
        """All documents, in order."""
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Document:
        return read_row(self._rows[index], f"{self._rows.path}:{index + 1}", self.config.columns)


def draw(document: Document, config: Config, draws: Random) -> Document:
    """Draw the metadata that a document has this time."""
    if draws.random() >= config.probability:
        return Document(document.text)
    columns = document.columns
    if "html" in columns and draws.random() >= config.html_rate:
        columns.remove("html")
    if config.sampling == "independent":
        columns = [column for column in columns if draws.random() < config.column_weight(column)]
    elif config.sampling == "weighted":
        candidates = {column: config.column_weight(column) for column in columns if config.column_weight(column)}
        columns = list[str]()
        for _ in range(draws.randint(1, len(candidates)) if candidates else 0):
            (column,) = draws.choices(list(candidates), list(candidates.values()))
            columns.append(column)
            del candidates[column]
    return Document(document.text, tuple(item for item in document.items if item.column in columns))


class Sample(TypedDict):
    """A row."""

    input_ids: list[int]
    loss_mask: list[bool]
    lengths: list[int]
    """Number of tokens in each block."""


class MetadataDataset:
    """The training split.
    A key is (epoch, document, piece, epoch, document, piece, ...), or (epoch, document) for its first piece."""

    def __init__(self, documents: Documents, seed: int) -> None:
        self.documents, self.seed, self.config = documents, seed, documents.config
        self.fingerprint = documents.fingerprint
        self._pieces_of = lru_cache(1024)(self._make)
        """An order reads the sizes of documents shortly before their content."""

    def __getstate__(self) -> tuple[Documents, int]:
        return self.documents, self.seed

    def __setstate__(self, state: tuple[Documents, int]) -> None:
        self.__init__(*state)

    def __len__(self) -> int:
        """Number of documents in an epoch."""
        return len(self.documents)

    def _make(self, epoch: int, document: int) -> list[Piece]:
        draws = Random(f"{self.seed}/{epoch}/{document}")
        return self.documents.maker.pieces(
            draw(self.documents[document], self.config, draws), self.config.with_metadata
        )

    def sizes(self, epoch: int, document: int) -> list[tuple[int]]:
        """Number of tokens in each piece of a document; empty if no token is in the loss."""
        return [(len(piece.ids),) for piece in self._pieces_of(epoch, document)]

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> LaneOrder:
        """See `orders.OrderedDataset`. Rows do not depend on `steps`."""
        config = self.config
        digest = hashlib.sha256(f"{self.fingerprint}/{self.seed}/{seed}".encode()).hexdigest()[:16]
        packing = Packing(
            PermutedArrangement(len(self), seed),
            self.sizes,
            (config.sequence_tokens,),
            config.open_rows,
            "data",
            digest,
        )
        return LaneOrder(packing, per_step, branches)

    def sample(self, epoch: int, index: int, *more: int) -> Sample:
        """Return the row of a key."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        key = (epoch, index, *(more or (0,)))
        row: Sample = {"input_ids": [], "loss_mask": [], "lengths": []}
        for own_epoch, document, number in zip(key[::3], key[1::3], key[2::3], strict=True):
            pieces = self._pieces_of(own_epoch, document)
            if number >= len(pieces):
                continue  # a document without a token in the loss, which an order skips
            row["input_ids"] += pieces[number].ids
            row["loss_mask"] += pieces[number].loss_mask
            row["lengths"].append(len(pieces[number].ids))
        return row

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Pad on the right. Padding is masked, so its id does not matter."""
        return collate_rows(samples, self.config)


class MetadataBlocks:
    """Every block of the chosen documents, one per sample."""

    def __init__(self, documents: Documents, row_numbers: Sequence[int]) -> None:
        self.documents, self.row_numbers, self.config = documents, row_numbers, documents.config
        self.fingerprint, self.content = documents.fingerprint, documents.content
        by_document = (
            (number, documents.maker.pieces(documents[number], self.config.with_metadata)) for number in row_numbers
        )
        self._pieces = [(number, piece) for number, pieces in by_document for piece in pieces]
        if not self._pieces:
            raise DataError(
                f"data.corpus: no document of {self.config.corpus!r} has a token to learn. Use another corpus."
            )

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._pieces)

    def sample(self, epoch: int, index: int) -> Sample:
        """Return block `index`, which does not depend on the epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        piece = self._pieces[index][1]
        return {"input_ids": piece.ids, "loss_mask": piece.loss_mask, "lengths": [len(piece.ids)]}

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Collate like in training."""
        return collate_rows(samples, self.config)


def collate_rows(samples: Sequence[Sample], config: Config) -> TokenBatch:
    """Collate rows to (B, T): packed rows have a fixed length, padded rows the length of the longest."""
    from src.data import collate

    ids, masks = [sample["input_ids"] for sample in samples], [sample["loss_mask"] for sample in samples]
    if config.open_rows:
        return collate.pack_tokens(ids, masks, [sample["lengths"] for sample in samples], 0, config.sequence_tokens)
    return collate.pad_tokens(ids, masks, 0)
