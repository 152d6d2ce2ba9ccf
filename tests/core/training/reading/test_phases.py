"""Trainings in phases on the real loop, the second on packed documents: stops, crashes and rewinds change no bit that
they should not."""

import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.runs import ledger
from src.runs.checkpoints.retention import RotationRule
from src.runs.context import Options
from src.runs.history import rewind
from src.runs.history.branches import Branch
from src.support import distributed
from tests import toy
from tests.core.training import small
from tests.core.training.reading.test_packed_training import DATA as PACKED
from tests.core.training.reading.test_packed_training import (
    MODEL,
    PASSES,
    Crash,
    equal,
    resolved_loop,
    rows_in,
    train,
    write_data,
)

MIXTURE = {
    "name": "mixture",
    "parts": {name: {"name": "text", "corpus": name, "sequence_tokens": 16} for name in ("toy_text", "words")},
}
BOUNDARY = 6
DATA = {"name": "phases", "phases": [{"until": 0.5, "data": MIXTURE}, {"data": PACKED}]}
EXP: dict[str, Any] = {"recipe": "lm", "seed": 0, "model": MODEL, "data": DATA, "loop": resolved_loop()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a finished run that has all checkpoints, and what `train` gave."""
    folder = write_data(tmp_path_factory.mktemp("whole"))
    with small.open_run(folder, Options(keep=RotationRule(last=4))) as run:
        return folder, train(run, config=DATA)


def test_each_phase_reads_its_data_and_the_first_is_a_training_without_phases(whole: tuple[Path, Any], tmp_path: Path):
    lengths = [len(rows[0]) for rows in whole[1][2]]
    assert lengths == [16] * BOUNDARY * PASSES + [32] * BOUNDARY * PASSES
    with small.open_run(write_data(tmp_path)) as run:
        assert train(run, config=MIXTURE)[2][: BOUNDARY * PASSES] == whole[1][2][: BOUNDARY * PASSES]


@pytest.mark.parametrize("stops", [(3,), (BOUNDARY,), (BOUNDARY + 1,), (4, BOUNDARY, 8, 10)])
def test_stops_in_each_phase_and_between_them_change_no_bit(
    whole: tuple[Path, Any], tmp_path: Path, stops: tuple[int, ...]
):
    with small.open_run(write_data(tmp_path)) as run:
        for first, last in pairwise((0, *stops)):
            with pytest.raises(distributed.StopTraining) as stop:
                train(run, stop_after=last - first - 1, config=DATA)  # the step after it is finished, too
            assert stop.value.step == last
        end = train(run, config=DATA)
        starts = [event["cursor"]["phase"] for event in ledger.read(run.path) if event["event"] == "start"]
        rows = list(run.dir.scores.rows())
    assert equal(end, whole[1])
    assert rows == rows_in(whole[0])
    of_data = [{name for name in row if name.startswith(("loss/", "data/"))} for row in rows]
    assert of_data == [{"loss/toy_text", "loss/words"}] * 2 + [{"loss/phases[1]", "data/padding", "data/left_out"}] * 3
    assert end[2] == whole[1][2][stops[-1] * PASSES :]
    assert starts == [int(step >= BOUNDARY) for step in (0, *stops)]


@pytest.mark.parametrize("from_step", [3, BOUNDARY, 9])
@pytest.mark.parametrize("data", ["same", "skip:7", "reshuffle"])
def test_a_rewind_across_a_boundary_is_the_same_after_a_crash(
    whole: tuple[Path, Any], tmp_path: Path, data: str, from_step: int
):
    def rewound(name: str, crash_after: int | None) -> Any:
        shutil.copytree(whole[0], tmp_path / name)
        with small.open_run(tmp_path / name) as run:
            rewind.plan(run.path, Branch(number=1, from_step=from_step, data=data), "a test").apply()
            if crash_after is not None:
                with pytest.raises(Crash):
                    train(run, crash_after=crash_after, config=DATA)
            return train(run, config=DATA)

    expected = rewound("whole", None)
    assert equal(rewound("crashed", 4 if from_step < 9 else 2), expected)
    trunk, read = whole[1][2][from_step * PASSES :], expected[2]
    num_passes = (BOUNDARY - from_step if from_step < BOUNDARY else 12 - from_step) * PASSES
    assert (read[:num_passes] == trunk[:num_passes]) == (data == "same")
    assert (read[num_passes:] == trunk[num_passes:]) == (num_passes == len(read) or data != "skip:7"), (
        "only a skip goes on into the next phase"
    )


def test_an_experiment_in_phases_is_validated_on_the_last_phase(tmp_path: Path):
    write_data(tmp_path)
    last = {**EXP, "data": PACKED, "loop": {**EXP["loop"], "steps": 3}}
    assert toy.main(["-e", "phased", "packed"], {"phased": [EXP], "packed": [last]}, tmp_path) == 0
    rows = toy.rows(tmp_path, exp_id(EXP))
    by_source = [{name for name in row if name.startswith("loss/")} for row in rows]
    assert by_source == [{"loss/toy_text", "loss/words"}] * 2 + [{"loss/phases[1]"}] * 3
    assert rows[-1]["loss/phases[1]"] == pytest.approx(rows[-1]["train_loss"], rel=1e-5)
    (row,) = toy.rows(tmp_path, exp_id(last))
    assert rows[0].keys() >= {"val_loss"}
    assert not [name for name in rows[0] if name.startswith("val_loss/")], "the mixture is not what it ends with"
    assert rows[0]["val_loss"] == pytest.approx(row["val_loss"], rel=0.2)


def test_a_phase_without_a_step_is_found_by_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_data(tmp_path)
    assert toy.main(
        ["-e", "phased", "--dry-run", "--steps", "1"],
        {"phased": [{**EXP, "loop": {**EXP["loop"], "eval_every": 1}}]},
        tmp_path,
    )
    assert re.search(r"error: .*data\.phases\[0\]: its share of loop\.steps = 1 ", capsys.readouterr().err)
