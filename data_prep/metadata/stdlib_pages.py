"""Build documents with metadata from the standard library's documentation: `python -m data_prep.metadata.stdlib_pages`.

pydoc renders each module of this Python as an HTML page, in a separate process. The documents of stdlib_pages, below
--data_path, are pieces of 200 to 400 characters with the page's address on docs.python.org, its title and its tags.
Duplicate texts are dropped. A hash of the module's name selects the split, so that a page is in one split only. The
validation documents are in random order: the first ones are of many pages. Two runs on the same Python give the same
bytes.
"""

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_prep import command
from data_prep.metadata import html
from src.errors import DataError

COMMAND = "python -m data_prep.metadata.stdlib_pages"
FOLDER = "stdlib_pages"
SPLITS = ("train", "val")
CHARS = (200, 400)
VAL_PERCENT = 10
SECONDS = 60
"""Timeout per module."""
_SKIPPED = {"antigravity", "idlelib", "lib2to3", "posix", "this", "tkinter", "turtle", "turtledemo"}
"""Modules that open windows or print when imported, that some systems do not have, or that another page repeats."""
_RENDER = "import sys, importlib, pydoc; m = importlib.import_module(sys.argv[1]); sys.stdout.buffer.write("
_RENDER += "pydoc.html.page(pydoc.describe(m), pydoc.html.document(m)).encode('utf-8', 'replace'))"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PATH": "/bin:/usr/bin", "HOME": "/"}
"""Environment without the user's variables, which the page of `os` would show."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{7,}")


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)


def prepare(data_path: Path) -> bool:
    """Make stdlib_pages below `data_path`; False if it is already complete with the same provenance.

    Raises:
        DataError: no module can be rendered.
        RunError: the disk refuses.
    """
    made_from = {
        "python": platform.python_version(),
        "modules": modules(),
        "scripts_sha256": command.digest_files((__file__, html.__file__, html.RULES_FILE)),
        "chars": list(CHARS),
        "val_percent": VAL_PERCENT,
    }

    def fill(folder: Path) -> Mapping[str, Any]:
        rows = split_rows(render(modules()))
        if not all(rows.values()):
            raise DataError(
                f"{FOLDER}: the modules of this Python give too few documents for both splits. Use a complete Python."
            )
        for split, documents in rows.items():
            with open(folder / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row) + "\n" for row in documents)
        return {"counts": {split: len(documents) for split, documents in rows.items()}}

    return command.make_folder(data_path / FOLDER, COMMAND, made_from, fill) is not None


def modules() -> list[str]:
    """List the public modules of the standard library, except those in `_SKIPPED`."""
    return sorted(name for name in sys.stdlib_module_names if not name.startswith("_") and name not in _SKIPPED)


def render(names: Sequence[str]) -> dict[str, str]:
    """Render the page of each module that can be imported here, without paths and memory addresses of this machine."""
    with ThreadPoolExecutor(2) as pool:
        pages = dict(zip(names, pool.map(_page, names), strict=True))
    return {name: page for name, page in pages.items() if page}


def _page(name: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-sP", "-W", "ignore", "-c", _RENDER, name],
            capture_output=True, timeout=SECONDS, check=True, cwd="/", env=_ENVIRONMENT,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return ""
    page = (
        done.stdout.decode("utf-8")
        .replace(sysconfig.get_path("stdlib"), "Lib")
        .replace(sys.prefix, "")
        .replace(sys.base_prefix, "")
    )
    return _ADDRESS.sub("0x0", page)


def split_rows(pages: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Make the rows of both splits. Duplicate texts are dropped. The training rows are in the order of the pages."""
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    texts = set[str]()
    unlimited_rules = [rule for rule in html.read_rules() if rule.max_chars is None]
    for name, source in pages.items():
        page = html.extract(source, rules=unlimited_rules)  # lines with signatures are short
        split = "val" if _digest(name)[0] * 100 < VAL_PERCENT * 256 else "train"
        for text, tags in pieces(page):
            if text in texts:
                continue
            texts.add(text)
            rows[split].append(
                {
                    "text": text,
                    "metadata_html": tags,
                    "metadata_url": [_global_item("url", f"https://docs.python.org/3/library/{name}.html")],
                    "metadata_title": [_global_item("title", f"module {name}")],
                }
            )
    rows["val"].sort(key=lambda row: _digest(row["text"]))
    return rows


def _digest(text: str) -> bytes:
    return hashlib.sha256(f"{FOLDER}/{text}".encode()).digest()


def _global_item(key: str, value: str) -> dict[str, str]:
    return {"key": key, "type": "global", "value": value}


def pieces(page: html.Page) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Cut the text at line ends into pieces of CHARS characters, each with its tags clipped to the piece.
    Shorter remainders are dropped."""
    least, most = CHARS
    begin, text = 0, page.text
    tags = sorted(page.tags, key=lambda tag: (tag["char_start_idx"], tag["relative_start_pos"]))
    while begin < len(text):
        end = text.rfind("\n", begin + least - 1, begin + most) + 1 or begin + most
        piece = text[begin : min(end, len(text))]
        if len(piece) >= least:
            yield piece, _clip_tags(tags, begin, begin + len(piece))
        begin = end


def _clip_tags(tags: Sequence[dict[str, Any]], begin: int, end: int) -> list[dict[str, Any]]:
    """Select the tags in a part of the text, except those that enclose all of it."""
    inside = [
        tag
        for tag in tags
        if tag["char_start_idx"] < end
        and tag["char_end_idx"] > begin
        and tag["char_start_idx"] < tag["char_end_idx"]
        and not (tag["char_start_idx"] <= begin and tag["char_end_idx"] >= end)
    ]
    clipped, at = list[dict[str, Any]](), defaultdict[int, list[tuple[int, int, dict[str, Any], str]]](list)
    for tag in inside:
        tag_copy = {
            **tag,
            "char_start_idx": max(tag["char_start_idx"], begin) - begin,
            "char_end_idx": min(tag["char_end_idx"], end) - begin,
        }
        for side in ("start", "end"):
            character = tag_copy[f"char_{side}_idx"]
            at[character].append(
                (tag[f"char_{side}_idx"], tag[f"relative_{side}_pos"], tag_copy, f"relative_{side}_pos")
            )
        clipped.append(tag_copy)
    for sides in at.values():
        for place, (*_, tag_copy, name) in enumerate(sorted(sides, key=lambda side: side[:2])):
            tag_copy[name] = place
    return clipped


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
