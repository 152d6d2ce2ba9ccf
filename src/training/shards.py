"""Where each tensor of a DeepSpeed ZeRO checkpoint lies in its shards (stages 1, 2 and 3), without reading one.

Layout as DeepSpeed 0.19.8 writes it: `deepspeed/utils/zero_to_fp32.py` and the `state_dict` of `runtime/zero/stage_1_and_2.py` and
`stage3.py`. Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one part per process; stage 3 cuts each
parameter into one part per process, padded to equal size, and lays a process's parts end to end. DeepSpeed itself is not needed.
"""

import math
import pickle
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from src.errors import CheckpointError
from src.files import reading
from src.training.tensor_files import Piece, Stored, difference

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class _Unread:
    """Stands for an object of DeepSpeed's in a shard that nothing here looks at."""


_ALLOWED = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Unread, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Unread, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


@dataclass(frozen=True)
class Shards:
    """What a ZeRO checkpoint holds. Tensors stay on disk."""

    folder: Path
    stage: int
    world_size: int
    step: int
    """Steps that the engine had made, skipped ones included."""
    trained: dict[str, Stored]
    """Parameters by name, in the model's order; those that are tied are there once. float32, as ZeRO keeps them."""
    frozen: dict[str, Stored]
    buffers: dict[str, Stored]
    tied: dict[str, str]
    """Other name of a parameter -> the name that it has in `trained` or `frozen`."""
    moments: dict[str, dict[str, Stored]]
    """Parameter name -> optimizer's entry ("exp_avg", "step", …) -> tensor; empty before the first step."""

    def weights(self, everything: bool) -> dict[str, Stored]:
        """The trained weights as `src.weights.trained_weights` names them, or everything that DeepSpeed's zero_to_fp32 would give.

        With `everything` there is more than zero_to_fp32 gives in one case: frozen parameters of stage 1, which it leaves out.
        """
        if not everything:
            owners = {name.rpartition(".")[0] for name in self.trained}
            return self.trained | {name: tensor for name, tensor in self.buffers.items() if name.rpartition(".")[0] in owners}
        own = self.buffers | self.frozen | self.trained
        return own | {name: own[source] for name, source in self.tied.items() if source in own}


def find(path: Path) -> Path | None:
    """The folder of shards that is meant by `path`: itself, its zero/, or the one that DeepSpeed's file `latest` names; None: none is."""
    latest = path / "latest"
    with reading(latest, CheckpointError):
        tagged = [path / latest.read_text(encoding="utf-8", errors="replace").strip()] if latest.is_file() else []
    for folder in (path, path / "zero", *tagged):
        if any(_OPTIMIZER.fullmatch(file.name) or _MODEL.fullmatch(file.name) for file in folder.glob("*_states.pt")):
            return folder
    return None


def read(folder: Path) -> Shards:
    """Look at every shard in `folder`.

    Raises:
        CheckpointError: a shard is missing, too many, damaged, of another step or number of processes, or of a kind that is not known.
    """
    optimizers = {rank: _Optimizer(file) for rank, file in _ranked(folder, _OPTIMIZER, "zero_pp_rank_{}_mp_rank_00_optim_states.pt").items()}
    stage, world = _agreed(optimizers, "stage", "ZeRO stage"), _agreed(optimizers, "world_size", "number of processes")
    if stage not in {1, 2, 3}:
        raise CheckpointError(f"{optimizers[0].file}: ZeRO stage {stage}, expected 1, 2 or 3.")
    _complete(folder, optimizers, world, "zero_pp_rank_{}_mp_rank_00_optim_states.pt")
    name = "zero_pp_rank_{}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    models = {rank: _Model(file) for rank, file in _ranked(folder, _MODEL, name).items()}
    _complete(folder, models, world if stage == 3 else 1, name)
    step = _agreed(models, "step", "step")
    for rank, model in models.items():
        if model.world_size != world:
            raise CheckpointError(
                f"{model.file}: of a training of {model.world_size} processes, expected {world} as in {optimizers[0].file.name}."
            )
        if model.shapes != models[0].shapes:
            raise CheckpointError(f"{model.file}: of another model than rank 0's: its parameters or their shapes are others.")
        _agree_on_steps(optimizers[0], optimizers[rank if stage == 3 else 0])
    for optimizer in optimizers.values():
        _agree_on_steps(optimizers[0], optimizer)
    return _assemble(folder, stage, step, [optimizers[r] for r in range(world)], [models[r] for r in sorted(models)])


def _assemble(folder: Path, stage: int, step: int, optimizers: "list[_Optimizer]", models: "list[_Model]") -> Shards:
    first, places = models[0], (_places_whole if stage < 3 else _places_cut)(models[0], optimizers)
    trained, moments = {}, {}
    for place in places:
        trained[place.name] = place.of([shard.weights for shard in optimizers])
        entries = optimizers[0].entries(place.group)
        moments[place.name] = {
            key: _scalar(value) if _is_scalar(value) else place.of([shard.vectors(key) for shard in optimizers])
            for key, value in entries.items()
        }
    order = {name: number for number, name in enumerate(first.module)}
    trained = dict(sorted(trained.items(), key=lambda item: order.get(item[0], len(order))))
    found = Shards(folder, stage, len(optimizers), step, trained, _frozen(stage, models), first.buffers, first.tied, moments)
    if stage < 3:
        _agree_on_weights(first, found)
    return found


def _agree_on_weights(model: "_Model", shards: Shards) -> None:
    """Stages 1 and 2 keep the weights twice: in the model's file and in the optimizer's shards."""
    twice = {name: _stored(model.file, model.module[name]) for name in shards.trained if name in model.module}
    twice = {name: tensor for name, tensor in twice.items() if tensor.dtype == torch.float32}
    if problem := difference({name: shards.trained[name] for name in twice}, twice):
        raise CheckpointError(f"{model.file}: is not of the same step as the optimizer's shards beside it ({problem}).")


def _frozen(stage: int, models: "list[_Model]") -> dict[str, Stored]:
    first = models[0]
    if stage == 3:
        return {
            name: Stored(shape, first.fragments[name].dtype, _cut([_stored(m.file, m.fragments[name]) for m in models], math.prod(shape)))
            for name, shape in first.frozen_shapes.items()
        }
    if first.fragments:
        return {name: _stored(first.file, tensor) for name, tensor in first.fragments.items()}
    known = first.shapes.keys() | first.buffers.keys() | first.tied.keys()
    return {name: _stored(first.file, tensor) for name, tensor in first.module.items() if name not in known}


@dataclass(frozen=True)
class _Place:
    """Where one parameter lies in the vectors of the processes."""

    name: str
    shape: tuple[int, ...]
    group: int
    """Of the optimizer's state that it belongs to."""
    spans: Mapping[int, tuple[int, int]]
    """Process -> first element, and how many, counted over all vectors of the process (stage 3) or of its group (stages 1, 2)."""
    vectors: slice
    """Of a process that are meant."""

    def of(self, processes: "Sequence[Sequence[Stored]]") -> Stored:
        """The parameter's share of the vectors of each process."""
        found = [_narrow(processes[rank][self.vectors], *span) for rank, span in self.spans.items()]
        dtype = processes[0][self.vectors][0].dtype
        return Stored(self.shape, dtype, tuple(chain.from_iterable(found)))
