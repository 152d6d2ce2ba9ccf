"""List n-grams that PMI-masking masks as units: `python -m data_prep.t5.pmi_vocabulary --name c4_pmi --train FILE..`.

One folder is made below --data_path, with ngrams.txt, which data set span_corruption reads: `"ngrams":
"c4_pmi/ngrams.txt"`. N-grams of 2 to 5 words are ranked by PMI_n (Levine et al. 2021, arXiv 2010.01825, equation 3),
separately by length. Half of the list are pairs, a quarter are triples, and an eighth each have 4 and 5 words, as in
the authors' lists (github.com/AI21Labs/pmi-masking). N-grams without a positive score are dropped. A SOURCE is a file
(.jsonl, .json, .txt, plain or with gzip; .parquet), a folder saved by `datasets`, or hub:ID[@CONFIG]. It is read once;
memory is bounded by --max_counts.
"""

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import command, training_text
from src.errors import DataError
from src.support.command_line import require_at_least

COMMAND = "python -m data_prep.t5.pmi_vocabulary"
FILE = "ngrams.txt"
SHARES = {2: 0.5, 3: 0.25, 4: 0.125, 5: 0.125}
"""{number of words of an n-gram: share of the list}."""
_WORD = re.compile(r" ?(?:\w+|[^\w\s])")  # with the preceding space, else as in src/systems/t5/denoising/ngrams.py
_PUNCTUATION = re.compile(r"[^\w\s]+")


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--name", required=True, help="the new folder below it")
    add(
        "--train",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="text to read: the training text, or a part of it",
    )
    add(
        "--text_field",
        default="text",
        help="of JSON objects and table rows: which one is the text (default: %(default)s)",
    )
    add(
        "--size",
        type=int,
        default=800_000,
        metavar="N",
        help="n-grams of the list (default: %(default)s, as in the paper)",
    )
    add(
        "--min_count",
        type=int,
        default=11,
        metavar="N",
        help="an n-gram occurs so often at least (default: %(default)s, as there)",
    )
    add(
        "--max_counts",
        type=int,
        default=10_000_000,
        metavar="N",
        help="in memory, about 150 bytes each (default: %(default)s)",
    )
    add("--punctuation", action="store_true", help="signs are words too, as for code; without it n-grams end at them")
    add("--frequent", action="store_true", help="rank by PMI_n + log p(n-gram), as the authors' published lists do")


def prepare(data_path: Path, name: str, train: Sequence[str], text_field: str, **options: Any) -> bool:
    """Make the folder `data_path / name`; False if it is complete and has the same provenance.
    options: all other options of the command line.

    Raises:
        ConfigError: an option is out of range.
        DataError: a source is missing or damaged, or no n-gram is frequent enough.
        RunError: the disk refuses.
    """
    for option, least in (("size", 8), ("min_count", 2), ("max_counts", 1)):
        require_at_least(least, **{option: options[option]})
    corpus = training_text.open_corpus(train, text_field)
    made_from = {
        **corpus.facts,
        "options": options,
        "scripts_sha256": command.digest_files([__file__, training_text.__file__]),
    }

    def fill(partial_folder: Path) -> dict[str, Any]:
        counts, totals, undercount = count_ngrams(corpus.batches(name), options["max_counts"], options["punctuation"])
        ngrams_by_rank = rank(counts, totals, options["min_count"], options["frequent"])
        selected_ngrams = {n: ngrams_by_rank[n][: int(options["size"] * share)] for n, share in SHARES.items()}
        if not any(selected_ngrams.values()):
            often = f"occurs {options['min_count']} times and more often than by chance"
            raise DataError(f"--train: no n-gram {often}. Use more text, or a lower --min_count.")
        with open(partial_folder / FILE, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{ngram}\n" for ngrams in selected_ngrams.values() for ngram in ngrams)
        facts = {
            "words": totals[1],
            "ngrams": {str(n): len(ngrams) for n, ngrams in selected_ngrams.items()},
            "undercount": undercount,
        }
        counts_text = ", ".join(f"{n}: {number:,}" for n, number in facts["ngrams"].items())
        command.report(f"{totals[1]:,} words; n-grams by words: {counts_text}", **facts)
        if undercount:
            command.report(
                f"Rare n-grams were dropped, so counts can be too low by up to {undercount:,}; "
                "Raise --max_counts to count more.",
                undercount=undercount,
            )
        return facts

    return command.make_folder(data_path / name, COMMAND, made_from, fill) is not None


def count_ngrams(
    batches: Iterable[list[str]], max_counts: int, punctuation: bool = False
) -> tuple[Mapping[str, int], dict[int, int], int]:
    """Count n-grams of up to 5 words, in lower case; return (counts, totals, undercount).

    counts: if there are more than `max_counts` after a batch, the rarest are dropped until half of `max_counts` are
    left (lossy counting, Manku and Motwani 2002). Parts of a remaining n-gram remain, because they are not rarer.
    totals: number of n-grams by length, including dropped ones.
    undercount: maximum error of a count, and maximum count of an n-gram that was dropped.
    """
    counts, totals, undercount = Counter[str](), dict.fromkeys(range(1, max(SHARES) + 1), 0), 0

    def ngrams(texts: list[str]) -> Iterator[str]:
        for text in texts:
            plain = " ".join(text.lower().split())
            for part in [plain] if punctuation else _PUNCTUATION.split(plain):
                words = _WORD.findall(part)
                for n in totals:
                    totals[n] += max(len(words) + 1 - n, 0)
                    yield from map(str.lstrip, map("".join, zip(*(words[first:] for first in range(n)), strict=False)))

    for texts in batches:
        counts.update(ngrams(texts))
        if len(counts) > max_counts:
            rarest = sorted(counts.values())[-(max_counts // 2) - 1]
            counts = Counter({ngram: count for ngram, count in counts.items() if count > rarest})
            undercount += rarest
    return counts, totals, undercount


def rank(
    counts: Mapping[str, int], totals: dict[int, int], min_count: int, frequent: bool = False
) -> dict[int, list[str]]:
    """Rank n-grams with at least `min_count` and a positive PMI_n; return {length: n-grams, highest score first}.

    totals: number of n-grams by length. frequent: the score is PMI_n plus the log probability of the n-gram.
    """

    def log_p(ngram: str, n: int) -> float:
        return math.log(counts[ngram] / totals[n])

    scores: dict[int, list[tuple[float, str]]] = {n: [] for n in SHARES}
    for ngram, count in counts.items():
        if count >= min_count and (n := len(words := _WORD.findall(ngram))) > 1 and (score := pmi(words, log_p)) > 0:
            scores[n].append((-score - frequent * log_p(ngram, n), ngram))
    return {n: [ngram for _, ngram in sorted(scores_of_n)] for n, scores_of_n in scores.items()}


def pmi(words: Sequence[str], log_p: Callable[[str, int], float]) -> float:
    """PMI_n of two or more words: log p of the n-gram minus log p of its most probable segmentation into parts.

    Equation 3 of Levine et al. 2021: min over segmentations of log (p(w_1..w_n) / product of p(s) over segments s).
    words: with preceding spaces. log_p: function of an n-gram and its number of words.
    """
    n = len(words)
    best = [0.0]  # best[i]: maximum log of the product, for the first i words
    for last in range(1, n + 1):
        segments = [first for first in range(last) if last - first < n]
        best.append(max(best[first] + log_p("".join(words[first:last]).lstrip(), last - first) for first in segments))
    return log_p("".join(words).lstrip(), n) - best[n]


main = command.main_of(COMMAND, __doc__, _add_options, prepare)

if __name__ == "__main__":
    sys.exit(main())
