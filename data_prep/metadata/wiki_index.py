"""Index first paragraphs of Wikipedia: `python -m data_prep.metadata.wiki_index DUMP.xml.bz2 --output wiki.sqlite`.

The dump is a MediaWiki XML export, plain or with bzip2 (dumps.wikimedia.org). It is read once, page by page. The index
is one SQLite file, for `data_prep.metadata.prepare --extract description --wiki_index`.
"""

import argparse
import bz2
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lxml import etree  # pyright: ignore[reportAttributeAccessIssue]  a compiled module

from data_prep import command
from data_prep.metadata.page_sources import PACKAGES
from src.errors import DataError, RunError
from src.files import reading, writing

COMMAND = "python -m data_prep.metadata.wiki_index"
_TABLES = """
create table paragraphs (title text primary key, paragraph text) without rowid;
create table redirects (name text primary key, title text) without rowid;
"""
_NO_TEXT = ("file:", "image:", "category:")


class Page(NamedTuple):
    """An article, or a redirect to one."""

    title: str
    redirect: str | None
    wikitext: str


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dump", type=Path, help="pages-articles.xml, or .xml.bz2")
    parser.add_argument("--output", type=Path, default=Path("wiki.sqlite"), help="the new file (default: %(default)s)")


def make_index(dump: Path, output: Path) -> None:
    """Write the index atomically.

    Raises:
        DataError: the dump is damaged or is not a dump, or a package that reads wikitext is missing.
        RunError: the disk refuses, or `output` is a folder.
    """
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    counts = {"paragraphs": 0, "redirects": 0}
    if not output.parent.is_dir():
        raise DataError(f"--output {output}: the folder {output.parent} does not exist. Create it.")
    if output.is_dir():
        raise RunError(f"--output {output}: a folder. Name a new file.")
    try:
        with writing(output), sqlite3.connect(temporary) as database:
            database.executescript(_TABLES)
            for page in read_pages(dump):
                if page.redirect is not None:
                    database.execute(
                        "insert or ignore into redirects values (?, ?)", (page.title.lower(), page.redirect)
                    )
                    counts["redirects"] += 1
                elif paragraph := first_paragraph(page.wikitext):
                    database.execute("insert or replace into paragraphs values (?, ?)", (page.title, paragraph))
                    counts["paragraphs"] += 1
        database.close()
        if not counts["paragraphs"]:
            raise DataError(f"{dump}: contains no article. Expected an XML export of MediaWiki.")
        with writing(output):
            os.replace(temporary, output)
    except sqlite3.OperationalError as error:
        raise RunError(f"{output}: cannot write: {error}. Make room or choose another folder.") from None
    finally:
        temporary.unlink(missing_ok=True)
    text = f"{output}: {counts['paragraphs']} paragraphs, {counts['redirects']} redirects"
    command.report(text, file=output, **counts)


def read_pages(dump: Path) -> Iterator[Page]:
    """Yield the articles and redirects of a dump. Pages of other name spaces are skipped.

    Raises:
        DataError: the dump is truncated or damaged.
    """
    try:
        with reading(dump, DataError), (bz2.open if dump.suffix == ".bz2" else open)(dump, "rb") as file:
            for _, element in etree.iterparse(file, tag="{*}page", huge_tree=True):
                if element.findtext("{*}ns", "0") == "0":
                    if not (title := element.findtext("{*}title")):
                        raise DataError(f"{dump}:{element.sourceline}: a page without a title. Download it again.")
                    redirect = element.find("{*}redirect")
                    text = element.findtext("{*}revision/{*}text") or ""
                    yield Page(title, None if redirect is None else redirect.get("title"), text)
                element.clear()
                while element.getprevious() is not None:
                    del element.getparent()[0]
    except FileNotFoundError:
        raise DataError(f"{dump}: no such file. Download pages-articles.xml.bz2 of a Wikipedia dump.") from None
    except (etree.XMLSyntaxError, EOFError, OSError) as bad:
        raise DataError(
            f"{dump}: truncated, damaged, or not XML ({' '.join(str(bad).split())[:200]}). Download it again."
        ) from None


def first_paragraph(wikitext: str) -> str:
    """First paragraph before any heading, without markup; "" if there is no such paragraph."""
    try:
        import mwparserfromhell
    except ModuleNotFoundError:
        raise DataError(
            f"mwparserfromhell: the package that reads wikitext is missing. Run: pip install -r {PACKAGES}"
        ) from None
    code = mwparserfromhell.parse(wikitext).get_sections(include_lead=True, flat=True)[0]
    unread = list(code.filter_tags(matches=lambda tag: str(tag.tag).lower() in ("ref", "gallery")))
    unread += [link for link in code.filter_wikilinks() if str(link.title).strip().lower().startswith(_NO_TEXT)]
    for node in unread:
        try:
            code.remove(node)
        except ValueError:  # it is inside a node that was removed
            continue
    lines = (" ".join(line.split()) for line in code.strip_code(normalize=True, collapse=True).split("\n"))
    return next((line for line in lines if line), "")


main = command.main_of(COMMAND, __doc__, _add_options, make_index)

if __name__ == "__main__":
    sys.exit(main())
