"""Checkpoints of a save directory: which count, which is last, what is kept, what a child takes from one."""

import json
import shutil
from pathlib import Path

import pytest

from src.errors import CheckpointError
from src.files import new_directory, write_json
from src.runs.checkpoints import checkpoints
from src.runs.store import SavedRun


def write(run: Path, step: int, weights: str = "w", tokenizer: str = "t") -> Path:
    final = checkpoints.folder(run, step)
    with new_directory(final) as folder:
        (folder / "model.safetensors").write_text(weights)
        (folder / "state.json").write_text(str(step))
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text(tokenizer)
    return final


def damage(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_text("")


def names(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / "checkpoints").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Done at step 4, with whole checkpoints 2 and 4."""
    run = tmp_path / ("a" * 32)
    write(run, 2)
    write(run, 4)
    write_json(run / "status.json", {"state": "done", "step": 4})
    return run


def test_the_last_is_that_of_the_last_step(run: Path):
    assert checkpoints.last(SavedRun(run)) == checkpoints.folder(run, 4)
    write(run, 6)  # by nobody that the status knows
    assert checkpoints.last(SavedRun(run)) == checkpoints.folder(run, 4)


def test_a_damaged_last_checkpoint_has_no_fallback(run: Path, caplog: pytest.LogCaptureFixture):
    damage(checkpoints.folder(run, 4))
    message = (
        rf"00000004: the last checkpoint is damaged \(.*safetensors: 0 bytes.*\)\. Start .* --exp_id {run.name} "
        rf"-r 1, or restore"
    )
    with pytest.raises(CheckpointError, match=message):
        checkpoints.last(SavedRun(run))
    assert checkpoints.newest_complete(run) == checkpoints.folder(run, 2)
    assert "step-00000004: damaged, so it is skipped" in caplog.text
    shutil.rmtree(checkpoints.folder(run, 4))
    with pytest.raises(CheckpointError, match="step-00000004: the last checkpoint is missing"):
        checkpoints.last(SavedRun(run))


@pytest.mark.parametrize(
    ("status", "message"),
    [
        ({"state": "running", "step": 4}, r"has no last checkpoint yet, as it is running, not done"),
        ({"state": "done"}, r"status\.json has no step\. Start the run again"),
    ],
)
def test_there_is_no_last_one_before_the_end(run: Path, status: dict, message: str):
    write_json(run / "status.json", status)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.last(SavedRun(run))


def test_copies_made_by_hand_are_no_checkpoints(run: Path):
    for name in ("step-00000009.bak", "step-9", "step-000000009", "step-x", "damaged-step-00000009"):
        shutil.copytree(checkpoints.folder(run, 2), run / "checkpoints" / name)
    before = names(run)
    assert checkpoints.newest_complete(run) == checkpoints.folder(run, 4)
    checkpoints.set_aside_newer(run, 4)
    assert names(run) == before


def test_skipped_checkpoints_are_renamed(run: Path, caplog: pytest.LogCaptureFixture):
    for _ in range(2):
        for step in (6, 8):
            damage(write(run, step))
        checkpoints.set_aside_newer(run, 4)
    aside = ["damaged-step-00000006", "damaged-step-00000006.1", "damaged-step-00000008", "damaged-step-00000008.1"]
    assert names(run) == [*aside, "step-00000002", "step-00000004"]
    assert "step-00000006: renamed to damaged-step-00000006.1, as the run resumes from step 4" in caplog.text
    write(run, 6)
    assert checkpoints.newest_complete(run) == checkpoints.folder(run, 6)
    checkpoints.set_aside_newer(run, 0)
    assert checkpoints.newest_complete(run) is None
    checkpoints.set_aside_newer(run / "nowhere", 0)


def test_the_best_is_marked_and_forgotten(run: Path):
    assert checkpoints.best(run) is None
    checkpoints.forget_best(run)
    checkpoints.mark_best(run, 2)
    assert checkpoints.best(run) == checkpoints.folder(run, 2)
    damage(checkpoints.folder(run, 2))
    with pytest.raises(
        CheckpointError, match=r"step-00000002: the best checkpoint is damaged \(.*\)\. Use the last one"
    ):
        checkpoints.best(run)
    checkpoints.forget_best(run)
    assert checkpoints.best(run) is None
    (run / "checkpoints" / "best.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"best\.json: expected \{\"step\": …\}, got \[\]"):
        checkpoints.best(run)


def test_the_fingerprint_is_that_of_weights_and_tokenizer(tmp_path: Path):
    prints = [
        checkpoints.fingerprint(write(tmp_path / str(i), *what))
        for i, what in enumerate([(1,), (2,), (1, "v"), (1, "w", "u")])
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert all(len(text) == 64 for text in prints)
    manifest = checkpoints.folder(tmp_path / "0", 1) / "manifest.json"
    for content, message in (
        (json.dumps({"files": []}), r"manifest\.json: not a manifest"),
        ("{", r"manifest\.json:1: not valid JSON"),
    ):
        manifest.write_text(content)
        with pytest.raises(CheckpointError, match=message):
            checkpoints.fingerprint(manifest.parent)
