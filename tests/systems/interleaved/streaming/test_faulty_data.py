"""Data that are not what they were, or never right: what is refused, what is passed over, and that nothing else is
lost."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from data_prep.interleaved.write import Document, Part, Writing, write
from src.errors import ConfigError, DataError
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.arrangement import JoinedSources, Source
from src.systems.interleaved.streaming.images import ImagesConfig
from src.systems.interleaved.streaming.quarantine import FILE
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.texts import TextTokens
from tests.systems.interleaved.streaming import pages
from tests.systems.interleaved.streaming.test_streamed import BOTH, TOKENIZER, damage, open_data, steps_of, write_one


def change_manifest(folder: Path, **changes: Any) -> manifest.Manifest:
    """A manifest whose first shard is changed."""
    path = folder / manifest.NAME
    raw = json.loads(path.read_text())
    raw["shards"][0] |= changes
    path.write_text(json.dumps(raw))
    return manifest.load(folder)


def test_missing_tar_stops_planning(tmp_path: Path):
    """Its documents are not taken for such as have no text."""
    listing = pages.write_pages(tmp_path / "pages" / "train", 60, with_counts=False)
    (listing.folder / listing.shards[1].url).unlink()
    with pytest.raises(DataError, match="cannot be opened"):
        steps_of(open_data(tmp_path), 20)


def test_only_the_part_of_a_document_that_is_bad_is_lost(tmp_path: Path):
    image = Part("image", pages.picture(5), "png")
    folder = write_one(tmp_path, [image, Part("text", b"a" * 60), Part("text", b"b" * 60)])
    damage(folder, 0)
    data = open_data(folder, errors={"max_documents": 1.0})
    rows = [data.sample(0, 0, place) for place in range(len(data.pieces(0)))]
    assert [row.counts[0][-1] for row in rows] == [1, 0]
    assert "b" * 60 in TOKENIZER.decode(rows[1].input_ids)
    assert not any(rows[0].loss_mask)


def test_a_quarantine_of_too_many_is_refused_when_it_is_opened(tmp_path: Path):
    pages.write_pages(tmp_path / "pages" / "train", 60)
    record = {"source": "pages", "shard": "shard-00000.tar", "piece": 0, "offset": 0, "reason": "?"}
    (tmp_path / FILE).write_text("".join(json.dumps({**record, "document": i}) + "\n" for i in range(2)))
    with pytest.raises(
        DataError,
        match=r"quarantine\.jsonl\. 2 documents of 60 cannot be read, more than data\.errors\.max_documents allows",
    ):
        open_data(tmp_path).quarantine.open(tmp_path)


def test_record_cut_by_a_kill_is_rewritten(tmp_path: Path):
    pages.write_pages(tmp_path / "pages" / "train", 60)
    data = open_data(tmp_path)
    document_number = next(i for i in range(60) if data.pieces(i)[0].frames)
    damage(tmp_path, document_number)
    (tmp_path / FILE).write_text('{"source": "pag')
    data = open_data(tmp_path)
    data.quarantine.open(tmp_path)
    data.sample(0, document_number)
    cut_line, whole = (tmp_path / FILE).read_text().splitlines()
    assert (cut_line, json.loads(whole)["document"]) == ('{"source": "pag', document_number % 25)
    again = open_data(tmp_path)
    again.quarantine.open(tmp_path)
    assert again.is_unreadable(document_number, 0)


def test_a_success_ends_a_row_of_failures(tmp_path: Path):
    pages.write_pages(tmp_path / "pages" / "train", 60)
    data = open_data(tmp_path)
    bad = [i for i in range(60) if data.pieces(i)[0].frames][:4]
    for document_number in bad:
        damage(tmp_path, document_number)
    good = next(i for i in range(60) if i not in bad)
    data = open_data(tmp_path, errors={"max_documents": 1.0, "max_consecutive": 3})
    for document_number in (*bad[:2], good, *bad[2:]):
        data.sample(0, document_number)
    data = open_data(tmp_path, errors={"max_documents": 1.0, "max_consecutive": 3})
    for document_number in bad[:2]:
        data.sample(0, document_number)
    with pytest.raises(DataError, match="None of 3 documents in a row"):
        data.sample(0, bad[2])


def test_a_shard_that_is_passed_over_is_so_after_a_restart(tmp_path: Path):
    listing = pages.write_pages(tmp_path / "pages" / "train", 60)
    tar = listing.folder / listing.shards[0].url
    tar.rename(tmp_path / "kept")
    errors = {"unavailable_shard": "skip_shard"}
    data = open_data(tmp_path, errors=errors)
    data.quarantine.open(tmp_path)
    assert data.sample(0, 3).counts[0][-1] == 1
    (tmp_path / "kept").rename(tar)
    again = open_data(tmp_path, errors=errors)
    again.quarantine.open(tmp_path)
    assert again.sample(0, 4).counts[0][-1] == 1, "all documents of the shard, though it is back"
    assert again.sample(0, 30).counts[0][-1] == 0


def test_the_index_must_be_the_one_that_is_listed(tmp_path: Path):
    """Rows are planned by it alone."""
    listing = pages.write_pages(tmp_path / "pages" / "train", 60)
    index = listing.folder / listing.shards[0].index
    with tar_index.open_tar(listing.folder / listing.shards[0].url) as tar:
        tar_index.save(build(tar), listing.folder / listing.shards[0].url)  # without counts of tokens
    with pytest.raises(DataError, match=r"not the index that shards\.json lists"):
        open_data(tmp_path).pieces(0)
    before = open_data(tmp_path).fingerprint
    change_manifest(listing.folder, index_digest=tar_index.digest_of(index))
    assert open_data(tmp_path).fingerprint != before
    change_manifest(listing.folder, documents=24)
    with pytest.raises(DataError, match=r"has 25 documents, but shards\.json lists 24"):
        open_data(tmp_path).pieces(0)


@pytest.mark.parametrize("parts", [[("image", pages.picture(5, (16, 8)))], [("text", b"abcd")]])
def test_part_that_differs_from_the_index_is_bad(tmp_path: Path, parts: list[Any]):
    """An image of another size, or a text of other tokens, would move what comes after it."""
    kind, content = parts[0]
    document = Document("a", [Part(kind, content, "png" if kind == "image" else ""), Part("text", b"x")])
    write(tmp_path / "pages" / "train", [document], {}, Writing(texts=TextTokens(TOKENIZER)))
    data = open_data(tmp_path)
    index = data.documents[0]._index(0)
    if kind == "image":
        index.parts["width"][0] = 8
    else:
        assert index.tokens is not None
        index.tokens[0] = 3
    row = data.sample(0, 0)
    assert row.counts[0][-1] == 1
    assert len(row.input_ids) == data.pieces(0)[0].tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": "25"},
        {"documents": -1},
        {"bytes": 1.5},
        {"bytes": True},
        {"url": 3},
        {"url": ""},
        {"sha256": 7},
        {"more": 1},
    ],
)
def test_lists_must_be_of_texts_and_numbers(tmp_path: Path, changes: dict[str, Any]):
    listing = pages.write_pages(tmp_path, 60)
    with pytest.raises(DataError, match=r"shards\.json: not a list of shards"):
        change_manifest(listing.folder, **changes)


def test_a_list_names_each_tar_once(tmp_path: Path):
    listing = pages.write_pages(tmp_path, 60)
    with pytest.raises(DataError, match="duplicate shard"):
        change_manifest(listing.folder, url=listing.shards[1].url)


def test_the_control_reads_images_of_other_documents(tmp_path: Path):
    """Also where most images are of one; and what cannot be read of another is no fault of a document."""
    image = [Part("image", pages.picture(i), "png") for i in range(5)]
    folder = write_one(tmp_path, [part for i in range(4) for part in (image[i], Part("text", b"a"))], "val")
    pages.write_pages(folder / "more" / "val", 30, "more")
    rows = open_data(folder, "val", BOTH, sequence_tokens=200, max_frames=20, errors={"max_documents": 1.0})
    swaps = rows.with_shuffled_contexts()._swaps["more"]
    assert swaps
    assert all(other[0] != key[0] for key, other in swaps.items())
    document_number = next(i for i in range(30) if rows.data.pieces(rows.data.first(0) + i)[0].frames)
    more = {"more": BOTH["more"]}
    swapped_folder = folder / "swapped"
    swapped_folder.mkdir()
    (swapped_folder / "pages").symlink_to(folder / "more")
    damage_in(swapped_folder, document_number)
    (folder / "quarantine").mkdir()
    damaged_rows = open_data(
        folder, "val", more, sequence_tokens=200, max_frames=20, errors={"max_documents": 1.0}
    ).with_shuffled_contexts()
    damaged_rows.data.quarantine.open(folder / "quarantine")
    unread = sum(row.counts[0][-1] for row in (damaged_rows.sample(0, i) for i in range(len(damaged_rows))))
    assert unread >= 1
    assert not (folder / "quarantine" / FILE).exists()


def damage_in(folder: Path, document_number: int) -> None:
    """`damage` of the split val."""
    (folder / "pages" / "train").symlink_to("val")
    damage(folder, document_number)
    (folder / "pages" / "train").unlink()


def test_sixteen_bits_of_grey_and_a_colour_that_is_transparent(tmp_path: Path):
    images = ImagesConfig(**pages.IMAGES)
    grey, palette = io.BytesIO(), io.BytesIO()
    Image.new("I;16", (8, 8), 0x8000).save(grey, "PNG")
    Image.new("RGB", (8, 8), (9, 9, 9)).save(palette, "PNG", transparency=(9, 9, 9))
    assert abs(float(images.frames(grey.getvalue()).mean())) < 0.02, "half of white is grey, not white"
    assert float(images.frames(palette.getvalue()).min()) == 1.0


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["a.txt", "a.jpg"], ["image", "text"]),
        (["a.answer", "a.question", "a.jpg"], ["image", "prompt", "text"]),
        (["a.001.text.txt", "a.000.image.jpg", "a.caption"], ["image", "text", "text"]),
        (["a.٣.text.txt", "a.000.image.jpg"], ["image", "other"]),
    ],
)
def test_parts_without_a_number_have_an_order(names: list[str], kinds: list[str]):
    """An image comes before its caption, and what is asked before its answer, whatever their names."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names:
            content = pages.picture(1) if name.endswith("jpg") else b"x"
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    index = build(memoryview(out.getvalue()))
    assert [tar_index.KINDS[kind] for kind in index.parts_of(0)["kind"]] == kinds


def test_a_lane_does_not_meet_the_same_few_for_ever():
    """Where the lanes divide the documents, too."""
    streams = JoinedSources([Source([4], "none", 2, "s")])
    assert {streams.document(0, 4, number)[1] for number in range(4)} == {0, 1, 2, 3}


@pytest.mark.parametrize("shuffle", ["shards", "window"])
def test_orders_of_several_epochs_do_not_mix(shuffle: Any):
    whole = Source([3, 5, 2], shuffle, 4, "s")
    for epoch in (0, 5, 1, 7, 2, 0, 6, 5, 3):
        again = Source([3, 5, 2], shuffle, 4, "s")
        assert [whole.document(epoch, i) for i in range(10)] == [again.document(epoch, i) for i in range(10)]


def test_an_entry_of_a_deny_list_that_is_gone_says_how_to_undo_it(tmp_path: Path):
    pages.write_pages(tmp_path / "pages" / "train", 60)
    with pytest.raises(
        ConfigError, match=r"the data have no such shard\. Undo it: python -m src\.operations\.interventions undo"
    ):
        open_data(tmp_path).find("shard pages shard-00009.tar")
