"""What caching contexts on disk costs and gains: answers of a trained model by the type of its cache.

    python -m benchmarks.crossattn.context_cache results/runs/EXP_ID [--questions 512] [--data_path DIR] [--savedir_base
    DIR]

The validation questions of a run of recipe crossattn are answered with contexts that are encoded at each question, and
with cached
ones: as float32, bfloat16 and int8 (a scale for each token). Printed are the scores of the run's own metrics, how many
answers differ from those without a cache, bytes on disk per context token (of files, headers included), and
milliseconds for a batch of contexts: encoded, put into the cache, and read from it.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from src.evaluation.generation import AnswerGenerator
from src.evaluation.metrics import answers as answered
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.experiments.registry import METRICS, bind
from src.models.load import load
from src.systems.crossattn.model.encoded_context_cache import ContextCache, Dtype

PLENTY = 10**12


class Cached:
    """A model that looks for its contexts in a cache before it encodes them."""

    def __init__(self, model: Any, cache: ContextCache | None) -> None:
        self.config, self._model, self._cache = model.config, model, cache
        self.seconds: list[float] = []
        """Each time that contexts were had."""
        self.tokens = 0

    def generate(self, context_ids: torch.Tensor, context_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """As the model's."""
        began = time.perf_counter()
        had = self._cache.contexts if self._cache else self._model.encode
        context = had(context_ids, context_mask)
        self.seconds.append(time.perf_counter() - began)
        return self._model.generate(context_hidden=context.hidden, context_mask=context.mask, **kwargs)


def answers(
    who: AnswerGenerator, questions: Sequence[int], new_tokens: int, metrics: Sequence[Any]
) -> tuple[list[str], dict[str, float]]:
    """Predictions and their scores over all."""
    texts = [text for batch in who.batches(questions, new_tokens) for text, _ in batch]
    found = answered.scores(metrics, who.predictions(questions, texts))
    return texts, {name: value for name, value in found.items() if "/" not in name}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="save directory of a trained experiment of recipe crossattn")
    parser.add_argument("--questions", type=int, default=512, help="the first ones of the validation split")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--data_path", type=Path, default=Path("results/data"))
    parser.add_argument("--savedir_base", "-sb", type=Path, default=Path("results/runs"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    places = Places(args.data_path, args.savedir_base)
    model, tokenizer = load(args.run, places)
    config: Any = load_experiment(json.loads((args.run / "exp_dict.json").read_text()), args.run.name)
    data = config.data.build(places, tokenizer, "val", config.seed)
    questions = range(min(args.questions, data.num_questions))
    new_tokens = config.answers.max_new_tokens if config.answers else 16
    metrics = config.answers.metrics if config.answers else [bind(METRICS, {"name": "squad"})]
    exact, scores = None, {}
    with tempfile.TemporaryDirectory(prefix="context-cache-") as folder:
        for dtype in (None, *get_args(Dtype)):
            cache = ContextCache(Path(folder, dtype), model, PLENTY, dtype) if dtype else None
            for turn in ("encoded",) if cache is None else ("put", "read"):
                cached = Cached(model, cache)
                who = AnswerGenerator(cached, data, tokenizer, args.batch_size, torch.device("cpu"))
                predictions, scores = answers(who, questions, new_tokens, metrics)
                exact = exact or predictions
                differ = sum(one != other for one, other in zip(predictions, exact, strict=True))
                shown = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
                took = sorted(cached.seconds)[len(cached.seconds) // 2] * 1000
                line = (
                    f"{dtype or 'no cache':9} "
                    f"{turn:8} {took:8.2f} ms/batch  {differ:4} of {len(exact)} answers differ  {shown}"
                )
                print(
                    line
                    if cache is None
                    else f"{line}  {cache.num_bytes() / _tokens(data, questions):.0f} bytes/token",
                    flush=True,
                )


def _tokens(data: Any, questions: Sequence[int]) -> int:
    """Of the distinct contexts."""
    return sum(map(len, {tuple(chunk) for i in questions for chunk in data.prompt(i)["context_chunks"]}))


if __name__ == "__main__":
    main()
