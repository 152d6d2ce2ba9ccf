"""Exports a trained model for other programs: adapters are merged into the weights, and the tokenizer is copied.

A plain model is saved as a transformers model. Of a cross-attention model the new blocks are saved in the layout of XC-Cache, and the
base in base/ if it has adapters or was trained.

python -m src.models.export results/runs/EXP_ID exported                        its last checkpoint
python -m src.models.export results/runs/EXP_ID/checkpoints/step-00002000 exported --dtype bfloat16
"""

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from src.command_line import make_parser, run_command
from src.config import Places
from src.errors import ConfigError
from src.files import new_directory
from src.models import lora
from src.models.cross_attention import xc_cache_weights
from src.models.load import PLACES, checkpoint_folder
from src.models.trained_model import from_checkpoint
from src.runs.metadata import expand_run

log = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16", "float16")


def export(source: Path, target: Path, places: Places, dtype: str | None = None) -> None:
    """Write the model of the run or checkpoint `source` to the new folder `target`. dtype: of the weights; None: as trained.

    Raises:
        ConfigError: `target` exists, or no other program can load the model.
        CheckpointError: there is no whole checkpoint.
        UserError: a part of the model is missing.
    """
    import torch

    if target.exists():
        raise ConfigError(f"{target}: is there already. Name a folder that is not.")
    folder = checkpoint_folder(expand_run(source, places.runs))
    model: Any = from_checkpoint(folder, str(folder), places)
    merged = lora.merge(model)
    if dtype:
        model = model.to(getattr(torch, dtype))
    with new_directory(target) as made:
        _write(model, merged > 0, made, folder)
        for path in (folder / "tokenizer").iterdir():
            shutil.copy(path, made)
    log.info("%s: %d adapters merged.", target, merged)


def _write(model: Any, moved: bool, made: Path, folder: Path) -> None:
    """The weights of `model`, trained in the checkpoint `folder`. moved: whether its base has changed."""
    from transformers import PreTrainedModel

    from src.models.cross_attention.layers import CrossAttentionLM
    from src.models.fusion_in_decoder.layers import FusionInDecoder

    if isinstance(model, FusionInDecoder):
        model.base.save_pretrained(made)  # a plain encoder-decoder
    elif isinstance(model, CrossAttentionLM):
        if moved or model.settings.train_all_params:
            model.base.save_pretrained(made / "base")
            model.name_or_path = "base"
        xc_cache_weights.save(model, made)
    elif isinstance(model, PreTrainedModel):
        model.save_pretrained(made)
    else:
        raise ConfigError(f"{folder}: its model is a {type(model).__name__}, which no other program knows. Load it with this project.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.models.export", __doc__)
    parser.add_argument("source", type=Path, help="a run, the beginning of its id, or one of its checkpoints")
    parser.add_argument("target", type=Path, help="the new folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as trained)")
    parser.add_argument("--data_path", type=Path, default=PLACES.data, metavar="DIR", help="prepared data sets")
    parser.add_argument(
        "-sb", "--savedir_base", type=Path, default=PLACES.runs, metavar="DIR", help="save directories of the model's parents"
    )
    args = parser.parse_args(argv)

    def act() -> int:
        export(args.source, args.target, Places(args.data_path, args.savedir_base), args.dtype)
        return 0

    return run_command(act)


if __name__ == "__main__":
    sys.exit(main())
