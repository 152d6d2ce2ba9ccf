"""Load models for chat: a run, a checkpoint, an export, a folder of `save_pretrained`, or an id on the hub."""

import logging
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from src.data.parts import leaf_configs
from src.data.text.tokenizers import default_template
from src.errors import CheckpointError, ConfigError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.experiments.kinds import DECODER
from src.experiments.registry import WRITERS
from src.files import read_json
from src.models.hub_files import how_to_get
from src.models.load import checkpoint_folder, load, quantize
from src.runs.store import SavedRun, expand_run
from src.serving.writer import Continuation, Writer

_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_ID_START = re.compile(r"[0-9a-f]{1,32}")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SOURCE = (
    "a run (its save directory or a prefix of its id), a checkpoint, "
    "an export, a folder of save_pretrained, or an id on the hub"
)
"""Help text of the argument that names a model."""


def find_source(source: Path, places: Places) -> Path:
    """The folder `source` below the prepared data, as in a model's `path`; an id on the hub; a folder; or the save
    directory with an id that starts with `source`.

    Raises:
        ConfigError: it is none of them, or several ids start with it.
    """
    source = places.data / source if not source.exists() and (places.data / source).is_dir() else source
    if is_pretrained(source):
        return source
    try:
        return expand_run(source, places.runs)
    except ConfigError as error:
        if _ID_START.fullmatch(source.name):
            raise
        raise ConfigError(f"{error} It is no model either. {how_to_get(str(source), places.data)}") from None


def is_pretrained(source: Path) -> bool:
    """Whether `source` is a folder in transformers' format, or an id on the hub."""
    if source.exists():
        ours = any((source / name).is_file() for name in ("model.json", "exp_dict.json"))
        return not ours and any((source / name).is_file() for name in ("config.json", "adapter_config.json"))
    return _HUB_ID.fullmatch(str(source)) is not None and not source.parent.exists()


def source_name(source: Path, places: Places) -> str:
    """A short name of a model for people: an id and a step, or the name of a folder."""
    source = find_source(source, places)
    if is_pretrained(source):
        return source.resolve().name if source.exists() else str(source)
    folder = checkpoint_folder(source)
    return f"{folder.parents[1].name[:8]} {folder.name}"


def load_pretrained(source: Path, places: Places) -> tuple[Any, Any]:
    """Load a model and tokenizer in transformers' format; in float32 without a GPU, in the saved type with a GPU.

    Raises:
        ConfigError: it cannot be loaded as a model that generates text.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs each retry without a network
    options: dict[str, Any] = {"local_files_only": True} if source.exists() else {}
    dtype = "auto" if torch.cuda.is_available() else torch.float32
    for name in _JSON_FILES:
        if not isinstance(read_json(source / name, ConfigError, {}), dict):
            raise ConfigError(f"{source / name}: expected an object. Restore the file from a copy.")
    try:
        adapter = (source / "adapter_config.json").is_file() and not (source / "config.json").is_file()
        if adapter:
            from peft import AutoPeftModelForCausalLM

            model: Any = AutoPeftModelForCausalLM.from_pretrained(str(source), dtype=dtype).merge_and_unload()
        else:
            config = AutoConfig.from_pretrained(str(source), **options)
            kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model, report = kind.from_pretrained(
                str(source), config=config, dtype=dtype, output_loading_info=True, **options
            )
            if missing := sorted(report["missing_keys"]):
                raise ConfigError(f"{len(missing)} weights are missing, such as {missing[0]}")
        tokenizer = AutoTokenizer.from_pretrained(str(source), **options)
        tokenizer.chat_template = default_template(tokenizer)
        return model.eval(), tokenizer
    except Exception as error:  # noqa: BLE001  transformers can raise any exception for a damaged file
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")[:300]
        advice = f"Name {SOURCE}." if source.exists() else how_to_get(str(source), places.data)
        raise ConfigError(f"{source}: cannot be loaded as a language model: {reason}. {advice}") from None


def load_writer(source: Path, places: Places, gpu_of_8bit: str | None = None) -> tuple[Writer, Any]:
    """Load a model and the writer that answers or continues text with it. gpu_of_8bit: device for 8-bit matrices, if
    requested.

    Raises:
        ConfigError: the model does not generate text, or cannot be loaded in 8 bits.
        UserError: a part of the model is missing.
    """
    source = find_source(source, places)
    if is_pretrained(source):
        model, tokenizer = load_pretrained(source, places)
        model = quantize(model, gpu_of_8bit) if gpu_of_8bit else model
        return _writer_class("conversation" if tokenizer.chat_template else None)(model, tokenizer), model
    try:
        run = checkpoint_folder(source).parents[1]
    except CheckpointError as error:
        if source.exists() and any(source.glob("checkpoints/*")):
            raise
        raise CheckpointError(f"{error} Name {SOURCE}.") from None
    recipe = load_experiment(SavedRun(run).exp, str(run))
    data = getattr(recipe, "data", None)
    parts = [part for _, part in leaf_configs("data", data.validation)] if data else []
    part = next((part for part in parts if part.writer), None)
    base = getattr(recipe, "model", None)
    if part is None and (base is None or base.kind(places) != DECODER):
        raise ConfigError(f"{run}: the model is not a decoder, so it cannot continue text. Name a run of a decoder.")
    model, tokenizer = load(source, places)
    if gpu_of_8bit:
        model = quantize(model, gpu_of_8bit)
    return _writer_class(part and part.writer)(model, tokenizer, part), model


def _writer_class(name: str | None) -> Any:
    if name is None:
        return Continuation
    module, _, attribute = WRITERS[name].rpartition(".")
    return getattr(import_module(module), attribute)
