"""Turn a GGUF file into a folder that transformers loads: `python -m data_prep.gguf FILE.gguf --name NAME`.

GGUF is the format of llama.cpp. Quantized weights are converted to the chosen type. The folder has weights, tokenizer,
chat template and generation settings, and is a value of a model's `path` like the id of a hub.
"""

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data_prep import command
from src import files
from src.errors import ConfigError, DataError

COMMAND = "python -m data_prep.gguf"
REQUIREMENTS = "requirements/gguf.txt"
DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
"""Values of tokenizer.ggml.pre for GPT-2's splitting after each digit was split off (llama.cpp, llama-vocab.cpp).
transformers 5.23 ignores them: two line breaks before a number would become two tokens instead of one."""


def read(path: Path, dtype: str) -> tuple[Any, Any]:
    """Read model and tokenizer of a GGUF file. dtype: name of a type of torch.

    The files next to it are not read. transformers would take the tokenizer of another model from them.

    Raises:
        DataError: the file is damaged, incomplete, an encoder-decoder, of an architecture that transformers cannot
            read, or has more tokens than embeddings.
    """
    import torch

    with files.reading(path, DataError), open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise DataError(f"{path}: not a GGUF file: it starts with {magic!r}, expected b'GGUF'.")
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, "model.gguf")
        link.symlink_to(path.resolve())
        model, tokenizer = _read_alone(link, path)
    if len(tokenizer) > model.config.vocab_size:
        sizes = f"{len(tokenizer)} tokens, but {model.config.vocab_size} embeddings"
        raise DataError(f"{path}: the tokenizer has {sizes}. Use a file whose tokens all have an embedding.")
    tokenizer.model_max_length = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    return model.to(getattr(torch, dtype)), _split_digits(tokenizer, _pre_tokenizer(path))


def _read_alone(link: Path, path: Path) -> tuple[Any, Any]:
    """Read model and tokenizer through a link in a folder that has nothing else. path: the file, for messages."""
    import torch
    import transformers

    folder, options = link.parent, {"gguf_file": link.name, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        if config.is_encoder_decoder:
            raise ValueError("an encoder-decoder, whose activation is not in the file")
        # In float32 first: rows of float16 files would be rounded twice.
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
            output_loading_info=True,
            **options,
        )
        model, report = loaded
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # a damaged file can raise any Exception
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{path}: cannot be read ({reason[:200]}). Download it again, or use a decoder of an architecture that "
            "transformers reads."
        ) from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise DataError(f"{path}: incomplete: {missing} missing. Download it again.")
    return model, tokenizer


def _pre_tokenizer(path: Path) -> str | None:
    """How text is split before its bytes are merged, as the file names it."""
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("tokenizer.ggml.pre")
    return field and field.contents()


def _split_digits(tokenizer: Any, name: str | None) -> Any:
    from tokenizers import pre_tokenizers

    if name in DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)
    parser.add_argument("--name", required=True, help="of the folder, and the `path` of an experiment's model")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="type of the saved weights (default: %(default)s)",
    )
    command.add_data_path(parser)


def convert(file: Path, name: str, dtype: str, data_path: Path) -> None:
    """Make the folder `data_path / name`.

    Raises:
        ConfigError: the package gguf is not installed.
        DataError: see `read`.
        RunError: the disk refuses.
    """
    if find_spec("gguf") is None:
        raise ConfigError(f"{file}: needs a package that is not installed: pip install -r {REQUIREMENTS}")
    if not file.is_file():
        raise DataError(f"{file}: no such file.")
    with files.reading(file, DataError):
        made_from = {"sha256": files.sha256(file), "dtype": dtype}

    def fill(folder: Path) -> dict[str, Any]:
        model, tokenizer = read(file, dtype)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {"parameters": model.num_parameters(), "tokens": len(tokenizer)}

    command.make_folder(data_path / name, COMMAND, made_from, fill)


main = command.main_of(COMMAND, __doc__, _add_options, convert)

if __name__ == "__main__":
    sys.exit(main())
