"""Lineage: which experiments an experiment starts from, and in which order they run."""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from src.config import Places
from src.errors import CheckpointError
from src.experiments import checkpoints
from src.experiments.saved import state_of
from src.files import read_json

Experiment = dict[str, Any]


def parents(exp: Experiment) -> list[str]:
    """Ids of the experiments that `exp` names at any depth, in the order in which they stand, each once."""
    return list(dict.fromkeys(parent for parent, _ in named(exp)))


def named(exp: Experiment) -> list[tuple[str, str]]:
    """(id, "last" or "best") of the checkpoints that `exp` names at any depth, in the order in which they stand, each once."""
    return list(dict.fromkeys(_named(exp)))


def fingerprints(exp: Experiment, runs: Path) -> dict[str, str]:
    """What `exp` starts from: {"<id>/<last or best>": fingerprint} of its parents' checkpoints, and of those that these are built on.

    A parent that was trained on top of another keeps only the weights that it trained, so its parents count as well.

    Raises:
        CheckpointError: a checkpoint is missing or damaged.
        RunError: the status of a parent is damaged.
    """
    found: dict[str, str] = {}

    def visit(value: Experiment) -> None:
        for parent, which in named(value):
            key = f"{parent}/{which}"
            if key not in found:
                folder = checkpoints.best(runs / parent) if which == "best" else checkpoints.last(runs / parent)
                if folder is None:
                    raise CheckpointError(f"{runs / parent}: has no best checkpoint. Use the last one.")
                found[key] = checkpoints.fingerprint(folder)
                visit(read_json(folder / "model.json", CheckpointError))

    visit(exp)
    return found


def _named(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        if value.get("name") == "experiment" and isinstance(value.get("exp_id"), str):
            yield value["exp_id"], value.get("checkpoint", "last")
        for item in value.values():
            yield from _named(item)
    elif isinstance(value, list):
        for item in value:
            yield from _named(item)


def order(selected: Mapping[str, Experiment], known: Mapping[str, Experiment], with_parents: bool) -> list[str]:
    """Ids of `selected`, parents before children and otherwise as given.

    selected, known: id -> dict; `known` holds every experiment that can be run.
    with_parents: True adds the ancestors found in `known`. A cycle is impossible: an id is the hash of a dict that holds its parents' ids.
    """
    everything = {**known, **selected}
    ordered: list[str] = []
    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited or name not in everything:
            return
        visited.add(name)
        for parent in parents(everything[name]):
            visit(parent)
        if with_parents or name in selected:
            ordered.append(name)

    for name in selected:
        visit(name)
    return ordered


def missing(exp: Experiment, places: Places, ahead: Container[str] = ()) -> list[str]:
    """One message for each parent of `exp` that is neither done nor `ahead`: its id, its state, and how to get it."""
    wanted = [parent for parent in parents(exp) if parent not in ahead]
    return [f"it starts from experiment {parent}, {how}" for parent in wanted if (how := _lack(parent, places))]


def _lack(parent: str, places: Places) -> str | None:
    state = state_of(places.runs / parent)
    if state == "done":
        return None
    if state == "running":
        return f"which is still running in {places.runs / parent}. Wait until it is done."
    if parent in places.experiments:
        recipe = places.experiments[parent].get("recipe")
        what = "has not been run" if state == "new" else f"is {state}, not done"
        return f"which {what} (recipe {recipe!r}, wanted in {places.runs / parent}). Add --with-parents, or run its group first."
    if state == "new":
        return f"which is neither in exp_configs.py nor in {places.runs}. Use ref(...) of an experiment, or copy its save directory there."
    return f"which is {state}, not done, and no longer in exp_configs.py. Finish it with --exp_id {parent}."
