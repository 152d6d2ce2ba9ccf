"""ROUGE, BLEU and METEOR: values by hand, those of the libraries, and what the libraries leave open."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from src.evaluation.metrics import bleu, knowledge, meteor, rouge, squad
from src.experiments.dataset_protocols import Prediction

ROOT = Path(__file__).resolve().parents[4]
LIBRARIES = ["nltk", "rouge_score", "sacrebleu", "numpy"]
ALL = [squad, rouge, bleu, meteor, knowledge]


def one(module, prediction: str, *references: str, **options) -> dict[str, float]:
    scores = module.Config(**options).score([Prediction(prediction, list(references))])
    return {name: value for name, (value,) in scores.items()}


@pytest.fixture(scope="module")
def real_pairs(shared_data: Path) -> list[tuple[str, str]]:
    """Answers of SQuAD, each with another of the same question."""
    articles = json.loads((shared_data / "squad" / "squad_v1.1-dev-shared.json").read_text())["data"]
    answers = [
        [a["text"] for a in q["answers"]] for article in articles for p in article["paragraphs"] for q in p["qas"]
    ]
    pairs = [(some[0], some[-1]) for some in answers if len(some) > 1]
    assert len(pairs) > 50
    return pairs


def test_rouge_by_hand():
    scores = one(rouge, "the cat sat", "the cat sat on the mat")
    # Unigrams: 3 shared of 3 and of 6. Bigrams: 2 of 2 and of 5. Common subsequence: 3 of 3 and of 6.
    assert scores == pytest.approx(
        {"rouge1": 2 * 0.5 / 1.5, "rouge2": 2 * 0.4 / 1.4, "rougeL": 2 * 0.5 / 1.5, "rougeLsum": 2 * 0.5 / 1.5}
    )
    assert one(rouge, "sat cat the", "the cat sat")["rougeL"] == pytest.approx(1 / 3)


def test_rouge_lsum_scores_line_by_line():
    scores = one(rouge, "c d\na b", "a b\nc d")
    assert scores["rougeLsum"] == 1
    assert scores["rougeL"] == 1 / 2


def test_rouge_is_the_librarys_on_ascii(real_pairs: list[tuple[str, str]]):
    from rouge_score.rouge_scorer import RougeScorer

    for stemmer in (False, True):
        library = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=stemmer)
        for first, second in [*real_pairs, ("running_fast, he runs!", "he was running"), ("a\nb c", "b\nc a")]:
            if first.isascii() and second.isascii():
                expected = {name: value.fmeasure for name, value in library.score(second, first).items()}
                assert one(rouge, first, second, stemmer=stemmer) == pytest.approx(expected), (first, second)


def test_rouge_reads_every_script():
    assert one(rouge, "Ärger über Łódź", "ärger ÜBER łódź") == {"rouge1": 1, "rouge2": 1, "rougeL": 1, "rougeLsum": 1}
    assert one(rouge, "東京", "大阪")["rouge1"] == 0


def test_bleu_by_hand():
    # All n-grams of 1 to 3 words are right, and there is none of 4; the answer is 3 words short of 6.
    assert one(bleu, "the cat sat", "the cat sat on the mat") == pytest.approx({"bleu": math.exp(1 - 6 / 3)})
    # 3 of 4 words and 1 of 3 pairs are right; no triple and no quadruple, which count as 1/2 of 2, and as 1/4 of 1.
    assert one(bleu, "a b x d", "a b c d") == pytest.approx({"bleu": (3 / 4 * 1 / 3 * 1 / 4 * 1 / 4) ** (1 / 4)})


def test_bleu_is_the_librarys(real_pairs: list[tuple[str, str]]):
    import sacrebleu

    for first, second in real_pairs:
        expected = sacrebleu.sentence_bleu(first, [second]).score / 100
        assert one(bleu, first, second)["bleu"] == pytest.approx(expected, abs=1e-12), (first, second)


def test_bleu_can_ignore_case():
    assert one(bleu, "A B C D", "a b c d", lowercase=True)["bleu"] == 1
    assert one(bleu, "A B C D", "a b c d")["bleu"] == 0


def test_meteor_by_hand():
    # 3 of 3 words and of 6 are matched in one run: F = PR / (0.9 P + 0.1 R), penalty 0.5 (1 / 3)³.
    assert one(meteor, "the cat sat", "the cat sat on a mat")["meteor"] == pytest.approx(0.5 / 0.95 * (1 - 0.5 / 27))
    assert one(meteor, "cat", "cat")["meteor"] == 0.5


def test_meteor_matches_stems_and_no_synonyms():
    assert one(meteor, "jumps", "jumping")["meteor"] == 0.5
    assert one(meteor, "car", "automobile")["meteor"] == 0


@pytest.mark.parametrize("module", ALL, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_metric(module):
    """One value for each answer, between 0 and 1, whatever the text."""
    texts = ["", " ", "?!", "the", "UNANSWERABLE", "Ångström 10⁻¹⁰ m", "🙂 東京", "a " * 50, "x\ny", "\u2028"]
    answers = [Prediction(p, [r], "what is the name ?", ["the name is x"]) for p in texts for r in texts]
    scores = module.Config().score(answers)
    for name, values in scores.items():
        assert len(values) == len(answers)
        assert all(type(value) is float and 0 <= value <= 1 for value in values), name
    assert module.Config().score([]) == {name: [] for name in scores}


@pytest.mark.parametrize("module", [rouge, bleu, meteor], ids=lambda module: module.__name__.rpartition(".")[2])
def test_names_are_known_before_the_library_is_loaded(module):
    assert module.Config().score_names() == tuple(module.Config().score([]))
    path, name = module.__name__, module.__name__.rpartition(".")[2]
    code = (
        f"import sys; from {path} import Config; "
        f"Config().score_names(); sys.exit(any(m in sys.modules for m in {LIBRARIES}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0, name


@pytest.mark.parametrize("module", [squad, rouge, bleu, meteor], ids=lambda module: module.__name__.rpartition(".")[2])
def test_references_of_which_any_will_do(module):
    """Two empty texts agree, an empty one and another do not, and the best of several references counts."""
    assert set(one(module, "", "").values()) == {1.0}
    assert set(one(module, "", "x").values()) == {0.0}
    assert set(one(module, "x", "").values()) == {0.0}
    each = [
        one(module, "the cat sat on a mat", reference) for reference in ("a dog", "cats sat on the mats", "the cat")
    ]
    both = one(module, "the cat sat on a mat", "a dog", "cats sat on the mats", "the cat")
    for name in both:
        if name not in ("precision", "recall"):  # these are of the reference with the best f1
            assert both[name] == max(scores[name] for scores in each)
    assert min(one(module, "UNANSWERABLE", "UNANSWERABLE").values()) in (0.0, 0.5, 1.0)
    assert max(one(module, "Paris", "UNANSWERABLE").values()) == 0
