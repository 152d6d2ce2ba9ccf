"""Work on files of Open-Assistant's trees and messages: `python -m data_prep.oasst_trees ACTION INPUT [OUTPUT]`.

python -m data_prep.oasst_trees counts trees.jsonl.gz --lang en,de
python -m data_prep.oasst_trees filter_trees trees.jsonl.gz finished.jsonl --state ready_for_export --synthetic without
python -m data_prep.oasst_trees tree_to_messages finished.jsonl messages.jsonl --without_nulls
python -m data_prep.oasst_trees filter_messages messages.jsonl prompts.jsonl --prompts_only --lang en
python -m data_prep.oasst_trees split finished.jsonl train.jsonl val.jsonl --val_percent 20 --seed 0

A file has a JSON object on each line: a tree, {"message_tree_id", "prompt": {..., "replies": [...]}}, or a message, {"message_id", "text",
"role"}, which may have replies too. Files whose names end with .gz are compressed. Messages of one tree are never in both parts of a split.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.qa_releases import json_stream
from src import files
from src.command_line import aligned_lines, make_parser
from src.config import unknown_text
from src.errors import ConfigError, DataError, print_errors

STATES = ("prompt_lottery_waiting", "growing", "ready_for_export", "aborted_low_grade", "halted_by_moderator", "backlog_ranking", "ranking")
CHOICES = ("without", "with", "only")
"""What is done with messages of a kind."""
Row = dict[str, Any]


def read(path: Path) -> Iterator[tuple[str, Row, bool]]:
    """(where, row, whether it is a tree) of a file.

    Raises:
        DataError: the file is missing or damaged, or a row is neither a tree nor a message; names file and line.
    """
    for where, row in json_stream.records(path):
        is_tree = isinstance(row.get("prompt"), dict)
        if not isinstance(row.get("message_tree_id" if is_tree else "message_id"), str):
            wanted = "a tree with message_tree_id and prompt, or a message with message_id"
            raise DataError(f"{where}: expected {wanted}; the row has {', '.join(row) or 'nothing'}.")
        for message in walk(row.get("prompt", row)):
            for name in ("message_id", "text", "role"):
                if not isinstance(message.get(name), str):
                    raise DataError(f"{where}: field {name!r} of a message: expected text, got {message.get(name)!r:.60}.")
        yield where, row, is_tree


def walk(message: Row) -> Iterator[Row]:
    """A message and all replies below it, depth first."""
    waiting = [message]
    while waiting:
        message = waiting.pop()
        yield message
        waiting += reversed(message.get("replies") or [])


def without_nulls(row: Any) -> Any:
    """A copy without the members that are null, at any depth (B27)."""
    if isinstance(row, dict):
        return {name: without_nulls(value) for name, value in row.items() if value is not None}
    return [without_nulls(value) for value in row] if isinstance(row, list) else row


def filter_messages(options: argparse.Namespace) -> Iterator[Any]:
    """The messages that are asked for, each without its replies; or their texts alone."""
    for _, row, _ in read(options.input):
        state = row.get("tree_state")
        for message in walk(row.get("prompt", row)):
            kinds = {
                "deleted": message.get("deleted"),
                "synthetic": message.get("synthetic"),
                "spam": message.get("review_result") is False,
            }
            if (
                _is_wanted(kinds, options)
                and (options.lang is None or message.get("lang") in options.lang)
                and (options.state is None or message.get("tree_state", state) in options.state)
                and (options.user is None or message.get("user_id") == options.user)
                and not (options.prompts_only and message.get("parent_id"))
            ):
                yield message["text"] if options.text_only else _drop_replies(message)


def filter_trees(options: argparse.Namespace) -> Iterator[Row]:
    """The trees that are asked for: --synthetic is about any of their messages, --lang about the prompt."""
    for where, row, is_tree in read(options.input):
        _require_tree(where, is_tree)
        kinds = {"synthetic": any(message.get("synthetic") for message in walk(row["prompt"]))}
        if (
            _is_wanted(kinds, options)
            and (options.lang is None or row["prompt"].get("lang") in options.lang)
            and (options.state is None or row.get("tree_state") in options.state)
        ):
            yield row


def tree_to_messages(options: argparse.Namespace) -> Iterator[Row]:
    """All messages of all trees, each with the tree's id and state and without its replies."""
    for where, row, is_tree in read(options.input):
        _require_tree(where, is_tree)
        for message in walk(row["prompt"]):
            yield {**_drop_replies(message), "message_tree_id": row["message_tree_id"], "tree_state": row.get("tree_state")}


def split(options: argparse.Namespace) -> Callable[[Row], bool]:
    """Whether a row is for validation. So are --val_percent of the trees, rounded, which depend on --seed and their ids alone.

    Raises:
        ConfigError: none or all of them would be.
    """
    if not 0 < options.val_percent < 100:
        raise ConfigError(f"--val_percent: expected a number between 0 and 100, got {options.val_percent:g}.")
    trees = {_tree_id(where, row) for where, row, _ in read(options.input)}
    count = round(len(trees) * options.val_percent / 100)
    if not 0 < count < len(trees):
        raise ConfigError(f"--val_percent: {options.val_percent:g} % of {len(trees)} trees leave one of the two files empty.")
    chosen = set(sorted(trees, key=lambda name: hashlib.sha256(f"{options.seed}/{name}".encode()).digest())[:count])
    return lambda row: _tree_id("", row) in chosen


def counts(rows: Iterable[tuple[str, Row, bool]], languages: Container[str] | None = None) -> Counter[str]:
    """What a file holds. languages: of the messages that count; None: all.

    "prompts with replies" are messages of people with more than one reply, "with ranked replies" those of which more than one is ranked.
    """
    found, replies, ranked = Counter[str](trees=0, messages=0), Counter[str](), Counter[str]()
    people = set[str]()
    for _, row, is_tree in rows:
        found["trees"] += is_tree
        for message in walk(row.get("prompt", row)):
            if languages is not None and str(message.get("lang")) not in languages:
                continue
            found["messages"] += 1
            for name in ("synthetic", "deleted"):
                found[name] += bool(message.get(name))
            found[f"role {message['role']}"] += 1
            found[f"language {message.get('lang')}"] += 1
            if message["role"] == "prompter":
                people.add(message["message_id"])
            parent = str(message.get("parent_id"))
            replies[parent] += 1
            ranked[parent] += message.get("rank") is not None
    found["prompts with replies"] = sum(replies[name] > 1 for name in people)
    found["prompts with ranked replies"] = sum(ranked[name] > 1 for name in people)
    return found


def _is_wanted(kinds: Mapping[str, Any], options: argparse.Namespace) -> bool:
    chosen = {name: getattr(options, name) for name in kinds}
    return all(choice == "with" or bool(kinds[name]) == (choice == "only") for name, choice in chosen.items())


def _drop_replies(message: Row) -> Row:
    return {name: value for name, value in message.items() if name != "replies"}


def _require_tree(where: str, is_tree: bool) -> None:
    if not is_tree:
        raise DataError(f"{where}: expected a tree, got a message.")


def _tree_id(where: str, row: Row) -> str:
    if not isinstance(row.get("message_tree_id"), str):
        raise DataError(f"{where}: no message_tree_id, so its tree is not known.")
    return row["message_tree_id"]


@contextlib.contextmanager
def writer(path: Path, drop_nulls: bool) -> Iterator[Callable[[Any], None]]:
    """A function that writes a row into a file, which is whole at the end of the block, or as before if that raises.

    Raises:
        RunError: the disk refuses.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with files.writing(path):
        try:
            with gzip.open(beside, "wt", encoding="utf-8") if path.suffix == ".gz" else open(beside, "w", encoding="utf-8") as file:
                yield lambda row: print(json.dumps(without_nulls(row) if drop_nulls else row, ensure_ascii=False), file=file)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def _write(options: argparse.Namespace) -> None:
    found = Counter[Path]()
    with contextlib.ExitStack() as stack:
        outputs = [options.output, *([options.val_output] if options.action == "split" else [])]
        if len({path.resolve() for path in (options.input, *outputs)}) <= len(outputs):
            raise ConfigError("a file is named twice: the input would be lost, or one of the outputs.")
        is_val = split(options) if options.action == "split" else lambda _: False
        writes = {path: stack.enter_context(writer(path, options.without_nulls)) for path in outputs}
        rows = (row for _, row, _ in read(options.input)) if options.action == "split" else ACTIONS[options.action](options)
        for row in rows:
            path = outputs[is_val(row)]
            writes[path](row)
            found[path] += 1
    for path in outputs:
        print(f"{path}: {found[path]:,} rows")


ACTIONS: Mapping[str, Callable[[argparse.Namespace], Iterator[Any]]] = {
    "filter_messages": filter_messages,
    "filter_trees": filter_trees,
    "tree_to_messages": tree_to_messages,
}


@print_errors
def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(argv)
    for state in options.state or () if "state" in options else ():
        if state not in STATES:
            raise ConfigError(f"--state: {unknown_text('state', state, STATES)}")
    if options.action == "counts":
        found = counts(read(options.input), options.lang)
        print("\n".join(aligned_lines([[name, f"{count:,}"] for name, count in found.items()])))
    else:
        _write(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("data_prep.oasst_trees", __doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = {**{name: (act.__doc__ or "").splitlines()[0] for name, act in ACTIONS.items()},
             "split": "Two files, by tree.", "counts": "What a file holds."}  # fmt: skip
    for name, text in about.items():
        add = actions.add_parser(name, help=text, description=text, allow_abbrev=False).add_argument
        add("input", type=Path, metavar="INPUT", help="trees or messages, .jsonl or .jsonl.gz")
        if name != "counts":
            add("output", type=Path, metavar="OUTPUT")
            add("--without_nulls", action="store_true", help="write no member that is null")
        if name == "split":
            add("val_output", type=Path, metavar="VAL_OUTPUT")
            add("--val_percent", type=float, default=20.0, help="of the trees (default: %(default)s)")
            add("--seed", type=int, default=0, help="(default: %(default)s)")
        if name in ("counts", "filter_messages", "filter_trees"):
            add("--lang", type=lambda text: text.split(","), metavar="LANGUAGES", help="such as en,de (default: all)")
        if name.startswith("filter_"):
            add("--state", type=lambda text: text.split(","), metavar="STATES", help="of trees, such as growing,ranking (default: all)")
            add("--synthetic", choices=CHOICES, default="with", help="what a model has written (default: %(default)s)")
        if name == "filter_messages":
            add("--deleted", choices=CHOICES, default="without", help="(default: %(default)s)")
            add("--spam", choices=CHOICES, default="without", help="what reviewers refused (default: %(default)s)")
            add("--user", metavar="ID", help="messages of one person")
            add("--prompts_only", action="store_true", help="messages that answer none")
            add("--text_only", action="store_true", help="write texts instead of messages")
    return parser


if __name__ == "__main__":
    sys.exit(main())
