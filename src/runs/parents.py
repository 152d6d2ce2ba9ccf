"""Parents: the experiments that an experiment starts from, and the order in which they run."""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from src.errors import CheckpointError, UserError
from src.experiments.config import Places, join
from src.files import read_json
from src.runs.checkpoints import checkpoints
from src.runs.store import RunStore, SavedRun

Experiment = dict[str, Any]


def parent_ids(exp: Experiment) -> list[str]:
    """Ids of the parents named anywhere in `exp`, in order of appearance, without duplicates."""
    return list(dict.fromkeys(parent for parent, _ in parent_checkpoints(exp)))


def parent_checkpoints(exp: Experiment) -> list[tuple[str, str | int]]:
    """(id, "last", "best" or a step) of the checkpoints named anywhere in `exp`, in order of appearance, without
    duplicates."""
    return list(dict.fromkeys((parent, which) for _, parent, which in walk_checkpoints(exp)))


def fingerprints(exp: Experiment, runs: Path) -> dict[str, str]:
    """{"<id>/<last, best or step N>": fingerprint} of the checkpoints of all ancestors of `exp`.

    A parent that was itself trained from a parent stores only the weights that it trained, so all ancestors count.

    Raises:
        CheckpointError: a checkpoint is missing or damaged.
        RunError: the status of a parent is damaged.
    """
    digests: dict[str, str] = {}

    def visit(value: Experiment) -> None:
        for parent, which in parent_checkpoints(value):
            key = f"{parent}/{describe(which)}"
            if key not in digests:
                folder = find_checkpoint(SavedRun(runs / parent), which)
                digests[key] = checkpoints.fingerprint(folder)
                visit(read_json(folder / "model.json", CheckpointError))

    visit(exp)
    return digests


def describe(which: str | int) -> str:
    """ "last", "best" or "step N" of a checkpoint in `parent_checkpoints`."""
    return which if isinstance(which, str) else f"step {which}"


def find_checkpoint(run: SavedRun, which: str | int, hashes: bool = True) -> Path:
    """The checkpoint "last" or "best" of a finished run, or that of a step of any run. hashes: see `files.defect`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if isinstance(which, int):
        return checkpoints.of_step(run.path, which, hashes)
    if which == "last":
        return checkpoints.last(run, hashes)
    checkpoint = checkpoints.best(run.path, hashes)
    if checkpoint is None:
        raise CheckpointError(f"{run.path}: has no best checkpoint. Use the last one.")
    return checkpoint


def walk_checkpoints(value: Any, path: str = "") -> Iterator[tuple[str, str, str | int]]:
    """(dotted path, id, "last", "best" or a step) of each checkpoint named in an experiment."""
    if isinstance(value, dict):
        if value.get("name") == "experiment" and isinstance(value.get("exp_id"), str):
            step = value.get("step")
            yield path, value["exp_id"], value.get("checkpoint", "last") if step is None else step
        for key, item in value.items():
            yield from walk_checkpoints(item, join(path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from walk_checkpoints(item, f"{path}[{place}]")


def order(selected: Mapping[str, Experiment], candidates: Mapping[str, Experiment], with_parents: bool) -> list[str]:
    """Ids of `selected`, parents before children, else in the given order.

    selected, candidates: id -> dict; `candidates` has every experiment that can run.
    with_parents: add the ancestors in `candidates`. There are no cycles: an id is the hash of a dict that contains the
    ids of its parents.
    """
    everything = {**candidates, **selected}
    ids: list[str] = []
    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited or name not in everything:
            return
        visited.add(name)
        for parent in parent_ids(everything[name]):
            visit(parent)
        if with_parents or name in selected:
            ids.append(name)

    for name in selected:
        visit(name)
    return ids


def missing_parents(
    exp: Experiment,
    places: Places,
    ahead: Container[str] = (),
    store: RunStore | None = None,
) -> list[str]:
    """One message for each parent of `exp` that is not in `ahead` and has no usable checkpoint:
    its id, the problem, and the remedy.

    This compares only file sizes; `checkpoints.last` and `best` compare hashes when a checkpoint is used.
    store: cache of `places.runs`, so that a parent of many children is checked once. Use it only with equal `places`.
    """
    store = RunStore(places.runs) if store is None else store
    messages = []
    for parent, which in parent_checkpoints(exp):
        if parent not in ahead:
            problems = store[parent].checkpoint_problems
            if which not in problems:
                problems[which] = _checkpoint_problem(store[parent], which, places)
            if problem := problems[which]:
                messages.append(f"it starts from experiment {parent}, {problem}")
    return list(dict.fromkeys(messages))


def _checkpoint_problem(run: SavedRun, which: str | int, places: Places) -> str | None:
    parent = run.name
    try:
        state = run.state
        if state == "done" or (isinstance(which, int) and checkpoints.folder(run.path, which).exists()):
            find_checkpoint(run, which, hashes=False)
            return None
    except UserError as error:
        return f"which cannot be used: {error}"
    if state == "running":
        return f"which is still running in {run.path}. Wait until it is done."
    if parent in places.experiments:
        recipe = places.experiments[parent].get("recipe")
        problem = "has not been run" if state == "new" else f"is {state}, not done"
        return (
            f"which {problem} (recipe {recipe!r}, expected in {run.path}). Add --with-parents, or run its group first."
        )
    if state == "new":
        return (
            f"which is neither in exp_configs.py nor in {places.runs}. Use ref(...) of an experiment, or copy its "
            "save directory there."
        )
    return f"which is {state}, not done, and no longer in exp_configs.py. Finish it with --exp_id {parent}."
