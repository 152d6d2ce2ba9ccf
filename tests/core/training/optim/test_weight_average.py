"""The moving average of the weights is torch's, is evaluated, saved, restored and exported."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

from src.errors import CheckpointError, ConfigError
from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.models.export import main as export
from src.runs.checkpoints import checkpoints
from src.runs.context import Options
from src.support.weights import AVERAGE
from src.training.optim.weight_average import WeightAverage
from src.training.parallel import choice
from tests import toy

EXP = override(toy.BASE, {"loop.ema": 0.8, "loop.best_metric": "val_loss_ema"})
GROUPS = {"ema": [EXP], "plain": [toy.BASE]}
OPTIONS = ["--log_every", "1"]


def small_model(bias: bool = True) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 5, bias), nn.Linear(5, 2))
    model[1].bias.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema")
    toy.write_data(folder / "data")
    for group in GROUPS:
        assert toy.main(["-e", group, *OPTIONS], GROUPS, folder) == 0
    return folder


def checkpoint_of(folder: Path, step: int = 12) -> Path:
    return checkpoints.folder(folder / "runs" / exp_id(EXP), step)


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.999])
def test_average_is_that_of_torch_to_the_last_bit(decay: float):
    model = small_model()
    expected, average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)), WeightAverage(model, decay)
    for step in range(6):
        torch.manual_seed(step)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight += torch.randn_like(weight)
        expected.update_parameters(model)
        average.update()
    expected_tensors = {name.removeprefix("module."): weight for name, weight in expected.named_parameters()}
    tensors = average.tensors()
    assert tensors.keys() == {"0.weight", "0.bias", "1.weight"}
    assert all(torch.equal(tensor, expected_tensors[name]) for name, tensor in tensors.items())
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_weights_are_unchanged_after_an_evaluation_that_fails():
    model = small_model()
    average = WeightAverage(model, 0.5)
    average.update()
    first = average.tensors()["0.weight"]
    with torch.no_grad():
        model[0].weight += 1
    before = {name: weight.clone() for name, weight in model.named_parameters()}

    def evaluate() -> dict[str, float]:
        assert torch.equal(model[0].weight, first), "evaluated on the average"
        raise InterruptedError

    with pytest.raises(InterruptedError):
        average.scores(evaluate)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert torch.equal(average.tensors()["0.weight"], first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_in_16_bits_are_those_of_the_average_and_later_ones_those_of_the_weights(dtype: torch.dtype):
    model = small_model()
    average = WeightAverage(model, 0.5)
    average.update()

    def evaluate() -> dict[str, float]:
        with torch.no_grad():
            return {"score": model(torch.ones(3)).sum().item()}

    with torch.autocast("cpu", dtype):
        first = evaluate()["score"]
    with torch.no_grad():
        model[0].weight += 1
        model[1].weight *= 2
    with torch.autocast("cpu", dtype):
        changed = evaluate()
        assert changed["score"] != first
        assert average.scores(evaluate) == {"score_ema": first}
        assert evaluate() == changed


def test_training_is_unchanged_and_each_evaluation_has_the_scores_of_the_average(world: Path):
    rows, plain_rows = (toy.evaluations(world, exp_id(exp)) for exp in (EXP, toy.BASE))
    extra = ("val_loss_ema", "val_perplexity_ema")
    assert [{name: value for name, value in row.items() if name not in extra} for row in rows] == plain_rows
    assert all(row[name] != row[name.removesuffix("_ema")] for row in rows for name in extra)


def test_the_best_checkpoint_is_that_of_the_best_average(world: Path):
    losses = {row["step"]: row["val_loss_ema"] for row in toy.evaluations(world, exp_id(EXP))}
    assert checkpoints.best_step(world / "runs" / exp_id(EXP)) == min(losses, key=lambda step: losses[step])


def test_only_checkpoints_of_such_a_training_have_the_average(world: Path):
    assert (checkpoint_of(world) / AVERAGE).exists()
    assert not (checkpoints.folder(world / "runs" / exp_id(toy.BASE), 12) / AVERAGE).exists()


def test_another_model_is_refused(tmp_path: Path):
    average = WeightAverage(small_model(bias=False), 0.5)
    average.update()
    save_file(average.tensors(), tmp_path / AVERAGE)
    with pytest.raises(CheckpointError, match=r"ema\.safetensors: .*0\.bias"):
        WeightAverage(small_model(), 0.5).load(tmp_path)


@pytest.mark.parametrize("options", [Options(fsdp=True), Options(deepspeed=Path("zero.json"))], ids=["fsdp", "zero"])
def test_sharded_models_are_refused(options: Options):
    loop: Any = load_experiment(EXP, "").loop  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"loop\.ema: 0\.8"):
        choice.build_accelerator(loop, options)


def test_scores_of_the_average_need_an_average(tmp_path: Path):
    loop: Any = load_experiment(EXP, "").loop  # type: ignore[attr-defined]
    loop.check(["val_loss"])
    with pytest.raises(ConfigError, match="val_loss_ema"):
        loop.model_copy(update={"ema": None}).check(["val_loss"])


def test_memory_plan_counts_the_average(world: Path):
    places = Places(world / "data", world / "runs")
    machines = {"gpus": 1, "gpu": "H100"}
    plans = [load_experiment(exp, "").plan_memory(places, **machines) for exp in (EXP, toy.BASE)]  # type: ignore[attr-defined]
    assert plans[0].parts["optimizer"] - plans[1].parts["optimizer"] == 4 * plans[0].trained


def test_export_of_the_average_is_loaded_by_transformers(world: Path, tmp_path: Path):
    folders = ["--data_path", str(world / "data"), "-sb", str(world / "runs")]
    run = world / "runs" / exp_id(EXP)
    assert export([str(run), str(tmp_path / "out"), "--ema", *folders]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_file(checkpoint_of(world) / AVERAGE).items())
    plain = world / "runs" / exp_id(toy.BASE)
    assert export([str(plain), str(tmp_path / "plain"), "--ema", *folders]) == 1


def test_a_continuation_continues_the_average_of_its_parent(world: Path, tmp_path: Path):
    folder = tmp_path / "continued"
    shutil.copytree(world, folder)
    child = override(EXP, {"model": ref(EXP, step=11)})
    without = override(toy.BASE, {"model": ref(EXP, step=11)})
    fresh = override(EXP, {"model": ref(toy.BASE, step=11)})
    groups = {**GROUPS, "child": [child], "without": [without], "fresh": [fresh]}
    assert toy.main(["-e", "child", "without", "fresh", *OPTIONS], groups, folder) == 0
    assert toy.rows(folder, exp_id(child)) == toy.rows(world, exp_id(EXP))[-1:]
    (row,) = toy.rows(folder, exp_id(fresh))
    assert row["val_loss_ema"] == row["val_loss"], "after its first step, the average is the weights"
    assert "val_loss_ema" not in toy.rows(folder, exp_id(without))[0]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_resume_after_kills_is_bit_exact(tmp_path: Path, processes: int):
    toy.write_data(tmp_path / "data")
    root = toy.project(tmp_path, f"EXP_GROUPS = {GROUPS!r}\n")
    run = tmp_path / "runs" / exp_id(EXP)
    assert toy.run(root, ["-e", "ema", *OPTIONS], tmp_path, processes).returncode == 0
    rows, average = toy.rows(tmp_path, exp_id(EXP)), (checkpoint_of(tmp_path) / AVERAGE).read_bytes()
    shutil.rmtree(run)
    for _ in range(3):
        if processes == 1:
            toy.kill_midway(root, ["-e", "ema", *OPTIONS], tmp_path, exp_id(EXP))
        else:
            process = toy.run(root, ["-e", "ema", *OPTIONS, "--stop_after", "0"], tmp_path, processes)
            assert process.returncode != 0
    assert toy.run(root, ["-e", "ema", *OPTIONS], tmp_path, processes).returncode == 0
    assert toy.rows(tmp_path, exp_id(EXP)) == rows
    assert (checkpoint_of(tmp_path) / AVERAGE).read_bytes() == average
