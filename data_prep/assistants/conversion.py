"""Convert the rows of a release to the files of a folder."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from data_prep import command, sources
from data_prep.assistants import conversation_joining, conversation_table
from data_prep.assistants.conversation_forms.columns import Columns, is_there, look_up
from data_prep.assistants.conversation_forms.rows import (
    CHANGES,
    SPLIT_NAME,
    Form,
    Row,
    contradicts_itself,
    missing_column,
    pop_change,
    rows_of,
)
from data_prep.assistants.conversation_table import Release
from src.errors import DataError
from src.experiments.config import describe_value, nearest_text
from src.systems.assistants.conversations.entries import Entry, check_strings, read_entry
from src.systems.assistants.conversations.refusals import refuses
from src.systems.assistants.conversations.rows import EMPTY_ROW, kind_of

SPLITS = ("train", "val")
_SKIPPED = {
    "unusable": "without a conversation in this form",
    "silent": "in which the assistant says nothing",
    "empty": "with an empty prompt",
    "negative": "with a negative label",
    "contradictory": "with one reply at two ranks",
    "refused": "in which the assistant refuses",
    "duplicate": "of the validation split that are also in the training split",
}
"""{name of the count: kind of rows that are not written}."""
_CHANGED = {
    "joined": "messages joined to the previous one, of the same role",
    "removed": "messages removed, such as those after the last answer",
    "shortened": "messages truncated",
    "tied": "rows with only tied replies",
    "blank": "blank lines",
}


class Conversion:
    """Converts the rows of a release to the files of a folder."""

    def __init__(
        self,
        name: str,
        release: Release,
        form: Form,
        named_sources: Sequence[tuple[str, str]],
        part: tuple[float, float] | None = None,
    ) -> None:
        """named_sources: (split, source) of each source.
        part: (start, end), from 0 to 1, of the questions to use for validation if no source is for validation."""
        self._part = part or (0.0, release.val_rate)
        self._name, self._release, self._form, self._named_sources = name, release, form, named_sources
        pinned = {"revision": release.revision, "data_files": release.files or None}
        self._rows_by_source = {
            source: sources.open_rows(source, sources.HUB_SPLITS[split], **(pinned if release.hub else {}))
            for split, source in named_sources
        }
        self._counts = Counter[str]()
        self._shares = dict[bytes, float]()
        """{`_digest` of a first message: `_share_of` the first row with it}.
        Messages that differ only in case or blanks have the same share."""
        self._has_val = any(split == "val" for split, _ in named_sources)
        self._is_shared = len({source for _, source in named_sources}) < len(named_sources)

    def made_from(self) -> dict[str, Any]:
        """Everything that the content of the folder depends on."""
        scripts = (__file__, conversation_joining.__file__, *conversation_table.SCRIPTS, conversation_table.REQUESTS)
        return {
            "sources": {source: sources.identify(source, rows) for source, rows in self._rows_by_source.items()},
            "options": [
                [*map(list, self._named_sources)],
                self._release.model_dump(mode="json"),
                self._form.model_dump(mode="json"),
            ],
            "part": [*self._part],
            "scripts_sha256": command.digest_files(scripts),
        }

    def fill(self, folder: Path) -> Mapping[str, Any]:
        """Write train.jsonl and val.jsonl; returns the counts."""
        counts, digests = self._counts, set[bytes]()
        joiners = {
            split: conversation_joining.Joiner(self._release.join_characters, self._release.shots) for split in SPLITS
        }
        with ExitStack() as stack:
            files = {
                split: stack.enter_context(open(folder / f"{split}.jsonl", "w", encoding="utf-8")) for split in SPLITS
            }
            waiting = stack.enter_context(TemporaryFile("w+", encoding="utf-8", dir=folder))

            def write(split: str, rows: Iterable[Row]) -> None:
                for row in rows:
                    files[split].write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                    counts[split] += 1

            for source in SPLITS:
                for split, digest, row in islice(self._convert(source), self._release.max_rows):
                    if split == "train":
                        digests.add(digest)
                        write(split, joiners[split].add(row))
                    else:  # until all training rows are known
                        waiting.write(json.dumps([digest.hex(), row]) + "\n")
            waiting.seek(0)
            for line in waiting:
                digest, row = json.loads(line)
                if bytes.fromhex(digest) in digests and not self._is_shared:
                    counts["duplicate"] += 1
                else:
                    write("val", joiners["val"].add(row))
            for split in SPLITS:
                write(split, joiners[split].flush())
        skipped = "; ".join(
            f"{counts[name]:,} {text}" for name, text in _SKIPPED.items() if counts[name] or name == "unusable"
        )
        for split in SPLITS:
            if not counts[split]:
                raise DataError(
                    f"{self._name}: none of {counts['read']:,} rows is in the split {split!r}. "
                    f"Skipped: {skipped}. Add rows, or change --val_rate or --val."
                )
        changed = "".join(f" {counts[name]:,} {text}." for name, text in _CHANGED.items() if counts[name])
        command.report(
            f"{self._name}: {counts['train']:,} train, {counts['val']:,} val, of {counts['read']:,} rows. "
            f"Skipped: {skipped}.{changed}",
            name=self._name,
            **counts,
        )
        return {"counts": dict(counts), "licence": self._release.licence}

    def _convert(self, source_split: str) -> Iterator[tuple[str, bytes, Row]]:
        """Yield (split, digest, prepared row) for each row of a split's sources, checked as training does it."""
        for where, row in (
            each for split, source in self._named_sources if split == source_split for each in self._groups(source)
        ):
            try:
                converted = list(self._form.read(row, where))
            except DataError as error:
                raise DataError(f"{error}{self._absent_columns(row)}") from None
            self._counts["unusable"] += 0 if converted else len(row["rows"]) if self._release.group_by else 1
            extra_columns = self._columns_to_keep(row, where) if converted else {}
            if self._skips_negative(row, converted, where):
                continue
            rows = [{**each, **extra_columns} for each in converted if not contradicts_itself(each)]
            self._counts["contradictory"] += len(converted) - len(rows)
            for each in rows:
                lists = [value for name in ("messages", "replies") if isinstance(value := each.get(name), list)]
                messages = [message for value in lists for message in value if isinstance(message, dict)]
                self._counts.update(
                    {change: sum(pop_change(message, change) for message in messages) for change in CHANGES}
                )
            entries = [read_entry(each, where) for each in rows]
            for each in rows:
                _require_json(each, where)
            for each, entry in zip(rows, entries, strict=True):
                if reason := self._reason_to_skip(each, entry):
                    self._counts[reason] += 1
                    continue
                self._counts["tied"] += bool(entry.replies) and len({reply.rank for reply in entry.replies}) == 1
                first = entry if entry.text is None else entries[0]  # pieces of a text stay together
                yield self._split_of(source_split, row, first), _digest(*_texts_of(entry)), each

    def _absent_columns(self, row: Row) -> str:
        """Text about the columns of --columns that a row does not have; "" if it has all."""
        row = rows_of(row)[0]
        absent = [(name, each) for name, each in self._release.columns.items() if name not in row]
        return "".join(f" {name}={each}: no column {each!r}.{nearest_text([each], row)}" for name, each in absent)

    def _columns_to_keep(self, row: Row, where: str) -> Row:
        """The columns of `keep`, which must be equal in all rows of a group.

        Raises:
            DataError: a row has no such column or a value that is not valid JSON, or the rows of a group differ.
        """
        first, *others = [
            {name: self._value(each, name, where) for name in self._release.keep} for each in rows_of(row)
        ]
        for name in (name for other in others for name in first if other[name] != first[name]):
            raise DataError(
                f"{where}: column {name!r} of `keep` differs between the rows of a group. Remove it from `keep`."
            )
        return first

    @staticmethod
    def _value(row: Row, name: str, where: str) -> Any:
        if name not in row:
            raise missing_column(row, name, where)
        _require_json(row[name], f"{where}: column {name!r}")
        check_strings(row[name], f"{where}: column {name!r}")
        return row[name]

    def _skips_negative(self, row: Row, converted: Sequence[Row], where: str) -> bool:
        """Whether to skip a row because its label is negative.

        Raises:
            DataError: `negatives` is "refuse".
        """
        if self._release.negatives == "learn" or not any(
            "messages" in each and "replies" not in each for each in converted
        ):
            return False
        labels = [(name, each[name]) for each in rows_of(row) for name in ("label", "kto_tag") if name in each]
        negative = next(((name, value) for name, value in labels if self._is_negative(value)), None)
        if negative and self._release.negatives == "refuse":
            raise DataError(
                f"{where}: {negative[0]}: {negative[1]!r} marks a bad answer. Set --negatives skip to drop "
                "such rows, or --negatives learn to train on them."
            )
        self._counts["negative"] += negative is not None
        return negative is not None

    def _is_negative(self, value: Any) -> bool:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value in (0, -1) and not isinstance(self._form, Columns)  # in columns, a number is usually a class
        return value is False or (isinstance(value, str) and value.strip().lower() == "false")

    def _reason_to_skip(self, row: Row, entry: Entry) -> str:
        """Reason to skip a row, a key of `_SKIPPED`; "" for a row to write."""
        if kind_of(row) == EMPTY_ROW or (entry.replies and not any(reply.content.strip() for reply in entry.replies)):
            return "silent"
        prompts = [message for message in entry.messages if message.role in ("user", "tool")]
        if prompts and not any(message.content.strip() for message in prompts):
            return "empty"
        return "refused" if self._release.without_refusals and refuses(entry.conversation) else ""

    def _split_of(self, split: str, row: Row, entry: Entry) -> str:
        if self._release.split_column is not None:
            return "val" if str(row.get(self._release.split_column)).startswith(("val", "test")) else "train"
        if split == "val" or self._has_val:
            return split
        share = self._shares.setdefault(_digest(_texts_of(entry)[0]), _share_of(entry))
        return "val" if self._part[0] <= share < self._part[1] else "train"

    def _groups(self, source: str) -> Iterator[tuple[str, Row]]:
        """Yield (where, row), or with `group_by` (where, {"rows": rows of a group}) in the order of the first rows."""
        if self._release.group_by is None:
            yield from self._rows(source)
            return
        groups = dict[str, tuple[str, list[Row]]]()
        for where, row in self._rows(source):
            value = look_up(row, self._release.group_by, where)
            key = where if value is None else json.dumps(value, sort_keys=True, default=str)
            groups.setdefault(key, (where, []))[1].append(row)
        yield from ((where, {"rows": rows}) for where, rows in groups.values())

    def _rows(self, source: str) -> Iterator[tuple[str, Row]]:
        """Yield (where, row) of a source, with the form's column names and `SPLIT_NAME`."""
        split = {
            SPLIT_NAME: sources.hub_id(source)[2]
            if source.startswith(sources.HUB)
            else Path(source).name.partition(".")[0]
        }
        is_arrow = self._rows_by_source[source] is not None or source.endswith(".parquet")
        for where, row in sources.read_rows(source, self._rows_by_source[source], counts=self._counts):
            self._counts["read"] += 1
            if is_arrow:  # it has given all tools the parameters of each other
                row = sources.without_nulls(row, ("tools", "tool_calls", "function_call"))
            renamed_columns = {
                name: look_up(row, column, where)
                for name, column in self._release.columns.items()
                if is_there(row, column)
            }
            yield where, {**split, **row, **renamed_columns}


def _require_json(value: Any, where: str) -> None:
    """Raise DataError for a value that JSON cannot write, such as a date, NaN or half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError):
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, part in parts:
            _require_json(part, f"{where}: {name}" if isinstance(value, dict) else f"{where}[{name}]")
        raise DataError(
            f"{where}: JSON cannot write {describe_value(value)}. Remove it, or write it as text."
        ) from None


def _texts_of(entry: Entry) -> list[str]:
    """All texts of a row, without system messages."""
    messages = [
        message
        for message in (*entry.messages, *(reply.message for reply in entry.replies))
        if message.role != "system"
    ]
    return [f"{message.role} {message.full_text} {message.reasoning}" for message in messages] or [entry.text or ""]


def _digest(*texts: str) -> bytes:
    """Digest of texts, ignoring case and blanks."""
    return hashlib.sha256("\0".join(" ".join(text.split()).casefold() for text in texts).encode()).digest()[:8]


def _share_of(entry: Entry) -> float:
    """A number from 0 to 1 that depends only on the first message."""
    question = next((message.content for message in entry.conversation if message.role != "system"), entry.text or "")
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") / 2**64
