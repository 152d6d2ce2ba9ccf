"""Products in float8: near those in bfloat16, of the matrices that are trained alone, and without a trace in what a
checkpoint holds.

`test_all_of_this_with_torchao` runs the tests that need it. Widths are multiples of 16, as the kernels need. Without a
GPU torchao rounds as in float8 and multiplies in float32.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import T5Config, T5ForConditionalGeneration

import src.training.config
from src.config import Places
from src.errors import ConfigError
from src.experiments.grid import override
from src.interfaces import load_experiment
from src.models.cross_attention.config import Config
from src.models.cross_attention.layers import CrossAttentionLM
from src.registry import MODELS, RECIPES, bind
from src.runs.context import Options
from src.training.config import LoopConfig
from src.training.loss import causal_lm_loss, context_lm_loss, seq2seq_loss
from src.training.parallel import choice, memory
from src.training.parallel import compile as compilation
from src.training.parallel.engine import DDPEngine, Engine
from src.training.parallel.float8 import convert_layers
from src.weights import trained_weights
from tests import toy
from tests.conftest import ROOT
from tests.models.conftest import PLACEHOLDER, make_base
from tests.training.parallel.test_linear_cross_entropy import CONTEXT, LM, SEQ2SEQ

INSTALLED = find_spec("torchao") is not None
FOLDER = Path(os.environ.get("TORCHAO", ROOT / ".venv" / "float8"))
"""Where .ci/float8 installs it."""
needs_torchao = pytest.mark.skipif(not INSTALLED, reason="torchao is not installed here")
SCALINGS = ["tensorwise", "rowwise"]
LOSS, GRADIENT = 0.01, 0.25
"""Tolerances of these small models: of the loss, and of all gradients together by their norm. The mantissas of float8
have 3 bits, those of gradients scaled tensorwise 2, and a sum over 64 numbers averages little of it out."""
LOOP: dict[str, Any] = {
    "steps": 1,
    "sequences_per_step": 1,
    "micro_batch": 1,
    "learning_rate": 1e-3,
    "eval_every": 1,
    "precision": "bfloat16",
}
EXP = override(toy.BASE, {"loop.precision": "bfloat16", "loop.float8": "tensorwise"})


def llama(**sizes: Any) -> nn.Module:
    return make_base(
        "llama",
        **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.1, **sizes},
    )


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def crossing(train_all_params: bool) -> nn.Module:
    config = Config(num_layers=1, stride=1, base=bind(MODELS, PLACEHOLDER), train_all_params=train_all_params)
    return CrossAttentionLM(config, llama())  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], dict[str, Tensor], int]] = {
    "llama": (llama, causal_lm_loss, LM, 14),
    "gpt_bigcode": (
        partial(make_base, "gpt_bigcode", hidden_size=64, num_hidden_layers=2, initializer_range=0.1),
        causal_lm_loss,
        LM,
        8,
    ),
    "t5": (t5, seq2seq_loss, SEQ2SEQ, 32),
    "cross_attention": (partial(crossing, False), context_lm_loss, LM | CONTEXT, 7),
    "all of cross_attention": (partial(crossing, True), context_lm_loss, LM | CONTEXT, 21),
}
"""Model, loss, batch, and the matrices that are converted: of each layer, never the output projection."""


def gradients(model: nn.Module, loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a pass in bfloat16, and the loss itself."""
    device = next(model.parameters()).device
    torch.manual_seed(5)
    with torch.autocast(device.type, torch.bfloat16):
        value = loss(model.train(), {name: tensor.to(device) for name, tensor in batch.items()})
    value.backward()
    return {
        "loss": value.detach(),
        **{name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None},
    }


def distance(result: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients, as a part of the norm of `wanted`."""
    assert result.keys() == expected.keys()
    pairs = [(result[name].cpu(), expected[name].cpu()) for name in expected if name != "loss"]
    return float(sum((a - b).square().sum() for a, b in pairs) ** 0.5 / sum(b.square().sum() for _, b in pairs) ** 0.5)


@pytest.mark.slow
@pytest.mark.skipif(INSTALLED, reason="torchao is installed, so they run as they are")
@pytest.mark.skipif(not FOLDER.exists(), reason="no torchao: .venv/float8 not found; `bash .ci/float8` installs it")
def test_all_of_this_with_torchao():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    environment = toy.environment() | {"PYTHONPATH": str(FOLDER)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "torchao is not installed here" not in done.stdout


@needs_torchao
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_near_those_of_bfloat16(case: str, scaling: str):
    make, loss, batch, count = CASES[case]
    model = make()
    assert convert_layers(model, scaling, emulate=True) == count
    result, expected = gradients(model, loss, batch), gradients(make(), loss, batch)
    assert result["loss"].item() == pytest.approx(expected["loss"].item(), rel=LOSS)
    assert 0.02 < distance(result, expected) < GRADIENT


@needs_torchao
@pytest.mark.parametrize("scaling", SCALINGS)
def test_some_steps_go_the_same_way(scaling: str):
    losses: dict[bool, list[float]] = {}
    for converted in (False, True):
        model = llama()
        if converted:
            convert_layers(model, scaling, emulate=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[converted] = []
        for _ in range(8):
            losses[converted].append(gradients(model, causal_lm_loss, LM)["loss"].item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[False][-1] < 0.8 * losses[False][0]
    assert losses[True] == pytest.approx(losses[False], abs=LOSS * losses[False][0])


class Layered(nn.Module):
    """Layers of one matrix, of which the first is frozen, and a matrix behind them."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(*each)) for each in sizes)
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(sizes[-1][1], 32)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def converted(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if type(part).__name__ == "Float8Linear"]


@needs_torchao
def test_unsuitable_matrices_stay_unchanged():
    model = Layered((32, 32), (32, 48), (48, 40), (40, 32), (32, 32))
    assert convert_layers(model, "tensorwise", emulate=True) == 2
    assert converted(model) == ["layers.1.0", "layers.4.0"]
    with pytest.raises(
        ConfigError, match=r"loop\.float8: the layers of Layered have no trained nn\.Linear .* multiples of 16"
    ):
        convert_layers(Layered((32, 32), (32, 40)), "tensorwise")


@needs_torchao
def test_adapters_stay_as_they_are():
    peft = pytest.importorskip("peft")
    model = llama()
    peft.inject_adapter_in_model(peft.LoraConfig(r=16, target_modules=["q_proj"]), model)
    with pytest.raises(ConfigError, match=r"no trained nn\.Linear .* \(adapters aside\)"):
        convert_layers(model, "rowwise")
    assert not converted(model)


@needs_torchao
@pytest.mark.parametrize("tokens", [16, 10])
@pytest.mark.parametrize(("scaling", "of_gradients"), [("tensorwise", 2**-3), ("rowwise", 2**-4)])
def test_each_number_is_rounded_once(scaling: str, of_gradients: float, tokens: int):
    """A product is off by the rounding of its operands: 2^-4 of a number with 3 bits of mantissa, 2^-3 of one with
    2."""
    torch.manual_seed(0)
    plain, model = Layered((32, 32), (32, 48)), Layered((32, 32), (32, 48))
    model.load_state_dict(plain.state_dict())
    convert_layers(model, scaling, emulate=True)
    inputs, upstream = torch.randn(tokens, 32), torch.randn(tokens, 48)
    results = []
    for layer in (plain.layers[1], model.layers[1]):
        x = inputs.clone().requires_grad_()
        y = layer(x)
        y.backward(upstream)
        results.append((y.detach(), x.grad, layer[0].weight.grad))  # type: ignore[index]
    weight = plain.layers[1][0].weight.detach()  # type: ignore[index]
    one, other = 2**-4, of_gradients
    bounds = [
        (one + one + one * one) * inputs.abs() @ weight.T.abs(),
        (one + other + one * other) * upstream.abs() @ weight.abs(),
        (one + other + one * other) * upstream.T.abs() @ inputs.abs(),
    ]
    for expected, result, bound in zip(*results, bounds, strict=True):
        assert ((result - expected).abs() <= bound + 1e-3).all()
        assert (result - expected).norm() > 0.01 * expected.norm()


@needs_torchao
@pytest.mark.parametrize("case", ["llama", "t5"])
def test_checkpoints_and_scores_show_no_trace_of_it(case: str):
    make, loss, batch, _ = CASES[case]
    model, plain = make().eval(), make().eval()
    convert_layers(model, "tensorwise", emulate=True)
    result, expected = trained_weights(model), trained_weights(plain)
    assert list(result) == list(expected)
    assert all(
        result[name].dtype == expected[name].dtype and torch.equal(result[name], expected[name]) for name in expected
    )
    assert type(result["lm_head.weight" if case == "llama" else "shared.weight"]) is Tensor
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(model, batch), loss(plain, batch))


@needs_torchao
def test_a_training_converts_its_layers_before_they_are_compiled_and_computed_again():
    model: Any = llama()
    choice.change_layers(
        model,
        LoopConfig.model_validate({**LOOP, "float8": "rowwise", "compile": True}),
        Options(gradient_checkpointing="full"),
    )
    assert len(converted(model)) == 14
    for layer in model.model.layers:
        assert isinstance(layer.forward.forward, compilation.Compiled)
    assert model.model.layers[0].mlp.up_proj.config.cast_config_weight.scaling_granularity.name == "AXISWISE"
    choice.change_layers(unchanged := llama(), LoopConfig.model_validate(LOOP), Options())
    assert not converted(unchanged)


@needs_torchao
@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_can_be_recomputed(how: str):
    model, again = llama(), llama()
    convert_layers(model, "tensorwise", emulate=True)
    convert_layers(again, "tensorwise", emulate=True)
    assert memory.checkpoint_layers(again, how) == 2
    expected, result = gradients(model, causal_lm_loss, LM), gradients(again, causal_lm_loss, LM)
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@needs_torchao
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # of torch's own compiler
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_layers_multiply_in_float8_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, model = llama(), llama()
    for each in (plain, model):
        convert_layers(each, "rowwise", emulate=True)
    compilation.compile_layers(model)
    result, expected = gradients(model, causal_lm_loss, LM), gradients(plain, causal_lm_loss, LM)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert distance(result, expected) < 0.05
    torch._dynamo.reset()


def shared() -> None:
    """Print the distance of FSDP2's gradients in float8 from those of a whole copy in bfloat16, and the dtypes of its
    weights."""
    from src.training.parallel.fsdp import FSDPEngine

    loop, losses = LoopConfig.model_validate(LOOP), []
    engines: list[Callable[..., Engine]] = [DDPEngine, FSDPEngine]
    for make in engines:
        model = llama()
        if make is FSDPEngine:
            convert_layers(model, "tensorwise", emulate=True)
        engine = make(choice.plain_accelerator("bfloat16", "precision"), model, loop)
        with engine.accelerator.autocast():
            loss = causal_lm_loss(engine.model, LM)
        engine.backward(loss, True)
        grads = {name: weight.grad for name, weight in model.named_parameters()}
        whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
        losses.append({"loss": loss.detach(), **whole})
    dtypes = sorted({str(p.dtype) for p in model.parameters()})
    print(json.dumps([distance(losses[1], losses[0]), losses[1]["loss"].item() / losses[0]["loss"].item(), dtypes]))


@needs_torchao
@pytest.mark.slow
def test_shared_by_fsdp():
    code = "from tests.training.parallel.test_float8 import shared; shared()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=toy.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    apart, ratio, dtypes = json.loads(done.stdout)
    assert 0.02 < apart < GRADIENT
    assert ratio == pytest.approx(1, rel=LOSS)
    assert dtypes == ["torch.float32"]


@needs_torchao
@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with float8"
)
def test_a_gpu_multiplies_as_it_is_emulated(scaling: str):
    results = []
    for emulate in (False, True):
        model = llama().cuda()
        convert_layers(model, scaling, emulate=emulate)
        results.append(gradients(model, causal_lm_loss, {name: tensor.cuda() for name, tensor in LM.items()}))
    assert results[0]["loss"].item() == pytest.approx(results[1]["loss"].item(), rel=LOSS / 2)
    assert distance(results[0], results[1]) < GRADIENT / 2


def test_it_needs_bfloat16():
    for precision in ("float32", "float16"):
        with pytest.raises(
            ConfigError, match=r"x\.loop: float8 needs precision 'bfloat16' for all else, and it is 'float"
        ):
            load_experiment(override(EXP, {"loop.precision": precision}), "x")


@pytest.mark.parametrize("recipe", RECIPES.modules)
def test_losses_that_compare_passes_refuse_it(recipe: str):
    from exp_configs import EXP_GROUPS

    exp = next(exp for group in EXP_GROUPS.values() for exp in group if exp["recipe"] == recipe and exp.get("loop"))
    exp = override(exp, {"loop.float8": "rowwise", "loop.precision": "bfloat16"})
    if recipe in ("dpo", "grpo", "ppo"):
        with pytest.raises(ConfigError, match=r"loop\.float8: this recipe compares training passes with passes"):
            load_experiment(exp, "x")
    else:
        assert load_experiment(exp, "x")


def test_without_torchao_a_dry_run_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    toy.write_data(tmp_path / "data")
    monkeypatch.setattr(src.training.config, "find_spec", lambda name: None)
    assert toy.main(["-e", "x", "--dry-run"], {"x": [EXP]}, tmp_path) == 1
    assert (
        "loop.float8: 'tensorwise' needs a package that is not installed: pip install -r requirements/float8.txt"
        in capsys.readouterr().err
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused():
    loop = LoopConfig.model_validate({**LOOP, "float8": "tensorwise"})
    with pytest.raises(
        ConfigError,
        match=r"^loop\.float8: 'tensorwise' needs a GPU of compute capability 8\.9 or more .* Leave it out\.$",
    ):
        choice.build_accelerator(loop, Options())
    with pytest.raises(ConfigError, match=r"^loop\.float8: 'tensorwise' needs a GPU"):
        load_experiment(EXP, "x").check_device()


def test_deepspeed_refuses_it():
    loop = LoopConfig.model_validate({**LOOP, "float8": "tensorwise"})
    with pytest.raises(ConfigError, match=r"^loop\.float8: DeepSpeed trains without it\. Use --fsdp"):
        choice.build_accelerator(loop, Options(deepspeed=ROOT / "resources" / "ds_config_zero2.json"))


def test_a_family_without_linear_layers_is_refused_before_it_is_loaded(tmp_path: Path):
    places = Places(tmp_path / "data", tmp_path / "runs")
    make_base("gpt2").save_pretrained(places.data / "gpt2")
    exp = override(EXP, {"model": {"name": "hf", "path": "gpt2"}})
    with pytest.raises(ConfigError, match=r"loop\.float8: the family 'gpt2' "):
        load_experiment(exp, "x").check_precision(places)  # type: ignore[attr-defined]
    around = {
        "recipe": "crossattn",
        "data": toy.CROSSATTN["data"],
        "model": {**toy.CROSSATTN["model"], "base": exp["model"]},
    }
    for other in (
        override(exp, {"loop.float8": None}),
        {**exp, **around},
    ):  # blocks of cross-attention have linear layers
        load_experiment(other, "x").check_precision(places)  # type: ignore[attr-defined]
