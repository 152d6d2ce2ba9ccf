"""The list of n-grams for PMI-masking: scores, exact and bounded counts, and what the data set reads of it."""

import itertools
import json
import math
import re
from collections import Counter
from random import Random

import pytest

from data_prep.t5.pmi_vocabulary import count_ngrams, main, pmi, rank
from src.systems.t5.denoising import ngrams


def corpus(seed=0, documents=400):
    """Words in random order, among them two names, one of which is part of a longer one."""
    rng, words = Random(seed), [f"w{i}" for i in range(40)]
    names = ["New York", "New York Stock Exchange", "to be or not to"]
    return [
        " ".join(rng.choice(names) if rng.random() < 0.1 else rng.choice(words) for _ in range(50)) + "."
        for _ in range(documents)
    ]


@pytest.fixture
def corpus_folder(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in corpus()))
    return tmp_path


def run(folder, *options):
    return main(["--data_path", str(folder), "--name", "pmi", "--train", str(folder / "corpus.jsonl"), *options])


def test_collocations_come_first_and_the_data_set_reads_them(corpus_folder):
    assert run(corpus_folder, "--size", "80") == 0
    lines = (corpus_folder / "pmi" / "ngrams.txt").read_text().splitlines()
    of = {n: [line for line in lines if len(line.split()) == n] for n in (2, 3, 4, 5)}
    assert [len(of[n]) <= most for n, most in ((2, 40), (3, 20), (4, 10), (5, 10))] == [True] * 4
    assert {*of[2][:7]} == {"new york", "york stock", "stock exchange", "to be", "be or", "or not", "not to"}
    assert of[4][:3] != of[4][3:]
    assert "new york stock exchange" in of[4][:3]
    assert of[5][0] == "to be or not to"
    vocabulary = ngrams.read_vocabulary(corpus_folder / "pmi" / "ngrams.txt")
    assert vocabulary.ngrams == {*lines}


def test_two_runs_write_the_same_bytes_and_a_third_nothing(corpus_folder, capsys):
    contents = []
    for options in ([], ["--size", "79"], []):
        assert run(corpus_folder, *options) == 0
        contents.append((corpus_folder / "pmi" / "ngrams.txt").read_bytes())
    assert contents[0] == contents[2] != contents[1]
    assert run(corpus_folder) == 0
    assert "nothing to do" in capsys.readouterr().out


def segmentations(words):
    """All ways to cut, but the one that does not."""
    for cuts in itertools.product([False, True], repeat=len(words) - 1):
        if any(cuts):
            bounds = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(words)]
            yield [words[first:last] for first, last in itertools.pairwise(bounds)]


def test_the_score_is_the_least_over_all_segmentations():
    """Equation 3, by enumeration; pairs of negative PMI make segments of two words count."""
    texts = [text.removesuffix(".") for text in corpus(1)] + ["a b"] * 5 + ["b a c", "b d a c"] * 60
    counts, totals, _ = count_ngrams([texts], 10**6)
    by_hand = Counter()
    for text in texts:
        words = text.lower().split()
        for n in range(1, 6):
            by_hand.update(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    assert counts == by_hand
    assert totals == {n: sum(count for ngram, count in by_hand.items() if len(ngram.split()) == n) for n in range(1, 6)}

    def log_p(words):
        return math.log(by_hand[" ".join(words)] / totals[len(words)])

    longest = set()
    for ngram, count in by_hand.items():
        words = ngram.split()
        if len(words) > 1 and count > 4:
            scores = {len(cut): log_p(words) - sum(map(log_p, cut)) for cut in segmentations(words)}
            least = min(log_p(words) - sum(map(log_p, cut)) for cut in segmentations(words))
            spaced_words = [words[0], *(f" {word}" for word in words[1:])]
            assert pmi(spaced_words, lambda text, n: math.log(by_hand[text] / totals[n])) == pytest.approx(least)
            longest.add(max(scores, key=lambda parts: -scores[parts]))
    assert len(longest) > 1  # the worst segmentation has two parts, or more


def test_frequency_counts_too_where_the_published_lists_have_it():
    texts = ["rare bird"] * 20 + ["the house"] * 100 + ["the", "house", "rare", "bird"] * 10
    counts, totals, _ = count_ngrams([texts], 10**6)
    assert rank(counts, totals, 11)[2] == ["rare bird", "the house"]
    assert rank(counts, totals, 11, frequent=True)[2] == ["the house", "rare bird"]
    assert rank(counts, totals, 21)[2] == ["the house"]
    assert rank({"a": 10, "b": 10, "a b": 1}, {1: 20, 2: 20}, 1)[2] == []  # rarer than by chance


def test_memory_is_bounded_and_frequent_ngrams_remain():
    texts = corpus(2)
    exact, _, exact_undercount = count_ngrams([texts], 10**9)
    few, totals, undercount = count_ngrams((texts[i : i + 10] for i in range(0, 400, 10)), 20_000)
    assert exact_undercount == 0 < undercount
    assert len(few) <= 20_000 < len(exact)
    assert all(exact[ngram] - undercount <= count <= exact[ngram] for ngram, count in few.items())
    assert all(ngram in few for ngram, count in exact.items() if count > undercount)
    assert {"new york stock exchange", "to be or not to"} <= {*itertools.chain(*rank(few, totals, 11).values())}
    counts, totals, undercount = count_ngrams([["a.b.c.a.d.a.b.e"]], 4)
    assert (counts, totals[1], undercount) == ({"a": 3, "b": 2}, 8, 1)


def test_signs_end_ngrams_unless_they_are_words():
    texts = ['for i  in\nrange(3): don\'t "Go"']
    counts, *_ = count_ngrams([texts], 10**6)
    assert "for i in range" in counts
    assert not [ngram for ngram in counts if re.search(r"[^\w ]", ngram)]
    counts, *_ = count_ngrams([texts], 10**6, punctuation=True)
    assert {"i in range(3", "don't", ": don", "range(3):", 't "go"'} <= {*counts}


def test_bad_input_is_one_line(corpus_folder, capsys):
    assert run(corpus_folder, "--min_count", "1") == 1
    assert "--min_count: expected at least 2, got 1" in capsys.readouterr().err
    assert run(corpus_folder, "--min_count", "100000") == 1
    assert "no n-gram occurs 100000 times and more often than by chance" in capsys.readouterr().err
    assert run(corpus_folder, "--text_field", "body") == 1
    assert "corpus.jsonl:1: field 'body' is missing" in capsys.readouterr().err
    assert not (corpus_folder / "pmi").exists()
