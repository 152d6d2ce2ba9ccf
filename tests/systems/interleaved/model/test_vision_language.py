"""A model that reads images: packed pages do not read each other, every image counts, and every process makes the same
passes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.interleaved.write import Document, Part, Writing, write
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.registry import DATASETS, MODELS, bind
from src.training.loss import interleaved_lm_loss
from tests import toy
from tests.systems.interleaved.streaming import pages, test_streamed
from tests.systems.interleaved.train_pages import PAGES, write_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision_language")
    write_data(folder / "data")
    return folder


def build(folder: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = {**PAGES["model"], "num_layers": 2, **changes}
    return bind(MODELS, model).build(Places(folder / "data", folder / "runs")).eval()


def data_of(folder: Path, **changes: Any) -> Any:
    config = pages.config({"pages": {"path": "toy_pages"}}, **changes)
    return bind(DATASETS, config).build(Places(folder / "data", folder), pages.tokenizer(), "train", 0)


def logits(model: Any, batch: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            pixel_values=batch["frames"][None],
            use_cache=False,
            **more,
        ).logits


def packed_and_alone(model: Any, data: Any, **more: Any) -> float:
    """The largest difference between the logits of pages in rows and by themselves."""
    documents = [i for i in range(40) if data.pieces(i) and data.pieces(i)[0].frames][:12]
    keys = [[part for document in documents[i : i + 3] for part in (0, document, 0)] for i in range(0, 12, 3)]
    batch = data.collate([data.sample(*key) for key in keys])
    packed, largest = logits(model, batch, **more), 0.0
    for row in range(4):
        offset = 0
        for document in documents[3 * row : 3 * row + 3]:
            alone = data.collate([data.sample(0, document)])
            size = int(alone["attention_mask"].sum())
            difference = packed[row, offset : offset + size] - logits(model, alone)[0, :size]
            largest = max(largest, float(difference.abs().max()))
            offset += size
    return largest


def test_packed_pages_have_the_logits_of_single_ones(folder: Path):
    model, data = build(folder), data_of(folder, sequence_tokens=300, max_frames=30)
    assert packed_and_alone(model, data) < 1e-5
    mask = torch.ones(4, 300, dtype=torch.long)
    assert packed_and_alone(model, data, attention_mask=mask) > 1e-3, (
        "with a mask of ones beside the positions pages read each other"
    )


def test_gradients_do_not_depend_on_the_micro_batch(folder: Path):
    model, data = build(folder).train(), data_of(folder)
    rows = [data.sample(0, document) for document in range(6)]

    def gradients(batches: list[list[Any]]) -> list[torch.Tensor]:
        model.zero_grad()
        for batch in batches:
            interleaved_lm_loss(model, data.collate(batch)).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for one, other in zip(gradients([rows]), gradients([[row] for row in rows]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("colours", [[0, 255], [255, 0], [0, 0], [0]])
def test_a_page_of_black_and_white_counts_each_image(folder: Path, tmp_path: Path, colours: list[int]):
    """Transformers' class takes a frame whose values are all zero for padding, and then refuses the batch."""
    import io

    from PIL import Image

    parts = [Part("text", b"see")]
    for colour in colours:
        out = io.BytesIO()
        Image.new("L", (pages.SIDE, pages.SIDE), colour).save(out, "PNG")
        parts.append(Part("image", out.getvalue(), "png"))
    write(tmp_path / "data" / "toy_pages" / "train", [Document("a", [*parts, Part("text", b"end")])], {}, Writing())
    model, data = build(folder), data_of(tmp_path)
    batch = data.collate([data.sample(0, 0)])
    assert len(batch["frames"]) == len(colours)
    whole = logits(model, batch)
    for number in range(len(colours)):
        changed = {**batch, "frames": batch["frames"].clone()}
        changed["frames"][number] += 0.5
        assert not torch.equal(logits(model, changed), whole), "each image is read"


@pytest.mark.parametrize("start", [0, 7])
def test_only_frames_of_zeros_are_padding(folder: Path, start: int):
    """Also one whose only number is at the end."""
    model, data = build(folder), data_of(folder)
    page = next(i for i in range(40) if data.pieces(i) and data.pieces(i)[0].frames)
    batch = data.collate([data.sample(0, page)])
    padding = torch.zeros(1, 3, pages.SIDE, pages.SIDE)
    assert torch.equal(logits(model, {**batch, "frames": torch.cat([batch["frames"], padding])}), logits(model, batch))
    padding[0, 2, -1, start] = 0.5
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        logits(model, {**batch, "frames": torch.cat([batch["frames"], padding])})


def test_a_batch_without_images_passes_through_the_encoder(folder: Path, tmp_path: Path):
    write(tmp_path / "data" / "toy_pages" / "train", [Document("a", [Part("text", b"no image here")])], {}, Writing())
    model, data = build(folder).train(), data_of(tmp_path)
    batch = data.collate([data.sample(0, 0)])
    assert batch["frames"].shape == (0, 3, pages.SIDE, pages.SIDE)
    passes: list[int] = []
    model.model.vision_model.register_forward_hook(lambda *arguments: passes.append(1))
    loss = interleaved_lm_loss(model, batch)
    loss.backward()
    assert passes == [1]
    seen = [parameter.grad for parameter in model.model.vision_model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in seen), "and nothing is learned from it"
    text: Any = model.model.text_model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    )
    assert torch.equal(
        model.lm_head(text.last_hidden_state),
        logits(model, {**batch, "frames": torch.ones(1, 3, pages.SIDE, pages.SIDE)}),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replicated", "fsdp", "zero3"])
def test_processes_with_and_without_images_end(tmp_path: Path, mode: str):
    """One source has no image, so that micro-batches of one row often have none while those of the other process do."""
    write_data(tmp_path / "data")
    plain = [Document(f"{i:03}", [Part("text", b"text alone " * 5)]) for i in range(40)]
    write(tmp_path / "data" / "plain" / "train", plain, {}, Writing(source="plain"))
    write(tmp_path / "data" / "plain" / "val", plain[:8], {}, Writing(source="plain"))
    sources = {"pages": {"path": "toy_pages", "rate": 1.0}, "plain": {"path": "plain", "rate": 2.0}}
    exp = override(
        PAGES,
        {"data.sources": sources, "loop.steps": 12, "loop.micro_batch": 1, "loop.eval_every": 6, "data.open_rows": 1},
    )
    exp.pop("answers")
    data: Any = bind(DATASETS, exp["data"]).build(Places(tmp_path / "data", tmp_path), pages.tokenizer(), "train", 0)
    read = [[bool(data.sample(*key).frames) for key in step.keys] for step in test_streamed.steps_of(data, 12)]
    assert sum(first != other for step in read for first, other in zip(step[::2], step[1::2], strict=True)) >= 5, (
        "one process alone has images"
    )
    words = {"replicated": [], "fsdp": ["--fsdp"], "zero3": ["--deepspeed", str(tmp_path / "zero3.json")]}[mode]
    if mode == "zero3":
        pytest.importorskip("deepspeed", reason="needs deepspeed")
        (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'pages': [{exp!r}]}}\n")
    result = toy.finished(toy.command(root, ["-e", "pages", *words], tmp_path, processes=2), toy.environment(), root)
    assert result.returncode == 0, result.stderr[-3000:]
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "data").symlink_to(tmp_path / "data")
    assert toy.main(["-e", "pages"], {"pages": [exp]}, tmp_path / "alone") == 0
    scores, expected = (toy.evaluations(where, exp_id(exp))[-1] for where in (tmp_path, tmp_path / "alone"))
    for name in ("train_loss", "val_loss", "images/pages", "documents/plain", "data/padding"):
        assert scores[name] == pytest.approx(expected[name], rel=2e-3), name
