"""Small models as `save_pretrained` writes them, with a chat template of their own."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}[sys]Be brief.[end]{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FOREIGN = (
    "{{ raise_exception('one message "
    "only') if messages | length > 1 }}[user]{{ messages[0]['content'] | upper }}[assistant]"
)
"""A template that upper-cases messages and takes only one: ours cannot be trained with it."""
ENDLESS = {"seed": 3, "positions": 8192}


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["[end]", "[sys]", "[system]", "[user]", "[assistant]"]
    vocabulary = {token: place for place, token in enumerate([*specials, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[end]", extra_special_tokens=specials[1:])
    fast.chat_template = template
    return fast


def save(folder: Path, template: str | None = TEMPLATE, seed: int = 0, positions: int = 512) -> Any:
    """Write a model and its tokenizer; returns the model."""
    torch.manual_seed(seed)
    words = tokenizer(template)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model
