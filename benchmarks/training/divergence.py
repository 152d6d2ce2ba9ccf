"""The divergence detector at its defaults: findings on real training curves, false alarms on noise, and cost per step.

    TRAINVAL_DATA=FOLDER python -m benchmarks.training.divergence [--plots FOLDER] [--seeds 200]

Reads every curve of FOLDER/logs, in the format in which its project wrote it. Steps where every metric is "nan" were
not recorded and are dropped. A line that covers several steps is replayed as several steps: first the skipped ones,
then the applied ones, each with the line's mean loss.
"""

import argparse
import csv
import json
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from src.training.divergence.detector import Config, Detector, Finding

LINE = re.compile(r"iteration +(\d+)/.*number of skipped iterations: +(\d+)")
LOSS, NORM = re.compile(r"lm[ -]loss: ([-+.\dEe]+|nan|inf)"), re.compile(r"grad norm: ([-+.\dEe]+|nan|inf)")


@dataclass(frozen=True)
class Step:
    """One observation."""

    step: int
    loss: float | None
    grad_norm: float | None = None
    skipped: bool = False


def golden(path: Path) -> Iterator[Step]:
    """Megatron-LM's golden values: {"metric": {"values": {"step": number or "nan"}}}."""
    metrics = {name: part["values"] for name, part in json.loads(path.read_text()).items()}
    for step, loss in metrics["lm loss"].items():
        if all(values.get(step) == "nan" for values in metrics.values()):
            continue
        yield Step(int(step), float(loss))


def nanogpt(path: Path) -> Iterator[Step]:
    """modded-nanogpt's metrics as csv; a cell is empty where nothing was measured."""
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["train_loss"]:
                yield Step(int(row["step"]), float(row["train_loss"]), _number(row.get("grad_norm")))


def bigscience_csv(path: Path) -> Iterator[Step]:
    """Iteration lines of Megatron-DeepSpeed as csv."""
    with open(path, newline="") as file:
        rows = [
            (int(r["iteration"]), _number(r["lm_loss"]), _number(r["grad_norm"]), int(r["skipped"]))
            for r in csv.DictReader(file)
        ]
    return _steps(rows)


def bigscience_out(path: Path) -> Iterator[Step]:
    """The same lines from the output of a Slurm job; pipeline stages can print a line several times."""
    rows = {}
    for line in path.read_text(errors="replace").splitlines():
        if match := LINE.search(line):
            loss, norm = LOSS.search(line), NORM.search(line)
            rows[int(match[1])] = (int(match[1]), _number(loss and loss[1]), _number(norm and norm[1]), int(match[2]))
    return _steps(sorted(rows.values()))


def _steps(rows: Sequence[tuple[int, float | None, float | None, int]]) -> Iterator[Step]:
    last = 0
    for iteration, loss, norm, skipped in rows:
        for step in range(last + 1, iteration + 1):
            is_applied = step - last > skipped
            yield Step(step, loss if is_applied else None, norm if is_applied else None, not is_applied)
        last = iteration


def _number(text: str | None) -> float | None:
    return float(text) if text else None


READERS: dict[str, Callable[[Path], Iterator[Step]]] = {
    "megatron_golden/*.json": golden,
    "nanogpt/*.csv": nanogpt,
    "bigscience_slurm_out/*.csv": bigscience_csv,
    "bigscience_slurm_out/*.out": bigscience_out,
}


def curves(logs: Path) -> dict[str, list[Step]]:
    """Every curve of the folder by file name."""
    return {path.name: list(read(path)) for pattern, read in READERS.items() for path in sorted(logs.glob(pattern))}


def detect(steps: Sequence[Step], config: Config | None = None) -> list[Finding]:
    """All findings of a detector that sees the steps in turn."""
    detector = Detector(config or Config())
    return [finding for s in steps for finding in detector.observe(s.step, s.loss, s.grad_norm, s.skipped)]


def noisy(seed: int, steps: int, noise: float, persistence: float, tails: float) -> list[Step]:
    """A healthy curve: a power law from 10 down to about 3, times noise that is correlated from step to step and now
    and then large.

    noise: standard deviation relative to the loss. persistence: share of the noise that carries over to the next step.
    tails: share of steps with noise four times as large, upwards.
    """
    draw = random.Random(seed)
    series, wave = [], 0.0
    for step in range(1, steps + 1):
        wave = persistence * wave + math.sqrt(1 - persistence**2) * draw.gauss(0, 1)
        jump = abs(draw.gauss(0, 4)) if draw.random() < tails else 0.0
        series.append(
            Step(
                step,
                (2.5 + 7.5 * (1 + step / 20) ** -0.5) * math.exp(noise * (wave + jump)),
                math.exp(0.3 * draw.gauss(0, 1)),
            )
        )
    return series


def seconds_per_step(steps: Sequence[Step]) -> tuple[float, float]:
    """Median and 99th percentile."""
    detector, times = Detector(Config()), []
    for s in steps:
        began = time.perf_counter()
        detector.observe(s.step, s.loss, s.grad_norm, s.skipped)
        times.append(time.perf_counter() - began)
    return statistics.median(times), statistics.quantiles(times, n=100)[-1]


def plot(name: str, steps: Sequence[Step], findings: Sequence[Finding], folder: Path) -> None:
    """Save the curve with a line at each finding as PNG, in full and without its first 5 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5), layout="constrained")
    for axes, part in zip(figure.subplots(1, 2), (steps, steps[len(steps) // 20 :]), strict=True):
        plotted_steps = [s for s in part if s.loss is not None]
        axes.plot([s.step for s in plotted_steps], [s.loss for s in plotted_steps], linewidth=0.6)
        for f in findings:
            if f.step >= plotted_steps[0].step:
                axes.axvline(f.step, color="red", linewidth=0.5, alpha=0.6)
    figure.suptitle(f"{name}: {len(findings)} findings")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=80)


def print_curves(by_name: dict[str, list[Step]], plots: Path | None) -> None:
    """The table of real curves."""
    print(f"{'curve':<46} {'steps':>6}  fired when, or quiet")
    for name, steps in by_name.items():
        findings = detect(steps)
        if plots:
            plot(name, steps, findings, plots)
        text = ", ".join(f"{f.kind} {f.first_step}-{f.step}" for f in findings[:8]) or "quiet"
        print(f"{name:<46} {len(steps):>6}  {text}{f', and {len(findings) - 8} more' if len(findings) > 8 else ''}")


def least_spike(steps: Sequence[Step], at: int) -> float:
    """The least factor, to 1 %, by which a spike of three steps from the `at`-th on must multiply the losses to be
    found within ten."""
    for percent in range(1, 301):
        part = list(steps[at - 400 : at + 10])
        for i in range(400, 403):
            part[i] = replace(part[i], loss=(part[i].loss or math.nan) * (1 + percent / 100))
        if any(f.kind == "loss_spike" and f.step >= part[400].step for f in detect(part)):
            return 1 + percent / 100
    return math.inf


def print_sensitivity(by_name: dict[str, list[Step]]) -> None:
    """The table of planted spikes."""
    print(f"\n{'least spike of 3 steps that fires, at 3 places':<46} {'early':>8} {'middle':>8} {'end':>8}")
    for name, steps in by_name.items():
        if len(steps) > 1000:
            least = (least_spike(steps, at) for at in (500, len(steps) // 2, len(steps) - 20))
            print(f"{name:<46} " + " ".join(f"{factor:>8.2f}" for factor in least))


def print_false_alarms(seeds: int, steps: int = 2000) -> None:
    """The table of healthy synthetic curves."""
    print(f"\n{seeds} healthy curves of {steps} steps each    curves with a finding   findings per 1000 steps")
    for noise, persistence, tails in (
        (0.01, 0, 0),
        (0.05, 0, 0),
        (0.2, 0, 0),
        (0.05, 0, 0.02),
        (0.05, 0.3, 0),
        (0.05, 0.6, 0),
    ):
        counts = [len(detect(noisy(seed, steps, noise, persistence, tails))) for seed in range(seeds)]
        wrong, name = sum(map(bool, counts)), f"noise {noise:.2f}, persistence {persistence:.1f}, large {tails:.2f}"
        print(f"{name:<46} {wrong:>12} ({wrong / seeds:.1%}) {sum(counts) / seeds / steps * 1000:>20.3f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--plots", type=Path, help="write each curve with its findings there")
    args = parser.parse_args()
    if "TRAINVAL_DATA" in os.environ:
        by_name = curves(Path(os.environ["TRAINVAL_DATA"]) / "logs")
        print_curves(by_name, args.plots)
        print_sensitivity(by_name)
    else:
        print("TRAINVAL_DATA is not set, so no real curve is read.")
    middle, high = seconds_per_step(noisy(0, 5000, 0.05, 0.3, 0.02))
    print(f"\none step: median {middle * 1e6:.0f} us, 99th percentile {high * 1e6:.0f} us (target: less than 50)")
    print_false_alarms(args.seeds)


if __name__ == "__main__":
    main()
