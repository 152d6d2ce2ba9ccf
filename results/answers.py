"""Answered questions of a run, with their contexts: `python -m results.answers [RUNS] [-e GROUP ..] [--count 5] [--wrong]`.

Those that `inference` left in <run>/inference, evenly spread over the file. Where the same questions were asked with wrong contexts, too
(`inference.wrong_contexts`), those answers stand beside them.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from results import run_arguments
from results.rescore import read
from src.errors import DataError, print_errors
from src.interfaces import Prediction
from src.metrics.answers import INFERENCE, WRONG
from src.tables import rows as results


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the questions. Returns the exit code."""
    options = run_arguments.parse(_parser(), arguments)
    rows, warnings = results.select(options.runs, options.groups, options.where)
    run_arguments.warn(warnings)
    run, about = best_run(options.runs, rows)
    for file in sorted((run / INFERENCE).glob("*.jsonl")):
        if not file.stem.endswith(WRONG):
            print(f"{file.relative_to(options.runs)}: {about}\n")
            control = file.with_stem(file.stem + WRONG)
            others = read(control) if control.exists() else None
            answers = read(file)
            for i in choose(answers, options.count, options.wrong):
                print(describe(answers[i], others[i].text if others else None))
    return 0


def best_run(runs: Path, rows: Sequence[results.Row]) -> tuple[Path, str]:
    """The run with the best first score of its inference, and that score in words.

    Raises:
        DataError: no run has answered any question.
    """
    metric = next((name for name in results.score_names(rows) if name.startswith(f"{INFERENCE}/")), None)
    if metric is None:
        raise DataError(f"{runs}: no run has answers. They are made by `inference` in an experiment, after the training.")
    best = results.sort_best_first(rows, metric)[0]
    return runs / best["exp_id"], f"{metric} {best[metric]:.3g}, the best of {sum(row.get(metric) is not None for row in rows)} runs"


def choose(answers: Sequence[Prediction], count: int, wrong: bool) -> list[int]:
    """At most `count` numbers of answers, evenly spread. wrong: of those alone that are none of their references."""
    some = [i for i, answer in enumerate(answers) if not wrong or answer.text not in answer.references]
    count = min(count, len(some))
    return [some[i * len(some) // count] for i in range(count)]


def describe(answer: Prediction, other: str | None) -> str:
    """A question with its context, its answer and the truth, as text. other: the answer with a wrong context."""
    right = "right" if answer.text in answer.references else "wrong"
    lines = [
        f"question    {answer.question}",
        *(textwrap.indent(context.rstrip(), "  | ", lambda line: True) for context in answer.contexts),
        f"truth       {' / '.join(answer.references)}",
        f"answer      {answer.text or '(nothing)'}   ({right})",
        *([] if other is None else [f"with another question's context: {other or '(nothing)'}"]),
    ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m results.answers", description=__doc__, formatter_class=layout)
    run_arguments.add(parser, "the best run of these groups")
    parser.add_argument("--where", metavar="EXPR", help="only among the runs for which this holds, as in results.table")
    parser.add_argument("--count", type=int, default=5, metavar="N", help="questions of each file (default: %(default)s)")
    parser.add_argument("--wrong", action="store_true", help="only those that were answered wrongly")
    return parser


if __name__ == "__main__":
    sys.exit(main())
