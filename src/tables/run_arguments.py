"""Arguments that the results commands share: runs, groups, expressions, means and the output file.

Each word of RUN is a folder of runs, a save directory, or the start of an id; a folder can precede an id, as in
`results/runs/b3c`.
"""

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.errors import ConfigError
from src.files import encodable, reading, write_atomic, writing
from src.runs.scores import SCORES
from src.runs.store import EXP_DICT, STATUS, unknown_run
from src.support import documents
from src.support.command_line import parse_arguments
from src.support.documents import warn
from src.tables import curves, results

RUNS = Path("results/runs")
_ID_START = re.compile(r"[0-9a-f]{1,128}")
_ID = re.compile(r"[0-9a-f]{8,128}")
_OUR_ID = re.compile(r"[0-9a-f]{32}")
_MAX_NAMED = 5


def write_page(output: Path, page: str | bytes) -> None:
    """Write a file, create its folder, and print its path.

    Raises:
        RunError: the disk refuses.
    """
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, encodable(page) if isinstance(page, str) else page)
    show_file(output)


def show_file(output: Path) -> None:
    """Print the path of a file that was written."""
    documents.show("file/1", {"path": output}, lambda: sys.stdout.write(f"{output}\n"))


def show(
    output: Path | None,
    schema: str,
    content: Mapping[str, Any],
    write: Callable[[], object],
    errors: Sequence[documents.Mistake] = (),
) -> None:
    """Print the result of a command: the document with --json, else the text that `write` prints.
    output: write it to this file instead, and print the path.

    Raises:
        RunError: the disk refuses.
    """
    if output is None:
        documents.show(schema, content, write, errors)
        return
    with contextlib.redirect_stdout(io.StringIO()) as text:
        documents.show(schema, content, write, errors, text)
    write_page(output, text.getvalue())


def add(parser: argparse.ArgumentParser, groups: str = "only the runs of these groups", output: str = "") -> None:
    """Add the arguments of `parse`. groups, output: help of -e and -o."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN",
        help=f"folder of save directories (default: {RUNS}), save directories, or starts of ids",
    )
    parser.add_argument("-r", "--runs", type=Path, metavar="DIR", help=f"folder of the ids (default: {RUNS})")
    parser.add_argument("-e", "--group", dest="groups", nargs="+", action="extend", metavar="GROUP", help=groups)
    parser.add_argument(
        "--where", metavar="EXPR", help="only the runs that match: \"model.stride > 2 and state == 'done'\""
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=output or "write the text to this file instead of the terminal",
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with `runs`, a folder; `groups`, names or None for all; `paths`, the named save directories.

    With several words after -e, the last one is the folder of runs if it is a folder and no other folder is given.

    Raises:
        ConfigError: two folders of runs, or a word that names no run or several.
        RunError: the folder cannot be read.
    """
    options = parse_arguments(parser, arguments, has_json=True)
    groups = list(dict.fromkeys(options.groups or ()))
    words = list(options.words)
    if options.runs is None and not words and len(groups) > 1 and Path(groups[-1]).is_dir():
        words.append(groups.pop())
    folders = [word for word in words if _is_folder_of_runs(word)]
    starts = [word for word in words if word not in folders]
    folders += [str(options.runs)] if options.runs is not None else []
    if len({os.path.realpath(folder) for folder in folders}) > 1:
        raise ConfigError(f"expected one folder of runs, got {', '.join(folders)}. Run the command once per folder.")
    options.runs = Path(folders[0]) if folders else RUNS
    options.groups = groups or None
    options.paths = [find_run(word, options.runs) for word in starts]
    if not folders and len({path.parent for path in options.paths}) == 1:
        options.runs = options.paths[0].parent
    return options


def find_run(word: str, runs: Path) -> Path:
    """The save directory `word`, or the one with an id that starts with the last part of `word`,
    in the folder before that part, else in `runs`.

    Raises:
        ConfigError: no id starts with it, or several do: see `store.unknown_run`.
        RunError: the folder cannot be read.
    """
    if word and Path(word).is_dir():
        return Path(word) if Path(word).name else Path(word).resolve()
    head, start = os.path.split(word)
    folder = Path(head) if head else runs
    matches = list[str]()
    if _ID_START.fullmatch(start) and folder.is_dir():
        with reading(folder):
            matches = [
                name
                for name in os.listdir(folder)
                if name.startswith(start) and _ID.fullmatch(name) and (folder / name).is_dir()
            ]
    if len(matches) != 1:
        raise unknown_run(word or "''", start, folder, matches, "no such folder of runs")
    return folder / matches[0]


def _is_folder_of_runs(word: str) -> bool:
    """Whether the word is a folder of runs; False for a save directory or the start of an id."""
    path = Path(word)
    if word and path.is_dir():
        return not (
            _OUR_ID.fullmatch(path.name) or any(os.path.exists(path / name) for name in (EXP_DICT, STATUS, SCORES))
        )
    return False


def select(options: argparse.Namespace) -> tuple[list[results.Row], list[str]]:
    """The rows of the selected runs, and warnings: see `results.select`.

    Raises:
        DataError: there is no such folder, or it contains no run.
        ConfigError: a group has no runs, the expression is malformed or matches no run, or the save directories are in
            several folders.
    """
    if not options.paths:
        return results.select(options.runs, options.groups, options.where)
    names = {path.resolve().name for path in options.paths}
    if foreign := [str(path) for path in options.paths if path.resolve().parent != options.runs.resolve()]:
        raise ConfigError(f"{foreign[0]}: expected a run of {options.runs}. Run the command once per folder.")
    return results.select(options.runs, options.groups, options.where, names)


def paths(options: argparse.Namespace, at_least: int = 0, at_most: int | None = None) -> list[Path]:
    """The save directories of the selected runs: the named ones, or those that match the groups and the expression.

    Raises:
        ConfigError: fewer than `at_least` or more than `at_most`; also see `select`.
        DataError: see `select`.
    """
    selected_paths = options.paths
    if options.groups or options.where or not selected_paths:
        rows, warnings = select(options)
        warn(warnings)
        selected_paths = [options.runs / row["exp_id"] for row in rows]
    if len(selected_paths) < at_least or (at_most is not None and len(selected_paths) > at_most):
        expected = str(at_least) if at_least == at_most else f"at least {at_least}"
        id_list = ", ".join(["", *(path.name[:8] for path in selected_paths[:_MAX_NAMED])]).replace(",", ":", 1)
        raise ConfigError(
            f"expected {expected} run{'s' * (at_least > 1)}, got {len(selected_paths)}{id_list}. "
            "Name ids, or select by --where."
        )
    return selected_paths


def add_values(parser: argparse.ArgumentParser) -> None:
    """Add the options that select values and runs for means: see `choose_values`."""
    parser.add_argument(
        "--unfinished",
        dest="include_unfinished",
        action="store_true",
        help="average over all runs that have the score (default: finished runs)",
    )
    parser.add_argument(
        "--at-step", type=int, metavar="N", help="use the values at exactly this step, also of unfinished runs"
    )
    parser.add_argument("--value", choices=curves.VALUES, default="last", help="which value of a run (default: last)")
    parser.add_argument(
        "--seed-key", default=results.SEED, metavar="KEY", help=f"the key to average over (default: {results.SEED})"
    )


def choose_values(options: argparse.Namespace, rows: Sequence[results.Row]) -> tuple[list[results.Row], list[str]]:
    """The rows with the requested values, and warnings.
    Sets `include_unfinished` and `seed_key` of the options to their effective values.

    Raises:
        ConfigError: options that contradict each other, or an unknown key.
    """
    if options.at_step is not None and options.value != "last":
        raise ConfigError(
            "--at-step, --value: the value at one step, and a value over all steps. Leave one of them out."
        )
    if rows and options.seed_key != results.SEED:
        keys = {key for row in rows for key in results.config_keys(row)}
        options.seed_key = results.resolve_key(keys, options.seed_key)
        results.check_known("key", [options.seed_key], keys, "--seed-key")
    options.include_unfinished = (
        options.include_unfinished or options.at_step is not None
    )  # at one step all runs can be compared
    return curves.choose_values(options.runs, rows, options.value, options.at_step)


def title(groups: Sequence[str] | None) -> str:
    """The name of a file about the groups."""
    return "+".join(groups or ["all"])
