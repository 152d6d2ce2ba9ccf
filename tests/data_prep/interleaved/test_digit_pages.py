"""Pages of digits: what they say is what they show, and the splits share no image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from data_prep.interleaved import digit_pages
from src.errors import ConfigError, DataError
from src.systems.interleaved.streaming import manifest, tar_index

DIGITS: Any = load_digits()
IMAGES = (DIGITS.images * (255 / 16)).round().astype("uint8")


def test_pages_name_the_digits_of_their_images(tmp_path: Path):
    import io

    from PIL import Image

    images_by_split = {}
    for split, image_ids in (("train", range(1400)), ("val", range(1400, 1797))):
        by_pixels = {IMAGES[i].tobytes(): i for i in image_ids}
        images_by_split[split] = set()
        wide = 0
        for page in digit_pages.make_pages(IMAGES, DIGITS.target.tolist(), image_ids, 60, split):
            digits = []
            for part in page.parts:
                if part.kind == "image":
                    pixels = np.asarray(Image.open(io.BytesIO(part.content)))
                    wide += pixels.shape[1] > 8
                    for column in range(0, pixels.shape[1], 8):
                        index = by_pixels[pixels[:, column : column + 8].tobytes()]
                        images_by_split[split].add(index)
                        digits.append(int(DIGITS.target[index]))
            texts = [part.content.decode() for part in page.parts if part.kind != "image"]
            assert texts[-4:] == ["The digits are", f"{' '.join(map(str, digits))}.", "Their sum is", f"{sum(digits)}."]
            assert 1 <= sum(part.kind == "image" for part in page.parts) <= 4
        assert wide, "wide numbers are cut into tiles"
    assert not images_by_split["train"] & images_by_split["val"]


def test_two_runs_give_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("a", "b"):
        assert (
            digit_pages.main(
                ["--data_path", str(tmp_path / name), "--pages", "30", "--val_pages", "9", "--per_shard", "20"]
            )
            == 0
        )
    for split, counts in (("train", [20, 10]), ("val", [9])):
        manifests = [manifest.load(tmp_path / name / "digit_pages" / split) for name in ("a", "b")]
        assert manifests[0].shards == manifests[1].shards
        assert [shard.documents for shard in manifests[0].shards] == counts
        index = tar_index.load(manifests[0].folder / manifests[0].shards[0].url)
        assert index.tokens is not None
    capsys.readouterr()
    assert (
        digit_pages.main(["--data_path", str(tmp_path / "a"), "--pages", "31", "--val_pages", "9", "--per_shard", "20"])
        == 1
    )
    assert "pages changed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--val_pages: expected at least 1, got 0"):
        digit_pages.prepare(tmp_path / "c", val_pages=0)


def test_other_files_in_the_folder_of_the_tokenizer_are_not_replaced(tmp_path: Path):
    path = tmp_path / "digit_pages" / "tokenizer" / "notes.txt"
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(DataError, match=str(path)):
        digit_pages.prepare(tmp_path, pages=5, val_pages=5, per_shard=5, chats=False)
    assert path.exists()
