"""Settings of torch: made in one place, kept where the user has set them, recorded, and without a trace in a training
on a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from src.experiments.identity import exp_id
from src.support import torch_settings
from tests import toy


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in torch_settings.VARIABLES:
        os.environ.pop(name, None)
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def test_float32_is_float32_and_it_is_recorded():
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    torch_settings.make()
    settings = json.loads(json.dumps(torch_settings.describe()))
    assert (settings["float32_matmul"], settings["cudnn_tf32"], settings["cudnn_benchmark"]) == (
        "highest",
        False,
        False,
    )
    assert not settings["deterministic"]
    torch_settings.make(deterministic=True)
    assert torch_settings.describe()["deterministic"]


@pytest.mark.slow
def test_settings_import_no_compiler_unless_deterministic():
    code = (
        "import sys; from src.support import torch_settings; torch_settings.make(); print('torch._inductor' in "
        "sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=toy.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    torch.use_deterministic_algorithms(True)
    torch_settings.make()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", torch_settings.ALLOCATOR)
def test_an_allocator_set_by_the_user_stays(name: str):
    os.environ[name] = "max_split_size_mb:64"
    torch_settings.make()
    assert {each: os.environ.get(each) for each in torch_settings.ALLOCATOR if each in os.environ} == {
        name: "max_split_size_mb:64"
    }


def test_variables_that_nobody_has_set_are_set_and_recorded():
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"
    torch_settings.make()
    assert torch_settings.describe()["variables"] == {
        **torch_settings.ENVIRONMENT,
        "TORCH_FR_BUFFER_SIZE": "7",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


def test_the_flight_recorder_writes_into_each_run_or_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("one", "other"):
        torch_settings.place_flight_recorder(tmp_path / name)
        assert os.environ[torch_settings.DUMP] == str(tmp_path / name / "flight_recorder_")
    monkeypatch.setattr(torch_settings, "_dump_is_the_users", True)
    torch_settings.place_flight_recorder(tmp_path / "third")
    assert os.environ[torch_settings.DUMP] == str(tmp_path / "other" / "flight_recorder_")


def test_a_training_that_must_be_deterministic_ends_with_the_bits_of_any_other(tmp_path: Path):
    weights, recorded_settings = [], []
    for options in ([], ["--deterministic"]):
        folder = tmp_path / str(len(options))
        toy.write_data(folder / "data")
        assert toy.main(["-e", "base", *options], {"base": [toy.BASE]}, folder) == 0
        run = folder / "runs" / exp_id(toy.BASE)
        weights.append((run / "checkpoints" / "step-00000012" / "model.safetensors").read_bytes())
        recorded_settings.append(json.loads((run / "env.json").read_text())["torch"]["deterministic"])
    assert weights[0] == weights[1]
    assert recorded_settings == [False, True]
