"""What another experiment has started from stays, whatever a person does to the run: goes back, takes that back, trains
on."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.files import write_json
from src.runs.checkpoints import checkpoints
from src.runs.checkpoints.retention import RotationRule
from src.runs.history import archive, rewind
from src.runs.history.branches import Branch
from src.runs.history.journal import manifest_hash
from src.runs.store import SavedRun
from tests.core.runs.checkpoints.test_rotation import EXP, Losses, dies, steps, train


def child(which: str) -> dict[str, Any]:
    return {"recipe": "toy", "seed": 1, "model": {"name": "experiment", "exp_id": exp_id(EXP), "checkpoint": which}}


def finish(run: Path) -> None:
    write_json(run / "status.json", {"state": "done", "step": steps(run)[-1], "attempt": 1})


def go_back(run: Path, step: int) -> None:
    rewind.plan(run, Branch(number=archive.next_number(run), from_step=step)).apply()


def hashes(run: Path) -> dict[int, str | None]:
    return {checkpoints.step_of(path): manifest_hash(path) for path in checkpoints.list_all(run)}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Done at step 8, the best at 4."""
    run = tmp_path / exp_id(EXP)
    SavedRun(run).write_exp(EXP, [])
    assert train(run, {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.0}, RotationRule()) == [4, 6, 8]
    finish(run)
    return run


BETTER = {2: 3.0, 4: 1.0, 6: 2.0, 8: 0.5, 10: 0.4, 12: 0.3}


def go_on(run: Path, losses: Losses, words: str) -> list[int]:
    return train(run, losses, RotationRule(), words=words, first=steps(run)[-1] + 1)


@pytest.mark.parametrize("which", ["best", "last"])
def test_a_rewound_run_retains_checkpoints_of_children(parent: Path, which: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    SavedRun(parent.parent / exp_id(child(which))).write_exp(child(which), [])
    before = hashes(parent)
    go_back(parent, 6)
    assert go_on(parent, BETTER, "others") == [4, 6, 10, 12]
    assert (hashes(parent)[4], hashes(parent)[6]) == (before[4], before[6])
    assert f"{parent}: another experiment starts from it, so checkpoints up to step 6 are kept." in caplog.text
    go_back(parent, 6)
    assert go_on(parent, BETTER, "again") == [4, 6, 10, 12]


def test_checkpoints_without_children_are_deleted(parent: Path):
    stranger = {"recipe": "toy", "seed": 1, "model": {"name": "experiment", "exp_id": "0" * 32}}
    SavedRun(parent.parent / exp_id(stranger)).write_exp(stranger, [])
    go_back(parent, 6)
    assert go_on(parent, BETTER, "others") == [10, 12]


def test_with_an_unreadable_dict_possible_parents_are_retained(parent: Path):
    SavedRun(parent.parent / exp_id(child("best"))).write_exp(child("best"), [])
    (parent.parent / exp_id(child("best")) / "exp_dict.json").write_text("{")
    go_back(parent, 6)
    assert go_on(parent, BETTER, "others") == [4, 6, 10, 12]


def test_other_experiments_are_not_read_where_nobody_went_back(tmp_path: Path):
    """Thousands may lie beside."""
    run, other = tmp_path / exp_id(EXP), tmp_path / exp_id(child("best"))
    SavedRun(run).write_exp(EXP, [])
    SavedRun(other).write_exp(child("best"), [])
    assert not dies(
        lambda: train(run, BETTER, RotationRule()), lambda event, where: event == "open" and str(other) in where
    )
    assert steps(run) == [10, 12]


def test_checkpoints_after_a_rewind_have_no_children(parent: Path):
    SavedRun(parent.parent / exp_id(child("best"))).write_exp(child("best"), [])
    go_back(parent, 6)
    assert go_on(parent, BETTER, "others") == [4, 6, 10, 12]
    go_back(parent, 4)
    assert go_on(parent, BETTER, "again") == [4, 10, 12]


def test_checkpoints_of_children_are_retained_without_the_archive(parent: Path):
    SavedRun(parent.parent / exp_id(child("best"))).write_exp(child("best"), [])
    go_back(parent, 6)
    shutil.rmtree(parent / "abandoned")
    assert go_on(parent, BETTER, "others") == [4, 6, 10, 12]


def test_checkpoints_of_children_are_retained_after_an_undo(tmp_path: Path):
    run = tmp_path / exp_id(EXP)
    SavedRun(run).write_exp(EXP, [])
    assert train(run, {2: 1.0, 4: 3.0, 6: 2.0}, RotationRule()) == [2, 4, 6]
    write_json(run / "status.json", {"state": "stopped", "step": 6, "attempt": 1})
    go_back(run, 4)
    assert go_on(run, {2: 1.0, 4: 3.0, 6: 2.0, 8: 2.0}, "branch") == [2, 6, 8]
    finish(run)
    SavedRun(tmp_path / exp_id(child("best"))).write_exp(child("best"), [])
    started_from = checkpoints.best(run)
    assert started_from == checkpoints.folder(run, 2)
    rewind.plan_undo(run).apply()
    assert go_on(run, {**BETTER, 2: 1.0, 4: 3.0}, "weights") == [2, 4, 10, 12]


@pytest.mark.parametrize("seed", range(16))
def test_checkpoints_of_children_are_always_retained(tmp_path: Path, seed: int):
    """Only a rewind or an undo takes it out of the run, to where it is kept."""
    rng = random.Random(seed)
    run, keep = tmp_path / exp_id(EXP), RotationRule(rng.randrange(1, 3), rng.choice([None, 4]), rng.randrange(1, 3))
    SavedRun(run).write_exp(EXP, [])
    lines: list[dict[int, float | None]] = [{}]
    parent_hashes: set[str | None] = set()
    did: list[str] = []
    for line in range(14):
        state, here = SavedRun(run).status["state"], hashes(run)
        choices = ["train"] * 2 if state != "done" else ["child", "child", "rewind"]
        choices += ["finish"] if here and state != "done" else []
        choices += ["rewind"] if here else []
        choices += ["undo"] if len(lines) > 1 else []
        did.append(rng.choice(choices))
        if did[-1] == "train":
            first = max(lines[-1], default=0) + 1
            lines[-1] |= {step: float(rng.randrange(9)) for step in range(first, first + rng.randrange(1, 6))}
            train(run, lines[-1], keep, words=f"line {line}", first=first)
            assert {name for name in here.values() if name in parent_hashes} <= set(hashes(run).values()), did
            write_json(run / "status.json", {"state": "stopped", "step": steps(run)[-1], "attempt": 1})
        elif did[-1] == "finish":
            finish(run)
        elif did[-1] == "child":
            which = rng.choice(["last", "best"])
            checkpoint = checkpoints.best(run) if which == "best" else checkpoints.last(SavedRun(run))
            if checkpoint is not None:
                parent_hashes.add(manifest_hash(checkpoint))
                exp = {**child(which), "seed": line + 1}
                SavedRun(tmp_path / exp_id(exp)).write_exp(exp, [])
        elif did[-1] == "rewind":
            target = rng.choice(sorted(here))
            go_back(run, target)
            lines.append({step: loss for step, loss in lines[-1].items() if step <= target})
        else:
            rewind.plan_undo(run).apply()
            lines.pop()
    remaining_hashes = {manifest_hash(path.parent) for path in run.rglob("manifest.json")}
    assert parent_hashes <= remaining_hashes, did
