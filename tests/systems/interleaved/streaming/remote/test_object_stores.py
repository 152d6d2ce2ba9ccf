"""Shards on Google Cloud Storage, Azure and the hub; credentials that change or expire."""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from src.systems.interleaved.streaming import manifest
from src.systems.interleaved.streaming.manifest import Shard, ShardUnavailable
from src.systems.interleaved.streaming.remote import objects
from src.systems.interleaved.streaming.shard_files import ShardFiles
from tests.conftest import ROOT
from tests.systems.interleaved.streaming import pages
from tests.systems.interleaved.streaming.remote.object_server import ObjectServer

READ = """
import multiprocessing, sys
from pathlib import Path
from src.systems.interleaved.streaming import manifest
from src.systems.interleaved.streaming.shard_files import ShardFiles

folder = Path(sys.argv[1])

def read(cache):
    files = ShardFiles(folder, cache=folder.parent / cache, cache_bytes=10**8, patience=5)
    return [files.read(shard, 0, shard.bytes) for shard in manifest.load(folder).shards]

here = read("here")
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.apply(read, ("there",)) == here, "a forked process reads the same"
around = ShardFiles(folder, cache=folder.parent / "here", cache_bytes=10**8)
for shard, content in zip(manifest.load(folder).shards, here):
    assert around._read_around(shard, 100, 50) == content[100:150]
    (folder.parent / Path(shard.url).name).write_bytes(content)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ObjectServer]:
    object_server = ObjectServer(tmp_path)
    yield object_server
    object_server.stop()


def run(server: ObjectServer, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **server.environment}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "az", "hf"])
def test_shards_of_another_store_are_listed_indexed_and_read(scheme: str, server: ObjectServer, tmp_path: Path):
    local = pages.write_pages(tmp_path / "made", 50)
    urls = [server.put(scheme, f"web/{shard.url}", (local.folder / shard.url).read_bytes()) for shard in local.shards]
    server.put(scheme, "web/notes.txt", b"not a tar")
    pattern = f"{urls[0].rpartition('/')[0]}/*.tar"
    done = run(server, "-m", "data_prep.interleaved.index", pattern, "--output", str(tmp_path / "listed"))
    assert done.returncode == 0, done.stderr
    dataset_manifest = manifest.load(tmp_path / "listed")
    assert [shard.url for shard in dataset_manifest.shards] == urls
    assert all(shard.etag for shard in dataset_manifest.shards)
    done = run(server, "-c", READ, str(dataset_manifest.folder))
    assert done.returncode == 0, done.stderr
    for shard in local.shards:
        assert (tmp_path / shard.url).read_bytes() == (local.folder / shard.url).read_bytes()
    key = urls[0].partition("web/")[2]
    server.put(scheme, f"web/{key}", (local.folder / local.shards[1].url).read_bytes())
    done = run(server, "-c", READ.replace('"here"', '"other"'), str(dataset_manifest.folder))
    assert f"ChangedShardError: {urls[0]}" in done.stderr


@pytest.mark.parametrize("scheme", ["gs", "az", "hf"])
def test_a_missing_object_of_another_store_is_reported_at_once(scheme: str, server: ObjectServer, tmp_path: Path):
    server.put(scheme, "web/a.tar", b"x")
    url = server.put(scheme, "web/b.tar", b"x")
    del server.objects["user/pages" if scheme == "hf" else "shards", "web/b.tar"]
    done = run(server, "-m", "data_prep.interleaved.index", url, "--output", str(tmp_path / "listed"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {url}: no such object")


def on_s3(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, content: bytes = b"x" * 1000) -> Shard:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    return Shard(server.put("s3", "a.tar", content), "", 1, len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "ExpiredToken"), (403, "InvalidAccessKeyId"), (400, "TokenRefreshRequired"), (403, "RequestTimeTooSkewed")],
)
def test_refused_credentials_stop_a_read_at_once(
    status: int, code: str, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shard = on_s3(server, monkeypatch)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    server.refusal = status, code
    with pytest.raises(ShardUnavailable, match=rf"{shard.url}: .*\({code}\)\. Renew the credentials"):
        ShardFiles(tmp_path, cache=tmp_path / "cache", cache_bytes=10**6, patience=60).read(shard, 0, 10)
    assert server.requests == 1


def test_keys_that_are_renewed_in_a_profile_are_used(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shard = on_s3(server, monkeypatch)
    profile, config = tmp_path / "credentials", tmp_path / "config"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    config.write_text(f"[profile lab]\nregion = eu-west-3\nendpoint_url = {server.endpoint}\n")
    used_keys = set[str]()
    for token in ("old", "new"):
        profile.write_text(
            f"[lab]\naws_access_key_id = {token}\naws_secret_access_key = s\naws_session_token = {token}\n"
        )
        files = ShardFiles(tmp_path, cache=tmp_path / f"cache_{token}", cache_bytes=10**6)
        assert files.read(shard, 0, shard.bytes) == b"x" * 1000
        store, _ = objects._locate(shard.url, 1)
        used_keys.add(f"{store.config['access_key_id']} {store.config['region']}")
    assert used_keys == {"old eu-west-3", "new eu-west-3"}


def test_region_and_endpoint_of_a_profile_are_read_with_exported_keys(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after `aws configure export-credentials`, and for a public bucket."""
    shard = on_s3(server, monkeypatch)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", "~/config")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    (tmp_path / "config").write_text(
        f"[profile lab]\nsso_session = x\nregion = eu-west-3\nendpoint_url = {server.endpoint}\n"
    )
    for variables in ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, {"AWS_SKIP_SIGNATURE": "true"}):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            files = ShardFiles(tmp_path, cache=tmp_path / f"cache_{len(variables)}", cache_bytes=10**6)
            assert files.read(shard, 0, shard.bytes) == b"x" * 1000
            assert objects._locate(shard.url, 1)[0].config["region"] == "eu-west-3"


@pytest.mark.parametrize(
    "address", ["localhost:9000", "127.0.0.1:9000", "minio.lab:9000/x", "ftp://host", "https://", "me:secret@host:9000"]
)
def test_an_endpoint_without_a_scheme_is_refused(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(objects.ConfigError, match=f"S3 endpoint .*{address.rpartition('@')[2]}") as error:
        objects.head("s3://bucket/key", 1)
    assert "secret" not in str(error.value)


def test_a_key_with_a_leading_slash_is_not_another_object(server: ObjectServer, monkeypatch: pytest.MonkeyPatch):
    on_s3(server, monkeypatch)
    with pytest.raises(objects.ConfigError, match=r"s3://shards//a\.tar"):
        objects.head("s3://shards//a.tar", 5)


def test_an_endpoint_in_capitals_or_with_blanks_is_used(server: ObjectServer, monkeypatch: pytest.MonkeyPatch):
    shard = on_s3(server, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f" {server.endpoint.replace('http', 'HTTP')} ")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert objects.head(shard.url, 5)[0] == shard.bytes


@pytest.mark.parametrize("key", ["a//b.tar", "./a.tar", "a/../b.tar"])
def test_a_key_that_the_library_cannot_read_is_refused(key: str, server: ObjectServer, monkeypatch: pytest.MonkeyPatch):
    on_s3(server, monkeypatch)
    with pytest.raises(objects.ConfigError, match=re.escape(f"s3://shards/{key}")):
        objects.head(f"s3://shards/{key}", 1)


def test_a_damaged_profile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    (tmp_path / "credentials").write_bytes(b"no section\xff")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(objects.ConfigError, match=str(tmp_path / "credentials")):
        objects.head("s3://bucket/key", 1)


@pytest.mark.parametrize(
    "settings", ["role_arn = arn:x\nsource_profile = default", "sso_session = x", "credential_process = echo"]
)
def test_a_profile_without_keys_is_refused(settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text(f"[profile lab]\n{settings}\n")
    for profile, value in (("lab", settings.partition(" ")[0]), ("typo", "typo")):
        monkeypatch.setenv("AWS_PROFILE", profile)
        with pytest.raises(objects.ConfigError, match=f"AWS_PROFILE {profile}.*{value}"):
            objects.head("s3://bucket/key", 1)


@pytest.mark.parametrize("url", ["s3://", "s3://bucket", "s3://a b/key", "gs:///key", "az://container"])
def test_an_incomplete_url_is_refused(url: str):
    with pytest.raises(objects.ConfigError, match=re.escape(url)):
        objects.head(url, 1)


def test_a_hub_out_of_reach_is_reported_in_one_line(server: ObjectServer, tmp_path: Path):
    server.environment["HF_ENDPOINT"] = "http://127.0.0.1:1"
    read = (
        "from src.systems.interleaved.streaming.remote import "
        "objects\nobjects.read_range('hf://datasets/user/pages/a.tar', "
        "None, 0, 1, 1)"
    )
    done = run(server, "-c", read)
    assert "objects.Interruption" in done.stderr.splitlines()[-1]


def test_a_request_process_that_ends_early_is_an_interruption(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(objects.Interruption, match="the process that reads objects has ended"):
        objects._read_by_subprocess("s3://bucket/key", None, 0, 1, 1.0)
