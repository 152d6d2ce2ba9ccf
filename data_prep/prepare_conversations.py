"""Prepare conversations or preferences from a file in the layout of its release, for the recipes sft, reward and dpo.

python -m data_prep.prepare_conversations --form alpaca --train alpaca.json --name alpaca
python -m data_prep.prepare_conversations --form completion --train gsm8k.jsonl --columns prompt=question completion=answer --name gsm8k
python -m data_prep.prepare_conversations --form oasst_ranked --train trees.jsonl --lang en,de --name oasst_replies

Forms: messages (Hugging Face's, or ShareGPT's conversations), completion (prompt and completion), alpaca, pairs (chosen and rejected),
ranked (messages and replies with ranks, as src.serving.page writes them), oasst (the threads of message trees), oasst_ranked (their
ranked replies). Sources: JSON, JSON lines (also .gz), Parquet, folders of `datasets`, hub:ID. Without --val a share
of the rows is for validation: by what is asked first, so that no question is in both splits.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import command, conversation_forms, sources
from data_prep.conversation_forms import FORMS, Options, Row
from data_prep.qa_releases import json_stream
from src.config import unknown_text
from src.data.conversations.entries import read_entry
from src.errors import ConfigError, DataError

COMMAND = "python -m data_prep.prepare_conversations"


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--form", required=True, metavar="FORM", help=f"layout of the rows: {', '.join(FORMS)}")
    add("--train", required=True, nargs="+", metavar="SOURCE", help="rows to train on")
    add("--val", nargs="+", default=[], metavar="SOURCE", help="rows for validation (default: a share of --train)")
    add("--val_rate", type=float, default=0.1, help="that share (default: %(default)s)")
    add("--name", required=True, help="folder below --data_path")
    add("--columns", nargs="+", default=[], metavar="NAME=COLUMN", help="what columns of the form are called in the source")
    add("--lang", default="en", metavar="LANGUAGES", help="of trees, such as en,de (default: %(default)s)")
    add("--top_k", type=int, metavar="K", help="of trees: replies of rank 0 to K - 1 are gone on with (default: all)")
    add("--synthetic", action="store_true", help="of trees: also messages that a model has written")


def prepare(  # noqa: PLR0913  the options of the command
    data_path: Path,
    form: str,
    train: Sequence[str],
    name: str,
    *,
    val: Sequence[str] = (),
    val_rate: float = 0.1,
    columns: Sequence[str] = (),
    lang: str = "en",
    top_k: int | None = None,
    synthetic: bool = False,
) -> bool:
    """Make the folder `name` below `data_path`; False if it is whole and was made from the same, so that nothing was done.

    Raises:
        ConfigError: an option is wrong.
        DataError: a source is missing, or of another layout, or a split would be empty.
    """
    if form not in FORMS:
        raise ConfigError(f"--form: {unknown_text('form', form, FORMS)}")
    if not 0 < val_rate < 1:
        raise ConfigError(f"--val_rate: expected a number between 0 and 1, got {val_rate:g}.")
    renamed = dict(_renaming(text) for text in columns)
    options = Options(lang.split(","), top_k, synthetic)
    named = [("train", source) for source in train] + [("val", source) for source in val]
    given = {source: sources.open_rows(source, sources.HUB_SPLITS[split]) for split, source in named}
    made_from = {
        "sources": {source: sources.identify(source, rows) for source, rows in given.items()},
        "options": [form, [*train], [*val], val_rate, renamed, lang, top_k, synthetic],
        "scripts_sha256": command.digest_files((__file__, conversation_forms.__file__)),
    }

    def fill(folder: Path) -> Mapping[str, Any]:
        counts = Counter[str]()
        with open(folder / "train.jsonl", "w", encoding="utf-8") as first, open(folder / "val.jsonl", "w", encoding="utf-8") as second:
            for split, source in named:
                for row in _convert(_rows(source, given[source]), form, renamed, options, counts):
                    is_val = split == "val" or (not val and _is_for_validation(row, val_rate))
                    (second if is_val else first).write(json.dumps(row, ensure_ascii=False) + "\n")
                    counts["val" if is_val else "train"] += 1
        for split in ("train", "val"):
            if not counts[split]:
                raise DataError(f"no row for the split {split!r}: of {counts['read']} rows {counts['left out']} say nothing in this form.")
        print(f"{name}: {counts['train']:,} train, {counts['val']:,} val; {counts['left out']:,} of {counts['read']:,} rows left out")
        return {"counts": dict(counts)}

    return command.make_folder(data_path / name, COMMAND, made_from, fill) is not None


def _renaming(text: str) -> tuple[str, str]:
    name, sign, column = text.partition("=")
    if not sign or not name or not column:
        raise ConfigError(f"--columns {text!r}: expected NAME=COLUMN, such as prompt=question.")
    return name, column


def _rows(source: str, rows: Any) -> Iterator[tuple[str, Row]]:
    """(where, row) of a source. rows: as `sources.open_rows` gave them; None of a file."""
    if rows is not None:
        yield from ((f"{source}: row {number}", dict(row)) for number, row in enumerate(rows, 1))
    elif source.endswith(".parquet"):
        yield from sources.parquet_rows(Path(source), lambda names: names)
    else:
        yield from json_stream.records(Path(source))


def _convert(
    rows: Iterable[tuple[str, Row]], form: str, renamed: Mapping[str, str], options: Options, counts: Counter[str]
) -> Iterator[Row]:
    """Rows of ours, each checked as a training checks it. Counts what was read, and what gave nothing."""
    for where, given in rows:
        row = {**given, **{name: given[column] for name, column in renamed.items() if column in given}}
        counts["read"] += 1
        found = list(FORMS[form](row, where, options))
        counts["left out"] += not found
        for each in found:
            read_entry(each, where)
            yield each


def _is_for_validation(row: Row, rate: float) -> bool:
    asked = next(message["content"] for message in row["messages"] if message["role"] != "system")
    return int.from_bytes(hashlib.sha256(asked.encode()).digest()[:8], "big") < rate * 2**64


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
