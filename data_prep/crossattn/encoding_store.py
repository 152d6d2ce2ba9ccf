"""Write a folder of encoded contexts, resumable after a crash."""

import logging
from pathlib import Path
from typing import Any

from src import files
from src.errors import ConfigError, DataError
from src.systems.crossattn.data import encoded_shards, encoded_store

log = logging.getLogger(__name__)


def open_or_create(folder: Path, mine: dict[str, Any]) -> dict[str, Any]:
    """Read store.json, or create it if missing."""
    if not (folder / encoded_store.STORE).exists():
        store = {"format": encoded_store.FORMAT, **mine, "shards": {}, "prepared": []}
        files.write_json(folder / encoded_store.STORE, store)
        return store
    store = encoded_store.read_store(folder)
    if not encoded_store.same_base(store["model"], mine["model"]):
        stored_base, now = encoded_store.describe_base(store["model"]), encoded_store.describe_base(mine["model"])
        raise ConfigError(
            f"{folder}: contains states of {stored_base}, but --embedding_model is {now}. "
            "Choose another --data_cache_path, or remove the folder."
        )
    if store["dtype"] != mine["dtype"]:
        raise ConfigError(
            f"{folder}: contains states in {store['dtype']}, but --dtype is {mine['dtype']}. "
            f"Use --dtype {store['dtype']}, or remove the folder."
        )
    return store


def recover(folder: Path, store: dict[str, Any], verify: bool) -> set[bytes]:
    """Truncate damaged shards, and update the list of shards in `store`; return the keys of all complete entries."""
    size, defects = encoded_store.row_bytes(store), encoded_store.defects(folder, store)
    for message in defects.values():
        log.warning("%s: it is encoded again.", message)
    keys: set[bytes] = set()
    for name in [*store["shards"], *encoded_shards.unlisted_shards(folder, list(store["shards"]))]:
        records = _records(folder, name, store, size, everything=verify or name in defects)
        store["shards"].pop(name, None)
        if len(records):
            store["shards"][name] = {"entries": len(records), "tokens": int(records["tokens"].sum())}
            keys.update(record.tobytes() for record in records["key"])
    return keys


def _records(folder: Path, name: str, store: dict[str, Any], size: int, everything: bool) -> Any:
    """Truncate a shard at the first damaged record; return the complete records before it."""
    if not everything and name in store["shards"]:
        try:
            return encoded_shards.read_index(folder, name, store["shards"][name]["entries"])
        except DataError as error:
            log.warning(
                "%s It is encoded again.", str(error).removesuffix(" Run data_prep.crossattn.preproc_nq again.")
            )
    return encoded_shards.recover(folder, name, size, num_compared=2**62 if everything else 64)
