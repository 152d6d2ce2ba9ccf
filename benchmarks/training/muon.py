"""Muon against AdamW: steps and seconds of training to a fixed validation loss, on the corpus of base_tiny.

    python -m data_prep.crossattn.stdlib_qa
    python -m benchmarks.training.muon [--steps 200] [--rates 1e-3 2e-3 4e-3 8e-3] [--seeds 0 1 2] [--target 3.0]

Both optimizers have the same grid of learning rates, warm-up, weight decay and batches, and a constant rate after the
warm-up. With Muon the rate is for all parameters, as its updates have the size of AdamW's. Without --target, the target
is the highest final loss of a seed at AdamW's best rate, so that tuned AdamW always reaches it. The best rate of an
optimizer has the fewest steps on average. A loss is evaluated every 10 steps; seconds are those of training steps,
without evaluations and checkpoints. Intervals are 95 %, Student's t over the seeds.

Trainings are resumed and skipped as usual, so the command can be interrupted. They take turns on an otherwise idle
machine.
"""

import argparse
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import exp_configs
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import canonical_dict
from src.runs.jsonl_records import rows
from src.support.command_line import aligned_lines

ROOT = Path(__file__).resolve().parents[2]
EVERY = 10
"""Steps between evaluations."""
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class Curve:
    """Validation losses of one training."""

    losses: list[float]
    seconds: list[float]
    """Seconds of training up to each loss."""

    def reach(self, target: float) -> tuple[float, float]:
        """Steps and seconds to the first loss of at most `target`; infinity if there is none."""
        for i, loss in enumerate(self.losses):
            if loss <= target:
                return (i + 1) * EVERY, self.seconds[i]
        return math.inf, math.inf


def settings(optimizer: str, rate: float, seed: int, steps: int) -> dict[str, object]:
    """The values by dotted path in which a training differs from base_tiny."""
    return {
        "seed": seed,
        "loop.optimizer": optimizer,
        "loop.learning_rate": rate,
        "loop.schedule": "constant_with_warmup",
        "loop.steps": steps,
        "loop.eval_every": EVERY,
    }


def train(values: dict[str, object], runs: Path, data: Path) -> Curve:
    """Train, or resume, and read the curve."""
    words = [f"{path}={value}" for path, value in values.items()]
    command = [sys.executable, "trainval.py", "-e", "base_tiny", "--set", *words, "-sb", str(runs)]
    result = subprocess.run([*command, "--data_path", str(data)], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr}")
    exp = override(exp_configs.EXP_GROUPS["base_tiny"][0], values)
    run = runs / exp_id(canonical_dict(exp, load_experiment(exp, "base_tiny")))
    rates = {row["step"]: row["steps_per_second"] for row in rows(run / "perf.jsonl") if "steps_per_second" in row}
    losses, seconds, elapsed = list[float](), list[float](), 0.0
    for row in rows(run / "scores.jsonl"):
        if "val_loss" in row:
            elapsed += EVERY / rates[row["step"]]
            losses.append(row["val_loss"])
            seconds.append(elapsed)
    return Curve(losses, seconds)


def spell(values: Sequence[float]) -> str:
    """Mean and half of its 95 % interval."""
    from scipy.stats import t

    if not all(map(math.isfinite, values)):
        return f"never for {sum(map(math.isinf, values))} of {len(values)} seeds"
    half = (
        t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    )
    return f"{statistics.mean(values):.4g} ± {half:.2g}"


def main() -> None:
    """Train the grid and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, help="validation loss")
    parser.add_argument("--runs", type=Path, default=ROOT / "results" / "runs")
    parser.add_argument("--data_path", type=Path, default=ROOT / "results" / "data")
    args = parser.parse_args()
    if args.steps % EVERY:
        parser.error(f"--steps: expected a multiple of {EVERY}, got {args.steps}.")
    curves: dict[tuple[str, float], list[Curve]] = {}
    for seed in args.seeds:
        for rate in args.rates:
            for optimizer in OPTIMIZERS:
                curve = train(
                    settings(optimizer, rate, seed, args.steps), args.runs.resolve(), args.data_path.resolve()
                )
                curves.setdefault((optimizer, rate), []).append(curve)
    finals = {key: [curve.losses[-1] for curve in each] for key, each in curves.items()}
    tuned_key = min((key for key in curves if key[0] == "adamw"), key=lambda key: statistics.mean(finals[key]))
    target = args.target if args.target is not None else max(finals[tuned_key])
    times_to_target = {key: [curve.reach(target) for curve in each] for key, each in curves.items()}
    best = {
        optimizer: min(
            (key for key in curves if key[0] == optimizer),
            key=lambda key: statistics.mean(steps for steps, _ in times_to_target[key]),
        )
        for optimizer in OPTIMIZERS
    }
    table = [["optimizer", "rate", "final loss", f"steps to {target:.4f}", "seconds", "best"]]
    for key in sorted(curves):
        steps, seconds = zip(*times_to_target[key], strict=True)
        mark = "*" if key in best.values() else ""
        table.append([key[0], f"{key[1]:g}", spell(finals[key]), spell(steps), spell(seconds), mark])
    print("\n".join(aligned_lines(table)))
    for i, unit in enumerate(("steps", "seconds")):
        pairs = zip(times_to_target[best["muon"]], times_to_target[best["adamw"]], strict=True)
        ratios = [ours[i] / other[i] if math.isfinite(other[i]) else math.nan for ours, other in pairs]
        print(f"{unit}, Muon / AdamW at their best rates, by seed: {spell(ratios)}")


if __name__ == "__main__":
    main()
