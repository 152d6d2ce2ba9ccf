"""ZeRO shards become the safetensors that a training without ZeRO would have written."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from src import files
from src.errors import CheckpointError
from src.support.weights import trained_weights
from src.training.checkpointing import checkpoint, safetensors_stream
from src.training.checkpointing.consolidate import Export, byte_count, consolidate, main, verify
from tests import warm
from tests.conftest import ROOT
from tests.core.training.checkpointing import deepspeed_shards, shard_sets

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
REAL = [(stage, world) for world in (2, 3) for stage in (1, 2, 3)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(stage, world size) -> folder with zero/ as DeepSpeed wrote it, and beside it what DeepSpeed says of it."""
    folders: dict[int, Path] = {}

    def write_shards(world: int) -> Path:
        """By DeepSpeed alone, without a line of ours. Once, on a busy machine, three of its processes waited for each
        other for ever."""
        for seconds in (240, 600):
            out = tmp_path_factory.mktemp(f"world{world}")
            try:
                assert warm.torchrun(Path(deepspeed_shards.__file__), [str(out)], world, out / "log", seconds) == ""
            except TimeoutError:
                continue
            return out
        pytest.fail("DeepSpeed's processes do not end")

    def folder(stage: int, world: int) -> Path:
        if world not in folders:
            folders[world] = write_shards(world)
        return folders[world] / f"stage{stage}"

    return folder


def as_checkpoint(zero: Path, run: Path, step: int, weights: dict[str, Tensor] | None = None) -> Path:
    """A checkpoint as a ZeRO training leaves it: shards, the loop's state and a manifest, and the weights where
    given."""
    final = run / "checkpoints" / f"step-{step:08d}"
    with files.new_directory(final) as folder:
        shutil.copytree(zero, folder / "zero")
        files.write_json(folder / "state.json", {"step": step})
        if weights is not None:
            save_file(weights, folder / "model.safetensors")
    return final


def same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    assert not [
        name
        for name, tensor in expected.items()
        if tensor.dtype != tensors[name].dtype or not torch.equal(tensor, tensors[name])
    ]


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world"), REAL)
def test_everything_is_what_deepspeed_gives_bit_for_bit(real: Any, tmp_path: Path, stage: int, world: int):
    source = real(stage, world)
    consolidate(source, Export(tmp_path / "out", shard_bytes=40_000, everything=True))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    parts = {name: load_file(tmp_path / "out" / name) for name in set(index["weight_map"].values())}
    assert len(parts) > 1
    assert max((tmp_path / "out" / name).stat().st_size for name in parts) < 40_000 + 4_000
    tensors = {name: parts[file][name] for name, file in index["weight_map"].items()}
    expected = load_file(source / "fp32.safetensors")
    if stage == 1:  # DeepSpeed's own command leaves out frozen weights there
        frozen = {
            name: tensor
            for name, tensor in deepspeed_shards.build().state_dict().items()
            if name.startswith("transformer.h.1.")
        }
        assert not frozen.keys() & (expected.keys() - {"transformer.h.1.ln_1.count"})
        expected |= frozen
    same(tensors, expected)
    assert index["metadata"]["total_size"] == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert torch.equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"])


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world"), REAL)
def test_a_consolidated_checkpoint_resumes_without_zero(real: Any, tmp_path: Path, stage: int, world: int):
    source = real(stage, world)
    folder = as_checkpoint(source / "ours" / "zero", tmp_path / "run", 3)
    assert main([str(tmp_path / "run")]) == 0
    assert files.defect(folder) is None
    model: Any = deepspeed_shards.build()
    optimizer = deepspeed_shards.optimizer(model)
    with torch.no_grad():
        for tensor in trained_weights(model).values():
            tensor.zero_()
    assert checkpoint.load_weights(folder, model) == {"step": 3}
    checkpoint.load_optimizer(folder, model, optimizer)
    engine_tensors = load_file(source / "said.safetensors")
    state = {
        name: tensor
        for name, tensor in checkpoint.optimizer_tensors(model, optimizer).items()
        if not name.endswith("::step")
    }
    same(state, {name: tensor for name, tensor in engine_tensors.items() if "::" in name})
    weights = {name: tensor for name, tensor in engine_tensors.items() if "::" not in name}
    same({name: tensor for name, tensor in trained_weights(model).items() if name in weights}, weights)
    assert model.transformer.ln_f.beside.tolist() == [float(x) for x in torch.arange(5.0) / 3], (
        "a buffer beside trained weights"
    )
    assert all(entries["step"].item() == 3 for entries in optimizer.state.values())
    save_file(trained_weights(model), tmp_path / "usual.safetensors")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "usual.safetensors").read_bytes()

    for rank in range(world):  # the fourth step, which DeepSpeed has made with `world` processes
        ids = deepspeed_shards.batch(3, rank)
        (model(input_ids=ids, labels=ids, use_cache=False).loss / world).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), deepspeed_shards.CLIP)
    optimizer.step()
    after = load_file(source / "after.safetensors")
    for name, tensor in trained_weights(model).items():
        if name in after:
            # A hundredth of the learning rate: Adam moves what has no gradient but rounding (the keys' biases) by
            # rounding too.
            torch.testing.assert_close(tensor, after[name], rtol=1e-5, atol=1e-5)


def numbers(*shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"layer{number}.weight": torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}


SMALL = ((7, 3), (5,), (), (1, 1, 13))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_any_sizes_on_any_number_of_processes(tmp_path: Path, stage: int, world: int):
    weights = numbers(*SMALL)
    state = shard_sets.write(tmp_path / "in" / "zero", stage, world, weights)
    paths = consolidate(tmp_path / "in", Export(tmp_path / "out"))
    assert [path.name for path in paths] == ["model.safetensors", "optimizer.safetensors"]
    same(load_file(tmp_path / "out" / "model.safetensors"), weights)
    same(load_file(tmp_path / "out" / "optimizer.safetensors"), state)
    facts = files.read_manifest(tmp_path / "out", CheckpointError)["consolidated"]
    assert (facts["stage"], facts["world_size"], facts["step"]) == (stage, world, 4)
    digests = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in (weights | state).items()}
    assert facts["tensors"] == digests


def test_weights_are_split_into_files_of_the_requested_size(tmp_path: Path):
    weights = numbers((4,), (6,), (50,), (5,))  # 16, 24, 200 and 20 bytes
    shard_sets.write(tmp_path / "in", 3, 2, weights)
    assert main([str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--shard-size", "40"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    places = [
        ["layer2.weight"],
        ["layer0.weight", "layer1.weight"],
        ["layer3.weight"],
    ]  # a tensor that is too large has a file at once
    parts = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index == {
        "metadata": {"total_size": 260},
        "weight_map": {name: part for part, names in zip(parts, places, strict=True) for name in names},
    }
    for part, names in zip(parts, places, strict=True):
        same(load_file(tmp_path / "out" / part), {name: weights[name] for name in names})
    assert len(verify(tmp_path / "in", tmp_path / "out")) == 4 * len(weights)


def test_parameters_can_be_padded_to_an_alignment(tmp_path: Path):
    weights = numbers(*SMALL)
    state = shard_sets.write(tmp_path / "in", 2, 3, weights, gap=3)
    consolidate(tmp_path / "in", Export(tmp_path / "out"))
    same(load_file(tmp_path / "out" / "model.safetensors"), weights)
    same(load_file(tmp_path / "out" / "optimizer.safetensors"), state)


def test_bfloat16_is_rounded_as_torch_rounds(tmp_path: Path):
    weights = numbers((64, 33))
    shard_sets.write(tmp_path / "in", 3, 2, weights)
    assert main([str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    same(
        load_file(tmp_path / "out" / "model.safetensors"), {name: tensor.bfloat16() for name, tensor in weights.items()}
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert len(verify(tmp_path / "in", tmp_path / "out")) == 4


def test_a_large_tensor_crosses_chunks_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors_stream, "CHUNK_BYTES", 28)
    weights = numbers((50, 7), (3, 3))
    for stage in (2, 3):
        shard_sets.write(tmp_path / f"in{stage}", stage, 3, weights)
        consolidate(tmp_path / f"in{stage}", Export(tmp_path / f"out{stage}", dtype="bfloat16"))
        same(
            load_file(tmp_path / f"out{stage}" / "model.safetensors"),
            {name: tensor.bfloat16() for name, tensor in weights.items()},
        )


def test_a_file_written_in_pieces_is_the_one_that_safetensors_writes(tmp_path: Path):
    kinds = [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.float32,
        torch.float64,
        torch.int64,
    ]
    tensors = {f"{number % 3}.é{number}": torch.arange(number + 3).to(kind) for number, kind in enumerate(kinds)} | {
        "z": torch.tensor(2.5)
    }
    for metadata in (None, {"format": "pt"}):
        save_file(tensors, tmp_path / "theirs", metadata)
        assert (
            safetensors_stream.write(
                tmp_path / "ours", safetensors_stream.read(tmp_path / "theirs"), metadata=metadata
            ).keys()
            == tensors.keys()
        )
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def rewritten(file: Path, change: Any) -> None:
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)


def other_step(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 2


def other_world(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["partition_count"] = [4]


def other_stage(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["zero_stage"] = 1


def other_weights(content: dict[str, Any]) -> None:
    content["module"]["layer1.weight"] = content["module"]["layer1.weight"] + 1


def other_model(content: dict[str, Any]) -> None:
    content["param_shapes"][0]["layer9.weight"] = torch.Size([40])


def a_path(content: dict[str, Any]) -> None:
    content["extra"] = Path("x")


def flip(file: Path) -> None:
    """One bit of the last tensor in a shard."""
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        last = max(
            (entry for entry in archive.infolist() if "/data/" in entry.filename), key=lambda entry: entry.header_offset
        )
    data[last.header_offset + 30 + len(last.filename) + 70] ^= 4
    file.write_bytes(data)


FIRST, SECOND, THIRD, MODEL = (
    *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1, 2)),
    "mp_rank_00_model_states.pt",
)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda zero: (zero / SECOND).unlink(), f"missing: {SECOND}; expected the shards of 3 processes"),
        (lambda zero: (zero / FIRST).unlink(), f"{FIRST}: no such file"),
        (lambda zero: (zero / MODEL).unlink(), f"{MODEL}: no such file"),
        (lambda zero: shutil.copy(zero / FIRST, zero / FIRST.replace("rank_0_", "rank_3_")), ("too many: "
                                                                                             "zero_pp_rank_3_mp_rank_00")),
        (lambda zero: shutil.copy(zero / FIRST, zero / FIRST.replace("mp_rank_00", "mp_rank_01")), "tensor-parallel"),
        (lambda zero: os.truncate(zero / SECOND, 700), f"{SECOND}: damaged"),
        (lambda zero: (zero / SECOND).write_bytes(b""), f"{SECOND}: damaged"),
        (lambda zero: flip(zero / SECOND), f"{SECOND}: damaged: checksum of"),
        (lambda zero: rewritten(zero / SECOND, other_step), (f"{SECOND}: after 6 optimizer steps; {FIRST}: "
                                                            f"after")),
        (lambda zero: rewritten(zero / THIRD, other_world), (f"{THIRD}: of a training of 4 processes; {FIRST}: of a "
                                                            f"training of 3")),
        (lambda zero: rewritten(zero / THIRD, other_stage), f"{THIRD}: of ZeRO stage 1; {FIRST}: of ZeRO stage 2"),
        (lambda zero: rewritten(zero / MODEL, other_weights), ("not of the same step as the optimizer's shards next to "
                                                              "it (different values")),
        (lambda zero: rewritten(zero / MODEL, other_model), (f"{MODEL}: its parameters need 80 elements, but the "
                                                            f"optimizer's shards")),
        (lambda zero: rewritten(zero / MODEL, a_path), (f"{MODEL}: has a pathlib.PosixPath, which is rejected, as "
                                                       f"it could run code")),
        (lambda zero: torch.save({"weights": torch.zeros(2)}, zero / SECOND), (f"{SECOND}: not a shard of DeepSpeed "
                                                                              f"ZeRO")),
        (shutil.rmtree, "no shards: neither zero_pp_rank"),
    ],
)  # fmt: skip
def test_shards_that_do_not_go_together_are_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, words: str
):
    shard_sets.write(tmp_path / "in" / "zero", 2, 3, numbers(*SMALL))
    damage(tmp_path / "in" / "zero")
    assert main([str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert words in message
    assert message.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"], "nothing is written"


def test_frozen_weights_that_were_not_saved_are_not_given_out_as_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shard_sets.write(tmp_path / "in" / "zero", 3, 2, numbers(*SMALL))
    command = [str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    for frozen, code in ((2, 1), (0, 0)):
        files.write_json(tmp_path / "in" / "zero" / "topology.json", {"stage": 3, "world_size": 2, "frozen": frozen})
        assert main([*command, "--all"]) == code
        assert (tmp_path / "out").exists() == (code == 0)
        assert ("has only trained weights. 2 frozen parameters are not saved" in capsys.readouterr().err) == (code == 1)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    files.write_json(tmp_path / "in" / "zero" / "topology.json", {"stage": 3, "world_size": 2, "frozen": 2})
    assert main(command) == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tied_weights_are_there_once_and_with_all_by_each_name(tmp_path: Path, stage: int):
    weights = numbers(*SMALL)
    shard_sets.write(tmp_path / "in", stage, 2, weights)
    for file in (tmp_path / "in").glob("*model_states.pt"):
        rewritten(file, lambda content: content.update(shared_params={"head.weight": "layer0.weight"}))
    consolidate(tmp_path / "in", Export(tmp_path / "trained"))
    same(load_file(tmp_path / "trained" / "model.safetensors"), weights)
    consolidate(tmp_path / "in", Export(tmp_path / "all", everything=True))
    same(load_file(tmp_path / "all" / "model.safetensors"), weights | {"head.weight": weights["layer0.weight"]})
    assert len(verify(tmp_path / "in", tmp_path / "all")) == 4 * len(weights) + 1


def test_ranks_of_stage_3_agree_on_the_step(tmp_path: Path):
    shard_sets.write(tmp_path, 3, 2, numbers(*SMALL))
    rewritten(tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda content: content.update(global_steps=6))
    with pytest.raises(
        CheckpointError,
        match=r"zero_pp_rank_1_mp_rank_00_model_states.pt: of step 6; .*: of step 4\. Use the shards of one save",
    ):
        consolidate(tmp_path, Export(tmp_path.with_name("out")))


def test_in_place_existing_files_are_compared_and_missing_ones_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    weights = numbers(*SMALL)
    shard_sets.write(tmp_path / "zero", 2, 2, weights)
    folder = as_checkpoint(tmp_path / "zero", tmp_path / "run", 4, weights)
    before = files.read_manifest(folder, CheckpointError)["files"]
    assert consolidate(folder) == [folder / "optimizer.safetensors"]
    manifest = files.read_manifest(folder, CheckpointError)
    assert manifest["files"] == before | {"optimizer.safetensors": manifest["files"]["optimizer.safetensors"]}
    assert (files.defect(folder), consolidate(folder)) == (None, [])
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-00000004"]
    assert main([str(tmp_path / "run"), "--step", "4", "--verify"]) == 0
    assert "16 tensors equal the shards" in capsys.readouterr().out

    other = as_checkpoint(
        tmp_path / "zero", tmp_path / "run", 6, {name: tensor * 2 for name, tensor in weights.items()}
    )
    listing = sorted(other.rglob("*"))
    for command in ([], ["--verify"]):
        assert main([str(other), *command]) == 1
        assert (
            "model.safetensors: differs from the shards (different values in layer0.weight" in capsys.readouterr().err
        )
    assert sorted(other.rglob("*")) == listing

    flip(folder / "zero" / SECOND)
    assert main([str(folder), "--verify"]) == 1
    assert f"{SECOND}: its sha256 is not the one that was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["run", "--dtype", "bfloat16"], "need --output"),
        (["run", "--all"], "need --output"),
        (["run", "--verify", "--all"], "--verify: cannot be combined with --shard-size"),
        (["run", "--step", "5"], "no complete checkpoint of step 5. Existing steps: 4."),
        (["raw", "--step", "5"], "raw is not the folder of a run"),
        (["raw"], "raw: not a checkpoint of a run"),
        (["gone"], "gone: no such folder"),
        (["raw", "--output", "run"], "--output run: has other files"),
        (["raw", "--output", "run/checkpoints/step-00000004"], "has other files"),
        (["raw", "--output", "mine"], "has other files"),
    ],
)
def test_impossible_consolidations_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], words: str
):
    monkeypatch.chdir(tmp_path)
    shard_sets.write(Path("raw/zero"), 1, 2, numbers(*SMALL))
    as_checkpoint(Path("raw/zero"), Path("run"), 4)
    consolidate(Path("raw"), Export(Path("mine")))
    Path("mine/config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert main(command) == 1
    assert words in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_of_this_command_is_replaced(tmp_path: Path):
    for factor in (1, 2):
        weights = {name: tensor * factor for name, tensor in numbers(*SMALL).items()}
        shard_sets.write(tmp_path / "in", 1, 2, weights)
        consolidate(tmp_path / "in", Export(tmp_path / "out"))
        same(load_file(tmp_path / "out" / "model.safetensors"), weights)


@pytest.mark.parametrize(("text", "number"), [("5GB", 5 * 10**9), ("1.5 kib", 1536), ("7", 7)])
def test_sizes(text: str, number: int):
    assert byte_count(text) == number


@pytest.mark.parametrize("text", ["5TBB", "GB", "-1GB", "0", "0.5"])
def test_no_sizes(text: str):
    with pytest.raises(ValueError, match=text):
        byte_count(text)


# 300 MB: weights and two moments of 25 million parameters, of which one tensor holds 100 MB less a little.
LARGE = ((4096, 6000), (1000, 300), (70,))
PROBE = """
import sys
from pathlib import Path
import torch
from src.training.checkpointing.consolidate import Export, consolidate
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
small, large, out = map(Path, sys.argv[1:])
consolidate(small, Export(out / "small", dtype="bfloat16"))
before = peak()
consolidate(large, Export(out / "large"))
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folders = {stage: tmp_path_factory.mktemp(f"large{stage}") for stage in (2, 3)}
    for stage, folder in folders.items():
        shard_sets.write(folder / "zero", stage, 2, numbers(*LARGE))
    yield folders
    for folder in folders.values():
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("stage", [2, 3])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, large: dict[int, Path], stage: int):
    """Less than the largest tensor (98 MB), though shards and output hold three times that."""
    shard_sets.write(tmp_path / "in", stage, 2, numbers(*SMALL))
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path / "in"), str(large[stage]), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 * safetensors_stream.CHUNK_BYTES
    same(load_file(tmp_path / "large" / "model.safetensors"), numbers(*LARGE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "share", [pytest.param(0.02, marks=pytest.mark.slow), 0.5, pytest.param(0.95, marks=pytest.mark.slow)]
)
def test_a_kill_leaves_the_checkpoint_as_it_was(tmp_path: Path, share: float):
    """Killed when a share of the bytes is written; then done again."""
    weights = numbers((2048, 2500), (1000, 300))
    shard_sets.write(tmp_path / "zero", 3, 2, weights)
    folder = as_checkpoint(tmp_path / "zero", tmp_path / "run", 4)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    expected = sum(tensor.numel() for tensor in weights.values()) * 12 * share
    child = subprocess.Popen([sys.executable, "-m", "src.training.checkpointing.consolidate", str(folder)], cwd=ROOT)
    deadline = time.monotonic() + 300
    while bytes_written(folder) < expected:
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    child.kill()
    child.wait()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert files.defect(folder) is None
    assert consolidate(folder) == [folder / "model.safetensors", folder / "optimizer.safetensors"]
    assert len(verify(folder)) == 4 * len(weights)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "what the kill left is swept"
    same(load_file(folder / "model.safetensors"), weights)


def test_a_file_that_a_kill_has_left_unlisted_is_written_again(tmp_path: Path):
    """Killed between the rename and the manifest."""
    weights = numbers(*SMALL)
    state = shard_sets.write(tmp_path / "zero", 2, 2, weights)
    folder = as_checkpoint(tmp_path / "zero", tmp_path / "run", 4, weights)
    (folder / "optimizer.safetensors").write_bytes(b"what the killed one has written")
    checkpoint.ensure_whole_optimizer(folder)
    assert "optimizer.safetensors" in files.read_manifest(folder, CheckpointError)["files"]
    same(load_file(folder / "optimizer.safetensors"), state)
    assert files.defect(folder) is None


def test_of_two_that_consolidate_at_once_one_writes(tmp_path: Path):
    shard_sets.write(tmp_path / "zero", 2, 2, numbers((500, 500)))
    folder = as_checkpoint(tmp_path / "zero", tmp_path / "run", 4)
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(consolidate, [folder, folder]))
    assert sorted(map(len, results)) == [0, 2]
    assert files.defect(folder) is None
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def bytes_written(folder: Path) -> int:
    """Bytes that a consolidation of `folder` has set aside."""
    return sum(path.stat().st_size for path in folder.parent.glob(f".*{folder.name}*/*.safetensors"))
