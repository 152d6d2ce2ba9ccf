"""The tokens that stand for masked text: <extra_id_0>, <extra_id_1>, ... as the tokenizer's own table numbers them."""

from itertools import count, takewhile
from typing import TYPE_CHECKING

from src.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def sentinel_ids(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Ids of <extra_id_0>, <extra_id_1>, ... up to the last before the first that is missing.

    The size of the vocabulary says nothing of them: some versions count them in and some do not, and a model's embedding may be larger.

    Raises:
        DataError: there are none, or some are ordinary tokens, which a corpus could spell.
    """
    added = {str(token): (index, token.special) for index, token in tokenizer.added_tokens_decoder.items()}
    names = list(takewhile(added.__contains__, (f"<extra_id_{number}>" for number in count())))
    if not names:
        raise DataError(
            f"{tokenizer.name_or_path}: this tokenizer has no sentinels <extra_id_0>, <extra_id_1>, ..., which stand for masked text. "
            "Take one of T5's, or add them: python -m data_prep.t5_tokenizer."
        )
    if plain := [name for name in names if not added[name][1]]:
        raise DataError(
            f"{tokenizer.name_or_path}: {plain[0]} is no special token, so that text could turn into it. Add sentinels as special tokens."
        )
    return [added[name][0] for name in names]


def require(tokenizer: "PreTrainedTokenizerFast", needed: int, field: str) -> list[int]:
    """The first `needed` sentinels.

    Raises:
        DataError: there are none.
        ConfigError: there are fewer than `field` of the experiment needs.
    """
    ids = sentinel_ids(tokenizer)
    if needed > len(ids):
        raise ConfigError(
            f"{field}: masks {needed} runs in a sequence, each with a sentinel of its own, but {tokenizer.name_or_path} has {len(ids)}. "
            "Write fewer input tokens, a lower noise_density or a longer mean_span_tokens."
        )
    return ids[:needed]
