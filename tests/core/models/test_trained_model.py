"""The model of another experiment: from exactly the checkpoint that was named, or not at all."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from src.errors import CheckpointError, ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.experiments.registry import MODELS, bind, resolved_dict
from src.files import new_directory, write_json
from src.runs.checkpoints import checkpoints
from src.support.weights import trained_weights

GPT = {
    "name": "gpt_bigcode",
    "tokenizer": "tokenizer",
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 4,
    "max_positions": 32,
}
PARENT = "0123456789abcdef0123456789abcdef"


def child(checkpoint: str) -> ModelConfig:
    return bind(MODELS, {"name": "experiment", "exp_id": PARENT, "checkpoint": checkpoint})


def write(places: Places, step: int) -> torch.nn.Module:
    """A checkpoint of random weights of `step`; returns the model."""
    torch.manual_seed(step)
    model = bind(MODELS, GPT).build(places)
    with new_directory(checkpoints.folder(places.runs / PARENT, step)) as folder:
        save_file(trained_weights(model), folder / "model.safetensors")
        write_json(folder / "model.json", resolved_dict(bind(MODELS, GPT)))
        shutil.copytree(places.data / "tokenizer", folder / "tokenizer")
    return model


@pytest.fixture
def run(places: Places) -> Path:
    """Save directory of the parent: done at step 4, best at step 2."""
    run = places.runs / PARENT
    for step in (2, 4, 6):  # 6 is not the parent's: its status knows nothing of it
        write(places, step)
    write_json(run / "exp_dict.json", {"recipe": "lm", "model": GPT})
    write_json(run / "status.json", {"state": "done", "step": 4})
    checkpoints.mark_best(run, 2)
    return run


@pytest.mark.parametrize(("checkpoint", "step"), [("last", 4), ("best", 2)])
def test_the_child_has_the_weights_of_the_checkpoint_that_it_names(
    run: Path, places: Places, checkpoint: str, step: int
):
    model = child(checkpoint).build(places)
    torch.manual_seed(step)
    expected = bind(MODELS, GPT).build(places)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert model.name_or_path == str(checkpoints.folder(run, step) / "tokenizer")


@pytest.mark.parametrize(("checkpoint", "step"), [("last", 4), ("best", 2)])
def test_a_damaged_checkpoint_is_refused_and_no_other_is_taken(run: Path, places: Places, checkpoint: str, step: int):
    (checkpoints.folder(run, step) / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=rf"step-0000000{step}: the {checkpoint} checkpoint is damaged \(.*tokenizer\.json: missing\)",
    ):
        child(checkpoint).build(places)


def test_a_parent_that_is_still_running_has_no_last_checkpoint(run: Path, places: Places):
    write_json(run / "status.json", {"state": "running", "step": 4})
    with pytest.raises(
        ConfigError,
        match=rf"no last checkpoint of parent {PARENT}\. Train the parent first: add --with-parents",
    ):
        child("last").build(places)
