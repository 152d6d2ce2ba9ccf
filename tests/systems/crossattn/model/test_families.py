"""Every family of bases: what the blocks read is the same with caches and without, and only they get gradients.

`python -m tests.systems.crossattn.model.test_families` writes the table of docs/crossattn.md, which a test holds
against the rows.
"""

import re
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from src.support.flops import KNOWN_FAMILIES, forward_flops
from src.systems.crossattn.model.encoder import last_hidden
from src.systems.crossattn.model.families import FAMILIES
from src.systems.crossattn.model.layers import output_logits
from src.training.monitoring.flops import batch_flops
from tests.conftest import ROOT
from tests.core.models.conftest import make_base

PAGE = ROOT / "docs" / "crossattn.md"
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LINEAR = {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")} | {
    f"linear_num_{kind}_heads": 2 for kind in ("key", "value")
}
SIZES: dict[str, dict[str, Any]] = {
    # family: its name for people, and what a tiny model of it needs besides
    "bloom": {"name": "BLOOM"},
    "cohere": {"name": "Cohere Command R", "num_key_value_heads": 2, "logit_scale": 0.25},
    "falcon": {"name": "Falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": {"name": "Gemma", "head_dim": 4, "num_key_value_heads": 2},
    "gemma2": {"name": "Gemma 2", "head_dim": 4, "num_key_value_heads": 2, "final_logit_softcapping": 2.0},
    "gemma3_text": {"name": "Gemma 3 (text)", "head_dim": 4, "num_key_value_heads": 2},
    "gpt2": {"name": "GPT-2"},
    "gpt_bigcode": {"name": "GPTBigCode (StarCoder, SantaCoder)"},
    "gpt_neo": {"name": "GPT-Neo", "attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "gpt_neox": {"name": "GPT-NeoX (Pythia)"},
    "gpt_oss": {"name": "gpt-oss", "head_dim": 8, "num_key_value_heads": 2, **EXPERTS},
    "gptj": {"name": "GPT-J", "rotary_dim": 4},
    "granite": {"name": "Granite", "num_key_value_heads": 2, "logits_scaling": 2.0},
    "llama": {"name": "Llama 1 to 3, Tulu"},
    "mistral": {"name": "Mistral"},
    "mixtral": {"name": "Mixtral", "num_key_value_heads": 2, **EXPERTS},
    "olmo2": {"name": "OLMo 2", "num_key_value_heads": 2},
    "opt": {"name": "OPT", "word_embed_proj_dim": 16, "ffn_dim": 24},
    "phi": {"name": "Phi 1 and 2", "num_key_value_heads": 2},
    "phi3": {"name": "Phi 3 and 4", "num_key_value_heads": 2},
    "qwen2": {"name": "Qwen 2 and 2.5"},
    "qwen3": {"name": "Qwen 3", "head_dim": 8, "num_key_value_heads": 2},
    "qwen3_moe": {"name": "Qwen 3 MoE", "head_dim": 8, "num_key_value_heads": 2, **EXPERTS},
    "qwen3_next": {
        "name": "Qwen 3 Next",
        "head_dim": 8,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 8,
        **EXPERTS,
        **LINEAR,
    },
    "smollm3": {"name": "SmolLM 3", "num_key_value_heads": 2},
    "stablelm": {"name": "StableLM", "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "starcoder2": {"name": "StarCoder 2", "num_key_value_heads": 2},
}
WAYS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0}]


def tiny(model_type: str) -> Any:
    return make_base(model_type, **{key: value for key, value in SIZES[model_type].items() if key != "name"})


def test_every_family_is_here():
    assert SIZES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("model_type", SIZES)
def test_with_caches_as_without(make, batch, model_type: str):
    model = make(model_type, base=tiny(model_type), final_layer=True)
    mask = torch.arange(4) >= 4 - torch.tensor([4, 2, 3])[:, None]
    inputs = {**batch, "input_ids": batch["input_ids"][:, :4].clamp(min=3) * mask, "attention_mask": mask}
    for way in WAYS:
        outputs = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0, **way}
            outputs.append(model.generate(**inputs, **options, use_cache=use_cache).tolist())
        assert outputs[0] == outputs[1], way
    flipped_contexts = {name: inputs[name].flip(0) for name in ("context_ids", "context_mask")}
    torch.manual_seed(0)
    assert model.generate(**{**inputs, **flipped_contexts}, **options).tolist() != outputs[0], "the context is read"


@pytest.mark.parametrize("model_type", SIZES)
def test_only_blocks_get_gradients(make, batch, model_type: str):
    model = make(model_type, base=tiny(model_type)).train()
    model(**batch).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.blocks.parameters())
    assert all(parameter.grad is None for parameter in model.base.parameters())


@pytest.mark.parametrize("model_type", SIZES)
@torch.no_grad()
def test_operations_are_those_that_torch_counts_or_are_not_known(make, batch, model_type: str):
    base = tiny(model_type)
    counted_flops = batch_flops(make(model_type, base=base))
    if model_type not in KNOWN_FAMILIES:
        assert counted_flops is None
        return
    base.set_attn_implementation("eager")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        base(input_ids=batch["input_ids"])
    assert counter.get_total_flops() == forward_flops(base.config, *batch["input_ids"].shape)


@pytest.mark.parametrize("model_type", SIZES)
@torch.no_grad()
def test_logits_are_those_of_the_base(batch, model_type: str):
    base = tiny(model_type)
    ids, mask = batch["input_ids"][:1], batch["attention_mask"][:1]
    expected = base(input_ids=ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(output_logits(base, last_hidden(base, ids, mask)), expected)


def test_the_text_part_of_a_model_that_reads_images_too(make, batch):
    sizes = {
        "vocab_size": 23,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    seeing = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**sizes, **SIZES["gemma3_text"], "initializer_range": 0.3}
    torch.manual_seed(0)
    base = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=seeing, mm_tokens_per_image=1)
    ).eval()
    model = make(base=base, final_layer=True)
    one = {name: tensor[:1] for name, tensor in batch.items()}
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    outputs = [model.generate(**one, **options, use_cache=use_cache).tolist() for use_cache in (True, False)]
    assert outputs[0] == outputs[1]
    assert not torch.equal(model(**one), model(**{**one, "context_ids": one["context_ids"].flip(-1)}))
    with torch.no_grad():
        expected = base(input_ids=one["input_ids"], attention_mask=one["attention_mask"].long()).logits
        torch.testing.assert_close(
            output_logits(base, last_hidden(base, one["input_ids"], one["attention_mask"])), expected
        )


def table() -> str:
    """The families as a table in Markdown."""
    rows = [
        f"| {SIZES[name]['name']} | `{name}` | {'Llama' if FAMILIES[name].gated else 'GPT'} |" for name in sorted(SIZES)
    ]
    return "\n".join(["| base | `model_type` | blocks |", "|---|---|---|", *rows])


def test_the_page_has_them():
    assert table() in PAGE.read_text(encoding="utf-8"), f"python -m {__name__}"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(r"\| base \| `model_type`.*?\n(?!\|)", lambda _: f"{table()}\n", text, flags=re.DOTALL), encoding="utf-8"
    )
