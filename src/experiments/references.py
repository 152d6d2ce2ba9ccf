"""Lineage: which experiments an experiment starts from, and in which order they run."""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from src.config import Places
from src.experiments.identity import exp_id
from src.experiments.saved import state_of

Experiment = dict[str, Any]


def parents(exp: Experiment) -> list[str]:
    """Ids of the experiments that `exp` names at any depth, in the order in which they stand, each once."""
    return list(dict.fromkeys(_named(exp)))


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("name") == "experiment" and isinstance(value.get("exp_id"), str):
            yield value["exp_id"]
        for item in value.values():
            yield from _named(item)
    elif isinstance(value, list):
        for item in value:
            yield from _named(item)


def order(selected: Iterable[Experiment], known: Mapping[str, Experiment], with_parents: bool) -> list[Experiment]:
    """`selected` without duplicates, parents before children and otherwise as given.

    known: id -> dict of every experiment that can be run; ids are those of `exp_id`.
    with_parents: True adds the ancestors found in `known`. A cycle is impossible: an id is the hash of a dict that holds its parents' ids.
    """
    chosen = {exp_id(exp): exp for exp in selected}
    everything = {**known, **chosen}
    ordered: dict[str, Experiment] = {}
    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited or name not in everything:
            return
        visited.add(name)
        for parent in parents(everything[name]):
            visit(parent)
        if with_parents or name in chosen:
            ordered[name] = everything[name]

    for name in chosen:
        visit(name)
    return list(ordered.values())


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
