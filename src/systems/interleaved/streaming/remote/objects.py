"""Read objects of S3, Google Cloud Storage, Azure and the Hugging Face hub: byte ranges, sizes, names.

obstore reads s3://BUCKET/KEY, gs://BUCKET/KEY and az://CONTAINER/KEY, with the credentials listed in its documentation;
for S3 also those of a profile in ~/.aws. huggingface_hub reads hf://datasets/USER/NAME/PATH.

Threads of obstore do not survive a fork: a request in a forked process never returns. If a parent process used obstore
before the fork, as for DataLoader workers, each request runs in a subprocess: `main` of this module.
"""

import configparser
import contextlib
import fnmatch
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from src.errors import ConfigError
from src.files import ROOT
from src.support.redaction import hide_password
from src.systems.interleaved.streaming.manifest import ChangedShardError, ShardUnavailable

HUB = "hf://"
SCHEMES = ("s3://", "gs://", "az://", HUB)
_CHUNK = 1 << 16
_CONNECT_SECONDS = 5
_started_in = set[int]()
"""Ids of processes in which obstore has started its threads."""


class Interruption(Exception):
    """A transfer failed; another attempt can continue where it stopped."""


class Range(NamedTuple):
    """Bytes of an object."""

    total: int
    """Size of the complete object."""
    etag: str | None
    chunks: Generator[bytes]
    """Raises Interruption when the connection fails."""


def read_range(url: str, etag: str | None, begin: int, end: int, seconds: float) -> Range:
    """Read a range of bytes of an object, `end` excluded.

    etag: expected ETag; None: any. seconds: timeout of the request.

    Raises:
        ChangedShardError: the ETag differs.
        ShardUnavailable: the object does not exist or access is denied.
        Interruption: the server cannot be reached, or has an error.
    """
    if url.startswith(HUB):
        return _read_from_hub(url, etag, begin, end)
    if _started_in and os.getpid() not in _started_in:
        return _read_by_subprocess(url, etag, begin, end, seconds)
    obstore, (store, key) = _import_obstore(url), _locate(url, seconds)
    options: Any = {"range": (begin, end), **({"if_match": etag} if etag else {})}
    with _translate_errors(url):
        response = obstore.get(store, key, options=options)
    return Range(response.meta["size"], response.meta["e_tag"], _chunks_of(url, response))


def head(url: str, seconds: float) -> tuple[int, str | None]:
    """Size and ETag of an object. Not for forked processes. Raises the errors of `read_range`."""
    if url.startswith(HUB):
        return _head_of_hub(url)
    obstore, (store, key) = _import_obstore(url), _locate(url, seconds)
    with _translate_errors(url):
        meta = obstore.head(store, key)
    return meta["size"], meta["e_tag"]


def list_urls(pattern: str, seconds: float) -> list[str]:
    """List the URLs that match a pattern with *, ** , ? or [], sorted; a key of that very name matches alone.
    Not for forked processes.
    Raises the errors of `read_range`."""
    scheme, bucket, key = split(pattern)
    if scheme == HUB:
        with _translate_hub_errors(pattern):
            return sorted(f"{HUB}{name}" for name in _hub(os.getpid()).glob(pattern.removeprefix(HUB)))
    prefix = re.split(r"[*?\[]", key)[0].rpartition("/")[0]
    obstore, (store, _) = _import_obstore(pattern), _locate(f"{scheme}{bucket}/", seconds)
    with _translate_errors(pattern):
        keys = [meta["path"] for batch in obstore.list(store, prefix or None) for meta in batch]
    if key in keys:
        return [pattern]
    patterns = key.split("/")
    return [f"{scheme}{bucket}/{name}" for name in sorted(keys) if _matches(name.split("/"), patterns)]


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether a path matches a pattern as in `glob`: `*` does not cross folders, `**` is any number of folders."""
    if not names or not patterns:
        return not names and not patterns
    if patterns[0] == "**":
        return _matches(names, patterns[1:]) or _matches(names[1:], patterns)
    return fnmatch.fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


def split(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of a URL: ("s3://", "BUCKET", "a/b.tar")."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://", bucket, key


def _import_obstore(url: str) -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ModuleNotFoundError:
        raise ConfigError(f"{url}: obstore is not installed: pip install -r requirements/streaming.txt") from None
    return obstore


def _locate(url: str, seconds: float) -> tuple[Any, str]:
    """obstore's store of the bucket, and the key."""
    scheme, bucket, key = split(url)
    if not re.fullmatch(r"[\w.-]+", bucket, re.ASCII) or not (key or url.endswith("/")):  # obstore would panic
        raise ConfigError(f"{url}: expected {scheme}BUCKET/KEY.")
    if key.startswith("/"):  # obstore would read another object
        raise ConfigError(f"{url}: keys that start with a slash are not supported. Rename the object.")
    _started_in.add(os.getpid())
    return _OPEN[scheme](bucket, f"{max(round(seconds * 1000), 1)}ms"), key


def _open_s3(bucket: str, timeout: str) -> Any:
    profile = _read_profile()
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    )
    if endpoint or "endpoint" in profile:
        profile["endpoint"] = _check_endpoint(endpoint or profile["endpoint"])
    return _open("S3Store", bucket, timeout, tuple(sorted(profile.items())))


def _check_endpoint(address: str) -> str:
    match = re.fullmatch(r"(https?)(://[^\s/]\S*)", address.strip(), re.IGNORECASE)
    if match is None:  # obstore would panic
        raise ConfigError(f"S3 endpoint {hide_password(address)!r}: expected http://HOST:PORT or https://HOST.")
    return match[1].lower() + match[2]


def _open_gs(bucket: str, timeout: str) -> Any:
    return _open("GCSStore", bucket, timeout, ())


def _open_az(bucket: str, timeout: str) -> Any:
    return _open("AzureStore", bucket, timeout, ())


_OPEN: Mapping[str, Callable[[str, str], Any]] = {"s3://": _open_s3, "gs://": _open_gs, "az://": _open_az}


@lru_cache(64)
def _open(kind: str, bucket: str, timeout: str, settings: tuple[tuple[str, str], ...]) -> Any:
    """Open a bucket; cached per settings, so that renewed keys open it again."""
    import obstore.store
    from obstore.exceptions import BaseError

    options: dict[str, Any] = dict(settings)
    allow_http = (
        str(options.get("endpoint") or "").startswith("http:")
        or "AZURE_ALLOW_HTTP" in os.environ
        or "GOOGLE_ALLOW_HTTP" in os.environ
    )
    client: Any = {"timeout": timeout, "connect_timeout": f"{_CONNECT_SECONDS}s", "allow_http": allow_http}
    try:
        return getattr(obstore.store, kind)(bucket, client_options=client, retry_config={"max_retries": 0}, **options)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{bucket}: {_first_line(error)}. Check the credentials in the environment.") from None


def _read_profile() -> dict[str, str]:
    """Keys, region and endpoint of the profile AWS_PROFILE in ~/.aws, which obstore does not read.

    Without keys if the environment has them, or if requests are not signed. The files are read for each request, as
    other programs renew the keys.
    """
    is_unsigned = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "on", "yes", "y")
    needs_keys = "AWS_ACCESS_KEY_ID" not in os.environ and not is_unsigned
    name = os.environ.get("AWS_PROFILE", "default")
    folder = Path.home() / ".aws"
    config = _read_ini(Path(os.environ.get("AWS_CONFIG_FILE") or folder / "config").expanduser())
    credentials = _read_ini(Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials").expanduser())
    section = name if name == "default" else f"profile {name}"
    profile = {
        **(config[section] if config.has_section(section) else {}),
        **(credentials[name] if credentials.has_section(name) else {}),
    }
    unread = [key for key in profile if key in ("role_arn", "credential_process") or key.startswith("sso_")]
    if needs_keys and "aws_access_key_id" not in profile and (unread or (name != "default" and not profile)):
        raise ConfigError(
            f"AWS_PROFILE {name}: {f'{unread[0]} is not supported' if unread else f'not in {folder}'}. "
            f'Export its keys: eval "$(aws configure export-credentials --profile {name} --format env)"'
        )
    names = {"endpoint_url": "endpoint"}
    if needs_keys:
        names |= {
            "aws_access_key_id": "access_key_id",
            "aws_secret_access_key": "secret_access_key",
            "aws_session_token": "token",
        }
    if "AWS_REGION" not in os.environ and "AWS_DEFAULT_REGION" not in os.environ:
        names["region"] = "region"
    return {ours: profile[theirs] for theirs, ours in names.items() if profile.get(theirs)}


def _read_ini(path: Path) -> configparser.RawConfigParser:
    profiles = configparser.RawConfigParser()
    try:
        profiles.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {_first_line(error)}. Correct the file.") from None
    return profiles


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


def _chunks_of(url: str, response: Any) -> Generator[bytes]:
    with _translate_errors(url):
        yield from map(bytes, response.stream(min_chunk_size=_CHUNK))


_FINAL = {
    "FileNotFoundError": "no such object",
    "PermissionDeniedError": "access denied",
    "UnauthenticatedError": "access denied",
}
"""Errors that are not retried."""
_CREDENTIALS = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "TokenRefreshRequired",
        "InvalidToken",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "AuthenticationFailed",
        "AuthorizationHeaderMalformed",
        "RequestTimeTooSkewed",
        "AccessDenied",
    }
)
"""Server codes for rejected credentials; some come with HTTP status 400."""


@contextlib.contextmanager
def _translate_errors(url: str) -> Generator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except (OSError, BaseError) as error:
        raise _explain(url, error) from None
    except ValueError as error:  # of a key with an empty part, "." or ".."
        raise ConfigError(f"{url}: {_first_line(error)}. Rename the object.") from None


def _explain(url: str, error: Exception) -> Exception:
    """Convert an error of obstore to one of ours, with the server's error code."""
    name, text = type(error).__name__, str(error).partition("\n\nDebug source")[0]
    match = re.search(r"<Code>(\w+)</Code>", text)
    code = match[1] if match else ""
    if name == "PreconditionError" or code == "InvalidRange":
        changed = "ETag" if name == "PreconditionError" else "size"
        return ChangedShardError(f"{url}: its {changed} has changed since it was indexed. Index it again.")
    if name in _FINAL or code in _CREDENTIALS:
        text = f"{url}: {_FINAL.get(name, 'access denied')}{f' ({code})' if code else ''}."
        if code in _CREDENTIALS or name != "FileNotFoundError":
            text += " Renew the credentials (environment, profile or role) or grant access, then start again."
        return ShardUnavailable(text)
    return Interruption(code or _first_line(Exception(text.rpartition(" - ")[2])))


@lru_cache(4)
def _hub(process: int) -> Any:
    """File system of the hub, one per process: connections do not survive a fork."""
    from huggingface_hub import HfFileSystem

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would log a line for each request
    return HfFileSystem(skip_instance_cache=True)


def _head_of_hub(url: str) -> tuple[int, str | None]:
    with _translate_hub_errors(url):
        info = _hub(os.getpid()).info(url.removeprefix(HUB), refresh=True, expand_info=True)
    lfs = info.get("lfs") or {}
    return info["size"], lfs.get("sha256") or info.get("blob_id")


def _read_from_hub(url: str, etag: str | None, begin: int, end: int) -> Range:
    total, current = _head_of_hub(url)
    if etag is not None and current != etag:
        raise ChangedShardError(f"{url}: its hash has changed since it was indexed. Index it again.")

    def chunks() -> Generator[bytes]:
        with _translate_hub_errors(url), _hub(os.getpid()).open(url.removeprefix(HUB), "rb", block_size=0) as file:
            file.loc = begin  # the first read requests the bytes from here on
            while file.loc < end and (chunk := file.read(min(_CHUNK, end - file.loc))):
                yield chunk

    return Range(total, current, chunks())


@contextlib.contextmanager
def _translate_hub_errors(url: str) -> Generator[None]:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    http_error: Any = HfHubHTTPError.__bases__[0]
    # base class of all errors of its HTTP library, including failed connections
    try:
        yield
    except FileNotFoundError:
        raise ShardUnavailable(f"{url}: no such object.") from None
    except (GatedRepoError, RepositoryNotFoundError):
        raise ShardUnavailable(
            f"{url}: no such repository, or access denied. Log in with `hf auth login`, then start again."
        ) from None
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{url}: expected hf://datasets/USER/NAME/PATH: {_first_line(error)}.") from None
    except (http_error, OSError) as error:
        raise Interruption(_first_line(error)) from None


def module_environment() -> dict[str, str]:
    """Environment in which a subprocess can import our modules.
    The current folder stays unchanged, as paths can be relative."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }


def _read_by_subprocess(*request: Any) -> Range:
    """Run `read_range` in a subprocess, which writes a line of JSON, then the bytes."""
    command = [sys.executable, "-m", "src.systems.interleaved.streaming.remote.objects", json.dumps(request)]
    process = subprocess.Popen(command, env=module_environment(), stdout=subprocess.PIPE)
    chunks = _chunks_from(process)
    try:
        answer = json.loads(next(chunks))
    except ValueError:
        answer = [Interruption.__name__, "the process that reads objects has ended"]
    if isinstance(answer, list):
        chunks.close()
        raise _ERRORS[answer[0]](answer[1])
    return Range(answer["total"], answer["etag"], chunks)


_ERRORS = {error.__name__: error for error in (ChangedShardError, ShardUnavailable, ConfigError, Interruption)}


def _chunks_from(process: subprocess.Popen[bytes]) -> Generator[bytes]:
    """Yield the first line, then chunks. The process ends with the generator."""
    with process:
        assert process.stdout
        try:
            yield process.stdout.readline()
            while chunk := process.stdout.read(_CHUNK):
                yield chunk
        finally:
            process.kill()


def main(request: str) -> None:
    """Read one range for a forked process. An error after the first line truncates the output."""
    out = sys.stdout.buffer
    try:
        response = read_range(*json.loads(request))
    except tuple(_ERRORS.values()) as error:
        out.write(json.dumps([type(error).__name__, str(error)]).encode())
        return
    out.write(json.dumps({"total": response.total, "etag": response.etag}).encode() + b"\n")
    with contextlib.suppress(Interruption, BrokenPipeError):
        for chunk in response.chunks:
            out.write(chunk)
        out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
