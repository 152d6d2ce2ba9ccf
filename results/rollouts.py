# PYTHON_ARGCOMPLETE_OK
"""Print rollouts of a policy over its training: `python -m results.rollouts RUN [--count 3] [--iterations 4] [--full]`.

RUN is a save directory of recipe `ppo` or `grpo`, or the start of its id. For evenly spaced iterations, it prints the
answers with the lowest and the highest reward, with the parts of the reward. They show whether the policy exploits a
weakness of the reward. The first lines compare the scores of the first and the last evaluation.
"""

import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from src.errors import DataError, print_errors
from src.runs import jsonl_records
from src.runs.scores import SCORES, Scores
from src.support import documents
from src.support.command_line import make_parser
from src.tables import run_arguments

FILE = "rollouts.jsonl"
WIDTH = 100
_NO_FACTS = {"step", "iteration", "prompt", "answer"}


class Document(documents.Document):
    """Rollouts with the lowest and the highest reward."""

    schema: Literal["results.rollouts/1"]
    scores: dict[str, list[float | None]]
    """The values of the first and the last evaluation."""
    iterations: list[dict[str, Any]]
    """`iteration` and `step`, `means` of all numbers, and the rollouts with the `least reward` and `most reward`."""


@print_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("results.rollouts", __doc__)
    add = parser.add_argument
    run_arguments.add(parser)
    add("--count", type=int, default=3, metavar="N", help="answers at each end of an iteration (default: %(default)s)")
    add(
        "--iterations",
        type=int,
        default=4,
        metavar="N",
        help="iterations, the first and the last among them (default: %(default)s)",
    )
    add(
        "--full", action="store_true", help=f"full texts (default: their first {WIDTH} characters, without line breaks)"
    )
    args = run_arguments.parse(parser, argv)
    (run,) = run_arguments.paths(args, at_least=1, at_most=1)
    rollouts = read(run / FILE)
    if not rollouts:
        raise DataError(f"{run}: no {FILE}. Choose a run of recipe 'ppo' or 'grpo', which write it.")
    scores = Scores(run / SCORES, read_only=True).rows()
    numeric_rows = [
        {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
        for row in scores
    ]
    content = {
        "scores": {name: [values[0], values[-1]] for name, values in values_by_name(numeric_rows).items() if values},
        "iterations": [
            {"iteration": iteration, "step": rows[0]["step"], "means": means(rows), **choose_extremes(rows, args.count)}
            for iteration in choose_iterations(rollouts, args.iterations)
            for rows in [[row for row in rollouts if row["iteration"] == iteration]]
        ],
    }

    def write() -> None:
        print("\n".join(compare_ends(numeric_rows)))
        for each in content["iterations"]:
            numbers = ", ".join(f"{name} {value:.3g}" for name, value in each["means"].items())
            print(f"\niteration {each['iteration']}, after step {each['step']}: {numbers}")
            for title in ("least reward", "most reward"):
                print(f"  {title}", *(describe(row, args.full) for row in each[title]), sep="\n")

    run_arguments.show(args.output, "results.rollouts/1", content, write)
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rollouts in a file.

    Raises:
        DataError: a line is not a rollout; names the line.
        RunError: the file cannot be read.
    """
    rows = jsonl_records.rows(path)
    for number, row in enumerate(rows, start=1):
        kinds = {
            name: int if name in ("step", "iteration") else str if name in ("prompt", "answer") else int | float
            for name in row
        }
        wrong = [name for name, kind in kinds.items() if isinstance(row[name], bool) or not isinstance(row[name], kind)]
        wrong += [name for name in (*_NO_FACTS, "reward") if name not in row]
        if wrong:
            raise DataError(
                f"{path}:{number}: field {wrong[0]!r}: missing or of a wrong type, got {row.get(wrong[0])!r:.60}. "
                "Remove this line."
            )
    return rows


def values_by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """All values of the reward and of each score of sampled answers."""
    score_names = [name for row in rows[-1:] for name in row if "_mean@" in name and not name.endswith("_interval")]
    return {
        name: [math.nan if row[name] is None else row[name] for row in rows if name in row]
        for name in ["reward", *score_names]
    }


def compare_ends(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """First and last value of the reward and each score of sampled answers; and a warning if they diverge."""
    scores = values_by_name(rows)
    lines = [f"{name:<24} {values[0]:8.3f} -> {values[-1]:8.3f}" for name, values in scores.items() if values]
    worse_names = [
        name for name, values in scores.items() if name != "reward" and values[-1] < values[0] - _interval(rows, name)
    ]
    if worse_names and scores.get("reward") and scores["reward"][-1] > scores["reward"][0]:
        lines.append(f"The reward has risen while {', '.join(worse_names)} fell: check below which answers it rewards.")
    return lines


def _interval(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Half width of the last confidence interval of a score."""
    return next((row[f"{name}_interval"] or 0.0 for row in reversed(rows) if f"{name}_interval" in row), 0.0)


def choose_iterations(rollouts: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Choose up to `count` evenly spaced iterations, including the first and the last."""
    iterations = sorted({row["iteration"] for row in rollouts})
    if count >= len(iterations):
        return iterations
    return sorted({iterations[round(i * (len(iterations) - 1) / max(1, count - 1))] for i in range(max(1, count))})


def choose_extremes(rows: Sequence[Mapping[str, Any]], count: int) -> dict[str, list[Mapping[str, Any]]]:
    """The rollouts with the lowest and the highest reward, each answer once."""
    once = {(row["prompt"], row["answer"]): row for row in rows}.values()
    by_reward = sorted(once, key=lambda row: row["reward"])
    worst = by_reward[:count]
    return {"least reward": worst, "most reward": [row for row in by_reward[::-1][:count] if row not in worst]}


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of all numbers of the rollouts."""
    names = [name for name in rows[0] if name not in _NO_FACTS]
    return {name: sum(row[name] for row in rows) / len(rows) for name in names}


def describe(row: Mapping[str, Any], full: bool = False) -> str:
    """A rollout in a few lines. full: do not shorten its texts."""
    facts = ", ".join(f"{name} {row[name]:.3g}" for name in row if name not in _NO_FACTS)
    texts = [
        (row[part] if full else textwrap.shorten(row[part], WIDTH)) or "(nothing)" for part in ("prompt", "answer")
    ]
    prompt, answer = (text.replace("\n", "\n      ") for text in texts)
    return f"    {prompt}\n      {answer}\n      {facts}"


if __name__ == "__main__":
    sys.exit(main())
