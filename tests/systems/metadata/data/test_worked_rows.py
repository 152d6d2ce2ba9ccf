"""Rows of the data set: the worked examples of the specification, and real documents."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.metadata import url
from src.data.text.tokenizers import SafeTokenizer
from src.experiments.config import Places
from src.experiments.registry import DATASETS, bind
from src.files import new_directory
from src.systems.metadata.data.annotations import Document, read_row
from src.systems.metadata.data.dataset import Config
from src.systems.metadata.data.examples import ExampleMaker, Writing
from src.systems.metadata.data.linearise import insert, markers
from src.systems.metadata.data.processors import HtmlFilter, local_markers
from tests.systems.metadata.data.test_examples import BOLD, URL, byte_tokenizer, global_item
from tests.systems.metadata.data.test_linearise import item

SEED = {"name": "metadata", "corpus": "rows", "end_token": False, "writing": {"linearisation": "compatible"}}


def rows_of(
    tmp_path: Path, text: str, items: list[dict[str, Any]], tokens: int, **changes: Any
) -> list[tuple[str, str, str, str]]:
    """Return text (with "#" for padding), attention mask, metadata mask and loss mask of each row of a document."""
    with new_directory(tmp_path / "rows") as folder:
        for split in ("train", "val"):
            (folder / f"{split}.jsonl").write_text(json.dumps({"text": text, "metadata": items}) + "\n")
    writing = {**SEED["writing"], **changes.pop("writing", {})}  # type: ignore[dict-item]
    config: Any = bind(DATASETS, {**SEED, "sequence_tokens": tokens, **changes, "writing": writing})
    tokenizer = byte_tokenizer(*config.writing.new_tokens())
    data = config.build(Places(tmp_path, tmp_path), tokenizer, "train", 0)
    pieces = data.documents.maker.pieces(data.documents[0], config.with_metadata)
    rows = []
    for number, (size,) in enumerate(data.sizes(0, 0)):
        sample = data.sample(0, 0, number)
        batch = data.collate([sample])
        assert batch["input_ids"][0, :size].tolist() == sample["input_ids"]
        pad = tokens - size
        in_loss = "".join(str(int(bit)) for bit in batch["loss_mask"][0].tolist()).ljust(tokens, "0")
        metadata = "".join(str(int(not of_text)) for of_text in pieces[number].of_text) + "0" * pad
        rows.append((tokenizer.decode(sample["input_ids"]) + "#" * pad, "1" * size + "0" * pad, metadata, in_loss))
    return rows


def loss_mask(attention: str, metadata: str) -> str:
    """Compute the loss mask: attended and not metadata; never the first token of a row."""
    return "0" + "".join(str(int(a == "1" and m == "0")) for a, m in zip(attention[1:], metadata[1:], strict=True))


@pytest.mark.parametrize(
    ("document", "tokens", "changes", "row", "metadata"),
    [
        (("Wubba Lubba Dub Dub!", [URL]), 40, {}, "url: a.b/x y z ||| Wubba Lubba Dub Dub!#", "1" * 18 + "0" * 22),
        (("hello", []), 8, {"writing": {"separators": {"prefix_end": "|"}}}, "hello###", "0" * 8),
        (("ab", [BOLD]), 16, {}, "<b>a</b>b#######", "1110111100000000"),
        (
            ("ab", [BOLD]),
            24,
            {"writing": {"list_local_keys": True}},
            "html ||| <b>a</b>b######",
            "111111110111011110000000",
        ),
        (
            ("x", [global_item("timestamp", "2018-12-10T13:45:00.000Z"), global_item("title", "X")]),
            128,
            {"writing": {"keys": ["timestamp", "title"]}},
            "Year: 2018 | Month: December | Title: X ||| x" + "#" * 83,
            "1" * 43 + "0" * 85,
        ),
    ],
)
def test_rows_of_the_specification(document: Any, tokens: int, changes: Any, row: str, metadata: str, tmp_path: Path):
    """M17, M20, M21 (with announced keys) and M2: tokens, attention and metadata mask, byte for byte."""
    attention = "1" * len(row.rstrip("#")) + "0" * row.count("#")
    assert rows_of(tmp_path, *document, tokens, **changes) == [
        (row, attention, metadata, loss_mask(attention, metadata))
    ]


def test_markers_as_regular_text_are_in_the_loss(tmp_path: Path):
    """M21: `treat_local_metadata_as_regular_text` of the reference is `metadata_loss`."""
    ((row, attention, _, in_loss),) = rows_of(tmp_path, "ab", [BOLD], 16, metadata_loss=True)
    assert row == "<b>a</b>b#######"
    assert in_loss == "0" + attention[1:]


def test_space_after_each_prefix_b11(tmp_path: Path):
    """B11: the reference has no space between separator and text, except in the first row."""
    rows = rows_of(tmp_path, "0123456789abcdef", [global_item("url", "u")], 20)
    assert [row.rstrip("#") for row, *_ in rows] == ["url: u ||| 012345678", "url: u ||| 9abcdef"]


def test_rows_without_text_are_dropped_b3(tmp_path: Path):
    """B3: the loss of a row without text tokens is 0/0 in the reference."""
    rows = rows_of(tmp_path, "a", [item("html", "b" * 40, 0, 1, (0, 0))], 16)
    assert len(rows) == 1, "one of six blocks has text"
    assert all("1" in in_loss for *_, in_loss in rows)


def test_baseline_has_the_same_text_and_no_markup_b2(tmp_path: Path):
    """B2: the reference's `without_metadata_same_context` has markup, the space and a mask that is too short."""
    items = [URL, item("html", "b", 2, 9, (0, 0))]
    annotated_rows = rows_of(tmp_path, "0123456789abcdefghij", items, 40)
    plain = rows_of(tmp_path, "0123456789abcdefghij", items, 40, with_metadata=False)
    assert len(annotated_rows) == len(plain) == 2
    for (row, *_), (plain_row, attention, metadata, _) in zip(annotated_rows, plain, strict=True):
        assert row.rstrip("#").partition("||| ")[2].replace("<b>", "").replace("</b>", "") == plain_row.rstrip("#")
        assert len(attention) == len(metadata) == 40
        assert "1" not in metadata


def test_html_rate_is_the_share_of_documents_with_html_b1(tmp_path: Path):
    """B1: with the reference's `html_overall_sample_rate`, all documents have HTML at 0, and half of them at 1."""
    from random import Random

    from src.systems.metadata.data.dataset import draw

    document = read_row({"text": "ab", "metadata": [BOLD, URL]}, "row")
    for rate in (0.0, 0.25, 1.0):
        config = Config(corpus="rows", sequence_tokens=16, html_rate=rate)
        share = sum("html" in draw(document, config, Random(f"{number}")).columns for number in range(2000)) / 2000
        assert share == pytest.approx(rate, abs=0.03)


def real_documents(folder: Path) -> Iterator[Document]:
    """Yield documents of C4 with addresses and dates, of mmc4, and of BigScience's toy training file (its validation
    file is malformed)."""
    for path in sorted((folder / "lm" / "c4_url_date").glob("*.gz")):
        for row in map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines()):
            date = {"key": "timestamp", "type": "global", "value": row["date"]}
            yield read_row({"text": row["text"], **url.extract(row), "metadata_timestamp": [date]}, str(path))
    for path in sorted((folder / "image" / "mmc4_docs_no_pixels").glob("*.jsonl")):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            yield read_row({"text": " ".join(row["text_list"]), **url.extract(row)}, str(path))
    path = folder / "lm" / "metadata_toy_format" / "train_toy_wikitext_with_metadata.jsonl"
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        yield read_row(row, str(path))


def test_real_rows_keep_their_text(shared_data: Path):
    encoder = SafeTokenizer(byte_tokenizer())
    makers = [ExampleMaker(Writing(linearisation=how), encoder, 1 << 16) for how in ("nested", "compatible")]

    def process(entry: Any) -> Any:
        return local_markers(entry, HtmlFilter(), "beginning")

    count = 0
    for document in real_documents(shared_data):
        for how, make in zip(("nested", "compatible"), makers, strict=True):
            text_with_markers, mask = insert(document.text, markers(document, ["entity", "html"], process, {}, how))  # type: ignore[arg-type]
            assert len(mask) == len(text_with_markers)
            assert (
                "".join(character for character, mark in zip(text_with_markers, mask, strict=True) if not mark)
                == document.text
            )
            (piece,) = make.pieces(document)
            text = [token for token, of_text in zip(piece.ids, piece.of_text, strict=True) if of_text]
            space = encoder.encode(" ") if how == "compatible" and make.prefix(document) else []
            assert text == [*space, *encoder.encode(document.text), encoder.eos_id]
            assert make.prefix(document).startswith(("url: ", "Year: ")) or not document.items
        count += 1
    assert count > 90
