"""Options of the commands that encode a prepared corpus."""

import argparse
import os
import re
from pathlib import Path
from typing import Any, get_args

from src.data.text import tokenizers
from src.data.text.tokenizers import tokenizer_digest
from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.experiments.kinds import CROSS_ATTENTION, DECODER
from src.experiments.registry import MODELS, bind
from src.systems.crossattn.data import encoded_store, questions, templates
from src.systems.crossattn.data.encoder_inputs import EncoderInputs, EncodingOptions, TooLong


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of the base model and its inputs."""
    add = parser.add_argument
    add(
        "--embedding_model",
        required=True,
        help="the base: a folder of save_pretrained, a hub id in the cache, or an experiment's id",
    )
    add(
        "--maximum_input_length",
        type=int,
        required=True,
        help="maximum tokens of an encoder input: data.context_tokens of the experiments",
    )
    add("--batch_size", type=int, help="most inputs in one batch (default: 8, and no limit with --batch_tokens)")
    add("--data_cache_path", type=Path, required=True, help="folder of prepared corpora")
    add("--corpus", default="nq", help="folder of the prepared corpus (default: %(default)s)")
    add(
        "--template", choices=get_args(templates.Name), default="assistant", help="data.template (default: %(default)s)"
    )
    add("--chunked_contexts", action="store_true", help="data.chunked_contexts: each context is encoded on its own")
    add(
        "--questions_on_contexts",
        action="store_true",
        help="data.questions_on_contexts: put the question before each context",
    )
    add(
        "--too_long",
        choices=get_args(TooLong),
        default="truncate",
        help="data.too_long, of longer contexts (default: %(default)s)",
    )
    add(
        "--model_dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the base (default: %(default)s)",
    )
    add(
        "--savedir_base",
        "-sb",
        type=Path,
        default=Path("results/runs"),
        help="where an experiment that is the base was trained",
    )


def model(options: argparse.Namespace) -> ModelConfig:
    """Config of the base model."""
    raw: dict[str, Any] = {"name": "hf", "path": options.embedding_model, "dtype": options.model_dtype}
    if re.fullmatch(r"[0-9a-f]{32}", options.embedding_model):
        raw = {"name": "experiment", "exp_id": options.embedding_model}
    return bind(MODELS, raw)


def rules(options: argparse.Namespace) -> EncodingOptions:
    """Rules for the encoder inputs."""
    rule_options = (options.template, options.questions_on_contexts, options.chunked_contexts, options.too_long)
    return EncodingOptions(options.maximum_input_length, *rule_options)


def architecture(base: ModelConfig, places: Places, rules: EncodingOptions) -> tuple[dict[str, Any], int]:
    """Identity and hidden size of the base model.

    Raises:
        ConfigError: the base is not a decoder, has no weights yet, is of an unknown family, or has a shorter context
            than `rules` allow.
    """
    base.check(places)
    try:
        base.require_kind(DECODER, places, "--embedding_model")
    except ValueError as error:
        inside = encoded_store.base_identity(base, places) if base.kind(places) == CROSS_ATTENTION else None
        advice = f" Use the decoder that encodes its contexts: {encoded_store.describe_base(inside)}." if inside else ""
        raise ConfigError(f"{error}{advice}") from None
    sizes, base_id = base.architecture(places), encoded_store.base_identity(base, places)
    if base_id is None:
        raise ConfigError(f"--embedding_model: {base.name!r} is not trained yet, so it cannot encode. Train it first.")
    if sizes is None:
        raise ConfigError(
            f"--embedding_model: cross-attention cannot be attached to {encoded_store.describe_base(base_id)}. "
            "Use a decoder, such as a model of type gpt2 or llama."
        )
    if sizes.max_positions is not None and rules.context_tokens > sizes.max_positions:
        raise ConfigError(
            f"--maximum_input_length: {rules.context_tokens} tokens are more than the {sizes.max_positions} "
            f"positions of the embedding model. Use at most {sizes.max_positions}."
        )
    return base_id, sizes.hidden_size


def inputs(base: ModelConfig, places: Places, rules: EncodingOptions) -> tuple[EncoderInputs, str]:
    """Build the encoder inputs with the tokenizer of the base; return them with its digest.

    Raises:
        DataError: the tokenizer cannot be loaded.
        ConfigError: the template leaves no tokens for the context.
    """
    tokenizer = tokenizers.load(base.tokenizer_folder(places) or _base_path(base, places))
    prompter = templates.Prompter(tokenizers.SafeTokenizer(tokenizer), rules.template)
    questions.require_room("context_tokens", rules.context_tokens, prompter.fixed_context_tokens + 1)
    return EncoderInputs(prompter, rules), tokenizer_digest(tokenizer)


def _base_path(base: ModelConfig, places: Places) -> str | Path:
    """Folder of the base below the prepared data if it exists, else its path or hub id."""
    path: str = base.path  # type: ignore[attr-defined]  hf has one
    return places.data / path if os.path.isdir(places.data / path) else path
