"""A run goes on with another number of processes: the same sequences make each step, and the loss is equal to rounding."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from src import files
from src.errors import CheckpointError
from src.training.checkpointing import consolidate
from src.training.checkpointing.folder import OPTIMIZER
from tests.training.parallel.modes import Modes, scores, weights

ZERO = ["zero1", "zero2", "zero3"]


def close(run: Path, undisturbed: Path) -> None:
    """The same sequences, and numbers that differ by rounding alone."""
    found, wanted = scores(run)[-1], scores(undisturbed)[-1]
    assert (found["step"], found["tokens"]) == (wanted["step"], wanted["tokens"])
    assert found["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-5)
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-5)
    one, other = (load_file(max((folder / "checkpoints").glob("step-*")) / "model.safetensors") for folder in (run, undisturbed))
    for name, tensor in one.items():
        # A fiftieth of one step's learning rate: Adam moves what has no gradient but rounding (the keys' biases) by rounding too.
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


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
@pytest.mark.parametrize(("mode", "processes"), [("zero1", 3), ("zero2", 1), ("zero2", 4), ("zero3", 1), ("zero3", 4)])
def test_shards_go_on_elsewhere(modes: Modes, mode: str, processes: int):
    """They are put together first."""
    checkpoint = modes.cut_back(mode, "wide")
    assert not (checkpoint / OPTIMIZER).exists()
    assert modes.start(mode, "wide", processes=processes) == ""
    log = (modes.run("wide") / "logs" / "train.log").read_text()
    assert log.count(f"{checkpoint}: its optimizer state is in DeepSpeed's shards, which do not fit this start") == 1
    assert "continues from step 6" in log
    close(modes.run("wide"), modes.trained(mode, "wide"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ZERO)
@pytest.mark.parametrize("processes", [2, 3])
def test_what_was_put_together_is_shared_out_again_exactly(modes: Modes, mode: str, processes: int):
    """The shards themselves are gone."""
    checkpoint = modes.cut_back(mode, "wide", processes)
    assert consolidate.main([str(checkpoint)]) == 0
    shutil.rmtree(checkpoint / "zero")
    manifest = files.read_manifest(checkpoint, CheckpointError)
    manifest["files"] = {name: facts for name, facts in manifest["files"].items() if not name.startswith("zero/")}
    files.write_json(checkpoint / files.MANIFEST, manifest)
    assert modes.start(mode, "wide", processes) == ""
    assert "continues from step 6" in (modes.run("wide") / "logs" / "train.log").read_text()
    assert scores(modes.run("wide")) == scores(modes.trained(mode, "wide", processes))
    assert weights(modes.run("wide")) == weights(modes.trained(mode, "wide", processes))
