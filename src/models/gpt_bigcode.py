"""A GPTBigCode language model (multi-query attention, learned positions) from random weights."""

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

import src.config
from src.config import Places
from src.models import kv_cache_size
from src.models import tokenizer as prepared_tokenizer
from src.models.architecture import Architecture

if TYPE_CHECKING:
    from transformers import GPTBigCodeForCausalLM


class Config(src.config.Config):
    """Sizes. The vocabulary is the tokenizer's."""

    tokenizer: str = Field(min_length=1)
    """Name of a prepared tokenizer's folder."""
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    max_positions: int = Field(gt=0)
    """Most tokens of a sequence."""
    dropout_rate: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> "Config":
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not divide by num_heads {self.num_heads}.")
        return self


def build(config: Config, places: Places) -> "GPTBigCodeForCausalLM":
    """The model, its weights drawn from torch's global generator.

    Raises:
        DataError: the tokenizer is missing or damaged.
    """
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    tokenizer = prepared_tokenizer.load(places.data / config.tokenizer)
    model = GPTBigCodeForCausalLM(
        GPTBigCodeConfig(
            vocab_size=len(tokenizer),
            n_positions=config.max_positions,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            resid_pdrop=config.dropout_rate,
            embd_pdrop=config.dropout_rate,
            attn_pdrop=config.dropout_rate,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.name_or_path = str(places.data / config.tokenizer)
    return model


def check(config: Config, places: Places) -> None:
    """Look for the tokenizer.

    Raises:
        DataError: it is missing.
    """
    prepared_tokenizer.require(places.data / config.tokenizer)


def architecture(config: Config, places: Places) -> Architecture:
    """The sizes as configured."""
    del places  # they are in the config
    sizes = (config.num_layers, config.hidden_size, config.num_heads)
    return Architecture("gpt_bigcode", *sizes, num_key_value_heads=1, max_positions=config.max_positions)


def cache_bytes(config: Config, places: Places, value_bytes: int) -> dict[str, int] | None:
    """What is kept of a context that stands in the prompt, in bytes per token; None where the sizes are not known."""
    return kv_cache_size.of_decoder(architecture(config, places), value_bytes)


def drawn(config: Config) -> bool:
    """Whether its weights are random: they are."""
    del config
    return True
