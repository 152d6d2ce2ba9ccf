"""Statistics of tensors against a plain reference, the records that a training leaves of them, and that it ends with
the same bits."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from src.errors import DataError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.runs import jsonl_records
from src.training.loss import causal_lm_loss
from src.training.monitoring import activation_statistics, monitor, parameter_statistics, tensor_statistics
from src.training.monitoring.monitor import FILE, Monitor
from tests import toy


def reference(tensor: Tensor) -> dict[str, float]:
    """The eleven numbers as their names say, in float64 by numpy."""
    x = tensor.detach().double().numpy().ravel()
    a, n = np.abs(x), x.size
    numbers = [
        x.min(),
        x.max(),
        x.mean(),
        x.std(ddof=1),
        a.min(),
        a.max(),
        a.mean(),
        a.std(ddof=1),
        np.sqrt((x**2).sum()) / n,
        a.sum() / n,
    ]
    return dict(zip(tensor_statistics.NAMES, [*map(float, numbers), float((x != 0).sum())], strict=True))


TENSORS = {
    "normal": lambda: torch.randn(37, 53),
    "several pieces": lambda: torch.randn(3, 70_001) * 1e-3,
    "bfloat16": lambda: torch.randn(999).bfloat16(),
    "float16": lambda: torch.randn(999).half(),
    "near one": lambda: 1 + 1e-6 * torch.randn(70_000, dtype=torch.float64),
    "near minus one": lambda: -1 + 1e-4 * torch.randn(500),
    "half zeros": lambda: torch.relu(torch.randn(70_000)),
    "constant": lambda: torch.full((9,), 3.0),
    "transposed": lambda: torch.randn(40, 30).T[::2],
    "tiny": lambda: torch.randn(100) * 1e-30,
    "large": lambda: torch.randn(100) * 1e30,
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_numbers_are_those_of_a_plain_reference(name: str):
    tensor = TENSORS[name]()
    (numbers,) = tensor_statistics.to_rows(tensor_statistics.sums(tensor)[None]).tolist()
    expected = reference(tensor)
    assert dict(zip(tensor_statistics.NAMES, numbers, strict=True)) == pytest.approx(expected, rel=1e-8, abs=0)
    assert tensor_statistics.describe(tensor) == pytest.approx(expected, rel=1e-6, abs=0)


def test_undefined_statistics_are_null():
    nothing = dict.fromkeys(tensor_statistics.NAMES[:-1])
    assert tensor_statistics.describe(torch.empty(0, 3)) == {**nothing, "nonzero": 0}
    two = {**dict.fromkeys(tensor_statistics.NAMES[:-1], 2.0), "var_std": None, "abs_var_std": None, "nonzero": 1}
    assert tensor_statistics.describe(torch.tensor(2.0)) == two


def test_non_finite_elements_are_counted_without_an_error():
    description = tensor_statistics.describe(torch.tensor([1.0, math.nan, math.inf, 0.0]))
    assert description == {**dict.fromkeys(tensor_statistics.NAMES[:-1]), "nonzero": 3, "nonfinite": 2}
    description = tensor_statistics.describe(torch.tensor([1.0, math.inf, 0.0]))
    assert (description["var_min"], description["var_max"], description["abs_var_min"], description["nonfinite"]) == (
        0.0,
        None,
        0.0,
        1,
    )
    json.dumps(description, allow_nan=False)


def test_pieces_of_any_size_give_the_same_sums():
    tensor = torch.randn(1000) + 5
    pieces = [torch.empty(0), *tensor.split([1, 700, 299]), torch.empty(0)]
    joined_sums = tensor_statistics.join_sums(torch.stack([tensor_statistics.sums(piece) for piece in pieces]))
    assert joined_sums.tolist() == pytest.approx(tensor_statistics.sums(tensor).tolist(), rel=1e-12)


def test_nothing_of_autograd_or_autocast_is_left():
    tensor = torch.randn(10, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = tensor_statistics.sums(tensor)
    assert sums.dtype == torch.float64
    assert not sums.requires_grad


@pytest.fixture
def adam() -> tuple[nn.Module, torch.optim.AdamW, dict[str, Tensor]]:
    """A layer of which the weight is trained, after three steps of Adam without decay; and its weight before the
    last."""
    layer = nn.Linear(6, 4)
    layer.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([layer.weight], lr=0.1, weight_decay=0.0)
    before = {}
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(5, 6)).pow(2).sum().backward()
        before = {"weight": layer.weight.detach().clone()}
        optimizer.step()
    return layer, optimizer, before


def test_the_update_equals_the_change_of_the_last_step(adam: tuple[nn.Linear, torch.optim.AdamW, dict[str, Tensor]]):
    layer, optimizer, before = adam
    sums_by_context = {item.context: item for item in parameter_statistics.weights(layer, optimizer)}
    assert list(sums_by_context) == ["hp", "exp_avg", "exp_avg_sq", "effective_update"]
    movement = before["weight"].double() - layer.weight.detach().double()
    update = dict(
        zip(
            tensor_statistics.NAMES,
            tensor_statistics.to_rows(sums_by_context["effective_update"].sums[None])[0].tolist(),
            strict=True,
        )
    )
    assert update == pytest.approx(reference(movement / 0.1), rel=1e-4)
    moment = optimizer.state[layer.weight]["exp_avg"]
    assert tensor_statistics.rows(sums_by_context["exp_avg"].sums[None])[0] == pytest.approx(
        reference(moment), rel=1e-6
    )
    rates = parameter_statistics.update_rates(
        list(sums_by_context.values()), parameter_statistics.learning_rates(layer, optimizer)
    )
    assert rates == {"weight": pytest.approx(float(movement.norm() / layer.weight.detach().norm()), rel=1e-4)}


def test_only_trained_parameters_are_measured(adam: tuple[nn.Linear, torch.optim.AdamW, Any]):
    layer, optimizer, _ = adam
    assert [(item.name, item.context) for item in parameter_statistics.gradients(layer)] == [("weight", "hp_grad")]
    fresh = torch.optim.SGD([layer.weight], lr=0.1)
    assert [(item.name, item.context) for item in parameter_statistics.weights(layer, fresh)] == [("weight", "hp")]
    optimizer.zero_grad()
    assert parameter_statistics.gradients(layer) == []


class Inner(nn.Module):
    def forward(self, x: Tensor, *, ids: Tensor, scale: Tensor) -> Any:
        return x * scale, (x, {"ids": ids, "y": x}), None


class Outer(nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.first, self.inner, self.uses_checkpointing = nn.Linear(3, 3), Inner(), checkpointing

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.first, x, use_reentrant=False) if self.uses_checkpointing else self.first(x)
        assert x is not None
        y, _, _ = self.inner(x, ids=torch.arange(3), scale=torch.tensor(2.0))
        return {"y": y, "loss": y.sum()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_inputs_and_outputs_of_every_module_once(checkpointing: bool):
    model, activations = Outer(checkpointing), []
    x = torch.randn(2, 3, requires_grad=True)
    with activation_statistics.watch_activations(model, activations):
        model(x)["loss"].backward()  # which runs `first` once more when it is checkpointed
        model.first(x)
    names = [(item.name, item.type, item.context) for item in activations]
    assert names == [
        ("first", "Linear", "input[0]"),
        ("first", "Linear", "output"),
        ("inner", "Inner", "input[0]"),
        ("inner", "Inner", "input[scale]"),
        ("inner", "Inner", "output[0]"),
        ("inner", "Inner", "output[1][0]"),
        ("", "Outer", "input[0]"),
        ("", "Outer", "output[y]"),
        ("", "Outer", "output[loss]"),
    ]
    assert tensor_statistics.rows(activations[0].sums[None])[0] == pytest.approx(reference(x), rel=1e-6)
    assert tensor_statistics.rows(activations[1].sums[None])[0] == pytest.approx(reference(model.first(x)), rel=1e-6)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_hooks_go_when_the_forward_pass_fails():
    model = Outer(False)
    with pytest.raises(RuntimeError), activation_statistics.watch_activations(model, []):
        model(torch.randn(2, 4))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_compiled_model_gets_no_hooks(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    compiled: Any = torch.compile(nn.Linear(3, 3), backend="eager")
    watching = Monitor(tmp_path, compiled, 1)
    watching.before_step(1)
    with watching.forward(last=True):
        assert not any(module._forward_hooks for module in compiled.modules())
    assert "activations are not measured" in caplog.text


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("toy")
    return Places(toy.write_data(folder / "data"), folder / "runs")


def train(places: Places, watching: Monitor | None, checkpointing: bool = False, steps: int = 4) -> Iterator[Any]:
    """Train the toy model for some steps of two micro-batches, called as the loop calls; gives the model after each
    step."""
    config: Any = load_experiment(toy.BASE | {"model": toy.BASE["model"] | {"dropout_rate": 0.1}}, "toy")
    torch.manual_seed(0)
    model = config.model.build(places)
    if checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    if watching is not None:
        watching.model = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        if watching is not None:
            watching.before_step(step)
        for last in (False, True):
            ids = torch.randint(0, 30, (2, 12))
            ones = torch.ones_like(ids, dtype=torch.bool)
            batch = {"input_ids": ids, "attention_mask": ones, "loss_mask": ones & (torch.arange(12) > 0)}
            if watching is None:
                loss = causal_lm_loss(model, batch)
            else:
                with watching.forward(last):
                    loss = causal_lm_loss(model, batch)
            loss.backward()
        if watching is not None:
            watching.after_backward()
        optimizer.step()
        if watching is not None:
            watching.after_step(optimizer)
        optimizer.zero_grad()
        yield model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_not_one_bit_of_the_training_is_another(places: Places, tmp_path: Path, checkpointing: bool):
    *_, bare = train(places, None, checkpointing)
    rng = torch.get_rng_state()
    *_, monitored_model = train(places, Monitor(tmp_path, nn.Identity(), 1), checkpointing)
    for (name, one), other in zip(bare.state_dict().items(), monitored_model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(torch.get_rng_state(), rng)
    assert len(records(tmp_path)) > 1000


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_due_steps_have_every_tensor_once(places: Places, tmp_path: Path):
    watching = Monitor(tmp_path, nn.Identity(), 2)
    *_, model = train(places, watching)
    assert not any(module._forward_hooks for module in model.modules())
    all_records = records(tmp_path)
    assert {record["step"] for record in all_records} == {2, 4}
    keys = [(record["step"], record["name"], record.get("type"), record["context"]) for record in all_records]
    assert len(keys) == len(set(keys))
    names = {name for name, _ in model.named_parameters()}
    for context in ("hp", "hp_grad", "exp_avg", "exp_avg_sq", "effective_update"):
        assert {record["name"] for record in all_records if record["context"] == context} == names
    (last,) = [
        record
        for record in all_records
        if record["step"] == 4 and record["name"] == "transformer.ln_f.weight" and record["context"] == "hp"
    ]
    assert {name: last[name] for name in tensor_statistics.NAMES} == pytest.approx(
        reference(model.transformer.ln_f.weight), rel=1e-6
    )
    assert all(
        0 < record["update_rate"] < 1
        for record in all_records
        if record["context"] == "effective_update" and record["update_rate"]
    )
    modules = {record["name"] for record in all_records if "type" in record}
    assert {"", "transformer.h.2.attn", "lm_head"} <= modules


def test_only_the_last_pass_of_a_due_step_is_hooked(tmp_path: Path):
    layer = nn.Linear(2, 2)
    watching = Monitor(tmp_path, layer, 2)
    hook_counts = []
    for step, last in ((1, True), (2, False), (2, True), (3, True)):
        watching.before_step(step)
        with watching.forward(last):
            hook_counts.append(bool(layer._forward_hooks))
    assert hook_counts == [False, False, True, False]


def test_none_are_written_where_none_are_due(places: Places, tmp_path: Path):
    for every in (0, 5):
        list(train(places, Monitor(tmp_path, nn.Identity(), every)))
    assert not (tmp_path / FILE).exists()


def test_a_resumed_run_drops_records_that_it_repeats(places: Places, tmp_path: Path):
    list(train(places, Monitor(tmp_path, nn.Identity(), 1)))
    whole = (tmp_path / FILE).read_bytes()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"step": 5, "na')  # torn by a kill
    watching = Monitor(tmp_path, nn.Identity(), 1)
    watching.truncate(4)
    assert (tmp_path / FILE).read_bytes() == whole
    watching.truncate(2)
    content = (tmp_path / FILE).read_bytes()
    assert whole.startswith(content)
    assert [record["step"] for record in records(tmp_path)] == sorted(
        r["step"] for r in map(json.loads, whole.splitlines()) if r["step"] <= 2
    )
    watching.truncate(0)
    assert (tmp_path / FILE).read_bytes() == b""


def test_truncating_looks_from_the_end_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl_records, "_WINDOW", 64)
    for step in range(1, 60):
        jsonl_records.append(tmp_path / FILE, [{"step": step, "name": "x" * (step % 7)}] * 2)
    for step in (60, 59, 41, 3, 0):
        Monitor(tmp_path, nn.Identity(), 1).truncate(step)
        assert [record["step"] for record in records(tmp_path)] == [
            s for s in range(1, min(step, 59) + 1) for _ in range(2)
        ]
    jsonl_records.truncate_after(tmp_path / "nothing here" / FILE, 3, "a record")


def test_a_damaged_record_is_named(tmp_path: Path):
    (tmp_path / FILE).write_text('{"step": 1}\n[1]\n')
    with pytest.raises(DataError, match=r"statistics\.jsonl: not a record of statistics: '\[1\]'"):
        Monitor(tmp_path, nn.Identity(), 1).truncate(1)


def test_tensors_that_are_not_finite_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    watching = Monitor(tmp_path, layer, monitor.DEFAULT_EVERY)
    watching.before_step(monitor.DEFAULT_EVERY)
    with watching.forward(last=True):
        layer(torch.tensor([[math.inf, 1.0]])).sum().backward()
    watching.after_backward()
    watching.after_step(optimizer)
    assert "step 50: 3 of 6 tensors are not finite, the first weight hp_grad; see" in caplog.text
    (gradient,) = [
        record for record in records(tmp_path) if (record["name"], record["context"]) == ("weight", "hp_grad")
    ]
    assert (gradient["nonfinite"], gradient["var_max"], gradient["var_min"]) == (2, None, 1.0)
