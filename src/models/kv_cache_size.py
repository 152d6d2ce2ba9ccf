"""Bytes per context token of the cache that answers further questions on a context.

The decoder has L layers, K key/value heads of width d, and hidden size D; n blocks have their own weights, with K'
heads of width d'.

- A decoder with the context in its prompt caches keys and values of each layer: 2 L K d numbers.
- With cross-attention the last hidden state is enough, D numbers: the size on disk, as in XC-Cache (Monteiro et al.
  2024, arXiv 2404.15420). During generation the blocks also cache keys and values, 2 n K' d' numbers in total.
"""

from src.experiments.interfaces import Architecture

BLOCK_BYTES = 4
"""Bytes of a number in a block. Blocks are always float32."""


def decoder_bytes(sizes: Architecture | None, value_bytes: int) -> dict[str, int] | None:
    """{"cache_bytes_per_context_token"} of a decoder with the context in its prompt; None if the sizes are unknown.

    value_bytes: bytes of one number in the decoder.
    """
    return None if sizes is None else {"cache_bytes_per_context_token": numbers_per_token(sizes) * value_bytes}


def cross_attention_bytes(
    sizes: Architecture, num_blocks: int, block_key_values: int, value_bytes: int
) -> dict[str, int]:
    """The same for a cross-attention model; for comparison, also keys and values of its blocks, and of the plain
    decoder.

    num_blocks: blocks with their own weights. block_key_values: numbers in keys and values of one block, 2 K' d'.
    """
    return {
        "cache_bytes_per_context_token": sizes.hidden_size * value_bytes,
        "projected_bytes_per_context_token": num_blocks * block_key_values * BLOCK_BYTES,
        "decoder_cache_bytes_per_context_token": numbers_per_token(sizes) * value_bytes,
    }


def numbers_per_token(sizes: Architecture) -> int:
    """Numbers that self-attention caches per token: 2 L K d."""
    return 2 * sizes.num_layers * sizes.num_key_value_heads * (sizes.head_size or sizes.hidden_size // sizes.num_heads)
