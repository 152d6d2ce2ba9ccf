"""Tars that are downloaded before a training reads them."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep.interleaved import index
from src.data.orders import RankShare
from src.experiments.config import Places
from src.experiments.registry import DATASETS, bind
from src.systems.interleaved.streaming import manifest
from src.systems.interleaved.streaming.dataset import StreamedDataset
from src.systems.interleaved.streaming.read_ahead import ReadAhead
from tests.core.launch.test_status import wait_until
from tests.systems.interleaved.streaming import pages
from tests.systems.interleaved.streaming.remote.object_server import ObjectServer

SHARDS, PER_SHARD, LANES = 6, 50, 2


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Has the tars of DATA/local as those of DATA/remote."""
    server = ObjectServer(tmp_path)
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    local = pages.write_pages(tmp_path / "local" / "train", SHARDS * PER_SHARD, per_shard=PER_SHARD)
    urls = [server.put("s3", shard.url, (local.folder / shard.url).read_bytes()) for shard in local.shards]
    pages.tokenizer().save_pretrained(tmp_path / "tokenizer")
    arguments = [*urls, "--output", str(tmp_path / "remote" / "train"), "--tokenizer", str(tmp_path / "tokenizer")]
    assert index.main(arguments) == 0
    yield server
    server.stop()


def build(folder: Path, path: str, **more: Any) -> StreamedDataset:
    config = bind(DATASETS, pages.config({"pages": {"path": path}}, **more))
    return config.build(Places(folder, folder), pages.tokenizer(), "train", 0)


def read(data: StreamedDataset, steps: int, cached: int = 0) -> tuple[list[Any], int]:
    """Rows of the first steps, and how many reads waited for a download. cached: tars that a step waits for before it
    reads."""
    order, share = data.order(0, LANES, steps, []), RankShare(LANES, LANES, 0, 1)
    ahead, rows, behind = data.read_ahead(order, share), [], dict[str, Any]()
    batches = order.micro_batches(0, share, {})
    for _ in range(steps):
        if ahead:
            wait_until(partial(are_cached, data, ahead, dict(behind), cached))
        batch = next(batches)
        samples = [data.sample(*key) for key in batch.keys]
        rows += [(row.input_ids, [frame.tobytes() for frame in row.frames]) for row in samples]
        behind |= batch.cursor
    if ahead:
        ahead.close()
    return rows, data.documents[0].files.counters["misses"]


def are_cached(data: StreamedDataset, ahead: ReadAhead, cursor: dict[str, Any], count: int) -> bool:
    """Whether the next tars are there. Requests them again, as each step of a training does."""
    ahead.advance(cursor)
    cache = data.documents[0].files.cache
    assert cache
    return all(map(cache.contains, list(ahead.coming)[:count]))


@pytest.mark.parametrize("shuffle", ["none", "shards"])
@pytest.mark.parametrize("room", [5, 100])
def test_no_read_waits_once_a_training_is_slower_than_downloads(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: str, room: int
):
    sizes = [shard.bytes for shard in manifest.load(tmp_path / "remote" / "train").shards]
    monkeypatch.setenv("SHARD_CACHE_GB", str(room * max(sizes) / 1e9))
    steps = 70
    local, _ = read(build(tmp_path, "local", shuffle=shuffle), steps)
    monkeypatch.setenv("SHARD_CACHE", str(tmp_path / "cold"))
    without, waits = read(build(tmp_path, "remote", shuffle=shuffle, prefetch_shards=0), steps)
    assert waits >= SHARDS - 1
    monkeypatch.setenv("SHARD_CACHE", str(tmp_path / "ahead"))
    ahead, waits = read(build(tmp_path, "remote", shuffle=shuffle), steps, 2)
    assert waits == 0
    assert local == without == ahead


def test_a_cache_of_two_tars_gives_the_same_rows(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = [shard.bytes for shard in manifest.load(tmp_path / "remote" / "train").shards]
    monkeypatch.setenv("SHARD_CACHE_GB", str(2 * max(sizes) / 1e9))
    local, _ = read(build(tmp_path, "local", shuffle="shards"), 70)
    ahead, _ = read(build(tmp_path, "remote", shuffle="shards"), 70)
    assert local == ahead


def test_a_window_is_there_before_it_is_read(server: ObjectServer, tmp_path: Path):
    data = build(tmp_path, "remote", shuffle="window", window=2 * PER_SHARD)
    rows, waits = read(data, 70, 4)
    assert waits == 0
    assert rows == read(build(tmp_path, "local", shuffle="window", window=2 * PER_SHARD), 70)[0]


def test_a_training_reads_on_if_the_downloads_are_killed(server: ObjectServer, tmp_path: Path):
    data = build(tmp_path, "remote", shuffle="none")
    order, share = data.order(0, LANES, 4, []), RankShare(LANES, LANES, 0, 1)
    ahead = data.read_ahead(order, share)
    assert ahead
    ahead.advance({})
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    (process,) = [child for child in children if "downloads" in " ".join(child.cmdline())]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    batch = next(order.micro_batches(0, share, {}))
    ahead.advance(batch.cursor)
    assert all(data.sample(*key).input_ids for key in batch.keys)
    ahead.close()


def test_relative_paths_are_those_of_the_training(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARD_CACHE", "cache")
    data = build(Path(), "remote", shuffle="none")
    ahead = data.read_ahead(data.order(0, LANES, 4, []), RankShare(LANES, LANES, 0, 1))
    assert ahead
    ahead.advance({})
    wait_until(lambda: any((tmp_path / "cache").glob("*.tar")))
    ahead.close()


def test_local_tars_and_a_prefetch_of_none_start_no_process(server: ObjectServer, tmp_path: Path):
    share = RankShare(LANES, LANES, 0, 1)
    for data in (build(tmp_path, "local"), build(tmp_path, "remote", prefetch_shards=0)):
        assert data.read_ahead(data.order(0, LANES, 4, []), share) is None


def test_a_tar_that_cannot_be_downloaded_is_an_error_of_its_reader(server: ObjectServer, tmp_path: Path):
    data = build(tmp_path, "remote", shuffle="none")
    first, second, *_ = data.documents[0].manifest.shards
    del server.objects["shards", first.url.rpartition("/")[2]]
    order = data.order(0, LANES, 4, [])
    ahead = data.read_ahead(order, RankShare(LANES, LANES, 0, 1))
    assert ahead
    cache = data.documents[0].files.cache
    assert cache
    ahead.advance({})
    wait_until(lambda: cache.contains(second))
    ahead.close()
    with pytest.raises(manifest.ShardUnavailable, match=f"{first.url}: no such object"):
        data.documents[0].files.read(first, 0, 1)
