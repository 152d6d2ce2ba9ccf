"""Frames and tokens of images, as made by transformers' Idefics3 processor.

A large image is cut into tiles, followed by the complete image resized to one frame; a small image is one frame. Each
frame has `image_tokens` tokens `<image>` between tokens for its position.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from src.errors import DataError
from src.experiments.config import Config as StrictConfig
from src.systems.interleaved.streaming.tars.image_files import MAX_PIXELS, open_image

if TYPE_CHECKING:
    import numpy as np

FAKE, IMAGE, GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"
RESERVED = (FAKE, IMAGE, GLOBAL)
"""Texts with one of these tokens are dropped, except in conversations."""
MEAN = STD = 0.5
"""Frames are (x / 255 - MEAN) / STD.
No 8-bit value is mapped to 0, as transformers treats a frame of zeros as padding."""


class Grid(NamedTuple):
    """Rows and columns of an image's tiles; (0, 0) for an image of one frame."""

    rows: int
    columns: int

    @property
    def frames(self) -> int:
        """Number of frames: the tiles and the complete image."""
        return self.rows * self.columns + 1


class ImagesConfig(StrictConfig):
    """Conversion of images to frames and tokens. The sizes must match the model."""

    style: Literal["idefics3", "idefics2"] = "idefics3"
    """Model family, by transformers' name; sets the tokens around the frames."""
    frame_size: int = Field(gt=0)
    """Pixels per side of a frame."""
    image_tokens: int = Field(gt=0)
    """Tokens per frame."""
    max_size: int = Field(gt=0)
    """Images with a longer side above this many pixels are shrunk.
    A multiple of `frame_size`; if equal to it, no image is cut into tiles."""
    enlarge: bool = False
    """Enlarge smaller images to `max_size`, as transformers does by default."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ImagesConfig":
        if self.max_size % self.frame_size:
            raise ValueError(f"max_size: expected a multiple of frame_size, {self.frame_size}, got {self.max_size}.")
        if self.style == "idefics2" and self.max_size > self.frame_size:
            raise ValueError(
                f"max_size: {self.max_size}, but only 'idefics3' cuts images into tiles. "
                f"Set it to frame_size, {self.frame_size}."
            )
        if self.style == "idefics2" and self.enlarge:
            raise ValueError(
                "enlarge: would be ignored, as 'idefics2' resizes every image to the size of a frame. Remove it."
            )
        return self

    @property
    def tiles_per_side(self) -> int:
        """Maximum rows and maximum columns of tiles."""
        return self.max_size // self.frame_size

    def special_tokens(self) -> list[str]:
        """Tokens that the tokenizer must have."""
        count = self.tiles_per_side
        tiles = [f"<row_{row}_col_{column}>" for row in range(1, count + 1) for column in range(1, count + 1)]
        return [FAKE, IMAGE, *((GLOBAL, *(tiles if count > 1 else ())) if self.style == "idefics3" else ())]

    def grid(self, width: int, height: int) -> Grid:
        """The tiles of an image with this width and height in pixels."""
        return _grid(self._sizes(width, height)[-1], self.frame_size)

    def _sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """The (width, height) of each resizing step of an image."""
        if self.max_size == self.frame_size and not (self.enlarge and self.style == "idefics3"):
            return [(self.frame_size, self.frame_size)]
        sizes, longer = list[tuple[int, int]](), max(width, height)
        if longer > self.max_size or self.enlarge:
            aspect = width / height
            if width >= height:
                short = int(self.max_size / aspect)
                width, height = self.max_size, max(1, short + short % 2)
            else:
                short = int(self.max_size * aspect)
                width, height = max(1, short + short % 2), self.max_size
            sizes.append((width, height))
        if self.max_size == self.frame_size:
            return [*sizes, (self.frame_size, self.frame_size)]
        aspect = width / height
        if width >= height:
            width = _round_up(width, self.frame_size)
            height = _round_up(int(width / aspect), self.frame_size)
        else:
            height = _round_up(height, self.frame_size)
            width = _round_up(int(height * aspect), self.frame_size)
        return [*sizes, (width, height)]

    def frames(self, content: bytes, max_pixels: int = MAX_PIXELS) -> "np.ndarray":
        """Frames of an encoded image, (frames, 3, frame_size, frame_size) float32 from -1 to 1.
        Transparent pixels become white.

        Raises:
            ImageError: it has more than `max_pixels` pixels, or cannot be decoded.
        """
        import numpy as np
        from PIL import Image

        image = open_image(content, max_pixels)
        for size in self._sizes(*image.size):
            if size != image.size:
                image = image.resize(size, Image.Resampling.LANCZOS)
        side, grid = self.frame_size, _grid(image.size, self.frame_size)
        corners = [(column * side, row * side) for row in range(grid.rows) for column in range(grid.columns)]
        tiles = [image.crop((x, y, x + side, y + side)) for x, y in corners]
        overview = image.resize((side, side), Image.Resampling.LANCZOS) if corners else image
        pixels = np.stack([np.asarray(frame) for frame in (*tiles, overview)])
        return (pixels.transpose(0, 3, 1, 2).astype(np.float32) * np.float32(1 / 255) - np.float32(MEAN)) / np.float32(
            STD
        )


class ImageTokens:
    """Token ids of images, for one tokenizer."""

    def __init__(self, config: ImagesConfig, tokenizer: Any) -> None:
        """Raises DataError: a token is missing from the tokenizer."""
        self.config = config
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in config.special_tokens() if token not in vocabulary]
        if missing:
            raise DataError(
                f"model: the tokenizer has no token {missing[0]!r}. "
                "Check data.images.style and max_size, and that the model reads images, such as 'vision_language'."
            )
        self._ids = {token: vocabulary[token] for token in config.special_tokens()}
        self._line = tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
        self._lines = tuple(tokenizer("\n\n", add_special_tokens=False)["input_ids"])
        self._make_caches()

    def _make_caches(self) -> None:
        self.token_ids = lru_cache(4096)(self._make)
        """Grid of an image -> its token ids."""
        self.grid_and_tokens = lru_cache(4096)(self._measure)
        """(width, height) of an image -> its grid, and its number of tokens."""

    def __reduce__(self) -> Any:
        return _restore, (self.config, self._ids, self._line, self._lines)

    @property
    def shared_tokens(self) -> int:
        """Number of tokens shared by two adjacent images: Idefics2 writes one token between them, not two."""
        return int(self.config.style == "idefics2")

    @cached_property
    def image_id(self) -> int:
        """Id of `<image>`."""
        return self._ids[IMAGE]

    def _measure(self, width: int, height: int) -> tuple[Grid, int]:
        grid = self.config.grid(width, height)
        return grid, len(self.token_ids(grid))

    def _make(self, grid: Grid) -> tuple[int, ...]:
        fake, frame = self._ids[FAKE], (self._ids[IMAGE],) * self.config.image_tokens
        if self.config.style == "idefics2":
            return (fake, *frame, fake)
        complete_image = (fake, self._ids[GLOBAL], *frame, fake)
        if grid == (0, 0):
            return complete_image
        ids = list[int]()
        for row in range(1, grid.rows + 1):
            for column in range(1, grid.columns + 1):
                ids += fake, self._ids[f"<row_{row}_col_{column}>"], *frame
            ids += self._line if row < grid.rows else self._lines
        return (*ids, *complete_image)


def _restore(config: ImagesConfig, ids: dict[str, int], line: tuple[int, ...], lines: tuple[int, ...]) -> ImageTokens:
    tokens = ImageTokens.__new__(ImageTokens)
    tokens.config, tokens._ids, tokens._line, tokens._lines = config, ids, line, lines
    tokens._make_caches()
    return tokens


def _grid(size: Sequence[int], side: int) -> Grid:
    columns, rows = size[0] // side, size[1] // side
    return Grid(rows, columns) if rows * columns > 1 else Grid(0, 0)


def _round_up(pixels: int, side: int) -> int:
    return max(1, math.ceil(pixels / side)) * side
