"""The table on a terminal: what fits, in which order, with how many digits."""

from pathlib import Path
from typing import Any

import pytest

from results import table
from src.tables import terminal_table
from src.tables.terminal_table import Column


def draw_table(runs: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert table.main([str(runs), *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def row(mean: float | None, half: float | None, count: int = 2) -> dict[str, Any]:
    return {"em": mean, "em_std": half, "em_n": count, "em_nan": 0, "runs": 2, "done": count, "over": "done"}


def test_scores_come_first_and_constants_are_one_line(runs: Path, capsys: pytest.CaptureFixture[str]):
    lines = draw_table(runs, capsys)
    headings = [text.strip() for text in lines[1].split("┃")[1:-1]]
    assert headings == ["val_loss ↓", "em", "stride"]
    assert [text.strip() for text in lines[3].split("│")[1:-1]] == ["0.68 ± 0.10", "0.25", "1"]
    assert lines[-1].endswith("In all rows: train_loss 1, runs 3, state done, step 4.")


def test_the_end_of_the_metric_that_is_best_is_marked(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert "em ↑" in draw_table(runs, capsys, "--metric", "em")[1]
    assert "em ↓" in draw_table(runs, capsys, "--metric", "em", "--best", "min")[1]


@pytest.mark.parametrize(
    ("rows", "cells"),
    [
        ([row(0.12345, 0.0123), row(0.5, 0.2)], ["0.123 ± 0.012", "0.500 ± 0.200"]),
        ([row(123.4, 17.0), row(99.6, 12.0)], ["123 ± 17", "100 ± 12"]),
        ([row(0.123456, None), row(2, None)], ["0.1235", "2"]),
        ([row(1536, 0.0), row(768, 0.0)], ["1536", "768"]),
        ([row(0.5, 1e-12), row(0.5, 0.1)], ["0.5 ± 1e-12", "0.5 ± 0.1"]),
        ([row(3.1e-7, 2e-8), row(1.2e-7, 1e-8)], ["3.1e-07 ± 2e-08", "1.2e-07 ± 1e-08"]),
        ([row(None, None, 0), row(0.5, None, 1)], ["0 of 2 done", "0.5 (1 of 2)"]),
    ],
)
def test_digits_are_those_of_the_smallest_deviation(rows: list[dict[str, Any]], cells: list[str]):
    assert terminal_table.score_cells(rows, "em", "std") == cells


def test_a_narrow_terminal_loses_facts_then_scores_then_keys():
    columns = [
        Column(name, name, ["x" * 17], rank)
        for name, rank in (("a", 0), ("b", 2), ("c", 2), ("k", 1), ("l", 1), ("f", 3))
    ]
    remaining = {
        width: [column.name for column in terminal_table.fit(columns, width)[0]]
        for width in (121, 120, 100, 80, 60, 40, 5)
    }
    assert remaining == {
        121: [*"abcklf"],
        120: [*"abckl"],
        100: [*"abkl"],
        80: [*"akl"],
        60: [*"ak"],
        40: ["a"],
        5: ["a"],
    }
    assert terminal_table.fit(columns, 60)[1] == ["b", "c", "l", "f"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_cut(
    runs: Path, capsys: pytest.CaptureFixture[str], width: int
):
    rows, _ = table.results.select(runs)
    rows_of_table, keys, scores = table.tabulate(rows, ["model.stride", "seed", "model.kind"], None)
    columns, _ = terminal_table.arrange(rows_of_table, keys, scores, "val_loss", None, "std")
    terminal_table.draw(columns, ["about"], width)
    text = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines() if line[:1] in "┏┃┡│└") <= width
    assert "…" not in text
    assert ("--columns" in text) == (width < 80)


def test_columns_are_chosen_by_name_in_any_order(runs: Path, capsys: pytest.CaptureFixture[str]):
    lines = draw_table(runs, capsys, "--columns", "stride", "em", "model.stride")
    assert [text.strip() for text in lines[1].split("┃")[1:-1]] == ["stride", "em ↑", "stride"]
    assert table.main([str(runs), "--columns", "strid"]) == 1
    assert "--columns: unknown column 'strid'. Did you mean 'stride'?" in capsys.readouterr().err
    assert table.main([str(runs), "--columns", "em", "--format", "csv"]) == 1
    assert "--columns: ignored with --format csv." in capsys.readouterr().err


def test_the_table_after_the_demo_starts_with_the_answers(demo_runs: Path, capsys: pytest.CaptureFixture[str]):
    """As the dashboard does; "em" is inference/em, and what is the same in all rows can be chosen, too."""
    above = [line for line in draw_table(demo_runs, capsys, "-e", "demo") if line.startswith("┃")]
    assert above[-1].split("┃")[1].strip() == "em ↑"
    lines = draw_table(demo_runs, capsys, "-e", "demo", "--columns", "val_loss", "em", "runs")
    assert [text.strip() for text in lines[1].split("┃")[1:-1]] == ["val_loss", "em ↑", "runs"]
    assert "runs 2" not in lines[-1]
    assert "em ↑" in "".join(draw_table(demo_runs, capsys, "-e", "demo", "--scores", "em", "--metric", "em"))


def test_scores_to_look_at_first():
    names = [
        "train_loss",
        "val_loss_x",
        "val_loss",
        "inference/em",
        "inference/f1",
        "inference/em_wrong_context",
        "inference/em_gain",
    ]
    assert table.headline(names)[:4] == ["inference/em", "inference/em_wrong_context", "inference/em_gain", "val_loss"]
    assert table.headline(names)[4:] == ["val_loss_x", "train_loss", "inference/f1"]
    assert table.headline(names[:3]) == ["val_loss", "val_loss_x", "train_loss"]


def test_long_headings_are_folded_between_words():
    assert (
        Column("n", "inference/em_wrong_context", ["0.49 ± 0.04"], 2).folded_heading == "inference/\nem_wrong_\ncontext"
    )
    assert Column("n", "inference/em", ["0.49 ± 0.04 (2)"], 2).folded_heading == "inference/em"
