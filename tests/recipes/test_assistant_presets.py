"""Every published setting of assistants passes its checks, and learns from rows of its data sets on a small model of its family."""

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from data_prep import chat_tokenizer
from src.config import Places
from src.data.conversations.templates import OASST_TOKENS
from src.exp_groups.assistant_presets import DEFAULT_MIX, GROUPS, REWARD_MIX
from src.interfaces import load_experiment
from tests.data.conversations.talk import tokenizer, write_rows

NEOX, GPT, LLAMA = (
    {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 2048},
    {"n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 2048},
    {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 2048},
)
OPT = {"hidden_size": 8, "ffn_dim": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "word_embed_proj_dim": 8}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "facebook/galactica-125m": ("opt", OPT),
    **{f"EleutherAI/pythia-{size}-deduped": ("gpt_neox", NEOX) for size in ("70m", "1b", "1.4b", "2.8b", "6.9b", "12b")},
    "EleutherAI/gpt-neox-20b": ("gpt_neox", NEOX),
    "togethercomputer/GPT-JT-6B-v1": ("gptj", {**GPT, "rotary_dim": 2}),
    "Salesforce/codegen-2B-multi": ("codegen", {**GPT, "n_head": 4, "rotary_dim": 2}),
    **{f"cerebras/Cerebras-GPT-{size}": ("gpt2", GPT) for size in ("6.7B", "13B")},
    **{f"huggyllama/llama-{size}": ("llama", LLAMA) for size in ("7b", "13b", "30b", "65b")},
    "meta-llama/Llama-2-13b-hf": ("llama", {**LLAMA, "max_position_embeddings": 4096}),
    "tiiuae/falcon-7b": ("falcon", {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}),
}
"""Family and sizes of stand-ins; positions are the originals'."""
ASKED = {"role": "user", "content": "2 and 3"}
TALK = {"messages": [ASKED, {"role": "assistant", "content": "23"}]}
RANKED = {"messages": [ASKED], "replies": [{"content": "23", "rank": 0}, {"content": "32", "rank": 1}]}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("presets")
    plain = tokenizer(())
    for path, (family, sizes) in BASES.items():
        config = transformers.AutoConfig.for_model(family, vocab_size=len(plain), bos_token_id=0, eos_token_id=0, pad_token_id=1, **sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / path)
        plain.save_pretrained(folder / path)
    chat_tokenizer.prepare(folder, "facebook/galactica-125m", "oasst", "galactica_oasst")
    for name in (*DEFAULT_MIX, *REWARD_MIX, "oasst_export"):
        if not (folder / name).exists():
            write_rows(folder / name, dict.fromkeys(("train", "val"), [RANKED if name in REWARD_MIX else TALK] * 20))
    return Places(folder, folder)


@pytest.mark.parametrize("group", GROUPS)
def test_it_learns_on_a_small_base_of_its_family(group: str, places: Places):
    """Of the reference, sections of GPT-JT (B10), of adapters (B11) and of reward models (B31) ended before the first step, and reward
    models had no embeddings of new control tokens (B28)."""
    (exp,) = GROUPS[group]
    recipe: Any = load_experiment(exp, group)
    recipe.check(places)
    torch.manual_seed(0)
    model = recipe.model.build(places).float().train()
    own = PreTrainedTokenizerFast.from_pretrained(model.name_or_path)
    own.add_special_tokens({"extra_special_tokens": [*recipe.model.new_tokens()]}, replace_extra_special_tokens=False)
    assert own.convert_tokens_to_ids([*OASST_TOKENS]) == list(range(len(own) - 5, len(own)))
    data = recipe.data.build(places, own, "train", 0)
    key = (0, 0)
    batch = data.collate([data.sample(*key)])
    loss = recipe.training_loss(recipe.loss())(model, batch)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for name, p in model.named_parameters() if p.requires_grad and "pad" not in name)
