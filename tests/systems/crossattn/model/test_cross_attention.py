"""Where blocks go, what is refused, and that the whole model reads exactly its own context."""

import copy

import pytest
import torch

from src.errors import ConfigError
from src.experiments.config import Problems
from src.experiments.registry import MODELS, bind
from src.support.weights import load_trained, trained_weights
from src.systems.crossattn.model.config import layer_indices
from tests.core.models.conftest import PLACEHOLDER

FAMILY_NAMES = ["gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "qwen2"]  # test_families.py has all


@pytest.mark.parametrize(
    ("depth", "num_layers", "stride", "expected"),
    [
        (4, 1, 1, [3]),
        (4, 2, 2, [3, 1]),
        (4, 4, 1, [3, 2, 1, 0]),
        (24, 6, 4, [23, 19, 15, 11, 7, 3]),
        (5, 1, 5, [4]),
        (36, 6, 6, [35, 29, 23, 17, 11, 5]),
    ],
)
def test_placement(depth, num_layers, stride, expected):
    assert layer_indices(depth, num_layers, stride) == expected


def test_placement_that_does_not_fit():
    with pytest.raises(
        ConfigError,
        match=(
            r"num_layers 6 x stride 3 needs 18 decoder layers, the base has 16. Fits: num_layers up to 5 or stride "
            r"up to 2."
        ),
    ):
        layer_indices(16, 6, 3)
    with pytest.raises(ConfigError, match=r"num_layers 2 x stride 9 .* the base has 8. Fits: stride up to 4."):
        layer_indices(8, 2, 9)
    with pytest.raises(ConfigError, match=r"Both must be smaller: their product can be 4 at most"):
        layer_indices(4, 5, 6)
    with pytest.raises(ConfigError, match=r"num_layers 0 and stride 1 must be at least 1"):
        layer_indices(4, 0, 1)


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("gpt_bigcode", {"num_layers": 3}, "num_layers 3 x stride 2 needs 6 decoder layers, the base has 4"),
        ("gpt_bigcode", {"hidden_size": 18}, "hidden_size 18 does not divide by num_heads 4"),
        (
            "gpt_bigcode",
            {"num_key_value_heads": 2},
            "num_key_value_heads is for Llama-style bases; on 'gpt_bigcode' it would be ignored",
        ),
        (
            "gpt_neox",
            {"attention_bias": True},
            "attention_bias is for Llama-style bases; on 'gpt_neox' it would be ignored",
        ),
        ("llama", {"num_heads": 8, "num_key_value_heads": 3}, "num_heads 8 does not divide by num_key_value_heads 3"),
        ("llama", {"hidden_size": 12}, "rotary positions need an even width per head, 12 / 4 is 3"),
        ("llama", {"shared_projections": True}, "shared_projections needs .* set num_key_value_heads to 4, got 2"),
        ("mamba", {}, "MambaForCausalLM has no list of decoder layers that we know. Known families: bloom, cohere"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(make, base_of, model_type, settings, message):
    base = base_of(model_type)
    with pytest.raises(ConfigError, match=message):
        make(base=base, **settings)


def test_a_wrapped_model_is_no_base(make):
    with pytest.raises(
        ConfigError, match=r"CrossAttentionLM has no 'transformer.h'. Take a plain causal language model"
    ):
        make(base=make())


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
@pytest.mark.parametrize("final_layer", [False, True])
def test_a_block_runs_before_or_after_its_layer(make, batch, model_type, final_layer):
    """The same numbers as layers of the base that call the block themselves."""
    model = make(model_type, final_layer=final_layer)
    expected = model(**batch)
    plain = copy.deepcopy(model)
    context, positions = (
        plain.encode(batch["context_ids"], batch["context_mask"]),
        (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0),
    )
    layers = {"gpt": lambda m: m.transformer.h, "lla": lambda m: m.model.layers}.get(
        model_type[:3], lambda m: m.model.layers
    )
    layers = (lambda m: m.gpt_neox.layers) if model_type == "gpt_neox" else layers
    for index in (1, 3):
        layer, block = layers(plain.base)[index], plain.blocks[str(index)]
        inner = layer.forward

        def forward(h, *args, inner=inner, block=block, **kwargs):
            def read(x):
                return block(x, *block.project(context.hidden, context.mask), context.mask, positions)

            return read(inner(h, *args, **kwargs)) if final_layer else inner(read(h), *args, **kwargs)

        layer.forward = forward
    mask = batch["attention_mask"]
    got = plain.base(input_ids=batch["input_ids"], attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(got[mask], expected[mask], atol=1e-5, rtol=1e-5)


def test_placement_in_the_model_and_shared_weights(make):
    assert list(make().blocks) == ["3", "1"]
    shared = make(shared_weights=True)
    assert list(shared.blocks) == ["shared"]
    hooked = [hook.args[0] for i in (1, 3) for hook in shared.base.transformer.h[i]._forward_pre_hooks.values()]
    assert len(hooked) == 2
    assert all(block is shared.blocks["shared"] for block in hooked)


def test_shared_block_projects_its_context_once(make, batch):
    model = make(shared_weights=True, num_layers=4, stride=1)
    calls = []
    model.blocks["shared"].attention.v.register_forward_hook(lambda *_: calls.append(1))
    model(**batch)
    assert len(calls) == 1


def test_base_is_frozen_and_in_eval(make):
    model = make().train()
    assert model.training
    assert all(module.training for module in model.blocks.modules())
    assert not any(module.training for module in model.base.modules())
    assert not any(parameter.requires_grad for parameter in model.base.parameters())
    assert all(parameter.requires_grad for parameter in model.blocks.parameters())


@pytest.mark.parametrize("settings", [{}, {"shared_weights": True}, {"shared_projections": True, "final_layer": True}])
@pytest.mark.parametrize("model_type", ["gpt_bigcode", "llama"])
def test_every_new_parameter_gets_a_gradient(make, batch, model_type, settings):
    """Data-parallel training waits for each of them."""
    if model_type == "llama":
        settings = {**settings, "num_key_value_heads": 4}
    model = make(model_type, **settings).train()
    loss_mask = batch["attention_mask"].clone()
    loss_mask[:, 0] = False
    model(**batch, loss_mask=loss_mask).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("blocks."):
            assert parameter.grad is not None, name
            # Softmax does not see a shift that is common to all keys.
            if not name.endswith("attention.k.bias"):
                assert parameter.grad.abs().max() > 1e-7, name
        else:
            assert parameter.grad is None, name


def test_left_padding_and_empty_contexts_leave_finite_gradients(make, batch):
    model = make("llama", context_dropout_rate=0.9).train()
    batch["context_mask"][1:] = False
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    loss_mask = batch["attention_mask"].clone()
    loss_mask[:, :5] = False
    model(**batch, loss_mask=loss_mask).logsumexp(-1).sum().backward()
    for name, parameter in model.blocks.named_parameters():
        assert parameter.grad.isfinite().all(), name


def test_logits_at_the_loss_mask_are_the_full_logits_picked(make, batch):
    model = make()
    full = model(**batch)
    assert full.shape == (3, 7, 23)
    loss_mask = torch.zeros(3, 7, dtype=torch.bool)
    picks = [(0, 1), (0, 6), (1, 3), (2, 2)]
    for b, t in picks:
        loss_mask[b, t] = True
    got = model(**batch, loss_mask=loss_mask)
    torch.testing.assert_close(got, torch.stack([full[b, t - 1] for b, t in picks]))


def test_the_context_matters_and_its_padding_does_not(make, batch):
    model = make("llama")
    whole = model(**batch)
    padded = {**batch, "context_ids": batch["context_ids"].clone()}
    padded["context_ids"][~batch["context_mask"]] = 9
    assert torch.equal(model(**padded), whole)
    changed = {**batch, "context_ids": batch["context_ids"].clone()}
    changed["context_ids"][0, 0, 0] += 1
    different = model(**changed)
    assert not torch.allclose(different[0], whole[0], atol=1e-3)
    torch.testing.assert_close(different[1:], whole[1:])


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "mistral"])
def test_a_sample_never_reads_the_chunks_of_another(make, batch, model_type):
    model = make(model_type)
    whole = model(**batch)
    for b in range(3):
        alone = model(**{name: tensor[b : b + 1] for name, tensor in batch.items()})
        torch.testing.assert_close(
            alone[0][batch["attention_mask"][b]], whole[b][batch["attention_mask"][b]], atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "llama"])
def test_a_result_does_not_depend_on_other_chunk_lengths(make, batch, model_type):
    model = make(model_type)
    batch = {**batch, "context_mask": torch.arange(5) < torch.tensor([[3, 2], [4, 5], [2, 0]])[..., None]}
    with torch.no_grad():
        together = model(**batch)
        for b in range(3):
            alone = {name: tensor[b : b + 1] for name, tensor in batch.items()}
            longest = int(batch["context_mask"][b].sum(dim=-1).max())
            chunks = int(batch["context_mask"][b].any(dim=-1).sum())
            alone |= {name: alone[name][:, :chunks, :longest] for name in ("context_ids", "context_mask")}
            real = batch["attention_mask"][b]
            torch.testing.assert_close(model(**alone)[0, real], together[b, real], atol=1e-5, rtol=1e-4)


def test_chunks_are_encoded_each_on_its_own(make, batch):
    model = make()
    context = model.encode(batch["context_ids"], batch["context_mask"])
    assert context.hidden.shape == (3, 10, 16)
    assert not context.hidden.requires_grad
    assert torch.equal(context.mask, batch["context_mask"].view(3, 10))
    chunk = batch["context_ids"][0, 1, :3]
    expected = model.base.transformer(input_ids=chunk[None]).last_hidden_state[0]
    torch.testing.assert_close(context.hidden[0, 5:8], expected, atol=1e-5, rtol=1e-5)
    assert (context.hidden[2, 5:] == 0).all()
    with model.reading(context):
        assert torch.equal(model.encode(batch["context_ids"], batch["context_mask"]).hidden, context.hidden)


def test_encoding_in_groups_of_like_length_changes_nothing_but_the_time(make, batch, monkeypatch):
    model = make("mistral")
    expected = model.encode(batch["context_ids"], batch["context_mask"])
    shapes = []
    model.base.model.embed_tokens.register_forward_hook(lambda _, args, __: shapes.append(tuple(args[0].shape)))
    monkeypatch.setattr("src.systems.crossattn.model.encoder.ENCODED_TOGETHER", 2)
    got = model.encode(batch["context_ids"], batch["context_mask"])
    assert shapes == [(2, 3), (2, 5), (1, 5)]
    torch.testing.assert_close(got.hidden[got.mask], expected.hidden[expected.mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "llama"])
def test_padding_on_the_left_is_accepted(make, batch, model_type):
    """Of the tokens and, within a chunk, of the context."""
    model = make(model_type)
    expected = model(**batch)
    lengths = batch["attention_mask"].sum(-1)
    shifted = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    shifted["input_ids"] = torch.stack(
        [row.roll(7 - int(n)) for row, n in zip(batch["input_ids"], lengths, strict=True)]
    )
    got = model(**shifted)
    for b, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(got[b, 7 - n :], expected[b, :n], atol=1e-5, rtol=1e-5)
    chunk, mask = batch["context_ids"][:1, 1:], batch["context_mask"][:1, 1:]
    plain, rolled = model.encode(chunk, mask), model.encode(chunk.roll(2, dims=-1), mask.roll(2, dims=-1))
    torch.testing.assert_close(rolled.hidden[0, 2:], plain.hidden[0, :3], atol=1e-5, rtol=1e-5)


def test_encoding_and_training_compute_no_needless_logits(make, batch):
    model = make()
    rows = []
    model.base.lm_head.register_forward_hook(lambda _, args, __: rows.append(args[0].shape))
    model.encode(batch["context_ids"], batch["context_mask"])
    loss_mask = torch.zeros(3, 7, dtype=torch.bool)
    loss_mask[0, 2] = loss_mask[1, 4] = True
    model(**batch, loss_mask=loss_mask)
    assert rows == [(2, 16)]


def test_no_context_at_all(make, batch):
    """Without anything to read the blocks still run; nothing is NaN, in training or not."""
    model = make()
    batch["context_mask"][:] = False
    logits = model(**batch)
    assert logits.isfinite().all()
    model.train()
    model(**batch).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.blocks.parameters())


def test_outside_of_a_reading_the_base_is_as_it_was(make, base_of, batch):
    model, untouched = make(), base_of("gpt_bigcode")
    model(**batch)
    with (
        pytest.raises(RuntimeError, match="stop"),
        model.reading(model.encode(batch["context_ids"], batch["context_mask"])),
    ):
        raise RuntimeError("stop")
    expected = untouched(batch["input_ids"]).logits
    assert torch.equal(model.base(batch["input_ids"]).logits, expected)


def test_float32_blocks_on_a_bfloat16_base(make, base_of, batch):
    model = make(base=base_of("llama").to(torch.bfloat16))
    assert {p.dtype for p in model.blocks.parameters()} == {torch.float32}
    assert model.encode(batch["context_ids"], batch["context_mask"]).hidden.dtype == torch.bfloat16
    logits = model(**batch)
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"shared_weights": True}])
def test_checkpoint_has_the_new_weights_and_gives_the_same_logits(make, batch, tmp_path, settings):
    from safetensors.torch import save_file

    model = make(**settings)
    weights = trained_weights(model)
    assert weights.keys() == {f"blocks.{name}" for name, _ in model.blocks.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    other = make(**settings)
    for parameter in other.blocks.parameters():
        parameter.data.zero_()
    assert not torch.allclose(other(**batch), model(**batch))
    load_trained(other, tmp_path / "model.safetensors")
    assert torch.equal(other(**batch), model(**batch))


def test_train_all_params_trains_the_decoder_and_not_the_encoder(make, base_of, batch):
    base = base_of("gpt_bigcode", embd_pdrop=0.5)
    model = make(base=base, train_all_params=True).train()
    assert base.training
    encoded = [model.encode(batch["context_ids"], batch["context_mask"]).hidden for _ in range(2)]
    assert torch.equal(*encoded), "the dropout of the base is off while it encodes"
    assert base.training
    assert not encoded[0].requires_grad
    model(**batch).square().mean().backward()
    assert all(parameter.grad is not None for parameter in base.parameters())
    assert base.transformer.wte.weight.grad.abs().sum() > 0
    assert {name for name, _ in model.named_parameters()} <= set(trained_weights(model)) | {"base.lm_head.weight"}


def test_contexts_in_memory_are_encoded_once_and_depend_on_no_other(make):
    plain, caching = make(), make(cache_contexts=True)
    passes = []
    caching.base.base_model.register_forward_hook(lambda *_: passes.append(1))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (3, 2, 7), generator=generator)
    mask = torch.arange(7) < torch.tensor([[7, 3], [5, 0], [7, 3]])[..., None]
    ids[2, 0] = ids[0, 0]  # twice in one batch
    together = caching.encode(ids, mask)
    assert len(passes) == 4, "one for each distinct chunk"
    torch.testing.assert_close(together.hidden[together.mask], plain.encode(ids, mask).hidden[together.mask])
    for n in (1, 0, 2):
        alone = make(cache_contexts=True).encode(ids[n : n + 1], mask[n : n + 1])
        again = caching.encode(ids[n : n + 1], mask[n : n + 1])
        assert torch.equal(alone.hidden, again.hidden), "whoever encodes it first, and with whatever"
    assert len(passes) == 4
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(caching.encode(ids, mask).hidden, make(cache_contexts=True).encode(ids, mask).hidden)
    assert len(passes) == 8, "under autocast the states are others"


def test_changing_contexts_are_not_cached():
    model = {"name": "cross_attention", "num_layers": 1, "stride": 1, "cache_contexts": True, "base": PLACEHOLDER}
    with pytest.raises(Problems, match=r"cache_contexts: the base learns \(train_all_params\)"):
        bind(MODELS, {**model, "train_all_params": True})
    with pytest.raises(Problems, match="cannot use cache_contexts, as adapters change"):
        bind(MODELS, {"name": "lora", "rank": 1, "alpha": 1.0, "target_modules": ["c_attn"], "base": model})
