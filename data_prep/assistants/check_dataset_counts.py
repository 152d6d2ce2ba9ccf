"""Count samples of conversations: `python -m data_prep.assistants.check_dataset_counts --datasets webgpt gsm8k --mode
sft`.

python -m data_prep.assistants.check_dataset_counts --datasets all --mode rm --output_path dataset_counts.csv
python -m data_prep.assistants.check_dataset_counts --datasets assistant_tiny_sft --languages language_counts.csv

A name is a folder below --data_path, or a group of experiments, which selects the folders of its data sets; `all`
selects all folders of conversations. Counts the rows that a training run in this mode uses: conversations and texts
in sft, prompts with a better and a worse reply in rm. With --prepare, missing releases are downloaded from the hub and
prepared first; for `all` this downloads more than 100 GB.
"""

import argparse
import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import command
from data_prep.assistants import conversation_table, prepare_conversations, stdlib_conversations
from data_prep.assistants.conversation_table import Mode
from src.data import jsonl
from src.errors import DataError
from src.experiments.config import Places
from src.files import MANIFEST, read_manifest, write_atomic
from src.support.command_line import aligned_lines
from src.systems.assistants import groups, presets
from src.systems.assistants.conversations.entries import Entry, read_entry
from src.systems.assistants.conversations.rows import read_rows

COMMAND = "python -m data_prep.assistants.check_dataset_counts"
COLUMNS = ("dataset_name", "train_counts", "eval_counts", "total_counts")
GROUPS = {**groups.GROUPS, **presets.GROUPS}
_MADE_BY = (prepare_conversations.COMMAND, stdlib_conversations.COMMAND)


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--datasets", nargs="+", required=True, metavar="NAME", help="folders, groups of experiments, or all")
    add(
        "--mode",
        choices=("sft", "rm"),
        default="sft",
        help="train on answers, or on comparisons of replies (default: %(default)s)",
    )
    add("--output_path", type=Path, default=Path("dataset_counts.csv"), help="(default: %(default)s)")
    add("--languages", type=Path, metavar="CSV", help="also count messages by their language label")
    add("--prepare", action="store_true", help="first prepare missing releases")


def check(
    data_path: Path, datasets: Sequence[str], mode: Mode, output_path: Path, languages: Path | None, prepare: bool
) -> None:
    """Count the samples; print the table and write it to `output_path`.

    Raises:
        DataError: a named data set is missing or has no rows for this mode, or there are no data sets.
    """
    dataset_names = [word for words in datasets for word in words.split(",")]
    names = list(dict.fromkeys(name for word in dataset_names for name in _names(data_path, word, mode, prepare)))
    missing = _prepare_missing(data_path, names, mode) if prepare else {}
    if missing and "all" not in dataset_names:
        raise DataError(next(iter(missing.values())))
    rows, language_counts = list[tuple[str, ...]](), Counter[tuple[str, str]]()
    for name in names:
        if name in missing:
            continue
        counts = Counter[str]()
        for split, entry in read_entries(data_path, name):
            counts[split] += is_learned(entry, mode)
            language_counts.update((name, str(message.tags.get("lang", "untold"))) for message in entry.conversation)
        if total := sum(counts.values()):
            rows.append((name, *(str(counts[split]) for split in jsonl.SPLITS), str(total)))
        elif "all" not in dataset_names:
            hint = f"If its release has both modes, prepare it with --mode {mode}. Else count it with the other --mode."
            raise DataError(f"{data_path / name}: no rows for --mode {mode}. {hint}")
    if not rows:
        hint = f"Prepare one ({prepare_conversations.COMMAND}), or add --prepare."
        raise DataError(f"{data_path}: no data set for --mode {mode}. {hint}")
    _write_table(output_path, COLUMNS, rows)
    table = [dict(zip(COLUMNS, (name, *map(int, counts)), strict=True)) for name, *counts in rows]
    command.report("\n".join(aligned_lines([COLUMNS, *rows])), rows=table)
    for name, reason in missing.items():
        command.report(f"{name}: left out: {reason}", name=name, left_out=reason)
    if languages is not None:
        language_rows = [(name, lang, str(count)) for (name, lang), count in sorted(language_counts.items())]
        _write_table(languages, ("dataset_name", "language", "messages"), language_rows)


def _prepare_missing(data_path: Path, names: Sequence[str], mode: Mode) -> dict[str, str]:
    """Prepare missing releases; returns {name: reason} of failures."""
    missing = dict[str, str]()
    for name in names:
        if not (data_path / name / MANIFEST).is_file():
            try:
                prepare_conversations.prepare(data_path, name, mode=mode)
            except DataError as error:
                missing[name] = str(error)
    return missing


def read_entries(data_path: Path, name: str) -> Iterator[tuple[str, Entry]]:
    """Yield (split, entry) for each row of a prepared data set.

    Raises:
        DataError: the data set is missing, incomplete or damaged, or its rows are not conversations.
    """
    places = Places(data=data_path, runs=data_path)
    jsonl.require_splits(places, name)
    for split in jsonl.SPLITS:
        path = data_path / name / f"{split}.jsonl"
        rows = read_rows(path)
        yield from ((split, read_entry(row, str(path))) for row in rows)


def is_learned(entry: Entry, mode: Mode) -> bool:
    """Whether training in this mode uses an entry. Entries with only tied replies are not used."""
    return mode == "sft" or len({reply.rank for reply in entry.replies}) > 1


def _write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a CSV file atomically."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_atomic(path, text.getvalue())


def _names(data_path: Path, name: str, mode: Mode, prepare: bool) -> list[str]:
    """Resolve a name to folders."""
    if name in GROUPS:
        return [corpus for experiment in GROUPS[name] for corpus in list_corpora(experiment.get("data"))]
    if name != "all":
        return [name]
    corpus_folders = (path.parent for path in sorted(data_path.glob(f"*/{MANIFEST}")))
    corpus_names = [
        folder.name
        for folder in corpus_folders
        if str(read_manifest(folder, DataError).get("command")).startswith(_MADE_BY)
    ]
    return sorted({*corpus_names, *(each for each in conversation_table.names(mode) if prepare and "{" not in each)})


def list_corpora(data: Any) -> list[str]:
    """List the corpora in the data config of an experiment, including those in mixtures."""
    if isinstance(data, Mapping):
        own_corpora = [data["corpus"]] if isinstance(data.get("corpus"), str) else []
        return [*own_corpora, *(corpus for value in data.values() for corpus in list_corpora(value))]
    return [corpus for each in data for corpus in list_corpora(each)] if isinstance(data, list) else []


main = command.main_of(COMMAND, __doc__, _add_options, check)

if __name__ == "__main__":
    sys.exit(main())
