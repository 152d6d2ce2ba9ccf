"""A cache of contexts, filled ahead from a prepared corpus."""

import json

import pytest
import torch

from data_prep.crossattn import context_cache
from src.data.text import tokenizers
from src.files import new_directory
from src.systems.crossattn.model.encoded_context_cache import ContextCache
from tests import toy
from tests.core.models.conftest import make_base

TEXTS = ["the thing0 is red .", "the thing1 is blue .", "ünï 漢字 thing2"]


@pytest.fixture
def arguments(tmp_path):
    """A tiny base, a corpus with three distinct contexts in four rows, and the command line."""
    data = toy.write_data(tmp_path / "data")
    tokenizer = tokenizers.load(data / "toy_tokenizer")
    make_base("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    with new_directory(data / "nq") as folder:
        for split, texts in (("train", TEXTS), ("val", TEXTS[:1])):
            rows = [{"context": text, "question": "what", "answer": "red", "dataset": "d"} for text in texts]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"embedding_model": "base", "data_cache_path": "data", "cache": "cache"}
    paths = [part for name, value in given.items() for part in (f"--{name}", str(tmp_path / value))]
    return [*paths, "--maximum_input_length", "16", "--batch_size", "2", "--device", "cpu"]


def test_what_is_served_was_cached_ahead(arguments, tmp_path, capsys):
    assert context_cache.main([*arguments, "--max_bytes", "1000000"]) == 0
    assert (
        "3 distinct contexts of 4 rows, 3 encoded now, 0 before; 0 were too long (truncate)." in capsys.readouterr().out
    )
    assert context_cache.main([*arguments, "--max_bytes", "1000000"]) == 0
    assert "0 encoded now, 3 before" in capsys.readouterr().out
    tokenizer = tokenizers.load(tmp_path / "base")
    ids = tokenizer.convert_tokens_to_ids(["<|user|>", "<|C|>", "<|assistant|>", *TEXTS[2].split()])
    cache = ContextCache(tmp_path / "cache", make_base("llama", vocab_size=len(tokenizer)), 1000000)
    assert cache.contexts(torch.tensor([[ids]]), torch.ones(1, 1, len(ids), dtype=torch.bool)).mask.all()
    assert (cache.hits, cache.misses) == (1, 0)


def test_what_does_not_fit_is_told(arguments, capsys):
    assert context_cache.main([*arguments, "--max_bytes", "1100"]) == 0
    out = capsys.readouterr().out
    assert "contexts had to make room for others. Give more --max_bytes to keep all." in out
    assert context_cache.main([*arguments, "--max_bytes", "0"]) == 1
    assert "--max_bytes: expected at least 1, got 0" in capsys.readouterr().err
    assert context_cache.main([*arguments, "--max_bytes", "10", "--corpus", "toy_qa"]) == 1
    assert "max_bytes: 10 cannot hold one context of" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["foo", "cuda:93", "cpu:x", "meta"])
def test_a_device_that_is_not_there_is_named(arguments, device, capsys):
    assert context_cache.main([*arguments[:-1], device, "--max_bytes", "1000000"]) == 1
    error = capsys.readouterr().err
    assert f"error: --device: {device!r} cannot be used (" in error
    assert len(error.splitlines()) == 1
