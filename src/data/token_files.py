"""Token ids of documents on disk: written once in shards, read by memory map.

A shard is two files of little-endian integers. NAME.ids holds the ids of its documents, each followed by the end token, so that a run of
documents is one slice: uint16 where the vocabulary allows, else uint32. NAME.ends holds (documents + 1,) int64: 0, then where in
NAME.ids each document ends, behind its end token. The manifest says which shards a split has, in their order, and with which
tokenizer they were made.
"""

from collections.abc import Sequence
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
    """Documents one behind the other."""

    ids: "np.ndarray"
    """(tokens,) integers: of all documents, each followed by the end token."""
    ends: "np.ndarray"
    """(documents + 1,) int64: 0, then where each document ends in `ids`, behind its end token."""


def type_of(vocab_size: int) -> str:
    """The smallest type on disk for ids below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def is_tokenised(folder: Path) -> bool:
    """Whether a prepared folder holds token files, as its manifest says.

    Raises:
        DataError: it has no manifest, or none that can be read.
    """
    return str(read_manifest(folder, DataError).get("format", "")).startswith("token files ")


def require(folder: Path, splits: Sequence[str] = jsonl.SPLITS) -> dict[str, Any]:
    """The manifest of a folder of token files that has all of `splits`.

    Raises:
        DataError: it is of another format, or lacks a split or what the format needs.
    """
    manifest = read_manifest(folder, DataError)
    if manifest.get("format") != FORMAT:
        raise DataError(f"{folder}: expected the format {FORMAT!r}, got {manifest.get('format')!r}. {AGAIN}")
    try:
        for split in splits:
            if not manifest["splits"].get(split):
                raise DataError(f"{folder}: has no documents for the split {split!r}. It has: {', '.join(manifest['splits']) or 'none'}.")
            for shard in manifest["splits"][split]:
                if not {shard["name"] + IDS, shard["name"] + ENDS} <= manifest["files"].keys():
                    raise DataError(f"{folder}: the files of its shard {shard['name']!r} are not listed. {AGAIN}")
        _ = manifest["dtype"], manifest["tokenizer"]["fingerprint"], manifest["tokenizer"]["eos_id"]
    except (KeyError, TypeError, AttributeError) as bad:
        raise DataError(f"{folder}: its manifest does not describe token files: {type(bad).__name__} {bad}. {AGAIN}") from None
    return manifest


def open_split(folder: Path, split: str) -> list[Shard]:
    """The shards of a split, memory-mapped.

    Raises:
        DataError: a file is missing or is not what the manifest says.
    """
    import numpy as np

    manifest = require(folder, [split])
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    shards = []
    for facts in manifest["splits"][split]:
        ids = _mapped(folder / (facts["name"] + IDS), dtype, facts["tokens"])
        ends = _mapped(folder / (facts["name"] + ENDS), np.dtype("<i8"), facts["documents"] + 1)
        if ends[0] != 0 or ends[-1] != len(ids):
            raise DataError(f"{folder / (facts['name'] + ENDS)}: damaged: ends at {int(ends[-1])}, not at {len(ids)}. {AGAIN}")
        shards.append(Shard(ids, ends))
    return shards


def _mapped(path: Path, dtype: "np.dtype", count: int) -> "np.ndarray":
    import numpy as np

    try:
        with reading(path, DataError):
            size = path.stat().st_size
            if size != count * dtype.itemsize:
                raise DataError(f"{path}: {size} bytes, but {count} numbers of {dtype.itemsize} bytes were written. {AGAIN}")
            return np.asarray(np.memmap(path, dtype, mode="r"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. {AGAIN}") from None


def write(folder: Path, name: str, ids: "np.ndarray", ends: "np.ndarray", dtype: str) -> dict[str, Any]:
    """Write a shard; returns what the manifest says of it under "splits". The files are not synced.

    Raises:
        RunError: the disk refuses.
    """
    import numpy as np

    assert len(ends) > 1, "a shard holds a document"
    assert ends[0] == 0, "the first document begins at 0"
    assert ends[-1] == len(ids), "the documents fill the ids"
    with writing(folder / name):
        ids.astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / (name + IDS))
        ends.astype("<i8").tofile(folder / (name + ENDS))
    return {"name": name, "documents": len(ends) - 1, "tokens": len(ids)}
