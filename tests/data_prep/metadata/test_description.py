"""What a dump of Wikipedia says of a website, from the dump to the column."""

import bz2
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.metadata import description, wiki_index
from data_prep.metadata.description import Descriptions, clean_descriptions, extract, first_sentence
from src.errors import DataError
from tests.conftest import ROOT

LEAD = """{{Infobox broadcaster|name=BBC|logo=[[File:b.svg]]}}
[[File:House.jpg|thumb|The [[Broadcasting House|house]] in 2019]]
The '''British Broadcasting Corporation''' (''now (2020)'') is the [[public broadcaster|broadcaster]]<ref>a</ref> \
of J. Reith. It was.

A second paragraph.
== History ==
Later."""
PAGES = [
    ("BBC", None, LEAD),
    ("Python (programming language)", None, "'''Python''' is a language of many words and few braces."),
    ("Stub", None, "'''Stub''' is short."),
    ("Mercury", None, "'''Mercury''' may refer to:\n* a planet that is near the sun\n* a metal"),
    ("Bbc.co.uk", "BBC", ""),
    ("Python.org", "Python (programming language)", ""),
]


def dump(pages: list[tuple[str, str | None, str]] = PAGES, namespace: int = 0) -> str:
    """In the layout of a dump (mediawiki.org/xml/export-0.11)."""
    articles = ""
    for number, (title, redirect, text) in enumerate(pages):
        to = f'<redirect title="{redirect}" />' if redirect else ""
        escaped_text = text.replace("&", "&amp;").replace("<", "&lt;")
        revision = f'<revision><id>{number}</id><text bytes="1" xml:space="preserve">{escaped_text}</text></revision>'
        articles += f"<page><title>{title}</title><ns>{namespace}</ns><id>{number}</id>{to}{revision}</page>\n"
    talk = (
        "<page><title>Talk:BBC</title><ns>1</ns><revision><text>'''Talk''' is not an article of the "
        "encyclopedia.</text></revision></page>"
    )
    return (
        f"<mediawiki "
        f'xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo><sitename>W</sitename></siteinfo>{articles}{talk}</mediawiki>'
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wiki")
    (folder / "dump.xml.bz2").write_bytes(bz2.compress(dump().encode()))
    assert wiki_index.main([str(folder / "dump.xml.bz2"), "--output", str(folder / "wiki.sqlite")]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["dump.xml.bz2", "wiki.sqlite"]
    return folder / "wiki.sqlite"


def value(url: str, index: Path, compatible: bool = False) -> str | None:
    (items,) = extract({"url": url}, Descriptions(index), compatible).values()
    return items[0]["value"] if items else None


def test_the_first_sentence_of_the_page_about_a_host(index: Path):
    bbc = "The British Broadcasting Corporation is the broadcaster of J. Reith."
    assert value("https://www.BBC.co.uk/news", index) == bbc, "by the redirect"
    assert value("https://bbc.com:8080/", index) is None, "'Bbc' is no page"
    assert value("http://python.org/about", index) == "Python is a language of many words and few braces."
    assert value("http://stub.net/", index) is None, "below five words"
    assert value("http://mercury.com/", index) is None, "a list of meanings"
    assert value("http://[broken", index) is None
    assert value("", index) is None


def test_only_a_leading_www_is_removed_from_hosts_b10(index: Path):
    """B10: the original took "www." out of everywhere, and kept the port."""
    assert value("http://pythwww.on.org/", index) is None
    assert value("http://pythwww.on.org/", index, compatible=True) is not None
    assert value("http://python.org:80/", index) is not None
    assert value("http://python.org:80/", index, compatible=True) is None


def test_misses_are_remembered_b21(index: Path):
    """B21: the original asked again for each page of a host that is not known."""
    descriptions = Descriptions(index)
    extract({"url": "http://unknown.example/page"}, descriptions)
    num_queries = descriptions.queries
    for page in range(3):
        extract({"url": f"http://unknown.example/{page}"}, descriptions)
    assert descriptions.queries == num_queries > 0


def test_every_description_is_looked_at_b21():
    """B21: the original's cleaner looked at the first alone."""
    good, bad = ({"value": text} for text in ("one two three four five six", "too short"))
    assert clean_descriptions([good, bad]) == [good]
    assert clean_descriptions([bad, good]) == [good]
    assert clean_descriptions([bad, good], compatible=True) == []
    assert clean_descriptions([good, bad], compatible=True) == [good, bad]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a " * 4, False),
        ("a " * 5, True),
        ("a " * 50, True),
        ("a " * 51, False),
        ("It may refer to: a b c", False),
        ("[[de:x]] a b c d e", False),
    ],
)
def test_descriptions_are_recognized(text: str, expected: bool):
    assert description.describes(text) == expected


@pytest.mark.parametrize(
    ("paragraph", "sentence"),
    [
        ("One (1 (or two) 3) is it. Two.", "One is it."),
        ("Version 1.2 of J. R. Smith's page. Next", "Version 1.2 of J. R. Smith's page."),
        ('It said "yes." Then more.', 'It said "yes."'),
        ("No end", "No end"),
    ],
)
def test_first_sentences(paragraph: str, sentence: str):
    assert first_sentence(paragraph) == sentence


def test_invalid_dumps_and_indexes_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole = dump()
    for name, content in {
        "cut.xml": whole[: len(whole) // 2].encode(),
        "cut.xml.bz2": bz2.compress(whole.encode())[:-20],
        "no.xml": b"<a/>",
    }.items():
        (tmp_path / name).write_bytes(content)
        assert wiki_index.main([str(tmp_path / name), "--output", str(tmp_path / "out.sqlite")]) == 1
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / name}: ")
    assert wiki_index.main([str(tmp_path / "none.xml"), "--output", str(tmp_path / "out.sqlite")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'none.xml'}: no such file.")
    assert wiki_index.main([str(tmp_path / "cut.xml"), "--output", str(tmp_path / "none" / "out.sqlite")]) == 1
    assert f"the folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.sqlite*"))
    with pytest.raises(DataError, match="not an index of Wikipedia"):
        Descriptions(tmp_path / "cut.xml")


def test_pages_without_a_title_and_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, output = tmp_path / "dump.xml", tmp_path / "wiki.sqlite"
    for page in ("<page><revision><text>a</text></revision></page>", '<page><redirect title="x"/></page>'):
        path.write_text(f"<mediawiki>\n{page}</mediawiki>")
        assert wiki_index.main([str(path), "--output", str(output)]) == 1
        assert f"{path}:2: a page without a title" in capsys.readouterr().err
        assert not list(tmp_path.glob("*.sqlite*"))
    path.write_text(dump())
    assert wiki_index.main([str(path), "--output", str(tmp_path)]) == 1
    assert f"--output {tmp_path}" in capsys.readouterr().err


def test_a_full_disk_is_one_line(tmp_path: Path):
    """A limit of 4 KiB for new files stands for it."""
    path, output = tmp_path / "dump.xml", tmp_path / "wiki.sqlite"
    path.write_text(dump())
    command = [sys.executable, "-m", "data_prep.metadata.wiki_index", str(path), "--output", str(output)]
    limits = (resource.RLIMIT_FSIZE, (4096, 4096))
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=lambda: resource.setrlimit(*limits)
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {output}: cannot write: ")
    assert [each.name for each in tmp_path.iterdir()] == ["dump.xml"]
