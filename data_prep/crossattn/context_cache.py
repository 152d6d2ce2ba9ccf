"""Fill a cache of contexts ahead of serving: `python -m data_prep.crossattn.context_cache --cache FOLDER --max_bytes N
...`.

The contexts are those of a prepared corpus, <data_cache_path>/<corpus>. Whoever serves a model with the same base opens
the folder with src.systems.crossattn.model.encoded_context_cache.ContextCache and finds them there. Started again it
encodes only what is missing.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from data_prep import command
from data_prep.crossattn import distinct_inputs, encoding_options
from src.data import jsonl
from src.experiments.config import Places
from src.systems.crossattn.model import encoded_context_cache as context_cache

COMMAND = "python -m data_prep.crossattn.context_cache"


def _run(**given: Any) -> None:
    options = argparse.Namespace(**given)
    encoding_options.require_positive(options, "batch_size", "max_bytes")
    cache, counts = fill(options)
    size = cache.num_bytes()
    print(
        f"{options.cache}: {len(counts.keys)} distinct contexts of {counts.rows} rows, {cache.misses} encoded now, "
        f"{cache.hits} before; "
        f"{counts.too_long} were too long ({options.too_long}). {size} bytes of at most {options.max_bytes}."
    )
    if cache.evicted:
        print(f"{cache.evicted} contexts had to make room for others. Give more --max_bytes to keep all.")


def fill(options: argparse.Namespace) -> tuple[context_cache.ContextCache, distinct_inputs.Counts]:
    """Put the contexts of the corpus into the cache.

    Raises:
        UserError: what the corpus, the base or the cache folder lacks.
    """
    import torch

    device = encoding_options.device(options.device)
    places, rules = Places(options.data_cache_path, options.savedir_base), encoding_options.rules(options)
    source = jsonl.corpus_folder(places, options.corpus)
    base = encoding_options.model(options)
    encoding_options.architecture(base, places, rules)
    inputs, _ = encoding_options.inputs(base, places, rules)
    cache = context_cache.ContextCache(
        options.cache, base.build(places).to(device).eval(), options.max_bytes, options.dtype
    )
    counts = distinct_inputs.Counts()
    for batch in distinct_inputs.batches(
        distinct_inputs.missing(source, inputs, set(), counts), options.batch_size or 8
    ):
        ids = torch.zeros(len(batch), 1, max(map(len, batch)), dtype=torch.int64)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for n, sequence in enumerate(batch):
            ids[n, 0, : len(sequence)] = torch.tensor(sequence)
            mask[n, 0, : len(sequence)] = True
        cache.contexts(ids.to(device), mask.to(device))
    return cache, counts


def _add_options(parser: argparse.ArgumentParser) -> None:
    encoding_options.add(parser)
    add = parser.add_argument
    add("--cache", type=Path, required=True, metavar="FOLDER", help="the cache, made where there is none")
    add(
        "--max_bytes",
        type=int,
        required=True,
        help="of all its files together; what was not read for the longest time goes first",
    )
    add(
        "--dtype",
        choices=get_args(context_cache.Dtype),
        default="bfloat16",
        help="of the states on disk (default: %(default)s)",
    )
    add("--device", help="such as cuda:0 (default: the first GPU, or cpu)")


main = command.main_of(COMMAND, __doc__, _add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
