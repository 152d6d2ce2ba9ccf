"""Documents from pydoc's pages: what is kept, and what of this machine is not."""

from pathlib import Path

import pytest

from data_prep.metadata import stdlib_pages
from data_prep.metadata.html import extract
from src.systems.metadata.data.annotations import read_row
from src.systems.metadata.data.linearise import insert, markers
from src.systems.metadata.data.processors import HtmlFilter, local_markers

NAMES = ["abc", "configparser", "no_such_module", "os", "site"]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return stdlib_pages.render(NAMES)


def test_modules_that_cannot_be_imported_are_left_out(pages: dict[str, str]):
    assert list(pages) == ["abc", "configparser", "os", "site"]


def test_nothing_of_the_user_or_the_machine_is_on_a_page(pages: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    assert "0x7f" not in "".join(pages.values())
    monkeypatch.setenv("SECRET_OF_THE_USER", "hunter2")
    page = stdlib_pages.render(["os"])["os"]
    assert "hunter2" not in page
    assert str(Path.home()) not in page or Path.home() == Path("/")
    assert page == pages["os"], "two runs give the same bytes"


@pytest.mark.slow
def test_documents_and_their_tags(pages: dict[str, str]):
    check_documents(pages, 20)


@pytest.mark.slow
def test_documents_of_all_modules():
    check_documents(stdlib_pages.render(stdlib_pages.modules()), 6000)


def check_documents(pages: dict[str, str], at_least: int):
    rows = stdlib_pages.split_rows(pages)
    both = [*rows["train"], *rows["val"]]
    assert len({row["text"] for row in both}) == len(both) > at_least
    for row in both:
        assert 200 <= len(row["text"]) <= 400
        document = read_row(row, "row")
        assert document.columns == ["html", "url", "title"] or not row["metadata_html"]

        def process(item):
            return local_markers(item, HtmlFilter(), "end")

        nested, compatible = (
            insert(document.text, markers(document, ["html"], process, {}, how)) for how in ("nested", "compatible")
        )
        assert "".join(c for c, m in zip(*nested, strict=True) if not m) == document.text
        assert nested.text.replace("\\", "") == compatible.text.replace("\\", ""), "the cut tags still nest"


def test_a_page_is_in_one_split_and_the_first_validation_documents_are_of_many_pages():
    pages = {
        f"module{page}": "<body>" + "".join(f"<p>{page} {line} {'x' * 90}</p>" for line in range(40)) + "</body>"
        for page in range(100)
    }
    rows = stdlib_pages.split_rows(pages)
    addresses = {split: [row["metadata_url"][0]["value"] for row in split_rows] for split, split_rows in rows.items()}
    val_pages = set(addresses["val"])
    assert len(val_pages) + len(set(addresses["train"])) == 100
    assert not val_pages & set(addresses["train"])
    assert 2 < len(val_pages) < 25
    assert len(set(addresses["val"][: len(val_pages)])) > len(val_pages) / 3, "not one page after the other"


def test_pieces_together_are_the_text():
    page = extract("<body>" + "".join(f"<p>line {i} {'x' * (i % 50)}</p>" for i in range(200)) + "</body>", [])
    texts = [text for text, _ in stdlib_pages.pieces(page)]
    assert page.text.startswith("".join(texts))
    assert len(page.text) - len("".join(texts)) < 200
