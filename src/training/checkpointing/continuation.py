"""Continue the training of another experiment after one of its steps: `ref(PARENT, step=N)`.

The continued run starts with a copy of the parent's checkpoint: weights, optimizer state, number of steps and position
in the data. Its settings, such as `loop.steps` and the schedule, apply from there, as if it had always had them. With
the parent's settings it repeats the parent's later steps bit by bit. One long run with a constant learning rate thus
gives several finished models, each after its own decay (Hu et al. 2024, "MiniCPM", section 4; Hägele et al. 2024,
"Scaling laws and compute-optimal training beyond fixed training durations").

The best step, early stopping and score rows start again.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src import files
from src.errors import CheckpointError, ConfigError, RunError
from src.experiments.config import Config, Places, is_operational
from src.experiments.interfaces import load_experiment
from src.experiments.registry import canonical_dict, name_of
from src.runs import parents
from src.runs.checkpoints import checkpoints, retention
from src.runs.context import Run
from src.runs.history import branches
from src.runs.store import CONFIG, SavedRun
from src.support import distributed

if TYPE_CHECKING:
    from src.training.checkpointing.checkpoint import CheckpointMetadata

log = logging.getLogger(__name__)
_EQUAL = (
    *("sequences_per_step", "group_by_length", "optimizer", "adam_beta1", "adam_beta2", "groups", "layerwise_decay"),
)
"""Fields of `loop` that a continuation shares with its parent."""
_RUN_FILES = ("state.json", "model.json", CONFIG, branches.FILE, files.MANIFEST, "tokenizer")
"""Entries of a checkpoint that describe the run, so that they are not copied."""
_COPY_TIME = timedelta(days=1)
"""How long other ranks wait for the copy of a checkpoint, as a large one on a slow disk takes long."""
_OWN_INPUTS = ("parent ", "pretrained model")
"""Prefixes of names of inputs that differ between a run and its continuation."""


def check(recipe: Any, places: Places) -> None:
    """Check that an experiment with a `step` in its model can continue the training of its parent.

    recipe: a `TrainingRecipe`.

    Raises:
        ConfigError: one line for each setting that differs from the parent's and must not.
    """
    for path, _, step in parents.walk_checkpoints(recipe.model_dump(mode="json")):
        if path != "model" and isinstance(step, int):
            raise ConfigError(
                f"{path}.step: {step}, but only `model` itself can continue a training. Use ref(...) without a step, "
                "for the last checkpoint."
            )
    model = recipe.model
    step = getattr(model, "step", None) if model.name == "experiment" else None
    if step is None or recipe.loop is None:
        return
    if not recipe.can_continue:
        raise ConfigError(
            f"model.step: recipe {name_of(recipe)!r} refers to the model at the start of the training, so it cannot "
            "continue another one. Use ref(...) without a step."
        )
    recipe = recipe.with_steps(places)
    subject = f"parent {model.exp_id}"
    parent: Any = load_experiment(model.parent_experiment(places), subject).with_steps(places)
    lines = [*_differences(recipe, parent)]
    if step > parent.loop.steps:
        lines.append(f"model.step: {step}, but {subject} has {parent.loop.steps} steps. Use one of them.")
    if step >= recipe.loop.steps:
        lines.append(
            f"loop.steps: {recipe.loop.steps}, counted from the start of {subject}, is not above model.step {step}. "
            "Use more."
        )
    checkpoint = checkpoints.folder(places.runs / model.exp_id, step)
    if checkpoint.exists():
        try:
            _require_unchanged_order(checkpoint, step)
        except RunError as error:
            lines.append(f"model.step: {error}")
    if lines:
        raise ConfigError("\n".join(lines))


def _differences(recipe: Any, parent: Any) -> Iterator[str]:
    """One line for each setting that must be equal in both and is not."""
    names = [*_EQUAL, *(["micro_batch"] if recipe.loop.group_by_length else [])]
    pairs: list[tuple[str, Any, Any]] = [
        ("recipe", name_of(recipe), name_of(parent)),
        ("seed", recipe.seed, parent.seed),
        *((f"loop.{name}", getattr(recipe.loop, name), getattr(parent.loop, name)) for name in names),
        *_data_pairs(recipe, parent),
    ]
    for path, value, before in pairs:
        if value != before:
            yield (
                f"{path}: {value!r}, but the parent's is {before!r}, and a continuation cannot change it. "
                "Use the parent's, or ref(...) without a step."
            )


def _data_pairs(recipe: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, value, the parent's value) of the settings that determine the training data and their order."""
    ours, theirs = (
        canonical_dict(each.data.model_dump(mode="json"), each.data, _trains_nothing) for each in (recipe, parent)
    )
    yield "data.name", recipe.data.name, parent.data.name
    for name in sorted(ours.keys() | theirs.keys()):
        yield f"data.{name}", ours.get(name), theirs.get(name)
    if recipe.loop and (begins := getattr(recipe.data, "begins", None)) and recipe.data.name == parent.data.name:
        # Phases start at shares of the steps, which usually differ.
        step = getattr(recipe.model, "step", 0)
        lists = begins(recipe.loop.steps), parent.data.begins(parent.loop.steps)
        past, past_of_parent = ([begin for begin in each if begin < step] for each in lists)
        yield "data.phases (first steps)", past, past_of_parent


def _trains_nothing(config: Any, name: str) -> bool:
    """Whether a field of `config` is operational or of the validation."""
    return is_operational(config, name) or (isinstance(config, Config) and name.startswith("val_"))


def _require_unchanged_order(checkpoint: Path, step: int) -> None:
    """Raise RunError if the run of a checkpoint was rewound before `step`, as its data order then differs."""
    before = [branch for branch in branches.read(checkpoint) if branch.from_step < step]
    if before:
        raise RunError(
            f"{checkpoint}: its run was rewound to step {before[0].from_step}, which changed its settings from there. "
            f"Continue from a checkpoint up to step {before[0].from_step}."
        )


def newest_checkpoint(run: Run, about: "CheckpointMetadata", inputs: Mapping[str, str]) -> Path | None:
    """The newest complete checkpoint of `run`; for a new continuation, a copy of the parent's checkpoint. Collective.

    inputs: fingerprints of the inputs of `run`; those of data and tokenizer must equal the parent's.

    Raises:
        CheckpointError: the parent's checkpoint is missing or damaged.
        RunError: the data or the tokenizer have changed since the parent's training, or the disk refuses.
    """
    model = run.dir.exp.get("model", {})
    step = model.get("step") if model.get("name") == "experiment" else None

    def find() -> Path | None:
        newest = checkpoints.newest_complete(run.path)
        if newest is not None or step is None:
            return newest
        parent = SavedRun(run.places.runs / model["exp_id"])
        mark(parent, step)
        source = checkpoints.of_step(parent.path, step)
        hashes = files.read_manifest(source, CheckpointError)["files"]  # before other files, as a rewind can follow
        state = files.read_json(source / "state.json", CheckpointError)
        _require_unchanged_order(source, step)
        _require_equal_inputs(source, state["inputs"], inputs)
        _copy(source, hashes, run, about, {**state, **_own_state(source, run), "inputs": dict(inputs)})
        log.info("%s: continues %s.", run.path, source)
        return checkpoints.folder(run.path, step)

    return distributed.broadcast_from_rank0(find, None if step is None else _COPY_TIME)


def mark(parent: SavedRun, step: int) -> None:
    """Keep `parent` from deleting its checkpoint of `step`, if it is not done."""
    if parent.state != "done":
        retention.mark_continued(parent.path, step)


def _require_equal_inputs(source: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    names = [name for name in now.keys() & before.keys() if not name.startswith(_OWN_INPUTS)]
    if changed := sorted(name for name in names if now[name] != before[name]):
        raise RunError(
            f"{source}: cannot be continued, as inputs differ from those of its run: {', '.join(changed)}. "
            "Restore them, or start from its weights: ref(...) without a step."
        )


def _own_state(source: Path, run: Run) -> dict[str, Any]:
    """The parts of the state that start again."""
    fresh: dict[str, Any] = {"selection": {"best_value": None, "best_step": None, "without_gain": 0}}
    theirs, ours = (files.read_json(folder / CONFIG, CheckpointError)["loop"] for folder in (source, run.path))
    return fresh if theirs["divergence"] == ours["divergence"] else {**fresh, "detector": {}}


def _copy(source: Path, hashes: Any, run: Run, about: "CheckpointMetadata", state: dict[str, Any]) -> None:
    """Copy a checkpoint of another run into `run`, described as a checkpoint of `run`. hashes: from its manifest.

    Raises:
        CheckpointError: a file differs from its hash, as the other run was rewound meanwhile.
    """
    from src.training.checkpointing import checkpoint

    with checkpoint.begin(run.path, state["step"]) as folder:
        for name in (name for name in hashes if Path(name).parts[0] not in _RUN_FILES):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(source / name, folder / name)
            if not (folder / name).exists() or files.sha256(folder / name) != hashes[name]["sha256"]:
                raise CheckpointError(f"{source / name}: changed or moved while it was copied. Start the run again.")
        checkpoint.write(folder, None, None, state, about)
        for name, content in checkpoint.origin(run.path).items():
            files.write_atomic(folder / name, content)
