"""A compiled T5 in bfloat16: no graph breaks, and no graph is made after the first step."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import T5Config, T5ForConditionalGeneration

from src.training.loss import NOT_LEARNED, seq2seq_loss
from src.training.parallel import compilation

pytestmark = [  # of torch's own compiler
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
LAYERS, STEPS = 3, 4
SIZES: dict[str, Any] = {
    "decoder_start_token_id": 0,
    "vocab_size": 23,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_heads": 4,
}
KINDS = 4
"""Of graphs: in both encoder and decoder the first layer alone makes the bias of relative positions, which the others
are given."""


@pytest.fixture(autouse=True)
def reset_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are made as ever, and then run as they are: generating C++ takes a minute, and comes after all that is
    counted here."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_model(version: str) -> Any:
    kind = {
        "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "original": {"feed_forward_proj": "relu"},
    }[version]
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**SIZES, **kind, num_layers=LAYERS, dropout_rate=0.0)).train()


def batch(step: int, padded: bool) -> dict[str, torch.Tensor]:
    """Two sequences of 12 and 5 tokens; in every second step, where `padded`, one is shorter."""
    torch.manual_seed(step)
    ids, targets = torch.randint(2, 23, (2, 12)), torch.randint(2, 23, (2, 5))
    mask, labels = torch.ones_like(ids, dtype=torch.bool), targets.clone()
    if padded and step % 2:
        mask[1, 9:], labels[1, 3:] = False, NOT_LEARNED
    decoder_ids = torch.cat([torch.zeros(2, 1, dtype=torch.long), targets[:, :-1]], dim=1)
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_ids, "labels": labels}


def step_on(model: Any, step: int, padded: bool) -> torch.Tensor:
    inputs = batch(step, padded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = seq2seq_loss(model, inputs, z_loss=1e-4)
    loss.backward()
    with torch.no_grad():
        seq2seq_loss(model, {name: tensor[:1] for name, tensor in inputs.items()})
    return loss.detach()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "padded", "graphs"),
    [("v1.1", False, [KINDS] * STEPS), ("original", True, [KINDS, *[2 * KINDS] * (STEPS - 1)])],
)
def test_each_kind_of_layer_is_one_graph_from_the_first_step_on(version: str, padded: bool, graphs: list[int]):
    """Where batches are padded there is one more set: transformers gives layers no mask where it is all True."""
    model, plain = make_model(version), make_model(version)
    assert compilation.compile_layers(model) == 2 * LAYERS
    counts = []
    for step in range(STEPS):
        assert step_on(model, step, padded).item() == pytest.approx(step_on(plain, step, padded).item(), rel=1e-2)
        counts.append(counters["stats"]["unique_graphs"])
    assert counts == graphs
    assert not counters["graph_break"]
