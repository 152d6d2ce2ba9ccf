"""Improve a small language model by experiments: `python examples/research_loop/loop.py [--random N]`.

Each proposal changes fields of the best experiment so far, and trains with three seeds on the same token budget. It is
accepted only if `results.compare` calls it better. Every decision follows from the scores of saved runs, so a killed
loop continues with the same command, and ends with the same report.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import trainval  # noqa: E402  needs the path above
from data_prep.crossattn import stdlib_qa  # noqa: E402
from results import compare, progress  # noqa: E402
from src.errors import print_errors  # noqa: E402
from src.experiments.grid import parse_assignments  # noqa: E402
from src.runs import plan  # noqa: E402
from src.tables.comparison import BETTER  # noqa: E402

GROUP, METRIC, MIN_EFFECT, SEEDS = "research_tiny", "val_bits_per_byte", 0.02, (0, 1, 2)
Changes = dict[str, Any]
PROPOSALS: list[Changes] = [
    {"loop.learning_rate": 4e-3},
    {"loop.weight_decay": 0.3},
    {"loop.schedule": "linear"},
    {"loop.warmup_rate": 0.3},
    {"loop.adam_beta2": 0.99},
    {"loop.sequences_per_step": 16},
    {"loop.sequences_per_step": 4},
    {"loop.learning_rate": 1e-2},
    {"loop.learning_rate": 2e-2},
    {"loop.label_smoothing": 0.1},
    {"loop.z_loss": 1e-4},
    {"model.num_layers": 4},
    {"model.hidden_size": 96},
    {"model.num_heads": 2},
    {"loop.max_grad_norm": 0.3},
    {"loop.adam_beta1": 0.8},
    {"loop.final_rate": 0.1},
    {"loop.weight_decay": 0.0},
    {"loop.warmup_rate": 0.0},
    {"loop.adam_epsilon": 1e-9},
]
"""One experiment for each, in this order."""
CHOICES: dict[str, list[Any]] = {
    "loop.learning_rate": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
    "loop.sequences_per_step": [4, 8, 16],
    "loop.weight_decay": [0.0, 0.1, 0.3],
    "loop.warmup_rate": [0.0, 0.1, 0.3],
    "model.num_layers": [1, 2, 4],
    "model.hidden_size": [48, 64, 96],
}
"""Fields and values of --random."""


def draw_proposals(count: int, seed: int) -> list[Changes]:
    """Random changes of one or two fields, equal for equal arguments."""
    draws = random.Random(seed)
    keys = [draws.sample(list(CHOICES), draws.choice([1, 2])) for _ in range(count)]
    return [{key: draws.choice(CHOICES[key]) for key in of_one} for of_one in keys]


def assignments(changes: Changes, seeds: tuple[int, ...]) -> list[str]:
    """Arguments after --set for the base with `changes`."""
    return [*(f"{key}={json.dumps(value)}" for key, value in changes.items()), f"seed={','.join(map(str, seeds))}"]


def train(changes: Changes, options: argparse.Namespace, seeds: tuple[int, ...] = SEEDS) -> list[str] | None:
    """Train the base with `changes`, as far as it is not trained yet. Returns the ids, or None if a run failed.

    Raises:
        SystemExit: interrupted; the same command continues.
    """
    words = assignments(changes, seeds)
    folders = ["-sb", str(options.runs), "--data_path", str(options.data_path)]
    code = trainval.main(["-e", GROUP, "--set", *words, *folders, "--log_every", "1000"])
    if code not in (0, 1):
        raise SystemExit(code)
    items = plan.load_combinations(plan.read_groups(), [GROUP], parse_assignments(words))
    return [item.exp_id for item in items] if code == 0 else None


def search(proposals: list[Changes], options: argparse.Namespace) -> tuple[Changes, list[str]]:
    """Run all proposals. Returns the accepted changes and the lines of the report."""
    best: Changes = {}
    ids = train(best, options)
    if ids is None:
        raise SystemExit("error: the base failed; its log is in the save directory.")
    lines = ["| # | changes | difference | 95 % interval | verdict | accepted |", "|---|---|---|---|---|---|"]
    for number, proposal in enumerate(proposals, 1):
        changes = {**best, **proposal}
        new_ids = train(changes, options)
        if new_ids is None or new_ids == ids:
            cells = ["-", "-", "failed" if new_ids is None else "equal to the best", "no"]
        else:
            report = compare.make_report(options.runs, ids[0], new_ids[:1], METRIC, min_effect=MIN_EFFECT)
            (result,) = compare.to_dict(report)["candidates"]
            is_better = result["verdict"] == BETTER
            low, high = result["t_interval"] or (float("nan"), float("nan"))
            difference = float("nan") if result["difference"] is None else result["difference"]
            cells = [f"{difference:.4f}", f"{low:.4f} to {high:.4f}", result["verdict"], "yes" if is_better else "no"]
            if is_better:
                best, ids = changes, new_ids
        text = ", ".join(f"{key.rpartition('.')[2]} = {json.dumps(value)}" for key, value in proposal.items())
        lines.append(f"| {number} | {text} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return best, lines


@print_errors
def main() -> int:
    """Search, and write the report and the plot. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-sb", "--runs", type=Path, default=Path("results/research_loop"), help="folder of the runs")
    parser.add_argument("-d", "--data_path", type=Path, default=Path("results/data"), help="folder of the data")
    parser.add_argument("--experiments", type=int, default=len(PROPOSALS), help="number of proposals")
    parser.add_argument("--random", type=int, metavar="SEED", help="random proposals instead of the fixed list")
    options = parser.parse_args()
    count = options.experiments
    proposals = PROPOSALS[:count] if options.random is None else draw_proposals(count, options.random)
    if not (options.data_path / "stdlib_text").exists():
        stdlib_qa.main(["--data_path", str(options.data_path)])
    best, lines = search(proposals, options)
    words = ["-r", str(options.runs), "-e", GROUP, "--metric", METRIC, "--min-effect", str(MIN_EFFECT)]
    progress.main([*words, "-o", str(options.runs / "progress.png")])
    head = f"# {len(proposals)} experiments on {GROUP}\n\n`{METRIC}`, minimum effect {MIN_EFFECT}, seeds {SEEDS}.\n"
    tail = ["", f"Accepted: `{json.dumps(best)}`", "", "![Progress](progress.png)", ""]
    (options.runs / "report.md").write_text("\n".join([head, *lines, *tail]), encoding="utf-8")
    print(options.runs / "report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
