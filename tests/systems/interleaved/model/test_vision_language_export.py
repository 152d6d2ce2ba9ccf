"""What is exported is loaded by transformers alone, whose processor makes the ids and the pixels that the model was
trained on."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from data_prep.interleaved.write import Document, Part, Writing, write
from src.data.text import tokenizers
from src.errors import ConfigError
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.registry import DATASETS, MODELS, bind, resolved_dict
from src.files import new_directory, write_json
from src.models.export import main
from src.models.load import load
from src.runs.checkpoints import checkpoints
from src.support.weights import trained_weights
from src.systems.interleaved.model.processor import read_images_config
from src.systems.interleaved.streaming.images import ImagesConfig
from tests.systems.interleaved.streaming import pages
from tests.systems.interleaved.train_pages import PAGES

SIDE = pages.SIDE
SIZES = [
    (SIDE, SIDE),
    (3, 5),
    (SIDE, SIDE // 2),
    (2 * SIDE, SIDE),
    (SIDE, 2 * SIDE),
    (2 * SIDE, 2 * SIDE),
    (11, 2 * SIDE),
    (14, 13),
]
LARGE = [*SIZES, (40, 12), (1, 60), (100, 99), (31, 57), (16, 9)]
READ = {  # how images are read, and which sizes
    "enlarged": ({"max_size": 2 * SIDE, "enlarge": True}, LARGE),
    "as_they_are": ({"max_size": 2 * SIDE}, SIZES),
    "one_frame": ({"max_size": SIDE}, LARGE),
    "enlarged_to_one_frame": ({"max_size": SIDE, "enlarge": True}, LARGE),
    "idefics2": ({"max_size": SIDE, "style": "idefics2"}, LARGE),
}


def picture(size: tuple[int, int], seed: int, mode: str = "RGB") -> bytes:
    """Noise, in an EXIF orientation by the seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], len(mode)), dtype=np.uint8)
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = seed % 8 + 1
    Image.fromarray(noise, mode).save(out, "PNG", exif=exif)
    return out.getvalue()


def write_image(path: Path, content: bytes) -> Path:
    """As a file: transformers applies the orientation of images that it opens itself."""
    path.write_bytes(content)
    return path


def page(pictures: list[bytes]) -> list[Part]:
    """Texts that follow a text or an image, with and without a space before them, and images that follow each other."""
    images = [Part("image", content, "png") for content in pictures]
    between = [part for image in images for part in (image, Part("text", b"and"))]
    return [
        Part("text", b"see"),
        *between,
        Part("text", b"more"),
        *images,
        Part("text", b" end"),
        Part("text", b"here"),
    ]


def trained(tmp_path: Path, images: dict[str, Any], begins: bool = False) -> tuple[Places, Path]:
    """A checkpoint in the folder of its run; begins: the tokenizer has a token that documents begin with."""
    places = Places(tmp_path / "data", tmp_path / "runs")
    tokenizer = pages.tokenizer()
    if begins:
        tokenizer.add_special_tokens({"bos_token": "<begin>"})
    tokenizer.save_pretrained(places.data / "pages_tokenizer")
    resampler = (
        {"max_tiles": 1, "resampler": {"tokens": 1, "num_layers": 1, "num_heads": 2}} if "style" in images else {}
    )
    exp = override(
        PAGES,
        {"data.images": {**pages.IMAGES, **images}, **{f"model.{name}": value for name, value in resampler.items()}},
    )
    torch.manual_seed(0)
    config = bind(MODELS, exp["model"])
    model: Any = config.build(places)
    for tensor in trained_weights(model).values():
        tensor += torch.randn(tensor.shape) / 16
    run = places.runs / exp_id(exp)
    with new_directory(checkpoints.folder(run, 4)) as folder:
        save_file(trained_weights(model), folder / "model.safetensors")
        write_json(folder / "model.json", resolved_dict(config))
        tokenizers.load(model.name_or_path, config.new_tokens()).save_pretrained(folder / "tokenizer")
    write_json(run / "exp_dict.json", exp)
    return places, run


def run_export(places: Places, *words: object) -> int:
    return main([*map(str, words), "--data_path", str(places.data), "-sb", str(places.runs)])


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", READ)
def test_their_processor_makes_our_ids_and_pixels_and_their_model_our_logits(kind: str, begins: bool, tmp_path: Path):
    images, sizes = READ[kind]
    places, run = trained(tmp_path, images, begins)
    assert run_export(places, run, tmp_path / "out") == 0
    processor: Any = AutoProcessor.from_pretrained(tmp_path / "out")
    theirs, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    ours, tokenizer = load(run, places)
    config = read_images_config(checkpoints.folder(run, 4))
    assert config == ImagesConfig(**{**pages.IMAGES, **images})
    read = pages.config(
        {"pages": {"path": "page"}}, images={**pages.IMAGES, **images}, sequence_tokens=400, max_frames=60
    )

    pictures = [picture(size, number) for number, size in enumerate(sizes)]
    documents = [page(pictures[first : first + 3]) for first in range(0, len(sizes), 3)]
    write(places.data / "page" / "train", [Document(f"{i}", parts) for i, parts in enumerate(documents)], {}, Writing())
    data: Any = bind(DATASETS, read).build(places, tokenizer, "train", 0)
    for number, parts in enumerate(documents):
        row = data.sample(0, number)
        ids, our_pixels = row.input_ids[:-1], np.concatenate(row.frames)
        assert row.input_ids[-1] == tokenizer.eos_token_id, "a prompt has no end"

        message_content = [
            {"type": "text", "text": part.content.decode()}
            if part.kind == "text"
            else {"type": "image", "image": str(write_image(tmp_path / f"{place}.png", part.content))}
            for place, part in enumerate(parts)
        ]
        inputs_of_processor = processor.apply_chat_template(
            [{"role": "user", "content": message_content}],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
        )
        assert processor.tokenizer.decode(inputs_of_processor["input_ids"][0]) == tokenizer.decode(ids)
        assert inputs_of_processor["input_ids"][0].tolist() == ids
        assert inputs_of_processor["pixel_values"].shape == (1, *our_pixels.shape)
        np.testing.assert_allclose(inputs_of_processor["pixel_values"][0].numpy(), our_pixels, atol=1e-6)
        with torch.no_grad():
            inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.arange(len(ids))[None]}
            our_logits = ours(**inputs, pixel_values=torch.from_numpy(our_pixels)[None]).logits
            torch.testing.assert_close(theirs.eval()(**inputs_of_processor).logits, our_logits, rtol=1e-4, atol=1e-5)


def test_exported_files_have_the_permissions_of_the_user(tmp_path: Path):
    places, run = trained(tmp_path, {})
    (tmp_path / "plain").touch()
    assert run_export(places, run, tmp_path / "out") == 0
    modes = {
        path.name: path.stat().st_mode
        for path in (*checkpoints.folder(run, 4).rglob("*"), *(tmp_path / "out").rglob("*"))
    }
    assert modes["model.safetensors"] == (tmp_path / "plain").stat().st_mode
    assert {name for name, mode in modes.items() if mode & 0o777 == 0o600} == set()


def test_it_generates(tmp_path: Path):
    places, run = trained(tmp_path, {})
    assert run_export(places, run, tmp_path / "out") == 0
    processor: Any = AutoProcessor.from_pretrained(tmp_path / "out")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    image = Image.open(io.BytesIO(picture((16, 8), 1)))
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}]
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    output_ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert output_ids.shape[0] == 1
    assert inputs["input_ids"].shape[1] < output_ids.shape[1] <= inputs["input_ids"].shape[1] + 4
    plain = processor.apply_chat_template([{"role": "user", "content": "words alone"}], add_generation_prompt=True)
    assert plain == "words alone"


def test_warning_names_the_largest_side(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    places, run = trained(tmp_path, {})
    assert run_export(places, run, tmp_path / "out") == 0
    assert "cuts an image of more than 16 pixels a side into more tiles than the model knows" in caplog.text


def test_a_checkpoint_away_from_its_run_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    places, run = trained(tmp_path, {})
    (run / "exp_dict.json").unlink()
    assert run_export(places, checkpoints.folder(run, 4), tmp_path / "out") == 1
    assert (
        "has no exp_dict.json with the image settings. Name a checkpoint in the folder of its run."
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="Name a checkpoint in the folder of its run"):
        read_images_config(checkpoints.folder(run, 4))
