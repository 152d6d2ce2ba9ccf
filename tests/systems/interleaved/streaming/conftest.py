"""A private S3 server for the session, and what each test needs to speak to it."""

import shutil
from collections.abc import Iterator

import pytest

from tests.systems.interleaved.streaming.remote.s3_server import Cutter, S3Server

REQUIRED_PROGRAMS = (
    "swift-proxy-server",
    "swift-account-server",
    "swift-container-server",
    "swift-object-server",
    "memcached",
)


@pytest.fixture(scope="session")
def s3_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if lacking := [name for name in REQUIRED_PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"no S3 server on this machine: {', '.join(lacking)} not found; `bash .ci/s3 install` installs it")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def s3(s3_of_session: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, which this process speaks to."""
    for name, value in s3_of_session.environment.items():
        monkeypatch.setenv(name, value)
    return s3_of_session


@pytest.fixture
def cutter(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cutter]:
    """A proxy before the server, which this process speaks to."""
    proxy = Cutter(s3.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.close()
