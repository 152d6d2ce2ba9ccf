# PYTHON_ARGCOMPLETE_OK
"""Print the gain from each metadata column and plot it over steps: `python -m results.metadata RUN..`.

A RUN is a save directory, or a prefix of its id. The table also has the gain from wrong metadata. If that is as large,
the gain is not due to the metadata (src/systems/metadata/gains.py).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from results import plot
from results.pages import legend
from src.errors import DataError, print_errors
from src.runs.scores import SCORES, Scores
from src.support import documents
from src.support.command_line import make_parser
from src.tables import run_arguments
from src.tables.terminal_table import draw_rich

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAIN, CONTROL = "val_gain", "val_gain_control"
KINDS = {
    GAIN: "gain",
    CONTROL: "of wrong metadata",
    "val_gain_prompt": "as a prompt",
    "val_gain_chunked": "in long documents",
}
Rows = list[dict[str, Any]]


class Gains(TypedDict):
    """Gains of a run from metadata."""

    exp_id: str
    scores: dict[str, int | float | None]
    """The last row of scores."""


class Document(documents.Document):
    """The picture, and the numbers of the table."""

    schema: Literal["results.metadata/1"]
    path: str
    runs: list[Gains]


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the path of the picture. Returns the exit code."""
    parser = make_parser("results.metadata", __doc__)
    run_arguments.add(
        parser, output=f"PNG, or another format that matplotlib knows (default: {plot.PLOTS}/metadata-ID.png)"
    )
    options = run_arguments.parse(parser, arguments)
    rows_by_run = {path.resolve().name: read(path) for path in run_arguments.paths(options, at_least=1)}
    kinds = [
        kind for kind in KINDS if any(name.startswith(f"{kind}/") for rows in rows_by_run.values() for name in rows[-1])
    ]
    headings = ["run", "step", "column", "perplexity without", "with", *(KINDS[kind] for kind in kinds)]
    lines = [line for name, rows in rows_by_run.items() for line in table(name[:8], rows[-1], kinds)]
    draw_rich(headings, lines, "nats per token of the text, with intervals of 95 % over documents")
    output = options.output or plot.PLOTS / f"metadata-{next(iter(rows_by_run))[:8]}.png"
    run_arguments.warn(plot.save(draw(rows_by_run), output))
    runs = [{"exp_id": name, "scores": rows[-1]} for name, rows in rows_by_run.items()]
    documents.show("results.metadata/1", {"path": output, "runs": runs}, lambda: print(output))
    return 0


def read(run: Path) -> Rows:
    """Read the score rows with gains of a run.

    Raises:
        DataError: no row has a gain.
    """
    scores = Scores(run / SCORES, read_only=True).rows()
    numeric_rows = [
        {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
        for row in scores
    ]
    rows = [row for row in numeric_rows if columns(row)]
    if not rows:
        raise DataError(f"{run}: no evaluation has gains of metadata. Set `gains` in the experiment, and run it.")
    return rows


def columns(row: Mapping[str, Any]) -> list[str]:
    """Metadata columns with a gain in a score row."""
    return [name.removeprefix(f"{GAIN}/") for name in row if name.startswith(f"{GAIN}/") and name.count("/") == 1]


def table(name: str, row: Mapping[str, Any], kinds: Sequence[str]) -> list[list[str]]:
    """A line for each column, followed by one for each part of the text."""
    lines = []
    for column in columns(row):
        perplexities = (_cell(row.get(f"val_text_perplexity_{kind}/{column}"), 2) for kind in ("without", "with"))
        lines.append([name, str(row["step"]), column, *perplexities, *(_interval(row, kind, column) for kind in kinds)])
        for part in (score for score in row if score.startswith(f"{GAIN}/{column}/")):
            tokens = part.rpartition("/")[2]
            lines.append(["", "", f"  tokens {tokens}", "", "", _cell(row[part], 4), *[""] * (len(kinds) - 1)])
    return lines


def _cell(value: float | None, digits: int) -> str:
    return "NaN" if value is None else f"{value:.{digits}f}"


def _interval(row: Mapping[str, Any], kind: str, column: str) -> str:
    names = [f"{kind}{end}/{column}" for end in ("", "_low", "_high")]
    return (
        "{} ({} to {})".format(*(_cell(row[name], 4) for name in names)) if all(name in row for name in names) else ""
    )


def draw(rows_by_run: Mapping[str, Rows]) -> "Figure":
    """Draw a panel per column: gains over steps with intervals; dashed for wrong metadata."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(column for rows in rows_by_run.values() for row in rows for column in columns(row)))
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained", dpi=120)
    for place, column in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place, xlabel="step", ylabel="nats per token", title=column)
        axes.grid(alpha=0.3)
        axes.axhline(0, color="black", linewidth=0.8)
        for number, (name, rows) in enumerate(rows_by_run.items()):
            gain_rows = [row for row in rows if f"{GAIN}/{column}" in row]
            for kind, style in ((GAIN, "-"), (CONTROL, "--")):
                steps = [float(row["step"]) for row in gain_rows]
                ends = ([row.get(f"{kind}{end}/{column}") for row in gain_rows] for end in ("", "_low", "_high"))
                mean, low, high = ([math.nan if value is None else float(value) for value in values] for values in ends)
                colour = legend.COLOURS[number % len(legend.COLOURS)]
                text = f" {name[:8]} {KINDS[kind]}"
                axes.plot(steps, mean, style, color=colour, marker="o", markersize=3, label=text)
                axes.fill_between(steps, low, high, alpha=0.2, color=colour, linewidth=0)
    plot.place_legend(figure)
    plot.write_plainly(figure)
    return figure


if __name__ == "__main__":
    sys.exit(main())
