"""Make predictions from rows and answers, and means from the scores of single answers."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from src.errors import DataError
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig
from src.files import reading

PREDICTION = "answer_pred"
"""Field of a row of an inference with the model's answer."""
INFERENCE = "inference"
"""Folder of a run with the rows of an inference; also the prefix of the names of its scores."""
SHUFFLED = "_shuffled_context"
"""Suffix of the scores of answers with another question's contexts, at evaluations."""
WRONG, GAIN = "_wrong_context", "_gain"
"""Suffixes of the scores of an inference with another question's contexts, and of the difference to the correct
contexts."""


def make_prediction(row: Mapping[str, Any], prediction: str) -> Prediction:
    """Make a `Prediction` for the question in a row of prepared data."""
    return Prediction(prediction, references(row), row["question"], contexts(row), source(row))


def references(row: Mapping[str, Any]) -> list[str]:
    """Accepted answers of a row, at least one."""
    return row.get("answers") or [row["answer"]]


def contexts(row: Mapping[str, Any]) -> list[str]:
    """All contexts of a row, at least one."""
    return row.get("contexts_list") or [row["context"]]


def source(row: Mapping[str, Any]) -> str:
    """Source of a row for scores by source: its data set, with the kind of question if any, such as "stdlib_calls"."""
    return f"{row['dataset']}_{row['kind']}" if row.get("kind") else row["dataset"]


def read_row_indices(path: Path) -> list[int]:
    """Read the row numbers in an index file, one per line, counted from 0; blank lines are skipped.

    Raises:
        DataError: the file is missing, or a line is not a number.
    """
    try:
        with reading(path, DataError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. Expected a list of row numbers, one per line.") from None
    result = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text and not (text.isascii() and text.isdigit()):
            raise DataError(f"{path}:{number}: expected a row number, counted from 0, got {text[:60]!r}.")
        if text:
            result.append(int(text))
    return result


def select_rows(
    source_of: Callable[[int], str],
    count: int,
    numbers: Sequence[int] | None,
    sources: Sequence[str] | None,
    place: str,
) -> list[int]:
    """Select rows out of `count`: those in `numbers`, in that order, with one of `sources`. None: all.

    Raises:
        DataError: one of `numbers` is out of range or repeated. The message starts with `place`.
    """
    for number, times in Counter(numbers or ()).items():
        if not 0 <= number < count:
            raise DataError(f"{place}: row {number} is out of range, expected 0 to {count - 1}.")
        if times > 1:
            raise DataError(f"{place}: row {number} is listed {times} times, expected once.")
    result = range(count) if numbers is None else numbers
    return [i for i in result if sources is None or source_of(i) in sources]


def best_over_references(reference_scores: Callable[[str, str], float], answer: Prediction) -> float:
    """The highest score of a prediction over its references. reference_scores: (prediction, reference) -> score."""
    return max(reference_scores(answer.text, reference) for reference in answer.references)


def scores(
    metrics: Iterable[MetricConfig], answers: Sequence[Prediction], best_answer: bool = False
) -> dict[str, float]:
    """Means over all answers, and by source if there are several: {"em": …, "em/nq": …}.

    A set-level score is computed for all answers, and for those of each source; it counts every row. best_answer: see
    `group_by_question`.

    Raises:
        ValueError: no answers.
    """
    if not answers:
        raise ValueError("no answers to score")
    questions, answers = group_by_question(answers, best_answer)
    sources = [answers[question[0]].source for question in questions]
    parts = sorted(set(sources)) if len(set(sources)) > 1 else []
    result: dict[str, float] = {}
    for metric in metrics:
        totals = metric.score(answers)
        by_part = {}
        if any(isinstance(values, float) for values in totals.values()):
            by_part = {part: metric.score([answer for answer in answers if answer.source == part]) for part in parts}
        for name, values in totals.items():
            if isinstance(values, float):
                result[name] = values
                result |= {f"{name}/{part}": cast("float", by_part[part][name]) for part in parts}
                continue
            each = cast("list[float]", values)
            assert len(each) == len(answers), name
            by_question = question_scores(each, questions)
            result[name] = _mean(by_question)
            for part in parts:
                result[f"{name}/{part}"] = _mean(
                    [value for value, s in zip(by_question, sources, strict=True) if s == part]
                )
    return result


def answer_scores(
    metrics: Iterable[MetricConfig], answers: Sequence[Prediction], best_answer: bool = False
) -> dict[str, list[float]]:
    """The scores of each answer by name, without set-level scores. `scores` takes their means over questions."""
    predictions = group_by_question(answers, best_answer)[1]
    result = [metric.score(predictions) for metric in metrics]
    return {name: values for each in result for name, values in each.items() if isinstance(values, list)}


def question_scores(values: Sequence[float], questions: Iterable[Sequence[int]]) -> list[float]:
    """The score of each question: the best of its answers. questions: from `group_by_question`."""
    return [max(values[i] for i in question) for question in questions]


def control_scores(scores: Mapping[str, float], control: Mapping[str, float]) -> dict[str, float]:
    """{"em_wrong_context": …, "em_gain": …} from the scores with correct and with wrong contexts, without "em/nq" and
    the like."""
    names = [name for name in control if "/" not in name]
    wrong = {name + WRONG: control[name] for name in names}
    return wrong | {name + GAIN: scores[name] - control[name] for name in names}


def group_by_question(answers: Sequence[Prediction], best_answer: bool) -> tuple[list[list[int]], Sequence[Prediction]]:
    """Group answers by question: indices of each question's answers, in order of appearance, and the answers with all
    their references.

    best_answer: rows of one source with equal question and contexts are one question. An answer can match the
    references of any of these rows, and the best score counts. Otherwise each row is a question.
    """
    if not best_answer:
        return [[i] for i in range(len(answers))], answers
    groups: dict[Any, list[int]] = {}
    for i, answer in enumerate(answers):
        groups.setdefault((answer.source, answer.question, tuple(answer.contexts)), []).append(i)
    all_references = {
        i: list(dict.fromkeys(r for j in group for r in answers[j].references))
        for group in groups.values()
        for i in group
    }
    return list(groups.values()), [
        Prediction(a.text, all_references[i], a.question, a.contexts, a.source) for i, a in enumerate(answers)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
