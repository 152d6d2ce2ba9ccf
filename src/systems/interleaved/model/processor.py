"""Config files for transformers' processors, so that they reproduce the ids and pixels of the training."""

import logging
from pathlib import Path
from typing import Any

from src.errors import CheckpointError, ConfigError
from src.experiments.interfaces import load_experiment
from src.files import read_json, write_atomic, write_json
from src.runs.store import SavedRun

log = logging.getLogger(__name__)
LANCZOS = 1
"""Pillow's number of the Lanczos filter."""
CHAT_TEMPLATE = """{%- set last = namespace(is_text=false) -%}
{{- BEGIN -}}
{%- for message in messages -%}
{%- set parts = [{'type': 'text', 'text': message['content']}] if message['content'] is string \
else message['content'] -%}
{%- for part in parts -%}
{%- if part['type'] == 'image' -%}
{{- '<image>' -}}
{%- set last.is_text = false -%}
{%- else -%}
{{- (' ' if last.is_text else '') + part['text'] -}}
{%- set last.is_text = true -%}
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
"""
"""Chat template that writes messages as a document: without roles, adjacent texts joined by a space."""


def save(folder: Path, checkpoint: Path, tokenizer: Any) -> None:
    """Write a processor into `folder`, with the image settings of the run of `checkpoint`.

    Raises:
        ConfigError: the checkpoint is not in the folder of its run, or the run read no images.
    """
    images = read_images_config(checkpoint)
    square = {"height": images.frame_size, "width": images.frame_size}
    pixels = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": LANCZOS,
        "rescale_factor": 1 / 255,
    }
    if images.style == "idefics2":
        name, settings = "Idefics2", {"do_image_splitting": False, "do_resize": True, "size": square}
    else:
        is_tiled = images.max_size > images.frame_size
        settings = {
            "do_image_splitting": is_tiled,
            "do_resize": images.enlarge,
            "max_image_size": {"longest_edge": images.frame_size},
            "size": {"longest_edge": images.max_size},
        }
        name = "Idefics3"
        if is_tiled and not images.enlarge:
            log.warning(
                "%s: transformers' processor cuts an image of more than %d pixels a side into "
                "more tiles than the model knows. Make such images smaller before, or train with data.images.enlarge.",
                folder,
                images.max_size,
            )
    write_json(
        folder / "preprocessor_config.json", {"image_processor_type": f"{name}ImageProcessor", **pixels, **settings}
    )
    write_json(
        folder / "processor_config.json", {"image_seq_len": images.image_tokens, "processor_class": f"{name}Processor"}
    )
    if not tokenizer.chat_template:
        has_bos = tokenizer.bos_token_id not in (None, tokenizer.eos_token_id)
        write_atomic(folder / "chat_template.jinja", CHAT_TEMPLATE.replace("BEGIN", "bos_token" if has_bos else "''"))
    config = read_json(folder / "tokenizer_config.json", CheckpointError)
    write_json(folder / "tokenizer_config.json", {**config, "processor_class": f"{name}Processor"})


def read_images_config(checkpoint: Path) -> Any:
    """The image settings (`data.images`) of the run of a checkpoint.

    Raises:
        ConfigError: the checkpoint is not in the folder of its run, or the run read no images.
    """
    run = checkpoint.resolve().parents[1]
    if not (run / "exp_dict.json").is_file():
        raise ConfigError(
            f"{checkpoint}: {run} has no exp_dict.json with the image settings. "
            "Name a checkpoint in the folder of its run."
        )
    experiment: Any = load_experiment(SavedRun(run).exp, str(run))
    images = getattr(experiment.data, "images", None)
    if images is None:
        raise ConfigError(f"{run}: its data {experiment.data.name!r} have no images. Name a run that reads images.")
    return images
