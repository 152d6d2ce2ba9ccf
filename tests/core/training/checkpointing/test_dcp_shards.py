"""Shards of FSDP2: whole or not there, read by any number of processes, and nobody holds more than its part."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from src.errors import CheckpointError
from src.experiments.identity import exp_id
from src.runs.checkpoints import checkpoints
from src.training.checkpointing import dcp_shards
from tests import toy, warm
from tests.core.training import small
from tests.core.training.checkpointing import interrupted_save, shared_store

STEPS = small.CONFIG.steps


def start(folder: Path, *kill: str, processes: int = 2) -> str:
    """Train, or go on; what it printed, "" where all went well."""
    return warm.torchrun(Path(interrupted_save.__file__), [str(folder), *kill], processes, folder / "log")


def tensors(run: Path) -> dict[str, Tensor]:
    """The weights and moments of the last checkpoint."""
    last = checkpoints.folder(run, STEPS)
    return {
        **load_file(last / "model.safetensors"),
        **{name: whole(tensor) for name, tensor in dcp_shards.tensors(last / "optimizer").items()},
    }


def whole(tensor: dcp_shards.StoredTensor) -> Tensor:
    target = torch.empty(tensor.shape, dtype=tensor.dtype)
    target.view(-1).view(torch.uint8).copy_(torch.tensor(list(b"".join(tensor.chunks())), dtype=torch.uint8))
    return target


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path: Path):
    """Of a process that has written its shard, of the one that puts the weights together, and of that before the
    manifest is there."""
    runs = {}
    for name in ("", "shard-00002", "model.safetensors", ".manifest.json"):
        folder = tmp_path / f"killed{name}"
        toy.write_data(folder / "data")
        run = runs[name] = folder / "runs" / exp_id(small.EXP)
        if name:
            assert start(folder, "1" if name.startswith("shard") else "0", "8", name) != ""
            assert [path.name for path in checkpoints.list_all(run)] == ["step-00000004"], name
            assert checkpoints.newest_whole(run) == checkpoints.folder(run, 4)
        assert start(folder) == ""
        assert not list((run / "checkpoints").glob(".step*")), "what was half written is gone"
    reference, rows = tensors(runs[""]), (runs[""] / "scores.jsonl").read_bytes()
    assert {"guess", "guess::exp_avg", "guess::exp_avg_sq", "guess::step"} == reference.keys()
    for name, run in runs.items():
        assert (run / "scores.jsonl").read_bytes() == rows
        torch.testing.assert_close(tensors(run), reference, rtol=0, atol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "replicas", "then"), [(1, 1, [2]), (3, 1, [1, 2, 4]), (4, 1, [3]), (4, 2, [3])])
def test_any_number_of_processes_reads_the_bits_that_any_other_has_written(
    tmp_path: Path, before: int, replicas: int, then: list[int]
):
    """Of tensors with fewer rows than processes, too; and each wrote its part alone."""
    script = Path(shared_store.__file__)
    assert warm.torchrun(script, [str(tmp_path), "0", str(replicas)], before, tmp_path / "log") == ""
    assert len(list((tmp_path / "optimizer").glob("*.safetensors"))) == before
    assert not (tmp_path / "weights").exists()
    for processes in then:
        assert warm.torchrun(script, [str(tmp_path), str(before)], processes, tmp_path / "log") == ""
    if before == 4:
        for rank in range(before):
            peak_bytes, whole = json.loads((tmp_path / f"peak-{rank}").read_text())
            assert peak_bytes < whole * replicas / 2, (
                f"process {rank} has held more than its part of weights and moments"
            )


@pytest.mark.slow
def test_separate_disks_are_an_error(tmp_path: Path):
    output = warm.torchrun(Path(shared_store.__file__), [str(tmp_path), "0", "1", "1"], 2, tmp_path / "log")
    assert "optimizer: process 0 does not see" in output
    assert (tmp_path / "peak-1").exists(), "nobody waits for the process that refuses"


def write_parts(folder: Path, **parts: tuple[int, Tensor]) -> None:
    """One file of each name, with the part of the tensor "t" that begins at this row."""
    for file, (start, tensor) in parts.items():
        places = {"t": {"saved_offsets": [start, *[0] * (tensor.ndim - 1)][: tensor.ndim]}}
        save_file({"t": tensor}, folder / f"{file}.safetensors", {"DCP_SHARDING_INFO": json.dumps(places)})


def test_parts_are_joined_in_the_order_of_their_rows(tmp_path: Path):
    numbers = torch.arange(35.0).view(7, 5)
    for order in itertools.permutations("abc"):
        write_parts(tmp_path, **{order[0]: (0, numbers[:3]), order[1]: (3, numbers[3:]), order[2]: (7, numbers[7:])})
        assert torch.equal(whole(dcp_shards.tensors(tmp_path)["t"]), numbers)
    for alone in (torch.tensor(3.0), torch.ones(0, 4), torch.ones(1)):
        write_parts(
            tmp_path, a=(0, alone), b=(0, alone[:0] if alone.ndim else alone), c=(0, alone[:0] if alone.ndim else alone)
        )
        assert torch.equal(whole(dcp_shards.tensors(tmp_path)["t"]), alone)


def test_parts_that_do_not_go_together_are_refused(tmp_path: Path):
    numbers = torch.arange(35.0).view(7, 5)
    write_parts(tmp_path, a=(0, numbers[:3]), b=(4, numbers[4:]))
    with pytest.raises(CheckpointError, match="rows 3 to 4 of t are missing"):
        dcp_shards.tensors(tmp_path)
    save_file(
        {"t": numbers}, tmp_path / "b.safetensors", {"DCP_SHARDING_INFO": json.dumps({"t": {"saved_offsets": [3, 2]}})}
    )
    with pytest.raises(CheckpointError, match=r"b.safetensors: t is split within rows"):
        dcp_shards.tensors(tmp_path)
    save_file({"t": numbers}, tmp_path / "b.safetensors", {"DCP_SHARDING_INFO": "[1]"})
    with pytest.raises(CheckpointError, match=r"b.safetensors: not readable as a shard"):
        dcp_shards.tensors(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"no shard")
    with pytest.raises(CheckpointError, match=r"b.safetensors: not readable as a shard"):
        dcp_shards.tensors(tmp_path)
