"""METEOR (Banerjee and Lavie 2005) with exact and stem matches but without synonyms, by nltk."""

from collections.abc import Sequence

from src.evaluation.metrics.answers import best_over_references
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig


class Config(MetricConfig):
    """No settings."""

    def score_names(self) -> tuple[str, ...]:
        return ("meteor",)

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"meteor"} of each answer, from 0 to 1, with nltk's weights: alpha 0.9, beta 3, gamma 0.5.

        Full METEOR also matches synonyms by WordNet, which needs a download. WordNet is not used even if installed, so
        that scores are equal on every machine.

        Words are split as in the Penn Treebank. The reference with the best score counts. Two texts without words
        match. A perfect answer of m words scores 1 - 0.5 / m³, as the penalty for word order is never zero; one correct
        word scores 0.5. nltk matches a repeated word with its last position in the reference, not with the best one.
        """
        from nltk.stem.porter import PorterStemmer
        from nltk.tokenize.destructive import NLTKWordTokenizer
        from nltk.translate.meteor_score import single_meteor_score

        split, stemmer, synonyms = NLTKWordTokenizer().tokenize, PorterStemmer(), _NoSynonyms()

        def against(prediction: str, reference: str) -> float:
            words, expected = split(prediction), split(reference)
            if not words or not expected:
                return float(words == expected)
            return float(single_meteor_score(expected, words, stemmer=stemmer, wordnet=synonyms))  # type: ignore[arg-type]  only synsets is used

        return {"meteor": [best_over_references(against, answer) for answer in answers]}


class _NoSynonyms:
    """An empty WordNet."""

    def synsets(self, word: str) -> list[str]:
        """Synonym sets of a word: always empty."""
        del word
        return []
