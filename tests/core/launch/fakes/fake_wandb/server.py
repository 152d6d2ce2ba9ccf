"""Stands in for the server of Weights & Biases: takes every run, and remembers what was sent."""

import gzip
import http.server
import json
import re
import threading
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """Served in a thread between `with` and its end; `runs` are the variables of UpsertBucket by the run's id, `rows`
    its history."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.keys: set[str] = set()
        self.runs: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def __enter__(self) -> "Server":
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    @property
    def wandb_server(self) -> Server:
        """The server, which stores the runs."""
        assert isinstance(self.server, Server)
        return self.server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.wandb_server.keys.add(self.headers.get("Authorization", ""))
        answer = {}
        if self.path == "/graphql":
            answer = {"data": self.answer_query(json.loads(body))}
        elif match := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            new_rows = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            rows = self.wandb_server.rows.setdefault(match[1], [])
            rows[new_rows.get("offset", len(rows)) :] = [
                json.loads(line) for line in new_rows.get("content", [])
            ]  # a client may send twice
        out = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    do_GET = do_PUT = do_POST  # noqa: N815

    def answer_query(self, request: dict[str, Any]) -> dict[str, Any]:
        """One response for all queries: the user, a new run, and no files to upload."""
        values, name = request.get("variables") or {}, ""
        if re.search(r"mutation\s+UpsertBucket", request["query"]):
            name = values["name"]
            self.wandb_server.runs.setdefault(name, values)
        project = {"id": "p", "name": values.get("project"), "entity": {"id": "e", "name": values.get("entity")}}
        bucket = {
            "id": "r",
            "name": name,
            "displayName": name,
            "config": "{}",
            "historyLineCount": 0,
            "project": project,
        }
        return {
            "viewer": {"id": "v", "entity": "user", "username": "user", "flags": "{}", "teams": {"edges": []}},
            "upsertBucket": {"bucket": bucket | {"files": {"edges": []}}, "inserted": True},
            "serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0.0"}, "features": []},
            "model": {"bucket": None},
            "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []},
        }

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  as the base class calls it
        pass
