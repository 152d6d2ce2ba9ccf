"""data_prep.interleaved.index --output: tars that are elsewhere, or here, and the list of them that training reads."""

import os
import sys
from pathlib import Path

import pytest

from data_prep.interleaved import index
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.shard_files import ShardFiles
from src.systems.interleaved.streaming.tars.indexing import build
from tests.systems.interleaved.streaming.remote.s3_server import Cutter, S3Server
from tests.systems.interleaved.streaming.test_tar_index import DOCUMENTS, WHOLE, tar_of

OTHER = tar_of([*DOCUMENTS[0]])


def documents_of(folder: Path) -> dict[str, list[bytes]]:
    """{url: content of the first part of each document}, read as training reads them."""
    dataset_manifest, listed_shards = manifest.load(folder), {}
    files = ShardFiles(folder, cache=folder / "cache", cache_bytes=10**6)
    for shard in dataset_manifest.shards:
        indexed = tar_index.load_file(folder / shard.index, shard.bytes, shard.url)
        assert len(indexed) == shard.documents
        parts = [indexed.parts_of(number)[0] for number in range(len(indexed))]
        listed_shards[shard.url] = [files.read(shard, int(part["offset"]), int(part["size"])) for part in parts]
    return listed_shards


def expected(tar: bytes) -> list[bytes]:
    indexed = build(memoryview(tar))
    parts = [indexed.parts_of(number)[0] for number in range(len(indexed))]
    return [tar[int(part["offset"]) :][: int(part["size"])] for part in parts]


def test_tars_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, tars = tmp_path / "out", tmp_path / "tars"
    tars.mkdir()
    out.mkdir()
    (tars / "0.tar").write_bytes(WHOLE)
    (tars / "1.tar").write_bytes(OTHER)
    (out / "0.tar").write_bytes(OTHER)
    words = [str(tars / "{0..1}.tar"), str(out / "0.tar"), "--output", str(out), "--source", "web", "--processes", "1"]
    assert index.main(words) == 0
    assert "3 tars, 5 documents" in capsys.readouterr().out
    assert documents_of(out) == {
        str(tars / "0.tar"): expected(WHOLE),
        str(tars / "1.tar"): expected(OTHER),
        "0.tar": expected(OTHER),
    }
    assert [shard.source for shard in manifest.load(out).shards] == ["web"] * 3
    assert sorted(path.name for path in tars.iterdir()) == ["0.tar", "1.tar"], "nothing beside them"
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.idx")}
    (tars / "1.tar").write_bytes(WHOLE)
    assert index.main(words) == 0
    changed = [name for name, time in before.items() if (out / name).stat().st_mtime_ns != time]
    assert len(before) == 3
    assert len(changed) == 1
    assert documents_of(out)[str(tars / "1.tar")] == expected(WHOLE)


def test_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As an array of Slurm: each indexes its share, and the list is there when all are."""
    for number in range(5):
        (tmp_path / f"{number}.tar").write_bytes(WHOLE)
    out = tmp_path / "out"
    words = [str(tmp_path / "*.tar"), "--output", str(out), "--processes", "1", "--slice"]
    assert index.main([*words, "2/3"]) == 0
    assert "1 tars, 3 documents" in capsys.readouterr().out
    assert index.main([*words, "0/3"]) == 0
    lines = capsys.readouterr().out
    assert "2 tars, 6 documents" in lines
    assert "shards.json is written when all slices of the 5 tars are indexed" in lines
    assert not (out / "shards.json").exists()
    assert index.main([*words, "1/3"]) == 0
    assert "shards.json" not in capsys.readouterr().out
    assert [shard.url for shard in manifest.load(out).shards] == [
        str(tmp_path / f"{number}.tar") for number in range(5)
    ]
    for wrong in ("3/3", "1", "-1/3", "a/b"):
        assert index.main([*words[:-1], f"--slice={wrong}"]) == 1
        assert "expected I/N, with I from 0 to N - 1" in capsys.readouterr().err


def test_a_cut_tar_is_in_no_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "0.tar").write_bytes(WHOLE)
    (tmp_path / "1.tar").write_bytes(WHOLE[: int(build(memoryview(WHOLE)).documents["offset"][2])])
    out = tmp_path / "out"
    words = [
        str(tmp_path / "*.tar"),
        f"pipe:cat {tmp_path / '1.tar'}",
        str(tmp_path / "none.tar"),
        "--output",
        str(out),
    ]
    assert index.main([*words, "--processes", "1"]) == 1
    lines = sorted(capsys.readouterr().err.splitlines(), key=lambda line: ("none" in line, "pipe" in line))
    assert "1.tar: cut between two members" in lines[0]
    assert "1.tar: cut between two members" in lines[1]
    assert lines[1].startswith("error: pipe:cat ")
    assert lines[2].endswith("none.tar: no such file.")
    assert index.main([str(tmp_path / "*.tar"), "--output", str(out), "--slice", "0/2"]) == 0, "the whole one alone"
    assert not (out / "shards.json").exists()


@pytest.mark.parametrize("words", [["s3://b/0.tar"], ["pipe:cat x.tar"], ["x.tar", "--source", "web"]])
def test_options_that_need_an_output_folder(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert index.main(words) == 1
    assert "needs --output, a folder for shards.json and the indexes" in capsys.readouterr().err


def test_tars_elsewhere(
    s3: S3Server, cutter: Cutter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two of one name in two places (webdataset #449), and a command; read once, also over a connection that is cut."""
    monkeypatch.setenv("S3_ENDPOINT_URL", s3.environment["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    places = [s3.put("a/0.tar", WHOLE), s3.put("b/0.tar", OTHER), f"pipe:s5cmd cat {s3.put('c/0.tar', OTHER)}"]
    (tmp_path / "train.txt").write_text("\n".join(places))
    cutter.cut(1000, 3000)
    out = tmp_path / "out"
    words = [str(tmp_path / "train.txt"), "--output", str(out), "--processes", "1"]
    assert index.main(words) == 0
    assert "3 tars, 5 documents" in capsys.readouterr().out
    requests = len(cutter.ranges)
    assert requests > 2
    assert index.main(words) == 0
    assert len(cutter.ranges) == requests, "they were passed over"
    assert documents_of(out) == dict(zip(places, [expected(WHOLE), expected(OTHER), expected(OTHER)], strict=True))
    assert sorted(path.suffix for path in out.iterdir() if path.is_file()) == [".idx"] * 3 + [".json"]
    s3.put("b/0.tar", WHOLE)
    assert index.main([*words, "--verify"]) == 0
    listed_shards = manifest.load(out).shards
    assert [shard.documents for shard in listed_shards] == [3, 3, 1]
    assert listed_shards[0].sha256 == listed_shards[1].sha256
    (out / "cache").rename(tmp_path / "old")
    assert documents_of(out)[places[1]] == expected(WHOLE)
    assert index.main(["s3://shards/none.tar", *words[1:]]) == 1
    assert "s3://shards/none.tar: no such object" in capsys.readouterr().err
