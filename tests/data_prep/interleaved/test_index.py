"""The command that indexes tars: each once, the cut ones named, the others made."""

import json
import os
import re
from itertools import islice
from pathlib import Path

import pytest

from data_prep.interleaved import index
from data_prep.interleaved.write import Document, Part, Writing, write
from src.data.orders import RankShare
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.texts import TextTokens
from tests.systems.interleaved.streaming import pages
from tests.systems.interleaved.streaming.test_streamed import open_data
from tests.systems.interleaved.streaming.test_tar_index import DOCUMENTS, WHOLE, tar_of


@pytest.mark.parametrize("processes", ["1", "2"])
def test_tars_are_indexed_once(processes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    incomplete = [*DOCUMENTS[0], *DOCUMENTS[1][:-1]]
    for name, content in {"a.tar": WHOLE, "b.tar": tar_of(incomplete)}.items():
        (tmp_path / name).write_bytes(content)
    words = [str(tmp_path / "a.tar"), str(tmp_path / "b.tar"), "--processes", processes]
    assert index.main(words) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'b.tar'}: 1 of 2 documents are bad: incomplete: 1" in out
    assert "2 tars, 5 documents, 5 images" in out
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.idx")}
    assert sorted(before) == ["a.tar.idx", "b.tar.idx"]
    assert index.main(words) == 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.idx")} == before
    assert index.main([*words, "--verify"]) == 0
    assert tar_index.load(tmp_path / "a.tar").facts["verified"]


def test_names_of_tars_that_are_not_utf_8(tmp_path: Path):
    path = tmp_path / os.fsdecode(b"\xff.tar")
    path.write_bytes(WHOLE)
    assert index.main([str(path), "--output", str(tmp_path / "listed")]) == 0
    (shard,) = manifest.load(tmp_path / "listed").shards
    assert shard.url == str(path)


def test_a_killed_process_is_reported_and_finished_indexes_remain(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.tar").write_bytes(WHOLE)
    words = [str(tmp_path / "a.tar"), "pipe:kill -9 $PPID", "--processes", "2", "--output", str(tmp_path / "listed")]
    assert index.main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --processes 2: a process was killed")
    assert not (tmp_path / "listed" / manifest.NAME).exists()
    assert index.main([*words[:1], *words[2:]]) == 0
    assert len(manifest.load(tmp_path / "listed").shards) == 1


def test_cut_tar_is_reported_and_the_rest_is_indexed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    between = int(build(memoryview(WHOLE)).documents["offset"][2])
    contents = {
        "between.tar": WHOLE[:between],
        "within.tar": WHOLE[: between + 600],
        "empty.tar": b"",
        "whole.tar": WHOLE,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert index.main([*(str(tmp_path / name) for name in contents), str(tmp_path / "none.tar")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert (
        f"between.tar: cut between two members: {between} bytes, and no end of archive. "
        "2 documents before it are indexed."
    ) in errors[0]
    assert "within.tar: cut in a member of" in errors[1]
    assert "empty.tar: cut between two members: 0 bytes" in errors[2]
    assert "none.tar" in errors[3]
    assert len(tar_index.load(tmp_path / "whole.tar")) == 3
    (tmp_path / "between.tar").write_bytes(WHOLE)
    assert index.main([str(tmp_path / "between.tar")]) == 0, "after it was got again"
    assert len(tar_index.load(tmp_path / "between.tar")) == 3


def test_real_captions(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of Conceptual Captions, by img2dataset: KEY.jpg, KEY.json and KEY.txt."""
    tar = tmp_path / "cc12m.tar"
    tar.write_bytes((shared_data / "image" / "cc12m_wds" / "cc12m-shared.tar").read_bytes())
    assert index.main([str(tar), "--verify"]) == 0
    assert "1 tars, 16 documents, 16 images" in capsys.readouterr().out
    result = tar_index.load(tar)
    with tar_index.open_tar(tar) as content:
        for number in range(len(result)):
            for part in result.parts_of(number):
                data = bytes(content[int(part["offset"]) : int(part["offset"]) + int(part["size"])])
                kind = tar_index.KINDS[part["kind"]]
                assert data.startswith(b"\xff\xd8") if kind == "image" else data.decode()


def test_tokens_are_counted_where_a_tokenizer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As the writer counts them; an index without them, or with those of another tokenizer, is made again."""
    shard_manifest = pages.write_pages(tmp_path / "pages", 30)
    pages.tokenizer().save_pretrained(tmp_path / "tokenizer")
    tars = [shard_manifest.folder / shard.url for shard in shard_manifest.shards]
    expected = [tar_index.load(tar).tokens for tar in tars]
    for tar in tars:
        tar.with_name(f"{tar.name}.idx").unlink()
    assert index.main([*map(str, tars)]) == 0
    assert [tar_index.load(tar).tokens for tar in tars] == [None, None]
    assert index.main([*map(str, tars), "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    for tar, tokens in zip(tars, expected, strict=True):
        result = tar_index.load(tar).tokens
        assert result is not None
        assert tokens is not None
        assert result.tolist() == tokens.tolist()
    capsys.readouterr()
    assert index.main([str(tars[0]), "--tokenizer", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_every_changed_bit_of_a_tar_that_was_written_here_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Also in a text, and in what a decoder passes over; also where the tar was verified before."""
    shard_manifest = pages.write_pages(tmp_path / "pages", 6)
    (shard,) = shard_manifest.shards
    tar = shard_manifest.folder / shard.url
    content = tar.read_bytes()
    for place in range(0, len(content), 251):
        bad_content = bytearray(content)
        bad_content[place] ^= 1 << place % 8
        tar.write_bytes(bad_content)
        assert index.main([str(tar), "--verify", "--processes", "1"]) == 1, place
        assert "shard-00000.tar: damaged or replaced" in capsys.readouterr().err
    tar.write_bytes(content)
    assert index.main([str(tar), "--verify", "--processes", "1"]) == 0


def test_tars_that_were_written_here_can_be_verified(tmp_path: Path):
    """A training on them reads the same rows; where one turns out bad, without it."""
    pages.write_pages(tmp_path / "pages" / "train", 60)
    tars = sorted(str(tar) for tar in (tmp_path / "pages" / "train").glob("*.tar"))
    before = open_data(tmp_path).fingerprint
    assert index.main([*tars, "--verify", "--processes", "1"]) == 0
    assert open_data(tmp_path).fingerprint == before
    cut = pages.picture(3)
    parts = [Part("text", b"abc"), Part("image", cut[: len(cut) // 2], "png")]
    folder = tmp_path / "cut" / "pages" / "train"
    write(
        folder,
        [Document("a", parts), Document("b", [Part("text", b"d")])],
        {},
        Writing(texts=TextTokens(pages.tokenizer())),
    )
    (shard,) = manifest.load(folder).shards
    assert len(open_data(tmp_path / "cut").pieces(0)) == 1
    assert index.main([str(folder / shard.url), "--verify", "--processes", "1"]) == 0
    data = open_data(tmp_path / "cut")
    assert [len(data.pieces(document)) for document in (0, 1)] == [0, 1]
    tokens = tar_index.load(folder / shard.url).tokens
    assert tokens is not None
    assert sorted(tokens.tolist())[-2:] == [1, 3], "what was counted stays"


@pytest.mark.parametrize("output", [True, False])
def test_a_tar_in_place_of_an_indexed_one_is_indexed_again(tmp_path: Path, output: bool):
    """Of the same size, and older than the index, as `cp -p` or `mv` leave it."""
    for name, texts in (("a.tar", (b"words", b"x")), ("b.tar", (b"w", b"other"))):
        (tmp_path / name).write_bytes(tar_of([(f"{i}.txt", text) for i, text in enumerate(texts)]))
    (tmp_path / "b.tar").rename(tmp_path / "elsewhere")
    arguments = [str(tmp_path / "a.tar"), *(["--output", str(tmp_path / "out")] if output else [])]
    assert index.main(arguments) == 0
    (path,) = [*tmp_path.glob("a.tar.idx"), *tmp_path.glob("out/*.idx")]
    (tmp_path / "elsewhere").rename(tmp_path / "a.tar")
    facts = (tmp_path / "a.tar").stat()
    os.utime(path, ns=(facts.st_atime_ns, facts.st_ctime_ns - 1))  # all of this takes less than a tick of the clock
    os.utime(tmp_path / "a.tar", ns=(0, 0))
    assert index.main(arguments) == 0
    assert tar_index.load_file(path, (tmp_path / "a.tar").stat().st_size, "a").parts["size"].tolist() == [1, 5]


@pytest.mark.parametrize("open_rows", [1, 4])
def test_rows_are_described_as_training_makes_them(open_rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pages.write_pages(tmp_path / "pages" / "train", 600)
    pages.tokenizer().save_pretrained(tmp_path / "tokenizer")
    tars = [str(path) for path in sorted((tmp_path / "pages" / "train").glob("*.tar"))]
    options = {"sequence_tokens": 80, "max_frames": 8, "open_rows": open_rows, "images": pages.IMAGES}
    words = [*tars, "--output", str(tmp_path / "indexed"), "--tokenizer", str(tmp_path / "tokenizer")]
    assert index.main([*words, "--data", json.dumps(options)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"24 tars, 600 documents, \d+ images, [\d,]+ text tokens", out)
    row = re.search(
        r"a row of 80 tokens: ([\d.]+) documents, [\d.]+ images, (\d+) text tokens, (\d+) image tokens; fill (.+)", out
    )
    assert row
    documents, text, image, fill = map(float, row.groups())
    assert text + image == pytest.approx(80 * fill, abs=1)
    data = open_data(tmp_path, **{name: value for name, value in options.items() if name != "images"})
    batches = islice(data.order(1, 4, 99, ()).micro_batches(0, RankShare(4, 4, 0, 1), {}), 450)
    padding = [batch.counters["padding"] for batch in list(batches)[50:]]
    assert fill == pytest.approx(1 - sum(pad for pad, _ in padding) / sum(every for _, every in padding), abs=0.01)
    assert documents > 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "--data {: not valid JSON"),
        ("[]", "--data []: expected an object of options"),
        ('{"sequence_token": 8}', "--data: unknown"),
        ("{}", "--data"),
    ],
)
def test_wrong_options_of_rows_are_reported_before_the_tars_are_read(
    data: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = [str(tmp_path / "none.tar"), "--output", str(tmp_path / "indexed"), "--data", data]
    assert index.main(words) == 1
    assert message in capsys.readouterr().err
