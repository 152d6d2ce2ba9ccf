"""Answers to padded batches beside a plain model on one row at a time, where answers have several lengths."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from src.data.text import tokenizers
from src.evaluation.config import Answering
from src.evaluation.ranking import TaskPredictor
from src.experiments.config import Places, load
from src.experiments.registry import MODELS, bind
from src.files import new_directory
from src.systems.t5.tasks import dataset
from tests import toy

LABELS = ["red", "blue blue", "green green green"]
SIZES = {"tokenizer": "toy_tokenizer", "hidden_size": 16, "feed_forward_size": 32, "num_layers": 1, "num_heads": 2}


class World:
    """Three rows of unlike lengths, and a model that knows nothing."""

    def __init__(self, folder: Path) -> None:
        toy.write_data(folder)
        with new_directory(folder / "say") as target:
            labels = f"[{', '.join(LABELS)}]"
            (target / "task.yaml").write_text(
                f"say:\n  columns: [text]\n  labels: {labels}\n  metrics: [accuracy]\n  weight: 1\n"
            )
            rows = [
                {"index": i, "text": " ".join(toy.THINGS[: 3 * i]), "label": label} for i, label in enumerate(LABELS)
            ]
            for split in ("train", "val"):
                (target / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        places = Places(folder, folder)
        torch.manual_seed(3)
        self.model = bind(MODELS, {"name": "t5", "random": SIZES}).build(places).eval()
        self.tokenizer = tokenizers.load(folder / "toy_tokenizer")
        config = load(dataset.Config, {"task": "say", "corpus": "say"}, "data")
        self.data: Any = config.build(places, self.tokenizer, "val", 0)

    def answers(self, **config: Any) -> TaskPredictor:
        """Who answers so, two rows at a time."""
        return TaskPredictor(self.model, self.tokenizer, load(Answering, config, "answers"), 2, torch.device("cpu"))

    @torch.no_grad()
    def logits(self, row: int, target: list[int]) -> torch.Tensor:
        """(T, V) of a target, given one row without padding."""
        ids = torch.tensor([self.data.sample(0, row)["inputs"]])
        return self.model(input_ids=ids, labels=torch.tensor([target])).logits[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("answers"))


@pytest.mark.parametrize("per_token", [False, True])
def test_answers_are_ranked_by_their_probability(world: World, per_token: bool):
    predictor = world.answers(by="rank", length_normalised=per_token)
    log_probabilities = predictor.log_probabilities(world.data, [0, 1, 2])
    for row in range(3):
        for number, answer in enumerate(world.data.answer_ids):
            of_tokens = world.logits(row, answer).log_softmax(-1)[range(len(answer)), answer]
            expected = of_tokens.mean() if per_token else of_tokens.sum()
            torch.testing.assert_close(log_probabilities[row, number], expected, rtol=1e-4, atol=1e-4)
    texts = [text for some in predictor.batches(world.data, range(3)) for text in some]
    assert texts == [LABELS[best] for best in log_probabilities.argmax(1)]


def test_teacher_forcing_gives_the_likeliest_token_at_each_place(world: World):
    texts = [text for some in world.answers(by="teacher_forced").batches(world.data, range(3)) for text in some]
    for row in range(3):
        ids = world.logits(row, world.data.sample(0, row)["targets"]).argmax(-1).tolist()
        end = ids.index(world.tokenizer.eos_token_id) if world.tokenizer.eos_token_id in ids else len(ids)
        assert texts[row] == str(world.tokenizer.decode(ids[:end], skip_special_tokens=True)).strip()
    assert len(set(texts)) > 1
