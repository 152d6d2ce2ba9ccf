"""Models that read images, from a folder or put together of two: whose weights they have, what is frozen, what their
passes cost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, SiglipConfig, SiglipModel, SiglipVisionConfig, SiglipVisionModel

from src.errors import ConfigError
from src.experiments.config import Places, Problems
from src.experiments.registry import MODELS, bind, resolved_dict
from src.models import prepared_tokenizer
from src.support.deferred import build_deferred, take_recording
from src.support.weights import load_trained, trained_weights
from src.systems.interleaved.model.flops import parameters_by_part
from src.training.loss import interleaved_lm_loss
from src.training.monitoring.flops import batch_flops
from tests.systems.interleaved.streaming import pages

SIDE = 8
RESAMPLER = {"tokens": 3, "num_layers": 2, "num_heads": 2}
RANDOM: dict[str, Any] = {
    "name": "vision_language",
    "tokenizer": "pages_tokenizer",
    "vision": {"frame_size": SIDE, "patch_size": 2, "hidden_size": 12, "num_layers": 2, "num_heads": 2},
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": 64,
}
FAMILIES = pytest.mark.parametrize("more", [{}, {"resampler": RESAMPLER}], ids=["idefics3", "idefics2"])
PARTS: dict[str, Any] = {"name": "vision_language_parts", "vision": "encoder", "text": "decoder"}
VISION: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 2,
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """A tokenizer, and folders of an encoder and of a decoder that do not know each other."""
    data = tmp_path_factory.mktemp("vision_language") / "data"
    pages.tokenizer().save_pretrained(data / "pages_tokenizer")
    torch.manual_seed(5)
    SiglipVisionModel(SiglipVisionConfig(**VISION)).save_pretrained(data / "encoder")
    text = {
        "vocab_size": 20,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    SiglipModel(SiglipConfig(vision_config=VISION, text_config=text)).save_pretrained(data / "both")
    for family in ("llama", "mistral", "qwen2"):
        write_decoder(data / ("decoder" if family == "llama" else family), family)
    return Places(data, data.parent / "runs")


def write_decoder(folder: Path, family: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = AutoConfig.for_model(
        family, vocab_size=258, eos_token_id=256, max_position_embeddings=64, tie_word_embeddings=True, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def build(raw: dict[str, Any], places: Places, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return bind(MODELS, raw).build(places).eval()


@pytest.mark.parametrize(
    "raw",
    [
        RANDOM,
        RANDOM | {"resampler": RESAMPLER},
        PARTS,
        PARTS | {"vision": "both", "dtype": "bfloat16"},
        PARTS | {"vision": RANDOM["vision"], "resampler": RESAMPLER, "text": "mistral"},
    ],
)
def test_models_built_without_weights_are_equal(places: Places, raw: dict[str, Any]):
    whole = build(raw, places)
    torch.manual_seed(0)
    model = build_deferred(lambda: bind(MODELS, raw).build(places))
    recording = take_recording(model)
    assert recording
    expected = dict(whole.named_parameters())
    assert [name for name, _ in model.named_parameters()] == [*expected]
    for name, weight in model.named_parameters():
        assert weight.is_meta
        assert (weight.dtype, weight.requires_grad) == (expected[name].dtype, expected[name].requires_grad), name
        assert torch.equal(recording.compute(weight), expected[name]), name
    for (name, buffer), (other_name, other) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert name == other_name
        assert torch.equal(buffer, other), name


def batch_of(model: Any, images: int = 2) -> dict[str, Any]:
    """One row with images of one frame each between other tokens."""
    _, tokens = frame_sizes(model)
    image_id, draw = model.config.image_token_id, torch.Generator().manual_seed(1)
    ids = [1, 2, *([image_id] * tokens + [3, 4]) * images, 5]
    row = torch.tensor([ids])
    frames = torch.randn(images, 3, SIDE, SIDE, generator=draw)
    return {
        "input_ids": row,
        "position_ids": torch.arange(len(ids))[None],
        "loss_mask": (row != image_id) & (torch.arange(len(ids)) > 0),
        "frames": frames,
    }


def sizes(config: Any, places: Places) -> tuple[int, int]:
    frames = config.frame_format(places)
    return frames.pixels, frames.tokens


def frame_sizes(model: Any) -> tuple[int, int]:
    return model.config.vision_config.image_size, model.model.image_seq_len


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    inputs = {
        "input_ids": batch["input_ids"],
        "position_ids": batch["position_ids"],
        "pixel_values": batch["frames"][None],
    }
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def all_take_part(model: Any) -> None:
    """Assert that a batch without an image gives all weights a gradient, and those that read images none but 0."""
    batch = batch_of(model, 0)
    assert not len(batch["frames"])
    interleaved_lm_loss(model.train(), batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(parameter.grad.any() for _, parameter in parameters_by_part(model)["vision"])  # pyright: ignore[reportOptionalMemberAccess]


@FAMILIES
def test_a_folder_gives_the_model_that_was_saved(more: dict[str, Any], places: Places, tmp_path: Path):
    model = build({**RANDOM, **more}, places)
    model.save_pretrained(tmp_path / "saved")
    raw = {"name": "vision_language_hf", "path": str(tmp_path / "saved")}
    again, batch = build(raw, places, seed=1), batch_of(model)
    assert torch.equal(logits(again, batch), logits(model, batch))
    for name in ("longest_sequence", "kind"):
        assert getattr(bind(MODELS, raw), name)(places) == getattr(bind(MODELS, {**RANDOM, **more}), name)(places), name
    assert sizes(bind(MODELS, raw), places) == frame_sizes(model)
    assert bind(MODELS, raw).architecture(places).num_layers == 2
    assert bind(MODELS, raw).fingerprint(places)
    all_take_part(again)


def test_a_smolvlm_is_read(places: Places, tmp_path: Path):
    """Whose class of transformers merges images in another way."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    original = build(RANDOM, places)
    text, vision = (
        original.config.text_config.to_dict(),
        original.config.vision_config.to_dict() | {"model_type": "smolvlm_vision"},
    )
    config = SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=original.config.image_token_id
    )
    model = SmolVLMForConditionalGeneration(config)
    model.load_state_dict(original.state_dict())
    model.save_pretrained(tmp_path / "saved")
    again, batch = build({"name": "vision_language_hf", "path": str(tmp_path / "saved")}, places), batch_of(original)
    assert type(again).__name__ == "SmolVLMForConditionalGeneration"
    torch.testing.assert_close(logits(again, batch), logits(original, batch))
    all_take_part(again)


@FAMILIES
@pytest.mark.parametrize("vision", ["encoder", "both"])
@pytest.mark.parametrize("text", ["decoder", "mistral", "qwen2"])
def test_two_models_keep_their_weights(more: dict[str, Any], vision: str, text: str, places: Places):
    raw = {**PARTS, "vision": vision, "text": text, **more}
    model = build(raw, places)
    pixels = torch.randn(2, 3, SIDE, SIDE)
    kind = SiglipModel if vision == "both" else SiglipVisionModel
    encoder: Any = kind.from_pretrained(places.data / vision)
    encoder = getattr(encoder, "vision_model", encoder).eval()
    with torch.no_grad():
        states, expected_states = model.model.vision_model(pixels).last_hidden_state, encoder(pixels).last_hidden_state
        torch.testing.assert_close(states, expected_states)
        ids = torch.arange(6)[None]
        decoder = AutoModelForCausalLM.from_pretrained(places.data / text).eval()
        torch.testing.assert_close(model(input_ids=ids).logits[..., :258], decoder(ids).logits)
    assert model.lm_head.weight is model.get_input_embeddings().weight, "tied, as they were"
    tokenizer = prepared_tokenizer.load(places.data / text, bind(MODELS, raw).new_tokens())
    assert model.config.text_config.vocab_size == len(tokenizer)
    assert tokenizer.decode(model.config.image_token_id) == "<image>"
    assert logits(model, batch_of(model)).isfinite().all()
    assert sizes(bind(MODELS, raw), places) == frame_sizes(model)


@FAMILIES
def test_new_encoder_on_a_pretrained_decoder(more: dict[str, Any], places: Places):
    raw = {**PARTS, "vision": RANDOM["vision"], **more}
    model, other_seed = build(raw, places), build(raw, places, seed=1)
    decoder, ids = AutoModelForCausalLM.from_pretrained(places.data / "decoder").eval(), torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits[..., :258], decoder(ids).logits)
        assert torch.equal(model(input_ids=ids).logits[..., :258], other_seed(input_ids=ids).logits[..., :258])
    pairs = zip(*(parameters_by_part(one)["vision"] for one in (model, other_seed)), strict=True)
    assert any(not torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)
    config = bind(MODELS, raw)
    config.check(places)
    assert sizes(config, places) == frame_sizes(model)
    wider = {**raw, "vision": {**RANDOM["vision"], "hidden_size": 24}}
    assert len({bind(MODELS, each).fingerprint(places) for each in (raw, wider, {**PARTS, **more})}) == 3
    all_take_part(model)
    with pytest.raises(Problems, match="frozen: 'vision'"):
        bind(MODELS, {**raw, "frozen": ["vision"]})


def test_frozen_parts_do_not_change_and_are_in_no_checkpoint(places: Places, tmp_path: Path):
    from safetensors.torch import save_file

    raw = {**PARTS, "frozen": ["vision", "text"]}
    model = build(raw, places).train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 0.5)
    interleaved_lm_loss(model, batch_of(model)).backward()
    optimizer.step()
    changed = {
        part: [not torch.equal(before[name], p) for name, p in parameters]
        for part, parameters in parameters_by_part(model).items()
    }
    assert all(changed["connector"])
    assert all(changed["embeddings"])
    assert not any(changed["vision"] + changed["text"])
    saved = trained_weights(model)
    assert not any(name.startswith(("model.vision_model", "model.text_model.layers")) for name in saved)
    save_file(saved, tmp_path / "weights")
    again = build(raw, places, seed=3)
    load_trained(again, tmp_path / "weights")
    batch = batch_of(model)
    assert torch.equal(logits(again, batch), logits(model.eval(), batch))


def test_adapters_go_around_it(places: Places, tmp_path: Path):
    build(RANDOM, places).save_pretrained(tmp_path / "saved")
    base = {"name": "vision_language_hf", "path": str(tmp_path / "saved")}
    lora = {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["q_proj", "v_proj"], "base": base}
    plain, model = build(base, places), build(lora, places)
    batch = batch_of(model)
    torch.testing.assert_close(logits(model, batch), logits(plain, batch))
    interleaved_lm_loss(model.train(), batch).backward()
    trained_names = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained_names
    assert all(".lora_" in name for name in trained_names)
    assert {name.split(".")[1] for name in trained_names} == {"vision_model", "text_model"}
    assert sizes(bind(MODELS, lora), places) == (SIDE, 4)
    assert resolved_dict(bind(MODELS, lora))["base"]["path"] == base["path"]


@FAMILIES
@pytest.mark.parametrize("images", [0, 3])
def test_operations_are_those_that_are_computed(more: dict[str, Any], images: int, places: Places):
    model = build({**RANDOM, **more}, places).train()
    check_operations(model, batch_of(model, images))


def check_operations(model: Any, batch: dict[str, Any], tolerance: float = 0.002) -> None:
    """Assert that its operations are those that PyTorch counts; which counts no backward of the fused attention on a
    CPU."""
    model.set_attn_implementation("eager")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flop_counter:
        interleaved_lm_loss(model, batch).backward()
    count = batch_flops(model)
    assert count
    assert count(batch) == pytest.approx(flop_counter.get_total_flops(), rel=tolerance)


@pytest.mark.parametrize(
    "frozen", [["vision"], ["vision", "text"], ["vision", "text", "embeddings"], ["text"], ["vision", "connector"]]
)
def test_operations_of_frozen_parts(frozen: list[str], places: Places, tmp_path: Path):
    build(RANDOM, places).save_pretrained(tmp_path / "saved")
    model = build({"name": "vision_language_hf", "path": str(tmp_path / "saved"), "frozen": frozen}, places).train()
    check_operations(model, batch_of(model), 0.012)  # what is trained lowest counts whole


def test_incompatible_parts_are_refused(places: Places, tmp_path: Path):
    for more, message in (
        ({"scale_factor": 3}, "scale_factor: expected a divisor of the 4 patches per side of a frame, got 3"),
        (
            {"scale_factor": 2, "resampler": RESAMPLER},
            "scale_factor: 2 is only for the pixel shuffle",
        ),
        (
            {"max_tiles": 2, "resampler": RESAMPLER},
            "max_tiles: 2, but with a resampler .Idefics2. images are not cut into tiles",
        ),
        (
            {"resampler": {**RESAMPLER, "num_heads": 3}},
            "resampler.num_heads: expected a divisor of hidden_size, 16, got 3",
        ),
    ):
        with pytest.raises(Problems, match=message):
            bind(MODELS, {**RANDOM, **more})
        with pytest.raises(ConfigError, match=f"model.{message}"):
            bind(MODELS, {**PARTS, **more}).check(places)
    with pytest.raises(Problems, match="vision: hidden_size: expected a multiple of num_heads 2, got 13"):
        bind(MODELS, {**RANDOM, "vision": {**RANDOM["vision"], "hidden_size": 13}})
    for sizes_of_heads in ({"hidden_size": 18}, {"num_heads": 3}):
        with pytest.raises(Problems, match="hidden_size: expected a multiple of 2 x num_heads"):
            bind(MODELS, {**RANDOM, **sizes_of_heads})
    with pytest.raises(Problems, match="frozen: 'connector': its weights are new"):
        bind(MODELS, {**PARTS, "frozen": ["connector"]})
    with pytest.raises(Problems, match="frozen: 'embeddings': the embeddings of image tokens are new"):
        bind(MODELS, {**PARTS, "frozen": ["embeddings"]})
    with pytest.raises(Problems, match="every part is frozen"):
        bind(
            MODELS, {"name": "vision_language_hf", "path": "x", "frozen": ["vision", "connector", "embeddings", "text"]}
        )
    with pytest.raises(
        ConfigError, match=r"model.vision: decoder is a 'llama'; expected one of siglip, siglip_vision_model"
    ):
        bind(MODELS, {**PARTS, "vision": "decoder"}).check(places)
    with pytest.raises(ConfigError, match=r"model.text: encoder is a 'siglip_vision_model'; expected one of llama"):
        bind(MODELS, {**PARTS, "text": "encoder"}).check(places)
    with pytest.raises(
        ConfigError, match=r"decoder: a model of type 'llama'; expected one that reads images: idefics2"
    ):
        bind(MODELS, {"name": "vision_language_hf", "path": "decoder"}).check(places)
    with pytest.raises(ConfigError, match="neither a folder nor in the local Hugging Face cache"):
        bind(MODELS, {"name": "vision_language_hf", "path": str(tmp_path / "none")}).check(places)


def test_attention_implementations_agree_to_rounding(places: Places, tmp_path: Path):
    """float32, 1e-5 of logits and gradients."""
    build(RANDOM, places).save_pretrained(tmp_path / "saved")
    results = []
    for attention in ("eager", "sdpa"):
        model = build(
            {"name": "vision_language_hf", "path": str(tmp_path / "saved"), "attention": attention}, places
        ).eval()
        parts = (model.config, model.config.text_config, model.config.vision_config)
        assert [part._attn_implementation for part in parts] == [attention] * 3
        batch = batch_of(model)
        interleaved_lm_loss(model, batch).backward()
        results.append([logits(model, batch).detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
