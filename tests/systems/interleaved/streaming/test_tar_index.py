"""Tars by their headers: as Python's tarfile reads them where they are whole, and every cut told where they are not."""

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from src.errors import DataError
from src.systems.interleaved.streaming import tar_index
from src.systems.interleaved.streaming.tars.image_files import ImageError, image_size
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.tars.members import scan


def picture(kind: str = "JPEG", size: tuple[int, int] = (40, 30)) -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(out, kind)
    return out.getvalue()


def tar_of(members: list[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def document(key: str, parts: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """With the list of its parts behind them, as the seed's tars have it."""
    names = [f"{key}.{position}.{kind}" for position, (kind, _) in enumerate(parts)]
    return [
        *zip(names, (content for _, content in parts), strict=True),
        (f"{key}.metadata.txt", "\n".join(names).encode()),
    ]


DOCUMENTS = [
    document(f"{n}_ab", [("text.txt", b"hello" * 50 * n), ("image.jpeg", picture()), ("text.txt", b"end")])
    for n in (1, 2, 3)
]
WHOLE = tar_of([member for group in DOCUMENTS for member in group])


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(form: int):
    names = ["a.txt", "./b.txt", "folder/c.txt", "long" * 20 + "/" + "name" * 10 + ".txt", "é" * 20 + ".txt"]
    if form != tarfile.USTAR_FORMAT:
        names.append("very" * 60 + ".txt")
    content = tar_of([(name, name.encode() * 40) for name in names], form)
    result = scan(memoryview(content))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(member.name.removeprefix("./"), member.offset_data, member.size) for member in tar]
    assert list(zip(result.names, result.data, result.sizes, strict=True)) == expected
    assert result.cut is None
    assert [content[at : at + size] for at, size in zip(result.data, result.sizes, strict=True)] == [
        name.encode() * 40 for name in names
    ]


def test_folders_and_links_are_no_members():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind in (("folder", tarfile.DIRTYPE), ("link", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere"
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("file"), io.BytesIO())
    members = scan(memoryview(out.getvalue()))
    assert dict(zip(members.names, members.reasons, strict=True)) == {"link": "a symbolic link", "file": ""}
    assert [(member.name, member.reason) for member in members.lone] == [("folder/", "a directory")]


def test_every_cut_is_reported_and_documents_before_it_are_indexed():
    """Finding 3 of the specification: of 81 cuts, tarfile reports 25 of the 41 that lose something, and the list of
    parts 12 more."""
    ends = [build(memoryview(WHOLE)).documents["offset"].tolist()[1:], [len(WHOLE)]]
    end_of_members = max(
        at + size for at, size in zip(scan(memoryview(WHOLE)).data, scan(memoryview(WHOLE)).sizes, strict=True)
    )
    end_of_members += -end_of_members % 512
    borders = [*ends[0], end_of_members]
    for size in range(0, len(WHOLE), 64):
        index = build(memoryview(WHOLE[:size]))
        assert ("cut" in index.facts) == (size < end_of_members + 1024), size
        good = [int(row["offset"]) for row in index.documents if not row["bad"]]
        most_documents = sum(size >= border - 511 for border in borders)  # the padding of a last member may be lost
        assert sum(size >= border for border in borders) <= len(good) <= most_documents, size
        result = [
            [WHOLE[:size][part["offset"] : part["offset"] + part["size"]] for part in index.parts_of(number)]
            for number in range(len(index))
            if not index.documents["bad"][number]
        ]
        assert result == [[content for _, content in group] for group in DOCUMENTS[: len(good)]], size
        if "cut" in index.facts:
            _, intact, _ = index.facts["cut"]
            assert intact <= size


@pytest.mark.parametrize("place", [0, 100, 130, 150, 300])
def test_damaged_header_is_reported(place: int):
    second = int(build(memoryview(WHOLE)).documents["offset"][1])
    damaged_tar = bytearray(WHOLE)
    damaged_tar[second + place] ^= 0x15
    result = build(memoryview(bytes(damaged_tar)))
    assert result.facts["cut"][1] == second
    assert len(result) == 1


def test_parts_are_in_order_with_their_kinds_and_sizes():
    members = document(
        "k", [("text.txt", b"x")] * 2 + [("image.png", picture("PNG", (7, 9)))] + [("text.txt", b"yy")] * 10
    )
    index = build(memoryview(tar_of(sorted(members))))  # by name, part 10 comes before part 2
    parts = index.parts_of(0)
    assert parts["position"].tolist()[:13] == list(range(13))
    assert tar_index.KINDS[parts["kind"][13]] == "metadata", "what has no number comes last"
    assert [tar_index.KINDS[kind] for kind in parts["kind"]].count("text") == 12
    (image,) = parts[parts["kind"] == tar_index.IMAGE]
    assert (image["width"], image["height"], image["position"]) == (7, 9, 2)
    row = index.documents[0]
    assert (row["parts"], row["images"], row["bad"]) == (14, 1, 0)


@pytest.mark.parametrize(
    ("members", "reasons"),
    [
        ([("1.jpg", picture()), ("1.txt", b"a"), ("2.jpg", picture()), ("2.txt", b"b")], ["", ""]),
        (DOCUMENTS[0][:-2] + DOCUMENTS[0][-1:], ["incomplete"]),
        (DOCUMENTS[0][:-1], ["incomplete"]),
        ([*DOCUMENTS[0], ("1_ab.0.text.txt", b"twice")], ["a part is there twice"]),
        (
            [("1.txt", b"a"), ("2.txt", b"b"), ("1.jpg", picture())],
            ["its parts are not together", "", "its parts are not together"],
        ),
        ([(".hidden", b"a")], []),
        ([("1.jpg", picture()), ("1.cls", b"a")], ["it has no text"]),
        ([("1.txt", b"m\xf6se"), ("2.txt", b"a")], ["a text is not UTF-8", ""]),
        ([("1.txt", b" \n"), ("2.txt", b"an <image>")], ["it has no text"] * 2),
        ([("1.jpg", picture()), ("1.jpg", picture()), ("1.txt", b"a")], ["a part is there twice"]),
        ([("1.0.jpg", picture()), ("1.1.jpg", picture()), ("1.0.txt", b"a"), ("1.1.json", b"{}")], [""]),
        ([("1.0.jpg", picture()), ("1.0.png", picture()), ("1.txt", b"a")], ["a part is there twice"]),
        ([("1.0.text.txt", b"a"), ("1.metadata.txt", b"")], ["incomplete"]),
        ([("1.jpg", b"no picture"), ("1.txt", b"a")], ["an image cannot be decoded"]),
    ],
)
def test_why_a_document_is_bad(members: list[tuple[str, bytes]], reasons: list[str]):
    index = build(memoryview(tar_of(members)))
    assert [tar_index.REASONS[row["bad"]] for row in index.documents] == reasons


def test_an_image_that_is_cut_off_is_found_by_decoding():
    """Finding 1.5: the original trains on the grey rest of it."""
    cut = picture(size=(200, 200))
    tar = memoryview(tar_of([("1.jpg", picture()), ("1.txt", b"a"), ("2.jpg", cut[: len(cut) // 2]), ("2.txt", b"b")]))
    assert build(tar).documents["bad"].tolist() == [0, 0], "its header is complete"
    index = build(tar, verify=True)
    assert [tar_index.REASONS[bad] for bad in index.documents["bad"]] == ["", "an image cannot be decoded"]
    assert index.facts["verified"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_sizes_of_images(kind: str):
    assert image_size(memoryview(picture(kind, (33, 44)))) == (33, 44)
    with pytest.raises(ImageError):
        image_size(memoryview(picture(kind)[:12]))


def test_an_index_is_of_its_tar(tmp_path: Path):
    path = tmp_path / "a.tar"
    path.write_bytes(WHOLE)
    with pytest.raises(
        DataError, match=r"a\.tar\.idx: no such file\. Make it with python -m data_prep\.interleaved\.index"
    ):
        tar_index.load(path)
    with tar_index.open_tar(path) as tar:
        index = build(tar)
    index_path = tar_index.save(index, path)
    result = tar_index.load(path)
    assert (result.documents == index.documents).all()
    assert (result.parts == index.parts).all()
    assert result.facts == index.facts
    content = index_path.read_bytes()
    index_path.write_bytes(content[:100] + b"x" + content[101:])
    with pytest.raises(DataError, match=r"damaged, or not an index"):
        tar_index.load(path)
    index_path.write_bytes(content)
    path.write_bytes(WHOLE + bytes(512))
    with pytest.raises(DataError, match=f"made for a tar of {len(WHOLE)} bytes, but a.tar has {len(WHOLE) + 512}"):
        tar_index.load(path)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.tar: no such file"):
        tar_index.load(path)
