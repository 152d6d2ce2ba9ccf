"""Time to submit a thousand experiments and to query their status, per process, with a fake Slurm.

Prints wall-clock time, and CPU time including that of the fake Slurm; the difference is time spent waiting for the disk
and for other processes.

python -m benchmarks.submit
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.cli import project_with_grid
from tests.core.launch.fakes.fake_slurm.cluster import Cluster

COUNT = 1000
GRID = '''"""A thousand experiments without parents."""

from shipped_configs import BASE_TINY
from src.experiments.grid import grid

RATES = [k * 1e-5 for k in range(1, 101)]
EXP_GROUPS = {"thousand": grid(BASE_TINY, {"loop.learning_rate": RATES, "seed": list(range(10))})}
'''
JOB_CONFIGS = 'JOB_CONFIGS = {"slurm": {"launcher": "slurm"}}\n'


def time_command(words: list[str], folder: Path, cluster: Cluster) -> tuple[float, float, list[str]]:
    """Seconds of one command line, those of the processor, and the commands of Slurm that it called."""
    cluster.forget_calls()
    start, before = time.perf_counter(), os.times()
    done = subprocess.run(
        [sys.executable, "trainval.py", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    seconds, after = time.perf_counter() - start, os.times()
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, cpu_seconds, [call[0] for call in cluster.calls()]


def main() -> None:
    """Print one line for each command."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        project = project_with_grid(Path(folder, "project"))
        (project / "exp_configs.py").write_text(GRID, encoding="utf-8")
        (project / "job_configs.py").write_text(JOB_CONFIGS, encoding="utf-8")
        cluster = Cluster(Path(folder, "slurm"), patch)
        group = ["-e", "thousand"]
        print(f"{COUNT} experiments                seconds  processor  calls of Slurm's commands")
        for name, words in (
            ("check them (--dry-run)", [*group, "--dry-run"]),
            ("submit", [*group, "-j", "slurm"]),
            ("submit again: nothing to do", [*group, "-j", "slurm"]),
            ("status", [*group, "--job_option", "status"]),
            ("kill", [*group, "--job_option", "kill"]),
            ("submit once more", [*group, "-j", "slurm"]),
        ):
            seconds, cpu_seconds, calls = time_command(words, project, cluster)
            print(
                f"{name:<32}  {seconds:7.2f}  {cpu_seconds:9.2f}  "
                f"{', '.join(f'{calls.count(c)} {c}' for c in dict.fromkeys(calls)) or 'none'}"
            )
        runs = project / "results" / "runs"
        print(
            f"snapshots: {len(list((runs / 'snapshots').iterdir()))}; "
            f"jobs: {len(cluster.alive())} alive, {COUNT} wanted"
        )
        sizes = [path.stat().st_size for path in runs.rglob("submission.json")]
        print(
            f"submission.json: {max(sizes):,} bytes; noted: "
            f"{len(json.loads(max(runs.rglob('jobs.json')).read_text())['jobs'])}"
        )


if __name__ == "__main__":
    main()
