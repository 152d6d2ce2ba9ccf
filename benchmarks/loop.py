"""Overhead of the training loop: tokens/s of `fit` against a bare PyTorch loop on the same model and batches, in one process.

    python -m benchmarks.loop [--steps 30] [--rounds 5]

Both train the `base_tiny` model in float32 on the same sequences in the same order; the bare loop has nothing but the model, AdamW,
clipping and the learning rate. Rounds alternate, so that a slow moment of the machine falls on both; the median ratio counts.
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
from src.config import Places
from src.data import tokenizers
from src.experiments.grid import set_path
from src.experiments.run import Options, Run
from src.experiments.rundir import RunDir
from src.registry import Part, load_experiment, resolved
from src.training import loader, optim
from src.training.checkpoint import About
from src.training.loop import Task, fit
from src.training.loss import causal_lm_loss

ROOT = Path(__file__).resolve().parents[1]


def bare(model: torch.nn.Module, train: Any, config: Any, seed: int) -> float:
    """Tokens/s of the second half of the steps."""
    optimizer, rate = optim.adamw(model, config), optim.learning_rate(config)
    stream = loader.steps(train, config, seed, 0, torch.device("cpu"))
    model.train()
    tokens, began = 0, 0.0
    for step in range(config.steps):
        if step == config.steps // 2:
            tokens, began = 0, time.perf_counter()
        read = next(stream)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for batch in read.batches:
            (causal_lm_loss(model, batch) / read.loss_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        tokens += read.read_tokens
    return tokens / (time.perf_counter() - began)


def ours(model: Any, train: Any, recipe: Part, exp: dict[str, Any], places: Places) -> float:
    """Tokens/s of the second half of the steps, from perf.jsonl; scores and a checkpoint are written in between."""
    config: Any = recipe.config
    with RunDir.open(places.runs, exp, resolved(recipe, key="recipe")) as run_dir:
        run = Run(run_dir, places, Options(log_every=config.loop.steps // 2))
        task = Task(model, About({}, tokenizers.load(model.name_or_path)), train, {}, causal_lm_loss, lambda _: {"val_loss": 0.0})
        fit(task, run, config.loop, config.seed)
        return json.loads((run_dir.path / "perf.jsonl").read_text().splitlines()[-1])["tokens_per_second"]


def main() -> None:
    """Print one line per round and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data_path", type=Path, default=ROOT / "results" / "data")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    exp = set_path(set_path(exp_configs.BASE_TINY, "loop.steps", args.steps, True), "loop.eval_every", args.steps, True)
    recipe = load_experiment(exp, "benchmark")
    config: Any = recipe.config
    ratios = []
    print("round   bare tokens/s   fit tokens/s   ratio")
    for i in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            places = Places(args.data_path, Path(folder))
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                models.append(config.model(places))
            train = config.data(places, tokenizers.load(models[0].name_or_path), "train", config.seed)
            measured = {}
            for name in ("bare", "fit") if i % 2 else ("fit", "bare"):
                if name == "bare":
                    measured[name] = bare(models[0], train, config.loop, config.seed)
                else:
                    measured[name] = ours(models[1], train, recipe, exp, places)
        same = all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
        assert same, "both loops must end with the same weights, else they did not do the same work"
        ratios.append(measured["fit"] / measured["bare"])
        print(f"{i:>5}   {measured['bare']:>13,.0f}   {measured['fit']:>12,.0f}   {ratios[-1]:.3f}")
    print(f"median ratio {statistics.median(ratios):.3f} (target: at least 0.97)")


if __name__ == "__main__":
    main()
