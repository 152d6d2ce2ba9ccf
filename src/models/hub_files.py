"""Locate the files of a pretrained model: its snapshot in the local Hugging Face cache, and its weights."""

import os
from pathlib import Path

from src.errors import CheckpointError, ConfigError
from src.experiments.config import nearest_text
from src.files import read_json

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weight files that transformers looks for, in its order; each can also be an index of shards."""


SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that `make smollm2` makes in results/data."""


def find_snapshot(path: str, revision: str | None, data: Path) -> Path:
    """The folder of a hub id in the local cache. revision: branch, tag or commit; None for main. data: the folder of
    the prepared data, for the error.

    Raises:
        ConfigError: it is not downloaded.
    """
    repository, name = _hub_cache() / f"models--{path.replace('/', '--')}", revision or "main"
    reference = repository / "refs" / name
    snapshot = repository / "snapshots" / (reference.read_text().strip() if os.path.isfile(reference) else name)
    if not os.path.isfile(snapshot / "config.json"):
        what = f"{path!r}" + (f" at revision {revision!r}" if revision else "")
        raise ConfigError(
            f"{what} is neither a folder nor in the local Hugging Face cache. {how_to_get(path, data, revision)}"
        )
    return snapshot


def how_to_get(path: str, data: Path, revision: str | None = None) -> str:
    """The end of every error for a missing pretrained model: the commands that make or download it, and the folder
    where models are looked up. See `find_snapshot`."""
    folders = [file.parent.relative_to(data) for depth in ("*", "*/*") for file in data.glob(f"{depth}/config.json")]
    hint = nearest_text([path], {SMOLLM2, *map(str, folders)} - {path})
    hint = f"{hint.lstrip()} " if hint else ""
    without_hub = f"convert a GGUF file with `python -m data_prep.gguf FILE.gguf --name {path}`"
    if "smollm2" in path.lower():
        without_hub = f"make {SMOLLM2} in results/data with `make smollm2`"
    command = f"hf download {path}" + (f" --revision {revision}" if revision else "")
    return (
        f"{hint}Download it with `{command}` (gated models: `hf auth login` first), {without_hub}, or set the path to "
        f"a folder, also one below {data} (--data_path)."
    )


def _hub_cache() -> Path:
    """Hugging Face's cache of the hub, from its environment variables. Importing huggingface_hub for this takes 0.17
    s."""
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    hub = Path(os.environ.get("HF_HOME", home)) / "hub"
    return Path(os.environ.get("HF_HUB_CACHE", hub)).expanduser()


def find_weights(folder: Path) -> Path | None:
    """The weight file, or the index of files, that transformers will load from `folder`."""
    candidates = [folder / f"{name}{suffix}" for name in WEIGHTS for suffix in ("", ".index.json")]
    return next((path for path in candidates if path.is_file()), None)


def weight_files(weights: Path) -> list[Path]:
    """The weight file itself, or the shards of an index, by name.

    Raises:
        CheckpointError: the index is malformed.
    """
    if weights.suffix != ".json":
        return [weights]
    index = read_json(weights, CheckpointError)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values())):
        raise CheckpointError(f'{weights}: expected a dict "weight_map" from weights to file names. Download it again.')
    return [weights.parent / name for name in sorted(set(weight_map.values()))]
