"""Lineage: parents are found, run first, and missed with advice."""

from pathlib import Path
from typing import Any

import pytest

from src.config import Places
from src.experiments.identity import exp_id
from src.experiments.references import missing, order, parents
from src.experiments.rundir import RunDir


def child_of(*ids: str, seed: int = 0) -> dict:
    return {"seed": seed, "model": {"name": "wrapper", "bases": [{"name": "experiment", "exp_id": i, "checkpoint": "last"} for i in ids]}}


OLD = {"recipe": "lm", "seed": 0}
MIDDLE = child_of(exp_id(OLD))
YOUNG = child_of(exp_id(MIDDLE), exp_id(OLD))
KNOWN = {exp_id(e): e for e in (YOUNG, MIDDLE, OLD)}


def test_parents_are_found_at_any_depth_once_and_in_order():
    a, b = "a" * 32, "b" * 32
    exp = {"model": {"name": "x", "base": {"name": "experiment", "exp_id": b}}, "heads": [{"base": {"name": "experiment", "exp_id": a}}]}
    assert parents(exp) == [b, a]
    assert parents({**exp, "again": exp["model"]}) == [b, a]
    assert parents({"model": {"name": "hf", "exp_id": a}}) == []


def ordered(selected: list[dict[str, Any]], with_parents: bool) -> list[dict[str, Any]]:
    chosen = {exp_id(e): e for e in selected}
    return [{**KNOWN, **chosen}[name] for name in order(chosen, KNOWN, with_parents)]


def test_parents_come_first():
    assert ordered([YOUNG, MIDDLE, OLD], with_parents=False) == [OLD, MIDDLE, YOUNG]
    assert ordered([YOUNG, OLD], with_parents=False) == [OLD, YOUNG]
    assert ordered([YOUNG], with_parents=False) == [YOUNG]
    assert ordered([YOUNG], with_parents=True) == [OLD, MIDDLE, YOUNG]


def test_order_drops_duplicates_and_otherwise_keeps_the_given_one():
    others = [child_of(exp_id(OLD), seed=s) for s in (3, 1, 2)]
    assert ordered([*others, others[0]], with_parents=True) == [OLD, *others]


def test_a_parent_that_nobody_knows_is_left_to_missing():
    orphan = child_of("c" * 32)
    assert ordered([orphan], with_parents=True) == [orphan]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(data=tmp_path, runs=tmp_path / "runs", experiments=KNOWN)


def test_a_parent_that_was_never_run_says_how_to_run_it(places: Places):
    (message,) = missing(MIDDLE, places)
    assert message.startswith(f"it starts from experiment {exp_id(OLD)}, which has not been run (recipe 'lm'")
    assert "--with-parents" in message


def test_an_unknown_parent_says_where_it_was_looked_for(places: Places):
    (message,) = missing(child_of("c" * 32), places)
    assert "neither in exp_configs.py nor in" in message


def test_each_state_of_a_parent_has_its_message(places: Places):
    with RunDir.open(places.runs, OLD, OLD) as run:
        assert "still running" in missing(MIDDLE, places)[0]
        run.set_status("failed", reason="boom")
        assert "is failed, not done" in missing(MIDDLE, places)[0]
        forgotten = Places(data=places.data, runs=places.runs)
        assert f"Finish it with --exp_id {run.exp_id}" in missing(MIDDLE, forgotten)[0]
        run.set_status("running")
    assert "is lost, not done" in missing(MIDDLE, places)[0]
    with RunDir.open(places.runs, OLD, OLD) as run:
        run.set_status("done")
    assert missing(MIDDLE, places) == []
