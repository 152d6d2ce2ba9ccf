"""Convert records of a release to rows of a task: "index", its columns, "label", and "answers" and "group" if any."""

from collections.abc import Iterator
from typing import Any

from data_prep.t5.superglue import FORMS
from data_prep.t5.task_sources import Record, Source
from src.data.jsonl import check_type
from src.errors import DataError
from src.systems.t5.tasks.dataset import OPTIONAL, require_number

Row = dict[str, Any]


def rows(source: Source, skipped: list[str] | None) -> Iterator[Row]:
    """Yield the rows of a source, in order.
    skipped: collects messages about rows that do not fit; None: these raise an error.

    Raises:
        DataError: a record does not fit the task, or has no label where one is required; the message has its place.
    """
    form = FORMS.get(source.task.task.form or "")
    for where, record in source.records():
        try:
            if "" in record:
                raise DataError(f"{where}: {record['']}")
            if any(str(record.get(name)) != value for name, value in source.task.task.only.items()):
                continue
            for part in form(record, source.split, where) if form else (record,):
                yield _row(part, source, where)
        except DataError as error:
            if skipped is None:
                raise DataError(f"{error} Add --skip_bad_rows to drop such rows.") from None
            skipped.append(str(error))


def _row(record: Record, source: Source, where: str) -> Row:
    task = source.task.task
    new_row: Row = {"index": _index(_column_value(record, source, "index"))}
    for column in task.columns:
        value = _column_value(record, source, column)
        if not isinstance(value, str):
            got = (
                f"got {str(value)[:60]!r} ({type(value).__name__})"
                if value is not None
                else f"got only the columns {', '.join(record)}"
            )
            raise DataError(f"{where}: expected text in {' or '.join(map(repr, source.names(column)))}, {got}.")
        new_row[column] = value
    new_row["label"] = _label(_column_value(record, source, "label"), source, where)
    if new_row["label"] is None and source.split != "test":
        raise DataError(
            f"{where}: no label in {' or '.join(map(repr, source.names('label')))}. "
            "Add one, or use the source as --test."
        )
    if isinstance(record.get("answers"), list):
        new_row["answers"] = record["answers"]
    if isinstance(record.get("group"), str):
        new_row["group"] = record["group"]
    for name, value in new_row.items():
        if value is not None:
            check_type(value, OPTIONAL.get(name, str), f"{where}: field {name!r}")
    return new_row


def _column_value(record: Record, source: Source, column: str) -> Any:
    """Value of a column, under the first of its names that the record has."""
    return next((record[name] for name in source.names(column) if record.get(name) is not None), None)


def _index(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return value if type(value) is int else None


def _label(value: Any, source: Source, where: str) -> str | None:
    """Label as text: the name of a class, or the number of a regression.

    A class is given as its name or its number from 0. True and False are names if the task has them, else 1 and 0.
    -1 means unlabelled for classes, and for regressions if it is out of range. In text tasks "-1" is a label.
    """
    task = source.task.task
    minus_one = value == "-1" or (value == -1 and not isinstance(value, str))
    means_none = value == -1 if task.kind == "text" else task.range is None or not task.range[0] <= -1 <= task.range[1]
    if value in (None, "") or (minus_one and means_none and str(value) not in task.labels):
        return None
    if task.kind == "classes":
        text = str(value).strip()
        number = str(int(value)) if isinstance(value, bool) else text
        if text in task.labels:
            return text
        if number.isascii() and number.isdigit() and int(number) < len(task.labels):
            return task.labels[int(number)]
        choices = ", ".join(task.labels[:12])
        raise DataError(
            f"{where}: label of {source.task.name!r}: expected one of {choices}, or 0 to {len(task.labels) - 1}, "
            f"got {text[:60]!r}."
        )
    text = value.strip() if isinstance(value, str) else repr(value)
    if task.kind == "regression":
        require_number(text, task, where)
    elif not isinstance(value, str) or not text:
        raise DataError(f"{where}: expected text as the label, got {text[:60]!r} ({type(value).__name__}).")
    return text
