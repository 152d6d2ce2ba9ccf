"""Token ids of documents on disk: written once in shards, read by memory map.

A shard is two files of little-endian integers. NAME.ids has the ids of its documents, each followed by the end token,
as uint16 if the vocabulary allows, else uint32; consecutive documents are one slice. NAME.ends has (documents + 1,)
int64: 0, then the position in NAME.ids after each document's end token. The manifest lists the shards of each split in
order, and the tokenizer that made them.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.data import jsonl
from src.errors import DataError
from src.files import read_manifest, reading, writing

if TYPE_CHECKING:
    import numpy as np

FORMAT = "token files 1"
IDS, ENDS = ".ids", ".ends"
AGAIN = "Run data_prep.tokenize again."


@dataclass(frozen=True)
class Shard:
    """Joined documents."""

    ids: "np.ndarray"
    """(tokens,) integers: ids of all documents, each followed by the end token."""
    ends: "np.ndarray"
    """(documents + 1,) int64: 0, then the position in `ids` after each document's end token."""


def id_dtype(vocab_size: int) -> str:
    """The smallest integer type for ids below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def is_tokenised(folder: Path) -> bool:
    """Whether a prepared folder has token files, according to its manifest.

    Raises:
        DataError: the manifest is missing or cannot be read.
    """
    return str(read_manifest(folder, DataError).get("format", "")).startswith("token files ")


def require(folder: Path, splits: Sequence[str] = jsonl.SPLITS) -> dict[str, Any]:
    """Read the manifest of a folder of token files, and check that it has all of `splits`.

    Raises:
        DataError: it has another format, or a split or a field of the format is missing.
    """
    manifest = read_manifest(folder, DataError)
    if manifest.get("format") != FORMAT:
        raise DataError(f"{folder}: expected the format {FORMAT!r}, got {manifest.get('format')!r}. {AGAIN}")
    try:
        for split in splits:
            if not manifest["splits"].get(split):
                raise DataError(
                    f"{folder}: no documents for the split {split!r}. Splits: "
                    f"{', '.join(manifest['splits']) or 'none'}. {AGAIN}"
                )
            for shard in manifest["splits"][split]:
                if not {shard["name"] + IDS, shard["name"] + ENDS} <= manifest["files"].keys():
                    raise DataError(f"{folder}: files of shard {shard['name']!r} are missing in the manifest. {AGAIN}")
        _ = manifest["dtype"], manifest["tokenizer"]["fingerprint"], manifest["tokenizer"]["eos_id"]
    except (KeyError, TypeError, AttributeError) as bad:
        raise DataError(
            f"{folder}: the manifest does not describe token files: {type(bad).__name__} {bad}. {AGAIN}"
        ) from None
    return manifest


def source_digest(manifest: Mapping[str, Any], split: str) -> str | None:
    """Digest of the text of a split before its tokenization, so that it is equal for all tokenizers; None if its
    sources are not recorded."""
    made_from = manifest.get("made_from", {})
    options = {name: made_from.get("options", {}).get(name) for name in ("text_field", "documents_by", "val_rate")}
    sources = [
        {name: value for name, value in source.items() if name != "name" or "sha256" not in source}
        for source in made_from.get("sources", [])
        if options["val_rate"] or source["split"] == split
    ]
    text = json.dumps([split, options, sources], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest() if sources else None


def open_split(folder: Path, split: str) -> list[Shard]:
    """Memory-map the shards of a split.

    Raises:
        DataError: a file is missing or differs from the manifest.
    """
    import numpy as np

    manifest = require(folder, [split])
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    shards = []
    for facts in manifest["splits"][split]:
        ids = _map_file(folder / (facts["name"] + IDS), dtype, facts["tokens"])
        ends = _map_file(folder / (facts["name"] + ENDS), np.dtype("<i8"), facts["documents"] + 1)
        if ends[0] != 0 or ends[-1] != len(ids):
            raise DataError(
                f"{folder / (facts['name'] + ENDS)}: damaged: ends at {int(ends[-1])}, not at {len(ids)}. {AGAIN}"
            )
        shards.append(Shard(ids, ends))
    return shards


def _map_file(path: Path, dtype: "np.dtype", count: int) -> "np.ndarray":
    import numpy as np

    try:
        with reading(path, DataError):
            size = path.stat().st_size
            if size != count * dtype.itemsize:
                raise DataError(f"{path}: {size} bytes, expected {count} numbers of {dtype.itemsize} bytes. {AGAIN}")
            return np.asarray(np.memmap(path, dtype, mode="r"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. {AGAIN}") from None


class Writer:
    """Writes a new shard, document by document; a context manager. Overwrites existing files of the same name."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        """Raise RunError if the disk refuses."""
        import numpy as np

        self.name, self.documents, self.tokens = name, 0, 0
        self._folder, self._type = folder, np.dtype(dtype).newbyteorder("<")
        with writing(folder / name):
            self._ids = open(folder / (name + IDS), "wb")  # noqa: SIM115  open as long as the writer is
            self._ends = open(folder / (name + ENDS), "wb")  # noqa: SIM115
            self._ends.write(np.zeros(1, "<i8").tobytes())

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self._ids.close()
        self._ends.close()

    def append(self, ids: "np.ndarray", lengths: "np.ndarray") -> None:
        """Append documents. ids: all documents joined, each followed by the end token. lengths: (documents,) tokens
        with end tokens.

        Raises:
            RunError: the disk refuses.
        """
        import numpy as np

        ends = self.tokens + np.cumsum(lengths, dtype="<i8")
        assert len(ids) == (ends[-1] - self.tokens if len(ends) else 0), "the documents fill the ids"
        with writing(self._folder / self.name):
            self._ids.write(ids.astype(self._type, copy=False).tobytes())
            self._ends.write(ends.tobytes())
        self.documents += len(lengths)
        self.tokens += len(ids)

    def close(self) -> dict[str, Any] | None:
        """Sync the files and return the shard's entry in the manifest. Without documents, remove the files and return
        None.

        Raises:
            RunError: the disk refuses.
        """
        with writing(self._folder / self.name):
            for file in (self._ids, self._ends):
                file.flush()
                os.fsync(file.fileno())
                file.close()
                if not self.documents:
                    os.unlink(file.name)
        return {"name": self.name, "documents": self.documents, "tokens": self.tokens} if self.documents else None
