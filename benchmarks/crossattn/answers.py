"""Answers per second of inference against a plain batched `generate`: SmolLM2-135M on questions with their contexts.

    python -m benchmarks.crossattn.answers DATA [--rows 64] [--rounds 3]     # DATA: after `make study-questions` began

Both answer the same questions greedily in batches of 16 with the same model, in one process with one thread, and must
give the same texts. They take turns batch by batch, and also in being the first; the median of the ratios of processor
seconds is printed.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import exp_configs
from src.data.text import tokenizers
from src.evaluation.generation import AnswerGenerator
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment

BATCH, NEW_TOKENS = 16, 16


def plain_answers(model: Any, tokenizer: Any, prompts: Sequence[list[Any]]) -> list[str]:
    """Greedy answers by transformers alone."""
    batch = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt")
    length = batch["input_ids"].shape[1]
    with torch.no_grad():
        ids = model.generate(**batch, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.eos_token_id)
    return [text.strip() for text in tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    places = Places(args.data.resolve(), args.data.resolve())
    recipe: Any = load_experiment(exp_configs.EXP_GROUPS["smollm2_untrained"][0], "smollm2_untrained[0]")
    model = recipe.model.build(places).eval()
    tokenizer = tokenizers.load(model.name_or_path)
    dataset = recipe.data.build(places, tokenizer, "val", recipe.seed)
    generator = AnswerGenerator(model, dataset, tokenizer, BATCH, torch.device("cpu"))
    plain_answers(model, tokenizer, [[tokenizer.eos_token_id]])  # the first call is slower
    answer = {
        "inference": lambda rows: [text for batch in generator.batches(rows, NEW_TOKENS) for text, _ in batch],
        "plain generate": lambda rows: plain_answers(
            model, tokenizer, [list(dataset.prompt(i)["input_ids"]) for i in rows]
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in answer}
    names = list(answer)
    for _ in range(args.rounds):
        for first in range(0, args.rows, BATCH):
            texts = dict[str, list[str]]()
            for name in names:
                begin = time.process_time()
                texts[name] = answer[name](range(first, min(first + BATCH, args.rows)))
                seconds[name].append(time.process_time() - begin)
            assert texts["inference"] == texts["plain generate"], "the answers differ"
            names.reverse()
    for name, each in seconds.items():
        print(f"{name}: {args.rows * args.rounds / sum(each):.2f} answers per processor second")
    ratios = [theirs / ours for ours, theirs in zip(*seconds.values(), strict=True)]
    print(f"median of the ratios: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
