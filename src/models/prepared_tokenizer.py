"""Tokenizers in prepared folders, which give models with random weights their vocabulary."""

import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from src.errors import DataError
from src.files import read_json, write_json

_COMMANDS = (
    "python -m data_prep.crossattn.stdlib_qa makes stdlib_tokenizer, data_prep.assistants.stdlib_conversations "
    "expression_tokenizer, data_prep.interleaved.digit_pages digit_pages/tokenizer, data_prep.t5.t5_tokenizer one for "
    "T5"
)


def load(folder: Path, extra: Sequence[str] = ()) -> Any:
    """Load the tokenizer in `folder`, with the control tokens `extra`.

    Raises:
        DataError: it is missing or damaged.
    """
    from transformers import AutoTokenizer

    require(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged file can raise any Exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{folder}: the tokenizer cannot be read ({reason[:200]}). Prepare it again.") from error
    if isinstance(tokenizer.chat_template, dict):  # several, by name
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    tokenizer.add_special_tokens({"extra_special_tokens": [*extra]}, replace_extra_special_tokens=False)
    return tokenizer


def require(folder: Path) -> None:
    """Raise DataError if a file of the tokenizer is missing or not JSON."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not os.path.isfile(folder / name):  # unlike Path.is_file, False for a name that is too long
            raise DataError(
                f"{folder}: no tokenizer here ({name} is missing). "
                f"Prepare it ({_COMMANDS}), or set another --data_path."
            )
        _require_json(folder / name, os.stat(folder / name).st_mtime_ns)


@lru_cache
def _require_json(path: Path, mtime_ns: int) -> None:
    del mtime_ns  # only a key of the cache
    read_json(path, DataError)


def end_ids(tokenizer: Any) -> list[int]:
    """Ids of the end token, and of the control token that the chat template writes after an answer, if different."""
    from jinja2 import TemplateError

    ends, mark, after = [tokenizer.eos_token_id], "\x02", ""
    if not isinstance(tokenizer.chat_template, str):
        return ends
    contents = mark, [{"type": "text", "text": mark}]  # templates of vision models read lists
    turns = ("user", "assistant"), ("system", "user", "assistant")  # some templates require a system message
    for content, roles in product(contents, turns):
        talk = [{"role": role, "content": content} for role in roles]
        try:
            _, separator, after = tokenizer.apply_chat_template(talk, tokenize=False).rpartition(mark)
        except (TemplateError, TypeError, KeyError, IndexError, AttributeError, ValueError):
            continue  # the template does not support this conversation
        if separator:
            break
    else:
        return ends
    controls = _control_ids(tokenizer)
    template_end = next(
        (index for index in tokenizer(after, add_special_tokens=False)["input_ids"] if index in controls), ends[0]
    )
    return list(dict.fromkeys([*ends, template_end]))


def write_ends(folder: Path) -> None:
    """Make other programs end generation with the end tokens of the chat template, if the tokenizer in `folder` has
    one."""
    path, tokenizer = folder / "generation_config.json", load(folder)
    if not path.is_file() or tokenizer.chat_template is None:
        return
    config = read_json(path, DataError)
    ends, saved_ids = end_ids(tokenizer), config.get("eos_token_id")
    ends += [
        index
        for index in (saved_ids if isinstance(saved_ids, list) else [saved_ids])
        if index in _control_ids(tokenizer) and index not in ends
    ]
    pad = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    write_json(path, {**config, "eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": pad})


def _control_ids(tokenizer: Any) -> set[int]:
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def grow_embeddings(model: Any, folder: Path, extra: Sequence[str]) -> None:
    """Add embeddings to the model for missing tokens of the tokenizer in `folder` and of `extra`.

    New embeddings are drawn from torch's global generator with mean and covariance of the existing ones, transformers'
    default.
    """
    from src.support.deferred import Recording

    num_tokens = len(load(folder, extra))
    if model.get_input_embeddings().num_embeddings < num_tokens:
        on_paper = model.device.type == "meta" and Recording.active is None
        model.resize_token_embeddings(num_tokens, mean_resizing=not on_paper)
