"""Weight the types of metadata by inverse frequency: `python -m data_prep.metadata.weights c4_html`.

Use the output as `data.weights` of an experiment with sampling "weighted". The weight of a type is the number of
documents with the most frequent type, divided by the number of documents with this type. Only the ratios matter.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from data_prep import command
from src.data import jsonl
from src.errors import DataError
from src.experiments.config import Places
from src.support.command_line import require_at_least
from src.systems.metadata.data.annotations import read_row

COMMAND = "python -m data_prep.metadata.weights"


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    parser.add_argument("corpus", help="name of the prepared folder below it")
    parser.add_argument("--columns", nargs="+", metavar="COLUMN", help="of which columns (default: all that a row has)")
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="count in N of the training split, drawn with a fixed seed (default: all)",
    )


def count_columns(
    data_path: Path, corpus: str, columns: Sequence[str] | None = None, documents: int | None = None
) -> Counter[str]:
    """Count the training documents that have an item in each column.

    Raises:
        DataError: the corpus is not prepared, a row is malformed, or a column has no item.
        ConfigError: `documents` is below 1.
    """
    path = jsonl.require_file(jsonl.corpus_folder(Places(data_path, data_path), corpus), "train.jsonl")
    rows = jsonl.read_rows(path, {"text": str})
    require_at_least(1, documents=documents)
    row_numbers = (
        range(len(rows))
        if documents is None or documents >= len(rows)
        else sorted(random.Random(0).sample(range(len(rows)), documents))
    )
    column_counts = Counter[str]()
    for number in row_numbers:
        column_counts.update(read_row(rows[number], f"{path}:{number + 1}", columns).columns)
    for column in columns or []:
        if not column_counts[column]:
            raise DataError(
                f"--columns: none of {len(row_numbers)} counted documents has {column!r}. "
                "Remove it, or count more documents."
            )
    if not column_counts:
        raise DataError(
            f"{path}: no document has metadata. Prepare it with python -m data_prep.metadata.prepare --extract."
        )
    return column_counts


def inverse_frequencies(counts: Counter[str]) -> dict[str, float]:
    """Weights of the columns, most frequent first."""
    most = max(counts.values())
    return {column: most / count for column, count in counts.most_common()}


def _print_weights(data_path: Path, corpus: str, columns: Sequence[str] | None, documents: int | None) -> None:
    weights = inverse_frequencies(count_columns(data_path, corpus, columns, documents))
    lines = (f'    "{column}": {weight!r},' for column, weight in weights.items())
    command.report("\n".join(['"weights": {', *lines, "},"]), weights=weights)


main = command.main_of(COMMAND, __doc__, _add_options, _print_weights)

if __name__ == "__main__":
    sys.exit(main())
