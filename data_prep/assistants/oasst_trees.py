"""Work on files of Open-Assistant's trees and messages: `python -m data_prep.assistants.oasst_trees ACTION INPUT
[OUTPUT]`.

python -m data_prep.assistants.oasst_trees counts trees.jsonl.gz --lang en,de
python -m data_prep.assistants.oasst_trees filter_trees trees.jsonl.gz finished.jsonl \\
    --state ready_for_export --synthetic without
python -m data_prep.assistants.oasst_trees filter_trees finished.jsonl some.jsonl \\
    --lang en --max_length 2000 --count 100 --seed 0
python -m data_prep.assistants.oasst_trees split finished.jsonl train.jsonl val.jsonl --val_percent 20 --seed 0

A file has a JSON object on each line: a tree, {"message_tree_id", "prompt": {..., "replies": [...]}}, or a message,
{"message_id", "text", "role"}, which can have replies too. Files with the suffix .gz are compressed. All messages
of a tree are in the same part of a split.
"""

import argparse
import contextlib
import gzip
import hashlib
import heapq
import json
import os
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep import sources
from data_prep.crossattn.qa_releases import json_stream
from src import files
from src.errors import ConfigError, DataError, print_errors
from src.experiments.config import describe_value, unknown_text
from src.support import documents
from src.support.command_line import aligned_lines, make_parser, require_at_least
from src.support.documents import report

STATES = (
    "prompt_lottery_waiting",
    "growing",
    "ready_for_export",
    "aborted_low_grade",
    "halted_by_moderator",
    "backlog_ranking",
    "ranking",
)
Row = dict[str, Any]


def read(path: Path) -> Iterator[tuple[str, Row, bool]]:
    """Yield (where, row, whether it is a tree) for each row of a file.

    Raises:
        DataError: the file is missing or damaged, or a row is neither a tree nor a message; names file and line.
    """
    for where, row in json_stream.records(path):
        is_tree = isinstance(row.get("prompt"), dict)
        if not isinstance(row.get("message_tree_id" if is_tree else "message_id"), str):
            expected = "a tree with message_tree_id and prompt, or a message with message_id"
            raise DataError(f"{where}: expected {expected}, got a row with the fields {', '.join(row) or 'none'}.")
        for message in walk(row.get("prompt", row), where):
            for name in ("message_id", "text", "role"):
                if not isinstance(message.get(name), str):
                    raise DataError(
                        f"{where}: field {name!r} of a message: expected text, got {message.get(name)!r:.60}."
                    )
        yield where, row, is_tree


def walk(message: Row, where: str = "") -> Iterator[Row]:
    """Yield a message and all replies below it, depth first.

    Raises:
        DataError: the replies of a message are not a list of objects.
    """
    waiting = [message]
    while waiting:
        message = waiting.pop()
        yield message
        replies = message.get("replies") or []
        if not isinstance(replies, list) or not all(isinstance(each, dict) for each in replies):
            raise DataError(f"{where}: field 'replies': expected a list of messages, got {describe_value(replies)}.")
        waiting += reversed(replies)


def filter_trees(options: argparse.Namespace) -> Iterator[Row]:
    """Select trees: --synthetic and --max_length apply to all of their messages, --lang to the prompt."""
    matches = _matching_trees(options)
    if options.count is None:
        return matches
    require_at_least(1, count=options.count)
    selected_trees = heapq.nsmallest(
        options.count, ((_draw(options.seed, row["message_tree_id"]), i, row) for i, row in enumerate(matches))
    )
    return iter([row for _, _, row in sorted(selected_trees, key=lambda each: each[1])])


def _matching_trees(options: argparse.Namespace) -> Iterator[Row]:
    for where, row, is_tree in read(options.input):
        if not is_tree:
            raise DataError(f"{where}: expected a tree, got a message. Filter the file of trees of the release.")
        synthetic = any(message.get("synthetic") for message in walk(row["prompt"]))
        if (
            (options.synthetic == "with" or synthetic == (options.synthetic == "only"))
            and (options.lang is None or row["prompt"].get("lang") in options.lang)
            and (options.state is None or row.get("tree_state") in options.state)
            and (
                options.max_length is None
                or all(len(message["text"]) <= options.max_length for message in walk(row["prompt"]))
            )
        ):
            yield row


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()


def split(options: argparse.Namespace) -> Callable[[Row], bool]:
    """Return a function that says whether a row is for validation.
    --val_percent of the trees, rounded, are for validation; the choice depends only on --seed and the tree ids.

    Raises:
        ConfigError: none or all of the trees would be selected.
    """
    if not 0 < options.val_percent < 100:
        raise ConfigError(f"--val_percent: expected a number between 0 and 100, got {options.val_percent:g}.")
    trees = {_tree_id(where, row) for where, row, _ in read(options.input)}
    count = round(len(trees) * options.val_percent / 100)
    if not 0 < count < len(trees):
        raise ConfigError(
            f"--val_percent: {options.val_percent:g} % of {len(trees)} trees leaves one of the two files empty. "
            "Choose another percentage."
        )
    selected_ids = set(sorted(trees, key=lambda name: _draw(options.seed, name))[:count])
    return lambda row: _tree_id("", row) in selected_ids


def counts(rows: Iterable[tuple[str, Row, bool]], languages: Container[str] | None = None) -> Counter[str]:
    """Count trees, messages, roles and languages in a file. languages: count only messages in these; None: all.

    "prompts with replies" are user messages with more than one reply, "with ranked replies" those with more than
    one ranked reply.
    """
    totals, replies, ranked_replies = Counter[str](trees=0, messages=0), Counter[str](), Counter[str]()
    people = set[str]()
    for _, row, is_tree in rows:
        totals["trees"] += is_tree
        for message in walk(row.get("prompt", row)):
            if languages is not None and str(message.get("lang")) not in languages:
                continue
            totals["messages"] += 1
            for name in ("synthetic", "deleted"):
                totals[name] += bool(message.get(name))
            totals[f"role {message['role']}"] += 1
            totals[f"language {message.get('lang')}"] += 1
            if message["role"] == "prompter":
                people.add(message["message_id"])
            parent = str(message.get("parent_id"))
            replies[parent] += 1
            ranked_replies[parent] += message.get("rank") is not None
    totals["prompts with replies"] = sum(replies[name] > 1 for name in people)
    totals["prompts with ranked replies"] = sum(ranked_replies[name] > 1 for name in people)
    return totals


def _tree_id(where: str, row: Row) -> str:
    if not isinstance(row.get("message_tree_id"), str):
        raise DataError(f"{where}: message_tree_id is missing, so the tree of the message is unknown. Remove the row.")
    return row["message_tree_id"]


@contextlib.contextmanager
def writer(path: Path, drop_nulls: bool) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes a row. The file is replaced when the block ends, unless it raises.

    Raises:
        RunError: the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with files.writing(path):
        try:
            with (
                gzip.open(temporary, "wt", encoding="utf-8")
                if path.suffix == ".gz"
                else open(temporary, "w", encoding="utf-8") as file
            ):
                keep = sources.without_nulls if drop_nulls else lambda row: row
                yield lambda row: print(files.encodable(json.dumps(keep(row), ensure_ascii=False)), file=file)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _write(options: argparse.Namespace) -> None:
    rows_per_file = Counter[Path]()
    with contextlib.ExitStack() as stack:
        outputs = [options.output, *([options.val_output] if options.action == "split" else [])]
        if len({path.resolve() for path in (options.input, *outputs)}) <= len(outputs):
            raise ConfigError(
                f"--output {options.output}: a file is used twice. "
                "Choose different names for the input and each output."
            )
        for path in outputs:
            if path.is_dir():
                raise ConfigError(f"--output {path}: expected the name of a file, got a folder. Choose another name.")
        is_val = split(options) if options.action == "split" else lambda _: False
        writes = {path: stack.enter_context(writer(path, options.without_nulls)) for path in outputs}
        rows = (row for _, row, _ in read(options.input)) if options.action == "split" else filter_trees(options)
        for row in rows:
            path = outputs[is_val(row)]
            writes[path](row)
            rows_per_file[path] += 1
    for path in outputs:
        report(f"{path}: {rows_per_file[path]:,} rows", file=path, rows=rows_per_file[path])


@print_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    with documents.parsing(words):
        options = _parser().parse_args(words)
    for state in options.state or () if "state" in options else ():
        if state not in STATES:
            raise ConfigError(f"--state: {unknown_text('state', state, STATES)}")
    if options.action == "counts":
        totals = counts(read(options.input), options.lang)
        report("\n".join(aligned_lines([[name, f"{count:,}"] for name, count in totals.items()])), counts=totals)
    else:
        _write(options)
    documents.show_steps("python -m data_prep.assistants.oasst_trees")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("data_prep.assistants.oasst_trees", __doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = {
        "filter_trees": (filter_trees.__doc__ or "").splitlines()[0],
        "split": "Two files, by tree.",
        "counts": "Count trees, messages, roles and languages in a file.",
    }
    for name, text in about.items():
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        documents.add_option(action)
        add = action.add_argument
        add("input", type=Path, metavar="INPUT", help="trees or messages, .jsonl or .jsonl.gz")
        if name != "counts":
            add("output", type=Path, metavar="OUTPUT")
            add("--without_nulls", action="store_true", help="write no member that is null")
            add("--seed", type=int, default=0, help="of the random choice (default: %(default)s)")
        if name != "split":
            add("--lang", type=_names, metavar="LANGUAGES", help="such as en,de (default: all)")
        if name == "split":
            add("val_output", type=Path, metavar="VAL_OUTPUT")
            add("--val_percent", type=float, default=20.0, help="of the trees (default: %(default)s)")
        if name == "filter_trees":
            add("--max_length", type=int, metavar="CHARACTERS", help="of the longest message (default: any)")
            add("--count", type=int, metavar="N", help="number of trees, drawn at random (default: all)")
            add("--state", type=_names, metavar="STATES", help="such as growing,ranking (default: all)")
            choices = ("without", "with", "only")
            add("--synthetic", choices=choices, default="with", help="messages of models (default: %(default)s)")
    return parser


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
