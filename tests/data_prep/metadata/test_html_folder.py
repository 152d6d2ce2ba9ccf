"""A folder of HTML pages as rows: each page once, with its address."""

import json
import os
from pathlib import Path

import pytest

from data_prep.metadata import html_folder


def collect(folder: Path, *, out: Path) -> tuple[int, list[dict[str, str]], list[dict[str, str]]]:
    """Run the command; returns its exit code and the rows of both files."""
    files = [out / "train.jsonl", out / "val.jsonl"]
    options = ["--url", "https://docs.example.org/", "--train", str(files[0]), "--val", str(files[1])]
    code = html_folder.main([str(folder), *options])
    train, val = ([json.loads(line) for line in file.read_text().splitlines()] if code == 0 else [] for file in files)
    return code, train, val


def write(folder: Path, pages: int) -> dict[str, str]:
    """Pages in two folders; returns their texts by address."""
    suffixes = "html", "htm", "HTML", "xhtml"
    texts = {f"part{i % 2}/page{i}.{suffixes[i % 4]}": f"<title>p\u00e4ge {i}</title>" for i in range(pages)}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return {f"https://docs.example.org/{name}": text for name, text in texts.items()}


def test_each_page_is_in_one_split_with_its_address(tmp_path: Path):
    pages = write(tmp_path / "html", 60)
    (tmp_path / "html" / "style.css").write_text("a {}")
    (tmp_path / "html" / "changes.html.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "html" / "again.html").symlink_to(tmp_path / "html" / "part0" / "page0.html")
    code, train, val = collect(tmp_path / "html", out=tmp_path)
    assert code == 0
    assert {row["url"]: row["doc_html"] for row in [*train, *val]} == pages
    assert len(train) + len(val) == 60
    assert 5 <= len(val) <= 20


def test_new_pages_move_no_page_to_another_split(tmp_path: Path):
    write(tmp_path / "html", 40)
    _, _, before = collect(tmp_path / "html", out=tmp_path)
    write(tmp_path / "html", 60)
    _, _, after = collect(tmp_path / "html", out=tmp_path)
    assert {row["url"] for row in before} <= {row["url"] for row in after}


@pytest.mark.parametrize("content", [None, b"<p>caf\xe9</p>"])
def test_bad_folders_are_named(tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "html"
    path.mkdir()
    if content is not None:
        path /= "latin.html"
        path.write_bytes(content)
    assert collect(tmp_path / "html", out=tmp_path)[0] == 1
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "train.jsonl").exists()


def test_names_are_percent_encoded(tmp_path: Path):
    (tmp_path / "html").mkdir()
    for name in (b"a b?#%.html", "\u00fc.html".encode(), b"\xff.html"):
        Path(os.fsdecode(os.fsencode(tmp_path / "html") + b"/" + name)).write_text("<p>a</p>")
    code, train, val = collect(tmp_path / "html", out=tmp_path)
    assert code == 0
    names = {row["url"].removeprefix("https://docs.example.org/") for row in [*train, *val]}
    assert names == {"a%20b%3F%23%25.html", "%C3%BC.html", "%FF.html"}


def test_both_splits_in_one_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "html", 10)
    path, same = tmp_path / "a.jsonl", tmp_path / "html" / ".." / "a.jsonl"
    code = html_folder.main(
        [str(tmp_path / "html"), "--url", "https://a.org/", "--train", str(path), "--val", str(same)]
    )
    assert code == 1
    assert f"--val {same}" in capsys.readouterr().err
    assert not path.exists()
