"""Convert a checkpoint's shards (ZeRO, FSDP2) to plain safetensors: weights, and optimizer state by parameter name.

python -m src.training.checkpointing.consolidate results/runs/EXP_ID        newest checkpoint, in place
python -m src.training.checkpointing.consolidate results/runs/EXP_ID --step 2000 --output exported --dtype bfloat16
python -m src.training.checkpointing.consolidate CHECKPOINT --verify        compare with the shards; write nothing

In place, the checkpoint gets the files of an unsharded training, so that it can be resumed in any mode and on any
number of processes; a training that needs them does this itself. ZeRO's weights equal those of DeepSpeed's zero_to_fp32
bit for bit; FSDP2 checkpoints already have complete weights. Memory use does not grow with the model: tensors are
copied from the shards to the file 16 MB at a time.
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
    """Options for writing weights to a separate folder."""

    folder: Path
    shard_bytes: int = SHARD_BYTES
    """Maximum size of a file of weights. A larger tensor has its own file."""
    dtype: str = "float32"
    """Type of the weights, a key of DTYPES. The optimizer's state is always float32."""
    everything: bool = False
    """Also write frozen weights, all buffers and the second names of tied weights."""


def locate(path: Path, step: int | None = None) -> Path:
    """Path of a checkpoint: `path` itself or, for a run, its checkpoint of `step` (default: the newest complete one).

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: `step` is set and `path` is not a run.
    """
    if not (path / "checkpoints").is_dir():
        if step is not None:
            raise ConfigError(
                f"--step {step}: {path} is not the folder of a run. Name a folder that contains checkpoints/."
            )
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder.")
        return path.resolve()
    checkpoint = checkpoints.newest_complete(path) if step is None else checkpoints.folder(path, step)
    if checkpoint is None or not checkpoint.is_dir():
        there = ", ".join(str(checkpoints.step_of(entry)) for entry in checkpoints.list_all(path)) or "none"
        raise CheckpointError(
            f"{path}: no complete checkpoint{'' if step is None else f' of step {step}'}. Existing steps: {there}."
        )
    return checkpoint.resolve()


def consolidate(checkpoint: Path, export: Export | None = None) -> list[Path]:
    """Write weights and optimizer state from the shards of `checkpoint`; returns the written files, [] if all exist.

    export: target; None: add the files to the checkpoint itself and to its manifest. Existing files are compared with
    the shards and not written again. A crash leaves the checkpoint unchanged, or with complete files added. With
    `export`, `checkpoint` can also be a folder written only by DeepSpeed.

    Raises:
        CheckpointError: shards are missing, damaged or inconsistent, or differ from files that the checkpoint already
            has.
        ConfigError: the folder of `export` has other files.
        RunError: the disk refuses.
    """
    shards = _open(checkpoint)
    if export is None:
        with _only_writer(checkpoint):
            return _add_missing(checkpoint, shards)
    if export.folder.exists() and not _is_replaceable(export.folder):
        raise ConfigError(
            f"--output {export.folder}: has other files. Name a new or empty folder, or one written by this command."
        )
    facts = _manifest_entry(checkpoint, shards, export.dtype, export.everything)
    with files.new_directory(export.folder, facts) as folder:
        digests = _write_weights(folder, shards, export)
        digests |= safetensors_stream.write(folder / OPTIMIZER, optimizer_tensors(shards))
        facts["consolidated"]["tensors"] = digests
    return sorted(path for path in export.folder.iterdir() if path.name != files.MANIFEST)


def verify(checkpoint: Path, folder: Path | None = None) -> list[str]:
    """Compare the consolidated files, in the checkpoint or `folder`, with the shards; returns the names of the tensors.

    Raises:
        CheckpointError: there is nothing to compare, or a file is damaged or differs. The message names the file and
            the tensors.
    """
    shards = _open(checkpoint)
    folder = checkpoint if folder is None else folder
    if problem := files.defect(folder):
        advice = "" if folder == checkpoint else ", or consolidate again"
        raise CheckpointError(f"{folder}: damaged ({problem}). Restore it from a copy{advice}.")
    facts = files.read_manifest(folder, CheckpointError).get("consolidated", {})
    compared_tensors: dict[str, StoredTensor] = {}
    weights = _weights_in(folder)
    if weights is not None:
        compared_tensors |= shards.weights(facts.get("all", False))
        _require_equal(folder / WEIGHTS, compared_tensors, weights, DTYPES[facts.get("dtype", "float32")])
    if (folder / OPTIMIZER).exists():
        state = optimizer_tensors(shards)
        _require_equal(folder / OPTIMIZER, state, safetensors_stream.read(folder / OPTIMIZER))
        compared_tensors |= state
    if not compared_tensors:
        raise CheckpointError(
            f"{folder}: has neither {WEIGHTS} nor {OPTIMIZER} to compare with the shards. Consolidate it first."
        )
    return list(compared_tensors)


def optimizer_tensors(shards: zero_layout.Shards) -> dict[str, StoredTensor]:
    """The optimizer's state with the names of `src.training.checkpointing.checkpoint`: {"blocks.0.mlp.weight::exp_avg":
    tensor, …}."""
    return {
        f"{name}{SEPARATOR}{key}": value for name, entries in shards.moments.items() for key, value in entries.items()
    }


def _open(checkpoint: Path) -> zero_layout.Shards:
    """Open the shards of a checkpoint after verifying them: by its manifest, or by the checksums within DeepSpeed's
    files."""
    folder, dcp = zero_layout.find(checkpoint), (checkpoint / dcp_shards.MOMENTS).is_dir()
    if folder is None and not dcp:
        raise CheckpointError(
            f"{checkpoint}: no shards: neither zero_pp_rank_*_mp_rank_00_optim_states.pt here or in zero/ "
            "(DeepSpeed ZeRO) nor optimizer/ (FSDP2). Name a checkpoint of a run with --deepspeed or --fsdp."
        )
    if (checkpoint / files.MANIFEST).exists():
        if problem := files.defect(checkpoint):
            raise CheckpointError(f"{checkpoint}: damaged ({problem}). Restore it from a copy, or use another --step.")
    elif folder:
        for file in sorted(folder.glob("*_states.pt")):
            _check_sums(file)
    return zero_layout.read(folder) if folder else dcp_shards.read(checkpoint)


def _check_sums(file: Path) -> None:
    """Raise CheckpointError if a checksum of a shard, which is a zip file, is wrong."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged_part = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError) as error:
        raise CheckpointError(f"{file}: damaged ({error}). Restore it from a copy.") from None
    if damaged_part:
        raise CheckpointError(f"{file}: damaged: checksum of {damaged_part} is wrong. Restore it from a copy.")


@contextlib.contextmanager
def _only_writer(checkpoint: Path) -> Iterator[None]:
    """Hold the lock of a checkpoint's folder, so that a second process waits and then finds all files."""
    with files.writing(checkpoint):
        descriptor = os.open(checkpoint, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _add_missing(checkpoint: Path, shards: zero_layout.Shards) -> list[Path]:
    """Add the missing files to a checkpoint written by this project."""
    aside = checkpoint.with_name(f".consolidated-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of a killed writer
    manifest = files.read_manifest(checkpoint, CheckpointError)
    missing_files = {WEIGHTS: shards.weights(everything=False), OPTIMIZER: optimizer_tensors(shards)}
    if not shards.stage:
        del missing_files[WEIGHTS]  # they are there
    for name in [name for name in missing_files if name in manifest["files"]]:
        _require_equal(checkpoint / name, missing_files[name], safetensors_stream.read(checkpoint / name))
        del missing_files[name]
    if not missing_files:
        return []
    facts = _manifest_entry(checkpoint, shards)
    try:
        with files.new_directory(aside) as folder:
            digests = {
                name: safetensors_stream.write(folder / name, tensors) for name, tensors in missing_files.items()
            }
        facts["consolidated"]["tensors"] = {
            tensor: digest for names in digests.values() for tensor, digest in names.items()
        }
        new_files = files.read_manifest(aside, CheckpointError)["files"]
        with files.writing(checkpoint):
            for name in missing_files:
                # The manifest lists the files only below; no reader needs them before.
                (aside / name).replace(checkpoint / name)
            files.sync_directory(checkpoint)
        files.write_json(
            checkpoint / files.MANIFEST, {**manifest, **facts, "files": {**manifest["files"], **new_files}}
        )
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return [checkpoint / name for name in missing_files]


def _manifest_entry(
    checkpoint: Path, shards: zero_layout.Shards, dtype: str = "float32", everything: bool = False
) -> dict[str, Any]:
    """Entry for the manifest. The caller adds "tensors": {name: sha256 of its bytes}."""
    source = {"from": checkpoint.name, "stage": shards.stage, "world_size": shards.world_size, "step": shards.step}
    return {"consolidated": {**source, "dtype": dtype, "all": everything}}


def _is_replaceable(folder: Path) -> bool:
    """True for an empty folder, or one with only files written by this command."""
    if not folder.is_dir():
        return False
    there = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    if not there:
        return True
    manifest = files.read_manifest(folder, CheckpointError) if files.MANIFEST in there else {}
    return "consolidated" in manifest and there == {*manifest["files"], files.MANIFEST}


def _write_weights(folder: Path, shards: zero_layout.Shards, export: Export) -> dict[str, str]:
    """Write model.safetensors, or model-00001-of-0000N.safetensors with an index, in Hugging Face's format."""
    dtype, weights = DTYPES[export.dtype], shards.weights(export.everything)
    plan = split_state_dict_into_shards_factory(
        weights,  # pyright: ignore[reportArgumentType]  it uses only the size of a tensor
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
    """Weights from one file or several; None if the folder has no weights."""
    if (folder / WEIGHTS).exists():
        return safetensors_stream.read(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        return None
    names = sorted(set(files.read_json(folder / INDEX, CheckpointError)["weight_map"].values()))
    return {name: tensor for file in names for name, tensor in safetensors_stream.read(folder / file).items()}


def _require_equal(
    file: Path,
    expected: Mapping[str, StoredTensor],
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype | None = None,
) -> None:
    if problem := safetensors_stream.difference(expected, tensors, dtype):
        raise CheckpointError(f"{file}: differs from the shards ({problem}). Delete it and consolidate again.")


def byte_count(text: str) -> int:
    """Parse a size: 5GB -> 5000000000, 2GiB -> 2147483648.

    Raises:
        ValueError: not a positive size; argparse reports the argument.
    """
    return int(TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("src.training.checkpointing.consolidate", __doc__)
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="save directory, checkpoint, or folder written by DeepSpeed",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="checkpoint of the run (default: the newest complete one)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write there (default: into the checkpoint)")
    parser.add_argument(
        "--shard-size",
        "--shard_size",
        type=byte_count,
        metavar="SIZE",
        help="maximum size of a file of weights (default: 5GB)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: float32)")
    parser.add_argument(
        "--all", action="store_true", help="also write frozen weights, all buffers and second names of tied weights"
    )
    parser.add_argument("--verify", action="store_true", help="write nothing; compare existing files with the shards")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(lambda: run_action(parse(argv)))


def run_action(args: argparse.Namespace) -> int:
    """Run the command and print its result; returns the exit code."""
    export = None
    if args.verify and (args.shard_size or args.dtype or args.all):
        raise ConfigError("--verify: cannot be combined with --shard-size, --dtype or --all. Leave them out.")
    if args.output is not None:
        export = Export(args.output, args.shard_size or SHARD_BYTES, args.dtype or "float32", args.all)
    elif args.shard_size or args.dtype or args.all:
        raise ConfigError(
            "--shard-size, --dtype, --all: need --output. "
            "A checkpoint always has its trained weights as float32 in one file."
        )
    checkpoint = locate(expand_run(args.source), args.step)
    if export is None and not (checkpoint / files.MANIFEST).exists():
        raise ConfigError(f"{checkpoint}: not a checkpoint of a run (no {files.MANIFEST}). Set --output.")
    if args.verify:
        message = f"{args.output or checkpoint}: {len(verify(checkpoint, args.output))} tensors equal the shards."
    else:
        paths = consolidate(checkpoint, export)
        message = (
            "\n".join(f"{path}: {path.stat().st_size} bytes" for path in paths)
            or f"{checkpoint}: already consolidated."
        )
    sys.stdout.write(f"{message}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
