"""Pack complete samples of another data set into rows of one length. Samples of a row do not attend to each other."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypedDict, cast

from pydantic import Field, model_validator

from src.data.mixture.dataset import MixtureDataset, leaves
from src.data.orders import require_own_order
from src.data.packing.lanes import LaneOrder, Packing, PermutedArrangement, pack_epoch
from src.data.parts import PartsConfig, leaf_configs
from src.data.text.documents import TextConfig
from src.errors import ConfigError, DataError
from src.experiments.batches import PackedBatch
from src.experiments.config import Places, drop_absences
from src.experiments.dataset_protocols import Dataset, MeasuredDataset, content_of
from src.experiments.interfaces import Architecture, DatasetConfig, DatasetField, require_fit
from src.experiments.kinds import DECODER
from src.runs.history.branches import Branch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FAMILIES = ("gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "qwen2")
"""Families in which packed documents do not attend to each other; tests/core/models/test_packed_rows.py tests each."""
ATTENTIONS = ("eager", "sdpa")
"""Attention implementations tested with packed documents.
With flash_attention_2, transformers 5.23 uses positions only in batches of one row."""


class Config(PartsConfig):
    """The documents to pack, and the size of rows."""

    has_order: ClassVar[bool] = True
    parts_field: ClassVar[str] = "documents"

    documents: DatasetField
    """A data set for decoders, such as 'documents'. Its samples are the documents to pack. The rates of a mixture are
    shares of documents. Its loss is not logged by part, as a row has documents of several parts."""
    sequence_tokens: int = Field(gt=1)
    """Tokens of a row."""
    open_rows: int = Field(default=16, gt=0)
    """Open rows per sequence of a step. More open rows mean less padding."""
    too_long: Literal["cut", "drop"] = "cut"
    """A document longer than a row is cut into pieces that do not attend to each other, or dropped. cut: only for
    text."""

    @model_validator(mode="after")
    def _documents_can_be_packed(self) -> "Config":
        if self.documents.reader != DECODER or self.documents.has_order:
            raise ValueError(
                f"documents: samples of {self.documents.name!r} data cannot be packed. "
                "Use 'documents' or 'prompted_qa'."
            )
        require_own_order(self.documents, "documents")
        return self

    @model_validator(mode="after")
    def _only_text_is_cut(self) -> "Config":
        for path, part in leaf_configs("documents", self.documents):
            if self.too_long == "cut" and not isinstance(part, TextConfig):
                try:
                    part.check_length(self.sequence_tokens)
                except ConfigError:
                    raise ValueError(
                        f"too_long: samples of {path} ({part.name!r}) can have more than {self.sequence_tokens} "
                        "tokens, and only text can be cut. "
                        "Use too_long 'drop', or a larger sequence_tokens."
                    ) from None
        return self

    @property
    def parts_by_path(self) -> Mapping[str, DatasetConfig]:
        return {"documents": self.documents}

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens, max_positions, new_tokens)

    def check_model(self, sizes: Architecture | None) -> None:
        require_tested_model(sizes)

    def batch_lengths(self) -> tuple[int, ...]:
        return (self.sequence_tokens,)

    def check_compiled(self) -> None:
        """Nothing to check: all rows have one length."""

    def build(
        self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int
    ) -> "PackedDataset | PackedRows":
        """Build the packed rows of one split. The rows of the validation split are packed here, from all of its
        documents.

        Raises:
            UserError: the documents cannot be built.
            DataError: samples have more fields than token ids, or no sample fits into a row.
        """
        documents = self.documents.build(places, tokenizer, split, seed)
        require_token_ids(documents, self.documents.name)
        packed = PackedDataset(self, documents)
        return packed if split == "train" else PackedRows(packed)


def require_tested_model(sizes: Architecture | None) -> None:
    """Raise ConfigError for a model that was not tested with packed documents."""
    family = sizes.model_type if sizes else None
    if family not in FAMILIES:
        raise ConfigError(
            f"data: packed documents are not tested with the model family {family!r}. Use one of {', '.join(FAMILIES)}."
        )
    if sizes and sizes.attention not in (None, *ATTENTIONS):
        raise ConfigError(
            f"model.attention: packed documents are not tested with {sizes.attention!r}. Use {' or '.join(ATTENTIONS)}."
        )


class Sample(TypedDict):
    """One row."""

    input_ids: list[int]
    loss_mask: list[bool]
    lengths: list[int]
    """Tokens of each document."""


class PackedDataset:
    """Rows of complete documents. A key is (epoch, document, piece, epoch, document, piece, ...), or (epoch, document)
    for one first piece."""

    def __init__(self, config: Config, documents: Dataset) -> None:
        self.config, self.documents, self.content = config, documents, content_of(documents)
        options = drop_absences(config.model_dump(mode="json", exclude={"documents"}), config)
        self.fingerprint = hashlib.sha256(
            json.dumps([documents.fingerprint, options], sort_keys=True).encode()
        ).hexdigest()
        self._has_lengths = {type(data): isinstance(data, MeasuredDataset) for _, data in leaves("", documents)}
        """By class. Cached because checking a protocol takes longer than the rest of `sizes`."""

    def __len__(self) -> int:
        """Documents in one epoch."""
        return len(self.documents)

    def sizes(self, epoch: int, document: int) -> list[tuple[int]]:
        """Tokens of each piece of a document; empty if it is dropped."""
        most, (data, *key) = self.config.sequence_tokens, _locate(self.documents, epoch, document)
        tokens = (
            cast(MeasuredDataset, data).length(*key)
            if self._has_lengths[type(data)]
            else len(data.sample(*key)["input_ids"])
        )
        if tokens <= most:
            return [(tokens,)] if tokens else []
        if self.config.too_long == "drop":
            return []
        return [(most,)] * (tokens // most) + [(tokens % most,)] * (tokens % most > 0)

    def packing(self, seed: int) -> Packing:
        """The packing of the documents in an order that depends on `seed`."""
        config = self.config
        digest = hashlib.sha256(f"{self.fingerprint}/{seed}".encode()).hexdigest()[:16]
        return Packing(
            PermutedArrangement(len(self), seed),
            self.sizes,
            (config.sequence_tokens,),
            config.open_rows,
            "data.documents",
            digest,
        )

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> LaneOrder:
        """See `orders.OrderedDataset`. Rows do not depend on `steps`."""
        return LaneOrder(self.packing(seed), per_step, branches)

    def sample(self, epoch: int, index: int, *more: int) -> Sample:
        """Build the row of a key."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        key, most = (epoch, index, *(more or (0,))), self.config.sequence_tokens
        row: Sample = {"input_ids": [], "loss_mask": [], "lengths": []}
        for own_epoch, document, piece in zip(key[::3], key[1::3], key[2::3], strict=True):
            data, *own_key = _locate(self.documents, own_epoch, document)
            whole = data.sample(*own_key)
            ids, loss_mask = (whole[field][piece * most : (piece + 1) * most] for field in ("input_ids", "loss_mask"))
            row["input_ids"] += ids
            row["loss_mask"] += [False, *loss_mask[1:]]
            row["lengths"].append(len(ids))
        return row

    def collate(self, samples: Sequence[Sample]) -> PackedBatch:
        """Pad rows to `sequence_tokens`. Padding is masked, so its id does not matter."""
        from src.data import collate

        ids, masks = [sample["input_ids"] for sample in samples], [sample["loss_mask"] for sample in samples]
        return collate.pack_tokens(
            ids, masks, [sample["lengths"] for sample in samples], 0, self.config.sequence_tokens
        )


class PackedRows:
    """The documents of one epoch, packed once for evaluation: rows by index, the same for every seed."""

    def __init__(self, packed: PackedDataset) -> None:
        self.fingerprint, self.content = packed.fingerprint, packed.content
        self._packed = packed
        self._rows = pack_epoch(packed.packing(seed=0))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def sample(self, epoch: int, index: int) -> Sample:
        """Row `index`, whatever the epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self._packed.sample(*self._rows[index])

    def collate(self, samples: Sequence[Sample]) -> PackedBatch:
        """See `PackedDataset`."""
        return self._packed.collate(samples)


def _locate(data: Dataset, epoch: int, index: int) -> tuple[Dataset, int, int]:
    """The data set of a document, which can be a part of a mixture, and the document's epoch and index in it."""
    while isinstance(data, MixtureDataset):
        name, epoch, index = data.locate(epoch, index)
        data = data.parts[name]
    return data, epoch, index


def require_token_ids(data: Dataset, name: str) -> None:
    """Raise DataError if samples, or those of any part of a mixture, have more fields than token ids."""
    for leaf_name, leaf in leaves(name, data):
        sample = leaf.sample(0, 0)
        if not isinstance(sample, dict) or sample.keys() != {"input_ids", "loss_mask"}:
            raise DataError(
                f"data.documents: samples of {leaf_name!r} cannot be packed, as they have more fields than token ids."
            )
