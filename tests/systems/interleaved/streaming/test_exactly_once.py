"""Streams that are killed, stopped and gone on with by other numbers of processes: the same rows in every step, each
document once.

Processes read without a model here, as a hundred trainings would take an hour;
tests/systems/interleaved/test_interleaved.py has ten of those.

What m4's data pipeline lost, and where a test would notice it here:
1 no place to go on from after a restart, 2 processes that share a seed read other documents, 9 exactly once with
filters, mixtures and
another number of processes: this file. 3 cuts that nobody tells: test_tar_index. 4 downloads that fail unseen:
test_shard_files, test_shard_files_s3; nothing to be read at all: test_streamed. 5 one source that ends begins all of
them anew, a validation without end: check_documents below, test_arrangement, test_streamed. 6 long documents:
test_streamed. 7 what a rewind leaves behind: tests/core/operations/test_interventions; checkpoints that are deleted,
tests/runs/test_rotation; rates and moments, tests/training/test_rewound_training. 8 reading on in another order, 10 one
read of a document: test_streamed. Grey rests of cut images, images of zeros that are taken for padding: test_images.
The middle of a text with several ends: test_texts. Results of the call before: test_streamed. Seeds as digits in a row:
test_arrangement. Parts that are there twice, or are stored as 10 before 2: test_tar_index. Pages of one PDF that are
all its last: tests/data_prep/interleaved/test_convert.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from src.data.orders import order_of
from src.experiments.config import Places
from src.experiments.registry import DATASETS, bind
from src.files import write_json
from src.training.config import LoopConfig
from src.training.loader import StepLoader
from src.training.state import State
from tests.systems.interleaved.streaming import pages, test_streamed

PER_STEP, STEPS, SAVE_EVERY = 8, 14, 3
LOOP = LoopConfig(steps=STEPS, sequences_per_step=PER_STEP, micro_batch=1, learning_rate=1.0, eval_every=1)
WORLDS = (1, 2, 3, 4, 8)
SOURCES = {
    "pages": {"path": "pages", "rate": 5},
    "more": {"path": "more", "rate": 3},
    "few": {"path": "few", "rate": 1},
}
ERRORS = {"max_documents": 1.0}


def open_data(folder: Path) -> Any:
    rules = {"max_images": 2}
    config = pages.config(SOURCES, errors=ERRORS, rules=rules, sequence_tokens=64, max_frames=5, shuffle="window")
    return bind(DATASETS, config).build(Places(folder, folder), pages.tokenizer(), "train", 0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources, of which some documents cannot be decoded, some are left out and some are cut."""
    folder = tmp_path_factory.mktemp("sources")
    for name, number in (("pages", 200), ("more", 90), ("few", 12)):
        pages.write_pages(folder / name / "train", number, name, seed=number)
    for document_number in (3, 17, 40, 41, 100):
        test_streamed.damage(folder, document_number, image=False)
    return folder


def digest(batch: Any) -> str:
    """Of everything that a model would see of a row."""
    names = ("input_ids", "loss_mask", "position_ids", "frames", "source_ids", "source_counts")
    return hashlib.sha256(b"".join(batch[name].numpy().tobytes() for name in names)).hexdigest()


def read(folder: Path, trial: Path, rank: int, world_size: int, start: int) -> None:
    """One process: reads from the newest whole checkpoint to the end, and writes down each row and, every few steps,
    its cursor."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    data = open_data(folder)
    data.quarantine.open(trial)
    state = newest(trial)
    steps = StepLoader(data, order_of(data, 0, PER_STEP, STEPS), LOOP, torch.device("cpu"), num_workers=0).steps(state)
    with open(trial / f"log-{start}-{rank}.jsonl", "a") as log:
        for number in range(state.step + 1, STEPS + 1):
            step = next(steps)
            rows = [
                [rank + i * world_size, keys[0], digest(batch)]
                for i, (keys, batch) in enumerate(zip(step.keys, step.batches, strict=True))
            ]
            log.write(json.dumps({"step": number, "rows": rows}) + "\n")
            log.flush()
            if number % SAVE_EVERY == 0 or signals or number == STEPS:
                write_json(trial / f"cursor-{number}-{rank}-{world_size}.json", {**state.cursor, **step.cursor})
            if signals:
                return


def newest(trial: Path) -> State:
    """The state of the last step of which all processes have saved their cursors."""
    paths_by_step: dict[tuple[int, int], list[Path]] = {}
    for path in trial.glob("cursor-*.json"):
        _, step, _, processes = path.stem.split("-")
        paths_by_step.setdefault((int(step), int(processes)), []).append(path)
    whole = [(step, paths) for (step, processes), paths in paths_by_step.items() if len(paths) == processes]
    step, paths = max(whole, default=(0, []))
    cursor: dict[str, Any] = {}
    for path in paths:
        rank, processes = map(int, path.stem.split("-")[2:])
        cursors = json.loads(path.read_text())
        lanes = {str(lane) for lane in range(rank, PER_STEP, processes)} | ({"of"} if rank == 0 else set())
        cursor |= {name: value for name, value in cursors.items() if name in lanes}
    return State(step=step, cursor=cursor)


def lines(trial: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in trial.glob("log-*.jsonl"))


def ledger(trial: Path) -> dict[int, list[Any]]:
    """The rows of each step, of the last start that has trained on it."""
    entries: dict[tuple[int, int], tuple[int, Any]] = {}
    for path in trial.glob("log-*.jsonl"):
        start = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines():
            record = json.loads(line)
            for g, key, seen in record["rows"]:
                place = (record["step"], g)
                entries[place] = max(entries.get(place, (-1, None)), (start, [key, seen]), key=lambda pair: pair[0])
    return {step: [entries[step, g][1] for g in range(PER_STEP)] for step in range(1, STEPS + 1)}


def run(folder: Path, trial: Path, draw: random.Random, faults: int, worlds: Sequence[int]) -> list[str]:
    """Read to the end with so many faults on the way; what was done."""
    context, faults_so_far = multiprocessing.get_context("fork"), list[str]()
    trial.mkdir()
    for start in count():
        world_size = draw.choice(worlds)
        processes = [
            context.Process(target=read, args=(folder, trial, rank, world_size, start)) for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        if len(faults_so_far) < faults:
            num_lines = lines(trial) + draw.randint(0, world_size * STEPS // 2)
            while lines(trial) < num_lines and any(process.is_alive() for process in processes):
                time.sleep(0.001)
            name = draw.choice(("SIGKILL", "SIGTERM"))
            for process in processes if name == "SIGTERM" else [draw.choice(processes)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signal.Signals[name])
            faults_so_far.append(f"{name} of {world_size}")
            if name == "SIGKILL":  # whoever starts processes ends the others when one is gone
                for process in processes:
                    process.kill()
        for process in processes:
            process.join()
        if newest(trial).step == STEPS:
            return faults_so_far
    raise AssertionError


def check_documents(steps: dict[int, list[Any]], data: Any) -> None:
    """By itself: in its first epoch each document's first piece comes once, and by the end of a pass none is
    missing."""
    seen: Counter[tuple[int, int]] = Counter()
    for rows in steps.values():
        for key, _ in rows:
            seen.update(
                (epoch, document)
                for epoch, document, piece in zip(key[::3], key[1::3], key[2::3], strict=True)
                if piece == 0
            )
    assert set(seen.values()) == {1}
    last = max(epoch for epoch, document in seen if data.source_names[data.locate(document)[0]] == "few")
    few = data.source_names.index("few")
    read_whole = {document for epoch, document in seen if epoch == 0 and data.locate(document)[0] == few}
    good = {document for document in range(data.first(few), data.first(few) + 12) if data.pieces(document)}
    assert last >= 1, "the small source has begun anew"
    assert read_whole == good


@pytest.mark.slow
@pytest.mark.parametrize("trials", [25, pytest.param(100, marks=pytest.mark.matrix)])
def test_streams_are_killed_and_rescaled(world: Path, tmp_path: Path, trials: int):
    draw, kinds = random.Random(11), Counter[str]()
    assert run(world, tmp_path / "undisturbed", draw, 0, [1]) == []
    expected = ledger(tmp_path / "undisturbed")
    check_documents(expected, open_data(world))
    bad = (tmp_path / "undisturbed" / "quarantine.jsonl").read_text().count("\n")
    assert bad >= 2, "some documents turned out bad"
    for number in range(trials):
        trial = tmp_path / str(number)
        fault_names = run(world, trial, draw, draw.randint(1, 4), WORLDS)
        assert ledger(trial) == expected, f"trial {number}: {fault_names}"
        records = {
            (r["source"], r["shard"], r["document"])
            for r in map(json.loads, (trial / "quarantine.jsonl").read_text().splitlines())
        }
        assert len(records) == bad, f"trial {number}: {fault_names}"
        kinds.update(fault_names)
    assert {word.split()[2] for word in kinds} == {str(size) for size in WORLDS}
    assert {word.split()[0] for word in kinds} == {"SIGKILL", "SIGTERM"}
