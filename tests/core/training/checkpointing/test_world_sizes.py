"""A run goes on with another number of processes: the same sequences make each step, and the loss is equal to
rounding."""

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from src import files
from src.errors import CheckpointError
from src.experiments.identity import exp_id
from src.runs import ledger
from src.training.checkpointing import consolidate
from src.training.checkpointing.checkpoint import OPTIMIZER
from src.training.checkpointing.dcp_shards import MOMENTS
from tests import warm
from tests.core.training import small
from tests.core.training.parallel.modes import Modes, scores, weights
from tests.core.training.reading import read_keys
from tests.core.training.reading.test_packed_training import write_data

ZERO = ["zero1", "zero2", "zero3"]


def close(run: Path, expected_run: Path) -> None:
    """The same sequences, and numbers that differ by rounding alone."""
    row, expected_row = scores(run)[-1], scores(expected_run)[-1]
    assert (row["step"], row["tokens"]) == (expected_row["step"], expected_row["tokens"])
    assert row["val_loss"] == pytest.approx(expected_row["val_loss"], rel=1e-5)
    assert row["train_loss"] == pytest.approx(expected_row["train_loss"], rel=1e-5)
    one, other = (
        load_file(max((folder / "checkpoints").glob("step-*")) / "model.safetensors") for folder in (run, expected_run)
    )
    for name, tensor in one.items():
        # A fiftieth of one step's learning rate: Adam moves what has no gradient but rounding (the keys' biases) by
        # rounding too.
        torch.testing.assert_close(
            tensor, other[name], rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replicated", "fsdp"])
def test_two_then_one_then_two(modes: Modes, mode: str):
    """Six steps, two and one."""
    run, log = modes.run("wide"), modes.run("wide") / "logs" / "train.log"
    modes.cut_back(mode, "wide")
    assert modes.start("replicated", "wide", processes=1, more=["--log_every", "1"]) == ""
    assert log.read_text().count("continues from step 6") == 1
    assert modes.drop_last("wide").name == "step-00000008"
    assert modes.start(mode, "wide", processes=2) == ""
    assert log.read_text().count("continues from step 8") == 1
    assert scores(run)[-1]["val_loss"] == pytest.approx(scores(modes.trained(mode, "wide"))[-1]["val_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_fsdp_shards_load_on_another_world_size(modes: Modes, processes: int):
    """By nobody: each process reads its part."""
    checkpoint = modes.cut_back("fsdp", "wide")
    assert (checkpoint / MOMENTS).is_dir()
    assert modes.start("fsdp", "wide", processes) == ""
    log = (modes.run("wide") / "logs" / "train.log").read_text()
    assert "continues from step 6" in log
    assert "put together" not in log
    assert not (checkpoint / OPTIMIZER).exists()
    close(modes.run("wide"), modes.trained("fsdp", "wide"))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "processes"), [("zero1", 3), ("zero2", 1), ("zero2", 4), ("zero3", 1), ("zero3", 4)])
def test_zero_shards_resume_on_another_world_size(modes: Modes, mode: str, processes: int):
    """They are put together first."""
    checkpoint = modes.cut_back(mode, "wide")
    assert not (checkpoint / OPTIMIZER).exists()
    assert modes.start(mode, "wide", processes=processes) == ""
    log = (modes.run("wide") / "logs" / "train.log").read_text()
    assert (
        log.count(f"{checkpoint}: consolidating the optimizer state from DeepSpeed shards, which do not fit this start")
        == 1
    )
    assert "continues from step 6" in log
    close(modes.run("wide"), modes.trained(mode, "wide"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "processes"),
    [
        *(("zero1", 2), ("zero2", 3), ("zero3", 2), ("fsdp", 3)),
        pytest.param("zero1", 3, marks=pytest.mark.matrix),
        pytest.param("zero2", 2, marks=pytest.mark.matrix),
        pytest.param("zero3", 3, marks=pytest.mark.matrix),
        pytest.param("fsdp", 2, marks=pytest.mark.matrix),
    ],
)
def test_consolidated_state_is_sharded_again_bit_exactly(modes: Modes, mode: str, processes: int):
    """The shards themselves are gone."""
    shards = MOMENTS if mode == "fsdp" else "zero"
    checkpoint = modes.cut_back(mode, "wide", processes)
    assert consolidate.main([str(checkpoint)]) == 0
    assert consolidate.verify(checkpoint)
    if mode == "fsdp":
        with pytest.raises(CheckpointError, match="FSDP2 checkpoints have only trained weights"):
            consolidate.consolidate(checkpoint, consolidate.Export(modes.folder / "all", everything=True))
    shutil.rmtree(checkpoint / shards)
    manifest = files.read_manifest(checkpoint, CheckpointError)
    manifest["files"] = {name: facts for name, facts in manifest["files"].items() if not name.startswith(f"{shards}/")}
    files.write_json(checkpoint / files.MANIFEST, manifest)
    assert modes.start(mode, "wide", processes) == ""
    assert "continues from step 6" in (modes.run("wide") / "logs" / "train.log").read_text()
    assert scores(modes.run("wide")) == scores(modes.trained(mode, "wide", processes))
    assert weights(modes.run("wide")) == weights(modes.trained(mode, "wide", processes))


def take_reads(folder: Path) -> dict[int, list[Any]]:
    """What the processes of one start have read together in each step; their files are deleted."""
    reads: dict[int, list[Any]] = defaultdict(list)
    for path in folder.glob("keys-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            reads[record["step"]] += record["keys"]
        path.unlink()
    return {step: sorted(keys) for step, keys in reads.items()}


@pytest.mark.slow
def test_packed_rows_are_the_same_on_any_number_of_processes_and_when_it_changes(tmp_path: Path):
    """On 1, 2, 3 and 4 processes. Of two, one is killed in step 8, and three go on."""

    def start(name: str, processes: int, *kill_in: str) -> tuple[str, dict[int, list[Any]]]:
        folder = tmp_path / name
        output = warm.torchrun(Path(read_keys.__file__), [str(folder), *kill_in], processes, folder / "log")
        return output, take_reads(folder)

    runs = {name: write_data(tmp_path / name) / "runs" / exp_id(small.EXP) for name in ("1", "2 and 3", "3", "4")}
    output, expected = start("1", 1)
    assert output == ""
    assert {step: len(keys) for step, keys in expected.items()} == dict.fromkeys(range(1, 11), 8)
    output, result = start("2 and 3", 2, "8")
    assert output != ""
    assert result == {step: expected[step] for step in range(1, 9)}
    output, result = start("2 and 3", 3)
    first = [event["step"] for event in ledger.read(runs["2 and 3"]) if event["event"] == "start"][1]
    assert output == ""
    assert first in (4, 6)
    assert result == {step: expected[step] for step in range(first + 1, 11)}
    for processes in (3, 4):
        assert start(str(processes), processes) == ("", expected)
    cursors = [
        json.loads((run / "checkpoints" / "step-00000010" / "state.json").read_text())["cursor"]
        for run in runs.values()
    ]
    assert cursors[1:] == cursors[:1] * 3
    count_columns = ("step", "tokens", "data/padding", "data/left_out")
    for run in runs.values():
        for row, other in zip(scores(run), scores(runs["1"]), strict=True):
            assert [row[name] for name in count_columns] == [other[name] for name in count_columns]
            assert row == pytest.approx(other, rel=1e-4)
