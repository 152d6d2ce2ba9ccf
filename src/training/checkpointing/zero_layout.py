"""Locate each tensor of a DeepSpeed ZeRO checkpoint (stages 1, 2 and 3) in its shards, without reading tensor data.

The layout is that of DeepSpeed 0.19.8: see `deepspeed/utils/zero_to_fp32.py` and the `state_dict` of
`runtime/zero/stage_1_and_2.py` and `stage3.py`. Stages 1 and 2 concatenate the parameters of a group and split the
result into one part per process. Stage 3 splits each parameter into one part per process, padded to equal size, and
concatenates a process's parts. DeepSpeed itself is not needed.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch

from src.errors import CheckpointError
from src.files import read_json, reading
from src.training.checkpointing.safetensors_stream import Piece, StoredTensor, difference
from src.training.checkpointing.zero_shard import ModelShard, OptimizerShard, stored_tensor

TOPOLOGY = "topology.json"
"""File next to the shards of this project's trainings: {"stage", "world_size", "frozen"}; "frozen": number of omitted
frozen parameters."""
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ONE_SAVE = "Use the shards of one save."
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


@dataclass(frozen=True)
class Shards:
    """The content of a ZeRO checkpoint, with tensors on disk."""

    folder: Path
    stage: int
    """0: FSDP2, with complete weights in a file next to the shards."""
    world_size: int
    step: int
    """Steps of the engine, skipped steps included."""
    trained: dict[str, StoredTensor]
    """Parameters by name, in the model's order, float32. Tied parameters appear once."""
    frozen: dict[str, StoredTensor]
    buffers: dict[str, StoredTensor]
    tied: dict[str, str]
    """Second name of a parameter -> its name in `trained` or `frozen`."""
    moments: dict[str, dict[str, StoredTensor]]
    """Parameter name -> optimizer entry ("exp_avg", "step", …) -> tensor; empty before the first step."""
    left_out: int = 0
    """Number of frozen parameters that were not saved."""

    def weights(self, everything: bool) -> dict[str, StoredTensor]:
        """The trained weights with the names of `src.support.weights.trained_weights`, or with `everything`, all
        weights.

        `everything` gives the weights of DeepSpeed's zero_to_fp32, and the frozen parameters of stage 1, which that
        omits.

        Raises:
            CheckpointError: `everything` is set, but frozen weights were not saved.
        """
        if everything and not self.stage:
            raise CheckpointError(f"{self.folder}: FSDP2 checkpoints have only trained weights. Leave out --all.")
        if not everything:
            owners = {name.rpartition(".")[0] for name in self.trained}
            return self.trained | {
                name: tensor for name, tensor in self.buffers.items() if name.rpartition(".")[0] in owners
            }
        if self.left_out:
            raise CheckpointError(
                f"{self.folder}: has only trained weights. {self.left_out} frozen parameters are not saved. "
                "Leave out --all."
            )
        saved_weights = self.buffers | self.frozen | self.trained
        return saved_weights | {
            name: saved_weights[source] for name, source in self.tied.items() if source in saved_weights
        }


def find(path: Path) -> Path | None:
    """The folder of shards: `path` itself, its zero/, or the folder named in DeepSpeed's file `latest`; None if there
    are no shards."""
    latest = path / "latest"
    with reading(latest, CheckpointError):
        tag_folders = [path / latest.read_text(encoding="utf-8", errors="replace").strip()] if latest.is_file() else []
    for folder in (path, path / "zero", *tag_folders):
        if any(_OPTIMIZER.fullmatch(file.name) or _MODEL.fullmatch(file.name) for file in folder.glob("*_states.pt")):
            return folder
    return None


def read(folder: Path) -> Shards:
    """Read the metadata of every shard in `folder`.

    Raises:
        CheckpointError: a shard is missing, superfluous, damaged, of another step or world size, or not supported.
    """
    pattern = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    optimizers = {rank: OptimizerShard(file) for rank, file in _shards_by_rank(folder, _OPTIMIZER, pattern).items()}
    stage = _common_value(optimizers, "stage", "of ZeRO stage {}")
    if stage not in {1, 2, 3}:
        raise CheckpointError(f"{folder}: written by ZeRO stage {stage}, expected 1, 2 or 3.")
    world = _common_value(optimizers, "world_size", "of a training of {} processes")
    _check_ranks(folder, optimizers, world, pattern)
    _common_value(optimizers, "steps", "after {} optimizer steps")
    pattern = "zero_pp_rank_{}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    models = {rank: ModelShard(file) for rank, file in _shards_by_rank(folder, _MODEL, pattern).items()}
    _check_ranks(folder, models, world if stage == 3 else 1, pattern)
    step = _common_value(models, "step", "of step {}")
    _common_value(models, "shapes", "of another model")
    if _common_value(models, "world_size", "of a training of {} processes") != world:
        raise CheckpointError(
            f"{models[0].file}: of a training of {models[0].world_size} processes, "
            f"but {optimizers[0].file.name} of {world}. {_ONE_SAVE}"
        )
    return _assemble(
        folder, step, [optimizers[rank] for rank in range(world)], [models[rank] for rank in sorted(models)]
    )


def _shards_by_rank(folder: Path, pattern: re.Pattern[str], example: str) -> dict[int, Path]:
    """The shards of one kind by rank."""
    files_by_rank = {}
    for file in sorted(folder.glob("*_states.pt")):
        if match := pattern.fullmatch(file.name):
            if int(match[2]):
                raise CheckpointError(
                    f"{file}: shard of a tensor-parallel model, which is not supported. "
                    "Use a checkpoint without tensor parallelism."
                )
            files_by_rank[int(match[1] or 0)] = file
    if 0 not in files_by_rank:
        raise CheckpointError(f"{folder / example.format(0)}: no such file. Restore it from a copy.")
    return files_by_rank


def _check_ranks(folder: Path, shards: Mapping[int, Any], count: int, pattern: str) -> None:
    """Raise CheckpointError unless exactly the ranks below `count` have a shard."""
    for kind, advice, ranks in (
        ("missing", "Restore them from a copy", set(range(count)) - shards.keys()),
        ("too many", "Remove them", shards.keys() - set(range(count))),
    ):
        if ranks:
            names = ", ".join(pattern.format(rank) for rank in sorted(ranks)[:3])
            raise CheckpointError(f"{folder}: {kind}: {names}; expected the shards of {count} processes. {advice}.")


def _common_value(shards: Mapping[int, Any], name: str, text: str) -> Any:
    """The value of `name` in all shards; CheckpointError if it differs."""
    expected = getattr(shards[0], name)
    for shard in shards.values():
        value = getattr(shard, name)
        if value != expected:
            raise CheckpointError(
                f"{shard.file}: {text.format(value)}; {shards[0].file.name}: {text.format(expected)}. {_ONE_SAVE}"
            )
    return expected


def _assemble(folder: Path, step: int, optimizers: list[OptimizerShard], models: list[ModelShard]) -> Shards:
    first, stage = models[0], optimizers[0].stage
    trained: dict[str, StoredTensor] = {}
    moments: dict[str, dict[str, StoredTensor]] = {}
    for name, shape, place in list(_parameter_slices(stage, first, optimizers)):
        trained[name] = place.tensor(shape, optimizers, None)
        entries = optimizers[0].states[place.group]
        moments[name] = {
            key: value if value.shape == () else place.tensor(shape, optimizers, key) for key, value in entries.items()
        }
    order = {name: number for number, name in enumerate(first.module)}
    trained = dict(sorted(trained.items(), key=lambda item: order.get(item[0], len(order))))
    topology = read_json(folder / TOPOLOGY, CheckpointError, {})
    frozen, left_out = _frozen_weights(stage, models), topology.get("frozen", 0)
    shards = Shards(folder, stage, len(optimizers), step, trained, frozen, first.buffers, first.tied, moments, left_out)
    if stage < 3:
        _check_weight_copies(first, shards)
    return shards


@dataclass(frozen=True)
class _ParameterSlice:
    """Position of one parameter in the flat vectors."""

    stage: int
    group: int
    """Index of the vector that it starts in."""
    offset: int
    """Offset of its first element: in the group's vectors of all processes (stages 1, 2), or in all vectors of each
    process (stage 3)."""

    def tensor(self, shape: tuple[int, ...], shards: Sequence[OptimizerShard], key: str | None) -> StoredTensor:
        """The parameter's slice of the weights (key None) or of an optimizer entry."""
        count = math.prod(shape)
        if self.stage < 3:
            vectors = [vector for shard in shards for vector in shard.vectors(key, self.group)]
            return StoredTensor(shape, vectors[0].dtype, _slice_vectors(vectors, self.offset, count))
        share = -(-count // len(shards))
        parts = [_slice_vectors(shard.vectors(key, None), self.offset, share) for shard in shards]
        dtype = shards[0].vectors(key, None)[0].dtype
        return StoredTensor(
            shape, dtype, _slice_vectors([StoredTensor((share,), dtype, part) for part in parts], 0, count)
        )


def _parameter_slices(
    stage: int, model: ModelShard, shards: list[OptimizerShard]
) -> Iterator[tuple[str, tuple[int, ...], _ParameterSlice]]:
    """Yield name, shape and slice of each trained parameter.

    Raises:
        CheckpointError: parameters and vectors differ in size.
    """
    first, world = shards[0], len(shards)
    if stage == 3:
        offset, ends = 0, list(accumulate(vector.numel for vector in first.weights))
        for name, shape in chain.from_iterable(group.items() for group in model.shapes):
            yield (
                name,
                shape,
                _ParameterSlice(stage, bisect_right(ends, offset) if offset < ends[-1] else len(ends) - 1, offset),
            )
            offset += -(-math.prod(shape) // world)
        _check_size(model, offset, ends[-1], 1)
        return
    if len(model.shapes) != len(first.weights):
        raise CheckpointError(
            f"{model.file}: {len(model.shapes)} groups of parameters, but {first.file.name} has {len(first.weights)}. "
            f"{_ONE_SAVE}"
        )
    for group, shapes in enumerate(model.shapes):
        offset = 0
        for number, (name, shape) in enumerate(shapes.items()):
            yield name, shape, _ParameterSlice(stage, group, offset)
            offset += math.prod(shape) + (first.paddings[group][number] if first.paddings else 0)
        _check_size(model, offset, sum(shard.weights[group].numel for shard in shards), 2 * world)


def _check_size(model: ModelShard, num_expected: int, num_stored: int, alignment: int) -> None:
    """Check that the parameters fill the vectors. Stages 1 and 2 pad a group to a multiple of 2 x world size."""
    if -(-num_expected // alignment) != -(-num_stored // alignment) or num_stored < num_expected:
        raise CheckpointError(
            f"{model.file}: its parameters need {num_expected} elements, "
            f"but the optimizer's shards next to it have {num_stored}. {_ONE_SAVE}"
        )


def _slice_vectors(vectors: Sequence[StoredTensor], start: int, count: int) -> tuple[Piece, ...]:
    """Slice `count` elements from `start` on out of the concatenated vectors.

    Raises:
        CheckpointError: the vectors are too short.
    """
    pieces = []
    for piece, size in (
        (piece, vector.dtype.itemsize) for vector in vectors for piece in vector.pieces if isinstance(piece, Piece)
    ):
        length = max(0, min(piece.count - start, count))
        if length:
            pieces.append(Piece(piece.file, piece.offset + start * size, length))
            count -= length
        start = max(0, start - piece.count)
    if count:
        raise CheckpointError(
            f"{pieces[-1].file if pieces else vectors[0]}: {count} elements missing. Restore it from a copy."
        )
    return tuple(pieces)


def _frozen_weights(stage: int, models: list[ModelShard]) -> dict[str, StoredTensor]:
    first = models[0]
    if stage == 3:
        parts = {
            name: [stored_tensor(model.file, model.fragments[name]) for model in models] for name in first.frozen_shapes
        }
        return {
            name: StoredTensor(shape, parts[name][0].dtype, _slice_vectors(parts[name], 0, math.prod(shape)))
            for name, shape in first.frozen_shapes.items()
        }
    if first.fragments:
        return {name: stored_tensor(first.file, tensor) for name, tensor in first.fragments.items()}
    # Stage 1 does not list frozen weights: they are the rest of the model.
    other_names = first.buffers.keys() | first.tied.keys() | {name for group in first.shapes for name in group}
    return {name: stored_tensor(first.file, tensor) for name, tensor in first.module.items() if name not in other_names}


def _check_weight_copies(model: ModelShard, shards: Shards) -> None:
    """Check that both copies of float32 weights are equal. Stages 1 and 2 save one in the model's shard and one in the
    optimizer's."""
    twice = {name: stored_tensor(model.file, model.module[name]) for name in shards.trained if name in model.module}
    twice = {name: tensor for name, tensor in twice.items() if tensor.dtype == torch.float32}
    if problem := difference({name: shards.trained[name] for name in twice}, twice):
        raise CheckpointError(
            f"{model.file}: not of the same step as the optimizer's shards next to it ({problem}). {_ONE_SAVE}"
        )
