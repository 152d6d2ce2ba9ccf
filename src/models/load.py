"""Load a trained model in one call, for notebooks and scripts:

model, tokenizer = load("results/runs/EXP_ID")
model.generate(input_ids=…, attention_mask=…, context_ids=…, context_mask=…, max_new_tokens=40)
"""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from src.errors import CheckpointError, ConfigError
from src.experiments.config import Places
from src.files import ROOT, defect
from src.models import lora, prepared_tokenizer
from src.models.hf import BITSANDBYTES
from src.models.trained_model import from_checkpoint
from src.runs.checkpoints import checkpoints
from src.runs.store import EXP_DICT, expand_run

PLACES = Places(ROOT / "results" / "data", ROOT / "results" / "runs")
"""Default folders of prepared data and of the runs of parents."""


def load(source: str | Path, places: Places = PLACES) -> tuple[Any, Any]:
    """Load model, in eval mode, and tokenizer of a checkpoint, or of the newest complete checkpoint of a run.

    New blocks, which are trained in float32, are converted to the type of their base.

    source: a folder, or a prefix of an experiment id.

    Raises:
        CheckpointError: there is no complete checkpoint.
        UserError: a part of the model is missing.
    """
    from src.models.wrapper import Wrapper

    folder = checkpoint_folder(expand_run(Path(source), places.runs))
    model: Any = from_checkpoint(folder, str(folder), places)
    if isinstance(model, Wrapper):
        model.match_base_type()
    return model.eval(), prepared_tokenizer.load(folder / "tokenizer")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options for loading a model: device and folders."""
    add = parser.add_argument
    add("--device", help="such as cuda (default: the first GPU if any, else the CPU)")
    add("--data_path", type=Path, default=PLACES.data, metavar="DIR", help="prepared data sets")
    add(
        "-sb",
        "--savedir_base",
        type=Path,
        default=PLACES.runs,
        metavar="DIR",
        help="save directories of the model's parents",
    )


def move(model: Any, device: str | None) -> None:
    """Move a model to a device; None: the first GPU if any, else the CPU.

    Raises:
        ConfigError: torch cannot use the device.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device: {device!r} cannot be used ({str(error).splitlines()[0]}). Use a GPU such as cuda:0, or cpu."
        ) from None


def require_8bit(device: str | None) -> str:
    """The GPU for `quantize`. device: see `move`.

    Raises:
        ConfigError: the device is not a GPU, or bitsandbytes is not installed.
    """
    import torch

    if not torch.cuda.is_available() or not (device or "cuda").startswith("cuda"):
        raise ConfigError(f"--8bit: needs a GPU, got {device or 'a machine without one'}. Leave it out.")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"--8bit: needs a package that is not installed: pip install -r {BITSANDBYTES}")
    return device or "cuda"


def quantize(model: Any, device: str) -> Any:
    """Quantize the matrices of a transformers model to 8 bits (LLM.int8()), on a device. Adapters are merged first.

    Raises:
        ConfigError: the model is not a transformers model or already quantized, or torch cannot use the device.
    """
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel

    if not isinstance(model, PreTrainedModel) or hasattr(model.config, "quantization_config"):
        raise ConfigError("--8bit: the model is already quantized, or is not a plain decoder. Leave it out.")
    lora.merge(model)
    try:
        quantized: Any = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            dtype=torch.float16 if model.dtype == torch.float32 else model.dtype,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
            device_map=device,
        )
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device: {device!r} cannot be used ({str(error).splitlines()[0]}). Use a GPU such as cuda:0."
        ) from None
    return quantized.eval()


def checkpoint_folder(source: Path) -> Path:
    """The checkpoint `source`, or the newest complete one of the run `source`.

    Raises:
        CheckpointError: missing or damaged.
    """
    folder = source if (source / "model.json").is_file() else checkpoints.newest_complete(source)
    if folder is None and (damaged_folders := checkpoints.list_all(source)):
        raise CheckpointError(
            f"{damaged_folders[-1]}: damaged, like all checkpoints of the run. "
            "Restore one from a copy, or restart the training with -r 1."
        )
    if folder is None:
        if (source / EXP_DICT).is_file():
            raise CheckpointError(f"{source}: a run without a checkpoint. Train it first, or name another run.")
        if source.parent.name == "checkpoints":
            steps = [path.name for path in checkpoints.list_all(source.parents[1])[-3:]]
            raise CheckpointError(f"{source}: no such checkpoint. Newest: {', '.join(steps) or 'none'}. Name one.")
        raise CheckpointError(
            f"{source}: the folder is neither a checkpoint nor a run: it has no {EXP_DICT}. Name a save directory, the "
            "start of its id, or one of its checkpoints."
        )
    if problem := defect(folder):
        raise CheckpointError(f"{folder}: damaged ({problem.rstrip('.')}). Use another checkpoint.")
    return folder
