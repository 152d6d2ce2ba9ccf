"""Tokenizers in prepared folders, from which models with random weights get their vocabulary."""

import os
from pathlib import Path
from typing import Any

from src.errors import DataError


def load(folder: Path) -> Any:
    """The tokenizer in `folder`.

    Raises:
        DataError: it is missing or damaged.
    """
    from transformers import AutoTokenizer

    require(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file gives a bare Exception, or whatever a wrong type leads to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{folder}: its tokenizer cannot be read ({reason[:200]}). Prepare it again.") from error


def require(folder: Path) -> None:
    """Raises DataError where a file of the tokenizer is missing."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not os.path.isfile(folder / name):  # unlike Path.is_file, False for a name that is too long
            made = "python -m data_prep.stdlib_qa makes stdlib_tokenizer, data_prep.t5_tokenizer one for T5"
            raise DataError(f"{folder}: no tokenizer here ({name} is missing). Prepare it ({made}), or name another --data_path.")
