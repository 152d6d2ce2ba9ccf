"""Whole rows through the data set: those of the seed's own settings are the worked examples, and real rows lose nothing of their text."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.metadata import url
from src.config import Places
from src.data.metadata.annotations import Annotated, read_row
from src.data.metadata.dataset import Config
from src.data.metadata.examples import ExampleMaker, Writing
from src.data.metadata.linearise import insert, markers
from src.data.metadata.processors import HtmlFilter, local_markers
from src.data.text.tokenizers import SafeTokenizer
from src.files import new_directory
from src.registry import DATASETS, bind
from tests.data.metadata.test_examples import BOLD, URL, byte_tokenizer, known
from tests.data.metadata.test_linearise import item

SEED = {"name": "metadata", "corpus": "rows", "end_token": False, "writing": {"linearisation": "compatible"}}


def rows_of(tmp_path: Path, text: str, items: list[dict[str, Any]], tokens: int, **changes: Any) -> list[tuple[str, str, str, str]]:
    """Of each row of a document its text with "#" for padding, and masks of attention, of metadata and of what is learned."""
    with new_directory(tmp_path / "rows") as made:
        for split in ("train", "val"):
            (made / f"{split}.jsonl").write_text(json.dumps({"text": text, "metadata": items}) + "\n")
    writing = {**SEED["writing"], **changes.pop("writing", {})}  # type: ignore[dict-item]
    config: Any = bind(DATASETS, {**SEED, "sequence_tokens": tokens, **changes, "writing": writing})
    tokenizer = byte_tokenizer(*config.writing.new_tokens())
    data = config.build(Places(tmp_path, tmp_path), tokenizer, "train", 0)
    pieces = data.documents.maker.pieces(data.documents[0], config.written)
    found = []
    for number, (size,) in enumerate(data.sizes(0, 0)):
        sample = data.sample(0, 0, number)
        batch = data.collate([sample])
        assert batch["input_ids"][0, :size].tolist() == sample["input_ids"]
        pad = tokens - size
        learned = "".join(str(int(bit)) for bit in batch["loss_mask"][0].tolist()).ljust(tokens, "0")
        metadata = "".join(str(int(not of_text)) for of_text in pieces[number].of_text) + "0" * pad
        found.append((tokenizer.decode(sample["input_ids"]) + "#" * pad, "1" * size + "0" * pad, metadata, learned))
    return found


def learned(attention: str, metadata: str) -> str:
    """The specification's rule: attended and not metadata; the first token of a row has nothing before it."""
    return "0" + "".join(str(int(a == "1" and m == "0")) for a, m in zip(attention[1:], metadata[1:], strict=True))


@pytest.mark.parametrize(
    ("document", "tokens", "changes", "row", "metadata"),
    [
        (("Wubba Lubba Dub Dub!", [URL]), 40, {}, "url: a.b/x y z ||| Wubba Lubba Dub Dub!#", "1" * 18 + "0" * 22),
        (("hello", []), 8, {"writing": {"separators": {"prefix_end": "|"}}}, "hello###", "0" * 8),
        (("ab", [BOLD]), 16, {}, "<b>a</b>b#######", "1110111100000000"),
        (("ab", [BOLD]), 24, {"writing": {"announce": True}}, "html ||| <b>a</b>b######", "111111110111011110000000"),
        (
            ("x", [known("timestamp", "2018-12-10T13:45:00.000Z"), known("title", "X")]),
            128,
            {"writing": {"keys": ["timestamp", "title"]}},
            "Year: 2018 | Month: December | Title: X ||| x" + "#" * 83,
            "1" * 43 + "0" * 85,
        ),
    ],
)
def test_the_rows_of_the_seed(document: Any, tokens: int, changes: Any, row: str, metadata: str, tmp_path: Path):
    """M17, M20, M21 (with what is announced) and M2: tokens, attention and metadata mask of the specification, byte for byte."""
    attention = "1" * len(row.rstrip("#")) + "0" * row.count("#")
    assert rows_of(tmp_path, *document, tokens, **changes) == [(row, attention, metadata, learned(attention, metadata))]


def test_markers_as_regular_text_are_learned(tmp_path: Path):
    """M21, `treat_local_metadata_as_regular_text`: here `metadata_loss`."""
    ((row, attention, _, learned_),) = rows_of(tmp_path, "ab", [BOLD], 16, metadata_loss=True)
    assert row == "<b>a</b>b#######"
    assert learned_ == "0" + attention[1:]


def test_continued_rows_keep_the_space_b11(tmp_path: Path):
    """B11: the reference glued the text of all rows but the first to the separator."""
    rows = rows_of(tmp_path, "0123456789abcdef", [known("url", "u")], 20)
    assert [row.rstrip("#") for row, *_ in rows] == ["url: u ||| 012345678", "url: u ||| 9abcdef"]


def test_rows_without_text_are_left_out_b3(tmp_path: Path):
    """B3: a row of markers alone gave a loss of 0/0."""
    rows = rows_of(tmp_path, "a", [item("html", "b" * 40, 0, 1, (0, 0))], 16)
    assert len(rows) == 1, "of six blocks the one with the text"
    assert all("1" in found for *_, found in rows)


def test_the_baseline_has_the_same_text_and_no_markup_b2(tmp_path: Path):
    """B2: `without_metadata_same_context` kept markup and the space, and its mask was too short."""
    items = [URL, item("html", "b", 2, 9, (0, 0))]
    told = rows_of(tmp_path, "0123456789abcdefghij", items, 40)
    plain = rows_of(tmp_path, "0123456789abcdefghij", items, 40, written=False)
    assert len(told) == len(plain) == 2
    for (row, *_), (other, attention, metadata, _) in zip(told, plain, strict=True):
        assert row.rstrip("#").partition("||| ")[2].replace("<b>", "").replace("</b>", "") == other.rstrip("#")
        assert len(attention) == len(metadata) == 40
        assert "1" not in metadata


def test_html_is_kept_at_its_rate_b1(tmp_path: Path):
    """B1: the reference's `html_overall_sample_rate` kept HTML in all documents at 0, and in half of them at 1."""
    from random import Random

    from src.data.metadata.dataset import draw

    document = read_row({"text": "ab", "metadata": [BOLD, URL]}, "row")
    for rate in (0.0, 0.25, 1.0):
        config = Config(corpus="rows", sequence_tokens=16, html_rate=rate)
        kept = sum("html" in draw(document, config, Random(f"{number}")).columns for number in range(2000)) / 2000
        assert kept == pytest.approx(rate, abs=0.03)


def real_documents(folder: Path) -> Iterator[Annotated]:
    """C4's rows with addresses and dates, mmc4's, and BigScience's toy file for training; in the other a span is not in the text."""
    for path in sorted((folder / "lm" / "c4_url_date").glob("*.gz")):
        for row in map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines()):
            found = url.extract(row)
            date = {"key": "timestamp", "type": "global", "value": row["date"]}
            yield read_row({"text": row["text"], **found, "metadata_timestamp": [date]}, str(path))
    for path in sorted((folder / "image" / "mmc4_docs_no_pixels").glob("*.jsonl")):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            yield read_row({"text": " ".join(row["text_list"]), **url.extract(row)}, str(path))
    path = folder / "lm" / "metadata_toy_format" / "train_toy_wikitext_with_metadata.jsonl"
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        yield read_row(row, str(path))


def test_real_rows_keep_their_text(shared_data: Path):
    encoder = SafeTokenizer(byte_tokenizer())
    makers = [ExampleMaker(Writing(linearisation=how), encoder, 1 << 16) for how in ("nested", "compatible")]

    def process(found: Any) -> Any:
        return local_markers(found, HtmlFilter(), "beginning")

    counted = 0
    for document in real_documents(shared_data):
        for how, make in zip(("nested", "compatible"), makers, strict=True):
            marked, mask = insert(document.text, markers(document, ["entity", "html"], process, {}, how))  # type: ignore[arg-type]
            assert len(mask) == len(marked)
            assert "".join(character for character, mark in zip(marked, mask, strict=True) if not mark) == document.text
            (piece,) = make.pieces(document)
            text = [token for token, of_text in zip(piece.ids, piece.of_text, strict=True) if of_text]
            space = encoder.encode(" ") if how == "compatible" and make.prefix(document) else []
            assert text == [*space, *encoder.encode(document.text), encoder.eos_id]
            assert make.prefix(document).startswith(("url: ", "Year: ")) or not document.items
        counted += 1
    assert counted > 90
