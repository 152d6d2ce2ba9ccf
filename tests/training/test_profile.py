"""The profile of a run: its steps are measured on a copy, and the run is as it was, to the byte."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from src.experiments.identity import exp_id
from src.training import profile
from tests import toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a run that is done, with checkpoints of steps 8 and 12."""
    made = tmp_path_factory.mktemp("profile")
    toy.write_data(made / "data")
    assert toy.main(["-e", "base"], {"base": [toy.BASE]}, made) == 0
    return made


def arguments(folder: Path, out: Path, steps: int) -> list[str]:
    run = folder / "runs" / exp_id(toy.BASE)
    return [str(run), "--steps", str(steps), "-o", str(out), "--data_path", str(folder / "data")]


def content(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below the folder: inode, time and bytes."""
    files = {str(path): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for name, path in files.items()}


@pytest.mark.parametrize(("steps", "begin"), [(3, 8), (6, 0)])
def test_the_steps_are_measured_and_the_run_stays(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int, begin: int
):
    before = content(folder / "runs")
    with caplog.at_level(logging.INFO):
        assert profile.main(arguments(folder, tmp_path / "out", steps)) == 0
    assert content(folder / "runs") == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["key_averages_0.txt", "trace_0.json"]
    events = json.loads((tmp_path / "out" / "trace_0.json").read_text())["traceEvents"]
    assert sum(event["name"] == "Optimizer.step#AdamW.step" for event in events) == steps
    assert "aten::addmm" in (tmp_path / "out" / "key_averages_0.txt").read_text()
    assert f"a copy continues from step {begin}." in caplog.text
    assert "Self CPU time total" in caplog.text
    assert "There is no GPU: no snapshot of its memory, and no flight recorder of NCCL." in caplog.text


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (12, r"trains 12 steps, and the first of a start is not measured\. Take --steps 11 or fewer\."),
        (0, r"--steps: expected a number of steps >= 1, got 0\."),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, error: str
):
    assert profile.main(arguments(folder, tmp_path / "out", steps)) == 1
    assert re.search(error, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_an_older_profile_is_not_written_over(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert profile.main(arguments(folder, tmp_path, 3)) == 1
    assert f"{tmp_path}: is there already. Name a folder that is not." in capsys.readouterr().err


@pytest.mark.slow
def test_a_sharded_run_is_measured_as_it_is_sharded(folder: Path, tmp_path: Path):
    """Two processes hold half of each weight, and each tells what it did."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    given = [*arguments(folder, tmp_path / "out", 2), "--fsdp", "--fsdp_sharded_gradients", "--gradient_checkpointing"]
    done = subprocess.run(
        [*command, "-m", "src.training.profile", *given], capture_output=True, text=True, check=False, cwd=toy.ROOT
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert "all_gather" in (tmp_path / "out" / f"key_averages_{rank}.txt").read_text()
        assert (tmp_path / "out" / f"trace_{rank}.json").exists()


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--tensor_parallel", "2"], "--tensor_parallel: says how --fsdp shards. Add it, or leave this out."),
        (["--fsdp", "--tensor_parallel", "2"], "--tensor_parallel 2: no divisor of 1 processes."),
        (["--fsdp", "--fsdp_replicas", "2"], "--fsdp_replicas 2: 1 processes cannot be cut into as many equal parts."),
    ],
)
def test_processes_that_cannot_be_cut_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], error: str
):
    assert profile.main([*arguments(folder, tmp_path / "out", 2), *more]) == 1
    assert error in capsys.readouterr().err
