"""Preparation of pages from all kinds of files, with damaged sources and killed processes."""

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data_prep.metadata import page_sources, prepare
from src.data.text import tokenizers
from src.errors import DataError
from src.experiments.config import Places
from src.systems.metadata.data.annotations import read_row
from src.systems.metadata.data.dataset import Config
from tests import toy
from tests.conftest import ROOT

EXTRACT = ["--extract", "html", "url", "text"]


def page(name: str, words: int = 20) -> dict[str, Any]:
    body = "".join(f"<p>{f'{name} says {i} ' * words}</p>" for i in range(3))
    html = (
        f"<html><head><title>About {name}</title></head><body><h1>The page {name} of a long "
        f"title</h1>{body}</body></html>"
    )
    return {"url": f"https://www.example.org/2019/04/05/{name}.html", "doc_html": html}


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def write_warc(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """By the layout of ISO 28500: a record for each page and one for its picture, each with gzip by itself."""
    records = []
    for row in rows:
        for kind, body in (("text/html; charset=utf-8", row["doc_html"]), ("image/png", "no page")):
            reply = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n{body}".encode()
            head = (
                f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {row['url']}\r\nContent-Type: "
                f"application/http; msgtype=response\r\n"
            )
            records.append(f"{head}Content-Length: {len(reply)}\r\n\r\n".encode() + reply + b"\r\n\r\n")
    path.write_bytes(b"".join(gzip.compress(record, mtime=0) if path.suffix == ".gz" else record for record in records))


def warc_record(kind: str, body: bytes, **headers: str) -> bytes:
    head = {
        "WARC-Type": kind,
        "WARC-Target-URI": "https://www.example.org/page",
        **{name.replace("_", "-"): headers[name] for name in headers},
    }
    lines = [
        b"WARC/1.0",
        *(f"{name}: {value}".encode() for name, value in head.items()),
        f"Content-Length: {len(body)}".encode(),
    ]
    return b"\r\n".join([*lines, b"", body, b"", b""])


def response(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    reply = b"\r\n".join([f"HTTP/1.1 {status}".encode(), *map(str.encode, headers), b"", body])
    return warc_record("response", reply, Content_Type="application/http; msgtype=response")


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


WRITERS = {
    "warc": write_warc,
    "warc.gz": write_warc,
    "parquet": write_parquet,
    "jsonl": write_json,
    "jsonl.gz": write_json,
}


def run(folder: Path, *words: str) -> int:
    return prepare.main(["--data_path", str(folder / "data"), "--name", "made", "--workers", "1", *words])


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data" / "made" / f"{split}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", WRITERS)
def test_pages_of_each_kind_of_file(kind: str, tmp_path: Path):
    WRITERS[kind](tmp_path / f"train.{kind}", [page("one"), page("two")])
    WRITERS[kind](tmp_path / f"val.{kind}", [page("three")])
    toy.write_data(tmp_path / "data")
    assert run(tmp_path, "--train", str(tmp_path / f"*.{kind}"), "--val", str(tmp_path / f"val.{kind}"), *EXTRACT) == 0
    first, second = rows(tmp_path, "train")
    assert [row["metadata_title"][0]["value"] for row in (first, second, *rows(tmp_path, "val"))] == [
        "About one",
        "About two",
        "About three",
    ]
    assert first["text"].startswith("The page one of a long title\none says 0 one says 0")
    assert first["metadata_timestamp"][0]["value"] == "2019-04-05 00:00:00"
    assert [item["value"] for item in first["metadata_html"]] == ["h1", "p", "p", "p", "body"]
    assert "doc_html" not in first
    places = Places(tmp_path / "data", tmp_path / "runs")
    config = Config(corpus="made", sequence_tokens=64, columns=["url", "title", "html"])
    assert len(config.build(places, tokenizers.load(places.data / "toy_tokenizer"), "train", 0)) == 2


def test_published_layout_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Some of its files have columns of entities, others lack them. Rows without a text are left out."""
    item = {"key": "entity", "type": "local", "char_start_idx": 0, "char_end_idx": 3, "value": "One"}
    plain = {"text": "one text", "metadata_url": [], "c4_shard": 7, "html_head": ["<head></head>"]}
    write_json(tmp_path / "a.jsonl.gz", [{**plain, "metadata_entity": [item]}, {**plain, "text": ""}])
    write_json(tmp_path / "b.jsonl.gz", [plain, {"text": "of version 1", "metadata": []}])
    write_json(tmp_path / "val.jsonl.gz", [{**plain, "text": "another"}])
    assert run(tmp_path, "--train", str(tmp_path), "--val", str(tmp_path / "val.jsonl.gz")) == 0
    assert rows(tmp_path, "train") == [
        {**plain, "metadata_entity": [item]},
        {**plain, "metadata_entity": []},
        {"text": "of version 1", "metadata": []},
    ]
    assert "3 and 1 rows, 1 without a text left out" in capsys.readouterr().out
    before = (tmp_path / "data" / "made" / "train.jsonl").stat().st_mtime_ns
    (tmp_path / "data" / "made.parts").mkdir()  # as a kill at the very end leaves it
    assert run(tmp_path, "--train", str(tmp_path), "--val", str(tmp_path / "val.jsonl.gz")) == 0
    assert (tmp_path / "data" / "made" / "train.jsonl").stat().st_mtime_ns == before
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["made"]


def test_damaged_sources_do_not_stop_other_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pages = [page(f"p{number}", 200) for number in range(40)]
    write_json(tmp_path / "a.jsonl.gz", pages[:20])
    whole = (tmp_path / "a.jsonl.gz").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.jsonl").write_text(json.dumps(pages[20]) + "\n{broken\n")
    write_json(tmp_path / "c.jsonl", pages[21:39])
    (tmp_path / "d.parquet").write_bytes(b"PAR1 or not")
    write_json(tmp_path / "val.jsonl", pages[39:])
    words = ["--train", str(tmp_path), "--val", str(tmp_path / "val.jsonl"), *EXTRACT]
    assert run(tmp_path, *words) == 1
    output = capsys.readouterr().err.splitlines()
    assert len(output) == 3
    assert output[0].startswith(f"error: {tmp_path / 'a.jsonl.gz'}:")
    assert "the gzip file is truncated" in output[0]
    assert output[1].startswith(f"error: {tmp_path / 'b.jsonl'}:2: not valid JSON")
    assert output[2].startswith(f"error: {tmp_path / 'd.parquet'}: not a parquet file, or damaged")
    assert not (tmp_path / "data" / "made").exists()
    finished = sorted(path.name.partition("-")[0] for path in (tmp_path / "data" / "made.parts").glob("*.json"))
    assert finished == ["c", "val"], "the others were worked on"
    (part,) = (tmp_path / "data" / "made.parts").glob("c-*.jsonl")
    before = part.stat().st_ino, part.read_bytes()

    (tmp_path / "a.jsonl.gz").write_bytes(whole)
    write_json(tmp_path / "b.jsonl", pages[20:21])
    (tmp_path / "d.parquet").unlink()
    assert (part.stat().st_ino, part.read_bytes()) == before
    assert run(tmp_path, *words) == 0
    assert [row["metadata_title"][0]["value"] for row in rows(tmp_path, "train")] == [
        f"About p{number}" for number in range(39)
    ]


@pytest.mark.parametrize(
    ("html", "message"),
    [
        (None, "field 'doc_html': expected the HTML of a page, got None."),
        ("", "no HTML can be read"),
        ("<div>" * 10_000, "tags are nested too deep for the parser"),
    ],
)
def test_unreadable_pages_are_counted_and_limited(
    html: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bad = {**page("bad"), "doc_html": html, "text": "what was known of it"}
    write_json(tmp_path / "train.jsonl", [page("good"), bad])
    write_json(tmp_path / "val.jsonl", [page("val")])
    words = ["--train", str(tmp_path / "train.jsonl"), "--val", str(tmp_path / "val.jsonl"), *EXTRACT]
    assert run(tmp_path, *words) == 1
    output = capsys.readouterr().err
    assert "--extract html: failed on 1 of 3 rows." in output
    assert f"{tmp_path / 'train.jsonl'}:2: " in output
    assert message in output
    assert not (tmp_path / "data" / "made").exists()
    assert run(tmp_path, *words, "--max_errors", "0.5") == 0
    good, part = rows(tmp_path, "train")
    assert (good["HtmlPreprocessor_error"], good["HtmlPreprocessor_error_comment"]) == (0, "")
    assert part["HtmlPreprocessor_error"] == 1
    assert message in part["HtmlPreprocessor_error_comment"]
    assert (part["text"], part["doc_html"]) == ("what was known of it", html), "the row keeps what it had"
    assert part["metadata_url"], "other extractors go on"


def test_documents_in_both_splits_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """B5 and B6: nothing kept the reference from training on its test file."""
    write_json(tmp_path / "train.jsonl", [page("one"), page("same")])
    write_json(tmp_path / "val.jsonl", [page("other"), page("third"), {**page("same"), "url": "https://mirror.org/"}])
    words = ["--train", str(tmp_path / "train.jsonl"), "--val", str(tmp_path / "val.jsonl"), *EXTRACT]
    assert run(tmp_path, *words) == 1
    output = capsys.readouterr().err
    assert (f"{tmp_path / 'train.jsonl'}: row 2: same text as row 3 of {tmp_path / 'val.jsonl'} (--val).") in output
    assert not (tmp_path / "data" / "made").exists()
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "val.jsonl")
    assert run(tmp_path, "--train", str(link), "--val", str(tmp_path / "val.jsonl")) == 1
    assert "--train: all of its sources are also in --val" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train", "none.jsonl"], "none.jsonl: no such file. Expected names that end with .warc, .warc.gz, .parquet"),
        (["--train", "."], ".: no readable file. Expected names that end with .warc"),
        (["--train", ".."], "dead.jsonl: not a file"),
        (["--train", "../*.warc"], "folder.warc: not a file"),
        (["--extract", "entities", "--mentions", "none.tsv"], "--mentions none.tsv: no such file"),
        (["--extract", "description", "--wiki_index", "none.sqlite"], "--wiki_index none.sqlite: no such file"),
        (["--workers", "0"], "--workers: expected at least 1, got 0"),
        (["--max_errors", "1.5"], "--max_errors: expected a share from 0 to 1, got 1.5"),
        (["--max_replaced", "-1"], "--max_replaced: expected a share from 0 to 1, got -1"),
        (["--page_seconds", "0"], "--page_seconds: expected a number above 0, got 0"),
        (["--removal_rules", "rules.yaml"], "--removal_rules"),
        (["--extract", "html", "--removal_rules", "rules.yaml"], "rules.yaml: no such file"),
        (["--slurm", "partition"], "--slurm partition: expected KEY=VALUE"),
        (["--slurm", "colour=red", "partition=cpu", "time=00:01:00"], "--slurm: datatrove does not accept a setting"),
        (
            ["--slurm", "partition=cpu"],
            "--slurm: expected partition=NAME and time=HH:MM:SS among the settings, got partition=cpu.",
        ),
    ],
)
def test_mistakes_on_the_command_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_json(tmp_path / "good.jsonl", [page("one")])
    write_json(tmp_path / "val.jsonl", [page("two")])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    (tmp_path / "folder.warc").mkdir()
    (tmp_path / "dead.jsonl").symlink_to(tmp_path / "none.jsonl")
    monkeypatch.chdir(tmp_path / "empty")
    assert run(tmp_path, "--train", str(tmp_path / "good.jsonl"), "--val", str(tmp_path / "val.jsonl"), *words) == 1
    assert message in capsys.readouterr().err


def test_names_of_sources_that_are_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train, val = (tmp_path / os.fsdecode(name) for name in (b"\xff.warc", b"\xfe.warc"))
    write_warc(train, [page("one")])
    write_warc(val, [page("two")])
    words = ["--train", str(train), "--val", str(val)]
    assert run(tmp_path, *words, *EXTRACT) == 0
    assert manifest(tmp_path)["made_from"]["sources"]["train"][0]["name"] == "\\udcff.warc"
    train.write_bytes(train.read_bytes()[:-20])
    assert run(tmp_path, *words, *EXTRACT) == 1
    assert "\\udcff.warc: record" in capsys.readouterr().err


def test_missing_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_json(tmp_path / "good.jsonl", [page("one")])
    write_json(tmp_path / "val.jsonl", [page("two")])
    monkeypatch.setitem(sys.modules, "datatrove.executor", None)
    words = ["--train", str(tmp_path / "good.jsonl"), "--val", str(tmp_path / "val.jsonl"), *EXTRACT]
    assert run(tmp_path, *words, "--slurm", "partition=cpu", "time=00:10:00") == 1
    assert "pip install -r requirements/metadata.txt" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "num_bytes_cut"), [("warc.gz", 40), ("warc.gz", 400), ("warc", 40), ("warc", 400)])
def test_truncated_warc_is_an_error(kind: str, num_bytes_cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """warcio takes the end of a file for the end of its records, wherever it is."""
    write_warc(path := tmp_path / f"a.{kind}", [page("one"), page("two")])
    path.write_bytes(path.read_bytes()[:-num_bytes_cut])
    write_json(tmp_path / "val.jsonl", [page("val")])
    assert run(tmp_path, "--train", str(path), "--val", str(tmp_path / "val.jsonl"), *EXTRACT) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"error: {path}: record ")
    assert "truncated or damaged" in output


def test_pages_of_a_warc_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_sources, "LONGEST_PAGE", 20)
    write_warc(tmp_path / "a.warc", [{"url": "http://a.org", "doc_html": "é" * 15}])
    ((_, row),) = page_sources.read_rows(tmp_path / "a.warc")
    assert len(row["doc_html"].data) == 21, "one byte over the limit, so that the extractor refuses it"


def test_unexpected_errors_do_not_stop_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("a", "b", "val"):
        write_json(tmp_path / f"{name}.jsonl", [page(name)])
    words = ["--train", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--val", str(tmp_path / "val.jsonl")]
    read = page_sources.read_rows
    monkeypatch.setattr(
        page_sources,
        "read_rows",
        lambda path, *options: iter([1 / 0]) if path.name == "a.jsonl" else read(path, *options),
    )
    assert run(tmp_path, *words, *EXTRACT) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'a.jsonl'}: ZeroDivisionError: division by zero.\n"
    assert len(list((tmp_path / "data" / "made.parts").glob("*.json"))) == 2


def test_malformed_rows_are_counted_and_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    span = {"key": "html", "type": "local", "value": "b", "char_start_idx": 0, "char_end_idx": 99}
    bad = [{"txt": "typo"}, {"text": "short", "metadata": [span]}]
    write_json(tmp_path / "train.jsonl", [{"text": "one"}, *bad, {"text": "two"}])
    write_json(tmp_path / "val.jsonl", [{"text": "val"}])
    words = ["--train", str(tmp_path / "train.jsonl"), "--val", str(tmp_path / "val.jsonl")]
    assert run(tmp_path, *words) == 1
    output = capsys.readouterr().err
    assert "--train, --val: malformed metadata in 2 of 5 rows." in output
    assert f"{tmp_path / 'train.jsonl'}:2: field 'text': expected text, got None." in output
    assert f"{tmp_path / 'train.jsonl'}:3: metadata[0]: the span [0, 99) is not in the text of 5 characters." in output
    assert run(tmp_path, *words, "--max_errors", "0.5") == 0
    assert [row["text"] for row in rows(tmp_path, "train")] == ["one", "two"]


def test_rows_with_a_failed_extractor_have_its_columns(tmp_path: Path):
    """So that a training can list them."""
    odd = {**page("odd"), "url": "http://[broken/"}
    write_json(tmp_path / "train.jsonl", [page("one"), odd, {**page("none"), "doc_html": "", "text": "what was known"}])
    write_json(tmp_path / "val.jsonl", [page("val")])
    words = [
        "--train",
        str(tmp_path / "train.jsonl"),
        "--val",
        str(tmp_path / "val.jsonl"),
        *EXTRACT,
        "--max_errors",
        "0.5",
    ]
    assert run(tmp_path, *words) == 0
    one, failed_row, bare = rows(tmp_path, "train")
    assert one.keys() >= failed_row.keys()
    assert failed_row["metadata_url"][0]["value"] == "http://[broken/"
    assert (failed_row["metadata_generation_datasource"], bare["metadata_html"]) == ([], [])


@pytest.mark.parametrize("charset", ["undefined", "idna", "no-such-set"])
def test_unknown_charsets_are_ignored(charset: str, tmp_path: Path):
    strange = page("strange")
    strange["doc_html"] = strange["doc_html"].replace("<head>", f'<head><meta charset="{charset}">')
    write_warc(tmp_path / "train.warc", [strange, page("two")])
    write_warc(tmp_path / "val.warc", [page("val")])
    assert run(tmp_path, "--train", str(tmp_path / "train.warc"), "--val", str(tmp_path / "val.warc"), *EXTRACT) == 0
    assert len(rows(tmp_path, "train")) == 2


def test_finished_command_does_not_delete_files_of_a_running_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from data_prep import command

    write_json(tmp_path / "train.jsonl", [{"text": "one"}])
    write_json(tmp_path / "val.jsonl", [{"text": "val"}])
    words = ["--train", str(tmp_path / "train.jsonl"), "--val", str(tmp_path / "val.jsonl")]
    assert run(tmp_path, *words) == 0
    parts = tmp_path / "data" / "made.parts"
    with command.exclusive_lock(parts, ""):
        (parts / "of the other").touch()
        assert run(tmp_path, *words) == 1
        assert "another process prepares it." in capsys.readouterr().err
        assert (parts / "of the other").exists()


def html_page(text: str, encoding: str = "utf-8", head: str = "") -> bytes:
    return f"<html><head>{head}</head><body><p>{text * 20}</p></body></html>".encode(encoding)


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "data" / "made" / "manifest.json").read_text())


def prepare_warc(folder: Path, records: Sequence[bytes], *words: str) -> int:
    (folder / "train.warc").write_bytes(b"".join(records))
    (folder / "val.warc").write_bytes(response(html_page("held out "), "Content-Type: text/html"))
    return run(folder, "--train", str(folder / "train.warc"), "--val", str(folder / "val.warc"), *EXTRACT, *words)


def test_charsets_of_pages_are_read_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = [
        response(html_page("möse ", "latin-1"), "content-TYPE: TEXT/HTML"),
        response(html_page("größer ", "latin-1", "<meta charset=iso-8859-1>"), "Content-Type: text/html"),
        response(html_page("привет ", "koi8-r"), "CONTENT-TYPE: Text/Html; Charset=KOI8-R"),
        response(html_page("plain "), "Content-Type: application/xhtml+xml"),
        response(html_page("kaputt "), "Content-Type: text/html; charset=utf-8").replace(b"kaputt", b"kap\xfftt"),
    ]
    assert prepare_warc(tmp_path, records) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --max_replaced 0.01: 1 of 6 pages")
    assert f"{tmp_path / 'train.warc'}: record 5" in error
    assert len(error.splitlines()) == 1
    assert prepare_warc(tmp_path, records, "--max_replaced", "0.2") == 0
    assert [row["text"].split()[0] for row in rows(tmp_path, "train")] == [
        "möse",
        "größer",
        "привет",
        "plain",
        "kap\ufffdtt",
    ]
    assert manifest(tmp_path)["pages"] == {"all": 6, "guessed": 1, "replaced": 1, "truncated": 0}
    assert "6 pages, 1 with a guessed charset, 1 with replacement characters" in capsys.readouterr().out


def test_bytes_of_parquet_files_are_decoded_like_pages(tmp_path: Path):
    write_parquet(
        tmp_path / "train.parquet",
        [{"url": "https://a.org", "doc_html": html_page("möse ", "latin-1", "<meta charset=latin1>")}],
    )
    write_json(tmp_path / "val.jsonl", [page("val")])
    assert (
        run(tmp_path, "--train", str(tmp_path / "train.parquet"), "--val", str(tmp_path / "val.jsonl"), *EXTRACT) == 0
    )
    assert rows(tmp_path, "train")[0]["text"].startswith("möse möse")


@pytest.mark.parametrize("num_replaced", [29, 30])
def test_most_replaced_is_inclusive(num_replaced: int, tmp_path: Path):
    pages = [page("a\ufffd" * (number < num_replaced) + f"{number} ") for number in range(99)]
    write_json(tmp_path / "train.jsonl", pages)
    write_json(tmp_path / "val.jsonl", [page("val")])
    words = [
        "--train",
        str(tmp_path / "train.jsonl"),
        "--val",
        str(tmp_path / "val.jsonl"),
        *EXTRACT,
        "--max_replaced",
        "0.29",
    ]
    assert run(tmp_path, *words) == (num_replaced > 29)


def test_codings_of_warc_responses_are_case_insensitive(tmp_path: Path):
    html = "Content-Type: text/html"
    packed = gzip.compress(html_page("packed "))
    chunked = b"%x\r\n%s\r\n0\r\n\r\n"
    records = [
        response(chunked % (len(html_page("one ")), html_page("one ")), html, "TRANSFER-ENCODING: Chunked"),
        response(chunked % (len(packed), packed), html, "Transfer-Encoding: chunked ", "content-encoding: GZIP"),
        response(gzip.compress(html_page("x-gzip ")), html, "Content-Encoding: X-GZIP"),
    ]
    assert prepare_warc(tmp_path, records) == 0
    assert [row["text"].split()[0] for row in rows(tmp_path, "train")] == ["one", "packed", "x-gzip"]


def test_empty_bodies_have_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bodies = [b"", b" \r\n", b"<!doctype html><!-- nothing -->", html_page("one ")]
    assert prepare_warc(tmp_path, [response(body, "Content-Type: text/html") for body in bodies]) == 0
    assert len(rows(tmp_path, "train")) == 1
    assert "3 without a text" in capsys.readouterr().out


def test_a_record_with_too_small_a_length_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = response(html_page("one "), "Content-Type: text/html")
    length = int(one.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    short = one.replace(b"Content-Length: %d" % length, b"Content-Length: %d" % (length - 30))
    assert prepare_warc(tmp_path, [short, response(html_page("two "), "Content-Type: text/html")]) == 0
    assert len(rows(tmp_path, "train")) == 2
    assert manifest(tmp_path)["skipped"] == {page_sources.SHORT_RECORD: 1}
    assert "</html>" not in capsys.readouterr().err


def test_files_of_other_kinds_in_a_folder_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "pages").mkdir()
    write_json(tmp_path / "pages" / "a.jsonl", [page("a")])
    (tmp_path / "pages" / "b.JSONL").touch()
    (tmp_path / "pages" / "deep").mkdir()
    assert page_sources.list_files([str(tmp_path / "pages")]) == [tmp_path / "pages" / "a.jsonl"]
    assert "b.JSONL, deep" in caplog.text


def test_all_gzip_members_of_a_body_are_read(tmp_path: Path):
    html = ("Content-Type: text/html", "Content-Encoding: gzip")
    body = html_page("one ")
    members = [gzip.compress(body[start : start + 20]) for start in range(0, len(body), 20)]
    records = [response(b"".join(members), *html), response(gzip.compress(body) + b"garbage", *html)]
    assert prepare_warc(tmp_path, records) == 0
    first, second = rows(tmp_path, "train")
    assert first["text"] == second["text"] != ""


def test_a_crawl_needs_the_extraction_of_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.warc").write_bytes(response(html_page("a "), "Content-Type: text/html"))
    write_json(tmp_path / "val.jsonl", [page("val")])
    words = ["--train", str(tmp_path / "a.warc"), "--val", str(tmp_path / "val.jsonl")]
    assert run(tmp_path, *words, "--extract", "url") == 1
    error = capsys.readouterr().err
    assert f"--extract: {tmp_path / 'a.warc'} " in error


def test_an_arc_file_is_named_as_such(tmp_path: Path):
    version = b"1 0 Crawler\nURL IP-address Archive-date Content-type Archive-length\n"
    head = b"filedesc://made.arc 0.0.0.0 20050101000000 text/plain %d\n" % len(version)
    path = tmp_path / "made.warc"
    path.write_bytes(head + version + b"\n")
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: an ARC file"):
        next(page_sources.read_rows(path))


def test_warc_records_are_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    html = ("Content-Type: text/html",)
    records = [
        warc_record("warcinfo", b"software: test", Content_Type="application/warc-fields"),
        warc_record("request", b"GET / HTTP/1.1\r\n\r\n", Content_Type="application/http; msgtype=request"),
        response(html_page("one "), *html),
        response(html_page("two "), *html, status="203 Non-Authoritative Information"),
        response(html_page("not found "), *html, status="404 Not Found"),
        response(html_page("moved "), *html, status="301 Moved Permanently"),
        response(b"not a page", "Content-Type: image/png"),
        response(b"\x8b\x02\x80packed", *html, "Content-Encoding: unknown"),
        response(b"5\r\n\x1f\x8b\x08ab\r\n0\r\n\r\n", *html, "Transfer-Encoding: gzip, chunked"),
        response(gzip.compress(html_page("crc "))[:-8] + b"12345678", *html, "Content-Encoding: gzip"),
        warc_record("response", html_page("no HTTP "), Content_Type="application/http; msgtype=response"),
        warc_record("", html_page("no type ")),
        warc_record("revisit", b"HTTP/1.1 200 OK\r\n\r\n", Content_Type="application/http; msgtype=response"),
        warc_record("resource", html_page("resource "), Content_Type="TEXT/HTML"),
        warc_record("metadata", b"fetchTimeMs: 3", Content_Type="application/warc-fields"),
    ]
    assert prepare_warc(tmp_path, records) == 0
    assert [row["text"].split()[0] for row in rows(tmp_path, "train")] == ["one", "two"]
    skipped = {
        "warcinfo": 1,
        "request": 1,
        "response 404": 1,
        "response 301": 1,
        "response 200 that is not HTML": 1,
        "response with transfer encoding gzip, chunked": 1,
        "response with content encoding unknown": 1,
        "response with a damaged compressed body": 1,
        "response without status": 1,
        "record without WARC-Type": 1,
        "revisit": 1,
        "resource": 1,
        "metadata": 1,
    }
    assert manifest(tmp_path)["skipped"] == skipped
    output = capsys.readouterr().out
    assert all(f"{count} {name}" in output for name, count in skipped.items())
    assert prepare_warc(tmp_path, records, "--records", "2xx", "4xx", "resource") == 0
    assert [row["text"].split()[0] for row in rows(tmp_path, "train")] == ["one", "two", "not", "resource"]


def test_a_file_that_ends_within_the_headers_of_a_record_is_refused(tmp_path: Path):
    records = [response(html_page(name), "Content-Type: text/html") for name in ("a ", "b ")]
    path, whole = tmp_path / "cut.warc", b"".join(records)
    for end in range(1, len(whole) + 1):
        path.write_bytes(whole[:end])
        if whole[:end].rstrip() in (records[0].rstrip(), whole.rstrip()):
            assert len(list(page_sources.read_rows(path))) == 1 + (end > len(records[0]))
        else:
            with pytest.raises(DataError, match=r"cut\.warc: record \d"):
                list(page_sources.read_rows(path))


def test_truncated_pages_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By the crawler, within a gzip stream, within a chunk and between two chunks; the others are complete."""
    html, chunked = "Content-Type: text/html", "Transfer-Encoding: chunked"
    body = html_page("".join(f"{i * 7919 % 1009} " for i in range(900)))
    packed, chunk = gzip.compress(body), b"%x\r\n%s\r\n" % (len(body), body)
    cut = response(html_page("cut "), html).replace(b"WARC-Type", b"WARC-Truncated: length\r\nWARC-Type")
    truncated = [
        cut,
        response(packed[: len(packed) // 2], html, "Content-Encoding: gzip"),
        response(chunk[:-900], html, chunked),
        response(chunk, html, chunked),
        response(chunk + b"8", html, chunked),
    ]
    complete = [
        response(packed, html, "Content-Encoding: gzip"),
        response(chunk + b"0\r\n\r\n", html, chunked),
        response(chunk + b"0\r\n", html, chunked),
        response(body, html, chunked),
        response(body, html, "Content-Encoding: gzip"),
    ]
    assert prepare_warc(tmp_path, complete) == 0
    assert manifest(tmp_path)["pages"]["truncated"] == 0
    assert prepare_warc(tmp_path, [*truncated, *complete]) == 0
    assert manifest(tmp_path)["pages"]["truncated"] == len(truncated)
    assert "5 truncated" in capsys.readouterr().out


@pytest.mark.parametrize("header", [rb"WARC-Target-URI: \S+\r\n", rb"Content-Length: \d+\r\n"])
def test_warc_records_without_a_required_header_are_errors(header: bytes, tmp_path: Path):
    record = re.sub(header, b"", response(html_page("one "), "Content-Type: text/html"))
    (tmp_path / "a.warc").write_bytes(record + record)
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'a.warc'}: record 1")):
        list(page_sources.read_rows(tmp_path / "a.warc"))


def test_slow_pages_are_counted_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The large page has a million elements: many times the limit."""
    slow = {"url": "https://a.org", "doc_html": f"<body>{'<p>x</p>' * 1_000_000}</body>"}
    write_json(tmp_path / "train.jsonl", [page("one"), slow, page("two")])
    write_json(tmp_path / "val.jsonl", [page("val")])
    words = [
        "--train",
        str(tmp_path / "train.jsonl"),
        "--val",
        str(tmp_path / "val.jsonl"),
        *EXTRACT,
        "--page_seconds",
        "0.5",
    ]
    assert run(tmp_path, *words) == 0
    assert len(rows(tmp_path, "train")) == 2
    assert manifest(tmp_path)["skipped"] == {"pages over --page_seconds": 1}
    assert "skipped: 1 pages over --page_seconds" in capsys.readouterr().out


def test_removal_rules_of_a_file(tmp_path: Path):
    write_json(tmp_path / "train.jsonl", [page("one")])
    write_json(tmp_path / "val.jsonl", [page("val")])
    (tmp_path / "rules.yaml").write_text("rules: [{tag: h1}]")
    words = ["--train", str(tmp_path / "train.jsonl"), "--val", str(tmp_path / "val.jsonl"), *EXTRACT]
    assert run(tmp_path, *words) == 0
    assert rows(tmp_path, "train")[0]["text"].startswith("The page one")
    assert run(tmp_path, *words, "--removal_rules", str(tmp_path / "rules.yaml")) == 0
    assert rows(tmp_path, "train")[0]["text"].startswith("one says 0")
    assert manifest(tmp_path)["made_from"]["removal"] == [
        {"tag": "h1", "min_chars": 0, "max_chars": None, "direction": "top-down"}
    ]


def test_rows_do_not_repeat_the_text(tmp_path: Path):
    write_json(tmp_path / "train.jsonl", [page("one", 200)])
    write_json(tmp_path / "val.jsonl", [page("val")])
    words = ["--train", str(tmp_path / "train.jsonl"), "--val", str(tmp_path / "val.jsonl"), *EXTRACT]
    assert run(tmp_path, *words, "--compatible") == 0
    (full,) = rows(tmp_path, "train")
    assert run(tmp_path, *words) == 0
    (compact,) = rows(tmp_path, "train")
    assert full["metadata_paragraph"][0]["value"] in full["text"]
    assert "value" not in compact["metadata_paragraph"][0]
    columns = ["metadata_html", "metadata_paragraph", "metadata_generation_length_text"]
    both = [read_row({"text": row["text"], **{name: row[name] for name in columns}}, "row") for row in (full, compact)]
    assert both[0] == both[1]
    assert len(json.dumps(compact)) < 1.3 * len(compact["text"]) < len(json.dumps(full))


@pytest.mark.slow
def test_killed_worker_does_not_stop_other_sources(tmp_path: Path):
    """As the kernel kills one where memory ends: its source is named, and the next call makes it."""
    (tmp_path / "pages").mkdir()
    for number in range(8):
        write_json(tmp_path / "pages" / f"{number}.jsonl.gz", [page(f"p{number}x{i}", 60) for i in range(100)])
    write_json(tmp_path / "val.jsonl", [page("val")])
    words = [sys.executable, "-m", "data_prep.metadata.prepare", "--name", "made", "--workers", "2", *EXTRACT]
    words += [
        "--train",
        str(tmp_path / "pages"),
        "--val",
        str(tmp_path / "val.jsonl"),
        "--data_path",
        str(tmp_path / "data"),
    ]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    was_killed = False
    while process.poll() is None and not was_killed:
        for path in (tmp_path / "data" / "made.parts").glob(".3-*.jsonl.*"):
            os.kill(int(path.suffix[1:]), signal.SIGKILL)
            was_killed = True
        time.sleep(0.0002)
    _, errors = process.communicate(timeout=300)
    assert was_killed
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith(f"error: {tmp_path / 'pages' / '3.jsonl.gz'}: its process was killed")
    assert len(list((tmp_path / "data" / "made.parts").glob("*.json"))) == 8, "all others are made"
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    assert len(rows(tmp_path, "train")) == 800


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_without_a_traceback(tmp_path: Path):
    (tmp_path / "pages").mkdir()
    for number in range(2):
        write_json(tmp_path / "pages" / f"{number}.jsonl.gz", [page(f"p{number}x{i}", 60) for i in range(500)])
    write_json(tmp_path / "val.jsonl", [page("val")])
    words = [sys.executable, "-m", "data_prep.metadata.prepare", "--name", "made", "--workers", "2", *EXTRACT]
    words += ["--train", str(tmp_path / "pages"), "--val", str(tmp_path / "val.jsonl"), "--data_path"]
    words.append(str(tmp_path / "data"))
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    parts = tmp_path / "data" / "made.parts"
    while process.poll() is None and not all(list(parts.glob(f".{number}-*.jsonl.*")) for number in range(2)):
        time.sleep(0.0002)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in output
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    assert len(rows(tmp_path, "train")) == 1000


@pytest.mark.slow
def test_twenty_kills_do_not_change_the_result(tmp_path: Path):
    draws = random.Random(0)
    (tmp_path / "pages").mkdir()
    for number in range(24):
        rows = [page(f"p{number}x{i}", draws.randint(5, 60)) for i in range(draws.randint(20, 120))]
        write_json(tmp_path / "pages" / f"{number:02}.jsonl.gz", rows)
    words = [sys.executable, "-m", "data_prep.metadata.prepare", "--name", "made", "--workers", "4", *EXTRACT]
    words += ["--train", str(tmp_path / "pages"), "--val", str(tmp_path / "pages" / "07.jsonl.gz"), "--data_path"]
    subprocess.run([*words, str(tmp_path / "calm")], cwd=ROOT, check=True, capture_output=True)
    parts = tmp_path / "disturbed" / "made.parts"
    kills = 0
    while kills < 20:
        process = subprocess.Popen(
            [*words, str(tmp_path / "disturbed")],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        before, further = len(list(parts.glob("*.jsonl"))), draws.choice([0, 0, 1])
        while process.poll() is None and not is_at(parts, before + further, bool(draws.random() < 0.5)):
            time.sleep(0.0002)
        assert process.poll() is None, f"it ended after {kills} kills"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert not (tmp_path / "disturbed" / "made").exists()
    subprocess.run([*words, str(tmp_path / "disturbed")], cwd=ROOT, check=True, capture_output=True)
    for name in ("train.jsonl", "val.jsonl", "manifest.json"):
        assert (tmp_path / "disturbed" / "made" / name).read_bytes() == (tmp_path / "calm" / "made" / name).read_bytes()
    assert not parts.exists()


def is_at(parts: Path, finished: int, writing: bool) -> bool:
    """Whether so many parts are finished, and, if asked for, another is being written."""
    return len(list(parts.glob("*.jsonl"))) >= finished and (not writing or any(parts.glob(".*.jsonl.*")))
