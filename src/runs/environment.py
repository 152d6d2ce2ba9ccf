"""The environment of a start: code, versions, machine, command. Leaves out secrets, and never raises."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from src.files import ROOT
from src.runs.code_version import code_version
from src.support.redaction import redact

_GPU_SECONDS = 2.0

JOBS_PER_GPU = "JOBS_PER_GPU"
"""Environment variable of a job: number of jobs that share each of its GPUs."""
# Only these variables are recorded: other variables can hold secrets.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_NODELIST",
    "EAI_JOB_ID",
    "EAI_RUN_INDEX",
    JOBS_PER_GPU,
)
_OTHER_ROOMS = {"launch", "operations", "serving", "sweeps", "tables"}
"""Folders of src without training code: they launch, serve or show trainings."""
_EVALUATION = (
    *("data/", "evaluation/", "recipes/", "experiments/batches.py", "runs/scores.py", "support/distributed.py"),
    *("training/loss.py", "training/validation.py", "training/parallel/linear_cross_entropy.py"),
    "training/monitoring/reporter.py",
)
"""Starts of the names of modules that make validation data and scores."""
_NO_EVALUATION = {"groups.py", "presets.py", "demo.py", "study.py", "speed.py", "model", "serving"}
"""Names of modules and folders of systems and of the evaluation that hold experiments, models or servers."""


def describe(command: Sequence[str], leave_out: Sequence[Path] = ()) -> dict[str, Any]:
    """The content of env.json, JSON values only. Unknown facts are None. Takes well under a second.

    "diff" is the patch of the uncommitted changes: `RunDir.open` writes it to diff.patch.
    Values of flags that look like secrets are hidden in "command". leave_out: folders without code.
    """
    return {
        "time": now(),
        "command": redact(command),
        **code_version(ROOT, leave_out),
        "evaluation_code": evaluation_digest(),
        "python": platform.python_version(),
        "packages": installed_packages(sys.path),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": gpu_names(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def now() -> str:
    """The current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def recorded_processes(variables: Mapping[str, str]) -> int | None:
    """The number of processes of a start with these variables; None if they were on several machines."""
    count = variables.get("WORLD_SIZE", "1")
    return int(count) if variables.get("LOCAL_WORLD_SIZE", count) == count else None


def slurm_job(variables: Mapping[str, str]) -> str | None:
    """The Slurm job of a process with these environment variables, as "ID" or "ARRAY_TASK"; None outside of Slurm."""
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID")


@functools.cache
def code_digest(root: Path = ROOT) -> str:
    """Digest of the modules of src that a training can run, without `_OTHER_ROOMS`.
    Equal for a checkout and its snapshots."""
    return _digest(root, lambda name: name.parts[0] not in _OTHER_ROOMS)


@functools.cache
def evaluation_digest(root: Path = ROOT) -> str:
    """Digest of the modules of src that make validation data and scores: `_EVALUATION` and the systems, without
    `_NO_EVALUATION`. `results.compare` refuses runs in which it differs."""
    return _digest(
        root,
        lambda name: name.as_posix().startswith((*_EVALUATION, "systems/")) and _NO_EVALUATION.isdisjoint(name.parts),
    )


def _digest(root: Path, includes: Callable[[Path], bool]) -> str:
    digest = hashlib.sha256()
    for path in sorted((root / "src").rglob("*.py")):
        name = path.relative_to(root / "src")
        if any(part.startswith(".") for part in name.parts) or not includes(name):
            continue
        with contextlib.suppress(OSError):  # such as a broken link
            digest.update(json.dumps([name.as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()]).encode())
    return digest.hexdigest()[:16]


def installed_packages(paths: Iterable[str]) -> dict[str, str]:
    """Name -> version of every installed distribution, from metadata folder names: faster than opening 200 files."""
    packages: dict[str, str] = {}
    for path in paths:
        try:
            entries = os.listdir(path or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith(".dist-info"):
                name, _, version = entry.removesuffix(".dist-info").partition("-")
                packages.setdefault(name.lower().replace("_", "-"), version)
    return dict(sorted(packages.items()))


def gpu_names() -> list[str]:
    """Model names of this machine's NVIDIA GPUs. Does not load CUDA."""
    names = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        names.append(match.group(1).strip() if match else "unknown")
    if not names and shutil.which("nvidia-smi"):
        text = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], _GPU_SECONDS)
        names = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return names


def _output(command: list[str], timeout_seconds: float) -> str | None:
    """The output of a command; None if it is not installed, fails, or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout_seconds, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
