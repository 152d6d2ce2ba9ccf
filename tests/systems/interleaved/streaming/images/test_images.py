"""Frames and tokens of images: the sizes of the specification, and traps of transformers' classes."""

import io
import pickle
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from src.errors import DataError
from src.systems.interleaved.streaming.images import FAKE, GLOBAL, Grid, ImagesConfig, ImageTokens
from src.systems.interleaved.streaming.images import IMAGE as TOKEN
from tests.systems.interleaved.streaming import pages


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("size", "most", "grid"),
    [
        ((32, 32), 32, (0, 0)),
        ((64, 32), 64, (1, 2)),
        ((100, 40), 96, (2, 3)),
        ((33, 20), 96, (2, 2)),
        ((10, 300), 96, (3, 1)),
        ((1, 5000), 96, (3, 1)),  # a side of no pixel is one frame wide
        ((5, 5), 96, (0, 0)),
    ],
)
def test_tiles_are_those_of_the_specification(size: tuple[int, int], most: int, grid: tuple[int, int]):
    config = ImagesConfig(frame_size=32, image_tokens=4, max_size=most)
    assert config.grid(*size) == grid
    frames = config.frames(encoded(Image.new("RGB", size, "red")))
    assert frames.shape == (Grid(*grid).frames, 3, 32, 32)
    assert frames.dtype == np.float32


def test_tiles_are_in_row_order_and_the_full_image_is_last():
    image = Image.new("RGB", (64, 64))
    for i, colour in enumerate(((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255))):
        image.paste(colour, (i % 2 * 32, i // 2 * 32, i % 2 * 32 + 32, i // 2 * 32 + 32))
    frames = ImagesConfig(frame_size=32, image_tokens=4, max_size=64).frames(encoded(image))
    assert [frame[:, 16, 16].tolist() for frame in frames[:4]] == [[1, -1, -1], [-1, 1, -1], [-1, -1, 1], [1, 1, 1]]
    np.testing.assert_allclose(frames[4, :, 8, 8], [1, -1, -1], atol=0.05)


def test_ids_of_tiles_are_those_of_the_specification():
    config, tokenizer = ImagesConfig(frame_size=8, image_tokens=2, max_size=16), pages.tokenizer()
    tokens = ImageTokens(config, tokenizer)

    def text(grid: Grid) -> str:
        return tokenizer.decode(tokens.token_ids(grid))

    one = f"{FAKE}{GLOBAL}{TOKEN * 2}{FAKE}"
    assert text(Grid(0, 0)) == one
    rows = [f"{FAKE}<row_{row}_col_1>{TOKEN * 2}{FAKE}<row_{row}_col_2>{TOKEN * 2}" for row in (1, 2)]
    assert text(Grid(2, 2)) == f"{rows[0]}\n{rows[1]}\n\n{one}"
    again: ImageTokens = pickle.loads(pickle.dumps(tokens))
    assert again.token_ids(Grid(1, 2)) == tokens.token_ids(Grid(1, 2))
    two = ImageTokens(ImagesConfig(style="idefics2", frame_size=8, image_tokens=2, max_size=8), tokenizer)
    assert tokenizer.decode(two.token_ids(Grid(0, 0))) == f"{FAKE}{TOKEN * 2}{FAKE}"


def test_no_image_is_a_frame_of_zeros():
    """Transformers takes a frame whose values are all zero for padding."""
    config = ImagesConfig(frame_size=8, image_tokens=1, max_size=8)
    for value in range(256):
        frames = config.frames(encoded(Image.new("L", (8, 8), value)))
        assert frames.all(), value
        np.testing.assert_allclose(frames, value * 2 / 255 - 1, atol=1e-6)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode: str):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 4, 8))
    content: Any = image.convert("LA") if mode == "LA" else image.quantize() if mode == "P" else image
    frames = ImagesConfig(frame_size=8, image_tokens=1, max_size=8).frames(encoded(content))
    assert frames[0, :, 4, 6].tolist() == [1, 1, 1]
    assert frames[0, 1, 4, 1] < 0


def test_an_image_that_is_cut_off_is_no_image():
    """Bug of m4: the rest was grey, and trained on."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(noise), "JPEG")
    config = ImagesConfig(frame_size=32, image_tokens=1, max_size=32)
    assert config.frames(whole).shape == (1, 3, 32, 32)
    for size in (0, 10, len(whole) // 2, len(whole) - 60):
        with pytest.raises(DataError, match=r"^an image cannot be decoded"):
            config.frames(whole[:size])


def test_enlarge_scales_small_images_up():
    config = ImagesConfig(frame_size=32, image_tokens=1, max_size=64, enlarge=True)
    assert config.grid(10, 10) == (2, 2)
    assert config.grid(10, 5) == (1, 2)
    assert config.frames(encoded(Image.new("RGB", (10, 5)))).shape[0] == 3


def test_sizes_must_fit():
    with pytest.raises(ValidationError, match="max_size: expected a multiple of frame_size, 32, got 40"):
        ImagesConfig(frame_size=32, image_tokens=1, max_size=40)
    with pytest.raises(ValidationError, match=r"max_size: .*idefics3"):
        ImagesConfig(style="idefics2", frame_size=32, image_tokens=1, max_size=64)
    with pytest.raises(DataError, match="the tokenizer has no token '<row_1_col_3>'"):
        ImageTokens(ImagesConfig(frame_size=8, image_tokens=1, max_size=24), pages.tokenizer())
