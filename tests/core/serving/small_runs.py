"""A small decoder and a reward model on it, trained for the tests of what serves them."""

from pathlib import Path

import torch

from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from tests import toy
from tests.systems.assistants.train_assistants import REWARD, SFT, write_data

TALKER = {name: part for name, part in override(SFT, {"loop.steps": 4}).items() if name != "answers"}
JUDGE = override(REWARD, {"model.base": ref(TALKER), "loop.steps": 4})
OTHER = override(JUDGE, {"seed": 1})
IDS = [[5, 6, 7, 8, 9], [4, 3], [9, 9, 1]]


def train(folder: Path, others: bool = False) -> Places:
    """Train the two, and OTHER where that is asked for."""
    write_data(folder / "data")
    rewards = [JUDGE, OTHER] if others else [JUDGE]
    assert toy.main(["-e", "sft", "reward"], {"sft": [TALKER], "reward": rewards}, folder) == 0
    return Places(folder / "data", folder / "runs")


def run_of(places: Places, name: str) -> Path:
    """name: "talker", "judge" or "other"."""
    return places.runs / exp_id({"talker": TALKER, "judge": JUDGE, "other": OTHER}[name])


def pad(ids: list[list[int]]) -> dict[str, torch.Tensor]:
    """As clients do."""
    longest = max(map(len, ids))
    rows = torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids])
    return {"input_ids": rows, "attention_mask": torch.tensor([[n < len(row) for n in range(longest)] for row in ids])}
