"""Checkpoints that may go, and those that never do, over random folders of runs."""

import contextlib
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from src.errors import RunError
from src.experiments.identity import exp_id
from src.files import new_directory
from src.runs.checkpoints import checkpoints, retention
from src.runs.run_dir import RunDir

EVERYTHING = retention.CleanupRule(keep_last=0, keep_best=False)


def experiment(number: int) -> dict[str, Any]:
    return {"recipe": "toy", "seed": number, "model": {"name": "m"}}


def child(number: int, parent: dict[str, Any], which: str = "last") -> dict[str, Any]:
    return {
        "recipe": "toy",
        "seed": number,
        "model": {"name": "experiment", "exp_id": exp_id(parent), "checkpoint": which},
    }


def save(run: Path, step: int) -> Path:
    with new_directory(checkpoints.folder(run, step)) as folder:
        (folder / "model.safetensors").write_text(f"weights of {step}")
    return checkpoints.folder(run, step)


def make(runs: Path, exp: dict[str, Any], steps: int = 3, state: str = "done", best: int | None = None) -> Path:
    with RunDir.open(runs, exp, exp) as run:
        for step in range(1, steps + 1):
            save(run.path, step)
        if best is not None:
            checkpoints.mark_best(run.path, best)
        run.set_status(state, step=steps)  # type: ignore[arg-type]
        return run.path


def steps_in(run: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.list_all(run)]


def clean(runs: Path, run: Path, rule: retention.CleanupRule = EVERYTHING) -> list[int]:
    cleanup = retention.plan(run, rule, retention.needed_by_children(runs)[0], time.time() + 1)
    retention.remove(cleanup)
    return steps_in(run)


def test_the_rule_selects_checkpoints_of_a_finished_run(tmp_path: Path):
    for number, (rule, expected_steps) in enumerate(
        [
            (retention.CleanupRule(), [1, 4]),
            (retention.CleanupRule(keep_last=2), [1, 3, 4]),
            (retention.CleanupRule(keep_best=False), [4]),
            (EVERYTHING, []),
            (retention.CleanupRule(older_than_seconds=3600), [1, 2, 3, 4]),
            (retention.CleanupRule(keep_last=9), [1, 2, 3, 4]),
        ]
    ):
        run = make(tmp_path, experiment(number), 4, best=1)
        assert clean(tmp_path, run, rule) == expected_steps
        assert (run / "checkpoints" / "best.json").exists() == (1 in expected_steps), (
            "a pointer to nothing would be called damage"
        )


@pytest.mark.parametrize("state", ["failed", "stopped", "running"])
def test_checkpoints_to_resume_from_are_not_deleted(tmp_path: Path, state: str):
    run = make(tmp_path, experiment(0), 4, state, best=2)
    content = checkpoints.folder(run, 4) / "model.safetensors"
    content.write_text("x" * content.stat().st_size)  # its size tells nothing
    assert clean(tmp_path, run) == [2, 3]
    assert checkpoints.newest_complete(run) == checkpoints.folder(run, 3)


def test_checkpoints_of_children_are_not_deleted(tmp_path: Path):
    make(tmp_path, child(7, experiment(0)))
    make(tmp_path, child(8, experiment(1), "best"))
    assert clean(tmp_path, make(tmp_path, experiment(0), best=1)) == [3]
    assert clean(tmp_path, make(tmp_path, experiment(1), best=1)) == [1]
    assert clean(tmp_path, make(tmp_path, experiment(2), best=1)) == []


def test_a_checkpoint_that_a_run_continues_from_is_not_deleted(tmp_path: Path):
    exp = child(7, experiment(0))
    exp["model"]["step"] = 2
    make(tmp_path, exp)
    assert clean(tmp_path, make(tmp_path, experiment(0), best=1)) == [2]


def test_with_an_unreadable_dict_any_run_can_be_a_parent(tmp_path: Path):
    run = make(tmp_path, experiment(0), best=1)
    (make(tmp_path, experiment(1)) / "exp_dict.json").write_text("{")
    needed_checkpoints, warnings = retention.needed_by_children(tmp_path)
    assert "exp_dict.json:1: not valid JSON" in warnings[0]
    assert clean(tmp_path, run) == [1, 2, 3]
    assert (run.name, "best") in needed_checkpoints


def test_with_a_missing_dict_any_run_can_be_a_parent(tmp_path: Path):
    run = make(tmp_path, experiment(0), best=1)
    (tmp_path / ("ab" * 16)).mkdir()  # of nobody
    assert retention.needed_by_children(tmp_path)[1] == []
    (make(tmp_path, child(1, experiment(0), "best")) / "exp_dict.json").unlink()
    assert "exp_dict.json: no such file" in retention.needed_by_children(tmp_path)[1][0]
    assert clean(tmp_path, run) == [1, 2, 3]


def test_leftovers_are_deleted(tmp_path: Path):
    run = make(tmp_path, experiment(0), 1)
    for name in ("damaged-step-00000009", ".step-00000007.12345678", "mine"):
        (run / "checkpoints" / name).mkdir()
    (checkpoints.folder(run, 2)).mkdir()  # torn: no manifest
    assert clean(tmp_path, run, retention.CleanupRule()) == [1]
    assert sorted(os.listdir(run / "checkpoints")) == ["mine", "step-00000001"]


def test_a_run_that_is_alive_is_not_touched(tmp_path: Path):
    run = make(tmp_path, experiment(0))
    with RunDir.open(tmp_path, experiment(0), experiment(0)):
        cleanup = retention.plan(run, EVERYTHING, set(), time.time() + 1)
    assert cleanup.deletable == ()
    assert "running" in cleanup.reason_to_keep


@pytest.mark.parametrize("change", ["start", "checkpoint", "best", "status"])
def test_a_run_that_moved_on_since_the_look_is_not_touched(tmp_path: Path, change: str):
    run = make(tmp_path, experiment(0), state="stopped")
    cleanup = retention.plan(run, retention.CleanupRule(), set(), time.time() + 1)
    assert len(cleanup.deletable) == 2
    with contextlib.ExitStack() as stack:
        if change == "start":
            stack.enter_context(RunDir.open(tmp_path, experiment(0), experiment(0)))
        elif change == "checkpoint":
            save(run, 4)
        elif change == "best":
            checkpoints.mark_best(run, 1)
        else:
            (run / "status.json").write_text(json.dumps({"state": "done", "step": 3}))
        with pytest.raises(RunError, match="has changed meanwhile, so nothing in it was deleted"):
            retention.remove(cleanup)
    assert steps_in(run)[:3] == [1, 2, 3]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_rule_nothing_that_is_needed_goes(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    rule = retention.CleanupRule(rng.randrange(3), rng.random() < 0.5)
    with contextlib.ExitStack() as stack:
        parents = [experiment(number) for number in range(4)]
        runs = {}
        for exp in parents:
            steps = rng.randrange(1, 5)
            best = rng.choice([None, rng.randrange(1, steps + 1)])
            runs[exp["seed"]] = make(tmp_path, exp, steps, rng.choice(["done", "done", "failed", "stopped"]), best)
            if rng.random() < 0.3:
                save(runs[exp["seed"]], steps + 1)
            if rng.random() < 0.3:
                next((checkpoints.list_all(runs[exp["seed"]])[-1]).glob("model.*")).unlink()
        parent_checkpoints = [(number, rng.choice(["last", "best"])) for number in range(4) if rng.random() < 0.5]
        for number, which in parent_checkpoints:
            make(tmp_path, child(10 + number, parents[number], which), rng.randrange(3))
        alive = rng.choice(parents)
        if rng.random() < 0.5:
            stack.enter_context(RunDir.open(tmp_path, alive, alive))
        else:
            alive = None
        before = shutil.copytree(tmp_path, tmp_path.with_name("before"), symlinks=True)
        by_others, _ = retention.needed_by_children(tmp_path)
        for path in [tmp_path / exp_id(exp) for exp in parents]:
            cleanup = retention.plan(path, rule, by_others, time.time() + 1)
            assert steps_in(path) == steps_in(before / path.name), "a plan changes nothing"
            retention.remove(cleanup)
        for exp in parents:
            run, old = tmp_path / exp_id(exp), before / exp_id(exp)
            whole = [step for step in steps_in(old) if (checkpoints.folder(old, step) / "model.safetensors").exists()]
            if exp is alive:
                assert steps_in(run) == steps_in(old)
                continue
            state = json.loads((old / "status.json").read_text())
            must = set(whole[len(whole) - rule.keep_last :] if rule.keep_last else [])
            best = old / "checkpoints" / "best.json"
            if best.exists() and (
                rule.keep_best or state["state"] != "done" or (exp["seed"], "best") in parent_checkpoints
            ):
                must.add(json.loads(best.read_text())["step"])
            if state["state"] != "done":
                must.update(whole[-1:])
            if (exp["seed"], "last") in parent_checkpoints:
                must.add(state["step"])
            assert steps_in(run) == sorted(must & set(steps_in(old)))
        shutil.rmtree(before)
