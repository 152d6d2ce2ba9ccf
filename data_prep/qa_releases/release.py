"""One release as it is given on the command line: a file, a folder saved by `datasets`, a parquet file, or a set of the hub."""

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.qa_releases import json_stream, msmarco, prepared, triviaqa
from data_prep.qa_releases.detection import LAYOUTS, layout_of
from data_prep.qa_releases.question import Question, Skipped
from src.errors import DataError
from src.files import reading, sha256

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hub:"
_HUB_SPLITS = {"train": ("train",), "val": ("validation", "val", "dev", "test")}
_SAVED = ("dataset_dict.json", "dataset_info.json")
_BATCH_ROWS = 256


class Release:
    """Questions of one source, read again each time."""

    def __init__(self, source: str, split: str, layout: str | None = None, evidence: Path | None = None) -> None:
        """source: a path, or "hub:ID" or "hub:ID@CONFIG". layout: None to detect it by the first record.

        Raises:
            DataError: there is no such source.
        """
        self.source = source
        self.split = split
        self._layout = layout
        self._evidence = evidence
        self._rows = self._saved_rows()
        if self._rows is None and not Path(source).is_file():
            hint = f' A set of the hub is written "{HUB}{source}".' if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", source) else ""
            raise DataError(f"{source}: no such file.{hint}")

    @property
    def name(self) -> str:
        """The name without its folder, on which the prepared data do not depend."""
        return self.source if self.source.startswith(HUB) else Path(self.source).name

    def facts(self) -> dict[str, Any]:
        """Identity of the source: {"name", "bytes", "sha256"}."""
        if self._rows is None:
            with reading(Path(self.source), DataError):
                return {"name": self.name, "bytes": Path(self.source).stat().st_size, "sha256": sha256(Path(self.source))}
        paths = [Path(file["filename"]) for file in self._rows.cache_files]
        digest = hashlib.sha256("".join(map(sha256, paths)).encode()).hexdigest()
        return {"name": self.name, "bytes": sum(path.stat().st_size for path in paths), "sha256": digest}

    def questions(self) -> Iterator[tuple[str, Question | Skipped]]:
        """(Layout, question) for every question, in the order of the source.

        Raises:
            DataError: the source is damaged or of no known layout; names the place.
        """
        name, read = "", None
        for where, record in self._records():
            if read is None:
                name = layout_of(record, where, self._layout)
                read = LAYOUTS[name].questions
                if self._evidence is not None:
                    if name != "triviaqa":
                        raise DataError(f"{where}: of the layout {name}, which has no use for --evidence.")
                    read = partial(triviaqa.questions, evidence=self._evidence)
            for question in read(record, where):
                yield name, question
        if read is None:
            raise DataError(f"{self.source}: holds nothing.")

    def _records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._rows is None and self.source.endswith(".parquet"):
            yield from _parquet(Path(self.source))
        elif self._rows is None:
            yield from json_stream.records(Path(self.source), msmarco.COLUMNS)
        else:
            for number, row in enumerate(self._rows, 1):
                yield f"{self.source}: row {number}", dict(row)

    def _saved_rows(self) -> "Dataset | None":
        folder = Path(self.source)
        if self.source.startswith(HUB):
            return _from_hub(self.source, self.split)
        if not folder.is_dir():
            return None
        if not any((folder / name).is_file() for name in _SAVED):
            raise DataError(f"{folder}: a folder, but not one that `datasets` saved: it has neither {' nor '.join(_SAVED)}.")
        import datasets

        try:
            loaded = datasets.load_from_disk(str(folder))
        except Exception as error:  # noqa: BLE001  whatever the library says of a damaged folder
            raise DataError(f"{folder}: `datasets` cannot read it: {_first_line(error)}") from None
        return _select_split(loaded, self.source, self.split)


def _from_hub(source: str, split: str) -> "Dataset":
    import datasets

    identity, _, config = source.removeprefix(HUB).partition("@")
    try:
        loaded = datasets.load_dataset(identity, config or None)
    except Exception as error:  # noqa: BLE001  the library raises a dozen kinds for a set that it cannot get
        arguments = repr(identity) + (f", {config!r}" if config else "")
        raise DataError(
            f"{source}: cannot be had from the hub or its cache: {_first_line(error)} Where there is a network, run "
            f"`python -c \"import datasets; datasets.load_dataset({arguments}).save_to_disk('FOLDER')\"`, copy the folder, and name it "
            "here; or name the file of the original release."
        ) from None
    return _select_split(loaded, source, split)


def _select_split(loaded: Any, source: str, split: str) -> "Dataset":
    if not isinstance(loaded, dict):
        return _drop_unused_columns(loaded)
    for name in _HUB_SPLITS[split]:
        if name in loaded:
            return _drop_unused_columns(loaded[name])
    raise DataError(f"{source}: has no split {' or '.join(map(repr, _HUB_SPLITS[split]))}. It holds: {', '.join(loaded)}.")


def _drop_unused_columns(rows: "Dataset") -> "Dataset":
    """Without unused fields, which take long to decompress."""
    return rows.remove_columns([name for name in rows.column_names if name in prepared.DROPPED])


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with reading(path, DataError), ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name not in prepared.DROPPED]
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except pyarrow.ArrowInvalid as bad:
        raise DataError(f"{path}: no parquet file, or a damaged one: {_first_line(bad)}") from None


def _first_line(error: Exception) -> str:
    line = (str(error) or type(error).__name__).split("\n", 1)[0][:200]
    return line if line.endswith(".") else f"{line}."
