"""Download tars into the cache ahead of a training, in a subprocess."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from src.errors import UserError
from src.systems.interleaved.streaming.manifest import Shard
from src.systems.interleaved.streaming.remote.cache import ShardCache
from src.systems.interleaved.streaming.remote.objects import module_environment


class Downloads:
    """Owns the subprocess, which starts with the first request and ends with `close` or with this process.

    Failed downloads are not reported: the process that reads the tar gets the error.
    """

    def __init__(self, cache: ShardCache) -> None:
        self._settings = [str(cache.folder), cache.limit, cache.patience]
        self._process: subprocess.Popen[bytes] | None = None

    def request(self, shards: Sequence[Shard]) -> None:
        """Download these tars in order; replaces the previous request. Returns immediately."""
        if self._process is None:
            command = [sys.executable, "-m", "src.systems.interleaved.streaming.remote.downloads"]
            self._process = subprocess.Popen(
                command, env=module_environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            self._send(self._settings)
        self._send([asdict(shard) for shard in shards])

    def _send(self, value: object) -> None:
        assert self._process
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the subprocess was killed: tars are downloaded when they are read
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the subprocess."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


class _Worker:
    """Carries out the latest request."""

    def __init__(self, cache: ShardCache) -> None:
        self.cache = cache
        self.shards: Sequence[Shard] | None = None
        """The latest request; None once it is being processed."""
        self.changed = threading.Condition()
        self.failed = set[str]()
        """Requested tars that could not be downloaded."""
        self.rounds = [0, 0]
        """Starts of the last two rounds, in nanoseconds. Each round marks the requested tars as used."""

    def follow(self, lines: Sequence[str]) -> None:
        for line in lines:
            with self.changed:
                self.shards = [Shard(**each) for each in json.loads(line)]
                self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.shards is not None)
                shards, self.shards = self.shards or (), None
            self._carry_out(shards)

    def _carry_out(self, shards: Sequence[Shard]) -> None:
        self.failed &= {shard.url for shard in shards}
        unused_since, self.rounds = self.rounds[0], [self.rounds[1], time.time_ns()]
        for shard in shards:
            self.cache.mark_used(shard)
        retained_names = set[str]()
        for shard in shards:
            if self.shards is not None:
                return  # a newer request
            retained_names.add(self.cache.path(shard).name)
            if shard.url in self.failed or self.cache.contains(shard):
                continue
            try:
                if not self.cache.fetch_ahead(shard, retained_names, unused_since):
                    return
            except UserError:
                self.failed.add(shard.url)


def main() -> None:
    """Download the tars requested by each line of stdin, until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, limit, patience = json.loads(sys.stdin.readline())
    worker = _Worker(ShardCache(Path(folder), limit, patience))
    threading.Thread(target=worker.run, daemon=True).start()
    worker.follow(sys.stdin)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
