"""Fusion-in-Decoder against T5 itself for one passage, and against a loop over passages written here for several."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from src.errors import ConfigError
from src.experiments.config import Places, load
from src.experiments.interfaces import ModelConfig
from src.experiments.kinds import DECODER, FUSION_IN_DECODER
from src.experiments.registry import MODELS, bind
from src.models import lora
from src.systems.crossattn.fusion_in_decoder.config import Config
from src.systems.crossattn.fusion_in_decoder.layers import FusionInDecoder

EOS, PAD = 1, 0
START = 3  # not the padding, as in T5, so that a mix-up shows
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7, "eos_token_id": EOS, "pad_token_id": PAD}
T5 = {
    "name": "t5",
    "random": {"tokenizer": "tokenizer", "hidden_size": 16, "feed_forward_size": 24, "num_layers": 2, "num_heads": 4},
}

PARENT = {"name": "experiment", "exp_id": "0" * 32}


@pytest.fixture
def t5() -> T5ForConditionalGeneration:
    """Two layers each; weights of a visible size, so that a fault is not lost in the rounding."""
    torch.manual_seed(3)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=29, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0)
    )
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = START
    model.eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three samples with 2, 1 and 3 passages (C=3, S=5), and decoder inputs of lengths 4, 3 and 2."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([[5, 3, 0], [4, 0, 0], [2, 5, 1]])
    context_mask = torch.arange(5) < lengths[..., None]
    attention_mask = torch.arange(4) < torch.tensor([4, 3, 2])[:, None]
    input_ids = torch.randint(2, 29, (3, 4), generator=generator) * attention_mask
    input_ids[:, 0] = START
    loss_mask = attention_mask.clone()
    loss_mask[:, 0] = False
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "loss_mask": loss_mask,
        "context_ids": torch.randint(2, 29, (3, 3, 5), generator=generator) * context_mask,
        "context_mask": context_mask,
    }


def plain_states(t5: T5ForConditionalGeneration, passages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(1, P, D): each passage (S,) encoded alone and unpadded, one behind the other."""
    found = [
        t5.encoder(input_ids=ids[there][None]).last_hidden_state[0]
        for ids, there in zip(passages, mask, strict=True)
        if there.any()
    ]
    return torch.cat(found)[None]


def plain_logits(t5: T5ForConditionalGeneration, decoder_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """(T, vocabulary) of one unpadded decoder input."""
    return t5(encoder_outputs=(states,), decoder_input_ids=decoder_ids[None]).logits[0]


def one_token_at_a_time(t5: T5ForConditionalGeneration, states: torch.Tensor, steps: int) -> list[int]:
    """Greedy decoding without any cache."""
    ids = [START]
    while len(ids) <= steps and ids[-1] != EOS:
        ids.append(int(plain_logits(t5, torch.tensor(ids), states)[-1].argmax()))
    return ids


def test_with_one_passage_it_is_the_t5_itself(t5, batch):
    model, ids, mask = FusionInDecoder(t5), batch["context_ids"][:, 0], batch["context_mask"][:, 0]
    passage = {"context_ids": ids[:, None], "context_mask": mask[:, None]}
    decoder = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    shown = {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"].long()}
    expected = t5(input_ids=ids, attention_mask=mask.long(), **shown).logits
    assert torch.equal(model(**decoder, **passage), expected)
    start = {"input_ids": torch.full((3, 1), START), "attention_mask": torch.ones(3, 1, dtype=torch.bool)}
    for settings in (GREEDY, {**GREEDY, "num_beams": 3}):
        assert torch.equal(
            model.generate(**start, **passage, **settings),
            t5.generate(input_ids=ids, attention_mask=mask.long(), **settings),
        )


def test_logits_are_those_of_passages_encoded_one_by_one(t5, batch):
    model = FusionInDecoder(t5)
    logits = model(**{name: batch[name] for name in batch if name != "loss_mask"})
    picked = model(**batch)
    expected = []
    for b in range(3):
        states = plain_states(t5, batch["context_ids"][b], batch["context_mask"][b])
        decoder = batch["input_ids"][b][batch["attention_mask"][b]]
        plain = plain_logits(t5, decoder, states)
        torch.testing.assert_close(logits[b, : len(decoder)], plain, rtol=1e-5, atol=1e-5)
        expected.append(plain[:-1])
    torch.testing.assert_close(picked, torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert picked.shape == (3 + 2 + 1, 29)


def test_passages_do_not_read_each_other_but_the_decoder_reads_all(t5, batch):
    model = FusionInDecoder(t5)
    inputs = {name: batch[name] for name in batch if name != "loss_mask"}
    hidden, mask = model.encode(batch["context_ids"], batch["context_mask"])
    assert mask.tolist() == batch["context_mask"].flatten(1).tolist()
    assert (hidden[~mask] == 0).all()
    changed = batch["context_ids"].clone()
    changed[2, 1, 0] = changed[2, 1, 0] % 28 + 1
    other, _ = model.encode(changed, batch["context_mask"])
    same = (other == hidden).all(dim=-1)
    assert same[:2].all()
    assert same[2].tolist() == [True] * 5 + [False] * 5 + [True] * 5
    moved = (model(**{**inputs, "context_ids": changed}) != model(**inputs)).any(dim=-1)
    assert moved[2, :2].all()
    assert not moved[:2].any()


def test_padding_changes_nothing(t5, batch):
    """Neither empty passages nor longer ones, whatever the padded ids are."""
    model = FusionInDecoder(t5)
    wider_ids, wider_mask = torch.full((3, 5, 8), 7), torch.zeros(3, 5, 8, dtype=torch.bool)
    wider_ids[:, :3, :5] = torch.where(batch["context_mask"], batch["context_ids"], 9)
    wider_mask[:, :3, :5] = batch["context_mask"]
    wider = {**batch, "context_ids": wider_ids, "context_mask": wider_mask}
    torch.testing.assert_close(model(**wider), model(**batch), rtol=1e-5, atol=1e-5)


def test_the_order_of_passages_changes_nothing(t5, batch):
    """The decoder has no positions for what it reads."""
    model, order = FusionInDecoder(t5), torch.tensor([2, 0, 1])
    turned = {**batch, "context_ids": batch["context_ids"][:, order], "context_mask": batch["context_mask"][:, order]}
    torch.testing.assert_close(model(**turned), model(**batch), rtol=1e-5, atol=1e-5)


def test_generation_in_a_batch_is_that_of_each_sample_alone(t5, batch):
    model = FusionInDecoder(t5)
    start = {"input_ids": torch.full((3, 1), 5), "attention_mask": torch.ones(3, 1, dtype=torch.bool)}
    got = model.generate(**start, context_ids=batch["context_ids"], context_mask=batch["context_mask"], **GREEDY)
    assert got[:, 0].tolist() == [START] * 3, "whatever stood there"
    for b in range(3):
        expected = one_token_at_a_time(
            t5, plain_states(t5, batch["context_ids"][b], batch["context_mask"][b]), GREEDY["max_new_tokens"]
        )
        assert got[b, : len(expected)].tolist() == expected
        assert (got[b, len(expected) :] == PAD).all()


def test_every_weight_learns_and_no_empty_passage_is_encoded(t5, batch):
    model, encoded = FusionInDecoder(t5).train(), []
    t5.encoder.register_forward_pre_hook(
        lambda _, __, kwargs: encoded.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    model(**batch).square().sum().backward()
    assert encoded == [(6, 5)]
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]


class TestConfig:
    def test_the_base_is_built_and_tells_its_tokenizer(self, places: Places):
        config = load(Config, {"base": T5}, "model")
        config.check(places)
        model = config.build(places)
        assert model.name_or_path == str(places.data / "tokenizer")
        assert bind(MODELS, {"name": "fusion_in_decoder", "base": T5}).kind(places) == FUSION_IN_DECODER
        sizes = config.architecture(places)
        assert sizes is not None
        assert sizes.max_positions is None
        assert config.fingerprint(places) is None

    def test_a_decoder_as_base_is_refused(self):
        decoder = {
            "name": "gpt_bigcode",
            "tokenizer": "t",
            "hidden_size": 8,
            "num_layers": 1,
            "num_heads": 1,
            "max_positions": 8,
        }
        assert bind(MODELS, decoder).kind(None) == DECODER
        with pytest.raises(
            ConfigError,
            match=r"expected an encoder-decoder, such as 't5'; got 'gpt_bigcode', which is of the kind 'decoder'",
        ):
            load(Config, {"base": decoder}, "model")

    def test_a_parent_that_trained_a_decoder_is_refused_once_it_is_known(self, places: Places):
        decoder = {
            "name": "gpt_bigcode",
            "tokenizer": "t",
            "hidden_size": 8,
            "num_layers": 1,
            "num_heads": 1,
            "max_positions": 8,
        }
        parent = {"recipe": "lm", "model": decoder}
        config = load(Config, {"base": PARENT}, "model")
        known = Places(places.data, places.runs, {PARENT["exp_id"]: parent})
        with pytest.raises(
            ConfigError, match=r"fusion_in_decoder\.base: expected an encoder-decoder.*got 'experiment'"
        ):
            config.check(known)

    def test_a_parent_that_trains_nothing_is_refused(self, places: Places):
        parent = {"recipe": "fid", "model": T5, "evaluation": {"micro_batch": 1}}
        config = load(Config, {"base": PARENT}, "model")
        with pytest.raises(ConfigError, match=r"the experiment trains nothing\. Use the model that it evaluates"):
            config.check(Places(places.data, places.runs, {PARENT["exp_id"]: parent}))

    def test_adapters_go_around_it(self, places: Places, batch: dict[str, torch.Tensor]):
        wrapped = {"name": "fusion_in_decoder", "base": T5}
        adapted: Callable[..., Any] = bind(
            MODELS, {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["q", "v"], "base": wrapped}
        )
        assert isinstance(adapted, ModelConfig)
        adapted.check(places)
        model = adapted.build(places)
        learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert learned
        assert all("lora_" in name for name in learned)
        batch = {name: tensor % 20 if name.endswith("ids") else tensor for name, tensor in batch.items()}
        before = model.eval()(**batch)
        assert (
            lora.merge(model) == len(learned) // 2 == 2 * 2 + 2 * 4
        )  # q and v of encoder layers, twice of the decoder's
        torch.testing.assert_close(model(**batch), before)
        with pytest.raises(ConfigError, match="put 'lora' around 'fusion_in_decoder'"):
            load(
                Config,
                {"base": {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["q"], "base": T5}},
                "model",
            )
