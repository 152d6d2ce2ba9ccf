"""Export a trained model for other programs. Adapters are merged into the weights, and the tokenizer is copied.

A plain model is saved as a transformers model. A cross-attention model is saved as its new blocks in the layout of
XC-Cache, and the base in base/ if it has adapters, was trained, or is not available elsewhere. XC-Cache's own loader
needs --with_base.

A model that reads images is saved with the processor of its frames: AutoModelForImageTextToText and AutoProcessor load
the folder.

With --standalone a cross-attention model is saved with its code, so that transformers loads the folder without this
project:
AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).generate(input_ids, context=context_ids).

python -m src.models.export results/runs/EXP_ID exported                        its last checkpoint
python -m src.models.export results/runs/EXP_ID/checkpoints/step-00002000 exported --dtype bfloat16
python -m src.models.export results/runs/EXP_ID exported --average_last 5       the mean of its last checkpoints
"""

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import CheckpointError, ConfigError
from src.experiments.config import Places
from src.files import new_directory, read_json, write_json
from src.models import lora, prepared_tokenizer
from src.models.averaging import Average
from src.models.load import PLACES, checkpoint_folder
from src.models.trained_model import from_checkpoint
from src.runs.store import expand_run
from src.support.command_line import make_parser, run_command

log = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Request:
    """The options of an export."""

    target: Path
    """The final path of the folder."""
    places: Places
    has_adapters: bool
    """Whether trained adapters were merged into the weights."""
    with_base: bool
    standalone: bool


def export(  # noqa: PLR0913, PLR0917
    source: Path,
    target: Path,
    places: Places,
    dtype: str | None = None,
    with_base: bool = False,
    standalone: bool = False,
    average: Average | None = None,
) -> None:
    """Write the model of the run or checkpoint `source` to the new folder `target`. dtype: type of the weights; None:
    as trained. average: other weights than those of a checkpoint.

    with_base: also write the base weights of a cross-attention model. standalone: write the complete model with its
    code.

    Raises:
        ConfigError: `target` exists, or other programs cannot load the model.
        CheckpointError: there is no complete checkpoint.
        UserError: a part of the model is missing.
    """
    import torch
    from transformers import PreTrainedModel

    from src.models.wrapper import Wrapper

    if target.exists():
        raise ConfigError(f"{target}: exists. Name a new folder.")
    source = expand_run(source, places.runs)
    folder = checkpoint_folder(source)
    model: Any = from_checkpoint(folder, str(folder), places)
    if average:
        average.load_into(model, source, folder)
    merged = lora.merge(model)
    if dtype:
        model = model.to(getattr(torch, dtype))
    if (with_base or standalone) and not getattr(model, "has_separate_base", False):
        raise ConfigError(
            f"--{'with_base' if with_base else 'standalone'}: is only for cross-attention models, "
            "which have a separate base model. Leave it out."
        )
    with new_directory(target) as folder_path:
        _copy_tokenizer(folder / "tokenizer", folder_path)
        if isinstance(model, Wrapper):
            model.export(folder_path, Request(target, places, bool(merged), with_base, standalone))
        elif isinstance(model, PreTrainedModel):
            model.save_pretrained(folder_path)
        else:
            raise ConfigError(
                f"{folder}: other programs cannot load a {type(model).__name__}. Load it with this project."
            )
        if (folder_path / "base").is_dir():
            _copy_tokenizer(folder / "tokenizer", folder_path / "base")
        prepared_tokenizer.write_ends(folder_path)
        if write_processor := getattr(model, "write_processor", None):
            write_processor(folder_path, folder, prepared_tokenizer.load(folder_path))
    log.info("%s: %d adapters merged.", target, merged)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files, with the class and token names of transformers 4, which transformers 5 also reads."""
    for path in source.iterdir():
        shutil.copy(path, folder)
    path = folder / "tokenizer_config.json"
    config = read_json(path, CheckpointError)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    write_json(path, config)


def push(folder: Path, repository: str) -> None:
    """Upload an exported folder, as one commit, to a repository of the hub. A missing repository is created as private.

    Raises:
        ConfigError: the hub cannot be reached, or refuses. The folder is not removed.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    try:
        api = huggingface_hub.HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        address = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"--push_to_hub {repository}: not uploaded ({reason}). {folder} is complete; upload it with `hf upload`."
        ) from None
    log.info("%s: uploaded to %s.", folder, address)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.models.export", __doc__)
    parser.add_argument("source", type=Path, help="a run, a prefix of its id, or one of its checkpoints")
    parser.add_argument("target", type=Path, help="the new folder")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: as trained)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--average_last", type=int, metavar="N", help="the mean of the N newest checkpoints of a run")
    source.add_argument("--average_steps", type=int, nargs="+", metavar="STEP", help="the mean of these checkpoints")
    source.add_argument("--ema", action="store_true", help="the moving average of loop.ema")
    parser.add_argument(
        "--with_base", action="store_true", help="for a cross-attention model: also write the base weights"
    )
    parser.add_argument(
        "--standalone",
        action="store_true",
        help="for a cross-attention model: include its code, for transformers without this project",
    )
    parser.add_argument("--push_to_hub", metavar="REPO", help="also upload the folder to this repository of the hub")
    parser.add_argument("--data_path", type=Path, default=PLACES.data, metavar="DIR", help="prepared data sets")
    parser.add_argument(
        "-sb",
        "--savedir_base",
        type=Path,
        default=PLACES.runs,
        metavar="DIR",
        help="save directories of the model's parents",
    )
    args = parser.parse_args(argv)

    def act() -> int:
        places = Places(args.data_path, args.savedir_base)
        average = Average(args.average_last, args.average_steps or (), args.ema)
        weights = None if average == Average() else average
        export(args.source, args.target, places, args.dtype, args.with_base, args.standalone, weights)
        if args.push_to_hub:
            push(args.target, args.push_to_hub)
        return 0

    return run_command(act)


if __name__ == "__main__":
    sys.exit(main())
