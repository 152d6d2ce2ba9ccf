"""Trainings on packed documents, on the real loop: stops, crashes and rewinds change no bit that they should not."""

import json
import os
import random
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from src.data.orders import Key
from src.data.text import tokenizers
from src.errors import RunError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.experiments.registry import DATASETS, MODELS, bind
from src.files import new_directory, write_json
from src.runs import ledger
from src.runs.context import Run
from src.runs.history import branches, rewind
from src.runs.history.branches import Branch
from src.support import distributed
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.config import LoopConfig
from src.training.loop import TrainSpec, fit
from src.training.loss import causal_lm_loss
from src.training.state import State
from tests import toy
from tests.core.training import small

CONFIG = LoopConfig(steps=12, sequences_per_step=4, micro_batch=2, learning_rate=0.01, eval_every=3)
MODEL = {
    "name": "gpt_bigcode",
    "tokenizer": "toy_tokenizer",
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "max_positions": 32,
}
DATA = {
    "name": "packed",
    "documents": {"name": "documents", "corpus": "words"},
    "sequence_tokens": 32,
    "open_rows": 2,
    "too_long": "drop",
}
PASSES = CONFIG.sequences_per_step // CONFIG.micro_batch


class Crash(Exception):
    """Of the process, as far as a test can."""


def write_data(folder: Path) -> Path:
    draw = random.Random(0)
    with new_directory(small.write_data(folder) / "data" / "words") as corpus:
        for split in ("train", "val"):
            texts = [" ".join(draw.choices(toy.THINGS, k=draw.randint(1, 40))) for _ in range(300)]
            (corpus / f"{split}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return folder


def train(
    run: Run,
    stop_after: int | None = None,
    crash_after: int | None = None,
    read: list[Any] | None = None,
    config: Any = DATA,
) -> tuple[State, list[torch.Tensor], list[Any]]:
    """Final state, final weights, and the ids of each micro-batch. stop_after, crash_after: steps of this start.

    read: gets the keys of each micro-batch that is trained on. config: of the data.
    """
    torch.manual_seed(0)
    model = bind(MODELS, MODEL).build(run.places)
    tokenizer = tokenizers.load(run.places.data / "toy_tokenizer")
    data = bind(DATASETS, config).build(run.places, tokenizer, "train", 0)
    seen: list[Any] = []
    rows: list[Key] = []
    sample, data.sample = data.sample, lambda *key: rows.append(key) or sample(*key)

    def loss(model: Any, batch: Mapping[str, Any]) -> Any:
        if len(seen) == PASSES * (crash_after or -1):
            raise Crash
        seen.append(batch["input_ids"].tolist())
        if read is not None:
            begin = len(seen) * CONFIG.micro_batch
            read.append(rows[begin - CONFIG.micro_batch : begin])
        if len(seen) == PASSES * (stop_after or 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return causal_lm_loss(model, batch)

    with distributed.stoppable():
        spec = TrainSpec(model, CheckpointMetadata({}, tokenizer), data, {}, loss, lambda _: {"val_loss": 0.0})
        state = fit(spec, run, CONFIG, seed=0)
    return state, [parameter.detach().clone() for parameter in model.parameters()], seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a finished run that has all checkpoints, and what `train` gave."""
    folder = write_data(tmp_path_factory.mktemp("whole"))
    with small.open_run(folder) as run:
        return folder, train(run)


def equal(tensors: Any, expected: Any) -> bool:
    return tensors[0] == expected[0] and all(map(torch.equal, tensors[1], expected[1]))


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """The score rows of its only run."""
    (path,) = folder.glob("runs/*/scores.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("steps", [(1,), (4, 2), (2, 1, 3)])
def test_stops_change_no_bit(whole: tuple[Path, Any], tmp_path: Path, steps: tuple[int, ...]):
    read: list[Any] = []
    with small.open_run(write_data(tmp_path)) as run:
        for count in steps:
            with pytest.raises(distributed.StopTraining):
                read += train(run, stop_after=count)[2]
        end = train(run)
        starts = [event["cursor"] for event in ledger.read(run.path) if event["event"] == "start"]
        rows = list(run.dir.scores.rows())
    assert equal(end, whole[1])
    assert rows == rows_in(whole[0])
    assert all(0 < row[name] < 1 for row in rows for name in ("data/padding", "data/left_out"))
    assert end[2] == whole[1][2][-len(end[2]) :]
    assert [start["documents"] for start in starts] == sorted({start["documents"] for start in starts})
    assert starts[-1]["left_out"] > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**DATA, "open_rows": 3}, "^checkpoint of step 4: saved with other documents"),
        (
            {**DATA, "documents": {"name": "documents", "corpus": "toy_text"}},
            "^checkpoint of step 4: saved with other documents",
        ),
    ],
)
def test_a_start_on_other_data_is_refused_and_loses_nothing(
    whole: tuple[Path, Any], tmp_path: Path, config: Any, message: str
):
    with small.open_run(write_data(tmp_path)) as run:
        with pytest.raises(distributed.StopTraining):
            train(run, stop_after=3)
        with pytest.raises(RunError, match=message):
            train(run, config=config)
        assert equal(train(run), whole[1])


def test_a_run_on_data_without_a_cursor_is_not_continued_on_packed_rows(tmp_path: Path):
    with small.open_run(write_data(tmp_path)) as run:
        with pytest.raises(distributed.StopTraining):
            train(run, stop_after=3, config={"name": "text", "corpus": "words", "sequence_tokens": 16})
        with pytest.raises(RunError, match=r"^checkpoint of step 4: it has no position in packed data"):
            train(run)


@pytest.mark.parametrize("data", ["same", "skip:7", "reshuffle"])
def test_a_rewind_is_the_same_after_a_crash_before_its_first_checkpoint(
    whole: tuple[Path, Any], tmp_path: Path, data: str
):
    def rewound(name: str, crash_after: int | None) -> Any:
        shutil.copytree(whole[0], tmp_path / name)
        with small.open_run(tmp_path / name) as run:
            rewind.plan(run.path, Branch(number=1, from_step=9, data=data), "a test").apply()
            if crash_after is not None:
                with pytest.raises(Crash):
                    train(run, crash_after=crash_after)
            return train(run)

    expected = rewound("whole", None)
    assert equal(rewound("crashed", 2), expected)
    trunk = whole[1][2]
    first, later = trunk[: 9 * PASSES], trunk[9 * PASSES :]
    assert (expected[2] == later) == (data == "same")
    rows = [tuple(row) for batch in first + expected[2] for row in batch]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("data", ["same", "skip:7", "reshuffle"])
def test_a_rewind_delivers_each_document_at_most_once_and_undo_restores(
    whole: tuple[Path, Any], tmp_path: Path, data: str
):
    read: list[Any] = []
    with small.open_run(write_data(tmp_path)) as run:
        with pytest.raises(distributed.StopTraining):
            train(run, stop_after=8, read=read)
        documents_before, before = documents_of(read[: 6 * PASSES]), files_in(run.path)
        rewind.plan(run.path, Branch(number=1, from_step=6, data=data), "a test").apply()
        read.clear()
        with pytest.raises(Crash):
            train(run, crash_after=5, read=read)
        documents = [*documents_before, *documents_of(read)]
        assert len(documents) > 40
        assert len(set(documents)) == len(documents)
        assert {epoch for epoch, _, _ in documents} == {0}
        rewind.plan_undo(run.path, "a test").apply()
        assert files_in(run.path) == before
        assert equal(train(run), whole[1])


def documents_of(read: Sequence[Sequence[Key]]) -> list[tuple[int, int, int]]:
    """(epoch, document, piece) of everything in the rows of these micro-batches."""
    return [piece for keys in read for key in keys for piece in zip(key[::3], key[1::3], key[2::3], strict=True)]


def files_in(run: Path) -> dict[str, bytes]:
    """What an undo restores: checkpoints, scores and the branches."""
    paths = [*run.glob("checkpoints/*/*"), run / "scores.jsonl", run / branches.FILE]
    return {str(path.relative_to(run)): path.read_bytes() for path in paths if path.is_file()}


APART = {"name": "text", "corpus": "words", "sequence_tokens": 16, "separate_documents": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data.documents": {"name": "span_corruption", "corpus": "words", "input_tokens": 16}},
            "samples of 'span_corruption' data cannot",
        ),
        (
            {"data": {"name": "mixture", "parts": {"one": DATA}}},
            r"parts\.one: 'packed' data have a fixed order",
        ),
        ({"data.documents": DATA}, "samples of 'packed' data cannot be packed"),
        ({"data.sequence_tokens": 33}, r"data\.sequence_tokens: 33 tokens are more than the 32 positions"),
        ({"model": {"name": "hf", "path": "falcon"}}, "not tested with the model family 'falcon'"),
        ({"model": {"name": "hf", "path": "odd"}}, "not tested with the model family None"),
        (
            {"data": APART, "model": {"name": "hf", "path": "falcon"}},
            "not tested with the model family 'falcon'",
        ),
        (
            {"model": {"name": "hf", "path": "llama", "attention": "flex_attention"}},
            "not tested with 'flex_attention'",
        ),
    ],
)
def test_unsupported_packing_is_refused_before_the_start(whole: tuple[Path, Any], change: dict[str, Any], message: str):
    places = Places(whole[0] / "data", whole[0] / "runs")
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    for name in ("falcon", "llama", "odd"):
        folder = places.data / name
        folder.mkdir(exist_ok=True)
        write_json(folder / "config.json", {"model_type": name, **({} if name == "odd" else sizes)})
        (folder / "model.safetensors").touch()
    raw: dict[str, Any] = {"recipe": "lm", "seed": 0, "model": MODEL, "data": dict(DATA), "loop": resolved_loop()}
    load_experiment(raw, "it").check(places)
    for path, value in change.items():
        head, _, tail = path.partition(".")
        raw = {**raw, head: {**raw[head], tail: value} if tail else value}
    with pytest.raises(Exception, match=message):
        load_experiment(raw, "it").check(places)


def resolved_loop() -> dict[str, Any]:
    return {
        name: getattr(CONFIG, name)
        for name in ("steps", "sequences_per_step", "micro_batch", "learning_rate", "eval_every")
    }
