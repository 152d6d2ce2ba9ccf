"""From real text and T5's own vocabulary to real tasks: tokenised, pre-trained, prepared and fine-tuned, through the
commands."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from data_prep import tokenize
from data_prep.t5 import prepare_task, t5_tokenizer
from src.experiments.grid import ref
from src.experiments.identity import exp_id
from tests import toy

RELEASES = Path(os.environ.get("TRAINVAL_DATA") or "/nowhere")
pytestmark = pytest.mark.skipif(not RELEASES.is_dir(), reason="needs TRAINVAL_DATA, the folder of the released data")

PRETRAINED: dict[str, Any] = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {
        "name": "t5",
        "random": {
            "tokenizer": "t5_tokenizer",
            "hidden_size": 16,
            "feed_forward_size": 32,
            "num_layers": 1,
            "num_heads": 2,
        },
    },
    "data": {"name": "span_corruption", "corpus": "wikitext", "input_tokens": 128, "val_sequences": 8},
    "loop": {"steps": 4, "sequences_per_step": 8, "micro_batch": 8, "learning_rate": 1e-2, "eval_every": 2},
}
TASKS = {
    # task: folder, training file, validation file, metric
    "sst2": ("SST-2", "train.tsv", "dev.tsv", "accuracy"),
    "cola": ("CoLA", "in_domain_train.tsv", "in_domain_dev.tsv", "matthews"),
    "rte": ("RTE", "train.tsv", "val.tsv", "accuracy"),
}


def fine_tuning(task: str) -> dict[str, Any]:
    """The pre-trained model on a task."""
    loop = {**PRETRAINED["loop"], "best_metric": TASKS[task][3], "best_mode": "max"}
    data = {"name": "task", "task": task, "corpus": task, "input_tokens": 64, "target_tokens": 12, "val_samples": 24}
    return {"recipe": "seq2seq", "seed": 0, "model": ref(PRETRAINED), "data": data, "loop": loop, "predictions": {}}


GROUPS = {"t5": [PRETRAINED], **{task: [fine_tuning(task)] for task in TASKS}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, token files and a pre-trained model."""
    folder = tmp_path_factory.mktemp("real")
    place = ["--data_path", str(folder / "data")]
    t5_tokenizer.main(
        [*place, "--spiece", str(RELEASES / "tokenizer" / "t5" / "spiece.model"), "--name", "t5_tokenizer"]
    )
    text = folder / "wiki.txt"
    text.write_bytes((RELEASES / "lm" / "wikitext2" / "wiki.valid.tokens").read_bytes())
    sources = ["--train", str(text), "--val_rate", "0.1", "--documents_by", "line", "--processes", "1"]
    tokenize.main([*place, "--name", "wikitext", "--tokenizer", "t5_tokenizer", *sources])
    assert toy.main(["-e", "t5"], GROUPS, folder) == 0
    return folder


def test_pre_training_on_token_files_learns(folder: Path):
    first, last = toy.rows(folder, exp_id(PRETRAINED))
    assert last["val_loss"] < first["val_loss"]


@pytest.mark.parametrize("task", list(TASKS))
def test_the_model_is_fine_tuned_and_answers(folder: Path, task: str):
    name, train, val, metric = TASKS[task]
    files = ["--train", str(RELEASES / "glue" / name / train), "--val", str(RELEASES / "glue" / name / val)]
    prepare_task.main(["--data_path", str(folder / "data"), "--task", task, *files])
    assert toy.main(["-e", task], GROUPS, folder) == 0
    run = folder / "runs" / exp_id(fine_tuning(task))
    last = toy.rows(folder, exp_id(fine_tuning(task)))[-1]
    assert {metric, "task_score", f"predictions/val/{metric}"} <= last.keys()
    predictions = [json.loads(line) for line in (run / "predictions" / f"{task}.val.jsonl").read_text().splitlines()]
    assert len(predictions) == 24
    assert all(row["input"].startswith(f"{task} sentence") for row in predictions)
