"""Read sources of task rows: tab-separated files, csv, JSON, parquet, folders of `datasets`, and the hub."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep import sources
from src.errors import DataError
from src.files import reading
from src.systems.t5.tasks import task_table

SPLITS = {
    "train": ("train",),
    "val": ("validation", "val", "dev", "validation_matched"),
    "test": ("test", "test_matched"),
}
"""{split of a prepared data set: its names on the hub}."""
OTHER_NAMES = {"index": ["index", "idx", "id"]}
Record = dict[str, Any]


class Source:
    """Records of one source, with the column names of its release. Each iteration reads the source again."""

    def __init__(self, source: str, split: str, task: task_table.NamedTask) -> None:
        """source: see `sources.open_rows`. split: a key of `SPLITS`.

        Raises:
            DataError: there is no such source.
        """
        self.source, self.split, self.task = source, split, task
        self._rows = sources.open_rows(source, SPLITS[split])

    def facts(self) -> dict[str, Any]:
        """See `sources.identify`."""
        return sources.identify(self.source, self._rows)

    def records(self) -> Iterator[tuple[str, Record]]:
        """Yield ("FILE:LINE", record) in the order of the source.

        Raises:
            DataError: the source is damaged, or does not have the columns of the task; the message has the place.
        """
        path = Path(self.source)
        suffix = path.suffix if self._rows is None else ""
        if suffix in (".tsv", ".txt"):
            yield from self._read_lines(path)
        elif suffix == ".csv":
            yield from self._read_csv(path)
        else:
            yield from self._name_classes(sources.read_rows(self.source, self._rows))

    def _read_lines(self, path: Path) -> Iterator[tuple[str, Record]]:
        """Read tab-separated columns. Quotation marks are plain text, as in all files of GLUE."""
        lines = [line.removesuffix("\r") for line in _text(path).split("\n")]
        while lines and not lines[-1]:
            lines.pop()
        if not lines:
            raise DataError(f"{path}: empty. Expected rows of the task {self.task.name!r}.")
        head = lines[0].split("\t")
        header = all(any(name in head for name in self.names(column)) for column in self.task.task.columns)
        names = head if header else self._plain(path, head)
        self._require_distinct(path, names)
        for number, line in enumerate(lines[header:], 1 + header):
            values = line.split("\t")
            if len(values) != len(names):
                yield f"{path}:{number}", {"": f"{len(values)} columns, where the first line has {len(names)}."}
                continue
            yield (
                f"{path}:{number}",
                {name: value for name, value in zip(names, values, strict=True) if name not in ("", "_")},
            )

    def names(self, column: str) -> list[str]:
        """Names of `column` in releases."""
        return [*OTHER_NAMES.get(column, [column]), *self.task.task.names.get(column, [])]

    def _require_distinct(self, path: Path, names: Sequence[str]) -> None:
        """Raise DataError if two columns have one name that the task reads."""
        read = {name for column in ("index", *self.task.task.columns, "label") for name in self.names(column)}
        for name in names:
            if name in read and names.count(name) > 1:
                raise DataError(f"{path}:1: {names.count(name)} columns {name!r}. Rename or remove all but one.")

    def _plain(self, path: Path, first: list[str]) -> list[str]:
        for names in self.task.task.plain:
            if len(names) == len(first):
                return names
        task, known_names = self.task.task, " or ".join(" ".join(names) for names in self.task.task.plain)
        without = f" A file without a header line has the columns {known_names}." if known_names else ""
        missing = next(c for c in task.columns if not any(name in first for name in self.names(c)))
        missing_names = " or ".join(map(repr, self.names(missing)))
        column_names = ", ".join(repr(name[:30]) for name in first[:12])
        raise DataError(
            f"{path}:1: expected a column {missing_names} for {missing!r} of {self.task.name!r}, "
            f"got {len(first)} columns: {column_names}.{without}"
        )

    def _read_csv(self, path: Path) -> Iterator[tuple[str, Record]]:
        reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
        try:
            self._require_distinct(path, reader.fieldnames or [])
            for record in reader:
                if None in record or None in record.values():
                    record = {"": "more or fewer columns than in the header. Correct the line."}
                else:
                    record.pop("", None)  # numbers of rows, without a name in the header
                yield f"{path}:{reader.line_num}", record
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: malformed CSV ({error}). Correct the line.") from None

    def _name_classes(self, rows: Iterator[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
        """Replace class numbers by class names, if the names are those of the task."""
        classes: dict[str, list[str]] | None = None
        for where, row in rows:
            if classes is None:
                classes = self._classes()
            numbers = {name: row[name] for name in classes if type(row.get(name)) is int and row[name] >= 0}
            wrong = next((name for name, number in numbers.items() if number >= len(classes[name])), None)
            if wrong is not None:
                problem = f"{wrong!r}: expected the number of one of {len(classes[wrong])} classes, got {row[wrong]}."
                yield where, {"": problem}
                continue
            yield where, {**row, **{name: classes[name][number] for name, number in numbers.items()}}

    def _classes(self) -> dict[str, list[str]]:
        """{column: names of its classes}, as `datasets` saved them with the source."""
        features: dict[str, Any] = {}
        if self._rows is not None:
            features = self._rows.features.to_dict()
        elif self.source.endswith(".parquet"):
            from pyarrow.parquet import read_schema

            saved = (read_schema(self.source).metadata or {}).get(b"huggingface", b"{}")
            features = json.loads(saved).get("info", {}).get("features", {})
        classes = {
            name: feature["names"]
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
        return {name: texts for name, texts in classes.items() if set(texts) <= set(self.task.task.labels)}


def _text(path: Path) -> str:
    with reading(path, DataError):
        data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as bad:
        line = data.count(b"\n", 0, bad.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text: {bad.reason}. Convert the file to UTF-8.") from None
