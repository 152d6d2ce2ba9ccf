"""Adapters through the command line: they learn, a killed run ends with the same bits, and however processes share the
model."""

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from src.experiments.grid import ref
from src.experiments.identity import exp_id
from tests import toy

MATRICES = ["c_attn", "c_fc", "c_proj"]
LORA: dict[str, Any] = copy.deepcopy(toy.BASE)
LORA["model"] = {
    "name": "lora",
    "rank": 4,
    "alpha": 8.0,
    "dropout_rate": 0.1,
    "target_modules": MATRICES,
    "base": ref(toy.BASE),
}
LORA["loop"] |= {"steps": 6, "eval_every": 3, "micro_batch": 4}
CHILD: dict[str, Any] = {**LORA, "model": ref(LORA)}
CROSS_ATTENTION: dict[str, Any] = copy.deepcopy(toy.CROSSATTN)
CROSS_ATTENTION["model"] = {
    "name": "lora",
    "rank": 2,
    "alpha": 4.0,
    "target_modules": ["c_attn"],
    "base": toy.CROSSATTN["model"],
}
CROSS_ATTENTION["loop"] |= {"steps": 4, "eval_every": 4}
GROUPS = {"base": [toy.BASE], "lora": [LORA], "child": [CHILD], "crossed": [CROSS_ATTENTION]}
LAST = f"step-{LORA['loop']['steps']:08d}"


class World:
    """A trained base and runs on it, by mode."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "runs" / exp_id(LORA)
        toy.write_data(folder / "data")
        self.root = toy.project(folder, f"EXP_GROUPS = {GROUPS!r}\n")
        for stage in (2, 3):
            (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        assert toy.main(["-e", "base"], GROUPS, folder) == 0

    def start(self, mode: str) -> None:
        words = {"alone": [], "replicated": [], "fsdp": ["--fsdp"]}.get(
            mode, ["--deepspeed", str(self.folder / f"{mode}.json")]
        )
        done = toy.run(self.root, ["-e", "lora", *words], self.folder, processes=1 if mode == "alone" else 2)
        assert done.returncode == 0, done.stderr

    def trained(self, mode: str) -> Path:
        """The save directory of a finished run, moved aside."""
        folder = self.folder / mode
        if not folder.exists():
            shutil.rmtree(self.run, ignore_errors=True)
            self.start(mode)
            self.run.rename(folder)
        return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("lora"))


def scores(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]


def bits(run: Path) -> dict[str, str]:
    """Of what a training leaves, hashed."""
    paths = [*(run / "checkpoints" / LAST).glob("*.safetensors"), run / "scores.jsonl"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def names(run: Path, step: str = LAST) -> set[str]:
    with safe_open(run / "checkpoints" / step / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_adapters_are_trained_saved_and_started_from(world: World):
    run = world.trained("alone")
    shutil.copytree(run, world.run, dirs_exist_ok=True)
    rows = scores(run)
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
    assert names(run) == {
        f"transformer.h.{layer}.{part}.lora_{matrix}.default.weight"
        for layer in range(3)
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        for matrix in "AB"
    }
    assert toy.main(["-e", "child"], GROUPS, world.folder) == 0
    child = world.folder / "runs" / exp_id(CHILD)
    assert names(child) == names(run)
    assert scores(child)[0]["train_loss"] < rows[0]["train_loss"], "it began where its parent ended"


def test_a_run_that_was_cut_short_ends_with_the_same_bits(world: World):
    shutil.rmtree(world.run, ignore_errors=True)
    shutil.copytree(world.trained("alone"), world.run)
    shutil.rmtree(world.run / "checkpoints" / LAST)
    (world.run / "status.json").unlink()
    world.start("alone")
    assert "continues from step 3" in (world.run / "logs" / "train.log").read_text()
    assert bits(world.run) == bits(world.trained("alone"))


def test_the_decoder_below_cross_attention_is_adapted(world: World):
    assert toy.main(["-e", "crossed"], GROUPS, world.folder) == 0
    run = world.folder / "runs" / exp_id(CROSS_ATTENTION)
    tensor_names = names(run, "step-00000004")
    assert {name.split(".")[0] for name in tensor_names} == {"base", "blocks"}
    assert all(".lora_" in name for name in tensor_names if name.startswith("base."))
    assert "em" in scores(run)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero2", "zero3"])
def test_sharded_training_with_adapters(world: World, mode: str):
    if mode != "fsdp":
        pytest.importorskip("deepspeed", reason="needs deepspeed")
    assert scores(world.trained(mode)) == scores(world.trained("replicated"))
    assert bits(world.trained(mode))["model.safetensors"] == bits(world.trained("replicated"))["model.safetensors"]
