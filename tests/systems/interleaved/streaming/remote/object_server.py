"""A plain HTTP server on loopback that answers as Google Cloud Storage, Azure and the Hugging Face hub do for reads."""

import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REVISION = "0" * 40


class ObjectServer:
    """Serves `objects`: (bucket, key) -> content. The hub's data set is the bucket "user/pages"."""

    def __init__(self, folder: Path) -> None:
        self.objects: dict[tuple[str, str], bytes] = {}
        self.refusal: tuple[int, str] | None = None
        """HTTP status and code of S3's language with which every request is refused."""
        self.requests = 0
        server, owner = ThreadingHTTPServer(("127.0.0.1", 0), _Handler), self
        server.owner = owner  # type: ignore[attr-defined]
        self._server = server
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        account = folder / "service_account.json"
        key = {
            "gcs_base_url": self.endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        account.write_text(json.dumps(key))
        self.environment = {
            "GOOGLE_SERVICE_ACCOUNT": str(account),
            "GOOGLE_ALLOW_HTTP": "1",
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_SKIP_SIGNATURE": "true",
            "AZURE_ALLOW_HTTP": "1",
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "hf"),
        }

    def put(self, scheme: str, key: str, content: bytes) -> str:
        """Add an object; returns its URL."""
        bucket = "user/pages" if scheme == "hf" else "shards"
        self.objects[bucket, key] = content
        return f"hf://datasets/{bucket}/{key}" if scheme == "hf" else f"{scheme}://{bucket}/{key}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def etag_of(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        form = urllib.parse.parse_qs(self.rfile.read(size).decode())
        names = [name for (bucket, name) in self._objects if bucket == "user/pages" and name in form.get("paths", [])]
        self._json([self._file(name) for name in names])

    def do_GET(self) -> None:
        owner = self.server.owner  # type: ignore[attr-defined]
        owner.requests += 1
        if owner.refusal:
            status, code = owner.refusal
            self._send(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>x</Message></Error>".encode())
            return
        path, _, query = self.path.partition("?")
        path = urllib.parse.unquote(path)
        if path.startswith("/api/datasets/user/pages"):
            self._hub(path, query)
            return
        if match := re.fullmatch(r"/datasets/(user/pages)/resolve/[^/]+/(.+)", path):
            self._object(match[1], match[2])
            return
        bucket, _, key = path.removeprefix("/").partition("/")
        if key:
            self._object(bucket, key)
        else:
            self._list(bucket, urllib.parse.parse_qs(query))

    @property
    def _objects(self) -> dict[tuple[str, str], bytes]:
        return self.server.owner.objects  # type: ignore[attr-defined]

    def _file(self, name: str) -> dict[str, Any]:
        content = self._objects["user/pages", name]
        return {"type": "file", "path": name, "size": len(content), "oid": etag_of(content), "lfs": None}

    def _hub(self, path: str, query: str) -> None:
        if match := re.search(r"/tree/[^/]+/?(.*)", path):
            folder = f"{match[1]}/" if match[1] else ""
            below = [
                name.removeprefix(folder)
                for bucket, name in self._objects
                if bucket == "user/pages" and name.startswith(folder)
            ]
            folders = sorted({name.partition("/")[0] for name in below if "/" in name})
            entries = [{"type": "directory", "path": f"{folder}{name}", "oid": REVISION, "size": 0} for name in folders]
            self._json([*entries, *(self._file(f"{folder}{name}") for name in below if "/" not in name)])
        else:
            self._json(
                {
                    "id": "user/pages",
                    "sha": REVISION,
                    "siblings": [],
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                }
            )

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        names = sorted(name for holder, name in self._objects if holder == bucket and name.startswith(prefix))
        date = "Wed, 01 Jan 2025 00:00:00 GMT"
        if "comp" in query:
            rows = "".join(
                f"<Blob><Name>{name}</Name><Properties><Last-Modified>{date}</Last-Modified><Content-Length>"
                f"{len(self._objects[bucket, name])}</Content-Length><Content-Type>x/y</Content-Type>"
                "<Etag>e</Etag></Properties></Blob>"
                for name in names
            )
            text = f"<?xml version='1.0'?><EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"
        else:
            rows = "".join(
                f"<Contents><Key>{name}</Key><LastModified>2025-01-01T00:00:00Z</LastModified><ETag>e</ETag>"
                f"<Size>{len(self._objects[bucket, name])}</Size></Contents>"
                for name in names
            )
            text = f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        self._send(200, text.encode(), {"Content-Type": "application/xml"})

    def _object(self, bucket: str, key: str) -> None:
        content = self._objects.get((bucket, key))
        if content is None:
            self._send(404, b"")
            return
        etag = f'"{etag_of(content)}"'
        if self.headers.get("If-Match") not in (None, etag):
            self._send(412, b"")
            return
        headers = {
            "ETag": etag,
            "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT",
            "X-Repo-Commit": REVISION,
            "Accept-Ranges": "bytes",
        }
        if match := re.fullmatch(
            r"bytes=(\d+)-(\d*)", self.headers.get("Range") or self.headers.get("x-ms-range") or ""
        ):
            first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
            self._send(
                206, content[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"}
            )
        else:
            self._send(200, content, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
