"""Prepare conversations or preferences from a file in the layout of its release, for the recipes sft, reward and dpo.

python -m data_prep.prepare_conversations --name webgpt
python -m data_prep.prepare_conversations --name webgpt --train comparisons.jsonl
python -m data_prep.prepare_conversations --name oasst_replies --release oasst_export --mode rm --train trees.jsonl.gz
python -m data_prep.prepare_conversations --name mine --release_file mine.yaml
python -m data_prep.prepare_conversations --form completion --train gsm8k.jsonl --columns prompt=question completion=answer --name mine

A release is an entry of resources/conversations, or of a file of one's own, which says where it is and in which form; or --form says that.
Sources: JSON, JSON lines (also .gz), Parquet, folders of `datasets`, hub:ID. Where a release has no rows for validation, and without --val,
a share of its rows is for validation: by what is asked first, so that no question is in both splits.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep import command, conversation_joining, conversation_table, sources
from data_prep.conversation_forms.columns import is_there, look_up
from data_prep.conversation_forms.rows import SPLIT_NAME, Form, Row, contradicts_itself
from data_prep.conversation_table import FORMS, Mode, Release
from data_prep.qa_releases import json_stream
from src.config import load as load_config
from src.data.conversations.entries import Entry, read_entry
from src.data.conversations.refusals import refuses
from src.errors import ConfigError, DataError

COMMAND = "python -m data_prep.prepare_conversations"
SPLITS = ("train", "val")


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--name", required=True, help="folder below --data_path")
    add("--release", metavar="NAME", help="entry of resources/conversations (default: --name)")
    add("--release_file", type=Path, metavar="YAML", help="entries of one's own, which are looked at first")
    add("--mode", choices=("sft", "rm"), help="answers to learn, or ranked replies, of a release that has both (default: its first)")
    add("--form", metavar="FORM", help=f"layout of the rows, instead of a release: {', '.join(FORMS)}")
    add("--train", nargs="+", default=[], metavar="SOURCE", help="rows to train on (default: where the release is)")
    add("--val", nargs="+", default=[], metavar="SOURCE", help="rows for validation (default: as the release says, or a share of --train)")
    add("--val_rate", type=float, help="that share (default: as the release says; 0.1 with --form)")
    add("--fold", metavar="K/N", help="for validation the K-th of N parts of --train, such as 2/5: parts have no question in common")
    add("--columns", nargs="+", default=[], metavar="NAME=COLUMN", help="what columns of the form are called in the source")
    add("--lang", metavar="LANGUAGES", help="of trees, such as en,de (default: en)")
    add("--top_k", type=int, metavar="K", help="of trees: replies of rank 0 to K - 1 are gone on with (default: all)")
    add("--synthetic", action="store_true", help="of trees: also messages that a model has written")


def prepare(  # noqa: PLR0913  the options of the command
    data_path: Path,
    name: str,
    *,
    release: str | None = None,
    release_file: Path | None = None,
    mode: Mode | None = None,
    form: str | None = None,
    train: Sequence[str] = (),
    val: Sequence[str] = (),
    val_rate: float | None = None,
    fold: str | None = None,
    columns: Sequence[str] = (),
    lang: str | None = None,
    top_k: int | None = None,
    synthetic: bool = False,
) -> bool:
    """Make the folder `name` below `data_path`; False if it is whole and was made from the same, so that nothing was done.

    Raises:
        ConfigError: an option is wrong, or the release's entry is.
        DataError: a source is missing, or of another layout, or a split would be empty.
    """
    if val_rate is not None and not 0 < val_rate < 1:
        raise ConfigError(f"--val_rate: expected a number between 0 and 1, got {val_rate:g}.")
    part = parse_fold(fold) if fold else None
    if part and (val or val_rate is not None):
        raise ConfigError("--fold says which rows are for validation: leave --val and --val_rate out.")
    if form is None:
        entry, path = conversation_table.find(release or name, release_file)
    elif release or release_file or mode:
        raise ConfigError("--form says what --release, --release_file and --mode would: give either.")
    else:
        entry, path = load_config(Release, {"form": form, "licence": "unstated", "val_rate": 0.1}, "--form"), Path()
        if not train:
            raise ConfigError("--form: expected --train with the rows of this form.")
    if entry.split_column is not None and (part or val or val_rate is not None):
        raise ConfigError(
            f"--fold, --val and --val_rate: column {entry.split_column!r} of {release or name} says which rows are for validation. "
            "Leave them out."
        )
    if mode not in (None, *entry.modes):
        raise ConfigError(f"--mode {mode}: {release or name} has {' and '.join(entry.modes)} only.")
    read = _with_options(entry.form_of(mode or entry.modes[0]), lang, top_k, synthetic)
    renamed = {**entry.columns, **dict(_renaming(text) for text in columns)}
    entry = entry.model_copy(update={"val_rate": val_rate or entry.val_rate, "columns": renamed})
    train_sources = [*train] or conversation_table.sources_of(entry, "train", path)
    val_sources = [*val] or ([] if train or part else conversation_table.sources_of(entry, "val", path))
    work = _Work(name, entry, read, [("train", each) for each in train_sources] + [("val", each) for each in val_sources], part)
    return command.make_folder(data_path / name, COMMAND, work.made_from(), work.fill) is not None


def _with_options(form: Form, lang: str | None, top_k: int | None, synthetic: bool) -> Form:
    """The form with the options of the command line, which it must heed."""
    given = {"languages": lang.split(",") if lang else None, "top_k": top_k, "synthetic": synthetic or None}
    given = {name: value for name, value in given.items() if value is not None}
    if given.keys() - type(form).model_fields.keys():
        raise ConfigError("--lang, --top_k and --synthetic are of trees, and rows of this form are none.")
    return load_config(type(form), {**form.model_dump(), **given}, "--top_k") if given else form


def _renaming(text: str) -> tuple[str, str]:
    name, sign, column = text.partition("=")
    if not sign or not name or not column:
        raise ConfigError(f"--columns {text!r}: expected NAME=COLUMN, such as prompt=question.")
    return name, column


class _Work:
    """From the rows of a release to the files of a folder."""

    def __init__(
        self, name: str, release: Release, form: Form, named: Sequence[tuple[str, str]], part: tuple[float, float] | None = None
    ) -> None:
        """named: (split, source) of each source. part: of the questions, those for validation where no source is, from 0 to 1."""
        self._part = part or (0.0, release.val_rate)
        self._name, self._release, self._form, self._named = name, release, form, named
        pinned = {"revision": release.revision, "data_files": release.files or None}
        self._given = {
            source: sources.open_rows(source, sources.HUB_SPLITS[split], **(pinned if release.hub else {})) for split, source in named
        }
        self._counts = Counter[str]()
        self._has_val = any(split == "val" for split, _ in named)

    def made_from(self) -> dict[str, Any]:
        """Everything that the content of the folder depends on."""
        scripts = (__file__, conversation_joining.__file__, *conversation_table.SCRIPTS, conversation_table.REQUESTS)
        return {
            "sources": {source: sources.identify(source, rows) for source, rows in self._given.items()},
            "options": [[*map(list, self._named)], self._release.model_dump(mode="json"), self._form.model_dump(mode="json")],
            "part": [*self._part],
            "scripts_sha256": command.digest_files(scripts),
        }

    def fill(self, folder: Path) -> Mapping[str, Any]:
        """Write train.jsonl and val.jsonl; returns the counts."""
        counts = self._counts
        with ExitStack() as stack:
            files = {split: stack.enter_context(open(folder / f"{split}.jsonl", "w", encoding="utf-8")) for split in SPLITS}
            joiners = {split: conversation_joining.Joiner(self._release.join_characters, self._release.shots) for split in SPLITS}

            def write(split: str, rows: Iterable[Row]) -> None:
                for row in rows:
                    files[split].write(json.dumps(row, ensure_ascii=False) + "\n")
                    counts[split] += 1

            for split in SPLITS:
                for own, row in islice(self._convert(split), self._release.max_rows):
                    write(own, joiners[own].add(row))
            for split in SPLITS:
                write(split, joiners[split].flush())
        left_out = f"{counts['left out']:,} of {counts['read']:,} rows left out"
        for split in SPLITS:
            if not counts[split]:
                raise DataError(f"{self._name}: no row for the split {split!r}; {left_out}, which say nothing in this form.")
        refused = f", and {counts['refused']:,} answers that refuse" if self._release.without_refusals else ""
        told = {"contradictory": "with one reply at two ranks left out", "tied": "whose replies are all tied, from which nothing is ranked"}
        more = "".join(f"; {counts[name]:,} {text}" for name, text in told.items() if counts[name])
        print(f"{self._name}: {counts['train']:,} train, {counts['val']:,} val; {left_out}{refused}{more}")
        return {"counts": dict(counts), "licence": self._release.licence}

    def _convert(self, split: str) -> Iterator[tuple[str, Row]]:
        """(split, row of ours) of the sources of a split, each checked as a training checks it. Counts what was read, and what gave
        nothing."""
        for where, row in (each for of, source in self._named if of == split for each in self._groups(source)):
            given = list(self._form.read(row, where))
            self._counts["left out"] += 0 if given else len(row["rows"]) if self._release.group_by else 1
            found = [each for each in given if not contradicts_itself(each)]
            self._counts["contradictory"] += len(given) - len(found)
            entries = [read_entry(each, where) for each in found]
            for each, entry in zip(found, entries, strict=True):
                self._counts["tied"] += bool(entry.replies) and len({reply.rank for reply in entry.replies}) == 1
                if self._release.without_refusals and refuses(entry.conversation):
                    self._counts["refused"] += 1
                else:
                    yield self._split_of(split, row, entry if entry.text is None else entries[0]), each

    def _split_of(self, split: str, row: Row, entry: Entry) -> str:
        if self._release.split_column is not None:
            return "val" if str(row.get(self._release.split_column)).startswith(("val", "test")) else "train"
        return "val" if split == "val" or (not self._has_val and self._part[0] <= _place(entry) < self._part[1]) else "train"

    def _groups(self, source: str) -> Iterator[tuple[str, Row]]:
        """(where, row), or where a release has `group_by`, (where, {"rows": those of a group}), in the order of their first rows."""
        if self._release.group_by is None:
            yield from self._rows(source)
            return
        groups = dict[str, tuple[str, list[Row]]]()
        for where, row in self._rows(source):
            key = json.dumps(look_up(row, self._release.group_by, where), sort_keys=True, default=str)
            groups.setdefault(key, (where, []))[1].append(row)
        yield from ((where, {"rows": rows}) for where, rows in groups.values())

    def _rows(self, source: str) -> Iterator[tuple[str, Row]]:
        """(where, row) of a source, with the names of the form, and `SPLIT_NAME`."""
        told = {SPLIT_NAME: sources.hub_id(source)[2] if source.startswith(sources.HUB) else Path(source).name.partition(".")[0]}
        for where, given in _read(source, self._given[source]):
            self._counts["read"] += 1
            renamed = {name: look_up(given, column, where) for name, column in self._release.columns.items() if is_there(given, column)}
            yield where, {**told, **given, **renamed}


def _read(source: str, rows: Any) -> Iterator[tuple[str, Row]]:
    """(where, row) of a source. rows: as `sources.open_rows` gave them; None of a file."""
    if rows is not None:
        yield from ((f"{source}: row {number}", dict(row)) for number, row in enumerate(rows, 1))
    elif source.endswith(".parquet"):
        yield from sources.parquet_rows(Path(source), lambda names: names)
    else:
        yield from json_stream.records(Path(source))


def parse_fold(text: str) -> tuple[float, float]:
    """Where the K-th of N equal parts of what is from 0 to 1 begins and ends, of the text K/N.

    Raises:
        ConfigError: it is none.
    """
    number, sign, of = text.partition("/")
    if not sign or not number.isdecimal() or not of.isdecimal() or not 1 <= int(number) <= int(of) or int(of) < 2:
        raise ConfigError(f"--fold {text!r}: expected K/N, such as 2/5, with K from 1 to N.")
    return (int(number) - 1) / int(of), int(number) / int(of)


def _place(entry: Entry) -> float:
    """From 0 to 1, by what is asked first."""
    asked = next((message.content for message in entry.conversation if message.role != "system"), entry.text or "")
    return int.from_bytes(hashlib.sha256(asked.encode()).digest()[:8], "big") / 2**64


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
