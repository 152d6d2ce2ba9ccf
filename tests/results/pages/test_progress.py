"""The progress of a search: order, decisions, the picture and the page."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from results import progress
from src.experiments.identity import exp_id
from src.runs import ledger
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from src.tables import results


def add(runs: Path, minute: int, rate: float, losses: list[float], state: Any = "done", **facts: Any) -> None:
    for seed, loss in enumerate(losses):
        exp = {"recipe": "toy", "seed": seed, "loop": {"learning_rate": rate}}
        when = {"time": f"2026-01-01T00:{minute:02}:{seed:02}+00:00", "groups": ["search"]}
        with RunDir.open(runs, exp, exp, facts={**when, **facts}) as run:
            run.scores.append({"step": 1, "val_loss": loss})
            run.set_status(state)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """In order of time: the base, one as good, a better one, one only better than the base, an unfinished one."""
    add(tmp_path, 30, 0.3, [0.8, 0.9, 1.0])
    add(tmp_path, 10, 0.1, [1.0, 1.1, 1.2])
    add(tmp_path, 20, 0.2, [1.1, 1.0, 1.2])
    add(tmp_path, 40, 0.4, [0.9, 1.0, 1.1])
    add(tmp_path, 50, 0.5, [0.1, 0.1, 0.1], state="stopped")
    return tmp_path


def test_each_experiment_is_compared_with_the_best_before_it(runs: Path):
    steps, remarks = progress.find_steps(runs, results.load_rows(runs)[0], "val_loss")
    assert remarks == []
    assert [step.changes.get("loop.learning_rate") for step in steps] == [
        None,
        [0.1, 0.2],
        [0.1, 0.3],
        [0.3, 0.4],
        [0.3, 0.5],
    ]
    assert [step.verdict for step in steps] == ["first", "not distinguishable", "better", "worse", "not finished"]
    assert [step.is_accepted for step in steps] == [True, False, True, False, False]
    assert [step.best for step in steps] == pytest.approx([1.1, 1.1, 0.9, 0.9, 0.9])
    assert [step.seeds for step in steps] == [3, 3, 3, 3, 0]
    assert steps[3].difference == pytest.approx(0.1)
    assert steps[0].interval == pytest.approx(0.2484, abs=1e-4)  # t(2) * 0.1 / sqrt(3)


def test_a_branch_selects_the_runs_of_its_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    commits = []

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q", "-b", "trunk")
    for number, branch in enumerate(("trunk", "search")):
        git("checkout", "-q", "-B", branch)
        git("commit", "-q", "--allow-empty", "-m", str(number))
        commits.append(git("rev-parse", "HEAD"))
        add(tmp_path / "runs", number, 0.1 + number, [1.0, 1.1, 1.2], commit=commits[-1])
    monkeypatch.setattr(progress, "ROOT", tmp_path)
    words = ["-r", str(tmp_path / "runs"), "--json", "--branch"]
    for branch, rates in (("trunk", [0.1]), ("search", [0.1, 1.1]), ("trunk..search", [1.1])):
        assert progress.main([*words, branch]) == 0
        steps = json.loads(capsys.readouterr().out)["steps"]
        for step, rate in zip(steps, rates, strict=True):
            assert exp_id({"recipe": "toy", "seed": 0, "loop": {"learning_rate": rate}}) in step["exp_ids"]
    for branch in ("missing", "trunk..trunk", "--all"):
        assert progress.main([*words[:3], f"--branch={branch}"]) == 1
        assert f"--branch {branch}:" in json.loads(capsys.readouterr().out)["error"]["where"] + ":"


@pytest.mark.parametrize(("loss", "state"), [(float("nan"), "done"), (0.5, "failed")])
def test_an_incomplete_experiment_is_never_the_first(loss: float, state: str, runs: Path):
    add(runs, 5, 0.7, [0.5, 0.5])
    exp = {"recipe": "toy", "seed": 2, "loop": {"learning_rate": 0.7}}
    facts = {"time": "2026-01-01T00:05:02+00:00", "groups": ["search"]}
    with RunDir.open(runs, exp, exp, facts=facts) as run:
        run.scores.append({"step": 1, "val_loss": loss})
        run.set_status(state)  # type: ignore[arg-type]
    steps, _ = progress.find_steps(runs, results.load_rows(runs)[0], "val_loss")
    assert not steps[0].is_accepted
    assert [step.verdict for step in steps[1:4]] == ["first", "not distinguishable", "better"]


def test_seeds_without_a_finite_score_are_counted(runs: Path):
    add(runs, 35, 0.6, [0.5, float("nan"), float("nan")])
    steps, _ = progress.find_steps(runs, results.load_rows(runs)[0], "val_loss")
    cells = next(cells for cells in progress.table(steps, "val_loss")[1] if cells[3].startswith("0.5"))
    assert cells[3] == "0.5 (1 of 3)"
    assert cells[4] == ""


def test_another_evaluation_is_never_accepted(runs: Path):
    add(runs, 35, 0.6, [0.1, 0.1, 0.1], evaluation_code="other")
    steps, remarks = progress.find_steps(runs, results.load_rows(runs)[0], "val_loss")
    assert [step.verdict for step in steps if step.best != step.mean and step.mean == pytest.approx(0.1)] == [
        "not comparable"
    ]
    assert "evaluation code" in remarks[0]


def test_an_experiment_that_diverged_is_worse(runs: Path):
    add(runs, 55, 0.6, [0.1, 0.1, 0.1], state="failed")
    for path in runs.iterdir():
        if SavedRun(path).state == "failed":
            ledger.append(path, ledger.event("divergence", action="stop", attempt=1))
    steps, _ = progress.find_steps(runs, results.load_rows(runs)[0], "val_loss")
    assert [step.verdict for step in steps[-2:]] == ["not finished", "worse"]


@pytest.mark.parametrize("is_partial", [False, True])
def test_an_unknown_start_is_never_the_base(is_partial: bool, runs: Path):
    """With one seed with a time, the experiment has its place."""
    rows = results.load_rows(runs)[0]
    ids = sorted(row["exp_id"] for row in rows if row["loop.learning_rate"] == 0.1)[is_partial:]
    for number, name in enumerate(ids):
        env = runs / name / "attempts" / "001" / "env.json"
        env.write_text("{}") if number else env.unlink()
    steps, remarks = progress.find_steps(runs, rows, "val_loss")
    assert [set(step.exp_ids).issuperset(ids) for step in steps] == ([True] + [False] * 4)[:: 1 if is_partial else -1]
    (remark,) = remarks
    assert all((row["exp_id"] in remark) == (row["exp_id"] in ids) for row in rows)
    assert steps[0].verdict == "first"
    assert not steps[-1].is_accepted


def test_a_minimum_effect_and_a_direction(runs: Path):
    rows = results.load_rows(runs)[0]
    steps, _ = progress.find_steps(runs, rows, "val_loss", min_effect=0.5)
    assert [step.is_accepted for step in steps] == [True, False, False, False, False]
    steps, _ = progress.find_steps(runs, rows, "val_loss", lowest=False)
    assert [step.verdict for step in steps][2] == "worse"


def test_table_and_picture(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "plots" / "progress.png"
    assert progress.main(["-r", str(runs), "-e", "search", "-o", str(picture)]) == 0
    text = capsys.readouterr().out
    for part in ("learning_rate=0.3", "better, accepted", "not distinguishable", "0.9 ± 0.25"):
        assert part in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_of_the_dashboard(runs: Path):
    page = progress.render(runs, "search")
    assert "better, accepted" in page
    assert "data:image/svg+xml" in page
