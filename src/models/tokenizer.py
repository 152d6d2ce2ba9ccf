"""Tokenizers in prepared folders, from which models with random weights get their vocabulary, and how a vocabulary grows."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from src.errors import DataError


def load(folder: Path, extra: Sequence[str] = ()) -> Any:
    """The tokenizer in `folder`, with the control tokens `extra`.

    Raises:
        DataError: it is missing or damaged.
    """
    from transformers import AutoTokenizer

    require(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file gives a bare Exception, or whatever a wrong type leads to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{folder}: its tokenizer cannot be read ({reason[:200]}). Prepare it again.") from error
    tokenizer.add_special_tokens({"extra_special_tokens": [*extra]}, replace_extra_special_tokens=False)
    return tokenizer


def require(folder: Path) -> None:
    """Raises DataError where a file of the tokenizer is missing."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not os.path.isfile(folder / name):  # unlike Path.is_file, False for a name that is too long
            made = "python -m data_prep.stdlib_qa makes stdlib_tokenizer, data_prep.t5_tokenizer one for T5"
            raise DataError(f"{folder}: no tokenizer here ({name} is missing). Prepare it ({made}), or name another --data_path.")


def grow_embeddings(model: Any, folder: Path, extra: Sequence[str]) -> None:
    """Give the model embeddings of all tokens of the tokenizer in `folder` and of `extra`, where it has fewer.

    New ones are drawn from torch's global generator with mean and covariance of the others, as transformers does by itself.
    """
    num_tokens = len(load(folder, extra))
    if model.get_input_embeddings().num_embeddings < num_tokens:
        model.resize_token_embeddings(num_tokens)
