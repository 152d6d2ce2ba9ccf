"""Build documents with metadata from the standard library's own documentation: `python -m data_prep.stdlib_pages`.

pydoc renders each module of this Python as a page of HTML, in a process of its own. Pieces of 200 to 400 characters are the documents of
stdlib_pages, below --data_path, with the page's address on docs.python.org, its title and its tags. Equal texts are there once, and are in
one split by their text. Two runs on the same Python give the same bytes.
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

COMMAND = "python -m data_prep.stdlib_pages"
FOLDER = "stdlib_pages"
SPLITS = ("train", "val")
CHARS = (200, 400)
VAL_PERCENT = 10
SECONDS = 60
"""Of the rendering of one module."""
_SKIPPED = {"antigravity", "idlelib", "lib2to3", "this", "tkinter", "turtle", "turtledemo"}
"""They open windows, say something when imported, or are not everywhere."""
_RENDER = "import sys, importlib, pydoc; m = importlib.import_module(sys.argv[1]); sys.stdout.buffer.write("
_RENDER += "pydoc.html.page(pydoc.describe(m), pydoc.html.document(m)).encode('utf-8', 'replace'))"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "PATH": "/bin:/usr/bin", "HOME": "/"}
"""Nothing of the user's: the page of `os` shows it."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{7,}")


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)


def prepare(data_path: Path) -> bool:
    """Make stdlib_pages below `data_path`; False if it is whole and has the same provenance, so that nothing was done.

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
            raise DataError("the modules of this Python give too few documents to fill both splits.")
        for split, own in rows.items():
            with open(folder / f"{split}.jsonl", "w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row) + "\n" for row in own)
        return {"counts": {split: len(own) for split, own in rows.items()}}

    return command.make_folder(data_path / FOLDER, COMMAND, made_from, fill) is not None


def modules() -> list[str]:
    """Public modules of the standard library, but for those that are not to be imported."""
    return sorted(name for name in sys.stdlib_module_names if not name.startswith("_") and name not in _SKIPPED)


def render(names: Sequence[str]) -> dict[str, str]:
    """Module -> its page, without paths and addresses of this machine; without modules that cannot be imported here."""
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
    page = done.stdout.decode("utf-8").replace(sysconfig.get_path("stdlib"), "Lib").replace(sys.prefix, "").replace(sys.base_prefix, "")
    return _ADDRESS.sub("0x0", page)


def split_rows(pages: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Rows of both splits, in the order of the pages; of equal texts the first."""
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    seen = set[str]()
    unlimited = [rule for rule in html.read_rules() if rule.max_chars is None]
    for name, source in pages.items():
        page = html.extract(source, rules=unlimited)  # a line with a signature is short
        for text, tags in pieces(page):
            if text in seen:
                continue
            seen.add(text)
            is_val = hashlib.sha256(f"{FOLDER}/{text}".encode()).digest()[0] * 100 < VAL_PERCENT * 256
            rows["val" if is_val else "train"].append(
                {
                    "text": text,
                    "metadata_html": tags,
                    "metadata_url": [_global_item("url", f"https://docs.python.org/3/library/{name}.html")],
                    "metadata_title": [_global_item("title", f"module {name}")],
                }
            )
    return rows


def _global_item(key: str, value: str) -> dict[str, str]:
    return {"key": key, "type": "global", "value": value}


def pieces(page: html.Page) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The text cut after lines into pieces of CHARS characters, and the tags in each, cut at its ends. Shorter rests are left out."""
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
    """Tags of a part of the text, but those around all of it."""
    inside = [
        tag
        for tag in tags
        if tag["char_start_idx"] < end
        and tag["char_end_idx"] > begin
        and tag["char_start_idx"] < tag["char_end_idx"]
        and not (tag["char_start_idx"] <= begin and tag["char_end_idx"] >= end)
    ]
    found, at = list[dict[str, Any]](), defaultdict[int, list[tuple[int, int, dict[str, Any], str]]](list)
    for tag in inside:
        own = {**tag, "char_start_idx": max(tag["char_start_idx"], begin) - begin, "char_end_idx": min(tag["char_end_idx"], end) - begin}
        for side in ("start", "end"):
            character = own[f"char_{side}_idx"]
            at[character].append((tag[f"char_{side}_idx"], tag[f"relative_{side}_pos"], own, f"relative_{side}_pos"))
        found.append(own)
    for sides in at.values():
        for place, (*_, own, name) in enumerate(sorted(sides, key=lambda side: side[:2])):
            own[name] = place
    return found


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
