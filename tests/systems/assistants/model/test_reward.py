"""Reward models: where a reward is read from, what is trained, and what transformers reads of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from src.errors import ConfigError
from src.experiments.config import Places, Problems
from src.experiments.registry import MODELS, bind
from src.support.weights import trained_weights
from src.systems.assistants.model.classifier import sequence_classifier
from tests import toy

BASE = toy.BASE["model"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("reward")
    toy.write_data(folder / "data")
    return Places(folder / "data", folder)


def build(places: Places, **changes: Any) -> Any:
    torch.manual_seed(0)
    return bind(MODELS, {"name": "reward", "base": BASE, **changes}).build(places).eval()


def rows(lengths: list[int], pad_left: bool = False) -> dict[str, torch.Tensor]:
    """Sequences that begin alike, padded with the id 0, which they have too."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, length in enumerate(lengths):
        place = slice(max(lengths) - length, None) if pad_left else slice(length)
        ids[i, place] = torch.arange(length) * 7 % 23 * torch.tensor([n != length - 1 for n in range(length)])
        mask[i, place] = True
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_padding_changes_no_reward(places: Places, pooling: str):
    """Whatever its id: the last token of these is the padding id, too. A mean over tokens was an error of shapes
    (B17)."""
    model = build(places, pooling=pooling)
    with torch.no_grad():
        together = model(**rows([9, 4, 1]))
        alone = torch.cat([model(**rows([length])) for length in (9, 4, 1)])
    assert together.shape == (3,)
    assert torch.allclose(together, alone, atol=1e-6)
    assert len(set(together.tolist())) == 3


def test_reward_reads_the_selected_hidden_state(places: Places):
    last, mean = build(places), build(places, pooling="mean")
    batch = rows([6])
    with torch.no_grad():
        hidden = last.base(input_ids=batch["input_ids"]).last_hidden_state[0]
        assert last(**batch).item() == pytest.approx(float(hidden[-1] @ last.head.weight[0]), abs=1e-6)
        assert mean(**batch).item() == pytest.approx(float(hidden.mean(0) @ mean.head.weight[0]), abs=1e-6)


def test_adapters_and_head_are_trained(places: Places):
    model = bind(
        MODELS,
        {
            "name": "lora",
            "rank": 2,
            "alpha": 4.0,
            "target_modules": ["c_attn"],
            "base": {"name": "reward", "base": BASE},
        },
    ).build(places)
    names = trained_weights(model).keys()
    assert "head.weight" in names
    assert all("lora" in name for name in names - {"head.weight"})
    assert len(names) > 1


def test_transformers_gives_the_same_rewards(places: Places, tmp_path: Path):
    """With a padding id that no sequence has; with the end token's it would read the token before the end."""
    from transformers import AutoModelForSequenceClassification

    model = build(places)
    batch = rows([9, 4, 1])
    pad_id = model.config.vocab_size - 1
    sequence_classifier(model, pad_id).save_pretrained(tmp_path / "exported")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    ids = batch["input_ids"].masked_fill(~batch["attention_mask"], pad_id)
    with torch.no_grad():
        rewards = loaded(input_ids=ids, attention_mask=batch["attention_mask"].long()).logits[:, 0]
        assert torch.allclose(rewards, model(**batch), atol=1e-6)
    with pytest.raises(ConfigError, match="pooling 'mean': transformers"):
        sequence_classifier(build(places, pooling="mean"), pad_id)


def test_operations_are_those_of_the_body(places: Places):
    model, decoder = build(places), bind(MODELS, BASE).build(places)
    from src.support.flops import head_weights, training_flops

    batch = rows([9, 4])
    assert model.training_flops()(batch) == training_flops(decoder.config, 2, 9) - 6 * 2 * 9 * head_weights(
        decoder.config
    )


def test_the_base_must_be_a_decoder():
    lora = {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["c_attn"], "base": BASE}
    with pytest.raises(Problems, match="'lora' must wrap 'reward'"):
        bind(MODELS, {"name": "reward", "base": lora})
    with pytest.raises(Problems, match="expected a decoder"):
        bind(MODELS, {"name": "reward", "base": {"name": "reward", "base": BASE}})
