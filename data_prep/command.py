"""Shared code of all commands: command line, output folder, folder lock and progress log.

A command is a module of data_prep with `main = main_of(COMMAND, __doc__, _add_options, _run)`. It passes a function to
`make_folder`, which calls it with an empty folder. If the function returns, the folder becomes the result; if it
raises, the folder is deleted.
"""

import argparse
import contextlib
import fcntl
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from src import files
from src.errors import DataError, RunError, print_errors
from src.support import documents
from src.support.command_line import make_parser
from src.support.documents import report

log = logging.getLogger(__name__)
_REPORT_SECONDS = 10.0


def main_of(
    command: str,
    doc: str | None,
    add_options: Callable[[argparse.ArgumentParser], object],
    run: Callable[..., object],
) -> Callable[..., int]:
    """Make the `main` of a module, which calls `run` with the options as keyword arguments.
    doc: docstring of the module; its first paragraph names the command."""

    @print_errors
    def main(argv: Sequence[str] | None = None) -> int:
        """Run the command line; return the exit code."""
        about = (doc or "").partition("\n\n")[2].strip()
        parser = make_parser(command.removeprefix("python -m "), about)
        add_options(parser)
        documents.add_option(parser)
        with documents.parsing(sys.argv[1:] if argv is None else argv):
            options = vars(parser.parse_args(argv))
        del options["json"]
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        run(**options)
        documents.show_steps(command)
        return 0

    return main


def add_data_path(parser: argparse.ArgumentParser) -> None:
    """Add --data_path, the parent of the new folder."""
    default = Path("results/data")
    parser.add_argument(
        "--data_path", type=Path, default=default, help="folder of prepared data sets (default: %(default)s)"
    )


def digest_files(paths: Sequence[str | Path]) -> str:
    """SHA-256 of the contents of files, such as the scripts that determine the content of a folder."""
    return hashlib.sha256(b"".join(Path(path).read_bytes() for path in paths)).hexdigest()


def is_made(folders: Sequence[Path], made_from: Mapping[str, Any]) -> bool:
    """Whether all `folders` are complete and have the provenance `made_from`; prints a line if so."""
    if any(
        files.defect(folder) or files.read_manifest(folder, DataError).get("made_from") != made_from
        for folder in folders
    ):
        return False
    names = ", ".join(map(str, folders))
    report(
        f"{names}: complete and made from these sources with these options: nothing to do.", folder=names, made=False
    )
    return True


def require_replaceable(folder: Path) -> None:
    """Refuse to replace anything but hidden files and the files of an earlier command, which its manifest lists.

    Raises:
        DataError: `folder` is a file or has other files; names one.
    """
    strangers = [folder] if folder.exists() else []
    if folder.is_dir():
        try:
            names = {*files.read_manifest(folder, DataError)["files"], files.MANIFEST}
        except DataError:  # missing or damaged
            names = {files.MANIFEST}
        ours = {folder / name for name in names}
        others = (path for path in sorted(folder.rglob("*")) if path not in ours and not path.name.startswith("."))
        strangers = [path for path in others if not path.is_dir()]
    if strangers:
        raise DataError(
            f"{folder}: exists, with {len(strangers)} files that this command did not make, such as {strangers[0]}. "
            "Choose another name, or move them."
        )


def make_folder(
    folder: Path, command: str, made_from: Mapping[str, Any], fill: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Make `folder` atomically; return its facts, or None if it `is_made`.

    made_from: everything that the content depends on, as JSON values.
    fill: writes the files into the given empty folder, and returns more facts for the manifest.

    Raises:
        DataError: `folder` has other files; see `require_replaceable`.
        UserError: raised by `fill`. Nothing was written, and an older folder is unchanged.
        RunError: the disk refuses.
    """
    start = time.monotonic()
    if is_made([folder], made_from):
        return None
    require_replaceable(folder)
    is_replacing = (folder / files.MANIFEST).is_file()
    facts: dict[str, Any] = {"command": command, "made_from": made_from}
    with files.new_directory(folder, facts) as partial_folder:
        facts |= fill(partial_folder)
    seconds = time.monotonic() - start
    remark = " in place of an older folder" if is_replacing else ""
    report(
        f"{folder}: made in {seconds:.1f} s{remark}", folder=folder, made=True, replaced=is_replacing, seconds=seconds
    )
    return facts


@contextlib.contextmanager
def exclusive_lock(folder: Path, message: str) -> Iterator[None]:
    """Create `folder` if missing, and lock it; raise RunError with `message` if another process holds the lock."""
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(f"{message} Wait until it ends.") from None
            yield


class Progress:
    """Counts items and their tokens, and logs both every few seconds."""

    def __init__(self, name: str, unit: str) -> None:
        self.items = self.tokens = 0
        self._name, self._unit = name, unit
        self._began = self._logged = time.monotonic()

    def count(self, items: int, tokens: int) -> None:
        """Add the items processed since the last call."""
        self.items += items
        self.tokens += tokens
        now = time.monotonic()
        if now - self._logged >= _REPORT_SECONDS:
            self._logged, rate = now, self.tokens / (now - self._began)
            log.info(
                "%s: %d %s, %.1f million tokens, %.0f tokens/s",
                self._name,
                self.items,
                self._unit,
                self.tokens / 1e6,
                rate,
            )
