"""Models built without weights: each weight computed later has the bits of a model that is built as usual."""

import pytest
import torch
from torch import nn

from src.support.deferred import build_deferred, take_recording


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
