"""The notebook runs on any folder of runs and is committed without outputs."""

import math
import warnings
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from src.runs.run_dir import RunDir

NOTEBOOK = Path(__file__).resolve().parents[2] / "results" / "pages" / "results.ipynb"


def read() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(runs: Path, group: str, monkeypatch: pytest.MonkeyPatch) -> list[nbformat.NotebookNode]:
    """The outputs of all cells.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    monkeypatch.setenv("TRAINVAL_RUNS", str(runs))
    monkeypatch.setenv("TRAINVAL_GROUP", group)
    notebook = read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own, about event loops and sockets
        NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
        ).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def add(folder: Path, exp: dict, group: str, scores: list[dict], state: str = "done") -> None:
    with RunDir.open(folder, exp, exp, facts={"groups": [group]}) as run:
        for row in scores:
            run.scores.append(row)
        run.scores.export_haven()
        run.set_status(state)  # type: ignore[arg-type]


def model(stride: int) -> dict:
    return {"recipe": "toy", "seed": 0, "model": {"name": "m", "stride": stride}}


def add_mixed(folder: Path) -> None:
    """Two groups with other metrics, NaN in the middle and at the end, a run without scores, one without its config."""
    add(folder, model(1), "one", [{"step": step, "val_loss": 1 / step} for step in (1, 2, 3)])
    add(folder, model(2), "one", [{"step": 1, "train_loss": 1.0}])
    add(folder, model(3), "one", [{"step": 1, "val_loss": 0.4}, {"step": 2, "val_loss": math.nan}])
    add(folder, model(4), "one", [{"step": 1, "val_loss": math.nan}, {"step": 2, "val_loss": 0.5}])
    add(folder, {"recipe": "other", "data": {"parts": [{"name": "a"}, {"name": "b"}]}}, "two", [{"step": 1, "em": 0.5}])
    add(folder, model(5), "two", [], "failed")
    damaged_run = folder / ("ab" * 16)
    damaged_run.mkdir()
    (damaged_run / "exp_dict.json").write_text('{"recipe": ')


def add_unfinished(folder: Path) -> None:
    add(folder, model(1), "one", [], "stopped")
    add(folder, model(2), "one", [{"step": 1, "train_loss": 1.0}], "stopped")


def damage_haven_scores(folder: Path) -> None:
    add_mixed(folder)
    for place, path in enumerate(sorted(folder.glob("*/score_list.pkl"))):
        path.write_bytes((b"", b"junk")[place % 2])


FOLDERS = {
    "missing": lambda folder: folder.rmdir(),
    "damaged": damage_haven_scores,
    "empty": lambda folder: None,
    "failed": lambda folder: add(folder, model(1), "one", [], "failed"),
    "unfinished": add_unfinished,
    "mixed": add_mixed,
}


def test_outputs_are_not_committed():
    for cell in read().cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_every_cell_runs_on_any_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    FOLDERS[kind](tmp_path)
    outputs = execute(tmp_path, "", monkeypatch)
    assert any("Compare with" in output.get("data", {}).get("text/html", "") for output in outputs), "the dashboard"


@pytest.mark.slow
def test_every_cell_shows_its_result(runs: Path, monkeypatch: pytest.MonkeyPatch):
    outputs = execute(runs, "tiny", monkeypatch)
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    assert kinds.count("text/html") >= 3, "the runs, the table and haven's table"
    assert kinds.count("image/png") == 2, "the curves, ours and haven's"
    assert any("0.683" in output.get("data", {}).get("text/html", "") for output in outputs), (
        "the mean of the best configuration"
    )
    assert any("Compare with" in output.get("data", {}).get("text/html", "") for output in outputs), "the dashboard"
    assert any(r"val\_loss" in output.get("text", "") for output in outputs), "the LaTeX table"
