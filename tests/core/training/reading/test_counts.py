"""What a loss is a mean over, and the named sums that it reports: the same however a step is cut, and after any
restart."""

import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from src.data.text import tokenizers
from src.errors import TrainingError
from src.experiments.identity import exp_id
from src.files import new_directory
from src.runs import ledger
from src.runs.context import Options, Run
from src.support import distributed
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.config import LoopConfig
from src.training.divergence.detector import Config as Divergence
from src.training.loop import fit
from src.training.spec import TrainSpec
from src.training.state import State
from tests import toy
from tests.core.training import small


def config(**changes: Any) -> LoopConfig:
    return LoopConfig(
        **{"steps": 12, "sequences_per_step": 4, "micro_batch": 2, "learning_rate": 0.01, "eval_every": 4, **changes}
    )


class Replies(small.Numbers):
    """Sample i is a question with 1 to 3 replies, each a row of one token."""

    fingerprint = "replies"

    def collate(self, samples: Sequence[int]) -> dict[str, Tensor]:
        rows = [(b, index) for b, index in enumerate(samples) for _ in range(1 + index % 3)]
        ids = torch.tensor([[0, index] for _, index in rows])
        ones = torch.ones_like(ids).bool()
        return {
            "input_ids": ids,
            "attention_mask": ones,
            "loss_mask": ones,
            "sample_of_row": torch.tensor([b for b, _ in rows]),
        }


class Guess(small.Line):
    """Guesses one number for all questions."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.guess.sum()


def count_questions(batch: Mapping[str, Tensor]) -> float:
    """Questions with at least two replies."""
    return float((batch["sample_of_row"].bincount() > 1).sum())


def rank_loss(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Of each question with at least two replies, the squared distance to its number: a stand-in for a K-wise loss."""
    replies = batch["sample_of_row"].bincount()
    firsts = torch.tensor([int((batch["sample_of_row"] == b).nonzero()[0]) for b in range(len(replies))])
    distances = (model(batch) - batch["input_ids"][firsts, 1] / 32)[replies > 1]
    right = (distances.abs() < 0.25).double().sum()
    return (distances**2).sum(), {"accuracy": (right, torch.tensor(float(len(distances))))}


def train(run: Run, settings: LoopConfig, loss: Any = rank_loss, count: Any = count_questions) -> tuple[State, Tensor]:
    torch.manual_seed(0)
    model = Guess()
    about = CheckpointMetadata({}, tokenizers.load(run.places.data / "toy_tokenizer"))
    with distributed.stoppable():
        spec = TrainSpec(model, about, Replies(), {}, loss, lambda _: {"val_loss": 0.0}, count=count)
        return fit(spec, run, settings, seed=0), model.guess.detach()


def rows(run: Run) -> list[dict[str, Any]]:
    return list(run.dir.scores.rows())


def test_a_step_is_the_same_however_it_is_cut(tmp_path: Path):
    """The counts of micro-batches differ, so a mean of means would not be."""
    results = []
    for micro_batch in (1, 2, 4):
        with small.open_run(small.write_data(tmp_path / str(micro_batch))) as run:
            _, guess = train(run, config(micro_batch=micro_batch))
            results.append((guess, rows(run)))
    for guess, scores in results[1:]:
        assert torch.allclose(guess, results[0][0], rtol=1e-6)
        assert [row["accuracy"] for row in scores] == [row["accuracy"] for row in results[0][1]]
        for name in ("train_loss", "grad_norm"):
            assert [row[name] for row in scores] == pytest.approx([row[name] for row in results[0][1]], rel=1e-6)
    assert 0 < results[0][1][0]["accuracy"] < 1


@pytest.mark.parametrize("stop_after", [1, 2, 6])
def test_a_stop_between_rows_saves_the_sums(tmp_path: Path, stop_after: int):
    with small.open_run(small.write_data(tmp_path / "whole")) as run:
        train(run, config())
        expected = rows(run)
    passes = 0

    def loss(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 2 * stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return rank_loss(*args)

    with small.open_run(small.write_data(tmp_path / "stopped")) as run:
        with pytest.raises(distributed.StopTraining):
            train(run, config(), loss)
        saved = json.loads(max((run.path / "checkpoints").glob("step-*/state.json")).read_text())
        assert set(saved["since_row"]["sums"]) == {"accuracy"}
        train(run, config())
        assert rows(run) == expected


def test_further_steps_are_evaluated_and_saved(tmp_path: Path):
    with small.open_run(small.write_data(tmp_path)) as run:
        train(run, config(extra_eval_steps=[2, 5]))
        assert [row["step"] for row in rows(run) if "val_loss" in row] == [2, 4, 5, 8, 12]
        events = [event["step"] for event in ledger.read(run.path) if event["event"] == "save"]
        assert events == [2, 4, 5, 8, 12]


@pytest.mark.parametrize(
    ("extra_eval_steps", "message"), [([13], "step 13 is after the last step, 12"), ([0], "greater than 0")]
)
def test_further_steps_that_cannot_be(extra_eval_steps: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        config(extra_eval_steps=extra_eval_steps)


def test_a_step_that_counts_nothing_is_refused(tmp_path: Path):
    with (
        small.open_run(small.write_data(tmp_path)) as run,
        pytest.raises(TrainingError, match="step 1: nothing to learn in the 4 sequences"),
    ):
        train(run, config(), count=lambda _: 0)


def test_a_step_with_a_negative_sum_of_weights_is_rejected(tmp_path: Path):
    """It would be climbed."""
    with (
        small.open_run(small.write_data(tmp_path)) as run,
        pytest.raises(TrainingError, match=r"count -4.*--data skip:1"),
    ):
        train(run, config(), count=lambda batch: -float(len(batch["sample_of_row"].unique())))


@pytest.mark.parametrize("name", ["", "step", "train_loss", "val_accuracy", "learning_rate", "data/padding"])
def test_a_sum_that_would_hide_a_score_is_refused(tmp_path: Path, name: str):
    def loss(*args: Any) -> Any:
        loss_sum, named_sums = rank_loss(*args)
        return loss_sum, {name: named_sums["accuracy"]}

    with (
        small.open_run(small.write_data(tmp_path)) as run,
        pytest.raises(TrainingError, match=f"sum '{name}' of the loss"),
    ):
        train(run, config(), loss)


def test_a_pass_with_other_names_is_refused(tmp_path: Path):
    passes = 0

    def loss(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        loss_sum, named_sums = rank_loss(*args)
        return loss_sum, named_sums if passes < 4 else {}

    with (
        small.open_run(small.write_data(tmp_path)) as run,
        pytest.raises(TrainingError, match=r"are \[\] here, but \['accuracy'\]"),
    ):
        train(run, config(), loss)


def test_rows_of_a_sample_that_diverges_are_saved_with_its_key(tmp_path: Path):
    passes = 0

    def loss(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        loss_sum, named_sums = rank_loss(*args)
        return loss_sum * (math.nan if passes == 4 * 7 else 1), named_sums

    with small.open_run(small.write_data(tmp_path), Options(log_every=1)) as run:
        with pytest.raises(TrainingError, match="step 7: the loss is nan"):
            train(run, config(sequences_per_step=8, divergence=Divergence(on_non_finite="stop")), loss)
        (dump,) = (run.path / "offending").iterdir()
        documents = json.loads(dump.read_text())["documents"]
        counts = {
            document["index"]: sum(other["index"] == document["index"] for other in documents) for document in documents
        }
        assert all(number == 1 + index % 3 for index, number in counts.items())
        assert set(counts.values()) == {1, 2, 3}
        words = tokenizers.load(run.places.data / "toy_tokenizer")
        assert all(document["text"] == words.decode([0, document["index"]]) for document in documents)


def test_a_mixture_says_its_loss_by_source(tmp_path: Path):
    """The sources' losses make the loss of the training, on the real loop and real questions."""
    toy.write_data(tmp_path / "data")
    with new_directory(tmp_path / "data" / "mixed") as folder:
        for path in (tmp_path / "data" / "toy_qa").glob("*.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            (folder / path.name).write_text(
                "".join(json.dumps({**row, "dataset": f"toy{i % 3}"}) + "\n" for i, row in enumerate(rows))
            )
    child = {
        **toy.CROSSATTN,
        "data": {**toy.CROSSATTN["data"], "corpus": "mixed"},
        "loop": {**toy.CROSSATTN["loop"], "steps": 4, "eval_every": 4},
    }
    assert toy.main(["-e", "base", "child"], {"base": [toy.BASE], "child": [child]}, tmp_path) == 0
    run = tmp_path / "runs" / exp_id(child)
    (row,) = toy.rows(tmp_path, exp_id(child))
    losses = [row[f"loss/toy{i}"] for i in range(3)]
    assert min(losses) < row["train_loss"] < max(losses)
    assert "loss/toy0" not in json.loads((run / "perf.jsonl").read_text().splitlines()[-1])
