"""A disk that is full while a checkpoint is written: the one before stays usable, and all processes say why they
end."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from src.runs.checkpoints import checkpoints
from tests.core.training.parallel.modes import FIRST, LAST, MODES, Modes, pairs, scores, weights

PAGE = 4096
SLACK = 96 * 1024
"""Room for what is written beside checkpoints."""


def on_disk(*folders: Path) -> int:
    """Bytes that the files below take on a tmpfs."""
    return sum(
        -(-path.stat().st_size // PAGE) * PAGE for folder in folders for path in folder.rglob("*") if path.is_file()
    )


@pytest.fixture
def disk(modes: Modes) -> Iterator[Path]:
    """A small disk where the runs lie. Mounted again with another size, it keeps what it holds."""
    runs = modes.folder / "runs"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(runs)], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield runs
    subprocess.run(["umount", str(runs)], check=True)


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", pairs(MODES, "fsdp", "zero3"))
def test_the_checkpoint_before_stays_usable(modes: Modes, disk: Path, mode: str):
    whole = modes.trained(mode)
    last = on_disk(whole / "checkpoints" / LAST)
    assert last > 4 * SLACK
    resize(disk, str(on_disk(whole) - last // 2 + SLACK))
    output = modes.start(mode)
    assert output.count(f"{LAST}") == 1, "one line, not one of each process"
    assert "No space left on device" in output
    assert "Nothing complete was lost; make room or choose another folder." in output
    assert "Traceback" not in output.partition("failed (exitcode: 1)")[0], "a process has crashed"
    assert [path.name for path in (modes.run() / "checkpoints").glob("*step-*")] == [FIRST]
    assert checkpoints.newest_complete(modes.run()) == modes.run() / "checkpoints" / FIRST

    resize(disk, "64m")
    assert modes.start(mode) == ""
    assert "continues from step 3" in (modes.run() / "logs" / "train.log").read_text()
    assert weights(modes.run()) == weights(whole)
    assert scores(modes.run()) == scores(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "file"), [("zero1", "zero_pp_rank_1_mp_rank_00_optim_states.pt"), ("fsdp", "optimizer")]
)
def test_one_process_that_cannot_write_refuses_for_all(modes: Modes, mode: str, file: str):
    process, until = modes.begin(mode), time.monotonic() + 300
    try:
        while len(ranks := sorted(psutil.Process(process.pid).children(), key=psutil.Process.create_time)) < 2:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert not modes.run().exists(), "it must be limited before it writes"
        ranks[1].rlimit(psutil.RLIMIT_FSIZE, (100 * 1024, 100 * 1024))
        assert process.wait(timeout=300) == 1
    finally:
        process.kill()
    output = modes.log.read_text()
    assert f"{file}: cannot write: " in output
    assert "File too large" in output
    assert output.count("cannot write") == 1, "rank 0 alone says it"
    assert "Traceback" not in output.partition("failed (exitcode: 1)")[0]
    assert not list((modes.run() / "checkpoints").glob("*step-*"))
