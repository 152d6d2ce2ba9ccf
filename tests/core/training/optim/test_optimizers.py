"""Every optimizer on the real loop: it learns, goes on with the same bits, and heeds what a branch says; where it
cannot, it is refused."""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from src.data.text import tokenizers
from src.errors import ConfigError, RunError
from src.experiments.config import load
from src.experiments.identity import exp_id
from src.operations import interventions
from src.runs import ledger
from src.runs.checkpoints import checkpoints
from src.runs.context import Options
from src.support import distributed
from src.training.checkpointing.checkpoint import OPTIMIZER, CheckpointMetadata
from src.training.config import LoopConfig
from src.training.loop import fit
from src.training.monitoring import parameter_statistics, tensor_statistics
from src.training.optim import optimizers
from src.training.parallel import choice
from src.training.spec import TrainSpec
from tests.core.training import small

LOOP: dict[str, Any] = {"steps": 12, "sequences_per_step": 4, "micro_batch": 2, "learning_rate": 0.05, "eval_every": 4}
MIDDLE, STEPS = 8, 12
CPU = torch.device("cpu")
RATES = {"adamw": 0.05, "adamw_scale": 0.2, "adafactor": 0.2, "muon": 0.05, "groups": 0.05}
OPTIMIZERS = list(RATES)
GROUPS: dict[str, Any] = {
    "optimizer": "muon",
    "muon_learning_rate": 0.1,
    "layerwise_decay": 0.9,
    "groups": [
        {"match": "table", "optimizer": "adafactor"},
        {"match": "bias", "optimizer": "adamw_scale", "learning_rate": 0.2},
        {"match": "line", "weight_decay": 0.01},
    ],
}
STATE_NAMES = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "adamw_scale": {"step", "exp_avg", "exp_avg_sq", "scale"},
    "adafactor": {"step", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "RMS"},
    "muon": {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"},
    "groups": {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "scale", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"},
}


class Curve(nn.Module):
    """Learns a number for each token by an embedding, a layer of one matrix, a vector and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(32, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4, bias=False))])

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        tokens = batch["input_ids"][:, 1]
        return ((self.line(self.layers[0](self.table(tokens)))[:, 0] - tokens / 32) ** 2).sum()


def loop(optimizer: str, **changes: Any) -> LoopConfig:
    muon = {"muon_learning_rate": 0.1} if optimizer == "muon" else {}
    settings = GROUPS if optimizer == "groups" else {"optimizer": optimizer, **muon}
    return load(LoopConfig, {**LOOP, **settings, "learning_rate": RATES[optimizer], **changes}, "loop")


def train(folder: Path, optimizer: str, options: Options | None = None) -> dict[str, str]:
    """Train, or go on; hashes of what is left."""
    with small.open_run(folder, options) as run, distributed.stoppable():
        torch.manual_seed(0)
        about = CheckpointMetadata({}, tokenizers.load(run.places.data / "toy_tokenizer"))
        task = TrainSpec(
            Curve(), about, small.Numbers(), {}, lambda model, batch: model(batch), lambda _: {"val_loss": 0.0}
        )
        fit(task, run, loop(optimizer, schedule="inverse_sqrt", warmup_rate=0.25, warmup_start=0.5), seed=0)
    paths = [
        place(folder),
        *(checkpoints.folder(place(folder), STEPS) / name for name in ("model.safetensors", OPTIMIZER, "state.json")),
    ]
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in [paths[0] / "scores.jsonl", *paths[1:]]
    }


def place(folder: Path) -> Path:
    return folder / "runs" / exp_id(small.EXP)


def saved_state(folder: Path, step: int = STEPS) -> dict[str, Tensor]:
    """The optimizer's state in a checkpoint."""
    return load_file(checkpoints.folder(place(folder), step) / OPTIMIZER)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_data(tmp_path_factory.mktemp("optimizers"))


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    (tmp_path / "data").symlink_to(data / "data")
    return tmp_path


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_cut_short_ends_with_the_same_bits(folder: Path, optimizer: str):
    whole = train(folder, optimizer, Options(statistics_every=5))
    assert {name.rsplit("::")[-1] for name in saved_state(folder)} == STATE_NAMES[optimizer]
    assert len({name.rsplit("::")[0] for name in saved_state(folder)}) == 4
    shutil.rmtree(checkpoints.folder(place(folder), STEPS))
    (place(folder) / "status.json").unlink()
    assert train(folder, optimizer) == whole
    assert [event["step"] for event in ledger.read(place(folder)) if event["event"] == "start"] == [0, MIDDLE]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_branch_has_its_rate_and_can_reset_the_moments(folder: Path, optimizer: str):
    whole, run = train(folder, optimizer), place(folder)
    before = load_file(checkpoints.folder(run, STEPS) / "model.safetensors")
    assert interventions.main(["rewind", str(run), "--to", str(MIDDLE), "--lr", "hold0:20"]) == 0
    train(folder, optimizer)
    weights = [load_file(checkpoints.folder(run, step) / "model.safetensors") for step in (MIDDLE, STEPS)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in before), "a rate of 0 moves nothing"
    assert interventions.main(["undo", str(run)]) == 0
    assert interventions.main(["rewind", str(run), "--to", str(MIDDLE), "--reset-optimizer"]) == 0
    reset = train(folder, optimizer)
    assert {float(value) for name, value in saved_state(folder).items() if name.endswith("::step")} == {STEPS - MIDDLE}
    assert reset["model.safetensors"] != whole["model.safetensors"]


def test_a_reset_of_the_optimizer_that_a_start_would_pass_by_is_refused(folder: Path):
    train(folder, "adamw")
    run = place(folder)
    assert interventions.main(["rewind", str(run), "--to", str(MIDDLE), "--reset-optimizer"]) == 0
    (checkpoints.folder(run, MIDDLE) / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        RunError,
        match=f"branch 1: it resets the optimizer at step {MIDDLE}, but the checkpoint of that step is damaged",
    ):
        train(folder, "adamw")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_learns(optimizer: str):
    torch.manual_seed(0)
    model, losses = Curve(), []
    its = optimizers.build_optimizer(model, loop(optimizer), CPU)
    for _ in range(200):
        its.zero_grad()
        loss = model({"input_ids": torch.arange(32).expand(2, 32).T})
        loss.backward()
        its.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20


def test_adafactor_is_that_of_t5():
    weight = nn.Parameter(torch.full((2, 2), 2.0))
    its = optimizers.build_optimizer(nn.ParameterList([weight]), loop("adafactor"), CPU)
    weight.grad = torch.tensor([[1.0, 1.0], [1.0, 3.0]])
    its.step()
    # β̂₂ is 0 in the first step: rows' means of squares (1, 5), columns' (1, 5), so v = [[1, 5], [5, 25]] / 3; the
    # update g/√v has the squares 3, 0.6, 0.6 and 1.08, whose mean of 1.32 is above 1: it is divided by √1.32, and
    # multiplied with 2, the size of the weight.
    expected = 0.2 * 2 * torch.tensor([[3, 0.6], [0.6, 1.08]]).sqrt() / 1.32**0.5
    torch.testing.assert_close(2 - weight.detach(), expected)


def test_adafactor_follows_a_schedule_above_its_own_relative_step():
    weight, rate = nn.Parameter(torch.ones(4)), 0.5
    its, before = (
        optimizers.build_optimizer(nn.ParameterList([weight]), loop("adafactor", learning_rate=rate), CPU),
        weight.detach(),
    )
    for _ in range(9):
        before = weight.detach().clone()
        weight.grad = torch.ones(4)
        its.step()
    # 1/√9 = 1/3 of the weight is where PyTorch's, and relative steps, would end
    torch.testing.assert_close(before - weight.detach(), rate * before)


@pytest.mark.parametrize("setting", [{"adam_beta1": 0.8}, {"adam_beta2": 0.99}, {"adam_epsilon": 1e-8}])
def test_adafactor_rejects_settings_of_adam(setting: dict[str, float]):
    (name,) = setting
    with pytest.raises(
        ConfigError,
        match=rf"loop: {name}: ignored by optimizer 'adafactor'\. Remove it\.",
    ):
        loop("adafactor", **setting)
    assert getattr(loop("adamw_scale", **setting), name) == setting[name]


def test_an_unknown_optimizer_error_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"loop\.optimizer: unknown value 'adamwscale'\. Did you mean 'adamw_scale'\?"
    ):
        load(LoopConfig, {**LOOP, "optimizer": "adamwscale"}, "loop")


@pytest.mark.parametrize(
    ("optimizer", "options", "instead"),
    [
        ("adamw_scale", {"deepspeed": Path("zero.json")}, "Use --fsdp instead of --deepspeed, or 'adamw'"),
        (
            "adafactor",
            {"deepspeed": Path("zero.json")},
            r"Use full copies \(neither --deepspeed nor --fsdp\), or 'adamw'",
        ),
        ("adafactor", {"fsdp": True}, r"Leave out --fsdp, or use 'adamw_scale' or 'adamw'"),
        ("muon", {"fsdp": True}, r"Leave out --fsdp, or use 'adamw_scale' or 'adamw'"),
        ("muon", {"deepspeed": Path("zero.json")}, r"Use full copies"),
    ],
)
def test_where_tensors_are_in_parts_it_says_what_to_use(optimizer: str, options: dict[str, Any], instead: str):
    with pytest.raises(ConfigError, match=rf"^loop\.optimizer: '{optimizer}' needs .*{instead}"):
        choice.build_accelerator(loop(optimizer), Options(**options))


@pytest.mark.parametrize("optimizer", ["adamw_scale", "adafactor"])
def test_statistics_are_of_what_there_is(optimizer: str):
    model = Curve()
    its, before = optimizers.build_optimizer(model, loop(optimizer), CPU), dict[str, Tensor]()
    for _ in range(3):
        its.zero_grad()
        model({"input_ids": torch.arange(32).expand(2, 32).T}).backward()
        before = {name: value.detach().to(torch.float64, copy=True) for name, value in model.named_parameters()}
        its.step()
    tensor_sums = parameter_statistics.weights(model, its)
    assert {item.name for item in tensor_sums if item.context == "hp"} == set(before)
    updates = {item.name: item.sums for item in tensor_sums if item.context == "effective_update"}
    if optimizer == "adafactor":
        assert not updates
        return
    for name, parameter in model.named_parameters():
        movement = (before[name] - parameter.detach().double()) / RATES[optimizer]
        assert tensor_statistics.norms(updates[name][None])[0] == pytest.approx(float(movement.norm()), rel=1e-3)
