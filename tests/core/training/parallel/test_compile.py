"""Compiled layers: one graph for all of them and for every step, the numbers of the plain model but for rounding, and
the same twice."""

import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from src.errors import ConfigError
from src.training.parallel import compilation, memory
from tests.core.models.conftest import make_base

pytestmark = [  # of torch's own compiler
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
IDS = torch.arange(3, 19).view(2, 8)
STEPS = 3


@dataclass
class Trained:
    """What a small training came to."""

    losses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step."""
    graphs: list[int] = field(default_factory=list)
    """Compiled after each step."""
    breaks: int = 0


def train(compiled: bool, again: bool = False, **sizes: Any) -> Trained:
    """A few steps of a GPTBigCode model, with an evaluation of another shape and a generation between them."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = make_base("gpt_bigcode", **sizes).train()
    names, result = list(model.state_dict()), Trained()
    if compiled:
        assert compilation.compile_layers(model) == 4
    if again:
        memory.checkpoint_layers(model)
    assert list(model.state_dict()) == names
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(input_ids=IDS + step, attention_mask=torch.ones_like(IDS), labels=IDS + step, use_cache=False).loss
        loss.backward()
        result.gradients = result.gradients or {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            model.eval()
            model(input_ids=IDS[:1, :5], use_cache=False)
            model.generate(IDS, max_new_tokens=2, do_sample=False)
            model.train()
        result.losses.append(loss.detach())
        result.graphs.append(counters["stats"]["unique_graphs"])
    result.weights, result.breaks = model.state_dict(), sum(counters["graph_break"].values())
    return result


@pytest.fixture(scope="module", params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest) -> Iterator[Trained]:
    """Graphs of forward and backward, run as they are ("aot_eager") or, which takes a minute, as C++."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))
        yield train(True)
    torch._dynamo.reset()


def test_all_layers_and_steps_share_one_graph(compiled: Trained):
    assert compiled.graphs == [1] * STEPS
    assert compiled.breaks == 0


def test_compiled_numbers_are_those_of_the_plain_model(compiled: Trained):
    plain = train(False)
    assert plain.graphs == [0] * STEPS
    torch.testing.assert_close(compiled.losses, plain.losses, rtol=1e-5, atol=0)
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(compiled.gradients[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("again", [False, True])
def test_twice_the_same_bits_and_with_layers_computed_again_too(compiled: Trained, again: bool):
    other = train(True, again)
    assert torch.equal(torch.stack(other.losses), torch.stack(compiled.losses))
    assert all(torch.equal(other.weights[name], weight) for name, weight in compiled.weights.items())
    assert other.graphs == compiled.graphs


def test_dropout_of_a_compiled_model_follows_from_the_seed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    rates = {"attn_pdrop": 0.2, "resid_pdrop": 0.2}
    one, other, again = train(True, **rates), train(True, **rates), train(True, again=True, **rates)
    assert len({float(loss) for loss in one.losses}) == STEPS
    assert torch.equal(torch.stack(one.losses), torch.stack(other.losses))
    assert torch.equal(torch.stack(one.losses), torch.stack(again.losses)), "what is computed again drops the same"


def test_a_batch_of_another_shape_is_refused():
    layer = compilation.Compiled(nn.Identity(), lambda x: x, lambda _, x: x)
    layer(torch.zeros(2, 8, 4))
    layer(torch.zeros(2, 8, 4))
    with torch.no_grad():
        layer(torch.zeros(1, 5, 4))
    with pytest.raises(
        ConfigError,
        match=r"loop\.compile: a layer was compiled for shape \[2, 8, 4\], got \[2, 7, 4\]\. Pad every",
    ):
        layer(torch.zeros(2, 7, 4))


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigError, match=r"loop\.compile: Sequential has no list of layers to compile"):
        compilation.compile_layers(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(("gpu", "variable", "first"), [(False, "CXX", "g++"), (True, "CC", "gcc")])
def test_without_a_compiler_it_says_what_to_install(
    gpu: bool, variable: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(variable, raising=False)
    compiler = shutil.which(first)
    if compiler:
        compilation.require_compiler(gpu)
        monkeypatch.setenv(variable, compiler)
    monkeypatch.setenv("PATH", str(tmp_path))
    if compiler:
        compilation.require_compiler(gpu)
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(
        ConfigError, match=rf"loop\.compile: torch\.compile needs a compiler, but {first.replace('+', '.')} or clang"
    ):
        compilation.require_compiler(gpu)
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(ConfigError, match=rf"no-such-compiler is not on the PATH\. .* set {variable}"):
        compilation.require_compiler(gpu)
