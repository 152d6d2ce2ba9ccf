"""Local shards, commands, and the cache: who holds what, what is deleted, and what a kill leaves at any moment."""

import fcntl
import gc
import hashlib
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError
from src.systems.interleaved.streaming.manifest import ChangedShardError, Shard, ShardUnavailable, sample_tar
from src.systems.interleaved.streaming.shard_files import ShardFiles, open_files

SIZE = 1000
FORK = multiprocessing.get_context("fork")


def content_of(name: str) -> bytes:
    return hashlib.shake_128(name.encode()).digest(SIZE)


@pytest.fixture
def pipe_shard(tmp_path: Path) -> Callable[..., Shard]:
    """Makes a file, and the shard that a command writes from it."""

    def make(name: str, command: str = "cat {file}", **facts: Any) -> Shard:
        file = tmp_path / f"{name}.bytes"
        file.write_bytes(content_of(name))
        return Shard(f"pipe:{command.format(file=file, folder=tmp_path)}", "", 1, SIZE, **facts)

    return make


def reader(folder: Path, shards: int = 2, patience: float = 20) -> ShardFiles:
    """With a cache for so many shards."""
    return ShardFiles(folder, cache=folder / "cache", cache_bytes=shards * SIZE, patience=patience)


def cached(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").iterdir()} - {".lock"}


def name_in(files: ShardFiles, shard: Shard) -> str:
    assert files.cache
    return files.cache.path(shard).name


def test_local_shards_are_read_where_they_are(tmp_path: Path):
    """mosaicml/streaming #988: a cache limit deleted the only copy of local shards."""
    shards = [Shard(f"{n}.tar", "", 1, SIZE) for n in range(5)]
    for shard in shards:
        (tmp_path / shard.url).write_bytes(content_of(shard.url))
    files = ShardFiles(tmp_path, most_open=2, cache=tmp_path, cache_bytes=1)
    for shard in shards * 2:
        assert files.read(shard, 10, 20) == content_of(shard.url)[10:30]
    assert sorted(path.name for path in tmp_path.iterdir()) == [shard.url for shard in shards]
    assert not files.counters
    with pytest.raises(ShardUnavailable, match=r"none\.tar: cannot be opened \(No such file or directory\)"):
        files.read(Shard("none.tar", "", 1, SIZE), 0, 1)
    with pytest.raises(ChangedShardError, match=r"0\.tar: has 1000 bytes, and had 999 when it was indexed"):
        ShardFiles(tmp_path).read(Shard("0.tar", "", 1, SIZE - 1), 0, 1)


def test_a_local_shard_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path):
    """By another of the same size: while it is held open the first one is read on, and then no other."""
    shards = [Shard(f"{n}.tar", "", 1, SIZE) for n in range(2)]
    for shard in shards:
        (tmp_path / shard.url).write_bytes(content_of(shard.url))
    files = ShardFiles(tmp_path, most_open=1)
    assert files.read(shards[0], 0, SIZE) == content_of("0.tar")
    (tmp_path / "new").write_bytes(content_of("other"))
    (tmp_path / "new").replace(tmp_path / "0.tar")
    assert files.read(shards[0], 0, SIZE) == content_of("0.tar")
    files.read(shards[1], 0, 1)
    with pytest.raises(ChangedShardError, match=r"0\.tar: was replaced or written to since it was first read"):
        files.read(shards[0], 0, 1)


@pytest.mark.parametrize("name", ["0.tar", "copy.tar"])
def test_every_process_notices_a_local_tar_replaced_since_it_was_indexed(tmp_path: Path, name: str):
    content = content_of("0.tar")
    (tmp_path / "0.tar").write_bytes(content)
    shard = Shard(
        "0.tar", "", 1, SIZE, mtime_ns=(tmp_path / "0.tar").stat().st_mtime_ns, sample=sample_tar(tmp_path / "0.tar")
    )
    assert ShardFiles(tmp_path).read(shard, 0, SIZE) == content
    (tmp_path / "copy.tar").write_bytes(content)
    os.utime(tmp_path / "copy.tar", ns=(5, 5))
    assert ShardFiles(tmp_path).read(replace(shard, url="copy.tar"), 0, SIZE) == content, (
        "a copy has another time and the same bytes"
    )
    (tmp_path / name).write_bytes(content[:-1] + b"?")
    os.utime(tmp_path / name, ns=(7, 7))
    for _ in range(2):
        with pytest.raises(ChangedShardError, match=rf"{name}: was replaced or written to since it was indexed"):
            ShardFiles(tmp_path).read(replace(shard, url=name), 0, 1)


def test_a_local_shard_that_is_written_to_while_it_is_open_is_refused(tmp_path: Path):
    shard = Shard("0.tar", "", 1, SIZE)
    (tmp_path / shard.url).write_bytes(content_of("0.tar"))
    files = ShardFiles(tmp_path)
    assert files.read(shard, 0, SIZE) == content_of("0.tar")
    before = (tmp_path / shard.url).stat().st_mtime_ns
    with open(tmp_path / shard.url, "r+b") as file:
        file.write(content_of("other"))
    os.utime(tmp_path / shard.url, ns=(before + 1, before + 1))  # clocks of file systems may be coarse
    with pytest.raises(ChangedShardError, match=r"0\.tar: was written to since it was first read"):
        files.read(shard, 0, SIZE)


def test_a_cache_in_the_folder_of_the_shards_leaves_them(pipe_shard: Callable[..., Shard], tmp_path: Path):
    names = ["0.tar", "a.part", f"{'0' * 63}.tar", f"{'g' * 64}.tar"]
    for name in names:
        (tmp_path / name).write_bytes(content_of(name))
    files = ShardFiles(tmp_path, cache=tmp_path, cache_bytes=SIZE)
    for name in ("x", "y"):
        assert files.read(pipe_shard(name), 0, SIZE) == content_of(name)
    assert all((tmp_path / name).read_bytes() == content_of(name) for name in names)


def test_the_one_that_was_used_longest_ago_goes(pipe_shard: Callable[..., Shard], tmp_path: Path):
    a, b, c = (pipe_shard(name) for name in "abc")
    files = reader(tmp_path)
    for shard in (a, b, a, c, a):
        assert files.read(shard, 5, 10) == content_of(shard.url[-7])[5:15]
    assert cached(tmp_path) == {name_in(files, a), name_in(files, c)}
    assert files.counters == {"misses": 3, "hits": 2}
    files.close()
    for long_ago, shard in enumerate((a, c)):
        os.utime(tmp_path / "cache" / name_in(files, shard), (long_ago, long_ago))
    other = reader(tmp_path)
    other.read(a, 0, 1)
    other.close()
    assert reader(tmp_path).read(b, 0, 5) == content_of("b")[:5]
    assert cached(tmp_path) == {name_in(files, a), name_in(files, b)}, "use by other readers counts, too"


def test_files_without_a_reference_make_room(pipe_shard: Callable[..., Shard], tmp_path: Path):
    a, b, c = (pipe_shard(name) for name in "abc")
    files = ShardFiles(tmp_path, cache=tmp_path / "cache", cache_bytes=2 * SIZE, patience=0.2, max_cached=1)
    for shard in (a, b, a, b, a):
        files.read(shard, 0, 1)
    assert files.counters == {"misses": 2, "hits": 3}
    assert files.cache
    assert not files.cache.fetch_ahead(c, {name_in(files, b)}, 1 << 62), "one is read and the other is spared"
    assert not files.cache.fetch_ahead(c, (), 0), "both were used since"
    assert files.cache.fetch_ahead(c, (), 1 << 62)
    assert cached(tmp_path) == {name_in(files, a), name_in(files, c)}


@pytest.mark.slow
def test_a_reference_ends_with_its_reader(pipe_shard: Callable[..., Shard], tmp_path: Path):
    a, b = pipe_shard("a"), pipe_shard("b")
    holders, other = [reader(tmp_path, 1, 0.2)], reader(tmp_path, 1, 0.2)
    holders[0].read(a, 0, 1)
    with pytest.raises(
        ShardUnavailable, match=r"no room in .*cache for 0\.2 s: other shards being read fill its 1000 bytes"
    ):
        other.read(b, 0, 1)
    inside, outside = FORK.Pipe()

    def child() -> None:
        assert not holders[0].counters
        outside.send(os.getpid())
        signal.pause()

    process = FORK.Process(daemon=True, target=child)
    process.start()
    inside.recv()
    holders.clear()
    gc.collect()
    assert other.read(b, 0, 1) == content_of("b")[:1], "a process that was forked meanwhile holds nothing"
    process.kill()
    process.join()

    def read_and_wait() -> None:
        files = reader(tmp_path, 1)
        files.read(a, 0, 1)
        outside.send(0)
        signal.pause()

    other.close()
    process = FORK.Process(daemon=True, target=read_and_wait)
    process.start()
    inside.recv()
    with pytest.raises(ShardUnavailable, match="no room"):
        other.read(b, 0, 1)
    process.kill()
    process.join()
    assert other.read(b, 0, 1) == content_of("b")[:1]


def test_an_object_can_be_pickled_and_forked(pipe_shard: Callable[..., Shard], tmp_path: Path):
    a = pipe_shard("a")
    files = reader(tmp_path)
    files.read(a, 0, 1)
    assert pickle.loads(pickle.dumps(files)).read(a, 3, 4) == content_of("a")[3:7]
    answers: Any = FORK.SimpleQueue()
    process = FORK.Process(daemon=True, target=lambda: answers.put((files.read(a, 3, 4), dict(files.counters))))
    process.start()
    assert answers.get() == (content_of("a")[3:7], {"hits": 1})
    process.join()


def test_processes_fetch_a_shard_once(pipe_shard: Callable[..., Shard], tmp_path: Path):
    wait = "echo x >> {folder}/log; while [ ! -e {folder}/go ]; do sleep 0.01; done; cat {file}"
    shard, answers, end = pipe_shard("a", wait), FORK.SimpleQueue(), FORK.Event()

    def child() -> None:
        files = reader(tmp_path)
        try:
            answers.put(files.read(shard, 0, SIZE))
        except ShardUnavailable as error:
            answers.put(error)
        end.wait()  # with the file open: nobody may wait for its lock

    processes = [FORK.Process(daemon=True, target=child) for _ in range(4)]
    for process in processes:
        process.start()
    until((tmp_path / "log").exists)
    until(lambda: all(has_part_open(process.pid) for process in processes))
    (tmp_path / "go").touch()
    assert [answers.get() for _ in processes] == [content_of("a")] * 4
    end.set()
    for process in processes:
        process.join()
    assert (tmp_path / "log").read_text() == "x\n"


def has_part_open(process: int | None) -> bool:
    return any(
        os.readlink(link).endswith(".part") for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()
    )


def test_one_that_was_fetched_in_the_moment_before(pipe_shard: Callable[..., Shard], tmp_path: Path):
    """Between a look into the cache and the lock on the part."""
    shard, others = pipe_shard("a", "echo x >> {folder}/log; cat {file}"), [reader(tmp_path)]

    def child() -> None:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).endswith(".part") and others:
                others.pop().read(shard, 0, 1)

        sys.addaudithook(hook)
        assert reader(tmp_path).read(shard, 0, SIZE) == content_of("a")
        assert not others

    process = FORK.Process(daemon=True, target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "x\n"


def test_a_fetcher_that_is_stopped_or_killed(pipe_shard: Callable[..., Shard], tmp_path: Path):
    shard = pipe_shard(
        "a",
        (
            "head -c 500 {file}; echo x >> {folder}/log; while [ ! "
            "-e {folder}/go ]; do sleep 0.01; done; tail -c 500 {file}"
        ),
    )
    process = FORK.Process(daemon=True, target=lambda: reader(tmp_path).read(shard, 0, 1))
    process.start()
    until((tmp_path / "log").exists)
    assert process.pid
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ShardUnavailable, match=r"another process is downloading it, but made no progress for 0\.2 s"):
        reader(tmp_path, patience=0.2).read(shard, 0, 1)
    process.kill()
    process.join()
    assert [name[-5:] for name in cached(tmp_path)] == [".part"]
    assert reader(tmp_path).read(pipe_shard("b"), 0, 1) == content_of("b")[:1]
    assert [name[-4:] for name in cached(tmp_path)] == [".tar"], "what the killed process has left is gone"
    (tmp_path / "go").touch()
    assert reader(tmp_path).read(shard, 0, SIZE) == content_of("a")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


EVENTS = ("open", "os.remove", "os.rename", "os.truncate", "fcntl.flock", "subprocess.Popen", "os.utime")


@pytest.mark.slow
def test_a_kill_at_any_call_loses_nothing(pipe_shard: Callable[..., Shard], tmp_path: Path):
    """Of a fetch with a deletion before it: before its first call of the system that changes anything, its second, and
    so on."""
    a, b = pipe_shard("a"), pipe_shard("b")
    has_finished = False
    for number in range(200):
        keeper = reader(tmp_path, 1)
        keeper.read(a, 0, 1)
        keeper.close()

        def child(number: int = number) -> None:
            calls = iter(range(number))

            def hook(event: str, _: object) -> None:
                if event in EVENTS and next(calls, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            files = reader(tmp_path, 1)
            sys.addaudithook(hook)
            assert files.read(b, 0, SIZE) == content_of("b")
            os._exit(0)

        process = FORK.Process(daemon=True, target=child)
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        for name in cached(tmp_path):
            if name.endswith(".tar"):
                assert (tmp_path / "cache" / name).read_bytes() in (content_of("a"), content_of("b"))
        assert sum((tmp_path / "cache" / name).stat().st_size for name in cached(tmp_path)) <= SIZE
        files = reader(tmp_path, 1)
        assert files.read(b, 0, SIZE) == content_of("b")
        assert cached(tmp_path) == {name_in(files, b)}
        files.close()
        if has_finished := process.exitcode == 0:
            break
    assert has_finished
    assert number > 10


def test_two_commands_and_keys(pipe_shard: Callable[..., Shard], tmp_path: Path):
    """Another size or ETag is another file."""
    a = pipe_shard("a")
    files = reader(tmp_path)
    names = {
        name_in(files, shard)
        for shard in (a, pipe_shard("b"), Shard(a.url, "", 1, SIZE - 1), Shard(a.url, "", 1, SIZE, etag='"1"'))
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("head -c 999 {file}", ShardUnavailable, "the command ended with 999 of 1000 bytes"),
        (
            "cat {file}; echo one; exit 0",
            ChangedShardError,
            "the command writes more than the 1000 bytes that were indexed",
        ),
        (
            "cat {file}; echo reset >&2; echo by peer. >&2; exit 3",
            ShardUnavailable,
            "the command ended with exit status 3: by peer",
        ),
        ("false | cat {file}", ShardUnavailable, "the command ended with exit status 1"),
        (
            "none-such {file}",
            ShardUnavailable,
            "the command ended with exit status 127: .*none-such: command not found",
        ),
        ("head -c 10 {file}; sleep 100", ShardUnavailable, r"the command wrote nothing for 0\.5 s"),
        ("cat {file}; exec >&-; sleep 100", ShardUnavailable, "the command does not end after its last byte, 1000"),
    ],
)
def test_a_command_that_fails(
    command: str, error: type[Exception], message: str, pipe_shard: Callable[..., Shard], tmp_path: Path
):
    shard = pipe_shard("a", command)
    with pytest.raises(error, match=f"{message}\\.") as error_info:
        reader(tmp_path, patience=0.5).read(shard, 0, 1)
    assert str(error_info.value).startswith(shard.url)
    assert cached(tmp_path) == set()
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).stdout == b"", (
        "no process is left"
    )


def test_a_command_that_fails_is_run_again(pipe_shard: Callable[..., Shard], tmp_path: Path):
    command = "head -c 500 {file}; if [ $(wc -l < {folder}/log) -lt 2 ]; then exit 1; fi; tail -c 500 {file}"
    shard = pipe_shard("a", "echo x >> {folder}/log; " + command, sha256=hashlib.sha256(content_of("a")).hexdigest())
    assert reader(tmp_path).read(shard, 0, SIZE) == content_of("a")
    assert (tmp_path / "log").read_text() == "x\nx\n"


def test_other_bytes_than_were_indexed(pipe_shard: Callable[..., Shard], tmp_path: Path):
    shard = pipe_shard("a", "echo x >> {folder}/log; cat {file}", sha256=hashlib.sha256(content_of("b")).hexdigest())
    with pytest.raises(ChangedShardError, match="its sha256 differs from the index"):
        reader(tmp_path).read(shard, 0, 1)
    assert (tmp_path / "log").read_text() == "x\nx\n"
    assert cached(tmp_path) == set()


def test_a_damaged_file_is_fetched_again(pipe_shard: Callable[..., Shard], tmp_path: Path):
    a = pipe_shard("a")
    files = reader(tmp_path)
    files.read(a, 0, 1)
    files.close()
    os.truncate(tmp_path / "cache" / name_in(files, a), SIZE - 1)
    assert files.read(a, 0, SIZE) == content_of("a")
    assert cached(tmp_path) == {name_in(files, a)}


def test_a_cache_that_is_missing_or_too_small(pipe_shard: Callable[..., Shard], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"a remote shard needs a cache and cache_bytes"):
        ShardFiles(tmp_path).read(pipe_shard("a"), 0, 1)
    with pytest.raises(ConfigError, match=r"a cache of 999 bytes is too small for pipe:.*, which has 1000"):
        ShardFiles(tmp_path, cache=tmp_path / "cache", cache_bytes=SIZE - 1).read(pipe_shard("a"), 0, 1)
    (tmp_path / "file").touch()
    with pytest.raises(ShardUnavailable, match=r"cannot be stored in .*file: "):
        ShardFiles(tmp_path, cache=tmp_path / "file", cache_bytes=SIZE).read(pipe_shard("a"), 0, 1)


def test_a_full_disk(pipe_shard: Callable[..., Shard], tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(disk)], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        files = ShardFiles(tmp_path, cache=disk / "cache", cache_bytes=100 * SIZE)
        big = Shard(f"pipe:yes | head -c {5 * 4096}", "", 1, 5 * 4096)
        with pytest.raises(
            ShardUnavailable,
            match=r"its 20480 bytes cannot be stored in .*cache: No space left on device\. Make room there",
        ):
            files.read(big, 0, 1)
        assert [path.name for path in (disk / "cache").iterdir()] == [".lock"]
        assert files.read(pipe_shard("a"), 0, SIZE) == content_of("a")
        files.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_limit_of_file_sizes(pipe_shard: Callable[..., Shard], tmp_path: Path):
    shard = pipe_shard("a")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE - 1, limits[1]))
    try:
        with pytest.raises(ShardUnavailable, match=r"cannot be stored in .*: File too large"):
            reader(tmp_path).read(shard, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert cached(tmp_path) == set()


def test_a_lock_that_is_never_given_back(pipe_shard: Callable[..., Shard], tmp_path: Path):
    """Never a hang: also of the lock under which room is made."""
    (tmp_path / "cache").mkdir()
    with open(tmp_path / "cache" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ShardUnavailable, match=r"cache/\.lock: another process"):
            reader(tmp_path, patience=0.2).read(pipe_shard("a"), 0, 1)
    assert cached(tmp_path) == set()


def test_the_cache_can_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHARD_CACHE", "~/shards")
    cache = open_files(tmp_path, tmp_path).cache
    assert cache is not None
    assert cache.folder == tmp_path / "shards"
