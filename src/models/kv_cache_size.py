"""Bytes per context token that must be kept to answer further questions on a context.

L layers, K key/value heads and d width of a head of the decoder, D its hidden size; n blocks with own weights, K' and
d' of theirs.

- A decoder with the context in its prompt keeps keys and values of each layer: 2 L K d numbers.
- With cross-attention the last hidden state is enough, D numbers: the size of a cache on disk, as XC-Cache counts it
  (Monteiro et al. 2024, arXiv 2404.15420). While a context is read, each block also has keys and values, 2 n K' d'
  numbers in all.
"""

from src.experiments.interfaces import Architecture

BLOCK_BYTES = 4
"""Bytes of a block's number: blocks are float32 whatever the base's type."""


def decoder_bytes(sizes: Architecture | None, value_bytes: int) -> dict[str, int] | None:
    """{"cache_bytes_per_context_token"} of a decoder with the context in its prompt; None if its sizes are not known.

    value_bytes: of one number in the decoder.
    """
    return None if sizes is None else {"cache_bytes_per_context_token": numbers_per_token(sizes) * value_bytes}


def cross_attention_bytes(
    sizes: Architecture, num_blocks: int, block_key_values: int, value_bytes: int
) -> dict[str, int]:
    """The same with cross-attention; and, for comparison, for keys and values of its blocks and for the decoder alone.

    num_blocks: those with their own weights. block_key_values: numbers in keys and values of one block, 2 K' d'.
    """
    return {
        "cache_bytes_per_context_token": sizes.hidden_size * value_bytes,
        "projected_bytes_per_context_token": num_blocks * block_key_values * BLOCK_BYTES,
        "decoder_cache_bytes_per_context_token": numbers_per_token(sizes) * value_bytes,
    }


def numbers_per_token(sizes: Architecture) -> int:
    """Numbers that self-attention keeps of one token: 2 L K d."""
    return 2 * sizes.num_layers * sizes.num_key_value_heads * (sizes.head_size or sizes.hidden_size // sizes.num_heads)
