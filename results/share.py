"""Zip the runs of a group, without weights and secrets: `python -m results.share [RUNS] -e GROUP -o FILE.zip`."""

import argparse
import os
import re
import sys
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from results.plot import PLOTS
from results.table import render, tabulate
from src.errors import DataError, print_errors
from src.files import reading, sync_directory, writing
from src.runs.lease import GUARD, LEASE
from src.runs.store import EXP_DICT
from src.support import documents
from src.support.command_line import make_parser
from src.support.redaction import SECRET_FILES
from src.tables import results, run_arguments, statistics

MAX_FILE_BYTES = 64_000_000
_FOLDERS = {"checkpoints", "wandb", "code", "__pycache__"}
_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".npz", ".npy", ".onnx", ".gguf")
_KEYS = re.compile(
    rb"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----[^-]*(?:-----END\ [A-Z ]*PRIVATE\ KEY-----)?
    | \b(?: sk-[\w-]{20,} | hf_[A-Za-z0-9]{20,} | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,}
        | xox[abprs]-[\w-]{10,} | AKIA[0-9A-Z]{16} | AIza[\w-]{35} | wandb_v\d_\w{20,}
        | eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,} )
    | (?P<name> (?i: api_?-?key | access_?-?key | wandb_?-?key | secret | password | passwd
        | (?<![a-z_])token | _token | -token | authorization ["']? \s* [:=] \s* ["']? (?: basic | bearer | token ) )
        ["']? \s* (?: [:=] \s* | \s ) ["']? )
        (?! -?[0-9.]+(?:e[+-]?[0-9]+)?(?![\w+/=.-]) ) (?=[\w+/=.-]*[0-9]) [\w+/=.-]{20,}
    | (?P<word> (?i: password | passwd ) ["']? \s* [:=] \s* ["']? ) [^\s"',;(){}[\]]{8,}
    | (?P<scheme> \w+:// ) [^/\s@"']+ @
    """,
    re.VERBOSE,
)
_README = """Results of {runs} runs{of_group}, shared without their weights.

table.csv       the scores, averaged over seeds
<id>/           the save directory of one experiment: exp_dict.json (the experiment), config.json (with every
                default), env.json (code, versions, machine), status.json, scores.jsonl (a row for each log step),
                score_list.pkl (the same for haven), logs

With the code at hand:  python -m results.table FOLDER      python -m results.plot FOLDER
"""


class Document(documents.Document):
    """The zip."""

    schema: Literal["results.share/1"]
    path: str
    runs: int
    files: int
    megabytes: float


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the zip, and print its path, number of files and size. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    rows, warnings = run_arguments.select(options)
    if not rows:
        reason = f": {warnings[0]}" if warnings else ". Check --runs."
        raise DataError(
            f"{options.runs}: no run can be read{reason}"
            + (f" ({len(warnings) - 1} more)" if len(warnings) > 1 else "")
        )
    output = options.output or PLOTS / f"{run_arguments.title(options.groups)}.zip"
    count, left_out = share(options.runs, rows, output, options.groups, options.wandb)
    remarks = statistics.nan_remarks(rows, results.headline_scores(results.score_names(rows)))
    run_arguments.warn([*warnings, *left_out, *remarks])
    content = {"path": output, "runs": len(rows), "files": count, "megabytes": output.stat().st_size / 1e6}
    text = f"{output}: {len(rows)} runs, {count} files, {content['megabytes']:.1f} MB"
    documents.show("results.share/1", content, lambda: print(text))
    return 0


def share(
    runs: Path, rows: Sequence[results.Row], output: Path, groups: Sequence[str] | None = None, wandb: bool = False
) -> tuple[int, list[str]]:
    """Write the zip atomically and reproducibly.
    Returns the number of files, and remarks on omitted and hidden content.

    Keys and passwords in texts are replaced by ***; a binary file with a key or password is omitted.

    Raises:
        DataError: an exp_dict.json contains a key, which cannot be hidden without changing the id.
        RunError: a file cannot be read, or the disk refuses.
    """
    warnings: list[str] = []
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            with zipfile.ZipFile(temporary, "w") as archive:
                _add(
                    archive,
                    "README.txt",
                    _README.format(
                        runs=len(rows), of_group=f" of group {', '.join(groups)}" if groups else ""
                    ).encode(),
                )
                _add(
                    archive,
                    "table.csv",
                    render(*tabulate(rows, None, ["all"]), "csv").encode(errors="backslashreplace"),
                )
                for name in sorted(row["exp_id"] for row in rows):
                    for path in _files(runs / name, wandb, warnings):
                        content = _scrub(path, warnings)
                        if content is not None:
                            _add(archive, path.relative_to(runs).as_posix(), content)
                count = len(archive.infolist())
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, output)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(output.parent)
    return count, warnings


def _files(run: Path, wandb: bool, warnings: list[str]) -> Iterator[Path]:
    """The files of a run to share, sorted by name. Links are not followed."""
    excluded_folders = _FOLDERS - ({"wandb"} if wandb else set())
    for folder, folders, names in os.walk(run):
        folders[:] = sorted(name for name in folders if name not in excluded_folders and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if name in (LEASE, GUARD) or name.startswith(".") or path.is_symlink() or not path.is_file():
                continue
            if path.suffix in _WEIGHTS:
                warnings.append(f"left out: {path}: looks like weights.")
            elif any(fnmatch(name, pattern) for pattern in SECRET_FILES):
                warnings.append(f"left out: {path}: its name is that of a file with keys.")
            elif path.stat().st_size > MAX_FILE_BYTES:
                warnings.append(
                    f"left out: {path}: {path.stat().st_size / 1e6:.0f} MB, more than {MAX_FILE_BYTES / 1e6:.0f}."
                )
            else:
                yield path


def _scrub(path: Path, warnings: list[str]) -> bytes | None:
    """The content of a file without secrets; None if the file must be omitted.

    Raises:
        DataError: an exp_dict.json contains a key.
    """
    try:
        with reading(path):
            content = path.read_bytes()
    except FileNotFoundError:
        return None  # deleted meanwhile by a live run
    clean, count = _KEYS.subn(_hide, content)
    if not count:
        return content
    if path.name == EXP_DICT:
        raise DataError(
            f"{path}: contains text that looks like a secret key, which cannot be removed as the run's id depends on "
            "it. Choose other runs; nothing was written."
        )
    if b"\0" in content or path.suffix == ".pkl":
        warnings.append(f"left out: {path}: holds what looks like a key, and is no text.")
        return None
    warnings.append(f"hidden: {count} times what looks like a key in {path}.")
    return clean


def _hide(match: re.Match[bytes]) -> bytes:
    return match["scheme"] + b"***@" if match["scheme"] else (match["name"] or match["word"] or b"") + b"***"


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name)  # dated 1980 without an owner, for reproducible bytes
    entry.create_system, entry.external_attr = 3, 0o644 << 16
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED, 6)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.share", __doc__)
    run_arguments.add(parser, output=f"the zip to write (default: {PLOTS}/GROUP.zip)")
    parser.add_argument(
        "--wandb", action="store_true", help="with the folders of wandb, which hold the machine's name and user"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
