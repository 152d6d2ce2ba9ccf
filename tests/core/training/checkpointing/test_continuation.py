"""A training that continues another one after a step repeats its later steps, or ends differently from there."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from exp_configs import EXP_GROUPS
from src.data.text import tokenizers
from src.errors import CheckpointError, ConfigError, RunError
from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.files import read_manifest, write_json
from src.runs.checkpoints import checkpoints, retention
from src.runs.history.branches import FILE
from src.training.checkpointing import continuation
from src.training.checkpointing.checkpoint import CheckpointMetadata
from tests import toy
from tests.core.training import small

STEP = 8
STABLE = override(toy.BASE, {"loop.schedule": "constant"})
AGAIN = override(STABLE, {"model": ref(STABLE, step=STEP)})
DECAY = override(AGAIN, {"loop.schedule": "wsd", "loop.decay_rate": 1 / 3, "loop.steps": 12})
WORST = override(AGAIN, {"loop.best_mode": "max"})
GROUPS = {"stable": [STABLE], "again": [AGAIN], "decay": [DECAY], "worst": [WORST]}
KEEP = ["--log_every", "1", "--keep_every", "4"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the runs of all groups."""
    folder = tmp_path_factory.mktemp("continuation")
    toy.write_data(folder / "data")
    assert toy.main(["-e", "stable", *KEEP], GROUPS, folder) == 0
    assert toy.main(["-e", "again", "decay", "worst", *KEEP], GROUPS, folder) == 0
    return folder


def places(folder: Path) -> Places:
    return Places(folder / "data", folder / "runs", {exp_id(STABLE): STABLE})


def later_rows(folder: Path, exp: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in toy.rows(folder, exp_id(dict(exp))) if row["step"] > STEP]


def tensors(folder: Path, exp: Mapping[str, Any], step: int) -> list[bytes]:
    checkpoint = checkpoints.folder(folder / "runs" / exp_id(dict(exp)), step)
    return [(checkpoint / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


def test_with_the_settings_of_its_parent_it_repeats_the_later_steps_bit_by_bit(world: Path):
    assert toy.rows(world, exp_id(AGAIN)) == later_rows(world, STABLE)
    assert tensors(world, AGAIN, 12) == tensors(world, STABLE, 12)
    assert [row["step"] for row in later_rows(world, AGAIN)] == [9, 10, 11, 12]


def test_a_decay_starts_where_the_parent_was(world: Path):
    first, second, *_ = toy.rows(world, exp_id(DECAY))
    expected_first, expected_second, *_ = later_rows(world, STABLE)
    assert first == expected_first, "before its first step with another rate, everything is equal"
    assert (second["train_loss"], second["tokens"]) == (expected_second["train_loss"], expected_second["tokens"])
    assert [row["learning_rate"] for row in toy.rows(world, exp_id(DECAY))] == [0.01, 0.0075, 0.005, 0.0025]


def test_a_checkpoint_of_the_child_names_the_child(world: Path):
    checkpoint = checkpoints.folder(world / "runs" / exp_id(DECAY), 12)
    assert json.loads((checkpoint / "model.json").read_text())["step"] == STEP
    assert json.loads((checkpoint / "config.json").read_text())["loop"]["schedule"] == "wsd"
    assert f"parent {exp_id(STABLE)}/step {STEP}" in json.loads((checkpoint / "state.json").read_text())["inputs"]


def test_the_best_step_is_that_of_the_child(world: Path):
    """The loss of its parent was higher than all of its own."""
    assert checkpoints.best_step(world / "runs" / exp_id(WORST)) == 12


def test_step_is_part_of_the_id_only_if_set():
    assert "step" not in ref(STABLE)
    assert len({exp_id(override(AGAIN, {"model": ref(STABLE, step=step)})) for step in (None, 4, 8)}) == 3


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        ({"seed": 1}, "seed", "1"),
        ({"data.sequence_tokens": 8}, "data.sequence_tokens", "8"),
        ({"loop.sequences_per_step": 4}, "loop.sequences_per_step", "4"),
        ({"loop.optimizer": "adamw_scale"}, "loop.optimizer", "adamw_scale"),
        ({"loop.adam_beta2": 0.9}, "loop.adam_beta2", "0.9"),
        ({"loop.groups": [{"match": "wte", "learning_rate": 1e-3}]}, "loop.groups", "wte"),
        ({"loop.layerwise_decay": 0.9}, "loop.layerwise_decay", "0.9"),
        ({"loop.steps": 8}, "loop.steps", "8"),
        ({"model.step": 13}, "model.step", "13"),
        ({"recipe": "sft"}, "recipe", "sft"),
        (
            {
                "model": {
                    "name": "lora",
                    "rank": 2,
                    "alpha": 2,
                    "target_modules": ["c_attn"],
                    "base": ref(STABLE, step=STEP),
                }
            },
            "model.base.step",
            "8",
        ),
    ],
)
def test_a_setting_that_cannot_change_is_refused(tmp_path: Path, change: dict[str, Any], path: str, value: str):
    recipe = load_experiment(override(AGAIN, change), "")
    with pytest.raises(ConfigError) as error:
        continuation.check(recipe, places(tmp_path))  # type: ignore[arg-type]
    assert any(line.startswith(f"{path}: ") and value in line for line in str(error.value).splitlines())


@pytest.mark.parametrize("name", ["dpo", "kto", "grpo"])
def test_a_recipe_that_refers_to_its_first_model_is_refused(tmp_path: Path, name: str):
    exps = (exp for group in EXP_GROUPS.values() for exp in group if exp["recipe"] == name)
    exp = next(exp for exp in exps if exp["model"]["name"] == "experiment")
    recipe: Any = load_experiment(override(exp, {"model.step": STEP}), "")
    with pytest.raises(ConfigError, match=rf"^model\.step: .*'{name}'"):
        continuation.check(recipe, places(tmp_path))


def test_phases_that_would_have_started_elsewhere_are_refused(tmp_path: Path):
    phases = [{"data": toy.BASE["data"], "until": 0.5}, {"data": toy.BASE["data"]}]
    parent = override(STABLE, {"data": {"name": "phases", "phases": phases}})
    child: Any = override(parent, {"model": ref(parent, step=STEP)})
    all_places = Places(tmp_path, tmp_path, {exp_id(parent): parent})
    continuation.check(load_experiment(child, ""), all_places)
    with pytest.raises(ConfigError, match=r"data\.phases .*\[0\].*\[0, 6\]"):
        continuation.check(load_experiment(override(child, {"loop.steps": 16}), ""), all_places)


def test_settings_that_can_change(tmp_path: Path):
    change = {"loop.learning_rate": 1e-3, "loop.weight_decay": 0.1, "data.val_sequences": 4, "loop.eval_every": 3}
    with pytest.raises(ConfigError) as error:
        continuation.check(load_experiment(override(DECAY, {**change, "seed": 1}), ""), places(tmp_path))  # type: ignore[arg-type]
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["seed"]


MIXTURE = {"name": "mixture", "parts": {"a": STABLE["data"], "val_b": STABLE["data"]}}
PACKED_DATA = {"name": "packed", "sequence_tokens": 16, "documents": {"name": "documents", "corpus": "toy_text"}}


@pytest.mark.parametrize(
    ("data", "validation", "training"),
    [
        (MIXTURE, {"data.parts.a.val_sequences": 4}, {"data.parts.val_b.sequence_tokens": 8}),
        (PACKED_DATA, {"data.documents.val_sequences": 4}, {"data.documents.corpus": "toy_qa"}),
    ],
)
def test_only_validation_can_change_in_parts_of_data(
    tmp_path: Path, data: dict[str, Any], validation: dict[str, Any], training: dict[str, Any]
):
    parent = override(STABLE, {"data": data})
    child: Any = override(parent, {"model": ref(parent, step=STEP)})
    all_places = Places(tmp_path, tmp_path, {exp_id(parent): parent})
    continuation.check(load_experiment(override(child, validation), ""), all_places)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"data\."):
        continuation.check(load_experiment(override(child, training), ""), all_places)  # type: ignore[arg-type]


def test_step_and_best_checkpoint_are_refused_together():
    with pytest.raises(ConfigError, match="model: step: 8"):
        load_experiment(override(AGAIN, {"model": ref(STABLE, "best", STEP)}), "")


def test_a_rewound_parent_is_refused(world: Path, tmp_path: Path):
    runs = tmp_path / "runs"
    shutil.copytree(world / "runs" / exp_id(STABLE), runs / exp_id(STABLE))
    branch = {"number": 1, "from_step": 4, "data": "skip:1"}
    checkpoint = checkpoints.folder(runs / exp_id(STABLE), STEP)
    write_json(checkpoint / FILE, {"branches": [branch]})
    recipe: Any = load_experiment(AGAIN, "")
    with pytest.raises(ConfigError, match=r"model\.step: .*rewound to step 4"):
        continuation.check(recipe, places(tmp_path))
    write_json(checkpoint / FILE, {"branches": [{**branch, "from_step": STEP}]})
    continuation.check(recipe, places(tmp_path))


def test_changed_data_are_refused(world: Path):
    source = checkpoints.folder(world / "runs" / exp_id(STABLE), STEP)
    inputs = json.loads((source / "state.json").read_text())["inputs"]
    continuation._require_equal_inputs(source, inputs, {**inputs, "parent x/last": "new", "pretrained model": "new"})
    for name in ("data", "tokenizer", "content of toy_text"):
        with pytest.raises(RunError, match=name):
            continuation._require_equal_inputs(source, {**inputs, name: "other"}, inputs)


@pytest.mark.parametrize("change", ["moved", "replaced", "truncated"])
def test_a_checkpoint_that_changes_while_it_is_copied_is_refused(world: Path, tmp_path: Path, change: str):
    """As after a rewind of its run, which moves it, and after the training of another branch, which replaces it."""
    later = checkpoints.folder(world / "runs" / exp_id(STABLE), 12)
    source = shutil.copytree(checkpoints.folder(world / "runs" / exp_id(STABLE), STEP), tmp_path / "source")
    hashes = read_manifest(source, CheckpointError)["files"]
    if change == "truncated":
        os.truncate(source / "optimizer.safetensors", 100)
    else:
        source.rename(tmp_path / "archived")
    if change == "replaced":
        shutil.copytree(later, source)
    about = CheckpointMetadata({}, tokenizers.load(world / "data" / "toy_tokenizer"))
    with small.open_run(tmp_path, exp=AGAIN) as run:
        with pytest.raises(CheckpointError, match=f"^{source}/.*safetensors: "):
            continuation._copy(source, hashes, run, about, {"step": STEP})
        assert list((run.path / "checkpoints").iterdir()) == []


def test_files_that_are_not_in_the_manifest_are_not_copied(world: Path, tmp_path: Path):
    """A killed consolidation leaves such a file."""
    folder = tmp_path / "copy"
    shutil.copytree(world, folder)
    shutil.rmtree(folder / "runs" / exp_id(AGAIN))
    extra_file = checkpoints.folder(folder / "runs" / exp_id(STABLE), STEP) / "unlisted.safetensors"
    extra_file.write_bytes(b"half")
    assert toy.main(["-e", "again", *KEEP], GROUPS, folder) == 0
    assert not (checkpoints.folder(folder / "runs" / exp_id(AGAIN), STEP) / extra_file.name).exists()
    assert tensors(folder, AGAIN, 12) == tensors(world, AGAIN, 12)


def test_dry_run_names_the_steps_that_exist(world: Path, capsys: pytest.CaptureFixture[str]):
    groups = {"late": [override(AGAIN, {"model": ref(STABLE, step=6)})]}
    assert toy.main(["-e", "late", "--dry-run"], groups, world) == 1
    message = capsys.readouterr().err
    assert "step-00000006" in message
    assert "4, 8, 11, 12" in message
    assert "--keep_every" in message


def test_dry_run_names_the_checkpoints_that_the_parent_will_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    toy.write_data(tmp_path / "data")
    all_at_once = ["-e", "stable", "decay", "--dry-run"]
    assert toy.main([*all_at_once, "--keep_last", "1"], GROUPS, tmp_path) == 1
    assert "decay[0].model.step: 8: " in (message := capsys.readouterr().err)
    assert "--keep_every" in message
    assert toy.main([*all_at_once, "--save_every", "5"], GROUPS, tmp_path) == 1
    assert "5, 10, 12" in capsys.readouterr().err
    assert toy.main([*all_at_once, "--keep_every", "4"], GROUPS, tmp_path) == 0
    assert toy.main(all_at_once, GROUPS, tmp_path) == 0, "the newest two are steps 8 and 12"


def copy_stopped_parent(world: Path, folder: Path) -> Path:
    """A copy of the world without its children, whose parent stopped after step 8; the save directory of the parent."""
    shutil.copytree(world, folder)
    for exp in (AGAIN, DECAY, WORST):
        shutil.rmtree(folder / "runs" / exp_id(exp))
    parent = folder / "runs" / exp_id(STABLE)
    write_json(parent / "status.json", {**json.loads((parent / "status.json").read_text()), "state": "stopped"})
    for step in (11, 12):
        shutil.rmtree(checkpoints.folder(parent, step))
    return parent


def test_a_saved_checkpoint_that_the_parent_will_delete_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    parent = copy_stopped_parent(world, tmp_path / "stopped")
    together = ["-e", "stable", "decay", "--dry-run", "--keep_last", "1"]
    assert toy.main(together, GROUPS, parent.parents[1]) == 1
    assert "decay[0].model.step: 8: " in capsys.readouterr().err
    assert toy.main([*together, "--keep_every", "8"], GROUPS, parent.parents[1]) == 0
    retention.mark_continued(parent, STEP)
    assert toy.main(together, GROUPS, parent.parents[1]) == 0, "the parent keeps it for another child"
    assert toy.main([*together, "-r", "1"], GROUPS, parent.parents[1]) == 1, "the mark is deleted as well"


def test_resetting_a_finished_parent_that_will_delete_the_checkpoint_is_refused(
    world: Path, capsys: pytest.CaptureFixture[str]
):
    together = ["-e", "stable", "decay", "--dry-run", "--keep_last", "1"]
    assert toy.main(together, GROUPS, world) == 0
    assert toy.main([*together, "-r", "1"], GROUPS, world) == 1
    assert "decay[0].model.step: 8: " in capsys.readouterr().err
    assert toy.main([*together, "-r", "1", "--keep_every", "4"], GROUPS, world) == 0


def test_a_parent_that_only_evaluates_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    toy.write_data(tmp_path / "data")
    parent = {**{key: value for key, value in STABLE.items() if key != "loop"}, "evaluation": {"micro_batch": 2}}
    groups = {"both": [parent, override(STABLE, {"model": ref(parent, step=STEP)})]}
    assert toy.main(["-e", "both", "--dry-run"], groups, tmp_path) == 1
    assert "trains nothing" in capsys.readouterr().err


def test_an_unfinished_parent_retains_the_checkpoint_of_an_evaluation(world: Path, tmp_path: Path):
    parent = copy_stopped_parent(world, tmp_path / "stopped")
    evaluation = {**{key: value for key, value in AGAIN.items() if key != "loop"}, "evaluation": {"micro_batch": 2}}
    assert toy.main(["-e", "x"], {"x": [evaluation]}, parent.parents[1]) == 0
    assert retention.read_continued(parent) == [STEP]
    assert toy.main(["-e", "stable", "--log_every", "1", "--keep_last", "1"], GROUPS, parent.parents[1]) == 0
    assert checkpoints.folder(parent, STEP).exists()


def test_a_budget_counts_from_the_start_of_the_parent(tmp_path: Path):
    toy.write_data(tmp_path / "data")
    loop = {name: value for name, value in AGAIN["loop"].items() if name != "steps"}

    def check(steps: int) -> None:
        exp = {**AGAIN, "loop": {**loop, "budget": {"tokens": steps * 128}}}
        continuation.check(load_experiment(exp, ""), places(tmp_path))  # type: ignore[arg-type]

    check(STEP + 1)
    with pytest.raises(ConfigError, match=r"loop\.steps: 8"):
        check(STEP)


def test_a_run_continues_one_that_is_not_done(world: Path, tmp_path: Path):
    folder = tmp_path / "unfinished"
    shutil.copytree(world, folder)
    shutil.rmtree(folder / "runs" / exp_id(DECAY))
    parent = folder / "runs" / exp_id(STABLE)
    write_json(parent / "status.json", {**json.loads((parent / "status.json").read_text()), "state": "stopped"})
    shutil.rmtree(checkpoints.folder(parent, 12))
    assert toy.main(["-e", "decay", *KEEP], GROUPS, folder) == 0
    assert toy.rows(folder, exp_id(DECAY)) == toy.rows(world, exp_id(DECAY))
    assert toy.main(["-e", "stable", "--log_every", "1", "--keep_last", "1"], GROUPS, folder) == 0
    assert checkpoints.folder(parent, STEP).exists()
    assert not checkpoints.folder(parent, 4).exists()


@pytest.mark.slow
def test_resume_after_kills_is_bit_exact(world: Path, tmp_path: Path):
    folder = tmp_path / "killed"
    shutil.copytree(world, folder)
    run = folder / "runs" / exp_id(DECAY)
    shutil.rmtree(run)
    root = toy.project(tmp_path, f"EXP_GROUPS = {GROUPS!r}\n")
    arguments = ["-e", "decay", *KEEP]
    for _ in range(3):
        toy.kill_midway(root, arguments, folder, exp_id(DECAY))
    assert toy.run(root, arguments, folder).returncode == 0
    assert toy.rows(folder, exp_id(DECAY)) == toy.rows(world, exp_id(DECAY))
    assert tensors(folder, DECAY, 12) == tensors(world, DECAY, 12)


def mode_options(folder: Path, mode: str) -> list[str]:
    """Options of the command line for "ddp", "fsdp", "zero1", "zero2" or "zero3"."""
    if not mode.startswith("zero"):
        return {"ddp": [], "fsdp": ["--fsdp"]}[mode]
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    write_json(folder / f"{mode}.json", {"zero_optimization": {"stage": int(mode[-1])}, "train_batch_size": "auto"})
    return ["--deepspeed", str(folder / f"{mode}.json")]


@pytest.fixture(scope="module")
def trained_parents(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function from a mode to a folder with the data and the parent, trained on two processes in this mode."""

    @functools.cache
    def train(mode: str) -> Path:
        folder = tmp_path_factory.mktemp(mode)
        toy.write_data(folder / "data")
        root = toy.project(folder, f"EXP_GROUPS = {GROUPS!r}\n")
        done = toy.run(root, ["-e", "stable", *KEEP, *mode_options(folder, mode)], folder, processes=2)
        assert done.returncode == 0, done.stderr
        return folder

    return train


def file_names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parent_mode", "mode", "processes"),
    [
        *(("ddp", "ddp", 2), ("ddp", "fsdp", 2), ("fsdp", "fsdp", 2), ("fsdp", "ddp", 1)),
        *(("zero2", "zero2", 2), ("zero2", "zero2", 4), ("zero3", "zero3", 2), ("zero3", "zero3", 1)),
        pytest.param("ddp", "zero3", 2, marks=pytest.mark.matrix),
        pytest.param("fsdp", "zero2", 2, marks=pytest.mark.matrix),
        pytest.param("fsdp", "fsdp", 4, marks=pytest.mark.matrix),
        pytest.param("zero1", "zero1", 4, marks=pytest.mark.matrix),
        pytest.param("zero2", "ddp", 1, marks=pytest.mark.matrix),
        pytest.param("zero2", "fsdp", 2, marks=pytest.mark.matrix),
        pytest.param("zero2", "zero3", 2, marks=pytest.mark.matrix),
        pytest.param("zero3", "fsdp", 2, marks=pytest.mark.matrix),
        pytest.param("zero3", "zero3", 4, marks=pytest.mark.matrix),
    ],
)
def test_a_training_continues_in_another_mode_and_on_another_number_of_processes(
    trained_parents: Callable[[str], Path], tmp_path: Path, parent_mode: str, mode: str, processes: int
):
    """Bit by bit in the mode of the parent and on two processes, as the parent; else to rounding."""
    folder = tmp_path / "copy"
    shutil.copytree(trained_parents(parent_mode), folder, symlinks=True)
    parent = folder / "runs" / exp_id(STABLE)
    before = file_names(parent / "checkpoints")
    options = [*KEEP, *mode_options(folder, mode)]
    done = toy.run(folder / "project", ["-e", "again", *options], folder, processes)
    assert done.returncode == 0, done.stderr
    assert file_names(parent / "checkpoints") == before, "the parent does not change"
    rows, expected_rows = toy.rows(folder, exp_id(AGAIN)), later_rows(folder, STABLE)
    if (mode, processes) == (parent_mode, 2):
        assert rows == expected_rows
    assert [row["step"] for row in rows] == [9, 10, 11, 12]
    for name in ("train_loss", "grad_norm", "tokens"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected_rows], rel=1e-4)
