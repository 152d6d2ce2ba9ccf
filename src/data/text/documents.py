"""Documents as token ids, memory-mapped from a folder made by data_prep.tokenize, or tokenized from a text corpus."""

import importlib.metadata
import io
import json
import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from src.data import jsonl, jsonl_index, row_counts
from src.data.orders import ShuffledConfig
from src.data.text import token_files, tokenizers
from src.data.text.tokenizers import SafeTokenizer, file_digest, tokenizer_digest
from src.errors import DataError
from src.experiments.config import Places
from src.experiments.kinds import TokenizerSource

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

_MIN_BYTES, _MAX_BYTES = 1 << 20, 1 << 30
_SAVED_IDS = "token ids 1"


class TextConfig(ShuffledConfig):
    """Plain text: documents made by data_prep.tokenize, or rows {"text"} in train.jsonl and val.jsonl."""

    corpus: str = Field(min_length=1)
    """Folder below `--data_path`."""
    val_sequences: int | None = Field(default=None, gt=0)
    """Number of validation samples, the same ones for every seed; None for all."""

    def check(self, places: Places) -> None:
        folder = jsonl.corpus_folder(places, self.corpus)
        if token_files.is_tokenised(folder):
            splits = token_files.require(folder)["splits"]
            for split in jsonl.SPLITS:
                tokens, documents = (sum(shard[name] for shard in splits[split]) for name in ("tokens", "documents"))
                self._require_samples(split, tokens, documents)
            return
        jsonl.require_splits(places, self.corpus)
        for split in jsonl.SPLITS:
            path = folder / f"{split}.jsonl"
            next(row_counts.iterate(path, {"text": str}), None)
            # A row of JSON has more bytes than its text has tokens.
            self._require_samples(
                split, path.stat().st_size, row_counts.count_lines(path, self.max_samples(split) or 1)
            )

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        folder = places.data / self.corpus  # `check` reports a missing one
        if source and folder.is_dir() and token_files.is_tokenised(folder):
            facts = token_files.require(folder)["tokenizer"]
            if source.new_tokens or file_digest(source.folder) != facts["fingerprint"]:
                tokenizer = tokenizers.load(source.folder, source.new_tokens)
                _check_tokenizer(folder, facts, tokenizer_digest(tokenizer), SafeTokenizer(tokenizer).eos_id)

    def _require_samples(self, split: str, tokens: int, documents: int) -> None:
        """Raise DataError if a split has too few samples. tokens, documents: upper bounds of its size."""
        available = self.count_samples(tokens, documents)
        row_counts.require("data.val_sequences", self.max_samples(split), available)
        if not available:
            raise DataError(
                f"data.corpus: {self.corpus}: split {split!r} has at most {tokens} tokens, too few for one sequence. "
                "Use shorter sequences."
            )

    def count_samples(self, tokens: int, documents: int) -> int:
        """Upper bound of the number of samples in a text of this size."""
        return tokens

    def max_samples(self, split: str) -> int | None:
        """Maximum number of samples of a split; None for all."""
        return self.val_sequences if split == "val" else None


def read(places: Places, corpus: str, tokenizer: "PreTrainedTokenizerFast", split: str) -> "Documents":
    """Read all documents of one split.

    corpus: folder below `places.data`: token files, or rows {"text": str} in train.jsonl and val.jsonl.

    Raises:
        DataError: the data set is missing, incomplete or malformed, or was tokenized with another tokenizer.
    """
    folder = jsonl.corpus_folder(places, corpus)
    encoder = SafeTokenizer(tokenizer)
    if token_files.is_tokenised(folder):
        manifest = token_files.require(folder, [split])
        _check_tokenizer(folder, manifest["tokenizer"], tokenizer_digest(tokenizer), encoder.eos_id)
        return StoredDocuments(folder, split, encoder.eos_id)
    path = jsonl.require_file(folder, f"{split}.jsonl")
    rows = jsonl.read_rows(path, {"text": str}, rules="text 1")
    shard = _tokenize(rows, encoder, tokenizer_digest(tokenizer))
    return Documents([shard], encoder.eos_id, jsonl.fingerprint(folder), path, jsonl.fingerprint(folder, split))


def _tokenize(rows: jsonl.Rows, encoder: SafeTokenizer, digest: str) -> token_files.Shard:
    """Tokenize a text file. For 1 MiB to 1 GiB of text, one process saves the ids next to the file."""

    def tokenize() -> token_files.Shard:
        # An empty document would be a single end token.
        return join_documents((ids for ids in encoder.encode_all([row["text"] for row in rows]) if ids), encoder.eos_id)

    if not _MIN_BYTES <= rows.row_index.ends[-1] <= _MAX_BYTES:
        return tokenize()
    rules = {
        "name": _SAVED_IDS,
        "tokenizer": digest,
        "eos_id": encoder.eos_id,
        "tokenizers": importlib.metadata.version("tokenizers"),
    }
    with open(rows.file, "rb", closefd=False) as file, jsonl_index.one_builder(file):
        key = jsonl_index.key_of(file, rows.facts, rules)
        loads = (_load(place, key) for place in jsonl_index.places(rows.path, key))
        shard = next((each for each in loads if each is not None), None)
        if shard is None:
            shard = tokenize()
            jsonl_index.save(rows.path, key, _dump(shard, key))
    return shard


def _dump(shard: token_files.Shard, key: Mapping[str, Any]) -> bytes:
    import numpy as np

    buffer = io.BytesIO()
    np.savez(buffer, key=np.array(json.dumps(key, sort_keys=True)), ids=shard.ids, ends=shard.ends)
    return buffer.getvalue()


def _load(place: Path, key: Mapping[str, Any]) -> token_files.Shard | None:
    """Load saved ids; None if the file is missing, damaged (an npz has checksums), or has another key."""
    import numpy as np

    try:
        with open(place, "rb") as file, np.load(file) as arrays:
            return (
                token_files.Shard(arrays["ids"], arrays["ends"])
                if arrays["key"] == json.dumps(key, sort_keys=True)
                else None
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def join_documents(documents: Iterable[Sequence[int]], eos_id: int) -> token_files.Shard:
    """Join documents, given without end tokens, into one shard in memory."""
    import numpy as np

    pieces = [np.array([*ids, eos_id], dtype=np.int32) for ids in documents]
    ends = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return token_files.Shard(np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32), ends)


def _check_tokenizer(folder: Path, facts: dict[str, Any], fingerprint: str, eos_id: int) -> None:
    tokenizer_name = f"{facts.get('name', 'another tokenizer')!r}"
    if facts["fingerprint"] != fingerprint:
        raise DataError(
            f"{folder}: tokenised with {tokenizer_name} (sha256 {facts['fingerprint'][:12]}), "
            f"but the model has another tokenizer ({fingerprint[:12]}). "
            "Run data_prep.tokenize with the model's tokenizer, or train a model with the tokenizer of these data."
        )
    if facts["eos_id"] != eos_id:
        raise DataError(
            f"{folder}: documents end with token {facts['eos_id']}, but the model's end token is {eos_id}. "
            f"{token_files.AGAIN}"
        )


class Documents:
    """Documents of one split, in order. `documents[i]` is (tokens,) int32, without the end token."""

    def __init__(
        self, shards: Sequence[token_files.Shard], eos_id: int, fingerprint: str, path: Path, content: str | None = None
    ) -> None:
        """path: for error messages. content: digest of the text, if it is not the fingerprint."""
        self.eos_id = eos_id
        self.fingerprint, self.content = fingerprint, content or fingerprint
        self.path = path
        self._shards = shards
        self._first_documents = [0, *accumulate(len(shard.ends) - 1 for shard in shards)]
        self._first_tokens = [0, *accumulate(len(shard.ids) for shard in shards)]
        self.num_tokens = self._first_tokens[-1]
        """Number of tokens in all documents, end tokens included."""

    def __len__(self) -> int:
        return self._first_documents[-1]

    def __getitem__(self, index: int) -> "np.ndarray":
        shard, first, last = self._place(index)
        return shard.ids[first : last - 1].astype("int32")

    def length(self, index: int) -> int:
        """Tokens of a document, with its end token."""
        _, first, last = self._place(index)
        return last - first

    def _place(self, index: int) -> tuple[token_files.Shard, int, int]:
        """The shard of a document, and the start and end of its tokens there, end token included."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = bisect_right(self._first_documents, index) - 1
        shard, place = self._shards[number], index - self._first_documents[number]
        return shard, int(shard.ends[place]), int(shard.ends[place + 1])

    def slice_tokens(self, first: int, last: int) -> "np.ndarray":
        """Copy tokens `first` to `last` (exclusive) of all documents joined with end tokens: (last - first,) int32."""
        import numpy as np

        if not 0 <= first <= last <= self.num_tokens:
            raise IndexError(f"tokens {first} to {last} of {self.num_tokens}")
        number = bisect_right(self._first_tokens, first) - 1
        pieces = [np.empty(0, np.int32)]
        while first < last:
            start, end = self._first_tokens[number : number + 2]
            pieces.append(self._shards[number].ids[first - start : min(last, end) - start])
            first, number = min(last, end), number + 1
        return np.concatenate(pieces, dtype=np.int32)


class StoredDocuments(Documents):
    """Documents of token files. A copy in another process maps the same files, or fails if they were replaced."""

    def __init__(self, folder: Path, split: str, eos_id: int) -> None:
        """Raise DataError if a file is missing or damaged."""
        self._split = split
        content = token_files.source_digest(token_files.require(folder, [split]), split)
        super().__init__(token_files.open_split(folder, split), eos_id, jsonl.fingerprint(folder), folder, content)

    def __getstate__(self) -> tuple[Path, str, int, str]:
        return self.path, self._split, self.eos_id, self.fingerprint

    def __setstate__(self, state: tuple[Path, str, int, str]) -> None:
        folder, split, eos_id, fingerprint = state
        self.__init__(folder, split, eos_id)
        if self.fingerprint != fingerprint:
            raise DataError(f"{folder}: the data set changed during this run. Start the run again.")


class PackedRows:
    """The joined documents, cut into rows of `length` tokens. A document can continue in the next row. The remainder is
    dropped."""

    def __init__(self, documents: Documents, length: int, most: int | None = None) -> None:
        """most: number of rows to use, the same ones in every experiment; None for all.

        Raises:
            DataError: the text is shorter than one row, or than `most` rows.
        """
        self._documents, self._length = documents, length
        total = documents.num_tokens // length
        if not total:
            raise DataError(
                f"{documents.path}: {documents.num_tokens} tokens, fewer than the {length} of one sequence. "
                "Use a smaller data.sequence_tokens, or more text."
            )
        self._indices = range(total) if most is None else jsonl.select_validation_rows(total, most, documents.path)

    def __len__(self) -> int:
        return len(self._indices)

    def row(self, index: int) -> "np.ndarray":
        """Copy row `index`: (length,) int32. Raises IndexError if there is no such row."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = self._indices[index] * self._length
        return self._documents.slice_tokens(first, first + self._length)
