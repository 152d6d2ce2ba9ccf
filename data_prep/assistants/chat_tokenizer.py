"""A tokenizer for conversations: `python -m data_prep.assistants.chat_tokenizer --from gpt2 --template oasst --name
gpt2_chat`.

Writes a folder below --data_path: the tokenizer --from plus the control tokens of a template, appended in a fixed
order, and the template itself. Existing tokens have the same ids as before. An existing chat template is replaced.
"""

import argparse
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import command
from src.data.text import tokenizers
from src.errors import ConfigError, DataError
from src.experiments.config import unknown_text
from src.systems.assistants.conversations import templates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COMMAND = "python -m data_prep.assistants.chat_tokenizer"
CONTROLS = {"chatml": templates.CHATML_TOKENS, "oasst": templates.OASST_TOKENS}


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        required=True,
        metavar="TOKENIZER",
        help="a folder below --data_path, any other folder, or a hub id",
    )
    add("--template", required=True, metavar="TEMPLATE", help=f"one of {', '.join(CONTROLS)}")
    add("--name", required=True, help="the new folder below --data_path")
    add(
        "--end_token",
        metavar="TOKEN",
        help="end token in the vocabulary, such as </s>, if the tokenizer defines no end token",
    )


def prepare(data_path: Path, source: str, template: str, name: str, end_token: str | None = None) -> bool:
    """Make the folder `data_path / name`; return False if it is already complete and up to date.

    Raises:
        ConfigError: there is no such template.
        DataError: the source is missing or damaged, has no end token, or is the output folder itself.
        RunError: the disk refuses.
    """
    if template not in CONTROLS:
        raise ConfigError(f"--template: {unknown_text('template', template, CONTROLS)}")
    folder, place = data_path / name, data_path / source
    if place.resolve() == folder.resolve():
        raise DataError(f"--name: {folder} is also the source (--from). Choose another name.")
    tokenizer = tokenizers.load(place if place.is_dir() else source, end_token=end_token)
    num_base_tokens = len(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": [*CONTROLS[template]]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = templates.read_source(template)
    made_from = {
        "tokenizer_sha256": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    return (
        command.make_folder(
            folder, COMMAND, made_from, lambda partial_folder: _save(tokenizer, partial_folder, num_base_tokens)
        )
        is not None
    )


def _save(tokenizer: "PreTrainedTokenizerFast", folder: Path, num_base_tokens: int) -> Mapping[str, Any]:
    tokenizer.save_pretrained(folder)
    return {"tokens": len(tokenizer), "new_tokens": len(tokenizer) - num_base_tokens}


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
