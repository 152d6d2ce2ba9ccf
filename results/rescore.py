"""Score inferences again, without their models: `python -m results.rescore FILE.. --metrics squad rouge`.

A FILE is a JSONL file of rows with `answer_pred`, as in <run>/inference, or the save directory of a run. By default
all rows are scored, in total and by source. --index_file, --datasets and --best_answer are as in an experiment's
`inference`.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from results.table import markdown
from src.errors import ConfigError, DataError, UserError, print_errors
from src.evaluation.metrics.answers import (
    INFERENCE,
    PREDICTION,
    Prediction,
    make_prediction,
    read_row_indices,
    select_rows,
)
from src.evaluation.metrics.answers import scores as metric_scores
from src.experiments.config import Problems, join, unknown_text
from src.experiments.interfaces import MetricConfig
from src.experiments.registry import METRICS, bind
from src.files import reading
from src.runs.store import EXP_DICT, SavedRun
from src.support import documents
from src.support.command_line import make_parser, parse_arguments
from src.support.parsing import parse_json
from src.tables.terminal_table import draw_rich

_FIELDS = {"question": str, "context": str, "answer": str, "dataset": str, PREDICTION: str}
_LISTS = ("answers", "contexts_list")
Row = dict[str, Any]


class Document(documents.Document):
    """Scores of answers."""

    schema: Literal["results.rescore/1"]
    files: dict[str, dict[str, dict[str, float | None]]]
    """{file: {source: {score: value}}}, and the number of `rows`. The source `all` has all rows."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores of each file. Returns the exit code."""
    options = parse_arguments(_parser(), arguments, has_json=True)
    metric_list = None if options.metrics is None else [_metric(text) for text in options.metrics]
    row_indices = read_row_indices(options.index_file) if options.index_file else None
    tables = {}
    for file in [file for path in options.files for file in _files(path)]:
        answers = select_answers(read(file), file, options.datasets, row_indices)
        metrics, best_answer = experiment_metrics(file)
        best_answer = best_answer if options.best_answer is None else options.best_answer
        tables[str(file)] = score_answers(metrics if metric_list is None else metric_list, answers, best_answer)
    documents.show("results.rescore/1", {"files": tables}, lambda: _write(tables, options.markdown))
    return 0


def _write(tables: dict[str, dict[str, dict[str, float]]], is_markdown: bool) -> None:
    headings, lines = _cells(tables)
    if is_markdown:
        print(markdown(headings, lines), end="")
    else:
        draw_rich(headings, lines, "each answer against the best of its references")


def read(file: Path) -> list[Prediction]:
    """Read the answers in a file.

    Raises:
        DataError: it is missing or empty, or a line is not a row with an answer; names the line.
    """
    try:
        with reading(file, DataError):
            lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        raise DataError(
            f"{file}: no such file. Name the save directory of a run with inference, or its file."
        ) from None
    if not lines:
        raise DataError(f"{file}: empty. It should have one JSON object on each line.")
    rows = [_row(line, f"{file}:{number}") for number, line in enumerate(lines, 1)]
    return [make_prediction(row, row[PREDICTION]) for row in rows]


def experiment_metrics(file: Path) -> tuple[list[MetricConfig], bool]:
    """The metrics and `best_answer` of the experiment that wrote `file`.
    SQuAD if there is no experiment, or its metrics are unknown.

    Raises:
        RunError: the experiment dict is damaged.
    """
    run = file.resolve().parents[1]
    exp = SavedRun(run).exp if file.resolve().parent.name == INFERENCE and (run / EXP_DICT).exists() else {}
    inference = exp.get(INFERENCE)
    inference = inference if isinstance(inference, dict) else {}
    default, metrics = bind(METRICS, {"name": "squad"}), []
    with contextlib.suppress(Problems, UserError):
        metrics = [bind(METRICS, raw) for raw in inference.get("metrics") or []]
    return metrics or [default], inference.get("best_answer") is True


def select_answers(
    answers: Sequence[Prediction], file: Path, datasets: Sequence[str] | None, row_indices: Sequence[int] | None
) -> list[Prediction]:
    """The answers with numbers in `row_indices` and a source in `datasets`; None: no restriction.

    Raises:
        ConfigError: no row has the requested source.
        DataError: a number is out of range or repeated, or no row remains.
    """
    sources = {answer.source for answer in answers}
    for name in datasets or ():
        if name not in sources:
            raise ConfigError(f"{file}: --datasets: {unknown_text('source', name, sources)}")
    places = select_rows(lambda i: answers[i].source, len(answers), row_indices, datasets, f"{file}: --index_file")
    selected_answers = [answers[place] for place in places]
    if not selected_answers:
        raise DataError(f"{file}: none of {len(answers)} rows is selected. Change --index_file or --datasets.")
    return selected_answers


def score_answers(
    metrics: Sequence[MetricConfig], answers: Sequence[Prediction], best_answer: bool
) -> dict[str, dict[str, float]]:
    """Scores as {"all": {"rows": …, "em": …}, "nq": …}; single sources only if there are several."""
    tables: dict[str, dict[str, float]] = {"all": {"rows": len(answers)}}
    for name, value in metric_scores(metrics, answers, best_answer).items():
        metric, _, source = name.partition("/")
        rows = sum(answer.source == source for answer in answers)
        tables.setdefault(source or "all", {"rows": rows})[metric] = value
    return tables


def _metric(text: str) -> MetricConfig:
    """Parse a metric: a name in METRICS, or JSON with its options."""
    raw: Any = {"name": text}
    if text.startswith("{"):
        raw = parse_json(text, f"--metrics {text:.60}", ConfigError)
    try:
        return bind(METRICS, raw)
    except Problems as error:
        raise ConfigError(
            "\n".join(f"{join('--metrics', path)}: {message}" for path, message in error.problems)
        ) from None


def _files(path: Path) -> list[Path]:
    """The file itself, or the inference outputs in a save directory."""
    if not path.is_dir():
        return [path]
    paths = sorted((path / "inference").glob("*.jsonl")) or sorted(path.glob("*.jsonl")) * (path.name == "inference")
    if not paths:
        raise DataError(
            f"{path}: no inference in this folder. Name the save directory of a finished run with inference, or a file."
        )
    return paths


def _row(line: bytes, where: str) -> Row:
    row = parse_json(line, where, DataError)
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {line[:60].decode(errors='replace')!r}.")
    for name, kind in _FIELDS.items():
        if name == "context" and row.get("contexts_list"):
            continue
        if type(row.get(name)) is not kind:
            raise DataError(f"{where}: field {name!r}: expected {kind.__name__}, got {row.get(name)!r:.60}.")
    for name in _LISTS:
        value = row.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise DataError(f"{where}: field {name!r}: expected a list of str, got {value!r:.60}.")
    return row


def _cells(tables: dict[str, dict[str, dict[str, float]]]) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for table in tables.values() for scores in table.values() for name in scores))
    lines = [
        [
            *([file] if len(tables) > 1 else []),
            source,
            *("-" if name not in scores else f"{scores[name]:.4g}" for name in names),
        ]
        for file, table in tables.items()
        for source, scores in table.items()
    ]
    return [*(["file"] if len(tables) > 1 else []), "source", *names], lines


_METRICS_HELP = (
    f"{', '.join(sorted(METRICS.modules))} (default: those of the experiment, else squad), or JSON with options: "
    """'{"name": "rouge", "stemmer": true}'"""
)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("results.rescore", __doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a file of answers, or the save directory of a run"
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help=_METRICS_HELP,
    )
    parser.add_argument("--datasets", nargs="+", metavar="SOURCE", help="only the rows of these sources")
    parser.add_argument(
        "--index_file",
        type=Path,
        metavar="PATH",
        help="only the rows with the numbers in this file, one per line, from 0",
    )
    parser.add_argument(
        "--best_answer",
        action=argparse.BooleanOptionalAction,
        help=(
            "rows with one question on the same contexts count once, "
            "with the best answer (default: as in the experiment)"
        ),
    )
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
