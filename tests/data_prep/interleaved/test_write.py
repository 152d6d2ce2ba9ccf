"""Tars that are written: the same bytes every time and after every interruption, and read by others."""

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.interleaved.write import Document, Part, Writing, encode, write
from src.errors import ConfigError, DataError, RunError
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.texts import TextTokens
from tests.systems.interleaved.streaming import pages


def documents(count: int = 23) -> Iterator[Document]:
    for i in range(count):
        parts = [
            Part("text", f"text {i}".encode()),
            Part("image", pages.picture(i), "png"),
            Part("prompt", b"?"),
            Part("text", b"a" * i),
        ]
        yield Document(f"{i:05}", parts[: 1 + i % 4])


def digests(folder: Path) -> dict[str, str]:
    """Digests of all files except locks. The modification times of tars in shards.json do not count."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != ".lock"]
    contents = {path.name: re.sub(rb'"mtime_ns": \d+', b"", path.read_bytes()) for path in sorted(files)}
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


@pytest.mark.parametrize("seed", [None, 7])
def test_the_same_documents_give_the_same_bytes(tmp_path: Path, seed: int | None):
    how = Writing(5, "source", seed, TextTokens(pages.tokenizer()))
    manifests = [write(tmp_path / name, documents(), {"from": "test"}, how) for name in ("a", "b")]
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert [shard.documents for shard in manifests[0].shards] == [5, 5, 5, 5, 3]
    for shard in manifest.load(tmp_path / "a").shards:
        content = (tmp_path / "a" / shard.url).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (shard.bytes, shard.sha256)
        assert shard.source == "source"
    assert not (tmp_path / "a" / "in_order").exists()
    assert not (tmp_path / "a" / "writing.json").exists()


@pytest.mark.parametrize("seed", [None, 7])
def test_tarfile_reads_each_document_once(tmp_path: Path, seed: int | None):
    shard_manifest = write(tmp_path / "a", documents(), {}, Writing(5, seed=seed))
    parts_read: dict[str, list[bytes]] = {}
    order: list[str] = []
    for shard in shard_manifest.shards:
        with tarfile.open(tmp_path / "a" / shard.url) as tar:
            names = [member.name for member in tar]
            for member in tar.getmembers():
                key, _, rest = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                if key not in parts_read:
                    order.append(key)
                if rest == "metadata.txt":
                    assert file.read().decode().split("\n") == [name for name in names if name.startswith(key)][:-1]
                parts_read.setdefault(key, []).append(file.read())
                assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
    expected_parts = {document.key: [part.content for part in document.parts] for document in documents()}
    assert {key: contents[:-1] for key, contents in parts_read.items()} == expected_parts
    assert (order == sorted(order)) == (seed is None)


class InterruptError(Exception):
    pass


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("after", [0, 1, 6, 22])
def test_interrupted_writer_resumes(tmp_path: Path, seed: int | None, after: int):
    how = Writing(5, seed=seed)
    write(tmp_path / "whole", documents(), {}, how)

    def stopping() -> Iterator[Document]:
        for number, document in enumerate(documents()):
            if number == after:
                raise InterruptError
            yield document

    with pytest.raises(InterruptError):
        write(tmp_path / "a", stopping(), {}, how)
    assert not (tmp_path / "a" / manifest.NAME).exists()
    with pytest.raises(DataError, match=r"written with other input or settings \(other changed\)"):
        write(tmp_path / "a", documents(), {"other": 1}, how)
    finished = {path: path.stat().st_ino for path in (tmp_path / "a").glob("*.tar")}
    write(tmp_path / "a", documents(), {}, how)
    assert digests(tmp_path / "a") == digests(tmp_path / "whole")
    assert {path: path.stat().st_ino for path in finished} == finished, "a tar that is whole is not written again"


def test_complete_folder_is_not_rewritten(tmp_path: Path):
    write(tmp_path / "a", documents(), {}, Writing(5))

    def never() -> Iterator[Document]:
        raise AssertionError
        yield

    assert len(write(tmp_path / "a", never(), {}, Writing(5)).shards) == 5
    with pytest.raises(DataError, match=r"per_shard changed"):
        write(tmp_path / "a", documents(), {}, Writing(6))


def test_unwritable_documents_are_refused(tmp_path: Path):
    text = [Part("text", b"a")]
    for number, (key, parts) in enumerate([("", text), ("a.b", text), ("a/b", text), ("a\nb", text), ("a", [])]):
        with pytest.raises(
            DataError, match="expected a key without dots, slashes and line ends, and at least one part"
        ):
            write(tmp_path / str(number), [Document(key, parts)], {}, Writing())
    with pytest.raises(DataError, match=r"expected a file extension, such as \"png\", got '\.\./x'"):
        write(tmp_path / "ending", [Document("a", [Part("text", b"a", "../x")])], {}, Writing())
    with pytest.raises(DataError, match="there is no document to write"):
        write(tmp_path / "none", [], {}, Writing())
    with pytest.raises(DataError, match=r"document 0 of a tar: a part is there twice"):
        write(tmp_path / "twice", [Document("a", text), Document("a", text)], {}, Writing())
    with pytest.raises(DataError, match="document 0 of a tar: its parts are not together"):
        write(tmp_path / "again", [Document("a", text), Document("b", text), Document("a", text)], {}, Writing())
    with pytest.raises(DataError, match="document 0 of a tar: an image cannot be decoded"):
        write(tmp_path / "image", [Document("a", [*text, Part("image", b"no image")])], {}, Writing())
    with pytest.raises(ConfigError, match="--per_shard: expected at least 1, got 0"):
        Writing(0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.tar").write_bytes(b"")
    with pytest.raises(DataError, match="other: contains tars"):
        write(tmp_path / "other", documents(), {}, Writing())


def test_two_writers_do_not_meet(tmp_path: Path):
    def meeting() -> Iterator[Document]:
        with pytest.raises(RunError, match="another process writes it"):
            write(tmp_path / "a", documents(), {}, Writing())
        yield from documents()

    write(tmp_path / "a", meeting(), {}, Writing())


def test_more_than_a_thousand_parts_keep_their_order():
    """By name part 10 comes before part 2 where numbers have no zeros before them."""
    document = Document("a", [Part("text", str(i).encode()) for i in range(1200)])
    content = encode(document)
    with tarfile.open(fileobj=io.BytesIO(content + bytes(1024))) as tar:
        names = tar.getnames()
    assert names == sorted(names)
    index = build(memoryview(content + bytes(1024)))
    parts = index.parts_of(0)
    texts = [
        content[int(part["offset"]) : int(part["offset"]) + int(part["size"])]
        for part in parts
        if part["kind"] == tar_index.TEXT
    ]
    assert texts == [str(i).encode() for i in range(1200)]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(RunError, match=str(tmp_path / "a")):
        write(tmp_path / "a", documents(), {}, Writing(5))
    assert (tmp_path / "a").read_text() == "mine"
