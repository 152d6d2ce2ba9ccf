"""Direct preference optimisation on several data sets and with told properties: each reply finds its reference."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from results.compare import main as compare
from src.errors import DataError
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.experiments.registry import DATASETS, bind
from src.systems.assistants.conversations.entries import read_entry
from tests import toy
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.train_assistants import DPO, KTO, REPLIES, REWARD, SFT, write_data

PAIRS: dict[str, Any] = {**REPLIES, "max_replies": 2}
TAGS = {"lang": "en", "quality": 0.9, "humor": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model that preferences begin with."""
    folder = tmp_path_factory.mktemp("preferences")
    write_data(folder / "data")
    rows = [json.loads(line) for line in io.StringIO((folder / "data/replies/train.jsonl").read_text())]
    tagged_rows = [{**row, "replies": [{**reply, **TAGS} for reply in row["replies"]]} for row in rows]
    talk.write_rows(folder / "data" / "tagged", {"train": tagged_rows, "val": tagged_rows[:6]})
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


@pytest.mark.parametrize(
    ("exp", "control"), [(SFT, "shuffled_answers"), (DPO, "shuffled_ranks"), (KTO, "shuffled_labels")]
)
def test_a_control_is_validated_on_the_same_data(folder: Path, exp: dict[str, Any], control: str):
    def data_of(settings: dict[str, Any]) -> Any:
        return bind(DATASETS, {**exp["data"], **settings}).build(
            Places(folder / "data", folder), talk.tokenizer(), "val", 0
        )

    plain, shuffled, shorter = data_of({}), data_of({control: True}), data_of({"sequence_tokens": 32})
    assert shuffled.fingerprint != plain.fingerprint, "a training does not resume with it"
    assert shuffled.content == plain.content
    assert shorter.content != plain.content


def test_shuffled_ranks_are_learned(folder: Path):
    """A control: half of the pairs are learned the wrong way round, and those for validation stay."""
    exps = [override(DPO, {"loop.steps": 40, "data": {**PAIRS, "shuffled_ranks": on}}) for on in (False, True)]
    plain, shuffled = (train(folder, exp) for exp in exps)
    assert compare(["-r", str(folder / "runs"), *(exp_id(exp) for exp in exps), "--metric", "val_accuracy"]) == 0
    assert plain[-1]["val_margin"] > 2 * abs(shuffled[-1]["val_margin"])
    experiment: Any = load_experiment(override(DPO, {"data.shuffled_ranks": True, "preference": {"beta": 1.0}}), "here")
    ranks = torch.tensor([0, 1, 1, 0, 2, 2])
    batch = {"ranks": ranks, "input_ids": torch.tensor([[5, 6]] * 6), "loss_mask": torch.tensor([[False, True]] * 6)}
    batch["reference_logps"] = torch.tensor([-5.0, -4.0, -3.0, -2.0, -1.0, 0.0])
    loss, named_sums = experiment.loss()(
        lambda **_: SimpleNamespace(logits=torch.zeros(6, 2, 8)), {**batch, "attention_mask": ranks >= 0}
    )
    margins = torch.tensor([1.0, -1.0])  # of what is tied there is none
    assert loss.item() == pytest.approx(-torch.nn.functional.logsigmoid(margins).sum().item())
    assert experiment.count(batch) == 2
    assert named_sums["accuracy"][0] == 1


def test_replies_that_are_cut_to_the_same_are_tied(folder: Path):
    rows = [{**talk.row("q"), "replies": [{"content": "z" * 100 + end, "rank": n} for n, end in enumerate("ab")]}]
    rows += [{**talk.row("q"), "replies": [{"content": text, "rank": n} for n, text in enumerate("ab")]}]
    talk.write_rows(folder / "data" / "long", {"train": rows, "val": rows})
    places = Places(folder / "data", folder)
    data = bind(DATASETS, {**PAIRS, "corpus": "long"}).build(places, talk.tokenizer(), "train", 0)
    batch: Any = data.collate([data.sample(0, 0), data.sample(0, 1)])
    assert batch["ranks"].tolist() == [0, 0, 0, 1]
    experiment: Any = load_experiment(DPO, "here")
    assert experiment.count(batch) == 1
    assert load_experiment(REWARD, "here").count(batch) == 1  # type: ignore[attr-defined]


def test_texts_of_replies_are_equal_in_every_epoch_without_dropout(folder: Path):
    exp = override(
        DPO,
        {
            "data.corpus": "tagged",
            "data.sequence_tokens": 90,
            "data.writing": {"tags": {"dropout": 0.0}},
            "loop.steps": 16,
        },
    )
    assert train(folder, exp)[-1]["step"] == 16


def test_a_reply_without_a_reference_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    exp = override(DPO, {"seed": 3})
    train(folder, exp)
    path = folder / "runs" / exp_id(exp) / "reference.json"
    reference = json.loads(path.read_text())
    longer = override(exp, {"loop.steps": 12})
    (folder / "runs" / exp_id(longer)).mkdir()
    (folder / "runs" / exp_id(longer) / "reference.json").write_text(json.dumps({**reference, "logps": {}}))
    assert toy.main(["-e", "x"], {"x": [longer]}, folder) == 1
    assert "reference.json has no log-probabilities of it. Delete that file in the run" in capsys.readouterr().err


def test_the_scores_of_replies_are_margins(folder: Path, capsys: pytest.CaptureFixture[str]):
    rows = [json.loads(line) for line in io.StringIO((folder / "data/replies/train.jsonl").read_text())]
    scored_rows = [
        {**row, "replies": [{**reply, "score": -3.0 * reply["rank"]} for reply in row["replies"]]} for row in rows
    ]
    talk.write_rows(folder / "data" / "scored", {"train": scored_rows, "val": scored_rows[:6]})
    exp = override(REWARD, {"data.corpus": "scored", "ranking": {"margin": "scores"}, "loop.steps": 2})
    plain = override(REWARD, {"data.corpus": "scored", "loop.steps": 2})
    assert train(folder, exp)[-1]["train_loss"] > train(folder, plain)[-1]["train_loss"] + 1.0
    del scored_rows[1]["replies"][0]["score"]
    talk.write_rows(folder / "data" / "partly", {"train": scored_rows, "val": scored_rows[:1]})
    capsys.readouterr()
    for corpus, line in (("replies", 1), ("partly", 2)):
        assert toy.main(["-e", "x", "--dry-run"], {"x": [override(exp, {"data.corpus": corpus})]}, folder) == 1
        assert f"{corpus}/train.jsonl:{line}: replies" in capsys.readouterr().err
    assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, folder) == 0


@pytest.mark.parametrize("score", [True, "5", float("nan"), 10**400])
def test_a_score_that_is_no_number_is_refused(score: Any):
    row = {**talk.row("q"), "replies": [{"content": "a", "rank": 0, "score": score}, {"content": "b", "rank": 1}]}
    with pytest.raises(DataError) as error:
        read_entry(row, "here.jsonl:3")
    assert "here.jsonl:3: replies[0]" in str(error.value)
    assert repr(score)[:40] in str(error.value)
