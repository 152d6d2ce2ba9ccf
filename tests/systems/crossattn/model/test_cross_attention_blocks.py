"""Each block equals a plain reference: one head, one query, one softmax at a time."""

import math

import pytest
import torch
from transformers.activations import ACT2FN

from src.systems.crossattn.model.layers import Block, rotate


def plain_rotary(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """x (d) as d / 2 complex numbers x[i] + j x[i + d/2], each turned by position * theta^(-2i/d)."""
    d = len(x)
    rotated_pairs = torch.complex(x[: d // 2], x[d // 2 :]) * torch.polar(
        torch.ones(d // 2), torch.tensor([position * theta ** (-2 * i / d) for i in range(d // 2)])
    )
    return torch.cat((rotated_pairs.real, rotated_pairs.imag))


def plain_attention(
    block: Block, h: torch.Tensor, context: torch.Tensor, mask: torch.Tensor, positions: list[int]
) -> torch.Tensor:
    """One sample: h (T, D) reads context (P, D), whose positions count what can be read."""
    a = block.attention
    d, groups = a.head_size, a.heads // (a.v.out_features // a.head_size)
    key_map = a.q if a.k is None else a.k
    q, k, v = h @ a.q.weight.T, context @ key_map.weight.T, context @ a.v.weight.T
    if a.q.bias is not None:
        q, k, v = q + a.q.bias, k + key_map.bias, v + a.v.bias
    rows = []
    for t in range(len(h)):
        read = []
        for head in range(a.heads):
            head_slice, group_slice = (
                slice(head * d, (head + 1) * d),
                slice(head // groups * d, (head // groups + 1) * d),
            )
            query = q[t, head_slice] if a.theta is None else plain_rotary(q[t, head_slice], positions[t], a.theta)
            scores, values = [], []
            for place, p in enumerate(mask.nonzero()[:, 0].tolist()):
                key = k[p, group_slice] if a.theta is None else plain_rotary(k[p, group_slice], place, a.theta)
                scores.append(query @ key / math.sqrt(d))
                values.append(v[p, group_slice])
            read.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
        rows.append(torch.cat(read))
    out = torch.stack(rows) @ a.out.weight.T
    return out if a.out.bias is None else out + a.out.bias


def plain_norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, torch.nn.LayerNorm):
        difference = x - x.mean(-1, keepdim=True)
        return difference / torch.sqrt((difference**2).mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + norm.eps) * norm.weight


def plain_mlp(block: Block, x: torch.Tensor, activation: str) -> torch.Tensor:
    m, act = block.mlp, ACT2FN[activation]
    if m.gate is None:
        return act(x @ m.up.weight.T + m.up.bias) @ m.down.weight.T + m.down.bias
    return (act(x @ m.gate.weight.T) * (x @ m.up.weight.T)) @ m.down.weight.T


CASES = {
    "gpt": ("gpt_bigcode", "gelu_pytorch_tanh", {}),
    "gpt narrow": ("gpt_bigcode", "gelu_pytorch_tanh", {"hidden_size": 12, "num_heads": 3}),
    "gpt one matrix": ("gpt_bigcode", "gelu_pytorch_tanh", {"shared_projections": True}),
    "gpt skip": ("gpt_bigcode", "gelu_pytorch_tanh", {"skip_connections": True}),
    "llama": ("llama", "silu", {}),
    "llama wide, all heads": ("llama", "silu", {"hidden_size": 32, "num_heads": 4, "num_key_value_heads": 4}),
    "llama one key head, biases": ("llama", "silu", {"num_key_value_heads": 1, "attention_bias": True}),
    "llama one matrix": ("llama", "silu", {"num_key_value_heads": 4, "shared_projections": True}),
    "mistral skip": ("mistral", "silu", {"skip_connections": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_block_equals_a_plain_reference(make, case):
    model_type, activation, settings = CASES[case]
    block = make(model_type, **settings).blocks["3"]
    torch.manual_seed(3)
    h, context = torch.randn(2, 4, 16), torch.randn(2, 6, 16)
    mask = torch.tensor([[True, True, False, True, True, False], [False, True, True, True, False, True]])
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]])
    got = block(h, *block.project(context, mask), mask, positions)
    for b in range(2):
        x = h[b] + plain_attention(block, plain_norm(block.norm1, h[b]), context[b], mask[b], positions[b].tolist())
        x = x + plain_mlp(block, plain_norm(block.norm2, x), activation)
        expected = h[b] + x if block.skip_connections else x
        torch.testing.assert_close(got[b], expected, atol=1e-5, rtol=1e-5)


def test_sizes_and_biases_of_the_styles(make):
    gpt = make("gpt_bigcode", hidden_size=12, num_heads=3).blocks["3"]
    assert {name: list(p.shape) for name, p in gpt.named_parameters()} == {
        "norm1.weight": [16], "norm1.bias": [16],
        "attention.q.weight": [12, 16], "attention.q.bias": [12],
        "attention.k.weight": [12, 16], "attention.k.bias": [12],
        "attention.v.weight": [12, 16], "attention.v.bias": [12],
        "attention.out.weight": [16, 12], "attention.out.bias": [16],
        "norm2.weight": [16], "norm2.bias": [16],
        "mlp.up.weight": [48, 16], "mlp.up.bias": [48],
        "mlp.down.weight": [16, 48], "mlp.down.bias": [16],
    }  # fmt: skip
    llama = make("llama", hidden_size=24, num_heads=6, num_key_value_heads=3).blocks["3"]
    assert {name: list(p.shape) for name, p in llama.named_parameters()} == {
        "norm1.weight": [16],
        "attention.q.weight": [24, 16], "attention.k.weight": [12, 16],
        "attention.v.weight": [12, 16], "attention.out.weight": [16, 24],
        "norm2.weight": [16],
        "mlp.gate.weight": [96, 16], "mlp.up.weight": [96, 16], "mlp.down.weight": [16, 96],
    }  # fmt: skip
    with_biases = make("llama", attention_bias=True).blocks["3"]
    assert [name for name, _ in with_biases.named_parameters() if name.endswith("bias")] == [
        "attention.q.bias", "attention.k.bias", "attention.v.bias", "attention.out.bias",
    ]  # fmt: skip


def test_rotation_depends_on_distance_only():
    torch.manual_seed(4)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(i: int, j: int) -> float:
        return (rotate(q, torch.tensor([[i]]), 100.0) * rotate(k, torch.tensor([[j]]), 100.0)).sum().item()

    assert score(5, 3) == pytest.approx(score(12, 10), abs=1e-5)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-3)


def test_nothing_to_read_is_exactly_zero(make):
    block = make("gpt_bigcode").blocks["3"]
    h, context = torch.randn(2, 4, 16), torch.randn(2, 6, 16)
    mask = torch.tensor([[False] * 6, [True] * 6])
    keys, values = block.project(context, mask)
    read = block.attention(h, keys, values, mask, None)
    assert (read[0] == 0).all()
    assert (read[1] != 0).any()


def test_rows_that_share_a_context_read_as_if_it_were_repeated(make):
    block = make("llama").blocks["3"]
    h, context = torch.randn(6, 4, 16), torch.randn(2, 5, 16)
    mask = torch.tensor([[True, True, False, True, True], [False] * 5])
    positions = torch.arange(4).expand(6, 4)
    once = block(h, *block.project(context, mask), mask, positions)
    with_repeats = block(
        h,
        *block.project(context.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)),
        mask.repeat_interleave(3, 0),
        positions,
    )
    torch.testing.assert_close(once, with_repeats, atol=1e-6, rtol=1e-5)


def test_context_dropout_hides_positions_only_in_training(make):
    block = make("gpt_bigcode", context_dropout_rate=0.5).blocks["3"]
    h, context, mask = torch.randn(4, 3, 16), torch.randn(4, 8, 16), torch.ones(4, 8, dtype=torch.bool)
    projected = block.project(context, mask)
    whole = block(h, *projected, mask)
    assert torch.equal(whole, block(h, *projected, mask))
    block.train()
    torch.manual_seed(5)
    dropped = block(h, *projected, mask)
    torch.manual_seed(5)
    readable = torch.rand(4, 8) >= 0.5
    block.eval()
    assert readable.any(dim=1).all()
    assert not readable.all(dim=1).any()
    torch.testing.assert_close(dropped, block(h, *projected, readable))
    assert not torch.allclose(dropped, whole)


def test_dropout_rates_are_the_base_s(make, base_of):
    block = make(base=base_of("gpt_bigcode", attn_pdrop=0.25, resid_pdrop=0.125)).blocks["3"]
    assert block.attention.attention_dropout == 0.25
    assert block.attention.residual_dropout.p == block.mlp.dropout.p == 0.125
    h, mask = torch.randn(2, 3, 16), torch.ones(2, 8, dtype=torch.bool)
    projected = block.project(torch.randn(2, 8, 16), mask)
    assert torch.equal(block(h, *projected, mask), block(h, *projected, mask))
    block.train()
    block.attention.residual_dropout.p = block.mlp.dropout.p = 0.0
    assert not torch.equal(block(h, *projected, mask), block(h, *projected, mask))


def test_initial_weights(make, base_of):
    base = base_of("gpt_bigcode", hidden_size=64, initializer_range=0.02)
    for name, parameter in make(base=base, noise=0).blocks.named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(parameter.mean().item()) < 0.002


@pytest.mark.parametrize(
    ("padded", "training", "rate", "masked"),
    [(False, False, 0.5, False), (True, False, 0.5, True), (False, True, 0.5, True), (False, True, 0.0, False)],
)
def test_a_context_without_padding_is_read_without_a_mask(make, batch, padded, training, rate, masked):
    """A mask excludes the fastest kernels of attention, even one that hides nothing."""
    model = make(context_dropout_rate=rate).train(training)
    seen = []
    for block in model.unique_blocks():
        block.attention.register_forward_pre_hook(lambda _, args: seen.append(args[3] is not None))
    model(**(batch if padded else {**batch, "context_mask": torch.ones_like(batch["context_mask"])}))
    assert seen == [masked, masked]
