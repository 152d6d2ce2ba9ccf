"""METEOR of generated text (Banerjee and Lavie 2005) with exact and stem matches, by the library nltk.
It has no synonyms, see `score`."""

from collections.abc import Sequence

from src.evaluation.metrics.answers import best_over_references
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig


class Config(MetricConfig):
    """Nothing to choose."""

    def score_names(self) -> tuple[str, ...]:
        return ("meteor",)

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"meteor"} of each answer, between 0 and 1, with nltk's weights: alpha 0.9, beta 3, gamma 0.5.

        METEOR proper also matches synonyms, by WordNet, which would have to be downloaded. It is never used, even where
        it is installed, so that the same answers have the same scores on every machine.

        Words are split as in the Penn Treebank. Of several references the one with the best value counts. Two texts
        without words agree. A perfect answer of m words has 1 - 0.5 / m³, as the penalty for word order is never zero:
        one right word scores 0.5. nltk matches a word that the reference repeats with its last place there, not with
        the one that disturbs the order least.
        """
        from nltk.stem.porter import PorterStemmer
        from nltk.tokenize.destructive import NLTKWordTokenizer
        from nltk.translate.meteor_score import single_meteor_score

        split, stemmer, synonyms = NLTKWordTokenizer().tokenize, PorterStemmer(), _NoSynonyms()

        def against(prediction: str, reference: str) -> float:
            words, expected = split(prediction), split(reference)
            if not words or not expected:
                return float(words == expected)
            return float(single_meteor_score(expected, words, stemmer=stemmer, wordnet=synonyms))  # type: ignore[arg-type]  it asks for synsets

        return {"meteor": [best_over_references(against, answer) for answer in answers]}


class _NoSynonyms:
    """An empty WordNet."""

    def synsets(self, word: str) -> list[str]:
        """The meanings of a word."""
        del word
        return []
