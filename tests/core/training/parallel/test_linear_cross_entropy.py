"""Losses of some tokens at a time: gradients as of all at once, without the logits of all."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from exp_configs import EXP_GROUPS
from src.errors import ConfigError
from src.experiments.grid import override
from src.experiments.interfaces import load_experiment
from src.experiments.registry import MODELS, RECIPES, bind
from src.systems.crossattn.model.config import Config
from src.systems.crossattn.model.layers import CrossAttentionLM
from src.training.loss import (
    NOT_LEARNED,
    causal_lm_loss,
    context_lm_loss,
    seq2seq_loss,
    watch_cross_entropy,
    watch_groups,
)
from src.training.parallel.linear_cross_entropy import chunks_of, sum_loss
from src.training.parallel.live_storages import LiveStorages
from tests import toy
from tests.core.models.conftest import PLACEHOLDER, make_base

IDS = torch.arange(3, 27).view(2, 12) % 23
MASK = (torch.arange(24).view(2, 12) % 5 != 2) & (torch.arange(12) > 0)  # the first of a sequence is never learned
LM = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "loss_mask": MASK}
CONTEXT = {"context_ids": IDS[:, None, :6], "context_mask": torch.ones(2, 1, 6, dtype=torch.bool)}
LABELS = IDS[:, 1:10].where(MASK[:, :9], NOT_LEARNED)
SEQ2SEQ = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "decoder_input_ids": IDS[:, :9], "labels": LABELS}


def t5(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.1}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, decoder_start_token_id=0, tie_word_embeddings=tied, **sizes)
    )


def crossing(kind: str, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    return CrossAttentionLM(Config(num_layers=2, stride=2, base=bind(MODELS, PLACEHOLDER)), make_base(kind, **sizes))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], dict[str, Tensor], int]] = {
    "gpt_bigcode": (partial(make_base, "gpt_bigcode"), causal_lm_loss, LM, 24),
    "tied llama": (partial(make_base, "llama", tie_word_embeddings=True), causal_lm_loss, LM, 24),
    "t5": (partial(t5, False), seq2seq_loss, SEQ2SEQ, 18),
    "tied t5": (partial(t5, True), seq2seq_loss, SEQ2SEQ, 18),
    "cross_attention": (partial(crossing, "gpt_bigcode"), context_lm_loss, LM | CONTEXT, int(MASK.sum())),
}
"""Model, loss, batch, and the tokens that have logits."""
SMOOTHING = {"label_smoothing": 0.1, "z_loss": 0.01}


def taking(chunk: int) -> contextlib.AbstractContextManager[None]:
    return chunks_of(chunk) if chunk else contextlib.nullcontext()


def gradients(case: str, chunk: int, precision: str = "float32", **options: float) -> dict[str, Tensor]:
    """Of a pass in train mode, and the loss itself. chunk: 0 for a plain loss."""
    make, loss, batch, _ = CASES[case]
    model = make().train()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"), taking(chunk):
        value = loss(model, batch, **options)
    value.backward()
    return {
        "loss": value.detach(),
        **{name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None},
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, SMOOTHING], ids=["plain", "smoothed"])
@pytest.mark.parametrize("case", CASES)
def test_one_chunk_of_all_has_the_bits_of_a_plain_loss(case: str, options: dict[str, float], precision: str):
    expected, result = gradients(case, 0, precision, **options), gradients(case, CASES[case][3], precision, **options)
    assert result.keys() == expected.keys()
    assert len(result) > 4
    assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("options", [{}, SMOOTHING], ids=["plain", "smoothed"])
@pytest.mark.parametrize("case", CASES)
def test_chunks_differ_only_by_rounding(case: str, options: dict[str, float], chunk: int):
    """In float32: a millionth, and of what is 0 but for rounding a millionth of the largest gradient."""
    expected, result = gradients(case, 0, **options), gradients(case, chunk, **options)
    assert result.keys() == expected.keys()
    largest = max(value.abs().max().item() for name, value in expected.items() if name != "loss")
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-6, atol=1e-6 * largest)


def test_a_batch_without_anything_to_learn():
    model = crossing("gpt_bigcode")
    batch = LM | CONTEXT | {"loss_mask": torch.zeros_like(MASK)}
    with chunks_of(4):
        loss = context_lm_loss(model, batch)
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_the_logits_of_a_chunk_are_all_that_live(frozen: bool):
    """Logits, their float32 copies and gradients: bytes at the peak of a step."""
    model = make_base("llama", vocab_size=4096).train()
    model.get_output_embeddings().requires_grad_(not frozen)  # type: ignore[union-attr]

    def most(chunk: int) -> int:
        with LiveStorages(4096) as storages, taking(chunk):
            for weight in model.parameters():
                storages.hold(weight, "weights")
            loss = causal_lm_loss(model, LM)
            loss.backward()
        return storages.at_peak["logits"]

    whole, part = most(0), most(3)
    assert whole >= 2 * 24 * 4096 * 4
    assert part <= whole * 3 / 24


def test_losses_by_group_are_those_of_all_at_once():
    model, groups = make_base("gpt_bigcode"), torch.tensor([1, 0])

    def by_group(chunk: int) -> Tensor:
        with watch_groups(LM, groups, 2) as sums, taking(chunk):
            losses = [causal_lm_loss(model, LM) for _ in range(2)]
        sum(losses, torch.tensor(0.0)).backward()
        return sums

    torch.testing.assert_close(by_group(5), by_group(0))
    assert by_group(5)[:, 1].tolist() == [2.0 * int(row.sum()) for row in MASK.flip(0)]


def test_weights_of_tokens_go_with_their_chunks():
    model, weights, targets = make_base("llama"), torch.rand(24), IDS.flatten()

    def total(chunk: int) -> Tensor:
        with taking(chunk):
            return sum_loss(
                model,
                lambda: model(input_ids=IDS).logits,
                lambda logits, targets, weights: (F.cross_entropy(logits, targets, reduction="none") * weights).sum(),
                targets,
                weights,
            )

    torch.testing.assert_close(total(5), total(0))


class Copies(nn.Module):
    """Gives a copy of what the model gives, as DDP does."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.model, self.scale = make_base("gpt_bigcode"), scale

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output.logits = output.logits.clone() * self.scale
        return output


def test_wrappers_can_copy_but_not_change_the_logits():
    with chunks_of(4):
        for _ in range(2):
            torch.testing.assert_close(causal_lm_loss(Copies(1.0), LM), causal_lm_loss(make_base("gpt_bigcode"), LM))
        with pytest.raises(ConfigError, match=r"^loop\.cross_entropy_chunk_tokens: Copies changes the logits"):
            causal_lm_loss(Copies(0.5), LM)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("gemma2", {"final_logit_softcapping": 2.0, "head_dim": 4}), ("granite", {"logits_scaling": 8.0})],
)
def test_models_that_change_their_logits_are_refused(kind: str, sizes: dict[str, Any]):
    """Alone, and below cross-attention; a plain loss goes on."""
    base, above = make_base(kind, **sizes), crossing(kind, **sizes)
    for model, loss, batch in ((base, causal_lm_loss, LM), (above, context_lm_loss, LM | CONTEXT)):
        with (
            chunks_of(4),
            pytest.raises(ConfigError, match=r"changes the logits after its output projection\. Remove it"),
        ):
            loss(model, batch)
        assert loss(model, batch).item() > 0


def test_a_model_without_an_output_projection():
    with (
        chunks_of(4),
        pytest.raises(ConfigError, match=r"chunk_tokens: Linear has no output projection\. Remove it\."),
    ):
        sum_loss(nn.Linear(2, 2), lambda: torch.zeros(1, 2), F.cross_entropy, torch.zeros(1))


@pytest.mark.parametrize("recipe", RECIPES.modules)
def test_recipes_that_need_all_logits_refuse(recipe: str):
    trained = [exp for group in EXP_GROUPS.values() for exp in group if exp["recipe"] == recipe and exp.get("loop")]
    assert trained
    chunked = override(trained[0], {"loop.cross_entropy_chunk_tokens": 512})
    if recipe in ("dpo", "fid", "grpo", "kto", "ppo", "reward"):
        with pytest.raises(
            ConfigError, match=r"loop\.cross_entropy_chunk_tokens: this recipe needs the logits of all tokens at once"
        ):
            load_experiment(chunked, "x")
    else:
        assert load_experiment(chunked, "x")


def test_an_evaluation_takes_chunks_too(tmp_path: Path):
    """Else the first one would need the memory that the training has not."""
    toy.write_data(tmp_path / "data")
    chunk_sizes: list[int] = []
    exp = override(toy.BASE, {"loop.cross_entropy_chunk_tokens": 10, "loop.steps": 1, "loop.eval_every": 1})
    with watch_cross_entropy(lambda logits, _: chunk_sizes.append(len(logits))):
        assert toy.main(["-e", "x"], {"x": [exp]}, tmp_path) == 0
    assert len(chunk_sizes) > 20
    assert max(chunk_sizes) == 10


class _Copying(nn.Module):
    """As DDP: what it returns is a copy."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        return type(output)(logits=output.logits.clone())


def test_a_loss_that_is_no_number_is_no_wrong_model():
    model: Any = make_base("llama")
    model.get_output_embeddings().weight.data.fill_(torch.nan)
    with chunks_of(7):
        assert causal_lm_loss(_Copying(model), LM).isnan()
