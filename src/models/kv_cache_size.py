"""What must be kept of a context to answer a further question on it, in bytes per token of the context.

L layers, K key/value heads and d width of a head of the decoder, D its hidden size; n blocks with own weights, K' and d' of theirs.

- A decoder with the context in its prompt keeps keys and values of each layer: 2 L K d numbers.
- With cross-attention the last hidden state is enough, D numbers: what a cache on disk holds, and what XC-Cache counts (Monteiro et al.
  2024, arXiv 2404.15420). While a context is read there are keys and values of each block beside it, 2 n K' d' numbers, which
  follow from the hidden states.
"""

from src.interfaces import Architecture

BLOCK_BYTES = 4
"""Of a number that a block makes: blocks are float32 whatever the base's type."""


def decoder_bytes(sizes: Architecture | None, value_bytes: int) -> dict[str, int] | None:
    """{"cache_bytes_per_context_token"} of a decoder that reads the context as a part of its prompt; None where its sizes are not known.

    value_bytes: of one number in the decoder.
    """
    return None if sizes is None else {"cache_bytes_per_context_token": numbers_per_token(sizes) * value_bytes}


def cross_attention_bytes(sizes: Architecture, num_blocks: int, block_key_values: int, value_bytes: int) -> dict[str, int]:
    """The same of a decoder with cross-attention; and, to compare, what its blocks keep besides, and what the decoder alone would.

    num_blocks: those with weights of their own. block_key_values: numbers that keys and values of one of them are, 2 K' d'.
    """
    return {
        "cache_bytes_per_context_token": sizes.hidden_size * value_bytes,
        "projected_bytes_per_context_token": num_blocks * block_key_values * BLOCK_BYTES,
        "decoder_cache_bytes_per_context_token": numbers_per_token(sizes) * value_bytes,
    }


def numbers_per_token(sizes: Architecture) -> int:
    """Numbers that self-attention keeps of one token: 2 L K d."""
    return 2 * sizes.num_layers * sizes.num_key_value_heads * (sizes.head_size or sizes.hidden_size // sizes.num_heads)
