"""Tars as other programs write them: every member is read or counted with a reason, every byte is accounted for."""

import gzip
import io
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from data_prep.interleaved import index
from src.systems.interleaved.streaming import manifest
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.tars.members import scan
from tests.systems.interleaved.streaming.test_tar_index import picture, tar_of


def header(name: bytes, kind: bytes, size: int = 0, magic: bytes = b"ustar  \0") -> bytes:
    """A tar header written by hand, for types that `tarfile` does not write."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:124] = b"0000644\0" * 3
    block[124:136] = b"%011o\0" % size
    block[136:148] = b"%011o\0" % 0
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257 : 257 + len(magic)] = magic
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: bytes, content: bytes, kind: bytes = b"0", magic: bytes = b"ustar  \0") -> bytes:
    return header(name, kind, len(content), magic) + content + bytes(-len(content) % 512)


def entry(name: str, kind: bytes, size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, "x.jpg", size
    return info.tobuf(tarfile.GNU_FORMAT)


END = bytes(1024)
JPEG = picture()
PAIR = member(b"good.jpg", JPEG) + member(b"good.txt", b"a text")
OLD_SPARSE = bytearray(header(b"sp.jpg", b"S", 512))
OLD_SPARSE[386:410] = b"%011o\0%011o\0" % (0, 512)
OLD_SPARSE[482] = 1
OLD_SPARSE[148:156] = b" " * 8
OLD_SPARSE[148:156] = b"%06o\0 " % sum(OLD_SPARSE)


def pax(records: dict[str, str], name: bytes, content: bytes, size: int | None = None) -> bytes:
    text = b""
    for key, value in records.items():
        line = f" {key}={value}\n".encode()
        length = len(line) + len(str(len(line)))
        text += str(length + (len(str(length)) > len(str(len(line))))).encode() + line
    body = header(name, b"0", len(content) if size is None else size) + content + bytes(-len(content) % 512)
    return member(b"PaxHeaders/x", text, b"x") + body


STRANGE = {
    "hard link": (entry("hl.jpg", tarfile.LNKTYPE), "a hard link", ".jpg"),
    "hard link with content": (header(b"hc.jpg", b"1", 5) + b"hello" + bytes(507), "a hard link", ".jpg"),
    "symbolic link": (entry("sl.png", tarfile.SYMTYPE), "a symbolic link", ".png"),
    "directory": (entry("folder", tarfile.DIRTYPE), "a directory", ""),
    "directory with a size": (header(b"folder2/", b"5", 4096), "a directory", ""),
    "V7 directory": (header(b"old/", b"\0", 0, b""), "a directory", ""),
    "fifo": (entry("ff.txt", tarfile.FIFOTYPE), "a fifo", ".txt"),
    "character device": (entry("cd.bin", tarfile.CHRTYPE), "a character device", ".bin"),
    "block device": (entry("bd.bin", tarfile.BLKTYPE), "a block device", ".bin"),
    "old GNU sparse": (bytes(OLD_SPARSE) + bytes(512) + b"x" * 512, "a sparse file", ".jpg"),
    "pax sparse": (
        pax({"GNU.sparse.major": "1", "GNU.sparse.name": "ps.webp"}, b"GNUSparseFile.0/ps", b"x" * 600),
        "a sparse file",
        ".webp",
    ),
    "volume label": (header(b"my label", b"V"), "a volume label", ""),
    "rest of a volume": (member(b"mv.jpg", b"rest", b"M"), "the rest of a file of another volume", ".jpg"),
    "dump directory": (member(b"dd/", b"Yfile\0\0", b"D"), "a list of a directory", ""),
    "unknown type": (member(b"ut.jpg", b"??", b"Z"), "a member of type 'Z'", ".jpg"),
    "hidden file": (member(b"._good.jpg", b"resource fork"), "a hidden file", ".jpg"),
    "no suffix": (member(b"README", b"hello"), "no known suffix", ""),
    "unknown suffix": (member(b"us.psd", b"8BPS"), "no known suffix", ".psd"),
    "named field": (member(b"nf.left.jpg", JPEG), "no known suffix", ".left.jpg"),
    "upper case": (member(b"uc.PSD", b"8BPS"), "no known suffix", ".psd"),
    "name that is not UTF-8": (member(b"m\xf6se.\xff\xfe", b"x"), "no known suffix", ".\\xff\\xfe"),
    "text in latin-1": (member(b"l1.txt", b"m\xf6se"), "a text is not UTF-8", ".txt"),
    "text with an image token": (member(b"it.TXT", b"see <image>"), "a text that spells <image>", ".txt"),
    "empty text": (member(b"et.txt", b"\n"), "an empty text", ".txt"),
    "damaged image": (
        member(b"di.tiff", b"II*\0none") + member(b"di.txt", b"a"),
        "an image cannot be decoded",
        ".tiff",
    ),
    "duplicated name": (member(b"dn.txt", b"a") * 2, "a part is there twice", ".txt"),
}


@pytest.mark.parametrize("name", list(STRANGE))
def test_strange_member_is_counted(name: str):
    content, reason, suffix = STRANGE[name]
    result = build(memoryview(content + PAIR + END))
    assert "cut" not in result.facts
    assert suffix in result.facts["passed_over"][reason]
    assert result.facts["read"] == [2, len(JPEG) + 6], "and what follows it is read"
    num_skipped = sum(count for of_reason in result.facts["passed_over"].values() for count, _ in of_reason.values())
    assert num_skipped + 2 == result.facts["members"]


def test_report_names_every_strange_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tar = tmp_path / "strange.tar"
    tar.write_bytes(b"".join(content for content, _, _ in STRANGE.values()) + PAIR + END)
    assert index.main([str(tar), "--output", str(tmp_path / "out"), "--processes", "1"]) == 0
    report = capsys.readouterr().out
    facts = manifest.load(tmp_path / "out").facts
    for _, reason, suffix in STRANGE.values():
        assert any(reason in line and f" {suffix or 'members'}, " in line for line in report.splitlines()), (
            reason,
            suffix,
        )
        assert suffix in facts["passed_over"][reason]
    assert (
        sum(count for of_reason in facts["passed_over"].values() for count, _ in of_reason.values()) + 2
        == facts["members"]
    )


@pytest.mark.parametrize(
    "content",
    [
        member(b"a.jpg", JPEG, b"7") + member(b"a.txt", b"words", b"\0", b""),
        pax({"path": "a.jpg", "size": str(len(JPEG))}, b"short", JPEG, 0) + member(b"a.txt", b"words"),
        member(b"g", b"19 comment=a words\n", b"g") + member(b"a.jpg", JPEG) + member(b"a.txt", b"words"),
        member(b"././@LongLink", b"a" * 150 + b".jpg\0", b"L")
        + member(b"a" * 99, JPEG)
        + member(b"a" * 150 + b".txt", b"words"[:0]),
        member(b"m\xf6.jpg", JPEG) + member(b"m\xf6.txt", b"words"),
        member(b"a.JPEG", JPEG) + member(b"a.Txt", b"words"),
        member(b"a.jpg\0garbage", JPEG) + member(b"a.txt", b"words"),
        member(b"a.jpg", JPEG) + member(b"a.txt", b"words") + END + member(b"b.txt", b"more"),
        member(b"a.jpg", JPEG) + member(b"a.txt", b"words") + END + bytes(512 * 20) + member(b"b.txt", b"more"),
    ],
    ids=[
        "contiguous",
        "pax size",
        "global pax",
        "long name",
        "latin-1 name",
        "upper case",
        "NUL in a name",
        "concatenated",
        "padded",
    ],
)
def test_regular_members_of_every_writer_are_read(content: bytes):
    members = scan(memoryview(content + END))
    assert members.cut is None
    assert members.reasons[:2] == ["", ""]
    whole = content + END
    assert whole[members.data[0] : members.data[0] + members.sizes[0]] == JPEG
    assert len(members.names) == (3 if b"b.txt" in content else 2)


def test_bytes_after_the_end_are_counted():
    result = build(memoryview(PAIR + END + b"trailing" + bytes(504)))
    assert result.facts["passed_over"] == {"bytes after the end of the archive": {"": [1, 512]}}
    assert result.documents["bad"].tolist() == [0]


def test_document_with_a_link_for_a_part_is_incomplete():
    """Its image is somewhere else, so the text must not be learned without it."""
    result = build(memoryview(entry("a.jpg", tarfile.LNKTYPE) + member(b"a.txt", b"words") + END))
    assert result.facts["passed_over"] == {"a hard link": {".jpg": [1, 0]}, "incomplete": {".txt": [1, 5]}}


@pytest.mark.parametrize(
    ("name", "compress"),
    [("gzip", gzip.compress), ("bzip2", __import__("bz2").compress), ("xz", __import__("lzma").compress)],
)
def test_compressed_tar_is_refused_by_name(name: str, compress, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.tar").write_bytes(compress(PAIR + END))
    assert index.main([str(tmp_path / "a.tar"), "--processes", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"a.tar: compressed with {name}" in line
    assert f"such as {name} -dc FILE" in line


def test_files_about_an_image_are_no_images():
    """gallery-dl writes FILE.jpg.json, and others captions as FILE.jpg.txt."""
    members = [("a.jpg", JPEG), ("a.jpg.json", b"{}"), ("a.txt", b"words")]
    result = build(memoryview(tar_of([*members, ("b.jpg", JPEG), ("b.jpg.txt", "\ufeffwords".encode())])))
    assert result.documents["bad"].tolist() == [0, 0]
    assert result.facts["passed_over"]["no known suffix"] == {".jpg.json": [1, 2]}


def test_source_without_a_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.tar").write_bytes(
        tar_of([(f"{i}.{kind}", JPEG if kind == "jpg" else b"3") for i in range(9) for kind in ("cls", "jpg")])
    )
    out = tmp_path / "out"
    for _ in range(2):
        assert index.main([str(tmp_path / "a.tar"), "--output", str(out), "--processes", "1"]) == 1
        line = capsys.readouterr().err
        assert "none of 9 documents" in line
        assert ".cls" in line
    assert not (out / "shards.json").exists()
    words = ["--output", str(out), "--processes", "1", "--fields", '{"text": "cls"}']
    assert index.main([str(tmp_path / "a.tar"), *words]) == 0
    assert manifest.load(out).facts["bad_documents"] == {}


def test_long_documents_are_read():
    """More parts than 65,535, which older indexes could not count."""
    count = 70_000
    content = b"".join(member(b"a.%06d.txt" % i, b"x") for i in range(count))
    result = build(memoryview(content + END))
    assert result.documents["parts"].tolist() == [count]
    assert result.documents["bad"].tolist() == [0]
    assert result.parts["position"].tolist() == list(range(count))


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_real_tar_command(form: str, tmp_path: Path):
    """Written by GNU tar from a folder with links, a sparse file, a fifo and long names."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(JPEG)
    (folder / "a.txt").write_bytes(b"words")
    (folder / "b.jpg").hardlink_to(folder / "a.jpg")
    (folder / "c.jpg").symlink_to("a.jpg")
    with open(folder / "s.jpg", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x")
    fifo = form != "v7"
    if fifo:
        subprocess.run(["mkfifo", folder / "f.txt"], check=True)
    (folder / ("long" * (20 if form in ("v7", "ustar") else 50) + ".txt")).write_bytes(b"more")
    sparse = [] if form in ("v7", "ustar") else ["--sparse"]
    subprocess.run(
        ["tar", f"--format={form}", *sparse, "--sort=name", "-cf", tmp_path / "a.tar", "."], cwd=folder, check=True
    )
    content = (tmp_path / "a.tar").read_bytes()
    result = build(memoryview(content))
    assert "cut" not in result.facts
    reasons = {reason: sum(n for n, _ in suffixes.values()) for reason, suffixes in result.facts["passed_over"].items()}
    assert reasons["a directory"] == reasons["a hard link"] == reasons["a symbolic link"] == 1
    assert reasons.get("a fifo", 0) == fifo
    assert reasons.get("a sparse file", 0) == bool(sparse)
    assert result.facts["read"][0] == 3, "the two good documents"
    assert result.facts["members"] == 3 + sum(reasons.values())


def test_names_that_are_not_utf8_can_be_printed_and_written():
    """Also where the name is a suffix in the report."""
    facts = build(memoryview(STRANGE["name that is not UTF-8"][0] + PAIR + END)).facts
    assert json.loads(json.dumps(facts).encode()) == facts
    assert str(facts).encode().decode() == str(facts)


def test_volumes_are_refused(tmp_path: Path):
    """The first volume ends within a member; the second starts with its rest."""
    content = io.BytesIO(member(b"a.txt", b"x" * 5000))
    assert build(memoryview(content.getvalue()[:2048])).facts["cut"]
