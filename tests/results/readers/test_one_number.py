"""A score has one value in every reader: score row, table, rescore, answers, run page, report and dashboard."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from results import answers, report, rescore, table
from results.dashboard import ALL, Dashboard
from results.pages import overview, run_page
from src.evaluation.metrics.answers import control_scores
from src.evaluation.metrics.answers import scores as metric_scores
from src.experiments.config import Problems
from src.experiments.dataset_protocols import Prediction
from src.experiments.registry import METRICS, bind
from src.runs.run_dir import RunDir

# panel 1.9.4 calls pandas in a way that pandas 3.1 announces the end of
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:pandas.errors.Pandas4Warning")

METRIC = [{"name": "squad"}]


def row(number: int, answer: str, prediction: str, question: str = "who") -> dict[str, str]:
    return {"question": question, "context": f"c{number}", "answer": answer, "dataset": "nq", "answer_pred": prediction}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def lawyers(wrong: bool) -> list[dict[str, str]]:
    """96 questions: 4 equal their truth, 1 equals it up to an article, 2 share a word with it; none with wrong
    contexts."""
    texts = ["lawyer"] * 4 + ["a lawyer"] + ["old lawyer"] * 2 + ["nurse"] * 89
    return [row(number, "lawyer", "nurse" if wrong else text) for number, text in enumerate(texts)]


def repeat_answers(wrong: bool) -> list[dict[str, str]]:
    """Two questions of two rows each. One has an answer that fits the truth of the other row, one has none."""
    texts = ["x", "x", "x", "x"] if wrong else ["b", "x", "x", "x"]
    return [row(0, "a", texts[0]), row(0, "b", texts[1]), row(1, "c", texts[2]), row(1, "d", texts[3])]


def plant(runs: Path, rows: list[dict[str, str]], control: list[dict[str, str]], best_answer: bool) -> Path:
    """A run with the files and the score row of an inference."""
    exp = {"recipe": "toy", "inference": {"metrics": METRIC, "best_answer": best_answer}}
    with RunDir.open(runs, exp, exp, facts={"groups": ["g"]}) as run:
        write(run.path / "inference" / "val.jsonl", rows)
        write(run.path / "inference" / "val_wrong_context.jsonl", control)
        scores, wrong = (
            metric_scores(
                [bind(METRICS, METRIC[0])],
                [
                    Prediction(r["answer_pred"], [r["answer"]], r["question"], [r["context"]], r["dataset"])
                    for r in of_file
                ],
                best_answer,
            )
            for of_file in (rows, control)
        )
        scores |= control_scores(scores, wrong)
        run.scores.append({"step": 1} | {f"inference/{name}": value for name, value in scores.items()})
        run.set_status("done", step=1)
        return run.path


@pytest.mark.parametrize(
    ("rows", "best_answer", "truth"),
    [
        (lawyers, False, (5 / 96, (5 + 2 * 2 / 3) / 96, "5 of 96 questions")),
        (lawyers, True, (5 / 96, (5 + 2 * 2 / 3) / 96, "5 of 96 questions")),
        (repeat_answers, True, (1 / 2, 1 / 2, "1 of 2 questions")),
        (repeat_answers, False, (0, 0, "0 of 4 questions")),
    ],
)
def test_every_reader_has_the_scores_of_the_inference(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: Callable,
    best_answer: bool,
    truth: tuple[float, float, str],
):
    em, f1, counts = truth
    run = plant(tmp_path / "runs", rows(False), rows(True), best_answer)
    scores = {"em": em, "em_wrong_context": 0, "em_gain": em, "f1": f1, "f1_wrong_context": 0, "f1_gain": f1}

    assert table.main([str(run.parent), "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["rows"]
    assert {name: line[f"inference/{name}"] for name in scores} == pytest.approx(scores)

    assert rescore.main([str(run), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["files"]
    right, wrong = (
        tables[str(run / "inference" / "val.jsonl")]["all"],
        tables[str(run / "inference" / "val_wrong_context.jsonl")]["all"],
    )
    assert [(right[name], wrong[name]) for name in ("em", "f1")] == [(pytest.approx(em), 0), (pytest.approx(f1), 0)]

    assert answers.main([str(run.parent), "--count", "0"]) == 0
    text = capsys.readouterr().out
    for name, value in (("em", em), ("f1", f1)):
        assert re.search(rf"^{name} {value:.4g}, 0 with .* gain of {value:.4g} ", text, re.MULTILINE), text
    assert f"em {em:.4g}: {counts}" in text

    page = run_page.render(run)
    assert f"em {em:.4g}: {counts}" in page
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page.partition("<h2>Scores</h2>")[2])
    assert cells[: cells.index("inference/f1") + 4] == [
        *("inference/em", f"{em:.4g}", "0", f"{em:.4g}"),
        *("inference/f1", f"{f1:.4g}", "0", f"{f1:.4g}"),
    ]

    (overview_cells,) = overview.tabulate(overview.load(run.parent)).lines or [[]]
    assert f"Best em: {em:.4g}" in report.render(overview.load(run.parent))
    dashboard = Dashboard(run.parent, ALL)
    assert [cell for cell in overview_cells if cell] == [cell for cell in dashboard.results.value.iloc[0, 1:] if cell]
    dashboard.tabs.active = 1
    assert f"em {em:.4g}: {counts}" in dashboard.details[1].object


def test_metrics_that_this_code_does_not_know_are_an_error_of_the_component_only(tmp_path: Path):
    with pytest.raises(Problems):
        bind(METRICS, {"name": "gone"})
    exp = {"recipe": "toy", "inference": {"metrics": [{"name": "gone"}]}}
    with RunDir.open(tmp_path, exp, exp) as run:
        write(run.path / "inference" / "val.jsonl", lawyers(False))
    metrics, best_answer = rescore.experiment_metrics(run.path / "inference" / "val.jsonl")
    assert ([metric.name for metric in metrics], best_answer) == (["squad"], False)
