"""Prepare conversations or preferences from a published file, for the recipes sft, reward, dpo, grpo and ppo.

python -m data_prep.assistants.prepare_conversations --name webgpt
python -m data_prep.assistants.prepare_conversations --name webgpt --train comparisons.jsonl
python -m data_prep.assistants.prepare_conversations --name oasst_replies --release oasst_export \\
    --mode rm --train trees.jsonl.gz
python -m data_prep.assistants.prepare_conversations --name mine --release_file mine.yaml
python -m data_prep.assistants.prepare_conversations --form completion --train q.jsonl \\
    --columns prompt=question completion=answer --keep answer --name mine

A release is an entry of resources/conversations or of your own file. It names the source and the form of its rows;
--form replaces it. Sources: JSON, JSON lines (also .gz), Parquet, folders of `datasets`, hub:ID. --keep copies columns
into the prepared rows, where rewards read them. Without validation rows, a share of --train is for validation, chosen
by a digest of the first message. Validation rows that equal a training row are removed; case and blanks are ignored. A
source that is given for both splits is in both.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep import command
from data_prep.assistants import conversation_table
from data_prep.assistants.conversation_forms.rows import (
    Form,
)
from data_prep.assistants.conversation_table import FORMS, Mode, Release
from data_prep.assistants.conversion import Conversion
from src.errors import ConfigError
from src.experiments.config import load as load_config

COMMAND = "python -m data_prep.assistants.prepare_conversations"


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--name", required=True, help="folder below --data_path")
    add("--release", metavar="NAME", help="entry of resources/conversations (default: --name)")
    add("--release_file", type=Path, metavar="YAML", help="file with entries of yours, which take precedence")
    add(
        "--mode",
        choices=("sft", "rm"),
        help="answers to learn, or ranked replies, if a release has both (default: its first)",
    )
    add("--form", metavar="FORM", help=f"layout of the rows, instead of a release: {', '.join(FORMS)}")
    add("--train", nargs="+", default=[], metavar="SOURCE", help="training rows (default: the source of the release)")
    add(
        "--val",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="validation rows (default: those of the release, or a share of --train)",
    )
    add("--val_rate", type=float, help="that share (default: that of the release; 0.1 with --form)")
    add(
        "--fold",
        metavar="K/N",
        help="use the K-th of N parts of --train for validation, such as 2/5; parts share no question",
    )
    add("--columns", nargs="+", default=[], metavar="NAME=COLUMN", help="names of the form's columns in the source")
    add(
        "--keep",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="columns to copy into the prepared rows, such as answer or tests",
    )
    add(
        "--negatives",
        choices=("refuse", "skip", "learn"),
        help="rows with label false, such as KTO's, in mode sft (default: refuse)",
    )
    add("--lang", metavar="LANGUAGES", help="languages of trees, such as en,de (default: en)")
    add("--top_k", type=int, metavar="K", help="for trees: follow only replies of rank 0 to K - 1 (default: all)")
    add("--synthetic", action="store_true", help="for trees: include messages written by a model")


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
    keep: Sequence[str] = (),
    negatives: str | None = None,
    lang: str | None = None,
    top_k: int | None = None,
    synthetic: bool = False,
) -> bool:
    """Make the folder `name` below `data_path`; False if it exists and was made from the same sources.

    Raises:
        ConfigError: an option or the entry of the release is wrong.
        DataError: a source is missing or has another layout, or a split would be empty.
    """
    if val_rate is not None and not 0 < val_rate < 1:
        raise ConfigError(f"--val_rate: expected a number between 0 and 1, got {val_rate:g}.")
    part = parse_fold(fold) if fold else None
    if part and (val or val_rate is not None):
        raise ConfigError(
            "--fold: cannot be combined with --val or --val_rate, which also select validation rows. Use one of them."
        )
    if form is None:
        entry, path = conversation_table.find(release or name, release_file)
    elif release or release_file or mode:
        raise ConfigError(
            "--form: cannot be combined with --release, --release_file or --mode. Remove --form, or these three."
        )
    else:
        entry, path = load_config(Release, {"form": form, "licence": "unstated", "val_rate": 0.1}, "--form"), Path()
        if not train:
            raise ConfigError("--form: needs --train with the rows of this form. Add it.")
    if entry.split_column is not None and (part or val or val_rate is not None):
        raise ConfigError(
            "--fold, --val and --val_rate: "
            f"column {entry.split_column!r} of {release or name} selects the validation rows. Remove the option."
        )
    if mode not in (None, *entry.modes):
        raise ConfigError(
            f"--mode {mode}: {release or name} has only {' and '.join(entry.modes)}. Use --mode {entry.modes[0]}."
        )
    reader = _with_options(entry.form_of(mode or entry.modes[0]), lang, top_k, synthetic)
    options: dict[str, Any] = {
        "val_rate": val_rate or entry.val_rate,
        "columns": {**entry.columns, **_renamings(columns)},
        "keep": [*dict.fromkeys([*entry.keep, *keep])],
        "negatives": negatives or entry.negatives,
    }
    entry = load_config(Release, {**entry.model_dump(), **options}, "--keep" if keep else name)
    train_sources = [*train] or conversation_table.sources_of(entry, "train", path)
    val_sources = [*val] or ([] if train or part else conversation_table.sources_of(entry, "val", path))
    conversion = Conversion(
        name, entry, reader, [("train", each) for each in train_sources] + [("val", each) for each in val_sources], part
    )
    return command.make_folder(data_path / name, COMMAND, conversion.made_from(), conversion.fill) is not None


def _with_options(form: Form, lang: str | None, top_k: int | None, synthetic: bool) -> Form:
    """The form with the options of the command line."""
    options = {"languages": lang.split(",") if lang else None, "top_k": top_k, "synthetic": synthetic or None}
    options = {name: value for name, value in options.items() if value is not None}
    if options.keys() - type(form).model_fields.keys():
        raise ConfigError(
            "--lang, --top_k and --synthetic: they are for trees, and the rows of this form are not trees. "
            "Remove the options."
        )
    return load_config(type(form), {**form.model_dump(), **options}, "--top_k") if options else form


def _renamings(texts: Sequence[str]) -> dict[str, str]:
    columns = dict[str, str]()
    for text in texts:
        name, _, column = text.partition("=")
        if not name or not column:
            raise ConfigError(f"--columns {text!r}: expected NAME=COLUMN, such as prompt=question.")
        if name in columns:
            raise ConfigError(f"--columns {text}: {name} is already set to {columns[name]}. Remove one of the two.")
        columns[name] = column
    return columns


def parse_fold(text: str) -> tuple[float, float]:
    """Parse K/N to the start and end, from 0 to 1, of the K-th of N equal parts.

    Raises:
        ConfigError: the text is not K/N.
    """
    number, sign, total = text.partition("/")
    if (
        not sign
        or not number.isdecimal()
        or not total.isdecimal()
        or not 1 <= int(number) <= int(total)
        or int(total) < 2
    ):
        raise ConfigError(f"--fold {text!r}: expected K/N, such as 2/5, with K from 1 to N.")
    return (int(number) - 1) / int(total), int(number) / int(total)


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
