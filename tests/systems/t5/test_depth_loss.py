"""DEPTH's loss: weights, and a tiny T5 that learns the order of sentences from what they say."""

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

from src.experiments.config import Places, load
from src.files import new_directory
from src.systems.t5.denoising.depth import dataset
from src.systems.t5.model.masks import accept
from src.training.loss import depth_loss
from src.training.validation import measure
from tests.core.data.conftest import make_tokenizer  # noqa: F401  a fixture

NAMES = 3
CONTROLS = [
    "<|endoftext|>",
    "<|pad|>",
    *[f"<extra_id_{k}>" for k in range(9)],
    "<eosen>",
    *[f"<sent_{k}>" for k in range(NAMES)],
]


@pytest.fixture
def build(tmp_path, make_tokenizer):  # noqa: F811  the fixture
    tokenizer = make_tokenizer(CONTROLS, "<|pad|>")

    def make(split, text="Aa. Bb. Cc.", **values):
        places = Places(data=tmp_path, runs=tmp_path)
        if not (tmp_path / "c").exists():
            with new_directory(tmp_path / "c") as folder:
                for name in ("train", "val"):
                    (folder / f"{name}.jsonl").write_text((json.dumps({"text": text}) + "\n") * 48)
        sizes = {"input_tokens": 48, "target_tokens": 40, "num_sentences": NAMES, "shuffle_rate": 1.0}
        return load(dataset.Config, {"corpus": "c", **sizes, **values}, "data").build(places, tokenizer, split, 0)

    return make


def make_model(width):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": width,
        "d_kv": width // 4,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    ids: dict[str, Any] = {"pad_token_id": 1, "eos_token_id": 0, "decoder_start_token_id": 1}
    model: Any = T5ForConditionalGeneration(T5Config(vocab_size=len(CONTROLS) + 256, **sizes, **ids))
    accept(model)
    return model


def test_sentence_tokens_count_as_they_are_weighed(build):
    model = make_model(16)
    plain, weighted_data = build("train"), build("train", sentence_weight=3.0)
    samples = [plain.sample(0, i) for i in range(4)]
    batch = plain.collate(samples)
    masks = {
        "attention_mask": "encoder_mask",
        "decoder_attention_mask": "decoder_mask",
        "cross_attention_mask": "cross_mask",
    }
    ids = {name: batch[name] for name in ("input_ids", "decoder_input_ids")}
    logits = model(**ids, **{name: batch[field][:, None] for name, field in masks.items()}).logits
    each = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none", ignore_index=-100)
    is_sentence = torch.isin(
        batch["labels"].flatten(), torch.tensor([CONTROLS.index(f"<sent_{k}>") for k in range(NAMES)])
    )
    torch.testing.assert_close(depth_loss(model, batch), each.sum())
    torch.testing.assert_close(
        depth_loss(model, weighted_data.collate(samples)), each.sum() + 2 * each[is_sentence].sum()
    )
    torch.testing.assert_close(
        depth_loss(model, build("train", sentence_weight=0.0).collate(samples)), each[~is_sentence].sum()
    )
    torch.testing.assert_close(depth_loss(model, plain.sentence_targets().collate(samples)), each[is_sentence].sum())


def test_padding_changes_nothing(build):
    model, data = make_model(16), build("train")
    samples = [data.sample(0, i) for i in range(4)]
    long = build("train", fixed_length=True).collate(samples)
    assert long["input_ids"].shape[1] > data.collate(samples)["input_ids"].shape[1]
    torch.testing.assert_close(depth_loss(model, long), depth_loss(model, data.collate(samples)))


@pytest.mark.slow
def test_a_tiny_model_learns_to_put_sentences_in_order(build):
    """A model that copies the names it reads, but knows nothing of their order, has ln(3!) / 3 nats for each sentence
    token."""
    model, train, val = make_model(64), build("train", noise_density=0.0), build("val", noise_density=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80):
        batch = train.collate([train.sample(step, i) for i in range(32)])
        optimizer.zero_grad()
        (depth_loss(model, batch) / batch["loss_mask"].sum()).backward()
        optimizer.step()
    view, device = val.sentence_targets(), torch.device("cpu")
    sums = measure(model.eval(), view, depth_loss, 48, device, accuracy=True)
    assert sums.loss < math.log(math.factorial(NAMES)) / NAMES / 2
    assert sums.accuracy > 0.9
