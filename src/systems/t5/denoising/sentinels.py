"""Sentinels: the tokens <extra_id_0>, <extra_id_1>, ... that replace masked text, with their ids in the tokenizer."""

from collections.abc import Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from src.errors import ConfigError, DataError
from src.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

AGAIN = "Use T5's tokenizer, or add sentinels: python -m data_prep.t5.t5_tokenizer."


def sentinel_ids(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Ids of <extra_id_0>, <extra_id_1>, ... up to the first missing number.

    They cannot be derived from the vocabulary's size: only some versions include them, and an embedding can be larger.

    Raises:
        DataError: the tokenizer has no sentinels, or some are ordinary tokens, which a corpus could contain.
    """
    return _consecutive_ids(
        {str(token): (index, token.special) for index, token in tokenizer.added_tokens_decoder.items()},
        tokenizer.name_or_path,
    )


def require(tokenizer: "PreTrainedTokenizerFast", num_needed: int, field: str) -> list[int]:
    """The first `num_needed` sentinels. field: the field of the experiment that needs them.

    Raises:
        DataError: the tokenizer has no sentinels.
        ConfigError: the tokenizer has too few sentinels.
    """
    return _take_first(sentinel_ids(tokenizer), num_needed, field, tokenizer.name_or_path)


def require_in_folder(folder: Path, num_needed: int, field: str) -> None:
    """Like `require`, but reads tokenizer.json without loading the tokenizer. Passes if the file is missing."""
    added_tokens = read_added_tokens(folder)
    if added_tokens is not None:
        _take_first(_consecutive_ids(added_tokens, str(folder)), num_needed, field, str(folder))


def read_added_tokens(folder: Path) -> dict[str, tuple[int, bool]] | None:
    """(id, whether special) of each added token in tokenizer.json; None if the file is missing or damaged."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        tokens = read_json(folder / "tokenizer.json", DataError)["added_tokens"]
        return {token["content"]: (token["id"], token["special"]) for token in tokens}
    except (DataError, LookupError, TypeError):
        return None  # damaged: loading the tokenizer reports the error


def _consecutive_ids(added_tokens: Mapping[str, tuple[int, bool]], where: str) -> list[int]:
    """added_tokens: (id, whether special) of each added token."""
    names = list(takewhile(added_tokens.__contains__, (f"<extra_id_{number}>" for number in count())))
    if not names:
        raise DataError(
            f"{where}: the tokenizer has no sentinels <extra_id_0>, <extra_id_1>, ... for masked text. {AGAIN}"
        )
    if plain := [name for name in names if not added_tokens[name][1]]:
        raise DataError(
            f"{where}: {plain[0]} is not a special token, so text could contain it. Add sentinels as special tokens."
        )
    return [added_tokens[name][0] for name in names]


def _take_first(ids: list[int], num_needed: int, field: str, where: str) -> list[int]:
    if num_needed > len(ids):
        raise ConfigError(
            f"{field}: masks {num_needed} runs per sequence, each with its own sentinel, but {where} has {len(ids)} "
            "sentinels. Use fewer input tokens, a lower noise_density or a longer mean_span_tokens, "
            f"or make a tokenizer with more sentinels: python -m data_prep.t5.t5_tokenizer --sentinels {num_needed}."
        )
    return ids[:num_needed]
