"""T5 from random weights, v1.1 and original, and from a folder: sizes, the matrix for the logits, what is refused."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from src.errors import CheckpointError, ConfigError, DataError
from src.experiments.config import Places, load
from src.models import hf, lora
from src.support.weights import load_trained, trained_weights
from src.systems.t5.denoising.depth import dataset
from src.systems.t5.model.config import Config as T5Config
from tests.core.models.conftest import VOCABULARY

SIZES: dict[str, Any] = {
    "tokenizer": "tokenizer",
    "hidden_size": 32,
    "feed_forward_size": 40,
    "num_layers": 2,
    "num_heads": 4,
}


def config(**values: Any) -> T5Config:
    return load(T5Config, values, "model")


def logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, 10, 11]])
    return model.eval()(input_ids=ids, decoder_input_ids=torch.tensor([[0, 4, 5], [0, 6, 7]])).logits


def test_v1_1_has_gates_and_a_matrix_of_its_own_for_the_logits(places: Places):
    model = config(random={**SIZES, "num_decoder_layers": 3, "head_size": 6}).build(places)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["shared.weight"] == shapes["lm_head.weight"] == (VOCABULARY, 32)
    assert shapes["encoder.block.1.layer.1.DenseReluDense.wi_1.weight"] == (40, 32)
    assert shapes["decoder.block.2.layer.1.EncDecAttention.q.weight"] == (24, 32)
    assert "encoder.block.2.layer.0.SelfAttention.q.weight" not in shapes
    assert model.config.dense_act_fn == "gelu_new"
    assert not model.config.scale_decoder_outputs
    assert (model.config.decoder_start_token_id, model.config.pad_token_id, model.config.eos_token_id) == (0, 0, 2)
    assert model.name_or_path == str(places.data / "tokenizer")


def test_the_embedding_may_have_rows_that_no_token_has(places: Places):
    model = config(random={**SIZES, "vocabulary_multiple": 64}).build(places)
    rows = -(-VOCABULARY // 64) * 64
    assert rows > VOCABULARY
    assert model.shared.weight.shape == model.lm_head.weight.shape == (rows, 32)
    assert logits(model).shape[-1] == model.config.vocab_size == rows


def test_the_original_takes_logits_from_the_scaled_embedding(places: Places):
    model = config(random={**SIZES, "version": "original"}).build(places)
    assert model.lm_head.weight is model.shared.weight
    assert model.config.scale_decoder_outputs
    assert "encoder.block.0.layer.1.DenseReluDense.wi.weight" in dict(model.named_parameters())
    before = logits(model)
    model.config.scale_decoder_outputs = False
    torch.testing.assert_close(before, logits(model) * 32**-0.5)


def test_the_loss_of_v1_1_begins_at_that_of_knowing_nothing(places: Places):
    """ln V, and half the variance of logits, which is 1. A matrix that is drawn as the embedding is gives logits of
    variance 256."""
    torch.manual_seed(0)
    found = logits(config(random={**SIZES, "hidden_size": 256}).build(places)).detach()
    assert 0.5 < found.var().item() < 2.0
    loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), torch.randint(0, VOCABULARY, (6,)))
    assert abs(loss.item() - math.log(VOCABULARY) - 0.5) < 1.0


def test_both_matrices_of_v1_1_come_back_from_a_checkpoint_and_from_a_folder(places: Places, tmp_path: Path):
    from safetensors.torch import save_file

    made = config(random=SIZES)
    model, other = made.build(places), made.build(places)
    save_file({name: tensor.clone() for name, tensor in trained_weights(model).items()}, tmp_path / "model.safetensors")
    assert not torch.equal(logits(other), logits(model))
    load_trained(other, tmp_path / "model.safetensors")
    assert torch.equal(logits(other), logits(model))
    model.save_pretrained(tmp_path / "saved")
    again = config(path=str(tmp_path / "saved")).build(places)
    assert torch.equal(logits(again), logits(model))
    assert again.lm_head.weight is not again.shared.weight


def test_random_weights_follow_the_seed_and_dropout_is_as_told(places: Places):
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(logits(config(random=SIZES).build(places)))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert dropout_rates(config(random=SIZES).build(places)) == {0.0}
    assert dropout_rates(config(random=SIZES, dropout_rate=0.25).build(places)) == {0.25}


def dropout_rates(model: Any) -> set[float]:
    layers = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
    return layers | {m.dropout for m in model.modules() if isinstance(getattr(m, "dropout", None), float)}


def test_adapters_know_its_matrices(places: Places):
    models = [config(random={**SIZES, "version": version}).build(places) for version in ("v1.1", "original")]
    assert {name.rpartition(".")[2] for model in models for name, _ in lora._matrices(model)} == set(
        lora.MATRICES["t5"]
    )


class TestPretrained:
    @pytest.fixture
    def folder(self, places: Places, tmp_path: Path) -> Path:
        """An original T5 as others have saved it, with dropout."""
        torch.manual_seed(5)
        config(random={**SIZES, "version": "original"}, dropout_rate=0.1).build(places).save_pretrained(tmp_path / "t5")
        raw = json.loads((tmp_path / "t5" / "config.json").read_text())
        (tmp_path / "t5" / "config.json").write_text(json.dumps({**raw, "n_positions": 512}))
        return tmp_path / "t5"

    def test_it_is_the_saved_one(self, folder: Path, places: Places):
        torch.manual_seed(5)
        expected = config(random={**SIZES, "version": "original"}, dropout_rate=0.1).build(places)
        model = config(path=str(folder)).build(places)
        assert torch.equal(logits(model), logits(expected))
        assert dropout_rates(model) == {0.1}
        assert dropout_rates(config(path=str(folder), dropout_rate=0.0).build(places)) == {0.0}
        assert config(path=str(folder), dtype="bfloat16").build(places).dtype == torch.bfloat16

    def test_positions_are_relative_whatever_config_json_says(self, folder: Path, places: Places):
        sizes = config(path=str(folder)).architecture(places)
        assert sizes == config(random=SIZES).architecture(places)
        assert sizes is not None
        assert (sizes.model_type, sizes.num_layers, sizes.hidden_size, sizes.max_positions) == ("t5", 2, 32, None)

    def test_its_weights_have_a_fingerprint(self, folder: Path, places: Places):
        part = config(path=str(folder))
        before = part.fingerprint(places)
        assert before == part.fingerprint(places)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        assert part.fingerprint(places) != before
        assert config(random=SIZES).fingerprint(places) is None

    def test_a_decoder_is_no_t5_and_a_t5_no_decoder(self, folder: Path, places: Places, base_of: Any, tmp_path: Path):
        base_of("gpt2").save_pretrained(tmp_path / "gpt2")
        with pytest.raises(ConfigError, match=r"gpt2: a model of type 'gpt2'; expected a T5\."):
            config(path=str(tmp_path / "gpt2")).check(places)
        with pytest.raises(ConfigError, match=r"config.json: is an encoder-decoder.*Use 't5' for a T5"):
            load(hf.Config, {"path": str(folder)}, "model").check(places)

    def test_missing_weights_are_named(self, folder: Path, places: Places):
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no weights"):
            config(path=str(folder)).check(places)


@pytest.mark.parametrize("attention", ["local", "transient-global"])
def test_a_longt5_is_read_from_a_folder(attention: str, places: Places, tmp_path: Path):
    """Guo et al. 2022: its encoder sees a neighbourhood, with transient-global attention also a summary of each
    block."""
    from transformers import LongT5Config, LongT5ForConditionalGeneration

    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
    }
    local: dict[str, Any] = {
        "local_radius": 7,
        "global_block_size": 4,
        "encoder_attention_type": attention,
        "decoder_start_token_id": 0,
    }
    saved = LongT5ForConditionalGeneration(LongT5Config(vocab_size=VOCABULARY, **sizes, **local)).eval()
    saved.save_pretrained(tmp_path / "long")
    part = config(path=str(tmp_path / "long"), dropout_rate=0.0)
    model = part.build(places).eval()
    assert torch.equal(logits(model), logits(saved))
    assert dropout_rates(model) == {0.0}
    assert {name.rpartition(".")[2] for name, _ in lora._matrices(model)} == set(lora.MATRICES["longt5"]) - {"wi"}
    sizes_known = part.architecture(places)
    assert sizes_known is not None
    assert (sizes_known.model_type, sizes_known.max_positions) == ("longt5", None)
    with pytest.raises(ConfigError, match=r"DEPTH's masks have a row for each token, and LongT5's encoder takes none"):
        load(dataset.Config, {"corpus": "x"}, "data").check_model(sizes_known)

    ids = torch.randint(4, VOCABULARY, (1, 600))
    seen = (model.encoder(ids)[0] - model.encoder(ids.index_fill(1, torch.tensor([599]), 3))[0]).abs().sum(-1)[0] > 1e-6
    assert seen[594:].all()
    assert bool(seen[:500].any()) == (attention == "transient-global")
    padded = torch.cat([ids, torch.full((1, 40), 3)], 1)
    mask = (torch.arange(640) < 600)[None]
    first, second = model.generate(ids, max_new_tokens=3), model.generate(padded, attention_mask=mask, max_new_tokens=3)
    assert torch.equal(first, second)
    torch.testing.assert_close(
        model.encoder(padded, attention_mask=mask)[0][:, :600], model.encoder(ids)[0], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model: expected either path, of pretrained weights, or random"),
        ({"path": "google/flan-t5-xl", "random": SIZES}, "model: expected either path"),
        (
            {"random": SIZES, "dtype": "bfloat16"},
            "model: dtype: it is of pretrained weights, so random ones would ignore it.",
        ),
        (
            {"random": {**SIZES, "num_heads": 5}},
            "model.random: hidden_size 32 does not divide by num_heads 5. Write head_size.",
        ),
        (
            {"random": {**SIZES, "version": "1.1"}},
            "model.random.version: unknown value '1.1'. Did you mean 'v1.1'? Known: original, v1.1.",
        ),
    ],
)
def test_config_refuses(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(**values)


def test_a_missing_tokenizer_is_named(places: Places):
    with pytest.raises(DataError, match=r"nowhere: no tokenizer here"):
        config(random={**SIZES, "tokenizer": "nowhere"}).check(places)
