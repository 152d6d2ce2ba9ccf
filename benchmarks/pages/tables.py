"""Tables and bands over thousands of runs, compared with haven's on the same tree: `python -m benchmarks.pages.tables
[--experiments 5000]`."""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from src.runs.environment import describe
from src.runs.run_dir import RunDir
from src.tables.cache import CACHE

SCORES = ("train_loss", "val_loss", "val_accuracy", "grad_norm", "learning_rate")

# Each runs in its own process, so that peak memory and imports are measured separately. CPU time is measured as well as
# wall time: on a shared machine only CPU time can be compared.
_MEASURING_SCRIPT = """
import resource, sys, time, warnings
runs = sys.argv[1]
{code}
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(time.perf_counter() - start, time.process_time() - cpu_start, memory)
"""
_HAVEN = """
warnings.simplefilter("ignore")
from haven.haven_results import ResultManager
start, cpu_start = time.perf_counter(), time.process_time()
manager = ResultManager(savedir_base=runs, verbose=False)
"""
_TABLE = """
from pathlib import Path
from results.table import render, tabulate
from src.tables.results import load_rows
start, cpu_start = time.perf_counter(), time.process_time()
rows, warned = load_rows(Path(runs))
assert not warned, warned
render(*tabulate(rows, ["exp_id"], ["all"]), "markdown")
"""
_BANDS = """
from pathlib import Path
from src.tables.curves import bands
from src.tables.results import group_rows, load_rows
import numpy
start, cpu_start = time.perf_counter(), time.process_time()
rows, _ = load_rows(Path(runs))
rows = [row for row in rows if row["model.stride"] < {count} // 10]
found, _ = bands(Path(runs), group_rows(rows, ["model.stride"]), ["val_loss"])
for band in found[0]:
    band.half_width("ci95")
"""
_HAVEN_BANDS = (
    _HAVEN
    + """
import matplotlib
matplotlib.use("Agg")
manager.exp_list = [exp for exp in manager.exp_list if exp["model"]["stride"] < {count} // 10]
manager.get_plot(
    x_metric="step", y_metric="val_loss", avg_across="seed", title_list=["recipe"], legend_list=["model.stride"]
)
"""
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the tree, measure, print a table. Returns the exit code."""
    options = _parser().parse_args(arguments)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="benchmark-results-"))
    try:
        began = time.perf_counter()
        generate(folder, options.experiments, options.steps)
        took = time.perf_counter() - began
        print(
            f"{options.experiments} runs x {options.steps} rows x {len(SCORES)} scores, written in {took:.0f} s",
            flush=True,
        )
        os.sync()  # finished runs are on the disk long since
        _compare(folder, options.bands)
    finally:
        shutil.rmtree(folder)
    return 0


def generate(runs: Path, count: int, steps: int) -> None:
    """Finished runs: strides, each with ten seeds, and histories that differ."""
    facts = describe(["trainval.py", "-e", "grid"])
    rng = random.Random(0)
    histories = [_history(rng, steps) for _ in range(20)]
    for number in range(count):
        exp = {
            "recipe": "toy",
            "seed": number % 10,
            "model": {"name": "m", "stride": number // 10, "depth": 2},
            "loop": {"steps": steps},
        }
        with RunDir.open(runs, exp, exp, facts={**facts, "groups": ["grid"]}) as run:
            # As `Scores.append` writes them, but synced once, not for each row.
            shift = rng.random()
            lines = [json.dumps({**row, "val_loss": row["val_loss"] + shift}) for row in histories[number % 20]]
            run.scores.path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            run.scores.export_haven()
            run.set_status("done", step=steps)


def _history(rng: random.Random, steps: int) -> list[dict[str, Any]]:
    return [{"step": step, **{name: rng.random() for name in SCORES}} for step in range(1, steps + 1)]


def _compare(runs: Path, count: int) -> None:
    haven_table = _HAVEN + "manager.get_score_df()\n"
    bands, their_bands = _BANDS.format(count=count), _HAVEN_BANDS.format(count=count)
    rows = [
        ("table, first", _measure(runs, haven_table), _measure(runs, _TABLE)),
        ("table, second", _measure(runs, haven_table), _measure(runs, _TABLE)),
        (f"bands of {count} runs, first", _measure(runs, their_bands), _measure(runs, bands)),
        (f"bands of {count} runs, second", None, _measure(runs, bands)),
    ]
    print(f"{'':32}{'haven s':>9}{'cpu s':>8}{'MB':>6}{'ours s':>9}{'cpu s':>8}{'MB':>6}{'times':>8}{'cpu':>6}")
    for name, theirs, ours in rows:
        haven_cells = _cells(theirs) if theirs else f"{'-':>9}{'-':>8}{'-':>6}"
        times = f"{theirs[0] / ours[0]:8.0f}{theirs[1] / ours[1]:6.0f}" if theirs else f"{'-':>8}{'-':>6}"
        print(f"{name:32}{haven_cells}{_cells(ours)}{times}")
    print(
        f"cache: {(runs / CACHE).stat().st_size / 1e6:.0f} MB; "
        f"load {os.getloadavg()[0]:.1f}; this process {_peak():.0f} MB"
    )


def _cells(values: Sequence[float]) -> str:
    return f"{values[0]:9.2f}{values[1]:8.2f}{values[2]:6.0f}"


def _measure(runs: Path, code: str) -> list[float]:
    """Seconds without imports, of them on the processor, and peak MB."""
    command = [sys.executable, "-c", _MEASURING_SCRIPT.format(code=code), str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [float(word) for word in done.stdout.split()[-3:]]


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages.tables", description=__doc__)
    parser.add_argument("--experiments", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--bands", type=int, default=1000, help="how many runs are plotted")
    parser.add_argument("--folder", type=Path, help="where to make the tree (default: the system's temporary folder)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
