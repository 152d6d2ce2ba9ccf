"""Shards on a real S3 server that is stopped, stalled, killed and cut off in the middle of a read."""

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError
from src.systems.interleaved.streaming.manifest import ChangedShardError, Shard, ShardUnavailable
from src.systems.interleaved.streaming.shard_files import ShardFiles
from tests.conftest import ROOT
from tests.systems.interleaved.streaming.remote.s3_server import Cutter, S3Server

CONTENT = random.Random(0).randbytes(3_000_000)
LIMIT = 8_000_000


@pytest.fixture
def shard(s3: S3Server, request: pytest.FixtureRequest) -> Shard:
    return upload(s3, f"{request.node.name}/00.tar", CONTENT)


def upload(s3: S3Server, key: str, content: bytes) -> Shard:
    """What the index says of an object that is put now."""
    etag = f'"{hashlib.md5(content).hexdigest()}"'  # as S3 makes it
    return Shard(s3.put(key, content), "", 1, len(content), sha256=hashlib.sha256(content).hexdigest(), etag=etag)


def reader(folder: Path, patience: float = 20, limit: int = LIMIT) -> ShardFiles:
    return ShardFiles(folder, cache=folder / "cache", cache_bytes=limit, patience=patience)


def files_of(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.iterdir() if path.name != ".lock")


def test_a_shard_is_fetched_once_and_then_read_from_the_cache(shard: Shard, tmp_path: Path, cutter: Cutter):
    files = reader(tmp_path)
    assert files.read(shard, 1000, 5000) == CONTENT[1000:6000]
    assert cutter.ranges == [(0, len(CONTENT) - 1)]
    again = pickle.loads(pickle.dumps(files))
    for one in (files, again):
        assert one.read(shard, len(CONTENT) - 10, 10) == CONTENT[-10:]
    assert cutter.ranges == [(0, len(CONTENT) - 1)]
    assert files.counters == {"misses": 1, "hits": 1}
    assert again.counters == {"hits": 1}
    with pytest.raises(ChangedShardError, match=r"ends before byte 3000001, but had 3000000 bytes when it was indexed"):
        files.read(shard, len(CONTENT) - 10, 11)
    assert files_of(tmp_path / "cache") == [".tar"]


def test_cut_connections_resume_at_the_last_good_byte(shard: Shard, tmp_path: Path, cutter: Cutter):
    cutter.cut(100, 500_000, 900_000, 2_800_000)
    assert reader(tmp_path).read(shard, 0, len(CONTENT)) == CONTENT
    assert [last for _, last in cutter.ranges] == [len(CONTENT) - 1] * 5
    begins = [first for first, _ in cutter.ranges]
    assert begins == sorted(begins)
    assert begins[:2] == [0, 0]
    assert begins[2] > 300_000
    assert begins[4] > 2_600_000
    assert cutter.bytes_sent < len(CONTENT) + 4 * 200_000


@pytest.mark.slow
def test_as_long_as_bytes_come_it_is_not_given_up(shard: Shard, tmp_path: Path, cutter: Cutter):
    cutter.cut(*range(200_000, 2_800_000, 200_000))
    assert reader(tmp_path, patience=2).read(shard, 0, len(CONTENT)) == CONTENT
    assert len(cutter.ranges) == 14


def test_a_request_to_a_silent_server_is_repeated(shard: Shard, tmp_path: Path, cutter: Cutter):
    cutter.stall(1_000_000)
    assert reader(tmp_path, patience=2).read(shard, 0, len(CONTENT)) == CONTENT
    assert len(cutter.ranges) == 2
    assert cutter.ranges[1][0] > 800_000


def test_a_missing_server_is_reported_in_time(shard: Shard, tmp_path: Path, cutter: Cutter):
    cutter.to = 9
    start = time.monotonic()
    with pytest.raises(ShardUnavailable, match=r"00\.tar: given up at byte 0: no new byte in 1 s: "):
        reader(tmp_path, patience=1).read(shard, 0, 10)
    assert time.monotonic() < start + 8
    assert files_of(tmp_path / "cache") == []


@pytest.mark.slow
def test_a_server_that_is_stopped_and_killed_in_the_middle(shard: Shard, s3: S3Server, tmp_path: Path, cutter: Cutter):
    def stop() -> bool:
        s3.send(signal.SIGSTOP)
        return False

    restart = threading.Thread(target=s3.start_again)

    def kill() -> bool:
        s3.send(signal.SIGKILL)
        restart.start()
        return True

    cutter.at(1_000_000, stop)
    with pytest.raises(ShardUnavailable, match=r"given up at byte \d+: no new byte in 2 s"):
        reader(tmp_path, patience=2).read(shard, 0, 10)
    s3.send(signal.SIGCONT)
    cutter.at(cutter.bytes_sent + 1_000_000, kill)
    assert reader(tmp_path).read(shard, 0, len(CONTENT)) == CONTENT
    restart.join()
    assert files_of(tmp_path / "cache") == [".tar"]


def test_an_object_that_was_replaced_is_refused(shard: Shard, s3: S3Server, tmp_path: Path):
    files = reader(tmp_path)
    assert files.read(shard, 0, 10) == CONTENT[:10]
    key = shard.url.removeprefix("s3://shards/")
    s3.put(key, CONTENT[::-1])
    assert files.read(shard, 0, 10) == CONTENT[:10], "what is in the cache is what was indexed"
    with pytest.raises(ChangedShardError, match=r"its ETag has changed since it was indexed\. Index it again"):
        reader(tmp_path / "other").read(shard, 0, 10)
    without = Shard(shard.url, "", 1, shard.bytes - 1)
    with pytest.raises(ChangedShardError, match=r"has 3000000 bytes, and had 2999999 when it was indexed"):
        reader(tmp_path).read(without, 0, 10)
    s3.put(f"{key}.empty", b"")
    with pytest.raises(ChangedShardError, match="its size has changed"):
        reader(tmp_path).read(Shard(f"{shard.url}.empty", "", 1, 10), 0, 10)
    wrong_shard = Shard(shard.url, "", 1, shard.bytes, sha256=shard.sha256)
    with pytest.raises(ChangedShardError, match="its sha256 differs from the index"):
        reader(tmp_path).read(wrong_shard, 0, 10)
    assert files_of(tmp_path / "cache") == [".tar"]


def test_one_that_is_replaced_in_the_middle_is_never_mixed(s3: S3Server, tmp_path: Path, cutter: Cutter):
    """Also where no ETag was indexed."""
    shard = Shard(upload(s3, "mixed.tar", CONTENT).url, "", 1, len(CONTENT))
    cutter.at(1_000_000, lambda: bool(s3.put("mixed.tar", CONTENT[::-1])))
    with pytest.raises(ChangedShardError, match="its ETag has changed"):
        reader(tmp_path).read(shard, 0, 10)


def test_a_missing_object_or_a_wrong_key_is_reported(shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = time.monotonic()
    with pytest.raises(ShardUnavailable, match=r"s3://shards/none\.tar: no such object \(NoSuchKey\)\."):
        reader(tmp_path).read(Shard("s3://shards/none.tar", "", 1, 10), 0, 10)
    with pytest.raises(ShardUnavailable, match=r"s3://none/none\.tar: no such object \(NoSuchBucket\)\."):
        reader(tmp_path).read(Shard("s3://none/none.tar", "", 1, 10), 0, 10)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ShardUnavailable, match=r"00\.tar: access denied \(SignatureDoesNotMatch\)\."):
        reader(tmp_path, patience=19).read(
            shard, 0, 10
        )  # another time limit is another connection, which reads the keys anew
    assert time.monotonic() < start + 10, "without trying again"


def test_keys_of_a_profile(shard: Shard, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As `aws configure` writes them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    key, secret = s3.environment["AWS_ACCESS_KEY_ID"], s3.environment["AWS_SECRET_ACCESS_KEY"]
    file = tmp_path / "credentials"
    file.write_text(
        f"[default]\naws_access_key_id = x\n[mine]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert reader(tmp_path, patience=18).read(shard, 0, 10) == CONTENT[:10]
    file.write_text("[mine")
    with pytest.raises(ConfigError, match=r"credentials: cannot be read: "):
        reader(tmp_path / "other", patience=17).read(shard, 0, 10)


def test_two_shards_of_one_name(s3: S3Server, tmp_path: Path):
    """webdataset #449: wids kept both as one file."""
    shards = [upload(s3, f"{where}/same.tar", where.encode() * 100) for where in ("train", "valid")]
    files = reader(tmp_path)
    assert [files.read(shard, 0, 5) for shard in shards * 2] == [b"train", b"valid"] * 2


def test_a_forked_process_reads_too(shard: Shard, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """obstore's threads do not survive a fork, and what a forked process asks of them never returns."""
    other = upload(s3, "forked.tar", CONTENT[::-1])
    files = reader(tmp_path)
    assert files.read(shard, 0, 10) == CONTENT[:10]
    context = multiprocessing.get_context("fork")
    answers: Any = context.SimpleQueue()

    def child() -> None:
        try:
            files.read(Shard("s3://shards/none.tar", "", 1, 10), 0, 10)
        except ShardUnavailable as error:
            answers.put(str(error))
        answers.put((files.read(other, 0, 10), files.read(shard, 10, 10), dict(files.counters)))
        full_reader = reader(tmp_path / "crowded", limit=len(CONTENT))
        full_reader.max_cached, second_reader = 1, reader(tmp_path / "crowded", limit=len(CONTENT))
        second_reader.read(other, 0, 1)
        answers.put((full_reader.read(other, 5, 5), full_reader.read(shard, 20, 10)))
        wrong_shard = Shard(shard.url, "", 1, shard.bytes - 1)
        try:
            reader(tmp_path).read(wrong_shard, 0, 10)
        except ChangedShardError as error:
            answers.put(str(error))
        answers.put(full_reader.read(shard, 40, 10))

    process = context.Process(daemon=True, target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert answers.get() == "s3://shards/none.tar: no such object (NoSuchKey)."
    assert answers.get() == (CONTENT[::-1][:10], CONTENT[10:20], {"hits": 1, "misses": 1})
    assert answers.get() == (CONTENT[::-1][5:10], CONTENT[20:30])
    assert answers.get() == f"{shard.url}: has 3000000 bytes, and had 2999999 when it was indexed. Index it again."
    assert answers.get() == CONTENT[40:50]


def test_ranges_are_read_from_the_server_without_room_in_the_cache(
    shard: Shard, s3: S3Server, tmp_path: Path, cutter: Cutter
):
    """A cache for one shard, which another process is reading: no wait, as it may be waiting for this one."""
    other = upload(s3, "around.tar", CONTENT[::-1])
    holder, files = reader(tmp_path, limit=len(CONTENT)), reader(tmp_path, limit=len(CONTENT))
    assert holder.read(shard, 0, 10) == CONTENT[:10]
    for _ in range(2):
        assert files.read(other, 1000, 50) == CONTENT[::-1][1000:1050]
    assert cutter.ranges[1:] == [(1000, 1049)] * 2
    assert files.counters == {"misses": 2}
    with pytest.raises(ChangedShardError, match="ends before byte"):
        files.read(other, len(CONTENT), 1)
    s3.put("around.tar", CONTENT)
    with pytest.raises(ChangedShardError, match="its ETag has changed"):
        files.read(other, 1000, 50)
    holder.close()
    assert files.read(shard, 0, 10) == CONTENT[:10]


def used_bytes(cache: Path) -> int:
    """Of files that may be given up or published meanwhile, which changes their names."""
    sizes = dict[int, int]()
    for path in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):
            facts = path.stat()
            sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())


READ_ALL = """
import random, sys
from pathlib import Path
from src.systems.interleaved.streaming import manifest
from src.systems.interleaved.streaming.shard_files import ShardFiles

folder, number, reads = Path(sys.argv[1]), int(sys.argv[2]), 60
shards = manifest.load(folder).shards
files = ShardFiles(folder, cache=folder / "cache", cache_bytes=int(sys.argv[3]))
contents = {shard.url: (folder / Path(shard.url).name).read_bytes() for shard in shards}
rng = random.Random(number)
for _ in range(reads):
    shard = rng.choice(shards)
    offset = rng.randrange(shard.bytes - 1000)
    assert files.read(shard, offset, 1000) == contents[shard.url][offset : offset + 1000]
assert files.counters.total() == reads
"""


@pytest.mark.slow
def test_processes_share_a_cache_of_two_shards(s3: S3Server, tmp_path: Path):
    from src.systems.interleaved.streaming import manifest

    contents = [random.Random(n).randbytes(200_000) for n in range(5)]
    shards = [upload(s3, f"shared/{n}.tar", content) for n, content in enumerate(contents)]
    for n, content in enumerate(contents):
        (tmp_path / f"{n}.tar").write_bytes(content)
    manifest.save(manifest.Manifest(tmp_path, shards))
    limit = 400_000
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(n), str(limit)], cwd=ROOT, env=os.environ | s3.environment) for n in range(4)
    ]
    most = Counter[str]()
    while any(process.poll() is None for process in processes):
        if (cache / ".lock").exists():
            with open(cache / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # in which room is made
                most["bytes"] = max(most["bytes"], used_bytes(cache))
    assert [process.returncode for process in processes] == [0] * 4
    assert 0 < most["bytes"] <= limit
    assert set(files_of(cache)) == {".tar"}


def test_a_shard_is_not_published_while_room_is_made(tmp_path: Path):
    """Or the one that makes room finds it under neither name, and believes that there is more."""
    begin, cache = tmp_path / "begin", tmp_path / "cache"
    shard = Shard(f"pipe:while [ ! -e {begin} ]; do sleep 0.01; done; echo 1234", "", 1, 5)
    reading = threading.Thread(target=lambda: reader(tmp_path).read(shard, 0, 5))
    reading.start()
    while [path.stat().st_size for path in cache.glob("*.part")] != [5]:
        time.sleep(0.001)
    with open(cache / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin.touch()
        reading.join(0.5)
        assert reading.is_alive()
        assert files_of(cache) == [".part"]
    reading.join()
    assert files_of(cache) == [".tar"]


def test_s5cmd_as_a_command(shard: Shard, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the shards of a list of WebDataset: pipe:s5cmd cat s3://BUCKET/KEY."""
    monkeypatch.setenv("S3_ENDPOINT_URL", s3.environment["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert reader(tmp_path).read(Shard(f"pipe:s5cmd cat {shard.url}", "", 1, shard.bytes), 5, 10) == CONTENT[5:15]
    with pytest.raises(ShardUnavailable, match=r"the command ended with exit status 1: ERROR .*none\.tar"):
        reader(tmp_path, patience=1).read(Shard("pipe:s5cmd cat s3://shards/none.tar", "", 1, 10), 0, 10)
