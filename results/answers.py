# PYTHON_ARGCOMPLETE_OK
"""Answered questions of a run with contexts: `python -m results.answers [RUN ..] [-e GROUP ..] [--count 5] [--wrong]`.

Shows evenly spaced samples of <run>/inference, with the answers to the same questions with wrong contexts
(`inference.wrong_contexts`).
"""

import argparse
import math
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from results.pages import markup
from results.rescore import experiment_metrics, read
from src.errors import DataError, print_errors
from src.evaluation.metrics.answers import INFERENCE, WRONG, answer_scores, group_by_question, question_scores
from src.experiments.dataset_protocols import Prediction
from src.experiments.registry import METRICS, bind
from src.support import documents
from src.support.command_line import make_parser
from src.tables import results, run_arguments

NOTHING = "(nothing)"


class Document(documents.Document):
    """Scores and samples of a run."""

    schema: Literal["results.answers/1"]
    files: list[dict[str, Any]]
    """`file`, `score` with its `value`, `right` of `questions`; `gains` over wrong contexts with intervals of 95 %;
    `samples`, with `answer` (question, contexts, references, text) and `scores`."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the questions. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    if options.exp_id:
        options.paths = [run_arguments.find_run(options.exp_id, options.runs)]
    rows, warnings = run_arguments.select(options)
    run_arguments.warn(warnings)
    run, about = best_run(options.runs, rows)
    entries_by_file = {f"{run.name}/{INFERENCE}/{name}.jsonl": entries for name, entries in samples(run).items()}
    shown_samples = {file: choose(entries, options.count, options.wrong) for file, entries in entries_by_file.items()}

    def write() -> None:
        for file, entries in entries_by_file.items():
            print(f"{file}: {about}\n{describe_score(entries)}\n{compare(entries)}")
            for sample in shown_samples[file]:
                print(describe(sample))

    files = [
        {"file": file, "about": about, **score_facts(entries), "gains": gains(entries), "samples": shown_samples[file]}
        for file, entries in entries_by_file.items()
    ]
    run_arguments.show(options.output, "results.answers/1", {"files": files}, write)
    return 0


def best_run(runs: Path, rows: Sequence[results.Row]) -> tuple[Path, str]:
    """The run with the best first inference score, and a description of the score.

    Raises:
        DataError: no run has answers.
    """
    metric = next((name for name in results.score_names(rows) if name.startswith(f"{INFERENCE}/")), None)
    if metric is None:
        raise DataError(
            f"{runs}: no run has saved answers. `answers` and `sampled` only score the answers of evaluations; "
            "`inference` saves answers (recipes crossattn, fid and prompted). Add it to an experiment, and run it."
        )
    best_row = results.sort_best_first(rows, metric)[0]
    if best_row.get(metric) is None:
        raise DataError(f"{runs}: {metric} is NaN in all runs. Choose a run with --exp_id.")
    return runs / best_row[
        "exp_id"
    ], f"{metric} {best_row[metric]:.3g}, the best of {sum(row.get(metric) is not None for row in rows)} runs"


@dataclass(frozen=True)
class Sample:
    """An answered question."""

    answer: Prediction
    scores: Mapping[str, float]
    """Scores by metric of the experiment."""
    question: int
    """Number of the question; `best_answer` can group several rows into one question."""
    other: str | None
    """The answer with the context of a different question, if available."""
    other_scores: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        """Whether the first score is 1."""
        return next(iter(self.scores.values())) == 1


def samples(run: Path) -> dict[str, list[Sample]]:
    """File name, such as "val" -> answered questions of a save directory. Empty without inference.

    Raises:
        UserError: a file cannot be read.
    """
    files = [file for file in sorted((run / INFERENCE).glob("*.jsonl")) if not file.stem.endswith(WRONG)]
    return {file.stem: list(_samples(file, *map(_stamp, (file, file.with_stem(file.stem + WRONG))))) for file in files}


def _stamp(file: Path) -> tuple[int, int] | None:
    """Size and modification time, to detect changes; None if the file is missing."""
    return (facts.st_size, facts.st_mtime_ns) if file.exists() and (facts := file.stat()) else None


@lru_cache(maxsize=8)
def _samples(file: Path, stamp: object, control: object) -> tuple[Sample, ...]:
    """Samples of a file, cached until `stamp` (of the file) or `control` (of the wrong contexts file) changes."""
    answers = read(file)
    metrics, best_answer = experiment_metrics(file)
    scores = answer_scores(metrics, answers, best_answer)
    if not scores:  # corpus metrics, such as BLEU, have no score for a single answer
        metrics = [bind(METRICS, {"name": "squad"})]
        scores = answer_scores(metrics, answers, best_answer)
    others = read(file.with_stem(file.stem + WRONG))[: len(answers)] if control else []
    other_scores = answer_scores(metrics, others, best_answer) if others else {}
    questions, _ = group_by_question(answers, best_answer)
    numbers = {i: number for number, question in enumerate(questions) for i in question}
    return tuple(
        Sample(
            answer,
            {name: values[i] for name, values in scores.items()},
            numbers[i],
            others[i].text if i < len(others) else None,
            {name: values[i] for name, values in other_scores.items()} if i < len(others) else {},
        )
        for i, answer in enumerate(answers)
    )


def describe_score(entries: Sequence[Sample]) -> str:
    """The first score of the answers in words: "em 0.75: 3 of 4 questions are answered right."."""
    facts = score_facts(entries)
    counts = f"{facts['right']} of {facts['questions']} questions are answered right."
    return f"{facts['score']} {facts['value']:.4g}: {counts}"


def score_facts(entries: Sequence[Sample]) -> dict[str, Any]:
    """Name and mean of the first score, and the number of questions, and of those answered right."""
    name = next(iter(entries[0].scores))
    values = _by_question(entries, [sample.scores[name] for sample in entries])
    mean = statistics.fmean(values)
    return {"score": name, "value": mean, "right": values.count(1), "questions": len(values)}


def compare(entries: Sequence[Sample]) -> str:
    """A line per score: means with right and wrong contexts, and the difference with a 95 % interval.
    Empty without answers to wrong contexts."""
    return "".join(
        f"{each['score']} {each['right_contexts']:.4g}, "
        f"{each['wrong_contexts']:.4g} with the context of a different question: a gain of "
        f"{each['gain']:.4g} (95 % interval {each['low']:.4g} to {each['high']:.4g}) over {each['questions']} "
        "questions.\n"
        for each in gains(entries)
    )


def gains(entries: Sequence[Sample]) -> list[dict[str, Any]]:
    """The numbers of `compare`. The interval of the mean difference per question is 1.96 standard errors wide to each
    side."""
    pairs = [sample for sample in entries if sample.other is not None]
    rows = []
    for name in pairs[0].scores if pairs else ():
        right, wrong = (
            _by_question(pairs, [each[name] for each in column])
            for column in zip(*((s.scores, s.other_scores) for s in pairs), strict=True)
        )
        differences = [a - b for a, b in zip(right, wrong, strict=True)]
        mean, error = statistics.fmean(differences), 1.96 * statistics.pstdev(differences) / math.sqrt(len(differences))
        means = {"right_contexts": statistics.fmean(right), "wrong_contexts": statistics.fmean(wrong), "gain": mean}
        rows.append({"score": name, **means, "low": mean - error, "high": mean + error, "questions": len(right)})
    return rows


def _by_question(entries: Sequence[Sample], values: Sequence[float]) -> list[float]:
    questions: dict[int, list[int]] = {}
    for i, sample in enumerate(entries):
        questions.setdefault(sample.question, []).append(i)
    return question_scores(values, questions.values())


def choose(entries: Sequence[Sample], count: int, wrong: bool) -> list[Sample]:
    """Choose up to `count` evenly spaced samples. wrong: only wrong answers."""
    candidates = [sample for sample in entries if not (wrong and sample.is_right)]
    count = min(count, len(candidates))
    return [candidates[i * len(candidates) // count] for i in range(count)]


def describe(sample: Sample) -> str:
    """A question with its contexts, its references and its answer, as text."""
    answer = sample.answer
    lines = [
        f"question    {answer.question}",
        *(textwrap.indent(context.rstrip(), "  | ", lambda line: True) for context in answer.contexts),
        f"truth       {' / '.join(answer.references)}",
        f"answer      {answer.text or NOTHING}   ({'right' if sample.is_right else 'wrong'})",
        *([] if sample.other is None else [f"with another question's context: {sample.other or NOTHING}"]),
    ]
    return "\n".join(lines) + "\n"


def page(entries: Iterable[Sample]) -> str:
    """The samples as HTML, each in a box of class "right" or "wrong"."""
    return f'<div class="samples">{"".join(map(_box, entries))}</div>'


def _box(sample: Sample) -> str:
    answer, kind = sample.answer, "right" if sample.is_right else "wrong"
    facts = {"question": answer.question, "truth": " / ".join(answer.references), "prediction": answer.text or NOTHING}
    facts |= {} if sample.other is None else {"with another's context": sample.other or NOTHING}
    facts |= {"score": ", ".join(f"{name} {value:.3g}" for name, value in sample.scores.items())}
    contexts = "".join(f"<pre>{markup.escape(context.rstrip())}</pre>" for context in answer.contexts)
    return (
        f'<div class="sample {kind}"><div>{markup.chip(kind, kind)}{markup.plain_table((), facts.items())}</div>'
        f"<div>{contexts}</div></div>"
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.answers", __doc__)
    run_arguments.add(parser, "the best run of these groups")
    parser.add_argument("--exp_id", metavar="ID", help="of this run, by its id or the start of it")
    parser.add_argument(
        "--count", type=int, default=5, metavar="N", help="questions of each file (default: %(default)s)"
    )
    parser.add_argument("--wrong", action="store_true", help="only those that were answered wrongly")
    return parser


if __name__ == "__main__":
    sys.exit(main())
