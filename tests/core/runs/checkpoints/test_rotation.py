"""What a training deletes of its checkpoints: by rule, on its own branch, killed at every change of the disk, never
what another needs."""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError
from src.files import defect
from src.runs.checkpoints import checkpoints
from src.runs.checkpoints.retention import Rotation, RotationRule, mark_continued
from src.runs.context import Options

EXP = {"recipe": "toy", "seed": 0, "model": {"name": "m"}}
Losses = Mapping[int, float | None]


def save(run: Path, step: int, words: str = "weights", best: int | None = None) -> Path:
    """A checkpoint as `files.new_directory` leaves it, but for its syncs."""
    folder = checkpoints.folder(run, step)
    folder.mkdir(parents=True, exist_ok=True)
    state = json.dumps({"step": step, "selection": {"best_step": best}})
    file_facts = {}
    for name, text in {"model.safetensors": f"{words} of {step}", "state.json": state}.items():
        (folder / name).write_text(text)
        file_facts[name] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": file_facts}))
    return folder


def steps(run: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.list_all(run)]


def best_of(losses: Losses, mode: str = "min") -> int | None:
    """As training.selection has it: the first that is better than all before."""
    best_step: int | None = None
    for step, loss in sorted(losses.items()):
        if loss is not None and (
            best_step is None or (loss < losses[best_step] if mode == "min" else loss > losses[best_step])
        ):  # type: ignore[operator]
            best_step = step
    return best_step


def write_rows(run: Path, losses: Losses, upto: int) -> None:
    """Only even steps are evaluated."""
    rows = [
        {"step": step, "train_loss": 0.0} | ({} if step % 2 else {"val_loss": loss})
        for step, loss in losses.items()
        if step <= upto
    ]
    (run / "scores.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def train(
    run: Path, losses: Losses, keep: RotationRule, mode: Any = "min", words: str = "weights", first: int = 0
) -> list[int]:
    """Rows, checkpoints and rotations of the steps of `losses` from `first` on; what is left."""
    run.mkdir(parents=True, exist_ok=True)
    rotation = Rotation(run, keep, "val_loss", mode)
    for step in (step for step in losses if step >= first):
        write_rows(run, losses, step)
        best = best_of({at: loss for at, loss in losses.items() if at <= step and at % 2 == 0}, mode)
        save(run, step, words, best)
        if best is not None:
            checkpoints.mark_best(run, best)
        rotation.rotate(step, best)
    return steps(run)


FALLING = {step: 1 / step for step in range(1, 11)}
VALLEY = {1: 0.0, 2: 5.0, 3: 0.0, 4: 3.0, 5: 0.0, 6: 4.0, 7: 0.0, 8: 6.0, 9: 0.0, 10: 7.0}


@pytest.mark.parametrize(
    ("keep", "losses", "mode", "remaining"),
    [
        (RotationRule(), FALLING, "min", [9, 10]),
        (RotationRule(last=1), FALLING, "min", [10]),
        (RotationRule(last=4), FALLING, "min", [7, 8, 9, 10]),
        (RotationRule(last=99), FALLING, "min", list(range(1, 11))),
        (RotationRule(), VALLEY, "min", [4, 9, 10]),
        (RotationRule(last=1, every=3), VALLEY, "min", [3, 4, 6, 9, 10]),
        (RotationRule(best=2), VALLEY, "min", [4, 6, 9, 10]),
        (RotationRule(best=3), VALLEY, "min", [2, 4, 6, 9, 10]),
        (RotationRule(best=99), VALLEY, "min", [2, 4, 6, 8, 9, 10]),  # those between were not evaluated
        (RotationRule(last=1, best=3), VALLEY, "max", [2, 8, 10]),
        (RotationRule(last=1, every=5, best=2), VALLEY, "min", [4, 5, 6, 10]),
    ],
)
def test_the_rule_selects_checkpoints(
    tmp_path: Path, keep: RotationRule, losses: Losses, mode: str, remaining: list[int]
):
    assert train(tmp_path, losses, keep, mode) == remaining


def test_a_checkpoint_that_another_run_continues_from_is_not_deleted(tmp_path: Path):
    """The other runs start while this one trains."""
    rotation, children = Rotation(tmp_path, RotationRule(last=1), "val_loss", "min"), {3: 2, 7: 6}
    for step in range(1, 10):
        save(tmp_path, step)
        if step in children:
            mark_continued(tmp_path, children[step])
        if step > 2:
            rotation.rotate(step, None)
    assert steps(tmp_path) == [2, 6, 9]


def test_of_equals_the_earliest_is_the_better(tmp_path: Path):
    losses = {2: 1.0, 4: 1.0, 6: 1.0, 8: 2.0, 10: 2.0}
    assert train(tmp_path, losses, RotationRule(last=1, best=2)) == [2, 4, 10]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text()) == {"step": 2}


def test_a_score_that_is_not_finite_is_never_best(tmp_path: Path):
    assert train(tmp_path, {2: None, 4: 9.0, 6: None, 8: 10.0, 10: None}, RotationRule(last=1, best=3)) == [4, 8, 10]
    assert train(tmp_path / "none", {2: None, 4: None, 6: None}, RotationRule(last=1, best=2)) == [6]


def test_an_option_of_the_command_line_with_the_default_of_two_newest_and_the_best():
    assert Options().keep == RotationRule(last=2, every=None, best=1)


@pytest.mark.parametrize("settings", [{"last": 0}, {"every": 0}, {"best": 0}, {"last": -1}])
def test_numbers_that_are_too_small_are_refused(settings: dict[str, int]):
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"--keep_{name}: expected a number of at least 1, got {value}"):
        RotationRule(**settings)


def test_an_interval_at_which_no_checkpoint_is_written_is_refused():
    RotationRule().check([7])
    RotationRule(every=20).check([7, 10])
    RotationRule(every=21).check([7, 10])
    message = (
        r"--keep_every: .* every 7 and every 10 steps, not .* multiple of 25\. Take a multiple of 7 or of 10, "
        r"or change --save_every"
    )
    with pytest.raises(ConfigError, match=message) as error_info:
        RotationRule(every=25).check([10, 7])
    assert error_info.value.everywhere


def damage(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_text("")


def test_damaged_ones_do_not_count(tmp_path: Path):
    for step in (1, 2, 3, 4, 5, 6):
        save(tmp_path, step)
    for step in (2, 4, 5):
        damage(checkpoints.folder(tmp_path, step))
    (checkpoints.folder(tmp_path, 3) / "manifest.json").unlink()
    Rotation(tmp_path, RotationRule(), "val_loss", "min").rotate(6, None)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6], "1 is the one to fall back to"
    save(tmp_path, 7)
    Rotation(tmp_path, RotationRule(), "val_loss", "min").rotate(7, None)
    assert steps(tmp_path) == [6, 7]


def test_the_newest_complete_checkpoint_stays(tmp_path: Path):
    save(tmp_path, 1)
    for step in (2, 3, 4):
        damage(save(tmp_path, step))
    shutil.rmtree(checkpoints.folder(tmp_path, 4))
    Rotation(tmp_path, RotationRule(last=1), "val_loss", "min").rotate(4, None)
    assert checkpoints.newest_complete(tmp_path) == checkpoints.folder(tmp_path, 1)
    damage(checkpoints.folder(tmp_path, 1))
    Rotation(tmp_path, RotationRule(last=1), "val_loss", "min").rotate(4, None)
    assert steps(tmp_path) == [1, 2, 3]
    shutil.rmtree(tmp_path / "checkpoints")
    Rotation(tmp_path, RotationRule(last=1), "val_loss", "min").rotate(4, None)


def test_archived_checkpoints_neither_count_nor_are_deleted(tmp_path: Path):
    """Copied back by hand from a branch that was left; the reference system keeps the highest numbers, and deletes the
    branch in use."""
    for step in (80, 90):
        save(tmp_path, step, "another line")
    assert train(tmp_path, dict.fromkeys((31, 33, 35), 0.0), RotationRule()) == [33, 35, 80, 90]


def test_copies_made_by_hand_and_links_stay(tmp_path: Path):
    save(tmp_path, 1)
    shutil.copytree(checkpoints.folder(tmp_path, 1), tmp_path / "checkpoints" / "step-00000001.bak")
    checkpoints.folder(tmp_path, 1).rename(tmp_path / "elsewhere")
    checkpoints.folder(tmp_path, 1).symlink_to(tmp_path / "elsewhere")
    assert train(tmp_path, dict.fromkeys((3, 5, 7), 0.0), RotationRule()) == [1, 5, 7]
    assert defect(tmp_path / "elsewhere") is None


def test_steps_of_nine_digits_are_newer_than_steps_of_eight(tmp_path: Path):
    for step in (100_000_000, 20_000_000, 30_000_000):
        save(tmp_path, step)
    Rotation(tmp_path, RotationRule(), "val_loss", "min").rotate(100_000_000, None)
    assert steps(tmp_path) == [30_000_000, 100_000_000]


def test_damaged_scores_delete_nothing_and_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for step in (2, 4, 6):
        save(tmp_path, step)
    (tmp_path / "scores.jsonl").write_text("{\n")
    Rotation(tmp_path, RotationRule(last=1, best=2), "val_loss", "min").rotate(6, 2)
    assert steps(tmp_path) == [2, 4, 6]
    assert "scores.jsonl:1: not a row of scores" in caplog.text
    assert "Until this is fixed, fewer checkpoints are deleted." in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_failed_deletion_is_reported_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    undeletable = save(tmp_path, 1) / "stuck"
    undeletable.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(undeletable)], check=True)
    (undeletable / "file").touch()
    hidden: list[Path] = []
    try:
        assert train(tmp_path, {2: 0.0, 3: 0.0}, RotationRule()) == [2, 3]
        hidden = list((tmp_path / "checkpoints").glob(".step-00000001.*.old"))
        assert len(hidden) == 1
        assert f"{hidden[0]}: could not be deleted; retrying" in caplog.text
    finally:
        subprocess.run(["umount", str((hidden[0] if hidden else undeletable.parent) / "stuck")], check=True)
    Rotation(tmp_path, RotationRule(), "val_loss", "min").rotate(3, None)
    assert not hidden[0].exists()


CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def dies(action: Callable[[], Any], when: Callable[[str, str], bool]) -> bool:
    """Do `action` in a process that is killed just before it does what `when` says: (kind of the event, path). Whether
    it was."""
    process = os.fork()
    if process == 0:

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in {*CHANGES, "open"} and when(event, str(arguments[0])):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        action()
        os._exit(0)
    _, exit_status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(exit_status) or os.WEXITSTATUS(exit_status) == 0
    return os.WIFSIGNALED(exit_status)


def run_killed(action: Callable[[], Any], run: Path, moment: int) -> bool:
    """Do `action` in a process that is killed just before its change number `moment` of the disk; False where it made
    fewer."""
    counter = itertools.count()

    def now(event: str, where: str) -> bool:
        # What is deleted below a folder that is open is named without it.
        return event in CHANGES and (str(run) in where or not os.path.isabs(where)) and next(counter) >= moment

    return dies(action, now)


@pytest.mark.slow
def test_a_kill_at_any_write_leaves_complete_checkpoints(tmp_path: Path):
    keep, moment = RotationRule(last=2, every=4, best=2), 0

    def rotate(run: Path, step: int = 10) -> None:
        Rotation(run, keep, "val_loss", "min").rotate(step, 4)

    def make_run(run: Path) -> Path:
        for step in VALLEY:
            save(run, step)
        write_rows(run, VALLEY, 10)
        return run

    must = {4, 6, 8, 9, 10}
    names = set()
    while run_killed(lambda: rotate(run), run := make_run(tmp_path / f"{moment}"), moment):
        remaining = steps(run)
        assert must <= set(remaining)
        assert all(defect(checkpoints.folder(run, step)) is None for step in remaining)
        names.add(len(remaining))
        rotate(run)
        assert steps(run) == sorted(must)
        assert sorted(os.listdir(run / "checkpoints")) == [f"step-{step:08d}" for step in sorted(must)]
        moment += 1
    assert names == {5, 6, 7, 8, 9, 10}, "it was killed before, between and after each of the five"
    assert steps(run) == sorted(must)


@pytest.mark.parametrize("seed", range(12))
def test_a_killed_run_has_the_checkpoints_of_an_undisturbed_one(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    keep = RotationRule(rng.randrange(1, 4), rng.choice([None, 2, 3, 5]), rng.randrange(1, 4))
    losses = {step: rng.choice([None, *range(6)]) for step in range(1, rng.randrange(6, 24))}
    whole = train(tmp_path / "undisturbed", losses, keep)
    run, last = tmp_path / "disturbed", max(losses)
    run.mkdir()
    at = 0
    while at < last:
        rotation = Rotation(run, keep, "val_loss", "min")  # anew with each start
        until = rng.randrange(at, last + 3)
        for step in range(at + 1, last + 1):
            write_rows(run, losses, step)
            if step > until and rng.random() < 0.5:
                break  # killed before its checkpoint
            save(run, step)
            if step > until:
                break  # killed before its rotation
            best = best_of({one: loss for one, loss in losses.items() if one <= step and one % 2 == 0})
            rotation.rotate(step, best)
        if rng.random() < 0.3 and len(steps(run)) > 1 and steps(run)[-1] < last:
            damage(checkpoints.folder(run, steps(run)[-1]))
        newest = checkpoints.newest_complete(run)
        at = checkpoints.step_of(newest) if newest else 0
        checkpoints.set_aside_newer(run, at)
        write_rows(run, losses, at)
        if at == last:
            Rotation(run, keep, "val_loss", "min").rotate(
                at, best_of({one: loss for one, loss in losses.items() if one % 2 == 0})
            )
    assert all(defect(checkpoints.folder(run, step)) is None for step in steps(run))
    assert steps(run) == whole
