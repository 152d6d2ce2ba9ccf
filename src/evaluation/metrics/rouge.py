"""ROUGE (Lin 2004, "ROUGE: a package for automatic evaluation of summaries"), by rouge-score."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_WORDS = re.compile(r"[^\W_]+")


class Config(MetricConfig):
    """How words are compared."""

    stemmer: bool = False
    """Words of more than three letters are compared by their Porter stems, as in ROUGE-1.5.5 with -m."""

    def score_names(self) -> tuple[str, ...]:
        return _KINDS

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """F-measures of unigrams, bigrams and the longest common subsequence (Lsum: line by line) of each answer, from
        0 to 1.

        The reference with the best score counts. Two texts without words match if they are equal. Scores equal the
        library's on ASCII text; its tokenizer drops other letters, so here words are runs of letters and digits of any
        script.
        """
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(list(_KINDS), tokenizer=_Words(self.stemmer))
        rows = [[_score_pair(scorer, answer.text, reference) for reference in answer.references] for answer in answers]
        return {kind: [max(of_reference[kind] for of_reference in row) for row in rows] for kind in _KINDS}


def _score_pair(scorer: "RougeScorer", prediction: str, reference: str) -> dict[str, float]:
    if not _WORDS.search(prediction) and not _WORDS.search(reference):
        return dict.fromkeys(_KINDS, float(prediction.split() == reference.split()))
    return {kind: float(score.fmeasure) for kind, score in scorer.score(reference, prediction).items()}


class _Words:
    """A tokenizer for rouge-score."""

    def __init__(self, stemmer: bool) -> None:
        from nltk.stem.porter import PorterStemmer

        self._stemmer = PorterStemmer() if stemmer else None

    def tokenize(self, text: str) -> list[str]:
        """Split `text` into lower-case words."""
        words = _WORDS.findall(text.lower())
        return [self._stemmer.stem(word) if len(word) > 3 else word for word in words] if self._stemmer else words
