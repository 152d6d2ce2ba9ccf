"""Direct preference optimisation on several data sets and with told properties: each reply finds its reference."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from src.experiments.grid import override
from src.experiments.identity import exp_id
from tests import toy
from tests.data.conversations import talk
from tests.recipes.train_assistants import DPO, REPLIES, SFT, write_data

PAIRS: dict[str, Any] = {**REPLIES, "max_replies": 2}
TOLD = {"lang": "en", "quality": 0.9, "humor": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model that preferences begin with."""
    folder = tmp_path_factory.mktemp("preferences")
    write_data(folder / "data")
    rows = [json.loads(line) for line in io.StringIO((folder / "data/replies/train.jsonl").read_text())]
    tagged = [{**row, "replies": [{**reply, **TOLD} for reply in row["replies"]]} for row in rows]
    talk.write_rows(folder / "data" / "tagged", {"train": tagged, "val": tagged[:6]})
    assert toy.main(["-e", "sft"], {"sft": [SFT]}, folder) == 0
    return folder


def train(folder: Path, exp: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of scores."""
    assert toy.main(["-e", "x"], {"x": [exp]}, folder) == 0
    return toy.evaluations(folder, exp_id(exp))


def test_preferences_of_several_data_sets(folder: Path):
    """Of a mixture, each part with its scores."""
    parts = {"a": PAIRS, "b": {**PAIRS, "min_prompt_tokens": 8}}
    rows = train(folder, override(DPO, {"data": {"name": "mixture", "parts": parts}}))
    assert {"val_accuracy/a", "val_margin/b"} <= rows[-1].keys()
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]


def test_what_is_told_of_replies_is_the_same_in_every_epoch_where_nothing_is_dropped(folder: Path):
    exp = override(DPO, {"data.corpus": "tagged", "data.sequence_tokens": 90, "data.writing": {"tags": {"dropout": 0.0}}, "loop.steps": 16})
    assert train(folder, exp)[-1]["step"] == 16


def test_a_reply_without_a_reference_is_told(folder: Path, capsys: pytest.CaptureFixture[str]):
    exp = override(DPO, {"seed": 3})
    train(folder, exp)
    path = folder / "runs" / exp_id(exp) / "reference.json"
    kept = json.loads(path.read_text())
    longer = override(exp, {"loop.steps": 12})
    (folder / "runs" / exp_id(longer)).mkdir()
    (folder / "runs" / exp_id(longer) / "reference.json").write_text(json.dumps({**kept, "logps": {}}))
    assert toy.main(["-e", "x"], {"x": [longer]}, folder) == 1
    assert "reference.json has no log-probabilities of it. Delete that file of the run" in capsys.readouterr().err
