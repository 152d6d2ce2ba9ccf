"""A trained model as transformers and other programs load it: adapters merged into the weights, the tokenizer beside them.

python -m src.models.export results/runs/EXP_ID exported                        its last checkpoint
python -m src.models.export results/runs/EXP_ID/checkpoints/step-00002000 exported --dtype bfloat16
"""

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from src.config import Places
from src.errors import CheckpointError, ConfigError, UserError
from src.experiments import checkpoints
from src.files import defect, new_directory
from src.models import lora
from src.models.experiment import from_checkpoint

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16", "float16")


def export(source: Path, target: Path, places: Places, dtype: str | None = None) -> None:
    """Write the model of the run or checkpoint `source` to the new folder `target`. dtype: of the weights; None: as they were trained.

    Raises:
        ConfigError: `target` is there, or the model is more than a transformers model.
        CheckpointError: there is no whole checkpoint.
        UserError: what the model is built on cannot be had.
    """
    import torch
    from transformers import PreTrainedModel

    if target.exists():
        raise ConfigError(f"{target}: is there already. Name a folder that is not.")
    folder = source if (source / "model.json").is_file() else checkpoints.newest_whole(source)
    if folder is None:
        raise CheckpointError(f"{source}: neither a checkpoint nor a run that has one.")
    if problem := defect(folder):
        raise CheckpointError(f"{folder}: damaged ({problem.rstrip('.')}). Take another checkpoint.")
    model: Any = from_checkpoint(folder, str(folder), places)
    merged = lora.merge(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"{folder}: its model is a {type(model).__name__}, which transformers does not know. Load it with this project.")
    if dtype:
        model = model.to(getattr(torch, dtype))
    with new_directory(target) as made:
        model.save_pretrained(made)
        for path in (folder / "tokenizer").iterdir():
            shutil.copy(path, made)
    log.info("%s: %d adapters merged.", target, merged)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a run or one of its checkpoints")
    parser.add_argument("target", type=Path, help="the folder to be made")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they were trained)")
    parser.add_argument("--data_path", type=Path, default=ROOT / "results" / "data", metavar="DIR", help="prepared data sets")
    parser.add_argument("-sb", "--savedir_base", type=Path, default=ROOT / "results" / "runs", metavar="DIR", help="of the model's parents")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        export(args.source, args.target, Places(args.data_path, args.savedir_base), args.dtype)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
