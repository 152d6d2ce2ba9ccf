"""Trainings of models that read images, whoever's weights they begin with: packed pages, parts that stay, memory, going
on, exports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from data_prep.interleaved.write import Document, Part, Writing, write
from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.experiments.registry import DATASETS, MODELS, bind
from src.models.export import main as export
from src.models.load import load
from src.operations import interventions
from tests import toy
from tests.systems.interleaved.streaming import pages
from tests.systems.interleaved.train_pages import PAGES, write_data

PLAIN = override(PAGES, {"loop.steps": 8, "loop.eval_every": 4, "answers.questions": 2})
IDEFICS2 = {"max_tiles": 1, "resampler": {"tokens": 2, "num_layers": 1, "num_heads": 2}}
ONE_FRAME = {"data.images": {"style": "idefics2", "frame_size": pages.SIDE, "max_size": pages.SIDE, "image_tokens": 2}}
PARTS = {"name": "vision_language_parts", "vision": "encoder", "text": "decoder", "max_tiles": 2, "frozen": ["vision"]}
EXPERIMENTS = {
    "parts": override(PLAIN, {"model": PARTS}),
    "new_encoder": override(PLAIN, {"model": {**PARTS, "vision": PLAIN["model"]["vision"], "frozen": ["text"]}}),
    "parts_idefics2": override(PLAIN, {"model": {**PARTS, **IDEFICS2}, **ONE_FRAME}),
    "folder": override(PLAIN, {"model": {"name": "vision_language_hf", "path": "saved", "frozen": ["vision", "text"]}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages, an encoder and a decoder in folders of their own, and a whole model."""
    folder = tmp_path_factory.mktemp("vision_language")
    data = write_data(folder / "data")
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    SiglipVisionModel(SiglipVisionConfig(image_size=pages.SIDE, patch_size=4, **sizes)).save_pretrained(
        data / "encoder"
    )
    tokenizer = pages.tokenizer(images=False)
    config = LlamaConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=128, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(data / "decoder")
    tokenizer.save_pretrained(data / "decoder")
    bind(MODELS, PLAIN["model"]).build(Places(data, folder)).save_pretrained(data / "saved")
    pages.tokenizer().save_pretrained(data / "saved")
    return folder


def weights(folder: Path, exp: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs" / exp_id(exp) / "checkpoints" / "step-00000008" / "model.safetensors")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_training_resumes_and_is_exported(name: str, folder: Path, tmp_path: Path):
    exp = EXPERIMENTS[name]
    assert toy.main(["-e", "pages", "--dry-run"], {"pages": [exp]}, folder) == 0
    assert toy.main(["-e", "pages"], {"pages": [exp]}, folder) == 0
    *_, last = toy.evaluations(folder, exp_id(exp))
    assert last["val_loss"] != last["val_loss_shuffled_context"]
    trained = weights(folder, exp)
    for part, prefix in (("vision", "model.vision_model."), ("text", "model.text_model.layers.")):
        assert any(key.startswith(prefix) for key in trained) == (part not in exp["model"]["frozen"]), part
    assert any(key.startswith("model.connector.") for key in trained)

    run = folder / "runs" / exp_id(exp)
    assert interventions.main(["rewind", str(run), "--to", "4"]) == 0
    memory = ["--gradient_checkpointing", "--offload_activations"]
    assert toy.main(["-e", "pages", *memory], {"pages": [exp]}, folder) == 0
    again = weights(folder, exp)
    assert all(torch.equal(again[key], tensor) for key, tensor in trained.items()), (
        "neither the pause nor the memory changes a bit"
    )

    words = ["--data_path", str(folder / "data"), "-sb", str(folder / "runs")]
    assert export([str(run), str(tmp_path / "out"), *words]) == 0
    theirs, processor = (
        kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForImageTextToText, AutoProcessor)
    )
    ours, tokenizer = load(run, Places(folder / "data", folder / "runs"))
    assert len(processor.tokenizer) >= len(tokenizer)
    for key, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[key], tensor), key


def test_adapters_train_around_a_trained_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "data").symlink_to(folder / "data")
    lora = {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["q_proj"], "base": ref(PLAIN)}
    exp = override(PLAIN, {"model": lora, "loop.steps": 4})
    assert toy.main(["-e", "child", "--with-parents"], {"pages": [PLAIN], "child": [exp]}, tmp_path) == 0
    *_, last = toy.evaluations(tmp_path, exp_id(exp))
    assert last["val_loss"] > 0
    timings = (tmp_path / "runs" / exp_id(exp) / "perf.jsonl").read_text().splitlines()
    assert all(json.loads(line)["model_flops_per_second"] > 0 for line in timings)
    wrong = override(exp, {"data.images.image_tokens": 2})
    assert toy.main(["-e", "child", "--dry-run"], {"pages": [PLAIN], "child": [wrong]}, tmp_path) == 1
    assert (
        "frame_size is 8 and image_tokens is 2, but the model reads frames of 8 pixels a side as 1 tokens each"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_packed_pages_have_the_logits_of_single_ones(name: str, folder: Path):
    exp, places = EXPERIMENTS[name], Places(folder / "data", folder / "runs")
    torch.manual_seed(0)
    model: Any = bind(MODELS, exp["model"]).build(places).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    config = {**exp["data"], "sequence_tokens": 120, "max_frames": 30}
    data: Any = bind(DATASETS, config).build(places, pages.tokenizer(), "train", 0)
    documents = [
        i for i in range(40) if data.pieces(i) and data.pieces(i)[0].frames and data.pieces(i)[0].tokens <= 40
    ][:9]

    def logits(batch: Any, **more: Any) -> torch.Tensor:
        inputs = {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "pixel_values": batch["frames"][None],
        }
        with torch.no_grad():
            return model(**inputs, **more, use_cache=False).logits

    batch = data.collate(
        [data.sample(*[part for i in documents[first : first + 3] for part in (0, i, 0)]) for first in (0, 3, 6)]
    )
    image = batch["input_ids"] == model.config.image_token_id
    assert image.sum() == len(batch["frames"]) * exp["data"]["images"]["image_tokens"]
    assert not (batch["loss_mask"] & image).any(), "no token of an image is learned"
    packed, with_full_mask = logits(batch), logits(batch, attention_mask=torch.ones_like(batch["input_ids"]))
    largest, with_mask = 0.0, 0.0
    for place, document in enumerate(documents):
        row, offset = place // 3, sum(data.pieces(i)[0].tokens for i in documents[place // 3 * 3 : place])
        alone = data.collate([data.sample(0, document)])
        size = int(alone["attention_mask"].sum())
        expected = logits(alone)[0, :size]
        largest = max(largest, float((packed[row, offset : offset + size] - expected).abs().max()))
        with_mask = max(with_mask, float((with_full_mask[row, offset : offset + size] - expected).abs().max()))
    assert largest < 1e-5
    assert with_mask > 1e-3, "with a mask of ones beside the positions pages would read each other"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "zero3"])
@pytest.mark.parametrize("name", ["parts_idefics2", "folder"])
def test_processes_share_it(name: str, mode: str, folder: Path, tmp_path: Path):
    """One source has no image, so that one process often reads some where the other reads none."""
    if mode == "zero3":
        pytest.importorskip("deepspeed", reason="needs deepspeed")
        (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    words = ["--fsdp"] if mode == "fsdp" else ["--deepspeed", str(tmp_path / "zero3.json")]
    plain = [Document(f"{i:03}", [Part("text", b"text alone " * 5)]) for i in range(40)]
    for split in ("train", "val"):
        write(folder / "data" / "plain" / split, plain, {}, Writing(source="plain"))
    sources = {"pages": {"path": "toy_pages", "rate": 1.0}, "plain": {"path": "plain", "rate": 2.0}}
    exp = override(EXPERIMENTS[name], {"data.sources": sources, "loop.micro_batch": 1, "data.open_rows": 1})
    exp.pop("answers")
    for runs in ("alone", "shared"):
        (tmp_path / runs).mkdir()
        (tmp_path / runs / "data").symlink_to(folder / "data")
    assert toy.main(["-e", "pages"], {"pages": [exp]}, tmp_path / "alone") == 0
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'pages': [{exp!r}]}}\n")
    result = toy.finished(
        toy.command(root, ["-e", "pages", *words], tmp_path / "shared", processes=2), toy.environment(), root
    )
    assert result.returncode == 0, result.stderr[-3000:]
    scores, expected = (toy.evaluations(tmp_path / runs, exp_id(exp))[-1] for runs in ("shared", "alone"))
    for score in ("train_loss", "val_loss", "images/pages", "documents/plain"):
        assert scores[score] == pytest.approx(expected[score], rel=2e-3), score
