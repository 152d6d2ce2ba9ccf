"""The notebook runs from its own folder on real save directories, and is kept without outputs."""

import warnings
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "results" / "results.ipynb"


def read() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_no_outputs_are_kept():
    for cell in read().cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.slow
def test_every_cell_runs(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAINVAL_RUNS", str(runs))
    monkeypatch.setenv("TRAINVAL_GROUP", "tiny")
    notebook = read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own, about event loops and sockets
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    assert kinds.count("text/html") >= 3, "the runs, the table and haven's table"
    assert "image/png" in kinds
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("0.683" in output.get("data", {}).get("text/html", "") for output in shown), "the mean of the best configuration"
    assert any("Compare with" in output.get("data", {}).get("text/html", "") for output in shown), "the dashboard"
    assert any(r"val\_loss" in output.get("text", "") for output in shown), "the LaTeX table"
