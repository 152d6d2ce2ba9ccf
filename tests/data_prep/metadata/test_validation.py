"""Validation sets of each type, and weights of types."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.metadata import validation, weights
from src.data.text import tokenizers
from src.errors import DataError
from src.experiments.config import Places
from src.files import new_directory
from src.systems.metadata.data.dataset import Config
from tests import toy


def item(key: str) -> dict[str, Any]:
    return {"key": key, "type": "global", "value": "x"}


ROWS = [
    {"text": "the cat", "metadata_title": [item("title")], "metadata_url": [item("url")]},
    {"text": "the dog", "metadata_title": [], "metadata_url": [item("url")]},
    {"text": "of version 1", "metadata": [item("title"), item("url")]},
    {"text": "the thing", "metadata_title": [item("title")], "metadata_url": None},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    toy.write_data(tmp_path / "data")
    with new_directory(tmp_path / "data" / "pages") as folder:
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *ROWS, ROWS[0]]))
        (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "data"


def read(data: Path, column: str) -> list[dict[str, Any]]:
    path = data / f"pages-validation_metadata_{column}" / "val.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_set_has_the_rows_with_its_type_and_nothing_else_of_them(data: Path):
    assert validation.main(["pages", "--data_path", str(data), "--columns", "title", "url"]) == 0
    assert read(data, "title") == [
        {"text": "the cat", "metadata_title": [item("title")], "metadata_url": []},
        {"text": "of version 1", "metadata": [item("title")]},
        {"text": "the thing", "metadata_title": [item("title")], "metadata_url": []},
    ]
    assert [row["text"] for row in read(data, "url")] == ["the cat", "the dog", "of version 1"]
    places = Places(data, data)
    config = Config(corpus="pages-validation_metadata_title", sequence_tokens=32)
    val_data = config.build(places, tokenizers.load(data / "toy_tokenizer"), "val", 0)
    assert len(val_data) == 3
    before = (data / "pages-validation_metadata_title" / "val.jsonl").stat().st_mtime_ns
    assert validation.main(["pages", "--data_path", str(data), "--columns", "title"]) == 0
    assert (data / "pages-validation_metadata_title" / "val.jsonl").stat().st_mtime_ns == before
    assert validation.main(["pages", "--data_path", str(data), "--columns", "title", "--most", "2"]) == 0
    assert len(read(data, "title")) == 2


def test_weights_are_inverse_frequencies(data: Path, capsys: pytest.CaptureFixture[str]):
    """3.8 of the specification: the published style, in which the most frequent type has 1."""
    counts = weights.count_columns(data, "pages")
    assert counts == {"title": 7, "url": 7}
    assert weights.inverse_frequencies(weights.Counter({"html": 100, "timestamp": 8})) == {
        "html": 1.0,
        "timestamp": 12.5,
    }
    assert weights.main(["pages", "--data_path", str(data)]) == 0
    printed_weights = ast.literal_eval(f"{{{capsys.readouterr().out}}}")
    config = Config(corpus="pages", sequence_tokens=32, sampling="weighted", weights=printed_weights["weights"])
    assert config.weights == {"title": 1.0, "url": 1.0}
    few = weights.count_columns(data, "pages", documents=3)
    assert few == weights.count_columns(data, "pages", documents=3)
    assert sum(few.values()) < sum(counts.values())


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (validation.main, ["pages", "--columns", "titel"], "--columns: unknown column 'titel'. Did you mean 'title'?"),
        (validation.main, ["pages", "--columns", "html"], "has 'html'."),
        (validation.main, ["pages", "--columns", "title", "--most", "0"], "--most: expected at least 1, got 0."),
        (weights.main, ["pages", "--documents", "0"], "--documents: expected at least 1, got 0."),
    ],
)
def test_errors_name_the_mistake(
    main: Any, words: list[str], message: str, data: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*words, "--data_path", str(data)]) == 1
    assert message in capsys.readouterr().err
    assert not list(data.glob("pages-*"))


@pytest.mark.parametrize("value", ["x", [5], 5])
def test_malformed_metadata_are_refused_with_their_row(data: Path, value: Any):
    path = data / "pages" / "val.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"text": "b", "metadata": value}) + "\n")
    with pytest.raises(DataError, match=rf"val\.jsonl:2: field 'metadata'.*{value if value == 5 else ''}"):
        list(validation.rows_with(path, "title"))
