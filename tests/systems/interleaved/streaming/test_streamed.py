"""Rows of streamed documents: what they hold, what becomes of documents that are too long or bad, and the controls."""

import json
import pickle
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.interleaved.write import Document, Part, Writing, write
from src.data.orders import RankShare
from src.errors import ConfigError, DataError, UserError
from src.experiments.config import Places
from src.experiments.dataset_protocols import content_of
from src.experiments.registry import DATASETS, bind
from src.runs.history.branches import Branch
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.dataset import COUNTS, StreamedDataset
from src.systems.interleaved.streaming.images import FAKE, IMAGE
from src.systems.interleaved.streaming.quarantine import FILE
from src.systems.interleaved.streaming.shard_files import ShardFiles
from src.systems.interleaved.streaming.texts import END
from src.systems.interleaved.streaming.validation import ValidationRows
from tests.systems.interleaved.streaming import pages

TOKENIZER = pages.tokenizer()
ONE = {"pages": {"path": "pages"}}


def open_data(folder: Path, split: str = "train", sources: dict[str, Any] = ONE, **more: Any) -> Any:
    return bind(DATASETS, pages.config(sources, **more)).build(Places(folder, folder), TOKENIZER, split, 0)


def write_one(folder: Path, parts: list[Part], split: str = "train") -> Path:
    """A source of one document, and a short one."""
    write(
        folder / "pages" / split,
        [Document("a", parts), Document("b", [Part("text", b"short")])],
        {},
        Writing(source="pages"),
    )
    return folder


def steps_of(data: StreamedDataset, steps: int, per_step: int = 4, branches: tuple[Branch, ...] = ()) -> list[Any]:
    return list(
        islice(data.order(0, per_step, 99, branches).micro_batches(0, RankShare(per_step, per_step, 0, 1), {}), steps)
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    for split in ("train", "val"):
        pages.write_pages(folder / "pages" / split, 120, seed=1)
        pages.write_pages(folder / "more" / split, 60, "more", seed=2, with_counts=False)
    return folder


BOTH = {"pages": {"path": "pages"}, "more": {"path": "more"}}


def test_content_is_that_of_the_documents(two: Path):
    data, longer, other = open_data(two), open_data(two, sequence_tokens=96), open_data(two, sources=BOTH)
    assert data.fingerprint != longer.fingerprint
    contents = [content_of(ValidationRows(each, each.source_names)) for each in (data, longer, other)]
    assert contents[0] == contents[1] != contents[2]


def test_row_has_complete_pages_with_frames_and_counts(two: Path):
    data = open_data(two, sources=BOTH)
    assert data.source_names == ["more", "pages"]
    pages_read: Counter[tuple[str, int]] = Counter()
    total_counts = torch.zeros(2, len(COUNTS), dtype=torch.int64)
    for batch in steps_of(data, 30):
        batch_tensors = data.collate([data.sample(*key) for key in batch.keys])
        ids, frames = batch_tensors["input_ids"], 0
        assert ids.shape == (4, 80)
        for row, key in zip(range(4), batch.keys, strict=True):
            documents = key[1::3]
            text = TOKENIZER.decode(ids[row][batch_tensors["attention_mask"][row]])
            page_numbers = [int(part.split("<")[0].split()[0]) for part in text.split("end ")[1:]]
            places = [data.locate(document) for document in documents]
            if all(len(data.pieces(document)) == 1 for document in documents):
                assert page_numbers == [number for _, number in places]
                pages_read.update((data.source_names[source], number) for source, number in places)
            frame_count = sum(
                data.pieces(document)[piece].frames for document, piece in zip(documents, key[2::3], strict=True)
            )
            assert frame_count <= 6
            frames += frame_count
            first = batch_tensors["frames"][frames - frame_count : frames]
            assert int((ids[row] == TOKENIZER.convert_tokens_to_ids(IMAGE)).sum()) == len(first)
            restarts = (batch_tensors["position_ids"][row][batch_tensors["attention_mask"][row]] == 0).sum()
            assert restarts == len(documents), "no page reads another"
        assert len(batch_tensors["frames"]) == frames
        image_tokens = torch.tensor([TOKENIZER.convert_tokens_to_ids(token) for token in pages.TOKENS])
        assert not batch_tensors["loss_mask"][torch.isin(ids, image_tokens)].any(), "nothing is learned of images"
        total_counts += batch_tensors["source_counts"]
    assert len(pages_read) > 60
    assert total_counts[:, COUNTS.index("unreadable")].sum() == 0
    assert (total_counts[:, :4] > 0).all()


def test_images_match_the_text_of_their_page(two: Path):
    data = open_data(two)
    for document in range(120):
        for piece in data.pieces(document):
            row = data.read_piece(document, piece)
            for frames in row.frames:
                assert {round((float(frame[0].mean()) + 1) * 255 / 2) for frame in frames} == {pages.colour(document)}


def test_counts_of_the_index_change_nothing(two: Path, tmp_path: Path):
    """Without them the order tokenises."""
    pages.write_pages(tmp_path / "pages" / "train", 120, seed=1, with_counts=False)
    data_with_counts, plain = open_data(two), open_data(tmp_path)
    assert [data_with_counts.sizes(0, i) for i in range(120)] == [plain.sizes(0, i) for i in range(120)]
    for one, other in zip(steps_of(data_with_counts, 20), steps_of(plain, 20), strict=True):
        assert one.keys == other.keys


def test_planning_reads_no_tar(two: Path, tmp_path: Path):
    (tmp_path / "pages").symlink_to(two / "pages")
    data = open_data(tmp_path)
    for documents in data.documents:
        documents.files = None
    assert steps_of(data, 20)


def test_a_document_is_one_read_of_its_own_bytes(two: Path):
    """Finding 10: an index makes tars random-access; nothing before a document is read, and nothing behind it."""
    data = open_data(two)
    reads: list[tuple[str, int, int]] = []

    class RecordingFiles(ShardFiles):
        def read(self, shard: manifest.Shard, offset: int, size: int) -> bytes:
            reads.append((shard.url, offset, size))
            return super().read(shard, offset, size)

    (documents,) = data.documents
    documents.files = RecordingFiles(documents.manifest.folder)
    for document in (119, 3, 60):
        data.sample(0, document)
        shard, number = documents.locate(document)
        rows = tar_index.load(documents.manifest.folder / documents.manifest.shards[shard].url).documents
        begin, end = (
            int(rows["offset"][number]),
            [*rows["offset"].tolist(), documents.manifest.shards[shard].bytes][number + 1],
        )
        ((url, offset, size),) = reads
        assert url == documents.manifest.shards[shard].url
        assert begin <= offset < offset + size <= end
        reads.clear()


def test_no_call_leaves_anything_to_the_next(two: Path):
    """Bug of m4: lists that were default arguments had the results of the call before."""
    data = open_data(two, sources=BOTH)
    first, second = (steps_of(data, 20) for _ in range(2))
    assert [(step.keys, step.cursor) for step in first] == [(step.keys, step.cursor) for step in second]
    batch_tensors, again = (data.collate([data.sample(*key) for key in first[0].keys]) for _ in range(2))
    assert all(torch.equal(batch_tensors[name], again[name]) for name in batch_tensors)


def test_long_documents_are_cut_between_parts_or_left_out(tmp_path: Path):
    texts = [Part("text", bytes([97 + i]) * 30) for i in range(4)]
    image = Part("image", pages.picture(5), "png")
    folder = write_one(tmp_path, [texts[0], image, texts[1], image, texts[2], image, texts[3]])
    data = open_data(folder)
    packed = data.pieces(0)
    assert [(piece.begins, piece.ends) for piece in packed] == [(True, False), (False, True)]
    rows = [data.read_piece(0, piece) for piece in packed]
    row_texts = [TOKENIZER.decode(row.input_ids).replace(f"{FAKE}<global-img>{IMAGE}{FAKE}", "#") for row in rows]
    assert row_texts == ["a" * 30 + "#" + "b" * 30 + "#", "c" * 30 + "#" + "d" * 30 + "<end>"]
    assert open_data(folder, rules={"too_long": "drop"}).pieces(0) == []
    assert len(open_data(folder, sequence_tokens=300).pieces(0)) == 1


def test_an_image_larger_than_a_row_is_left_out_and_a_longer_text_is_cut(tmp_path: Path):
    """The original drops the complete document."""
    wide = Part("image", pages.picture(5, (16, 8)), "png")
    text = "".join(chr(97 + i % 26) for i in range(200))
    folder = write_one(tmp_path, [Part("text", b"A" * 20), wide, Part("text", text.encode()), wide, Part("text", b"Z")])
    data = open_data(folder, max_frames=2)
    rows = [data.read_piece(0, piece) for piece in data.pieces(0)]
    texts = [TOKENIZER.decode(row.input_ids) for row in rows]
    assert "".join(texts) == "A" * 20 + text + "Z<end>"
    assert [len(row.input_ids) for row in rows[:-1]] == [79, 79], "one token of 80 is for the end"
    assert [row.loss_mask[:2] for row in rows] == [[False, True]] * len(rows)
    assert sum(row.counts[0][COUNTS.index("left_out_parts")] for row in rows) == 2
    assert open_data(folder, max_frames=2, rules={"too_long": "drop"}).pieces(0) == []


@pytest.mark.parametrize("length", [79, 80, 81, 158, 159, 500])
def test_texts_longer_than_a_row_are_read_completely(tmp_path: Path, length: int):
    folder = write_one(tmp_path, [Part("text", bytes([97 + i % 26 for i in range(length)])) for _ in range(5)])
    data = open_data(folder)
    rows = [data.read_piece(0, piece) for piece in data.pieces(0)]
    text = "".join(TOKENIZER.decode(row.input_ids) for row in rows).replace(" ", "")
    assert text == "".join(chr(97 + i % 26) for i in range(length)) * 5 + "<end>"


@pytest.mark.parametrize(
    ("before", "ask", "answer"), [(10, 3, 200), (0, 3, 77), (60, 40, 78), (79, 70, 30), (0, 77, 5)]
)
def test_a_long_answer_is_cut_after_its_first_tokens_with_the_prompt(
    tmp_path: Path, before: int, ask: int, answer: int
):
    """A text before the prompt fits into a row; prompt and answer together do not."""
    parts = [Part("text", b"a" * before)] * bool(before) + [
        Part("prompt", b"q" * ask),
        Part("text", b"b" * answer),
        Part("text", b"c"),
    ]
    data = open_data(write_one(tmp_path, parts))
    rows = [data.read_piece(0, piece) for piece in data.pieces(0)]
    texts = [TOKENIZER.decode(row.input_ids).replace(" ", "") for row in rows]
    assert "".join(texts) == "a" * before + "q" * ask + "b" * answer + "c<end>"
    assert [row for row in texts if "q" in row] == [row for row in texts if "q" * ask + "b" in row], (
        "with the first token of its answer"
    )
    assert sum(row.counts[0][COUNTS.index("left_out_parts")] for row in rows) == 0


def test_a_prompt_without_room_for_its_answer_is_left_out_with_it(tmp_path: Path):
    parts = [Part("text", b"a"), Part("prompt", b"q" * 78), Part("text", b"b" * 20), Part("text", b"c" * 5)]
    data = open_data(write_one(tmp_path, parts))
    rows = [data.read_piece(0, piece) for piece in data.pieces(0)]
    assert [TOKENIZER.decode(row.input_ids) for row in rows] == ["a", " ccccc<end>"]
    assert sum(row.counts[0][COUNTS.index("left_out_parts")] for row in rows) == 2


def test_rows_without_text_are_left_out_of_a_document(tmp_path: Path):
    """Its end is in the last row that is left."""
    image = Part("image", pages.picture(5, (16, 16)), "png")
    data = open_data(write_one(tmp_path, [Part("text", b"ab"), image, image, image]), max_frames=5)
    (piece,) = data.pieces(0)
    row = data.read_piece(0, piece)
    assert (len(row.frames), row.counts[0][COUNTS.index("left_out_parts")]) == (1, 2)
    assert (piece.begins, piece.ends, row.input_ids[-1]) == (True, True, TOKENIZER.eos_token_id)
    assert len(row.input_ids) == piece.tokens


def test_a_prompt_is_not_cut_from_its_answer(tmp_path: Path):
    prompt_parts = [Part("text", b"a" * 60), Part("prompt", b"ask"), Part("prompt", b"me"), Part("text", b"b" * 20)]
    data = open_data(write_one(tmp_path, prompt_parts))
    texts = [TOKENIZER.decode(data.read_piece(0, piece).input_ids) for piece in data.pieces(0)]
    assert texts == ["a" * 60, " ask me " + "b" * 20 + "<end>"]


def test_a_text_that_says_that_a_document_ends_is_of_two_that_do_not_see_each_other(tmp_path: Path):
    data = open_data(write_one(tmp_path, [Part("text", f"ab{END}cde".encode()), Part("text", b"f")]))
    row = data.read_piece(0, data.pieces(0)[0])
    assert row.lengths == [3, 6]
    assert [
        TOKENIZER.decode([token]) for token, has_loss in zip(row.input_ids, row.loss_mask, strict=True) if not has_loss
    ] == ["a", "c"]
    batch_tensors = data.collate([row])
    assert batch_tensors["position_ids"][0][:9].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kinds", "read"),
    [
        ("tit", True),
        ("ti", False),
        ("titi", True),
        ("it", True),
        ("t", False),
        ("i", False),
        ("tii", False),
        ("tiiit", False),
        ("tiit", True),
    ],
)
def test_rules_for_pages_of_the_web(tmp_path: Path, kinds: str, read: bool):
    parts = [Part("text", b"enough") if kind == "t" else Part("image", pages.picture(1), "png") for kind in kinds]
    folder = write_one(tmp_path, parts)
    assert bool(open_data(folder, rules={"which": "web"}).pieces(0)) == read
    assert bool(open_data(folder).pieces(0)) == ("t" in kinds), "without them every document with a text is read"
    assert bool(open_data(folder, rules={"max_images": 1}).pieces(0)) == ("t" in kinds and kinds.count("i") <= 1)


def test_a_prompt_is_read_and_not_learned(tmp_path: Path):
    folder = write_one(tmp_path, [Part("text", b"ab"), Part("prompt", b"ask"), Part("text", b"say")])
    row = open_data(folder).read_piece(0, open_data(folder).pieces(0)[0])
    assert TOKENIZER.decode(row.input_ids) == "ab ask say<end>"
    assert "".join(str(int(bit)) for bit in row.loss_mask) == "01" + "0000" + "1111" + "1"


def damage(folder: Path, document_number: int, image: bool = True) -> None:
    """Overwrite the middle of an image, or of a text, of a document."""
    data = open_data(folder)
    documents = data.documents[0]
    shard, number = documents.locate(document_number)
    parts = documents._index(shard).parts_of(number)
    (part, *_) = parts[parts["kind"] == (1 if image else 0)]
    path = documents.manifest.folder / documents.manifest.shards[shard].url
    content = bytearray(path.read_bytes())
    content[int(part["offset"]) + (20 if image else 0)] ^= 0xFF
    pages.damage(path, content)


def test_unreadable_documents_become_padding_and_no_row_moves(tmp_path: Path):
    pages.write_pages(tmp_path / "pages" / "train", 60, seed=1)
    data = open_data(tmp_path)
    with_image = next(i for i in range(60) if data.pieces(i)[0].frames)
    before = [(batch.keys, data.collate([data.sample(*key) for key in batch.keys])) for batch in steps_of(data, 20)]
    damage(tmp_path, with_image)
    data = open_data(tmp_path)
    data.quarantine.open(tmp_path)
    num_bad = 0
    for (keys, whole), batch in zip(before, steps_of(data, 20), strict=True):
        assert batch.keys == keys
        batch_tensors = data.collate([data.sample(*key) for key in batch.keys])
        bad = [row for row, key in enumerate(keys) if any(map(data.is_unreadable, key[1::3], key[2::3]))]
        good = [row for row in range(4) if row not in bad]
        assert torch.equal(batch_tensors["input_ids"][good], whole["input_ids"][good])
        assert torch.equal(batch_tensors["position_ids"], whole["position_ids"])
        for row in bad:
            assert batch_tensors["loss_mask"][row].sum() < whole["loss_mask"][row].sum()
        assert batch_tensors["source_counts"][0, -1] == len(bad)
        num_bad += len(bad)
    assert num_bad
    (record,) = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert record["document"] == with_image % 25
    assert "cannot be decoded" in record["reason"]
    again = open_data(tmp_path)
    again.quarantine.open(tmp_path)
    again.documents[0].read = None
    assert again.sample(0, with_image).counts[0][-1] == 1, "what is in quarantine is not tried again"
    with pytest.raises(
        DataError, match=r"pages: document \d+ of shard-0000\d\.tar, at byte \d+: an image cannot be decoded"
    ):
        open_data(tmp_path, errors={"bad_document": "raise"}).sample(0, with_image)


def test_too_much_that_is_bad_is_an_error(tmp_path: Path):
    pages.write_pages(tmp_path / "pages" / "train", 60, seed=1)
    document_numbers = [i for i in range(60) if open_data(tmp_path).pieces(i)[0].frames][:3]
    for number in document_numbers:
        damage(tmp_path, number)
    data = open_data(tmp_path, errors={"max_documents": 2 / 60})
    for number in document_numbers[:2]:
        assert data.sample(0, number).counts[0][-1] == 1
        assert data.sample(1, number).counts[0][-1] == 1, "once more is no more"
    with pytest.raises(
        DataError, match=r"3 documents of 60 cannot be read, more than data\.errors\.max_documents allows"
    ):
        data.sample(0, document_numbers[2])


def test_all_unreadable_is_an_error_soon(tmp_path: Path):
    """Finding 4: where all shards failed, m4 went round for ever."""
    dataset_manifest = pages.write_pages(tmp_path / "pages" / "train", 300, seed=1)

    def read(**errors: Any) -> None:
        data = open_data(tmp_path, errors=errors)
        for batch in steps_of(data, 100):
            for key in batch.keys:
                data.sample(*key)

    contents = {shard.url: (dataset_manifest.folder / shard.url).read_bytes() for shard in dataset_manifest.shards}
    for url, content in contents.items():
        pages.damage(dataset_manifest.folder / url, content.replace(b"\x89PNG", b"PNG\x89"))
    with pytest.raises(DataError, match="None of 7 documents in a row can be read"):
        read(max_documents=1.0, max_consecutive=7, bad_document="skip_document")
    for url in contents:
        (dataset_manifest.folder / url).unlink()
    with pytest.raises(DataError, match=r"2 shards of 12 cannot be read, more than data\.errors\.max_shards allows"):
        read(unavailable_shard="skip_shard")
    with pytest.raises(DataError, match="cannot be opened"):
        read()


def test_a_shard_that_is_replaced_is_refused(tmp_path: Path):
    dataset_manifest = pages.write_pages(tmp_path / "pages" / "train", 60, seed=1)
    path = dataset_manifest.folder / dataset_manifest.shards[0].url
    path.write_bytes(path.read_bytes() + b"\0" * 512)
    with pytest.raises(DataError, match=r"when it was indexed\. Index it again"):
        open_data(tmp_path).sample(0, 0)
    data = open_data(tmp_path, errors={"changed_shard": "skip_shard"})
    assert data.sample(0, 0).counts[0][-1] == 1


def test_programming_errors_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """R7: such are no data."""
    pages.write_pages(tmp_path / "pages" / "train", 60, seed=1)
    data = open_data(tmp_path)
    for error in (TypeError, AttributeError, KeyError):

        def fail(*keywords: Any, error: type[Exception] = error) -> Any:
            raise error("mistake")

        monkeypatch.setattr(data.documents[0], "read", fail)
        with pytest.raises(error):
            data.sample(0, 0)


def test_denied_documents_are_not_read_after_the_checkpoint(two: Path):
    data = open_data(two, sources=BOTH)
    entries = ["source more", "shard pages shard-00000.tar", "document 3 more shard-00001.tar"]
    assert list(data.find(entries[2])) == [28]
    denied_documents = {document for entry in entries for document in data.find(entry)}
    plain = steps_of(data, 60)
    branch = Branch(number=1, from_step=5, deny_list=entries)
    changed = steps_of(data, 60, branches=(branch,))
    assert [batch.keys for batch in changed[:5]] == [batch.keys for batch in plain[:5]]
    later = [document for batch in changed[5:] for key in batch.keys for document in key[1::3]]
    assert not denied_documents & set(later)
    first = Counter(
        (epoch, document)
        for batch in changed
        for key in batch.keys
        for epoch, document, piece in zip(key[::3], key[1::3], key[2::3], strict=True)
        if piece == 0 and epoch == 0 and document not in denied_documents
    )
    assert set(first.values()) == {1}, "all others still once"
    for entry in (
        "source nobody",
        "shard pages nowhere.tar",
        "shard nobody shard-00000.tar",
        "document 99 pages shard-00000.tar",
    ):
        with pytest.raises(ConfigError, match="the data have no such"):
            data.find(entry)


@pytest.mark.parametrize("shuffle", ["none", "shards", "window"])
def test_a_reshuffle_after_a_rewind_reads_the_rest_in_another_order(two: Path, shuffle: str):
    """Finding 8: with a deterministic order going back does not by itself reshuffle. Each document still comes once."""
    data = open_data(two, shuffle=shuffle)
    plain = steps_of(data, 40)
    changed = steps_of(data, 40, branches=(Branch(number=1, from_step=3, data="reshuffle"),))
    assert [batch.keys for batch in changed[:3]] == [batch.keys for batch in plain[:3]]
    assert [batch.keys for batch in changed[3:8]] != [batch.keys for batch in plain[3:8]]
    for steps in (plain, changed):
        packed = Counter(
            document
            for batch in steps
            for key in batch.keys
            for epoch, document, piece in zip(key[::3], key[1::3], key[2::3], strict=True)
            if epoch == 0 and piece == 0
        )
        assert packed == {document: 1 for document in range(120) if data.pieces(document)}


def test_validation_reads_every_document_once_and_ends(two: Path):
    """Finding 5: m4's never ended."""
    rows = open_data(two, "val", BOTH)
    assert sorted(rows.parts) == ["more", "pages"]
    for name, count in (("more", 60), ("pages", 120)):
        part = rows.parts[name]
        read: Counter[int] = Counter()
        for _, row in part._rows:
            read.update(document for document, piece in zip(row[1::3], row[2::3], strict=True) if piece == 0)
        assert len(read) == count
        assert set(read.values()) == {1}
    assert len(rows) == sum(map(len, rows.parts.values()))


def test_the_control_shows_other_pages_images(two: Path):
    rows = open_data(two, "val")
    shuffled = rows.with_shuffled_contexts()
    assert len(rows) == len(shuffled)
    same = other = 0
    for i in range(len(rows)):
        one, two_ = rows.collate([rows.sample(0, i)]), shuffled.collate([shuffled.sample(0, i)])
        assert torch.equal(one["input_ids"], two_["input_ids"])
        assert one["frames"].shape == two_["frames"].shape
        for a, b in zip(one["frames"], two_["frames"], strict=True):
            same += torch.equal(a, b)
            other += 1
    assert same == 0
    assert other > 100


def test_questions_are_the_first_prompts(tmp_path: Path):
    image = Part("image", pages.picture(5), "png")
    other = [Part("image", pages.picture(6), "png"), Part("prompt", b"what"), Part("text", b"six")]
    asking = [
        Part("text", b"see"),
        image,
        Part("prompt", b"what"),
        Part("text", b"five"),
        Part("text", b"yes"),
        Part("prompt", b"more"),
    ]
    write(tmp_path / "pages" / "val", [Document("a", asking), Document("b", other)], {}, Writing(source="pages"))
    rows = open_data(tmp_path, "val")
    assert rows.num_questions == 2
    assert rows.row(0) | {"context": ""} == {
        "question": "what",
        "answer": "five yes",
        "context": "",
        "dataset": "pages",
    }
    assert rows.source(1) == "pages"
    batch = rows.collate_prompts([rows.prompt(0), rows.prompt(1)])
    assert batch["pixel_values"].shape == (1, 2, 3, 8, 8)
    texts = [TOKENIZER.decode(ids[mask]) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert texts[0] == f"see{FAKE}<global-img>{IMAGE}{FAKE}what"
    assert batch["attention_mask"][:, -1].all(), "padding is on the left"
    blind = replace(rows.prompt(0), frames=[])
    assert rows.collate_prompts([blind])["pixel_values"].shape == (1, 1, 3, 8, 8), "every process runs the encoder"
    wrong = rows.with_shuffled_contexts().prompt(0)
    assert round((float(wrong.frames[0][0, 0, 0, 0]) + 1) * 255 / 2) == pages.colour(6)


def test_rows_survive_pickling(two: Path):
    """Processes that read ahead get the data set so."""
    data = open_data(two, sources=BOTH)
    again: StreamedDataset = pickle.loads(pickle.dumps(data))
    (batch,) = steps_of(data, 1)
    for key in batch.keys:
        assert again.sample(*key).input_ids == data.sample(*key).input_ids


@pytest.mark.parametrize(
    ("sources", "more", "match"),
    [
        (
            {"a": {"path": "pages", "rate": 1}, "b": {"path": "more"}},
            {},
            r"sources\.b\.rate: missing\. Write a rate for each source",
        ),
        (ONE, {"sequence_tokens": 3}, r"data.sequence_tokens: 3, but a frame and the tokens around it need 4"),
        ({"pages": {"path": "nowhere"}}, {}, r"shards\.json: no such file"),
    ],
)
def test_bad_settings(two: Path, sources: dict[str, Any], more: dict[str, Any], match: str):
    def check() -> None:
        config = bind(DATASETS, pages.config(sources, **more))
        config.check(Places(two, two))
        config.check_length(None)

    with pytest.raises((UserError, ValueError), match=match):
        check()


def test_weights_and_fingerprints(two: Path):
    weighted = open_data(two, sources={"pages": {"path": "pages", "loss_weight": 0.5}, "more": {"path": "more"}})
    plain = open_data(two, sources=BOTH)
    (batch,) = steps_of(weighted, 1)
    batch_tensors = weighted.collate([weighted.sample(*key) for key in batch.keys])
    weights = torch.tensor([1.0, 0.5])[batch_tensors["source_ids"]]
    assert torch.equal(batch_tensors["loss_weights"], weights)
    assert "loss_weights" not in plain.collate([plain.sample(*key) for key in batch.keys])
    assert (
        len(
            {weighted.fingerprint, plain.fingerprint, open_data(two).fingerprint, open_data(two, window=30).fingerprint}
        )
        == 4
    )


def test_a_rare_source_needs_a_larger_share(tmp_path: Path):
    pages.write_pages(tmp_path / "pages" / "train", 60)
    write(tmp_path / "more" / "train", [Document("a", [Part("text", b"x")])], {}, Writing(source="more"))
    sources = {"pages": {"path": "pages", "rate": 1}, "more": {"path": "more", "rate": 1e-6}}
    with pytest.raises(DataError, match=r"data\.sources\.more\.rate: its share is less than one document of 4096"):
        open_data(tmp_path, sources=sources).order(0, 4, 10, ())


def test_lists_are_checked(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"):
        manifest.load(tmp_path)
    for content, match in (
        ("{}", "not a list of shards"),
        ('{"shards": [], "facts": {}}', "lists no document"),
        ("[", "shards.json"),
    ):
        (tmp_path / manifest.NAME).write_text(content)
        with pytest.raises(DataError, match=match):
            manifest.load(tmp_path)


def test_random_pages_are_read_as_written(tmp_path: Path):
    """Whatever the parts: texts, images and their order come back."""
    draw = random.Random(5)
    documents = [pages.page(i, draw) for i in range(40)]
    write(tmp_path / "pages" / "train", documents, {}, Writing(7, "pages", seed=3))
    data = open_data(tmp_path, sequence_tokens=400, max_frames=50)
    packed = Counter()
    for number in range(40):
        (piece,) = data.pieces(number)
        text = TOKENIZER.decode([i for i in data.read_piece(number, piece).input_ids if i < 256])
        packed[text] += 1
    frame_count = Counter()
    for document in documents:
        text, before = "", False
        for part in document.parts:
            if part.kind == "image":
                wide = len(data.documents[0].images.config.frames(part.content)) > 1
                text, before = text + "\n\n" * wide, False
            else:
                text, before = text + (" " if before else "") + part.content.decode(), True
        frame_count[text] += 1
    assert packed == frame_count
