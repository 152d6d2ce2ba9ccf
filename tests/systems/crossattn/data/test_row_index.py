"""Files that list rows by number."""

from pathlib import Path

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.files import new_directory
from src.systems.crossattn.data import cross_attention, row_index

DATA = cross_attention.Config(corpus="corpus", context_tokens=8, sequence_tokens=8, loss_on="answer")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    with new_directory(tmp_path / "corpus") as folder:
        for split in ("train", "val", "test"):
            (folder / f"{split}.jsonl").write_text("{}\n")
        (folder / "hard.txt").write_text("7\n\n 0 \n12")
        (folder / "bad.txt").write_text("7\nseven\n")
        (folder / "script.txt").write_text("٣\n")
    (tmp_path / "corpus" / "unlisted.txt").write_text("1\n")
    return Places(tmp_path, tmp_path)


def test_numbers(places: Places):
    assert row_index.read(places, DATA, "hard.txt") == [7, 0, 12]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad.txt", r"bad\.txt:2: expected a row number, counted from 0, got 'seven'\.$"),
        ("script.txt", r"script\.txt:1: expected a row number"),
        (
            "none.txt",
            (
                r"corpus: has no none\.txt\. Files: bad\.txt, hard\.txt, script\.txt, test\.jsonl, train\.jsonl, "
                r"val\.jsonl\."
            ),
        ),
        ("unlisted.txt", r"corpus: has no unlisted\.txt"),
    ],
)
def test_malformed_files_are_refused(places: Places, name: str, message: str):
    with pytest.raises(DataError, match=message):
        row_index.read(places, DATA, name)


def test_checks_before_the_start(places: Places):
    row_index.check(places, DATA, "test", "hard.txt")
    some = DATA.model_copy(update={"val_samples": 1})
    row_index.check(places, some, "test", "hard.txt")
    row_index.check(places, some, "val", None)
    with pytest.raises(
        ConfigError,
        match=r"^inference\.index_file: refers to all rows of val\.jsonl, but data\.val_samples selects some",
    ):
        row_index.check(places, some, "val", "hard.txt")
    with pytest.raises(DataError, match=r"corpus: has no tst\.jsonl"):
        row_index.check(places, DATA, "tst", None)
    with pytest.raises(DataError, match=r"corpus: has no none\.txt"):
        row_index.check(places, DATA, "val", "none.txt")
