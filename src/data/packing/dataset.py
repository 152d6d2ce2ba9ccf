"""Whole samples of another data set packed into rows of one length, none of which reads another."""

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
from src.experiments.dataset_protocols import Dataset, MeasuredDataset
from src.experiments.interfaces import Architecture, DatasetConfig, DatasetField, require_fit
from src.experiments.kinds import DECODER
from src.runs.history.branches import Branch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FAMILIES = ("gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "qwen2")
"""Families in which packed documents do not read each other: tests/core/models/test_packed_rows.py trains each both
ways."""
ATTENTIONS = ("eager", "sdpa")
"""Implementations for which that was tested.
With flash_attention_2, transformers 5.23 looks at positions only in batches of one row."""


class Config(PartsConfig):
    """What is packed, and how."""

    has_order: ClassVar[bool] = True
    parts_field: ClassVar[str] = "documents"

    documents: DatasetField
    """A data set for decoders, such as 'documents': each of its samples is a document here. Of a mixture of them, rates
    are shares of documents, and the loss is not told by part, as a row has documents of several."""
    sequence_tokens: int = Field(gt=1)
    """Tokens of a row."""
    open_rows: int = Field(default=16, gt=0)
    """Rows that each sequence of a step keeps open for documents that fit: with more, less padding."""
    too_long: Literal["cut", "drop"] = "cut"
    """A document of more tokens than a row is cut into several, which do not read each other,
    or is left out. cut: for text alone."""

    @model_validator(mode="after")
    def _documents_can_be_packed(self) -> "Config":
        if self.documents.reader != DECODER or self.documents.has_order:
            raise ValueError(
                f"documents: the samples of {self.documents.name!r} cannot be packed. "
                "Take 'documents' or 'prompted_qa'."
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
                        f"too_long: samples of {path} ({part.name!r}) may have more than {self.sequence_tokens} "
                        "tokens, and the end of one that is cut would be learned without its beginning. "
                        "Write too_long 'drop', or a larger sequence_tokens."
                    ) from None
        return self

    @property
    def parts_by_path(self) -> Mapping[str, DatasetConfig]:
        return {"documents": self.documents}

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens + new_tokens, max_positions)

    def check_model(self, sizes: Architecture | None) -> None:
        require_tested_model(sizes)

    def batch_lengths(self) -> tuple[int, ...]:
        return (self.sequence_tokens,)

    def check_compiled(self) -> None:
        """All rows have one length, whatever the documents have."""

    def build(
        self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int
    ) -> "PackedDataset | PackedRows":
        """The packed rows of one split. Those of the validation split are made here, from all of its documents.

        Raises:
            UserError: what the documents raise.
            DataError: their samples are more than token ids, or none fits into a row.
        """
        documents = self.documents.build(places, tokenizer, split, seed)
        require_token_ids(documents, self.documents.name)
        packed = PackedDataset(self, documents)
        return packed if split == "train" else PackedRows(packed)


def require_tested_model(sizes: Architecture | None) -> None:
    """Raises ConfigError for a model that was not tested with packed documents."""
    family = sizes.model_type if sizes else None
    if family not in FAMILIES:
        raise ConfigError(
            f"data: packed documents were tested with {', '.join(FAMILIES)}, not with a model of the family {family!r}."
        )
    if sizes and sizes.attention not in (None, *ATTENTIONS):
        raise ConfigError(
            f"model.attention: packed documents were tested with {' and '.join(ATTENTIONS)}, "
            f"not with {sizes.attention!r}."
        )


class Sample(TypedDict):
    """One row."""

    input_ids: list[int]
    loss_mask: list[bool]
    lengths: list[int]
    """Tokens of each document."""


class PackedDataset:
    """Rows of whole documents.
    A key is (epoch, document, piece, epoch, document, piece, ...), or (epoch, document) for its first piece."""

    def __init__(self, config: Config, documents: Dataset) -> None:
        self.config, self.documents = config, documents
        options = drop_absences(config.model_dump(mode="json", exclude={"documents"}), config)
        self.fingerprint = hashlib.sha256(
            json.dumps([documents.fingerprint, options], sort_keys=True).encode()
        ).hexdigest()
        self._has_lengths = {type(data): isinstance(data, MeasuredDataset) for _, data in leaves("", documents)}
        """By class: a check of a protocol takes longer than all else that `sizes` does."""

    def __len__(self) -> int:
        """Documents in one epoch."""
        return len(self.documents)

    def sizes(self, epoch: int, document: int) -> list[tuple[int]]:
        """Tokens of each piece of a document; empty if it is left out."""
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
        """The packing of its documents in an order that depends on `seed`."""
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
        """The row of a key."""
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
        """Padded to `sequence_tokens`; padding is masked, so its id does not matter."""
        from src.data import collate

        ids, masks = [sample["input_ids"] for sample in samples], [sample["loss_mask"] for sample in samples]
        return collate.pack_tokens(
            ids, masks, [sample["lengths"] for sample in samples], 0, self.config.sequence_tokens
        )


class PackedRows:
    """Every document of one epoch packed once, for evaluation: rows by index, the same for every seed."""

    def __init__(self, packed: PackedDataset) -> None:
        self.fingerprint = packed.fingerprint
        self._packed = packed
        self._rows = pack_epoch(packed.packing(seed=0))

    def __len__(self) -> int:
        """Rows."""
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
    """The data set that a document is in, which may be a part of a mixture, and its epoch and index there."""
    while isinstance(data, MixtureDataset):
        name, epoch, index = data.locate(epoch, index)
        data = data.parts[name]
    return data, epoch, index


def require_token_ids(data: Dataset, name: str) -> None:
    """Raises DataError where samples, in a mixture those of any part, are more than token ids."""
    for leaf_name, leaf in leaves(name, data):
        sample = leaf.sample(0, 0)
        if not isinstance(sample, dict) or sample.keys() != {"input_ids", "loss_mask"}:
            raise DataError(
                f"data.documents: the samples of {leaf_name!r} cannot be packed, as they are more than token ids."
            )
