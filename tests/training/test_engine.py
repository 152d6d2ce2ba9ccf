"""However the processes share the model, the numbers are those of whole copies, and a checkpoint goes on where its mode allows it."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError
from src.experiments.identity import exp_id
from src.training.config import LoopConfig
from src.training.zero import filled
from tests import toy

EXP: dict[str, Any] = copy.deepcopy(toy.BASE)
EXP["loop"] |= {"steps": 6, "sequences_per_step": 8, "micro_batch": 4, "eval_every": 3, "max_grad_norm": 0.5}
TWICE = copy.deepcopy(EXP)
TWICE["loop"]["micro_batch"] = 2
LAST = f"step-{EXP['loop']['steps']:08d}"


class World:
    """A project with two experiments, that differ in accumulation, and runs by mode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        toy.write_data(folder / "data")
        self.root = toy.project(folder, f"EXP_GROUPS = {{'once': [{EXP!r}], 'twice': [{TWICE!r}]}}\n")
        for stage in (1, 2, 3):
            self.settings(f"zero{stage}", {"stage": stage})
        self.settings("offload", {"stage": 2, "offload_optimizer": {"device": "cpu"}})

    def settings(self, name: str, zero: dict[str, Any]) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))

    def start(self, mode: str, group: str = "once", processes: int = 2) -> str:
        """Run it to the end; the error messages, "" where there were none."""
        words = {"replicated": [], "fsdp": ["--fsdp"]}.get(mode, ["--deepspeed", str(self.folder / f"{mode}.json")])
        done = toy.run(self.root, ["-e", group, *words], self.folder, processes=processes)
        return done.stderr if done.returncode else ""

    def run(self, group: str = "once") -> Path:
        return self.folder / "runs" / exp_id(EXP if group == "once" else TWICE)

    def trained(self, mode: str, group: str = "once") -> Path:
        """The save directory of a finished run, moved aside."""
        kept = self.folder / f"{mode}-{group}"
        if not kept.exists():
            assert self.start(mode, group) == ""
            self.run(group).rename(kept)
        return kept


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("engine"))


def scores(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / LAST / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero1", "zero2", "zero3", "offload"])
def test_the_model_may_be_shared_without_a_change_of_bits(world: World, mode: str):
    if mode != "fsdp":
        pytest.importorskip("deepspeed", reason="needs deepspeed")
    assert scores(world.trained(mode)) == scores(world.trained("replicated"))
    assert weights(world.trained(mode)) == weights(world.trained("replicated"))
    assert scores(world.trained(mode))[-1]["clip_rate"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "exact"), [("fsdp", True), ("zero1", True), ("zero2", False)])
def test_accumulation_changes_rounding_where_each_pass_is_summed(world: World, mode: str, exact: bool):
    if mode != "fsdp":
        pytest.importorskip("deepspeed", reason="needs deepspeed")
    found, wanted = scores(world.trained(mode, "twice")), scores(world.trained("replicated", "twice"))
    if exact:
        assert found == wanted
    for one, other in zip(found, wanted, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-6)


def cut_back(world: World, mode: str) -> None:
    """The run as it was after the first of its two checkpoints."""
    shutil.copytree(world.trained(mode), world.run())
    shutil.rmtree(world.run() / "checkpoints" / LAST)
    (world.run() / "status.json").unlink()


@pytest.fixture(autouse=True)
def _begins_anew(world: World) -> None:
    shutil.rmtree(world.folder / "runs", ignore_errors=True)
    (world.folder / "runs").mkdir()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero3", "offload"])
def test_it_goes_on_with_the_same_bits(world: World, mode: str):
    if mode != "fsdp":
        pytest.importorskip("deepspeed", reason="needs deepspeed")
    cut_back(world, mode)
    assert world.start(mode) == ""
    assert "continues from step 3" in (world.run() / "logs" / "train.log").read_text()
    assert weights(world.run()) == weights(world.trained(mode))
    assert scores(world.run()) == scores(world.trained(mode))


@pytest.mark.slow
def test_what_two_shared_one_alone_continues(world: World):
    cut_back(world, "fsdp")
    assert world.start("replicated", processes=1) == ""
    found, wanted = scores(world.run())[-1], scores(world.trained("fsdp"))[-1]
    assert found["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "processes"), [("replicated", 1), ("zero1", 2)])
def test_shards_fit_only_those_that_wrote_them_until_they_are_put_together(world: World, mode: str, processes: int):
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    cut_back(world, "zero2")
    said = world.start(mode, processes=processes)
    checkpoint = world.run() / "checkpoints" / "step-00000003"
    assert f"python -m src.training.consolidate {checkpoint}" in said
    assert "its optimizer state is in DeepSpeed's shards, which do not fit" in said


LOOP = LoopConfig(**EXP["loop"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({}, "zero_optimization.stage: expected 1, 2 or 3, got null"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage: expected 1, 2 or 3, got 0"),
        ({"train_batch_size": 16}, "train_batch_size: 16, but the experiment makes it 8"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu: 1, but the experiment makes it 4"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 4, but the experiment makes it 2"),
        ({"gradient_clipping": 1.0}, r"gradient_clipping: 1.0, but the experiment makes it 0.5. Leave it out, or write \"auto\""),
        ({"bf16": {"enabled": True}}, "bf16.enabled: true, but the experiment makes it false"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer: the experiment says it, in loop.learning_rate"),
    ],
)
def test_settings_that_say_otherwise_are_refused(tmp_path: Path, given: Any, message: str):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **given} if given and isinstance(given, dict) else given))
    with pytest.raises(ConfigError, match=message):
        filled(path, LOOP)


def test_auto_is_filled_in_and_the_rest_is_kept(tmp_path: Path):
    path = tmp_path / "zero.json"
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7}
    path.write_text(
        json.dumps({"zero_optimization": zero, "train_batch_size": "auto", "bf16": {"enabled": "auto"}, "wall_clock_breakdown": True})
    )
    found = filled(path, LOOP)
    assert found["zero_optimization"] == {"stage": 3, "stage3_prefetch_bucket_size": 7}
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (8, 4, 2)
    assert found["wall_clock_breakdown"] is True
    assert "bf16" not in found
