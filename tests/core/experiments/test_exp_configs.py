"""Every group loads, no experiment has the id of another, and those on large bases are built on small ones of the same
family."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import exp_configs
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import canonical_dict
from tests.core.models.conftest import VOCABULARY, make_base

BASES = {
    "TabbyML/SantaCoder-1B": ("gpt_bigcode", 24, 2048),
    "bigcode/starcoder": ("gpt_bigcode", 40, 8192),
    "bigcode/starcoderbase-1b": ("gpt_bigcode", 24, 8192),
    "bigcode/starcoderbase-3b": ("gpt_bigcode", 36, 8192),
    "bigcode/starcoderbase-7b": ("gpt_bigcode", 42, 8192),
    "HuggingFaceH4/starchat-alpha": ("gpt_bigcode", 40, 8192),
    "allenai/tulu-2-dpo-7b": ("llama", 32, 8192),
    "mistralai/Mistral-7B-Instruct-v0.2": ("mistral", 32, 32768),
    "allenai/tulu-2-dpo-13b": ("llama", 40, 8192),
    "meta-llama/Llama-2-7b-hf": ("llama", 32, 4096),
    "meta-llama/Llama-2-13b-hf": ("llama", 40, 4096),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", 32, 131072),
    "Qwen/Qwen3-8B": ("qwen3", 36, 40960),
    "google/gemma-3-4b-it": ("gemma3_text", 34, 131072),
    "bigcode/starcoder2-7b": ("starcoder2", 32, 16384),
}
"""Family, layers and positions of the published models."""

# Layers, stride, shared, after its layer, width, heads, dropout, context, sequences per step, rate, schedule, decay
GROUPS: dict[str, tuple[Any, ...]] = {
    "crossattn_santacoder": (6, 2, True, False, None, None, 0.3, 2048, 40, 3e-4, "cosine", 5e-4),
    "crossattn_starcoder": (8, 4, True, False, None, None, 0.3, 2048, 16, 6e-4, "linear", 5e-2),
    "crossattn_starcoderbase-1b": (6, 3, False, False, None, None, 0.3, 128, 1, 3e-4, "cosine", 5e-1),
    "crossattn_starcoderbase-3b": (6, 6, False, True, 1024, 16, 0.4, 4096, 128, 5e-4, "cosine", 1e-3),
    "crossattn_starcoderbase-7b": (8, 4, True, True, 1024, 8, 0.4, 2048, 32, 1e-4, "cosine", 1e-2),
    "crossattn_starchat-alpha": (4, 8, False, True, 2048, 32, 0.25, 4096, 32, 2e-4, "cosine", 1e-2),
    "crossattn_tulu-7b": (4, 6, False, True, 1024, 32, 0.1, 6144, 32, 2e-4, "linear", 0.0),
    "crossattn_tulu-13b": (4, 6, False, True, 1024, 32, 0.1, 6144, 32, 2e-4, "linear", 0.0),
    "crossattn_mistral-7b": (4, 6, False, True, None, None, 0.1, 6144, 32, 2e-4, "linear", 0.0),
    "crossattn_llama-7b": (4, 6, False, True, 1024, 32, 0.1, 4096, 32, 2e-4, "linear", 0.0),
    "crossattn_llama-13b": (4, 6, False, True, 1024, 32, 0.1, 4096, 32, 2e-4, "linear", 0.0),
    "crossattn_llama-3.1-8b": (4, 6, False, True, 1024, 32, 0.1, 6144, 32, 2e-4, "linear", 0.0),
    "crossattn_qwen3-8b": (4, 6, False, True, 1024, 32, 0.1, 6144, 32, 2e-4, "linear", 0.0),
    "crossattn_gemma-3-4b": (4, 6, False, True, 1024, 32, 0.1, 6144, 32, 2e-4, "linear", 0.0),
    "crossattn_starcoder2-7b": (8, 4, False, True, 1024, 16, 0.4, 4096, 128, 5e-4, "cosine", 1e-3),
    "crossattn_tulu-7b_2x8": (2, 8, False, True, 1024, 32, 0.2, 6144, 32, 2e-4, "cosine", 1e-3),
    "crossattn_tulu-7b_8x2": (8, 2, False, True, 1024, 32, 0.2, 6144, 32, 2e-4, "cosine", 1e-3),
    "crossattn_tulu-7b_8x3": (8, 3, False, True, 1024, 32, 0.2, 6144, 32, 2e-4, "cosine", 1e-3),
}


def test_every_experiment_loads_under_an_id_of_its_own():
    ids: dict[str, str] = {}
    for group, experiments in exp_configs.EXP_GROUPS.items():
        assert experiments, group
        for i, exp in enumerate(experiments):
            recipe = load_experiment(exp, f"{group}[{i}]")
            identity = exp_id(canonical_dict(exp, recipe))
            assert identity not in ids, f"{group}[{i}] is {ids[identity]}"
            ids[identity] = f"{group}[{i}]"


@pytest.mark.parametrize("group", GROUPS)
def test_the_published_values(group: str):
    (exp,) = exp_configs.EXP_GROUPS[group]
    config: Any = load_experiment(exp, group)
    model, loop = config.model, config.loop
    expected_values = (
        *(model.num_layers, model.stride, model.shared_weights, model.final_layer, model.hidden_size, model.num_heads),
        *(model.context_dropout_rate, config.data.context_tokens, loop.sequences_per_step),
        *(loop.learning_rate, loop.schedule, loop.weight_decay),
    )
    assert expected_values == GROUPS[group]
    assert (loop.warmup_rate, loop.adam_beta1, loop.adam_beta2, loop.adam_epsilon, loop.max_grad_norm) == (
        0.05,
        0.9,
        0.95,
        1e-6,
        1.0,
    )
    assert model.shared_projections == (group in {"crossattn_starcoderbase-7b", "crossattn_starchat-alpha"})
    assert loop.precision == model.base.dtype == "bfloat16"
    assert model.norm == ("layer" if re.search(r"tulu|mistral|llama-\d+b", group) else None), (
        "as the code of XC-Cache has it"
    )


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_built_on_a_small_base_of_its_family(group: str, tmp_path: Path):
    (exp,) = exp_configs.EXP_GROUPS[group]
    family, depth, positions = BASES[exp["model"]["base"]["path"]]
    heads = {} if family == "gpt_bigcode" else {"num_key_value_heads": 4 if family == "llama" else 2, "head_dim": 4}
    make_base(family, num_hidden_layers=depth, max_position_embeddings=positions, **heads).save_pretrained(
        tmp_path / "base"
    )
    config: Any = load_experiment(
        override(exp, {"model.base.path": str(tmp_path / "base"), "model.base.dtype": "float32"}), group
    )
    places = Places(tmp_path / "data", tmp_path / "runs")
    config.model.check(places)
    config.data.check_length(config.model.longest_sequence(places))
    model = config.model.build(places).eval()
    expected = [depth - 1 - i * config.model.stride for i in range(config.model.num_layers)]
    assert model.layer_indices == expected
    assert list(model.blocks) == (["shared"] if config.model.shared_weights else [str(i) for i in expected])
    ids = torch.randint(3, VOCABULARY, (1, 5))
    inputs = {"input_ids": ids, "attention_mask": torch.ones(1, 5, dtype=torch.bool)}
    contexts = [
        {"context_ids": ids[None] + shift, "context_mask": torch.ones(1, 1, 5, dtype=torch.bool)} for shift in (0, -1)
    ]
    with torch.no_grad():
        one, other = (model(**inputs, **context) for context in contexts)
    assert one.isfinite().all()
    assert not torch.equal(one, other), "the context is read"
