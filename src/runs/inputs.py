"""The inputs of a run, as digests by name: recorded by it, and of the prepared data sets as they are now."""

import contextlib
import hashlib
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src import files
from src.errors import CheckpointError, DataError, RunError, UserError
from src.experiments.config import Places
from src.runs.checkpoints import checkpoints
from src.runs.store import VALIDATION, RunStore, SavedRun

if TYPE_CHECKING:
    from src.runs.plan import PlannedExperiment

CONTENT = "content of "
"""Prefix of the names of `content_samples`."""


def content_samples(exp: Mapping[str, Any], places: Places) -> dict[str, str]:
    """{"content of NAME": digest} for each prepared data set of an experiment.

    A data set's fingerprint covers only its manifest; this covers samples of the files, about 6 MiB per data set. It
    detects changed files, unless only a few bytes of a large file changed. Stores of encoded contexts are not sampled.
    """
    names = sorted({name for name in _texts(exp.get("data")) if os.path.isfile(places.data / name / files.MANIFEST)})
    return {CONTENT + name: _sample(places.data / name) for name in names}


def _sample(folder: Path) -> str:
    file_names = sorted(files.read_manifest(folder, DataError)["files"])
    pieces = max(4, 1024 // max(1, len(file_names)))
    with files.reading(folder, DataError):
        samples = [[file, files.sample_digest(folder / file, 1024 * pieces, pieces)] for file in file_names]
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value except values of "name", which are kinds of data sets, not folders."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([item for key, item in value.items() if key != "name"])
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def recorded_inputs(run: SavedRun) -> dict[str, Any]:
    """Digests of the inputs of the training, from the newest checkpoint; empty without a checkpoint."""
    for checkpoint in reversed(checkpoints.list_all(run.path)):
        if state := files.read_json(checkpoint / "state.json", CheckpointError, None):
            inputs = state.get("inputs") if isinstance(state, dict) else None
            return inputs if isinstance(inputs, dict) else {}
    return {}


def find_changed_data(
    items: "Sequence[PlannedExperiment]", places: Places, store: RunStore, reset: Container[str] = ()
) -> dict[str, str]:
    """Messages, by id, for runs that have read a data set of the same name with other content.

    reset: ids that start over.
    """
    samples: dict[str, dict[str, str]] = {}
    messages: dict[str, str] = {}
    for item in items:
        run = store[item.exp_id]
        if item.exp_id in reset or not run.path.exists():
            continue
        with contextlib.suppress(UserError):  # damaged data or files, which other checks report
            key = json.dumps(item.exp.get("data"), sort_keys=True)
            if key not in samples:
                samples[key] = content_samples(item.exp, places)
            if names := ", ".join(str(places.data / name) for name in _changed_data_sets(run, samples[key])):
                messages[item.exp_id] = (
                    f"{item.where}: run {item.exp_id} has read other data: {names} changed since. Prepare the new data "
                    "under another --name, or start over with -r 1."
                )
    return messages


def _changed_data_sets(run: SavedRun, now: Mapping[str, str]) -> list[str]:
    """Names of the data sets whose content is not the one that `run` has read. now: of `content_samples`."""
    before = recorded_inputs(run) or files.read_json(run.path / VALIDATION, RunError, {}).get("content", {})
    return [name.removeprefix(CONTENT) for name in now if before.get(name, now[name]) != now[name]]
