"""Wall time and peak memory of what `make demo` runs, in an empty folder.

    python -m benchmarks.pages.demo

Memory is the sum of the proportional set sizes of all processes, sampled five times a second.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def commands() -> list[str]:
    """The commands of the demo target, with this environment's binaries."""
    target = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target, "the Makefile has no demo target"
    binaries = shlex.quote(str(Path(sys.executable).parent))
    return target[1].replace("\\\n", "").replace("$(BIN)", binaries).splitlines()


def memory(process: psutil.Process) -> int:
    """Bytes of a process and all below it; pages that they share count once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def main() -> None:
    """Print a row per command and the sums."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    seconds, peak = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
        for command in commands():
            began, most = time.perf_counter(), 0
            with psutil.Popen(command, shell=True, cwd=copy, env=environment) as process:
                while process.poll() is None:
                    most = max(most, memory(process))
                    time.sleep(0.2)
            took = time.perf_counter() - began
            assert process.returncode == 0, command
            print(f"{took:7.1f} s  {most / 2**30:5.2f} GiB  {command.strip()}")
            seconds, peak = seconds + took, max(peak, most)
    print(f"{seconds:7.1f} s  {peak / 2**30:5.2f} GiB  in all (targets: 300 s, 4 GiB)")


if __name__ == "__main__":
    main()
