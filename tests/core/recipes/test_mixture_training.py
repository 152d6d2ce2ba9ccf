"""Pre-training on a mixture, through the command line: ids that were made before and text that is tokenised now give
the same losses."""

import copy
from pathlib import Path
from typing import Any

import pytest

from data_prep.t5 import t5_tokenizer
from data_prep.tokenize import Options, tokenise
from src.experiments.identity import exp_id
from tests import toy

SPANS: dict[str, Any] = {"name": "span_corruption", "corpus": "toy_ids", "input_tokens": 18}
T5: dict[str, Any] = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {
        "name": "t5",
        "random": {
            "tokenizer": "toy_t5_tokenizer",
            "hidden_size": 32,
            "feed_forward_size": 64,
            "num_layers": 1,
            "num_heads": 2,
        },
        "dropout_rate": 0.1,
    },
    "data": {
        "name": "mixture",
        "parts": {
            "short": {**SPANS, "mean_span_tokens": 1.0},
            "long": {**SPANS, "corpus": "toy_text", "noise_density": 0.4, "mean_span_tokens": 3.0},
        },
        "rates": {"short": 1.0, "long": 3.0},
    },
    "loop": {"steps": 6, "sequences_per_step": 8, "micro_batch": 8, "learning_rate": 3e-3, "eval_every": 3},
}
PLAIN = copy.deepcopy(T5)
PLAIN["data"]["parts"]["short"]["corpus"] = "toy_text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With data, and the run of six steps."""
    folder = tmp_path_factory.mktemp("mixture")
    toy.write_data(folder / "data")
    t5_tokenizer.prepare(folder / "data", "toy_t5_tokenizer", "toy_tokenizer")
    tokenise(folder / "data", Options("toy_ids", "toy_t5_tokenizer", corpus="toy_text"))
    assert toy.main(["-e", "t5"], {"t5": [T5]}, folder) == 0
    return folder


def test_ids_that_were_made_before_train_as_text_does(folder: Path):
    assert toy.main(["-e", "t5"], {"t5": [PLAIN]}, folder) == 0
    losses = [[row["val_loss"] for row in toy.rows(folder, exp_id(one))] for one in (T5, PLAIN)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_each_part_is_evaluated_and_all_of_them(folder: Path):
    row = toy.rows(folder, exp_id(T5))[-1]
    low, high = sorted([row["val_loss/short"], row["val_loss/long"]])
    assert low < row["val_loss"] < high
