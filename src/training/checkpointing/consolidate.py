"""Converts a checkpoint's shards (ZeRO, FSDP2) into plain safetensors: weights, and optimizer state by parameter name.

python -m src.training.checkpointing.consolidate results/runs/EXP_ID        its newest checkpoint, in place
python -m src.training.checkpointing.consolidate results/runs/EXP_ID --step 2000 --output exported --dtype bfloat16
python -m src.training.checkpointing.consolidate CHECKPOINT --verify        compares it with its shards; writes nothing

In place, the checkpoint gets the files that a training without shards would have written, so that it can be resumed in
any mode and on any number of processes; a training that needs them does this by itself. ZeRO's weights are those of
DeepSpeed's zero_to_fp32, bit for bit; FSDP2's are whole in the checkpoint already. Memory needed does not grow with the
model: tensors go from the shards to the file 16 MB at a time.
"""

import argparse
import contextlib
import fcntl
import logging
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from pydantic import ByteSize, Field, TypeAdapter

from src import files
from src.errors import CheckpointError, ConfigError
from src.runs.checkpoints import checkpoints
from src.runs.store import expand_run
from src.support.command_line import make_parser, run_command
from src.training.checkpointing import dcp_shards, safetensors_stream, zero_layout
from src.training.checkpointing.safetensors_stream import SEPARATOR, StoredTensor

log = logging.getLogger(__name__)
WEIGHTS, OPTIMIZER, INDEX = "model.safetensors", "optimizer.safetensors", "model.safetensors.index.json"
PATTERN = "model{suffix}.safetensors"
SHARD_BYTES = 5 * 10**9
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Export:
    """How weights are written to a folder of their own."""

    folder: Path
    shard_bytes: int = SHARD_BYTES
    """Most that one file of weights holds. A tensor larger than that has a file of its own."""
    dtype: str = "float32"
    """Of the weights, a key of DTYPES; the optimizer's state stays float32."""
    everything: bool = False
    """Frozen weights, every buffer and the second names of tied weights too, not the trained weights alone."""


def locate(path: Path, step: int | None = None) -> Path:
    """Path of a checkpoint: `path` itself or,
    if `path` is a run, its checkpoint of `step` (default: the newest complete one).

    Raises:
        CheckpointError: there is none.
        ConfigError: `step` is given and `path` is no run.
    """
    if not (path / "checkpoints").is_dir():
        if step is not None:
            raise ConfigError(f"--step {step}: {path} is not the folder of a run, which has a folder checkpoints/.")
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder.")
        return path.resolve()
    checkpoint = checkpoints.newest_complete(path) if step is None else checkpoints.folder(path, step)
    if checkpoint is None or not checkpoint.is_dir():
        there = ", ".join(str(checkpoints.step_of(entry)) for entry in checkpoints.list_all(path)) or "none"
        raise CheckpointError(
            f"{path}: has no whole checkpoint{'' if step is None else f' of step {step}'}. "
            f"Steps that are there: {there}."
        )
    return checkpoint.resolve()


def consolidate(checkpoint: Path, export: Export | None = None) -> list[Path]:
    """Write weights and optimizer's state of `checkpoint`'s shards; returns the files written, none if all were there.

    export: where to; None: into the checkpoint itself, whose other files stay and whose manifest then lists the new
    ones too. What it has already is compared with the shards, and not written again. A crash leaves the checkpoint as
    it was, or with whole files added. `checkpoint` may be a folder written by DeepSpeed alone where `export` is given.

    Raises:
        CheckpointError: there are no shards, or they are damaged or do not go together, or are not what the checkpoint
            holds already.
        ConfigError: the folder of `export` is in use.
        RunError: the disk refuses.
    """
    found = _open(checkpoint)
    if export is None:
        with _only_writer(checkpoint):
            return _add_missing(checkpoint, found)
    if export.folder.exists() and not _is_replaceable(export.folder):
        raise ConfigError(
            f"--output {export.folder}: holds something else. "
            "Name a folder that is new, empty, or was written by this command."
        )
    facts = _manifest_entry(checkpoint, found, export.dtype, export.everything)
    with files.new_directory(export.folder, facts) as folder:
        digests = _write_weights(folder, found, export)
        digests |= safetensors_stream.write(folder / OPTIMIZER, optimizer_tensors(found))
        facts["consolidated"]["tensors"] = digests
    return sorted(path for path in export.folder.iterdir() if path.name != files.MANIFEST)


def verify(checkpoint: Path, folder: Path | None = None) -> list[str]:
    """Compare what was consolidated, in the checkpoint or `folder`, with the shards; returns the names of the tensors.

    Raises:
        CheckpointError: there is nothing to compare, or it is damaged or differs; the message names the file and the
            tensors.
    """
    found = _open(checkpoint)
    folder = checkpoint if folder is None else folder
    if problem := files.defect(folder):
        raise CheckpointError(f"{folder}: damaged ({problem}).")
    facts = files.read_manifest(folder, CheckpointError).get("consolidated", {})
    compared: dict[str, StoredTensor] = {}
    kept = _weights_in(folder)
    if kept is not None:
        compared |= found.weights(facts.get("all", False))
        _require_equal(folder / WEIGHTS, compared, kept, DTYPES[facts.get("dtype", "float32")])
    if (folder / OPTIMIZER).exists():
        state = optimizer_tensors(found)
        _require_equal(folder / OPTIMIZER, state, safetensors_stream.read(folder / OPTIMIZER))
        compared |= state
    if not compared:
        raise CheckpointError(
            f"{folder}: has neither {WEIGHTS} nor {OPTIMIZER}, so there is nothing to compare with the shards."
        )
    return list(compared)


def optimizer_tensors(found: zero_layout.Shards) -> dict[str, StoredTensor]:
    """The optimizer's state, named as `src.training.checkpointing.checkpoint` names it:
    {"blocks.0.mlp.weight::exp_avg": tensor, …}."""
    return {
        f"{name}{SEPARATOR}{key}": value for name, entries in found.moments.items() for key, value in entries.items()
    }


def _open(checkpoint: Path) -> zero_layout.Shards:
    """The shards of a checkpoint, found whole:
    by its manifest, or, where DeepSpeed alone wrote it, by the checksums within them."""
    folder, dcp = zero_layout.find(checkpoint), (checkpoint / dcp_shards.MOMENTS).is_dir()
    if folder is None and not dcp:
        raise CheckpointError(
            f"{checkpoint}: holds no shards of DeepSpeed ZeRO (zero_pp_rank_*_mp_rank_00_optim_states.pt), "
            "itself or in zero/, and none of FSDP2 in optimizer/."
        )
    if (checkpoint / files.MANIFEST).exists():
        if problem := files.defect(checkpoint):
            raise CheckpointError(f"{checkpoint}: damaged ({problem}).")
    elif folder:
        for file in sorted(folder.glob("*_states.pt")):
            _check_sums(file)
    return zero_layout.read(folder) if folder else dcp_shards.read(checkpoint)


def _check_sums(file: Path) -> None:
    """Raises CheckpointError where a part of a shard, which is a zip file, is not what was written."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise CheckpointError(f"{file}: damaged ({error}).") from None
    if damaged:
        raise CheckpointError(f"{file}: damaged: its part {damaged} is not what was written.")


@contextlib.contextmanager
def _only_writer(checkpoint: Path) -> Iterator[None]:
    """Hold the lock of a checkpoint's folder: of two that would add to it, the second waits, then finds all there."""
    with files.writing(checkpoint):
        descriptor = os.open(checkpoint, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _add_missing(checkpoint: Path, found: zero_layout.Shards) -> list[Path]:
    """Add the missing files to a checkpoint written by this project."""
    aside = checkpoint.with_name(f".consolidated-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of a killed writer
    manifest = files.read_manifest(checkpoint, CheckpointError)
    wanted = {WEIGHTS: found.weights(everything=False), OPTIMIZER: optimizer_tensors(found)}
    if not found.stage:
        del wanted[WEIGHTS]  # they are there
    for name in [name for name in wanted if name in manifest["files"]]:
        _require_equal(checkpoint / name, wanted[name], safetensors_stream.read(checkpoint / name))
        del wanted[name]
    if not wanted:
        return []
    facts = _manifest_entry(checkpoint, found)
    try:
        with files.new_directory(aside) as folder:
            digests = {name: safetensors_stream.write(folder / name, tensors) for name, tensors in wanted.items()}
        facts["consolidated"]["tensors"] = {
            tensor: digest for names in digests.values() for tensor, digest in names.items()
        }
        written = files.read_manifest(aside, CheckpointError)["files"]
        with files.writing(checkpoint):
            for name in wanted:
                # Unlisted until the next line but one, and no reader needs it before.
                (aside / name).replace(checkpoint / name)
            files.sync_directory(checkpoint)
        files.write_json(checkpoint / files.MANIFEST, {**manifest, **facts, "files": {**manifest["files"], **written}})
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return [checkpoint / name for name in wanted]


def _manifest_entry(
    checkpoint: Path, found: zero_layout.Shards, dtype: str = "float32", everything: bool = False
) -> dict[str, Any]:
    """Entry of the manifest. The caller adds "tensors": {name: sha256 of its bytes}."""
    source = {"from": checkpoint.name, "stage": found.stage, "world_size": found.world_size, "step": found.step}
    return {"consolidated": {**source, "dtype": dtype, "all": everything}}


def _is_replaceable(folder: Path) -> bool:
    """True for an empty folder, or one that holds only files written by this command."""
    if not folder.is_dir():
        return False
    there = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    if not there:
        return True
    manifest = files.read_manifest(folder, CheckpointError) if files.MANIFEST in there else {}
    return "consolidated" in manifest and there == {*manifest["files"], files.MANIFEST}


def _write_weights(folder: Path, found: zero_layout.Shards, export: Export) -> dict[str, str]:
    """model.safetensors, or model-00001-of-0000N.safetensors and their index, as Hugging Face's libraries read them."""
    dtype, weights = DTYPES[export.dtype], found.weights(export.everything)
    plan = split_state_dict_into_shards_factory(
        weights,  # pyright: ignore[reportArgumentType]  of which it asks nothing but the size
        get_storage_size=lambda tensor: safetensors_stream.size_bytes(tensor, dtype),  # pyright: ignore[reportArgumentType]
        filename_pattern=PATTERN,
        max_shard_size=export.shard_bytes,
    )
    digests: dict[str, str] = {}
    for file, names in (plan.filename_to_tensors or {WEIGHTS: []}).items():
        digests |= safetensors_stream.write(
            folder / file, {name: weights[name] for name in names}, dtype, {"format": "pt"}
        )
    if len(plan.filename_to_tensors) > 1:
        files.write_json(folder / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
    return digests


def _weights_in(folder: Path) -> dict[str, StoredTensor] | None:
    """The weights, from one file or several; None if there are none."""
    if (folder / WEIGHTS).exists():
        return safetensors_stream.read(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        return None
    names = sorted(set(files.read_json(folder / INDEX, CheckpointError)["weight_map"].values()))
    return {name: tensor for file in names for name, tensor in safetensors_stream.read(folder / file).items()}


def _require_equal(
    file: Path, expected: Mapping[str, StoredTensor], kept: Mapping[str, StoredTensor], dtype: torch.dtype | None = None
) -> None:
    if problem := safetensors_stream.difference(expected, kept, dtype):
        raise CheckpointError(f"{file}: not what the shards hold ({problem}).")


def byte_count(text: str) -> int:
    """5GB -> 5000000000, 2GiB -> 2147483648.

    Raises:
        ValueError: it is no such number above 0; argparse says which argument it was.
    """
    return int(TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = make_parser("src.training.checkpointing.consolidate", __doc__)
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="save directory, checkpoint, or folder written by DeepSpeed",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="which checkpoint of the run (default: the newest whole one)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write there (default: into the checkpoint)")
    parser.add_argument(
        "--shard-size", "--shard_size", type=byte_count, metavar="SIZE", help="most per file of weights (default: 5GB)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: float32)")
    parser.add_argument(
        "--all", action="store_true", help="frozen weights, all buffers and second names too, not trained weights alone"
    )
    parser.add_argument(
        "--verify", action="store_true", help="write nothing; compare what was written before with the shards"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(lambda: run_action(parse(argv)))


def run_action(args: argparse.Namespace) -> int:
    """Do what was asked, and print it; returns the exit code."""
    export = None
    if args.verify and (args.shard_size or args.dtype or args.all):
        raise ConfigError("--verify: without --shard-size, --dtype and --all. It looks up how the folder was written.")
    if args.output is not None:
        export = Export(args.output, args.shard_size or SHARD_BYTES, args.dtype or "float32", args.all)
    elif args.shard_size or args.dtype or args.all:
        raise ConfigError(
            "--shard-size, --dtype, --all: only with --output. "
            "A checkpoint keeps its trained weights as float32 in one file."
        )
    checkpoint = locate(expand_run(args.source), args.step)
    if export is None and not (checkpoint / files.MANIFEST).exists():
        raise ConfigError(
            f"{checkpoint}: is not a checkpoint of a run (it has no {files.MANIFEST}). "
            "Say with --output where to write."
        )
    if args.verify:
        done = f"{args.output or checkpoint}: {len(verify(checkpoint, args.output))} tensors are what the shards hold."
    else:
        written = consolidate(checkpoint, export)
        done = (
            "\n".join(f"{path}: {path.stat().st_size} bytes" for path in written)
            or f"{checkpoint}: is consolidated already."
        )
    sys.stdout.write(f"{done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
