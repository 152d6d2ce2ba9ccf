"""Models built without weights: each weight computed later has the bits of a model that is built as usual."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.initialization as transformers_init
from torch import Tensor, nn

from src.errors import ConfigError
from src.support import distributed
from src.support.deferred import build_deferred, take_recording
from src.training.parallel.fsdp import shard_model


class Many(nn.Module):
    """Initialised by draws, constants, views, copies and conversions of the type."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(30, 20)
        nn.init.trunc_normal_(self.matrix.weight, std=0.02)
        self.embedding = nn.Embedding(9, 4, padding_idx=2)
        self.filter = nn.Conv2d(3, 4, 3)
        self.norm = nn.LayerNorm(5)
        self.attention = nn.MultiheadAttention(8, 2)
        self.rows = nn.Parameter(torch.zeros(7, 3))
        self.rows.data[2:4].normal_()
        self.products = nn.Parameter(torch.ones(33, 2) * torch.arange(33)[:, None])
        self.columns = nn.Parameter(torch.randn(5, 6).t().contiguous())
        self.few_rows = nn.Parameter(self.matrix.weight.data[3:9].clone())
        self.all_rows = nn.Parameter(self.matrix.weight.data.clone())
        self.matrix.weight.data.mul_(3)  # the copies do not change
        self.same_matrix = self.matrix.weight
        self.register_buffer("frequencies", torch.ones(4) / torch.arange(1, 5))
        self.constant = torch.full((3,), 2.0)
        self.is_large = bool((self.rows > 1).any())


def build_both(dtype: torch.dtype) -> tuple[Many, Many]:
    """The model built as usual, and without weights, from the same state of the generator, which ends the same."""
    models, states = [], []
    for build in (lambda: Many().to(dtype), lambda: build_deferred(lambda: Many().to(dtype))):
        torch.manual_seed(5)
        models.append(build())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    return models[0], models[1]


def test_weights_computed_later_are_equal():
    for dtype in (torch.float32, torch.bfloat16):
        whole, deferred = build_both(dtype)
        recording = take_recording(deferred)
        assert recording
        assert take_recording(deferred) is None
        assert [name for name, _ in deferred.named_parameters()] == [name for name, _ in whole.named_parameters()]
        state = torch.get_rng_state()
        for name, weight in reversed([*deferred.named_parameters()]):
            assert weight.is_meta
            expected = whole.get_parameter(name)
            values = recording.compute(weight)
            assert (values.dtype, values.stride()) == (expected.dtype, expected.stride())
            assert torch.equal(values, expected), name
            assert torch.equal(recording.compute_rows(weight, 1, 3), expected[1:3]), name
        assert torch.equal(state, torch.get_rng_state())
        assert torch.equal(deferred.get_buffer("frequencies"), whole.get_buffer("frequencies"))
        assert torch.equal(deferred.constant, whole.constant)
        assert deferred.is_large == whole.is_large


def test_models_are_built_as_usual_after_an_error():
    def fail() -> None:
        nn.Linear(2, 2)
        raise KeyError("no such layer")

    truncated = nn.init._no_grad_trunc_normal_
    with pytest.raises(KeyError):
        build_deferred(fail)
    assert nn.init._no_grad_trunc_normal_ is truncated
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_tensor_of_elsewhere_is_refused():
    recording = take_recording(build_both(torch.float32)[1])
    assert recording
    with pytest.raises(AssertionError, match="another recording"):
        recording.compute(torch.empty(2, device="meta"))


class One(nn.Module):
    """A weight that a function initialises."""

    def __init__(self, initialize: Callable[[Any], Any], *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*(sizes or (8, 6))))
        initialize(self)


def initialize(function: Callable[..., Any], **more: Any) -> Callable[[One], Any]:
    return lambda model: function(model.weight, **more)


@torch.no_grad()
def write_out(model: One) -> None:
    torch.mul(model.weight, 2, out=model.weight)
    torch.add(model.weight, torch.arange(6.0), out=model.weight[:])


@torch.no_grad()
def draw_out(model: One) -> None:
    torch.rand(8, 6, out=model.weight)


def build_in_bfloat16(model: One) -> None:
    try:
        torch.set_default_dtype(torch.bfloat16)
        model.ones = nn.Parameter(torch.ones(3, 8))
        model.random = nn.Parameter(torch.randn(4, 8))
        model.twos = nn.Parameter(torch.full((3,), 2.0))
        model.norm = nn.LayerNorm(8)
        model.linear = nn.Linear(8, 3)
    finally:
        torch.set_default_dtype(torch.float32)


def share_buffer(model: One) -> None:
    positions = torch.arange(9.0)
    model.parts = nn.ModuleList(nn.Module() for _ in range(3))
    for part in model.parts:
        part.register_buffer("positions", positions, persistent=False)


def other_generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


CASES: dict[str, tuple[Any, ...]] = {
    "orthogonal, wide": (initialize(nn.init.orthogonal_, gain=2.0), 5, 9),
    "orthogonal, high": (initialize(nn.init.orthogonal_), 9, 5),
    "orthogonal of transformers": (initialize(transformers_init.orthogonal_),),
    "sparse": (initialize(nn.init.sparse_, sparsity=0.3),),
    "sparse of transformers": (initialize(transformers_init.sparse_, sparsity=0.3),),
    "dirac": (initialize(nn.init.dirac_), 4, 4, 3),
    "eye": (initialize(nn.init.eye_),),
    "xavier": (initialize(nn.init.xavier_uniform_),),
    "out=": (write_out,),
    "draws with out=": (draw_out,),
    "spectral norm": (lambda model: nn.utils.parametrizations.spectral_norm(model, "weight"),),
    "default type": (build_in_bfloat16,),
    "data": (lambda model: setattr(model.weight, "data", torch.eye(8)),),
    "another generator": (
        lambda model: setattr(model, "random", nn.Parameter(torch.rand(8, 6, generator=other_generator()))),
    ),
    "a shared buffer": (share_buffer,),
}


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process, until the test ends."""
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    distributed.ensure_group()
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", CASES)
def test_all_ways_to_initialise_a_weight_give_equal_values(kind: str):
    models: list[Any] = []
    states: list[Tensor] = []
    for build in (lambda: One(*CASES[kind]), lambda: build_deferred(lambda: One(*CASES[kind]))):
        torch.manual_seed(5)
        models.append(build())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    whole, deferred = models
    weights = dict(deferred.named_parameters())
    recording = vars(deferred)["deferred_weights"]
    for name, expected in whole.named_parameters():
        values = recording.compute(weights[name])
        assert values.dtype == expected.dtype
        assert torch.equal(values, expected), name
    shard_model(deferred, torch.device("cpu"), False)
    for name, expected in whole.named_parameters():
        assert torch.equal(deferred.get_parameter(name).full_tensor(), expected), name
    for name, expected in whole.named_buffers(remove_duplicate=False):
        assert torch.equal(deferred.get_buffer(name), expected), name


@pytest.mark.parametrize(
    ("operation", "initialize_weight"),
    [
        ("normal_", initialize(nn.init.normal_, generator=other_generator())),
        ("normal_", initialize(nn.init.trunc_normal_, generator=other_generator())),
        ("bernoulli_", lambda model: model.weight.data.bernoulli_(0.5)),
        ("cauchy_", lambda model: model.weight.data.cauchy_()),
        ("log_normal_", lambda model: model.weight.data.log_normal_()),
        ("normal", lambda model: torch.normal(0.0, 1.0, (8, 6), out=model.weight.data)),
        ("geqrf", lambda model: nn.utils.parametrizations.orthogonal(model, "weight")),
    ],
)
def test_operations_that_cannot_be_recorded_are_refused(operation: str, initialize_weight: Callable[[One], Any]):
    with pytest.raises(ConfigError, match=rf"aten\.{operation}\.[\s\S]*--fsdp"):
        build_deferred(lambda: One(initialize_weight))


def test_tensors_in_lists_and_dicts_have_values():
    def add_tensors(model: Any) -> None:
        model.list = [torch.ones(3), {"random": torch.randn(2)}]
        model.weights = [model.weight]

    torch.manual_seed(5)
    whole: Any = One(add_tensors)
    torch.manual_seed(5)
    deferred: Any = build_deferred(lambda: One(add_tensors))
    assert torch.equal(deferred.list[0], whole.list[0])
    assert torch.equal(deferred.list[1]["random"], whole.list[1]["random"])
    assert deferred.weights[0] is deferred.weight


def test_a_change_of_the_default_type_within_a_weight_is_noticed():
    """Its type would depend on the default type at the time when it is computed."""

    def divide(model: One) -> None:
        try:
            torch.set_default_dtype(torch.bfloat16)
            model.thirds = nn.Parameter(torch.ones(8, dtype=torch.long) / 3)
        finally:
            torch.set_default_dtype(torch.float32)

    model: Any = build_deferred(lambda: One(divide))
    recording = take_recording(model)
    assert recording
    with pytest.raises(AssertionError, match="div"):
        recording.compute(model.thirds)
