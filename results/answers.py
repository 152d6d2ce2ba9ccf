# PYTHON_ARGCOMPLETE_OK
"""Answered questions of a run with contexts: `python -m results.answers [RUN ..] [-e GROUP ..] [--count 5] [--wrong]`.

Shows samples of <run>/inference, evenly spread over the file, next to the answers with wrong contexts
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

from results.pages import markup
from results.rescore import experiment_metrics, read
from src.errors import DataError, print_errors
from src.evaluation.metrics.answers import INFERENCE, WRONG, answer_scores, group_by_question, question_scores
from src.experiments.dataset_protocols import Prediction
from src.experiments.registry import METRICS, bind
from src.tables import results, run_arguments

NOTHING = "(nothing)"


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the questions. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    if options.exp_id:
        options.paths = [run_arguments.find_run(options.exp_id, options.runs)]
    rows, warnings = run_arguments.select(options)
    run_arguments.warn(warnings)
    run, about = best_run(options.runs, rows)
    with run_arguments.output_to(options.output):
        for name, entries in samples(run).items():
            print(f"{run.name}/{INFERENCE}/{name}.jsonl: {about}")
            print(f"{describe_score(entries)}\n{compare(entries)}")
            for sample in choose(entries, options.count, options.wrong):
                print(describe(sample))
    return 0


def best_run(runs: Path, rows: Sequence[results.Row]) -> tuple[Path, str]:
    """The run with the best first score of its inference, and that score in words.

    Raises:
        DataError: no run has answered any question.
    """
    metric = next((name for name in results.score_names(rows) if name.startswith(f"{INFERENCE}/")), None)
    if metric is None:
        raise DataError(
            f"{runs}: no run has answers. They are made by `inference` in an experiment, after the training."
        )
    best = results.sort_best_first(rows, metric)[0]
    if best.get(metric) is None:
        raise DataError(f"{runs}: {metric} ended in NaN in every run. Name a run with --exp_id.")
    return runs / best[
        "exp_id"
    ], f"{metric} {best[metric]:.3g}, the best of {sum(row.get(metric) is not None for row in rows)} runs"


@dataclass(frozen=True)
class Sample:
    """An answered question."""

    answer: Prediction
    scores: Mapping[str, float]
    """By the metrics of the experiment."""
    question: int
    """The number of its question, as the experiment's `best_answer` groups rows."""
    other: str | None
    """The answer with a different question's context, if there is one."""
    other_scores: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        """Whether the first score is 1."""
        return next(iter(self.scores.values())) == 1


def samples(run: Path) -> dict[str, list[Sample]]:
    """The answered questions of a save directory by file, such as "val"; empty without inference.

    Raises:
        UserError: a file cannot be read.
    """
    files = [file for file in sorted((run / INFERENCE).glob("*.jsonl")) if not file.stem.endswith(WRONG)]
    return {file.stem: list(_samples(file, *map(_stamp, (file, file.with_stem(file.stem + WRONG))))) for file in files}


def _stamp(file: Path) -> tuple[int, int] | None:
    """A value that changes when the file does; None without a file."""
    return (facts.st_size, facts.st_mtime_ns) if file.exists() and (facts := file.stat()) else None


@lru_cache(maxsize=8)
def _samples(file: Path, stamp: object, control: object) -> tuple[Sample, ...]:
    """stamp, control: of the file and of that with wrong contexts; they are read again when these change."""
    answers = read(file)
    metrics, best_answer = experiment_metrics(file)
    scores = answer_scores(metrics, answers, best_answer)
    if not scores:  # metrics of a complete set, such as BLEU, score no single answer
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
    """The first score of the answers, as it is in the score row: "em 0.75: 3 of 4 questions are answered right."."""
    name = next(iter(entries[0].scores))
    values = _by_question(entries, [sample.scores[name] for sample in entries])
    return f"{name} {statistics.fmean(values):.4g}: {values.count(1)} of {len(values)} questions are answered right."


def compare(entries: Sequence[Sample]) -> str:
    """A line for each score: its mean with right and wrong contexts, and the difference with its 95 % interval.
    Empty without a control.

    The interval is that of the mean of the differences by question: 1.96 standard errors to each side.
    """
    pairs = [sample for sample in entries if sample.other is not None]
    lines = []
    for name in pairs[0].scores if pairs else ():
        right, wrong = (
            _by_question(pairs, [each[name] for each in column])
            for column in zip(*((s.scores, s.other_scores) for s in pairs), strict=True)
        )
        differences = [a - b for a, b in zip(right, wrong, strict=True)]
        mean, error = statistics.fmean(differences), 1.96 * statistics.pstdev(differences) / math.sqrt(len(differences))
        lines.append(
            f"{name} {statistics.fmean(right):.4g}, "
            f"{statistics.fmean(wrong):.4g} with the context of a different question: a gain of "
            f"{mean:.4g} (95 % interval {mean - error:.4g} to {mean + error:.4g}) over {len(right)} questions."
        )
    return "".join(f"{line}\n" for line in lines)


def _by_question(entries: Sequence[Sample], values: Sequence[float]) -> list[float]:
    questions: dict[int, list[int]] = {}
    for i, sample in enumerate(entries):
        questions.setdefault(sample.question, []).append(i)
    return question_scores(values, questions.values())


def choose(entries: Sequence[Sample], count: int, wrong: bool) -> list[Sample]:
    """Up to `count` of the samples, evenly spread. wrong: only wrong answers."""
    some = [sample for sample in entries if not (wrong and sample.is_right)]
    count = min(count, len(some))
    return [some[i * len(some) // count] for i in range(count)]


def describe(sample: Sample) -> str:
    """A question with its context, its answer and the truth, as text."""
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
    """The samples as HTML, each in a box of the class "right" or "wrong"."""
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
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m results.answers", description=__doc__, formatter_class=layout)
    run_arguments.add(parser, "the best run of these groups")
    parser.add_argument("--exp_id", metavar="ID", help="of this run, by its id or the start of it")
    parser.add_argument(
        "--count", type=int, default=5, metavar="N", help="questions of each file (default: %(default)s)"
    )
    parser.add_argument("--wrong", action="store_true", help="only those that were answered wrongly")
    return parser


if __name__ == "__main__":
    sys.exit(main())
