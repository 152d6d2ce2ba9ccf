"""Cost of monitoring: tokens/s of `fit` with the statistics of the default interval against none, in one process.

    python -m benchmarks.training.monitoring [--rounds 5] [--every 50] [--hidden_size 192]

Each training runs 2 * `every` steps; the second half, which logs statistics at one step, is measured. Rounds
alternate, so that a slow moment of the machine falls on both; the median ratio counts. Both must end with the same
weights, bit for bit. CPU seconds are also reported, since other programs disturb them less.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import exp_configs
from src.data.text import tokenizers
from src.experiments.config import Places
from src.experiments.grid import set_path
from src.experiments.interfaces import load_experiment
from src.experiments.registry import resolved_dict
from src.runs.context import Options, Run
from src.runs.run_dir import RunDir
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.loop import fit
from src.training.loss import causal_lm_loss
from src.training.monitoring.monitor import DEFAULT_EVERY
from src.training.spec import TrainSpec

ROOT = Path(__file__).resolve().parents[2]


def trained(exp: dict[str, Any], data: Path, every: int, rows: int) -> tuple[torch.nn.Module, float, float]:
    """The model, tokens/s of the steps since the last row but one, and seconds of the processor for all."""
    recipe = load_experiment(exp, "benchmark")
    config: Any = recipe
    with tempfile.TemporaryDirectory() as folder:
        places = Places(data, Path(folder))
        torch.manual_seed(0)
        model = config.model.build(places)
        tokenizer = tokenizers.load(model.name_or_path)
        train = config.data.build(places, tokenizer, "train", config.seed)
        with RunDir.open(places.runs, exp, resolved_dict(recipe, key="recipe")) as run_dir:
            run = Run(run_dir, places, Options(log_every=rows, statistics_every=every))
            task = TrainSpec(
                model, CheckpointMetadata({}, tokenizer), train, {}, causal_lm_loss, lambda _: {"val_loss": 0.0}
            )
            began = time.process_time()
            fit(task, run, config.loop, config.seed)
            seconds = time.process_time() - began
            assert (run.path / "statistics.jsonl").exists() == bool(every)
            return (
                model,
                json.loads((run_dir.path / "perf.jsonl").read_text().splitlines()[-1])["tokens_per_second"],
                seconds,
            )


def main() -> None:
    """Print one line per round and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=DEFAULT_EVERY)
    parser.add_argument("--hidden_size", type=int, default=192)
    parser.add_argument("--data_path", type=Path, default=ROOT / "results" / "data")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    exp = exp_configs.BASE_TINY
    changes = {"loop.steps": 2 * args.every, "loop.eval_every": 2 * args.every, "model.hidden_size": args.hidden_size}
    for path, value in changes.items():
        exp = set_path(exp, path, value, True)
    ratios, seconds = [], []
    print("round   without tokens/s   with tokens/s   ratio   ratio of processor seconds")
    for i in range(args.rounds):
        runs: dict[int, Any] = {}
        for every in (0, args.every) if i % 2 else (args.every, 0):
            runs[every] = trained(exp, args.data_path, every, args.every)
        same = all(
            torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[args.every][0].parameters(), strict=True)
        )
        assert same, "monitoring must change no bit"
        ratios.append(runs[args.every][1] / runs[0][1])
        seconds.append(runs[0][2] / runs[args.every][2])
        print(
            f"{i:>5}   {runs[0][1]:>16,.0f}   {runs[args.every][1]:>13,.0f}   {ratios[-1]:.3f}   {seconds[-1]:.3f}",
            flush=True,
        )
    print(
        f"median ratio {statistics.median(ratios):.3f}, of processor seconds {statistics.median(seconds):.3f} "
        f"(target: at least 0.98)"
    )


if __name__ == "__main__":
    main()
