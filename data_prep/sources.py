"""Open the sources of commands: files, folders saved by `datasets`, and data sets of the hub.
Each command interprets the rows itself."""

import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.crossattn.qa_releases import json_stream
from src.errors import DataError
from src.files import reading, sha256

HUB = "hub:"
HUB_SPLITS = {"train": ("train",), "val": ("validation", "val", "dev", "test")}
"""{split of a prepared data set: its names on the hub}."""
BATCH_ROWS = 256
_SAVED = ("dataset_dict.json", "dataset_info.json")
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+|[\w-]+)(@[\w.-]+)?(#\w+)?")


def open_rows(source: str, splits: Sequence[str], streaming: bool = False, **pinned: Any) -> Any:
    """Open a data set of the hub, "hub:ID", "hub:ID@CONFIG" or "hub:ID@CONFIG#SPLIT", or a folder saved by `datasets`.
    Returns its rows; None for a file.

    splits: names of the split to read if the source names no split; the first existing one is used.
    pinned: more arguments of `datasets.load_dataset` for a hub data set, such as its revision.

    Raises:
        DataError: there is no such source, or `datasets` cannot read it.
    """
    path, config_name = Path(source), ""
    if source.startswith(HUB):
        identity, config, config_name = hub_id(source)
        loaded = call_datasets(
            source, lambda datasets: datasets.load_dataset(identity, config, streaming=streaming, **pinned)
        )
    elif path.is_dir():
        if not any((path / name).is_file() for name in _SAVED):
            raise DataError(
                f"{source}: expected a folder that `datasets` saved, got one without {' and '.join(_SAVED)}. "
                "Name a file instead, or save the data with save_to_disk."
            )
        loaded = call_datasets(source, lambda datasets: datasets.load_from_disk(source))
    elif path.is_file():
        return None
    else:
        hint = f' Use "{HUB}{source}" for a data set of the hub.' if _HUB_ID.fullmatch(source) else ""
        raise DataError(f"{source}: no such file.{hint}")
    if not isinstance(loaded, dict):
        return loaded
    names = (config_name,) if config_name else splits
    for name in names:
        if name in loaded:
            return loaded[name]
    example = f"{source.partition('#')[0]}{'#' if source.startswith(HUB) else '/'}{next(iter(loaded), 'SPLIT')}"
    raise DataError(
        f"{source}: no split {' or '.join(map(repr, names))}. Splits: {', '.join(loaded)}. "
        f"Name one of them, such as {example}."
    )


def hub_id(source: str) -> tuple[str, str | None, str]:
    """Parse a hub source to (ID, config or None, split or "")."""
    identity, _, split = source.removeprefix(HUB).partition("#")
    identity, _, config = identity.partition("@")
    return identity, config or None, split


def call_datasets(source: str, call: Callable[[Any], Any]) -> Any:
    """Return `call(datasets)`; turn any error of the library into a DataError that names the source."""
    import datasets

    try:
        return call(datasets)
    except Exception as error:  # noqa: BLE001  the library raises a dozen classes for sources that it cannot download or read
        if not source.startswith(HUB):
            raise DataError(
                f"{source}: `datasets` cannot read it ({first_line(error).rstrip('.')}). "
                "Save it again with save_to_disk."
            ) from None
        arguments = ", ".join(repr(part) for part in hub_id(source)[:2] if part)
        raise DataError(
            f"{source}: cannot be loaded from the hub or its cache: {first_line(error)} On a machine with network, "
            f"run `python -c \"import datasets; datasets.load_dataset({arguments}).save_to_disk('FOLDER')\"`, "
            "copy the folder, and name it here; or name the files of the original release."
        ) from None


def identify(source: str, rows: Any = None) -> dict[str, Any]:
    """{"name", "bytes", "sha256"}, equal for equal data in any folder. rows: result of `open_rows`."""
    paths = [Path(source)] if rows is None else [Path(file["filename"]) for file in rows.cache_files]
    with reading(Path(source), DataError):
        digests, size = [sha256(path) for path in paths], sum(path.stat().st_size for path in paths)
    digest = digests[0] if rows is None else hashlib.sha256("".join(digests).encode()).hexdigest()
    return {"name": source if source.startswith(HUB) else Path(source).name, "bytes": size, "sha256": digest}


def require_distinct(identities: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise DataError if a source is given twice. identities: ("--OPTION SOURCE", its identity)."""
    seen: dict[str, str] = {}
    for option, facts in identities:
        key = str({name: value for name, value in facts.items() if name != "name"})
        if key in seen:
            raise DataError(f"{option}: same data as {seen[key]}. Remove one of them.")
        seen[key] = option


def parquet_rows(
    path: Path, choose: Callable[[list[str]], list[str]], at_once: int = BATCH_ROWS
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("FILE: row N", row) for each row of a Parquet file.
    choose: selects the columns to read. at_once: rows in memory at a time.

    Raises:
        DataError: the file is not Parquet, or is damaged.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = itertools.count(1)
    try:
        with reading(path, DataError), ParquetFile(path) as file:
            for batch in file.iter_batches(at_once, columns=choose(file.schema_arrow.names)):
                yield from ((f"{path}: row {next(number)}", row) for row in batch.to_pylist())
    except pyarrow.ArrowInvalid as bad:
        raise DataError(
            f"{path}: not a parquet file, or damaged ({first_line(bad).rstrip('.')}). Download it again."
        ) from None
    except (pyarrow.ArrowException, ValueError, OverflowError) as bad:  # not UTF-8, a date after the year 9999
        raise DataError(
            f"{path}: row {next(number)} or a later one of its batch: {first_line(bad)} Write the column again as text."
        ) from None


def read_rows(
    source: str, rows: Any, choose: Callable[[list[str]], list[str]] = list, **more: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("FILE:LINE" or similar, row) for each row of a source.
    rows: result of `open_rows`; None for a JSON or Parquet file. choose: see `parquet_rows`.
    more: arguments of `json_stream.records`."""
    if rows is not None:
        return _numbered_rows(source, rows)
    if source.endswith(".parquet"):
        return parquet_rows(Path(source), choose)
    return json_stream.records(Path(source), **more)


def _numbered_rows(source: str, rows: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("SOURCE: row N", row); raise DataError for one that `datasets` cannot decode."""
    number, iterator = 0, iter(rows)
    while (row := call_datasets(source, lambda _: next(iterator, None))) is not None:
        number += 1
        yield f"{source}: row {number}", dict(row)


def without_nulls(value: Any, below: Collection[str] | None = None) -> Any:
    """Copy of a JSON value without null members at any depth, or only in the values of the keys `below`."""
    if isinstance(value, dict):
        return {
            name: without_nulls(part, None if below is None or name in below else below)
            for name, part in value.items()
            if part is not None or below is not None
        }
    return [without_nulls(part, below) for part in value] if isinstance(value, list) else value


def first_line(error: Exception) -> str:
    """First line of a library's error message, as a sentence."""
    line = next(iter(str(error).splitlines()), type(error).__name__)[:200]
    return line if line.endswith(".") else f"{line}."
