"""Contexts encoded in advance: hidden states on disk, looked up by the ids of the encoder input.

A store is a folder with store.json and shards (src/systems/crossattn/data/encoded_shards.py). The key of an entry is
the sha256 of its ids, so equal inputs share an entry. data_prep.crossattn.preproc_nq writes the store to the folder
`encoded` next to the rows.

Shapes: B samples, C maximum number of context chunks per sample, S tokens of the longest chunk, P = C * S positions, D
hidden size.
"""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.experiments.kinds import CROSS_ATTENTION
from src.files import read_json
from src.support.call_once import call_once
from src.systems.crossattn.data.encoder_inputs import EncodingOptions

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

FOLDER, STORE = "encoded", "store.json"
FORMAT = 1
WHERE = frozenset({"path", "revision", "exp_id", "checkpoint"})
"""Identity fields that describe location, not content."""
AGAIN = "Run data_prep.crossattn.preproc_nq again. It reuses finished parts."
_SAME_NAMES = ("template", "questions_on_contexts", "chunked_contexts", "too_long")
FLAGS = {"context_tokens": "--maximum_input_length", **{name: f"--{name}" for name in _SAME_NAMES}}
"""Options of a data set that define the encoder inputs, and the flags of data_prep.crossattn.preproc_nq for them."""


def context_key(ids: Sequence[int]) -> bytes:
    """Key of an encoder input: sha256 of its ids as little-endian int64."""
    return hashlib.sha256(array("q", ids).tobytes()).digest()


def base_identity(model: ModelConfig, places: Places) -> dict[str, Any] | None:
    """Identity of the encoder of `model`'s contexts; None if it is not known before training.

    {"name", "fingerprint", and the fields of the base's config}. Compare with `same_base`.

    Raises:
        UserError: an unknown experiment, or damaged files.
    """
    base, changed = _find_encoder(model, places)
    fingerprint = None if changed else call_once(base.identity, places)
    return {"name": base.name, "fingerprint": fingerprint, **base.model_dump(mode="json")} if fingerprint else None


def _find_encoder(model: ModelConfig, places: Places) -> tuple[ModelConfig, str]:
    """The model that encodes the contexts of `model`, and the setting that trains it, or "".

    The encoder of a cross-attention model, or of an experiment with one, is its base. Any other model is its own
    encoder.
    """
    if model.name == "lora" or getattr(model, "train_all_params", False):
        return model, "adapters" if model.name == "lora" else "train_all_params"
    if model.kind(places) != CROSS_ATTENTION:
        return model, ""
    if model.name == "cross_attention":
        return model.base, ""  # type: ignore[attr-defined]  of this config
    parent: ModelConfig = model.parent(places)  # type: ignore[attr-defined]  it is an experiment
    base, changed = _find_encoder(parent, places)
    return base, changed and f"{changed} of {model.exp_id}"  # type: ignore[attr-defined]  it is an experiment


def same_base(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities have the same weights in the same type."""
    return base_content(one) == base_content(other)


def base_content(base: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an identity that describe content, without unset options."""
    return {k: v for k, v in base.items() if k not in WHERE and v is not None}


def describe_base(base: Mapping[str, Any]) -> str:
    """An identity as text, for messages."""
    name = base.get("path") or base.get("exp_id") or base["name"]
    more = f", {base['dtype']}" if "dtype" in base else ""
    return f"{name} (fingerprint {base['fingerprint'][:12]}{more})"


def read_store(folder: Path) -> dict[str, Any]:
    """Read store.json, but no shard: {"model", "hidden_size", "dtype", "shards": {name: {"entries", "tokens"}},
    "prepared": [...]}.

    Raises:
        DataError: the file is missing, incomplete or of another format.
    """
    path = folder / STORE
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder. Run data_prep.crossattn.preproc_nq to encode the contexts, or set "
            f"encoded_contexts: false."
        )
    store = read_json(path, DataError)
    keys = {"format", "model", "hidden_size", "dtype", "shards", "prepared"}
    if not isinstance(store, dict) or not keys <= store.keys() or store["format"] != FORMAT:
        raise DataError(f"{path}: not a store of format {FORMAT}. {AGAIN}")
    return store


def row_bytes(store: Mapping[str, Any]) -> int:
    """Bytes of the states of one token."""
    return store["hidden_size"] * (4 if store["dtype"] == "float32" else 2)


def defects(folder: Path, store: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of the shards that are missing or have a wrong size, by name."""
    problems = {}
    for name, facts in store["shards"].items():
        path = folder / f"{name}.states"
        size, right = path.stat().st_size if path.is_file() else None, facts["tokens"] * row_bytes(store)
        if size != right:
            problems[name] = f"{path}: expected {right} bytes, got {'no file' if size is None else size}"
    return problems


def check(folder: Path, rules: EncodingOptions, corpus: str) -> dict[str, Any]:
    """The content of store.json in `folder`, which must be complete for `rules` and the corpus with fingerprint
    `corpus`. Reads no rows and no states.

    Raises:
        DataError: the store is missing, unfinished or damaged, or has other rows.
        ConfigError: the store was written with other options.
    """
    store = read_store(folder)
    for problem in defects(folder, store).values():
        raise DataError(f"{problem}. {AGAIN}")
    if not store["prepared"]:
        raise DataError(f"{folder}: not finished. {AGAIN}")
    expected_options = asdict(rules)
    if not any(_options(entry) == expected_options for entry in store["prepared"]):
        raise ConfigError(f"{folder}: {_differences(expected_options, _options(store['prepared'][-1]))}")
    if not any(_options(entry) == expected_options and entry["corpus"] == corpus for entry in store["prepared"]):
        raise DataError(f"{folder}: the rows have changed since they were encoded. {AGAIN}")
    return store


def check_base(folder: Path, model: ModelConfig, places: Places) -> None:
    """Require that the encoder of `model` has written the store in `folder`. An encoder that is not trained yet passes.

    Raises:
        ConfigError: another base has written the store, or the encoder changes in training.
    """
    changed = _find_encoder(model, places)[1]
    if changed:
        raise ConfigError(
            f"data.encoded_contexts: true, but the encoder of the contexts changes in training ({changed}). "
            "Set it to false."
        )
    stored_base, own_base = read_store(folder)["model"], base_identity(model, places)
    if own_base is not None and not same_base(stored_base, own_base):
        raise ConfigError(
            f"{folder}: expected contexts encoded by the model's base, {describe_base(own_base)}, "
            f"got {describe_base(stored_base)}. Run data_prep.crossattn.preproc_nq with this base and another "
            "--data_cache_path, or use the base that encoded them."
        )


def _options(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in FLAGS}


def _differences(expected_options: Mapping[str, Any], saved_options: Mapping[str, Any]) -> str:
    differences = [
        f"data.{k} is {expected_options[k]!r}, encoded with {saved_options[k]!r} ({FLAGS[k]})"
        for k in FLAGS
        if expected_options[k] != saved_options[k]
    ]
    return f"{'; '.join(differences)}. Make them equal, or run data_prep.crossattn.preproc_nq again with these options."


class Store:
    """Reads the states of a finished store. Can be pickled: each process maps the files itself."""

    def __init__(self, folder: Path, store: Mapping[str, Any]) -> None:
        """store: from `read_store` or `check`. Raises DataError if an index is damaged."""
        self._folder, self._store = folder, store
        self.hidden_size: int = store["hidden_size"]
        self._load()

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_store": self._store, "hidden_size": self.hidden_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()

    def _load(self) -> None:
        import numpy as np

        from src.systems.crossattn.data.encoded_shards import RECORD, read_index

        self._names = list(self._store["shards"])
        parts = [read_index(self._folder, name, self._store["shards"][name]["entries"]) for name in self._names]
        records = np.concatenate([np.empty(0, RECORD), *parts])
        shards = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        starts = _key_prefixes(records)
        order = starts.argsort(kind="stable")
        self._records, self._shards, self._starts = records[order], shards[order], starts[order]
        self._is_verified = np.zeros(len(records), bool)
        self._maps: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._records)

    def pad(self, samples: Sequence[Sequence[Sequence[int]]]) -> tuple["Tensor", "Tensor"]:
        """States (B, P, D) of the chunks of B samples, zero at padding, and a mask (B, P), True on real tokens.

        Chunk c of a sample starts at position c * S, as when contexts are encoded at each step.

        Raises:
            DataError: an input is missing from the store, or damaged.
        """
        import torch

        B, C = len(samples), max(map(len, samples))
        S = max(len(ids) for chunks in samples for ids in chunks)
        hidden = torch.zeros(B, C, S, self.hidden_size, dtype=getattr(torch, self._store["dtype"]))
        mask = torch.zeros(B, C, S, dtype=torch.bool)
        bits = self._bits(hidden)
        for b, chunks in enumerate(samples):
            for c, ids in enumerate(chunks):
                self._copy(ids, bits[b, c, : len(ids)])
                mask[b, c, : len(ids)] = True
        return hidden.view(B, C * S, -1), mask.view(B, C * S)

    def _bits(self, tensor: "Tensor") -> "np.ndarray":
        """The memory of `tensor` as integers, since numpy has no bfloat16."""
        import torch

        return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()

    def _copy(self, ids: Sequence[int], out: "np.ndarray") -> None:
        """Fill out (S, D) with the states of `ids`."""
        import zlib

        place = self._find(ids)
        record = self._records[place]
        first = int(record["first"])
        source = self._map(int(self._shards[place]))[first : first + len(ids)]
        if not self._is_verified[place]:
            if int(record["tokens"]) != len(ids) or zlib.crc32(source) != int(record["states_crc"]):  # type: ignore[arg-type]  a buffer
                name = self._names[int(self._shards[place])]
                raise DataError(
                    f"{self._folder / name}.states: damaged from token {first} on. "
                    "Run data_prep.crossattn.preproc_nq again with --verify."
                )
            self._is_verified[place] = True
        out[:] = source

    def _find(self, ids: Sequence[int]) -> int:
        import numpy as np

        key = context_key(ids)
        place = int(np.searchsorted(self._starts, np.uint64(int.from_bytes(key[:8], "big"))))
        while place < len(self._records) and self._records[place]["key"].tobytes()[:8] == key[:8]:
            if self._records[place]["key"].tobytes() == key:
                return place
            place += 1
        options_text = (
            json.dumps({name: self._store["prepared"][-1][name] for name in FLAGS})
            if self._store["prepared"]
            else "nothing"
        )
        raise DataError(
            f"{self._folder}: no states for an input of {len(ids)} tokens (sha256 {key.hex()[:12]}). The rows or the "
            f"tokenizer have changed since the store was written with the options {options_text}. {AGAIN}"
        )

    def _map(self, shard: int) -> "np.ndarray":
        import numpy as np

        from src.systems.crossattn.data.encoded_shards import DTYPES, STATES

        if shard not in self._maps:
            path = self._folder / f"{self._names[shard]}{STATES}"
            shape = (self._store["shards"][self._names[shard]]["tokens"], self.hidden_size)
            kind = np.dtype(DTYPES[self._store["dtype"]].str.replace("u", "i"))
            try:
                self._maps[shard] = np.memmap(path, dtype=kind, mode="r", shape=shape)
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: cannot be read ({error}). {AGAIN}") from None
        return self._maps[shard]


def _key_prefixes(records: "np.ndarray") -> "np.ndarray":
    """The first eight bytes of each key as a number, for sorting and searching."""
    import numpy as np

    return np.ascontiguousarray(np.frombuffer(records["key"].tobytes(), ">u8")[::4]).astype(np.uint64)
