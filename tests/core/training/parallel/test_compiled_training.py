"""Trainings with compiled layers and with less memory, through the command line: same names, same bits after a restart,
clear refusals."""

import copy
import functools
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters

from src.experiments.grid import ref
from src.experiments.identity import exp_id
from tests import toy

pytestmark = [  # of torch's own compiler
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
PLAIN: dict[str, Any] = copy.deepcopy(toy.BASE)
PLAIN["loop"] |= {"steps": 4, "eval_every": 2, "micro_batch": 4}
DROPPING = {**PLAIN, "model": {**PLAIN["model"], "dropout_rate": 0.1}}
COMPILED = {**PLAIN, "loop": {**PLAIN["loop"], "compile": True}}
CHILD = {**PLAIN, "seed": 1, "model": ref(COMPILED)}
CROSS_ATTENTION: dict[str, Any] = copy.deepcopy(toy.CROSSATTN)
CROSS_ATTENTION["model"]["base"] = ref(COMPILED)
CROSS_ATTENTION["loop"] |= {"steps": 4, "eval_every": 4, "compile": True}
FIXED_LENGTH = {**CROSS_ATTENTION, "data": {**CROSS_ATTENTION["data"], "fixed_length": True}}
GROUPS = {
    "plain": [PLAIN],
    "dropping": [DROPPING],
    "compiled": [COMPILED],
    "child": [CHILD],
    "crossed": [CROSS_ATTENTION],
    "fixed": [FIXED_LENGTH],
}
LAST = f"step-{PLAIN['loop']['steps']:08d}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    toy.write_data(folder / "data")
    return folder


def trained(group: str, folder: Path, *words: str) -> Path:
    """The save directory of a finished run."""
    assert toy.main(["-e", group, *words], GROUPS, folder) == 0
    return folder / "runs" / exp_id(GROUPS[group][0])


def scores(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]


def bits(run: Path) -> dict[str, str]:
    paths = [*(run / "checkpoints" / LAST).glob("*.safetensors"), run / "scores.jsonl"]
    assert len(paths) == 3
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def names(run: Path) -> set[str]:
    with safe_open(run / "checkpoints" / LAST / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def _compiler(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs of forward and backward, run as they are ("aot_eager") or, which takes a minute, as C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    shutil.rmtree(folder / "runs", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_a_compiled_training_has_one_graph_plain_names_and_ends_with_the_same_bits(folder: Path):
    counters.clear()
    run, plain = trained("compiled", folder), trained("plain", folder)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert names(run) == names(plain)
    for one, other in zip(scores(run), scores(plain), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)

    whole = bits(run)
    shutil.rmtree(run / "checkpoints" / LAST)
    (run / "status.json").unlink()
    assert bits(trained("compiled", folder)) == whole, "a run that was cut short"
    assert "continues from step 2" in (run / "logs" / "train.log").read_text()
    assert bits(trained("compiled", folder, "-r", "1", "--gradient_checkpointing", "--offload_activations")) == whole
    assert scores(trained("child", folder))[0]["train_loss"] < scores(plain)[0]["train_loss"], (
        "a plain child goes on from it"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
def test_the_decoder_of_a_cross_attention_model_is_compiled_for_fixed_lengths(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    trained("compiled", folder)
    capsys.readouterr()
    assert toy.main(["-e", "crossed", "--dry-run"], GROUPS, folder) == 1
    assert (
        "loop.compile: needs batches of one length, and those of 'qa' differ. Set data.fixed_length: true"
        in capsys.readouterr().err
    )
    counters.clear()
    assert "em" in scores(trained("fixed", folder))[-1]
    assert counters["stats"]["unique_graphs"] <= 2, "layers below the first block take no gradients"


@pytest.mark.parametrize("words", [["--gradient_checkpointing"], ["--offload_activations"]])
def test_less_memory_changes_no_bit(folder: Path, words: list[str]):
    run = trained("dropping", folder, "-r", "1")
    plain = bits(run)
    assert bits(trained("dropping", folder, "-r", "1", *words)) == plain
    is_logged = "3 layers save only their inputs for the backward pass" in (run / "logs" / "train.log").read_text()
    assert is_logged == ("--gradient_checkpointing" in words)


def test_without_a_compiler_the_training_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert toy.main(["-e", "compiled", "-r", "1"], GROUPS, folder) == 1
    assert (
        "loop.compile: torch.compile needs a compiler, but g++ or clang++ is not on the PATH" in capsys.readouterr().err
    )
