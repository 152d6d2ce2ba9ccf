"""Read and write the tensors and the state of a checkpoint folder. See src/runs/checkpoints/checkpoints.py for the last
and the best one.

A folder has model.safetensors (trained weights only), optimizer.safetensors, state.json, model.json (the `model` part
of the experiment with defaults), tokenizer/, config.json (a copy of the run's), branch.json of a rewound run, and
manifest.json with the hash of every file. Sharded trainings write shards instead of optimizer.safetensors: FSDP2 below
optimizer/, ZeRO below zero/. Only DeepSpeed's shards are pickles.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

from src import files
from src.errors import CheckpointError, RunError, TrainingError
from src.runs.checkpoints import checkpoints, pins
from src.runs.history import branches
from src.runs.lease import directory_lock
from src.runs.store import CONFIG
from src.support import distributed
from src.support.weights import is_unfilled, load_trained, read_tensors
from src.training.checkpointing import consolidate
from src.training.checkpointing.safetensors_stream import SEPARATOR

OPTIMIZER, EXPERIENCE = "optimizer.safetensors", "experience.safetensors"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def begin(run: Path, step: int) -> Iterator[Path]:
    """Yield a folder that atomically becomes the checkpoint of `step` when the block ends without an error.

    An existing checkpoint of this step, from a stop during an evaluation, is not replaced while another process uses
    it. It has the same weights; resuming from it repeats the evaluation.

    Raises:
        RunError: the disk refuses. Earlier checkpoints do not change.
    """
    final = checkpoints.folder(run, step)
    try:
        with files.new_directory(final, around=lambda: _hold_unused(run, final)) as folder:
            yield folder
    except _InUse as error:
        log.info("%s: not replaced, as another process uses it: %s", final, error)


class _InUse(Exception):
    """Another process uses the checkpoint. The message names it."""


@contextlib.contextmanager
def _hold_unused(run: Path, checkpoint: Path) -> Iterator[None]:
    """Hold the lock of the run's folder; _InUse if another process uses `checkpoint`."""
    with directory_lock(run, create=False):
        if checkpoint.exists():
            try:
                pinned = pins.find_pinned(run, [checkpoint], pins.StalenessProbe())
            except RunError as error:
                raise _InUse(str(error)) from None
            if pinned:
                raise _InUse(pinned[checkpoint])
        yield


def write(
    folder: Path,
    weights: dict[str, Tensor] | None,
    moments: dict[str, Tensor] | None,
    state: dict[str, Any],
    about: "CheckpointMetadata",
) -> None:
    """Write a checkpoint. weights, moments (optimizer state): None if the engine writes them as shards."""
    if weights is not None:
        save_file(weights, folder / "model.safetensors")
    if moments is not None:
        save_file(moments, folder / OPTIMIZER)
    files.write_json(folder / "state.json", state)
    files.write_json(folder / "model.json", about.model)
    _save_tokenizer(about.tokenizer, folder / "tokenizer")


def copy_experience(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors of `spec.Experience` to the CPU. Collective.

    Raises:
        TrainingError: they differ between ranks, as only those of rank 0 are written.
    """
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    _require_equal_experience(copies)
    return copies


def _require_equal_experience(tensors: dict[str, Tensor]) -> None:
    if distributed.world_size() == 1:
        return
    digests = distributed.all_gather_list([hashlib.sha256(save(tensors)).hexdigest()])
    different_ranks = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different_ranks:
        error = TrainingError(
            f"Experience.tensors returns other tensors on rank {different_ranks[0]} than on rank 0, "
            "and only those of rank 0 are saved. Gather them on all ranks."
        )
        error.everywhere = True
        raise error


def load_experience(folder: Path) -> dict[str, Tensor]:
    """Read the copies of `copy_experience`, on the CPU; {} if the file is missing."""
    return read_tensors(folder / EXPERIENCE) if (folder / EXPERIENCE).exists() else {}


def origin(run: Path) -> dict[str, bytes]:
    """Content of the files that are copied into each checkpoint to describe its origin, by file name.

    Raises:
        RunError: config.json is missing or cannot be read.
    """
    names = [CONFIG, branches.FILE] if (run / branches.FILE).exists() else [CONFIG]
    try:
        return {name: files.read_bytes(run / name) for name in names}
    except FileNotFoundError as error:
        raise RunError(f"{error.filename}: no such file. Start the run again to rewrite it.") from None


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if "os error" in str(error):  # the tokenizers library raises a plain Exception for disk errors
            raise RunError(
                f"{folder}: cannot write: {error}. Nothing complete was lost; make room or choose another folder."
            ) from None
        raise


def load_weights(folder: Path, model: nn.Module) -> dict[str, Any]:
    """Load the weights of the checkpoint in `folder` into `model`, before it is sharded; returns the checkpoint's
    state.

    A model without weights (see `support.weights`) is not changed.

    Raises:
        CheckpointError: the checkpoint is for another model.
    """
    if not is_unfilled(model):
        load_trained(model, folder / "model.safetensors")
    return files.read_json(folder / "state.json", CheckpointError)


class CheckpointMetadata:
    """Model config and tokenizer, saved in every checkpoint so that it can be loaded by itself."""

    def __init__(self, model: dict[str, Any], tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: {"blocks.0.mlp.weight::exp_avg": tensor, …}."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}{SEPARATOR}{key}": torch.as_tensor(value).contiguous()
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the optimizer's state of the checkpoint in `folder` into `optimizer`. Collective.

    Raises:
        CheckpointError: it is for another model, or its shards are damaged.
    """
    ensure_whole_optimizer(folder)
    with distributed.raise_together():
        entries = list(optimizer_entries(folder, model))
    for parameter, entry, value in entries:
        # AdamW has its step count on the CPU, and its moments on the parameter's device.
        device = parameter.device if value.shape == parameter.shape and value.ndim else value.device
        optimizer.state[parameter][entry] = value.to(device)


def optimizer_entries(
    folder: Path, model: nn.Module, tensors: Mapping[str, Any] | None = None
) -> Iterator[tuple[nn.Parameter, str, Any]]:
    """Yield (parameter, "exp_avg", tensor), … of the checkpoint in `folder`. tensors: state by entry name; None: read
    from the checkpoint.

    Raises:
        CheckpointError: an entry is for a parameter that `model` does not train.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for key, value in (read_tensors(folder / OPTIMIZER) if tensors is None else tensors).items():
        name, _, entry = key.rpartition(SEPARATOR)
        if name not in parameters:
            raise CheckpointError(
                f"{folder / OPTIMIZER}: has state for {name or key!r}, which this model does not train. "
                "Use the checkpoint's own model."
            )
        yield parameters[name], entry, value


def ensure_whole_optimizer(folder: Path) -> None:
    """Consolidate the optimizer's state in the checkpoint on rank 0 if it is only in shards. Collective.

    The other ranks wait up to a day, as half an hour is too short for a large model on a slow disk.

    Raises:
        CheckpointError: the shards are missing or damaged.
        RunError: the disk refuses.
    """
    # A killed consolidation can leave an unlisted file.
    if distributed.broadcast_from_rank0(lambda: OPTIMIZER not in files.read_manifest(folder, CheckpointError)["files"]):
        if distributed.is_main():
            whose = "FSDP2" if (folder / "optimizer").is_dir() else "DeepSpeed"
            log.info(
                "%s: consolidating the optimizer state from %s shards, which do not fit this start.",
                folder,
                whose,
            )
        distributed.broadcast_from_rank0(lambda: consolidate.consolidate(folder), timeout=timedelta(days=1))
