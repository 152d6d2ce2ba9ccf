"""Lineage: parents are found, run first, and missed with advice."""

from pathlib import Path
from typing import Any

import pytest

from src.errors import CheckpointError
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.files import new_directory, write_json
from src.runs.checkpoints import checkpoints
from src.runs.parents import fingerprints, missing_parents, order, parent_checkpoints, parent_ids
from src.runs.run_dir import RunDir
from src.runs.store import RunStore


def child_of(*ids: str, seed: int = 0) -> dict:
    return {
        "seed": seed,
        "model": {"name": "wrapper", "bases": [{"name": "experiment", "exp_id": i, "checkpoint": "last"} for i in ids]},
    }


OLD = {"recipe": "lm", "seed": 0}
MIDDLE = child_of(exp_id(OLD))
YOUNG = child_of(exp_id(MIDDLE), exp_id(OLD))
CANDIDATES = {exp_id(e): e for e in (YOUNG, MIDDLE, OLD)}


def test_parents_are_found_at_any_depth_once_and_in_order():
    a, b = "a" * 32, "b" * 32
    exp = {
        "model": {"name": "x", "base": {"name": "experiment", "exp_id": b}},
        "heads": [{"base": {"name": "experiment", "exp_id": a}}],
    }
    assert parent_ids(exp) == [b, a]
    assert parent_ids({**exp, "again": exp["model"]}) == [b, a]
    assert parent_ids({"model": {"name": "hf", "exp_id": a}}) == []


def ordered_dicts(selected: list[dict[str, Any]], with_parents: bool) -> list[dict[str, Any]]:
    selected_dicts = {exp_id(e): e for e in selected}
    return [{**CANDIDATES, **selected_dicts}[name] for name in order(selected_dicts, CANDIDATES, with_parents)]


def test_parents_come_first():
    assert ordered_dicts([YOUNG, MIDDLE, OLD], with_parents=False) == [OLD, MIDDLE, YOUNG]
    assert ordered_dicts([YOUNG, OLD], with_parents=False) == [OLD, YOUNG]
    assert ordered_dicts([YOUNG], with_parents=False) == [YOUNG]
    assert ordered_dicts([YOUNG], with_parents=True) == [OLD, MIDDLE, YOUNG]


def test_order_drops_duplicates_and_is_stable():
    others = [child_of(exp_id(OLD), seed=s) for s in (3, 1, 2)]
    assert ordered_dicts([*others, others[0]], with_parents=True) == [OLD, *others]


def test_a_parent_that_nobody_knows_is_left_to_missing():
    orphan = child_of("c" * 32)
    assert ordered_dicts([orphan], with_parents=True) == [orphan]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(data=tmp_path, runs=tmp_path / "runs", experiments=CANDIDATES)


def test_a_parent_that_was_never_run_says_how_to_run_it(places: Places):
    (message,) = missing_parents(MIDDLE, places)
    assert message.startswith(f"it starts from experiment {exp_id(OLD)}, which has not been run (recipe 'lm'")
    assert "--with-parents" in message


def test_an_unknown_parent_says_where_it_was_looked_for(places: Places):
    (message,) = missing_parents(child_of("c" * 32), places)
    assert "neither in exp_configs.py nor in" in message


def test_each_state_of_a_parent_has_its_message(places: Places):
    with RunDir.open(places.runs, OLD, OLD) as run:
        assert "still running" in missing_parents(MIDDLE, places)[0]
        run.set_status("failed", reason="boom")
        assert "is failed, not done" in missing_parents(MIDDLE, places)[0]
        other_places = Places(data=places.data, runs=places.runs)
        assert f"Finish it with --exp_id {run.exp_id}" in missing_parents(MIDDLE, other_places)[0]
        run.set_status("running")
    assert "is lost, not done" in missing_parents(MIDDLE, places)[0]
    write_run(places.runs, OLD, "w")
    assert missing_parents(MIDDLE, places) == []
    (run.path / "status.json").write_text("{")
    assert "which cannot be used: " in missing_parents(MIDDLE, places)[0]


def write_run(runs: Path, exp: dict, weights: str, step: int = 4) -> str:
    """A finished run of `exp` with one checkpoint; returns its id."""
    identity = exp_id(exp)
    with new_directory(checkpoints.folder(runs / identity, step)) as folder:
        (folder / "model.safetensors").write_text(weights)
        write_json(folder / "model.json", exp.get("model", {}))
    write_json(runs / identity / "status.json", {"state": "done", "step": step})
    return identity


def test_checkpoints_are_named_with_their_parents():
    a, b = "a" * 32, "b" * 32
    bases = [
        {"name": "experiment", "exp_id": i, **which}
        for i, which in ((b, {}), (a, {"checkpoint": "best"}), (b, {"checkpoint": "best"}))
    ]
    assert parent_checkpoints({"model": {"name": "x", "bases": bases}, "again": bases[0]}) == [
        (b, "last"),
        (a, "best"),
        (b, "best"),
    ]
    assert parent_ids({"bases": bases}) == [b, a]


def test_fingerprints_are_of_all_that_an_experiment_is_built_on(tmp_path: Path):
    old, middle = write_run(tmp_path, OLD, "w"), write_run(tmp_path, MIDDLE, "w")
    before = fingerprints(YOUNG, tmp_path)
    assert list(before) == [f"{middle}/last", f"{old}/last"]
    assert fingerprints(OLD, tmp_path) == {}
    only_middle = child_of(middle)
    assert fingerprints(only_middle, tmp_path) == before
    write_run(tmp_path, OLD, "v")
    after = fingerprints(only_middle, tmp_path)
    assert after[f"{old}/last"] != before[f"{old}/last"]
    assert after[f"{middle}/last"] == before[f"{middle}/last"]


def test_fingerprints_of_missing_checkpoints(tmp_path: Path):
    exp = {"model": {"name": "experiment", "exp_id": exp_id(OLD), "checkpoint": "best"}}
    with pytest.raises(CheckpointError, match=f"{exp_id(OLD)}: has no best checkpoint. Use the last one"):
        fingerprints(exp, tmp_path)
    with pytest.raises(CheckpointError, match="has no last checkpoint yet, as it is new, not done"):
        fingerprints(MIDDLE, tmp_path)
    write_run(tmp_path, OLD, "w")
    checkpoints.mark_best(tmp_path / exp_id(OLD), 4)
    assert fingerprints(exp, tmp_path)[f"{exp_id(OLD)}/best"] == fingerprints(MIDDLE, tmp_path)[f"{exp_id(OLD)}/last"]


def test_a_parent_that_is_done_but_lost_its_checkpoint_is_missed(places: Places):
    best = {"model": {"name": "experiment", "exp_id": exp_id(OLD), "checkpoint": "best"}}
    run = places.runs / write_run(places.runs, OLD, "weights")
    assert missing_parents(MIDDLE, places) == []
    assert "has no best checkpoint" in missing_parents(best, places)[0]
    checkpoints.mark_best(run, 4)
    assert missing_parents(best, places) == []
    checkpoints.mark_best(run, 2)
    assert "the best checkpoint is damaged" in missing_parents(best, places)[0]
    (checkpoints.folder(run, 4) / "model.safetensors").write_text("w")
    (message,) = missing_parents(MIDDLE, places)
    assert "model.safetensors: 1 bytes, 7 were written" in message
    assert message.endswith(f"Start the run again with --exp_id {run.name} -r 1, or restore it from a copy.")
    (checkpoints.folder(run, 4)).rename(run / "away")
    assert "the last checkpoint is missing" in missing_parents(MIDDLE, places)[0]
    write_json(run / "status.json", {"state": "done"})
    assert "status.json has no step" in missing_parents(MIDDLE, places)[0]


def test_a_parent_of_many_is_looked_at_once(places: Places):
    write_run(places.runs, OLD, "w")
    store = RunStore(places.runs)
    assert missing_parents(MIDDLE, places, (), store) == []
    assert store[exp_id(OLD)].checkpoint_problems == {"last": None}
    store[exp_id(OLD)].checkpoint_problems["last"] = "which is known"
    assert missing_parents(child_of(exp_id(OLD), seed=7), places, (), store) == [
        f"it starts from experiment {exp_id(OLD)}, which is known"
    ]
