"""--micro_batch: a run goes on in other pieces, as on other GPUs, and stays the run that it is."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.runs import ledger
from tests import toy
from tests.core.training.reading import test_packed_training

LOOP = {**toy.BASE["loop"], "steps": 40, "micro_batch": 4, "eval_every": 20}
INDEXED: dict[str, Any] = {**copy.deepcopy(toy.BASE), "loop": LOOP}
PACKED: dict[str, Any] = {**INDEXED, "model": test_packed_training.MODEL, "data": test_packed_training.DATA}
DROPOUT: dict[str, Any] = {**INDEXED, "model": {**INDEXED["model"], "dropout_rate": 0.1}}
GROUPS = {"indexed": [INDEXED], "packed": [PACKED], "dropout": [DROPOUT]}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["indexed", "packed"])
def test_a_run_resumes_with_another_micro_batch(tmp_path: Path, group: str):
    root, run = (
        toy.project(test_packed_training.write_data(tmp_path), f"EXP_GROUPS = {GROUPS!r}\n"),
        exp_id(GROUPS[group][0]),
    )
    words = ["-e", group, "--log_every", "2"]
    toy.kill_midway(root, words, tmp_path, run)
    assert toy.main([*words, "--micro_batch", "1"], GROUPS, tmp_path) == 0
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "data").symlink_to(tmp_path / "data")
    assert toy.main(words, GROUPS, tmp_path / "whole") == 0
    result, expected = toy.rows(tmp_path, run), toy.rows(tmp_path / "whole", run)
    assert [row["tokens"] for row in result] == [row["tokens"] for row in expected]
    for name in ("train_loss", "val_loss"):
        assert [row[name] for row in result if name in row] == pytest.approx(
            [row[name] for row in expected if name in row], rel=1e-6
        )
    assert result != expected, "another micro-batch rounds otherwise"
    starts = [event["micro_batch"] for event in ledger.read(tmp_path / "runs" / run) if event["event"] == "start"]
    assert starts == [4, 1]
    for name in ("config.json", "exp_dict.json", "checkpoints/step-00000040/config.json"):
        assert (tmp_path / "runs" / run / name).read_bytes() == (tmp_path / "whole" / "runs" / run / name).read_bytes()
    states = [
        folder / "runs" / run / "checkpoints" / "step-00000040" / "state.json"
        for folder in (tmp_path, tmp_path / "whole")
    ]
    one, other = (json.loads(path.read_text())["cursor"] for path in states)
    assert one == other
    assert (one == {}) == (group == "indexed")


def test_a_run_with_dropout_needs_its_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root, run = toy.project(test_packed_training.write_data(tmp_path), f"EXP_GROUPS = {GROUPS!r}\n"), exp_id(DROPOUT)
    words = ["-e", "dropout", "--log_every", "2"]
    toy.kill_midway(root, words, tmp_path, run)
    before = {path.name for path in (tmp_path / "runs" / run / "checkpoints").iterdir()}
    assert toy.main([*words, "--micro_batch", "2"], GROUPS, tmp_path) == 1
    assert (
        "dropout[0]: --micro_batch 2: the model has dropout, which depends on the micro-batch"
        in capsys.readouterr().err
    )
    assert {path.name for path in (tmp_path / "runs" / run / "checkpoints").iterdir()} == before
    assert toy.main([*words, "--micro_batch", "4"], GROUPS, tmp_path) == 0


@pytest.mark.parametrize(
    ("group", "number", "message"),
    [
        (
            "indexed",
            "3",
            "indexed[0]: --micro_batch 3: loop: sequences_per_step = 8 is not a multiple of micro_batch = 3",
        ),
        ("indexed", "0", "indexed[0]: --micro_batch 0: loop.micro_batch: expected a number > 0"),
        ("asked", "2", "asked[0]: --micro_batch: the experiment has no loop, so nothing is trained. Leave it out."),
    ],
)
def test_impossible_micro_batches_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], group: str, number: str, message: str
):
    experiment = {**copy.deepcopy(toy.CROSSATTN), "loop": None, "evaluation": {"micro_batch": 4}}
    assert toy.main(["-e", group, "--micro_batch", number], {**GROUPS, "asked": [experiment]}, tmp_path) == 1
    assert message in capsys.readouterr().err
