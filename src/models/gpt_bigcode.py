"""A GPTBigCode language model (multi-query attention, learned positions) with random weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from src.experiments.config import Places
from src.experiments.interfaces import Architecture, ModelConfig
from src.models import kv_cache_size, prepared_tokenizer

if TYPE_CHECKING:
    from transformers import GPTBigCodeForCausalLM


class Config(ModelConfig):
    """Sizes of the model. The vocabulary is the tokenizer's."""

    tokenizer: str = Field(min_length=1)
    """Name of a prepared tokenizer's folder."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    num_layers: int = Field(gt=0)
    """Transformer layers."""
    num_heads: int = Field(gt=0)
    """Attention heads; hidden_size is divisible by it."""
    max_positions: int = Field(gt=0)
    """Maximum number of tokens of a sequence."""
    dropout_rate: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of embeddings, attention and residuals."""
    extra_tokens: list[str] | None = None
    """Control tokens to add to the vocabulary."""

    @model_validator(mode="after")
    def _heads_share_the_width(self) -> "Config":
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size: expected a multiple of num_heads {self.num_heads}, got {self.hidden_size}.")
        return self

    def build(self, places: Places) -> "GPTBigCodeForCausalLM":
        """Build the model with weights drawn from torch's global generator.

        Raises:
            DataError: the tokenizer is missing or damaged.
        """
        from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

        tokenizer = prepared_tokenizer.load(places.data / self.tokenizer, self.new_tokens())
        model = GPTBigCodeForCausalLM(
            GPTBigCodeConfig(
                vocab_size=len(tokenizer),
                n_positions=self.max_positions,
                n_embd=self.hidden_size,
                n_layer=self.num_layers,
                n_head=self.num_heads,
                resid_pdrop=self.dropout_rate,
                embd_pdrop=self.dropout_rate,
                attn_pdrop=self.dropout_rate,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        model.name_or_path = str(places.data / self.tokenizer)
        return model

    def check(self, places: Places) -> None:
        prepared_tokenizer.require(places.data / self.tokenizer)

    def tokenizer_folder(self, places: Places) -> Path:
        return places.data / self.tokenizer

    def new_token_ids(self, places: Places) -> list[int]:
        tokenizer = prepared_tokenizer.load(places.data / self.tokenizer, self.new_tokens())
        return [tokenizer.convert_tokens_to_ids(token) for token in self.new_tokens()]

    def architecture(self, places: Places) -> Architecture:
        del places  # the sizes are in the config
        sizes = (self.num_layers, self.hidden_size, self.num_heads)
        return Architecture("gpt_bigcode", *sizes, num_key_value_heads=1, max_positions=self.max_positions)

    def cache_bytes(self, places: Places, value_bytes: int) -> dict[str, int] | None:
        return kv_cache_size.decoder_bytes(self.architecture(places), value_bytes)

    def has_random_weights(self) -> bool:
        """Always."""
        return True
