"""Tiny random decoders of each family, and contexts for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from src.experiments.config import Places
from src.experiments.registry import MODELS, bind
from src.systems.crossattn.model.config import Config
from src.systems.crossattn.model.layers import CrossAttentionLM

VOCABULARY = 23
PLACEHOLDER = {
    "name": "gpt_bigcode",
    "tokenizer": "t",
    "hidden_size": 8,
    "num_layers": 1,
    "num_heads": 1,
    "max_positions": 8,
}


def make_base(model_type: str, **sizes: Any) -> PreTrainedModel:
    """Four layers of width 16 with four heads; weights of a visible size, so that a fault is not lost in the
    rounding."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **({} if model_type in ("gpt2", "gpt_bigcode") else {"intermediate_size": 24}),
        **({"attn_pdrop": 0.0, "resid_pdrop": 0.0} if model_type in ("gpt2", "gpt_bigcode") else {}),
        **({"num_key_value_heads": 2} if model_type in ("llama", "mistral", "qwen2") else {}),
        "max_position_embeddings": 64,
        **sizes,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes)).eval()


@pytest.fixture
def base_of() -> Callable[..., PreTrainedModel]:
    """`base_of("llama", num_hidden_layers=4, ...)`."""
    return make_base


@pytest.fixture
def make() -> Callable[..., CrossAttentionLM]:
    """Make a CrossAttentionLM in eval mode: `make("llama", num_layers=2, stride=2, ...)`."""

    def build(
        model_type: str = "gpt_bigcode", base: PreTrainedModel | None = None, noise: float = 0.1, **settings: Any
    ) -> CrossAttentionLM:
        config = Config(base=bind(MODELS, PLACEHOLDER), **{"num_layers": 2, "stride": 2, **settings})
        base = make_base(model_type) if base is None else base
        torch.manual_seed(1)
        model = CrossAttentionLM(config, base)
        # Biases and norms start at 0 and 1, where a fault in them would not show.
        for parameter in model.blocks.parameters():
            parameter.data += noise * torch.randn_like(parameter)
        return model.eval()

    return build


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three right-padded samples (B=3, T=7) with chunked contexts (C=2, S=5); the last has one chunk only."""
    generator = torch.Generator().manual_seed(2)
    lengths, chunk_lengths = torch.tensor([7, 5, 3]), torch.tensor([[5, 3], [4, 5], [2, 0]])
    attention_mask = torch.arange(7) < lengths[:, None]
    context_mask = torch.arange(5) < chunk_lengths[..., None]
    return {
        "input_ids": torch.randint(3, VOCABULARY, (3, 7), generator=generator) * attention_mask,
        "attention_mask": attention_mask,
        "context_ids": torch.randint(3, VOCABULARY, (3, 2, 5), generator=generator) * context_mask,
        "context_mask": context_mask,
    }


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Empty folders, with a tokenizer of VOCABULARY words named "tokenizer"."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(tmp_path / "data" / "tokenizer")
    return Places(data=tmp_path / "data", runs=tmp_path / "runs")
