"""A small T5 after a few minutes of training: losses of group `t5_tiny` against a unigram model of the same targets, in
nats per token.

    python -m benchmarks.t5.tiny [--data_path results/data]

The unigram model counts the target tokens of one epoch of the training split, sentinels and end tokens too, with one
count more for each token of the vocabulary. A model that has not learned to use its input or the order of tokens does
no better.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import exp_configs
import trainval
from src.data.text import tokenizers
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.runs.scores import parse_lines

ROOT = Path(__file__).resolve().parents[2]
GROUP = "t5_tiny"


def targets(data: Any) -> np.ndarray:
    """All target tokens of one epoch."""
    return np.concatenate([np.asarray(data.sample(0, i)["labels"]) for i in range(len(data))])


def unigram_loss(config: Any, places: Places) -> float:
    """Mean negative log-probability of the validation targets."""
    tokenizer = tokenizers.load(places.data / config.model.random.tokenizer)
    train, val = (targets(config.data.build(places, tokenizer, split, config.seed)) for split in ("train", "val"))
    counts = np.bincount(train, minlength=len(tokenizer)) + 1
    return float(-np.log(counts / counts.sum())[val].mean())


def main() -> None:
    """Print the losses, step by step, the unigram model's, and the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_path", type=Path, default=ROOT / "results" / "data")
    args = parser.parse_args()
    (exp,) = exp_configs.EXP_GROUPS[GROUP]
    config: Any = load_experiment(exp, GROUP)
    with tempfile.TemporaryDirectory() as runs:
        began = time.perf_counter()
        assert trainval.main(["-e", GROUP, "--data_path", str(args.data_path), "--savedir_base", runs]) == 0
        seconds = time.perf_counter() - began
        path = Path(runs) / exp_id(exp) / "scores.jsonl"
        rows = parse_lines(path.read_bytes().split(b"\n")[:-1], path)
    unigram = unigram_loss(config, Places(args.data_path, Path()))
    print(f"unigram model: {unigram:.3f}")
    for row in rows:
        print(f"step {row['step']}: val_loss {row['val_loss']:.3f}   val_accuracy {row['val_accuracy']:.3f}")
    print(
        f"{seconds:.0f} s (target: "
        f"at most 180)   {unigram - rows[-1]['val_loss']:.2f} nats below the unigram model (target: above 0)"
    )


if __name__ == "__main__":
    main()
