"""Prepare a task as text: `python -m data_prep.t5.prepare_task --task rte --train FILE.. --val FILE.. --test FILE..`.

Writes one folder below --data_path, atomically: train.jsonl, val.jsonl and test.jsonl, for the given splits, and
manifest.json with their provenance. Two runs on the same files give the same bytes. A SOURCE is
a file (tab-separated with or without a header line, as in GLUE; csv; JSON or JSON lines, as in SuperGLUE; parquet), a
folder saved by `datasets`, or hub:ID[@CONFIG][#SPLIT]. Tasks are defined in resources/tasks, or in your own file
(--task_file).
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml
from tqdm import tqdm

from data_prep import command, sources
from data_prep.t5 import superglue, task_rows, task_sources
from data_prep.t5.task_sources import SPLITS, Source
from src.errors import DataError
from src.support.command_line import require_at_least
from src.systems.t5.tasks import task_table

COMMAND = "python -m data_prep.t5.prepare_task"
_SCRIPTS = (__file__, superglue.__file__, task_rows.__file__, task_sources.__file__, sources.__file__)
_MAX_LOGGED = 3  # messages about dropped rows


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    task: str
    name: str
    train: Sequence[str] = ()
    val: Sequence[str] = ()
    test: Sequence[str] = ()
    val_percent: float | None = None
    max_rows: int | None = None
    seed: int = 0
    skip_bad_rows: bool = False
    task_file: Path | None = None

    def __post_init__(self) -> None:
        if not (self.train or self.val or self.test):
            raise DataError("--train, --val, --test: none is set. Set at least one to a source.")
        if self.val_percent is not None and (self.val or not self.train):
            raise DataError("--val_percent: takes validation rows from --train. Set --train, and remove --val.")
        if self.val_percent is not None and not 0 < self.val_percent < 100:
            raise DataError(f"--val_percent: expected a number between 0 and 100, got {self.val_percent:g}.")
        require_at_least(1, max_rows=self.max_rows)


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--task", required=True, help="an entry of resources/tasks, as rte, or of --task_file")
    add(
        "--task_file",
        type=Path,
        metavar="YAML",
        help="file with more tasks; the entry of the task is saved with the data",
    )
    add("--name", help="the new folder, which an experiment names as data.corpus (default: the task)")
    for split in SPLITS:
        add(f"--{split}", nargs="+", default=[], metavar="SOURCE", help=f"sources of {split}.jsonl")
    add("--val_percent", type=float, metavar="P", help="instead of --val: use about P %% of the rows of --train")
    add("--max_rows", type=int, metavar="N", help="the first N rows of each split")
    add("--seed", type=int, default=0, help="seed for --val_percent (default: %(default)s)")
    add("--skip_bad_rows", action="store_true", help="leave out rows that do not fit, and count them")


def prepare(data_path: Path, options: Options) -> bool:
    """Make the folder `data_path / options.name`; False if it is complete and has the same provenance.

    Raises:
        ConfigError: the task is unknown, or its entry has a mistake.
        DataError: a source is missing or damaged, a row does not fit, or a split would be empty. Nothing is written.
        RunError: the disk refuses.
    """
    task = task_table.find(options.task, options.task_file)
    if options.train and not task.task.trained:
        raise DataError(f"--train: the task {task.name!r} has no training rows. Use --val or --test instead.")
    sources_by_split = {split: [Source(source, split, task) for source in getattr(options, split)] for split in SPLITS}
    made_from = _provenance(options, sources_by_split, task)
    facts = command.make_folder(
        data_path / options.name,
        COMMAND,
        made_from,
        lambda partial_folder: _write(partial_folder, options, sources_by_split, task),
    )
    if facts is not None:
        _print_summary(facts)
    return facts is not None


def _write(
    partial_folder: Path, options: Options, sources_by_split: dict[str, list[Source]], task: task_table.NamedTask
) -> dict[str, Any]:
    """Fill the temporary folder `partial_folder`; return the facts for the manifest."""
    skipped: dict[str, list[str]] = {split: [] for split in SPLITS}
    rows: dict[str, list[task_rows.Row]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        skipped_rows = skipped[split] if options.skip_bad_rows else None
        every = (row for source in sources_by_split[split] for row in task_rows.rows(source, skipped_rows))
        rows[split] = list(tqdm(every, desc=split, unit="", disable=None, leave=False))
    if options.val_percent is not None:
        rows["train"], rows["val"] = _split_off_validation(rows["train"], options.val_percent, options.seed)
    split_rows = [
        split
        for split in SPLITS
        if rows[split] or getattr(options, split) or (split == "val" and options.val_percent is not None)
    ]
    inputs: dict[str, set[str]] = {}
    for split in split_rows:
        rows[split] = rows[split][: options.max_rows]
        if not rows[split]:
            raise DataError(
                f"--{split}: no row is left for this split. Use a source with more rows of task {options.task!r}."
            )
        _number(rows[split])
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows[split])
        (partial_folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
        inputs[split] = {task.input(row) for row in rows[split]}
    if options.task_file is not None:
        entry = task.task.model_dump(mode="json", exclude_defaults=True)
        (partial_folder / task_table.TASK_FILE).write_text(
            yaml.safe_dump({task.name: entry}, sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
    both = inputs.get("train", set()) & (inputs.get("val", set()) | inputs.get("test", set()))
    return {
        "task": task.name,
        "counts": {split: _counts(rows[split], task) for split in split_rows},
        "skipped": {
            split: {"rows": len(skipped[split]), "first": skipped[split][:_MAX_LOGGED]} for split in split_rows
        },
        "inputs_of_train_in_another_split": len(both),
    }


def _split_off_validation(
    rows: list[task_rows.Row], percent: float, seed: int
) -> tuple[list[task_rows.Row], list[task_rows.Row]]:
    """Split rows into training and validation. Rows of a group (answers to one question) are in the same split."""
    groups = {row.get("group") or str(number): None for number, row in enumerate(rows)}
    count = max(1, round(len(groups) * percent / 100))
    selected_groups = set(Random(f"{seed}/{len(groups)}").sample(list(groups), count))
    keys = [row.get("group") or str(number) for number, row in enumerate(rows)]
    pairs = list(zip(keys, rows, strict=True))
    return [row for key, row in pairs if key not in selected_groups], [
        row for key, row in pairs if key in selected_groups
    ]


def _number(rows: list[task_rows.Row]) -> None:
    """Number the rows from 0 in order, if an index is missing or repeated among the rows of a group."""
    row_keys = [(row.get("group"), row["index"]) for row in rows]
    if any(index is None for _, index in row_keys) or len(set(row_keys)) < len(row_keys):
        for number, row in enumerate(rows):
            row["index"] = number


def _counts(rows: list[task_rows.Row], task: task_table.NamedTask) -> dict[str, Any]:
    labels = Counter(str(row["label"]) for row in rows) if task.task.kind == "classes" else None
    return {"rows": {task.name: len(rows)}, **({"labels": dict(sorted(labels.items()))} if labels else {})}


def _provenance(
    options: Options, sources_by_split: dict[str, list[Source]], task: task_table.NamedTask
) -> dict[str, Any]:
    """Everything that the content of the folder depends on.

    Raises:
        DataError: one source is given twice.
    """
    facts = {split: [source.facts() for source in sources_by_split[split]] for split in SPLITS}
    pairs = [(split, *pair) for split in SPLITS for pair in zip(sources_by_split[split], facts[split], strict=True)]
    local = [
        (split, source, identity) for split, source, identity in pairs if not source.source.startswith(sources.HUB)
    ]
    sources.require_distinct((f"--{split} {source.source}", identity) for split, source, identity in local)
    options_to_save = {
        name: value for name, value in asdict(options).items() if name not in (*SPLITS, "name", "task_file")
    }
    return {
        "sources": facts,
        "options": options_to_save,
        "task": task.fingerprint,
        "scripts_sha256": command.digest_files(_SCRIPTS),
    }


def _print_summary(facts: dict[str, Any]) -> None:
    for split, counts in facts["counts"].items():
        labels = "; ".join(f"{number} {label}" for label, number in counts.get("labels", {}).items())
        rows, skipped = sum(counts["rows"].values()), facts["skipped"][split]
        text = f"{split:6} {rows} rows{': ' if labels else ''}{labels}"
        if skipped["rows"]:
            text += f"\n{'':6} left out: {skipped['rows']}, as {skipped['first'][0]}"
        command.report(text, split=split, rows=rows, labels=counts.get("labels", {}), skipped=skipped)
    if num_repeated := facts["inputs_of_train_in_another_split"]:
        text = f"{num_repeated} inputs of train are in another split too."
        command.report(text, inputs_of_train_in_another_split=num_repeated)


def _run(data_path: Path, name: str | None, task: str, **option_values: Any) -> None:
    prepare(data_path, Options(name=name or task, task=task, **option_values))


main = command.main_of(COMMAND, __doc__, _add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
