"""The batch of a step that went wrong is written down whole: which documents, and their text, and never too much of
it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from src.data.collate import pad_chunks, pad_tokens
from src.data.text import tokenizers
from src.errors import RunError
from src.training.divergence import batch_dump
from tests import toy


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizers.load(toy.write_data(tmp_path_factory.mktemp("data")) / "toy_tokenizer")


class Documents:
    """Document i says "the thing<i> is red .", and is one token longer in odd epochs."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return 16

    def sample(self, epoch: int, index: int) -> list[int]:
        return self.tokenizer(f"the thing{index} is red" + " ." * (1 + epoch % 2))["input_ids"]

    def collate(self, samples: list[list[int]]) -> Any:
        return pad_tokens(samples, [[False] + [True] * (len(ids) - 1) for ids in samples], pad_id=0)


def read(path: Path | None) -> dict[str, Any]:
    assert path is not None
    return json.loads(path.read_text(encoding="utf-8"))


def test_documents_and_their_text(tmp_path: Path, tokenizer: Any):
    documents = Documents(tokenizer)
    keys = [[(0, 3), (1, 5)], [(1, 0)]]
    batches = [documents.collate([documents.sample(*key) for key in rows]) for rows in keys]
    path = batch_dump.save(tmp_path, 12, 1, batches, tokenizer, keys)
    assert path == tmp_path / "offending" / "step-00000012-rank-1.json"
    assert read(path) == {
        "step": 12,
        "rank": 1,
        "documents": [
            {
                "micro_batch": 0,
                "epoch": 0,
                "index": 3,
                "tokens": 5,
                "loss_tokens": 4,
                "text": "the thing3 is red .",
                "cut": False,
            },
            {
                "micro_batch": 0,
                "epoch": 1,
                "index": 5,
                "tokens": 6,
                "loss_tokens": 5,
                "text": "the thing5 is red . .",
                "cut": False,
            },
            {
                "micro_batch": 1,
                "epoch": 1,
                "index": 0,
                "tokens": 6,
                "loss_tokens": 5,
                "text": "the thing0 is red . .",
                "cut": False,
            },
        ],
    }
    assert os.listdir(path.parent) == [path.name], "nothing is left beside it"


def test_rows_of_one_sample_are_saved_with_its_key(tmp_path: Path, tokenizer: Any):
    """Two replies to the first question, one to the second; keys need not be (epoch, index)."""
    ids = tokenizer(["red", "blue .", "green"])["input_ids"]
    batch: Any = pad_tokens(ids, [[False] * len(row) for row in ids], pad_id=0) | {
        "sample_of_row": torch.tensor([0, 0, 1])
    }
    documents = read(batch_dump.save(tmp_path, 1, 0, [batch], tokenizer, [[("tree", 7, 1), (2, 5)]]))["documents"]
    assert [document.get("key", (document.get("epoch"), document.get("index"))) for document in documents] == [
        ["tree", 7, 1]
    ] * 2 + [(2, 5)]


def test_contexts_are_saved_and_missing_chunks_omitted(tmp_path: Path, tokenizer: Any):
    ids = tokenizer(["red", "blue .", "green"])["input_ids"]
    batch: Any = pad_tokens([ids[0], ids[1]], [[False], [False, True]], pad_id=0)
    batch["context_ids"], batch["context_mask"] = pad_chunks([[ids[1], ids[2]], [ids[2]]], pad_id=0)
    first, second = read(batch_dump.save(tmp_path, 1, 0, [batch], tokenizer, [[(0, 0), (0, 1)]]))["documents"]
    assert (first["text"], first["contexts"]) == ("red", ["blue .", "green"])
    assert (second["text"], second["contexts"]) == ("blue .", ["green"])


def test_a_file_is_bounded_and_marks_truncated_documents(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    long = tokenizer("red " * 5000)["input_ids"]
    batch = pad_tokens([long] * 3, [[False] * 5000] * 3, pad_id=0)
    monkeypatch.setattr(batch_dump, "MAX_CHARACTERS", 10_000)
    path = batch_dump.save(tmp_path, 1, 0, [batch], tokenizer, [[(0, 0), (0, 1), (0, 2)]])
    first, second, third = read(path)["documents"]
    assert first["text"] == " ".join(["red"] * 2000), "so many tokens"
    assert (len(second["text"]), second["cut"], first["cut"]) == (10_000 - len(first["text"]), True, True)
    assert third == {"micro_batch": 0, "epoch": 0, "index": 2, "tokens": 5000, "loss_tokens": 0}


def test_files_are_bounded_per_rank_and_a_step_can_be_rewritten(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(batch_dump, "MAX_FILES", 2)
    documents = Documents(tokenizer)

    def save(step: int, rank: int, index: int = 0) -> Path | None:
        return batch_dump.save(
            tmp_path, step, rank, [documents.collate([documents.sample(0, index)])], tokenizer, [[(0, index)]]
        )

    assert save(1, 0)
    assert save(2, 0)
    assert save(1, 1), "another rank has a share of its own"
    assert save(3, 0) is None
    assert "the batch of step 3 is not saved" in caplog.text
    assert read(save(2, 0, index=7))["documents"][0]["index"] == 7
    assert len(list((tmp_path / "offending").iterdir())) == 3


def test_text_of_any_script_and_what_looks_like_control_tokens_come_back(tmp_path: Path, tokenizer: Any):
    ids = [tokenizer.eos_token_id, tokenizer.unk_token_id]
    path = batch_dump.save(tmp_path, 1, 0, [pad_tokens([ids], [[False, True]], pad_id=0)], tokenizer, [[(0, 0)]])
    assert read(path)["documents"][0]["text"] == "<|endoftext|> <unk>"


def test_a_disk_that_refuses_is_named(tmp_path: Path, tokenizer: Any):
    (tmp_path / "offending").write_text("in the way")
    documents = Documents(tokenizer)
    with pytest.raises(RunError, match=r"offending.*cannot write"):
        batch_dump.save(tmp_path, 1, 0, [documents.collate([documents.sample(0, 0)])], tokenizer, [[(0, 0)]])
