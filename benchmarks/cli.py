"""Startup time of the command line, compared with importing common heavy packages. Wall-clock time per process.

python -m benchmarks.cli
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from src.files import new_directory

ROOT = Path(__file__).resolve().parents[1]
RUNS = 5
GRID = '''"""A thousand experiments that start from one parent."""

from shipped_configs import BASE_TINY, CROSSATTN_TINY
from src.experiments.grid import grid

RATES = [k * 1e-5 for k in range(1, 101)]
EXP_GROUPS = {
    "base": [BASE_TINY],
    "thousand": grid(CROSSATTN_TINY, {"loop.learning_rate": RATES, "seed": list(range(10))}),
}
'''
FILES = {
    "stdlib_qa": ("train.jsonl", "val.jsonl"),
    "stdlib_text": ("train.jsonl", "val.jsonl"),
    "stdlib_tokenizer": ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
}


def seconds(command: Sequence[str], folder: Path) -> float:
    """Median wall time of the process, which must succeed."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        times.append(time.perf_counter() - start)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return statistics.median(times)


def project_with_grid(folder: Path) -> Path:
    """A copy of the code with the grid in exp_configs.py, and data folders that pass the checks of a dry run."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("trainval.py", "job_configs.py"):
        shutil.copy(ROOT / name, folder)
    shutil.copy(ROOT / "exp_configs.py", folder / "shipped_configs.py")
    (folder / "exp_configs.py").write_text(GRID, encoding="utf-8")
    for data, names in FILES.items():
        with new_directory(folder / "results" / "data" / data) as data_folder:
            for name in names:
                (data_folder / name).write_text("{}\n", encoding="utf-8")
    return folder


def main() -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = project_with_grid(Path(temporary))
        peers = {
            "import torch, transformers": [sys.executable, "-c", "import torch, transformers"],
            "import haven.haven_wizard": [sys.executable, "-W", "ignore", "-c", "from haven import haven_wizard"],
        }
        ours = {
            "trainval.py --help": ["--help"],
            "trainval.py --list": ["--list"],
            "trainval.py -e thousand --list": ["-e", "thousand", "--list"],
            "trainval.py -e thousand --dry-run": ["-e", "thousand", "--with-parents", "--dry-run"],
        }
        peer_times = {name: seconds(command, folder) for name, command in peers.items()}
        print(
            f"{'process, median of ' + str(RUNS):<40}{'seconds':>9}" + "".join(f"{'/ ' + name:>32}" for name in peers)
        )
        for name, time_ in peer_times.items():
            print(f"{name:<40}{time_:>9.2f}")
        for name, arguments in ours.items():
            time_ = seconds([sys.executable, "trainval.py", *arguments], folder)
            print(f"{name:<40}{time_:>9.2f}" + "".join(f"{time_ / peer:>32.3f}" for peer in peer_times.values()))


if __name__ == "__main__":
    main()
