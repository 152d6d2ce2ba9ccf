"""Export a cross-attention model: its blocks in XC-Cache's layout, or the complete model with its code."""

import logging
from pathlib import Path
from typing import Any

from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.models import hf
from src.systems.crossattn.model import standalone, xc_cache_weights
from src.systems.crossattn.model.layers import CrossAttentionLM

log = logging.getLogger(__name__)


def write(model: CrossAttentionLM, folder: Path, request: Any) -> None:
    """See `Wrapper.export`. Writes the base to base/ if it has adapters, was trained, or is not available elsewhere."""
    if request.standalone:
        standalone.save(model, folder)
        return
    changed = request.has_adapters or model.settings.train_all_params
    base = None if changed else _find_base(model.settings.base, request.places)
    if base is None:
        base = str((request.target / "base").resolve())
        model.base.save_pretrained(folder / "base")
    if unsupported := xc_cache_weights.unlike_reference(model):
        log.warning(
            "%s: XC-Cache's code cannot load it, as it does not support %s. This project can.",
            request.target,
            ", ".join(unsupported),
        )
    xc_cache_weights.save(model, folder, base, request.with_base)


def _find_base(base: ModelConfig, places: Places) -> str | None:
    """Hub id or folder of an unchanged pretrained base; None for any other base."""
    if not isinstance(base, hf.Config) or base.quantization:
        return None
    folder = next((path for path in (places.data / base.path, Path(base.path)) if path.is_dir()), None)
    return str(folder.resolve()) if folder else base.path
