"""Rewards and log-probabilities of token ids from a model on one or several servers.

The client waits for an unavailable server. It raises an error if a server has another model or gives an impossible
answer.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

from src.errors import ConfigError, RunError
from src.systems.assistants.rewards.kserve import (
    Address,
    Connection,
    NotLoadedError,
    Tensor,
    UnavailableError,
    connect,
    parse_addresses,
)

log = logging.getLogger(__name__)

REQUEST_SECONDS = 120.0
"""Time limit of one request."""
FAILURES = 3
"""Consecutive failures after which an instance is skipped for a while."""
SHORT_PAUSE, FIRST_REST, LONGEST_REST = 0.1, 1.0, 10.0
"""Seconds. SHORT_PAUSE: before the second try of an instance, doubled before the third. FIRST_REST: after FAILURES
failures, then doubled after each failure up to LONGEST_REST."""
BEAT_SECONDS = 1.0
"""Interval at which `wait` is called while no server answers."""


class RemoteModel:
    """A client for the instances of one model, identified by its fingerprint."""

    def __init__(
        self,
        addresses: str,
        fingerprint: str,
        wait: Callable[[str, float], None],
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        """addresses: see `parse_addresses`. fingerprint: identity of the expected model.

        wait: see `RewardSetting.wait`. The wait of a batch starts with its first request.

        Raises:
            ConfigError: an address is malformed, or a package is missing.
        """
        self._instances = [_Instance(address, fingerprint, request_seconds) for address in parse_addresses(addresses)]
        self._wait = wait
        self._next = os.getpid()  # processes start with different instances

    def rewards(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """One reward per sequence, all in one batch.

        Raises:
            UserError: the server has another model, or its answer is impossible.
        """
        answer, address = self._ask(ids, "rewards")
        if answer.shape not in ((len(ids),), (len(ids), 1)) or len(answer.values) != len(ids):
            raise RunError(
                f"{address}: expected one reward for each of {len(ids)} sequences, got {_describe(answer)}. "
                "Check that it serves a reward model."
            )
        for row, value in enumerate(answer.values):
            if not math.isfinite(value):
                raise RunError(
                    f"{address}: expected a number as the reward of sequence {row + 1} of {len(ids)}, got {value}. "
                    "The server's weights are damaged, or their training diverged: serve another model."
                )
        return [float(value) for value in answer.values]

    def logps(self, ids: Sequence[Sequence[int]], sampled: Sequence[int]) -> list[list[float]]:
        """Log-probabilities of the last `sampled[i]` tokens of each sequence, all in one batch.
        They cannot include the first token, which has no log-probability.

        Raises:
            UserError: the server has another model, or its answer is impossible.
        """
        for row, count in zip(ids, sampled, strict=True):
            assert 0 <= count < len(row), "the first token has no log-probability"
        answer, address = self._ask(ids, "logps")
        longest = max(map(len, ids), default=0)
        if answer.shape != (len(ids), longest) or len(answer.values) != len(ids) * longest:
            raise RunError(
                f"{address}: expected log-probabilities of {len(ids)} sequences of up to {longest} tokens, "
                f"got {_describe(answer)}. Check that it serves log-probabilities."
            )
        logps = []
        for i, (row, count) in enumerate(zip(ids, sampled, strict=True)):
            end = i * longest + len(row)
            logps.append([float(value) for value in answer.values[end - count : end]])
            if not all(map(math.isfinite, logps[-1])):
                raise RunError(
                    f"{address}: a log-probability of sequence {i + 1} of {len(ids)} is not finite. "
                    "The server's weights are damaged, or their training diverged: serve another model."
                )
        return logps

    def close(self) -> None:
        """Close all connections."""
        for instance in self._instances:
            instance.close()

    def _ask(self, ids: Sequence[Sequence[int]], output: str) -> tuple[Tensor, Address]:
        """The answer to one batch, and the address of the instance that gave it."""
        if not ids:
            return Tensor((0,) if output == "rewards" else (0, 0), []), self._instances[0].address
        assert all(ids), "a sequence has tokens"
        longest = max(map(len, ids))
        rows = [[*row, *[0] * (longest - len(row))] for row in ids]
        masks = [[1] * len(row) + [0] * (longest - len(row)) for row in ids]
        start_time = time.monotonic()
        while True:
            instance = self._choose_instance()
            if instance is None:
                pause = min(each.ready_at for each in self._instances) - time.monotonic()
                self._wait("; ".join(f"{each.address}: {each.trouble}" for each in self._instances), start_time)
                time.sleep(min(max(pause, 0.0), BEAT_SECONDS))
                continue
            try:
                answer = self._beat_until_done(
                    instance, start_time, lambda each=instance: each.infer(rows, masks, output)
                )
            except UnavailableError as error:
                instance.note_failure(str(error))
                continue
            instance.note_answer()
            return answer, instance.address

    def _choose_instance(self) -> "_Instance | None":
        """The next instance, in turn, that is not paused."""
        now = time.monotonic()
        for step in range(len(self._instances)):
            instance = self._instances[(self._next + step) % len(self._instances)]
            if instance.ready_at <= now:
                self._next += step + 1
                return instance
        return None

    def _beat_until_done(self, instance: "_Instance", since: float, work: Callable[[], Tensor]) -> Tensor:
        """Return or raise the result of `work`, calling `wait` meanwhile. `work` runs in a daemon thread."""
        done: Future[Tensor] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
                done.set_exception(error)

        start_time = time.monotonic()
        threading.Thread(target=run, name=f"request to {instance.address}", daemon=True).start()
        while True:
            try:
                return done.result(timeout=BEAT_SECONDS)
            except NotYet:
                if done.done():
                    return done.result()
                self._wait(f"{instance.address}: no answer for {time.monotonic() - start_time:.0f} s", since)


class _Instance:
    """One instance: its connection, whether its model has been verified, and its recent failures."""

    def __init__(self, address: Address, fingerprint: str, request_seconds: float) -> None:
        self.address, self.trouble, self.ready_at = address, "", 0.0
        self._fingerprint, self._request_seconds = fingerprint, request_seconds
        self._connection: Connection = connect(address)
        self._failures, self._is_known = 0, False

    def infer(self, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], output: str) -> Tensor:
        """Send one request. Verify the model after it too, as a server can replace the model at any time.

        Raises:
            UnavailableError: the server does not answer.
            UserError: the answer does not match the request.
        """
        try:
            if not self._is_known:
                self._compare()
            answer = self._connection.infer(rows, masks, output, self._request_seconds)
            self._compare()
        except NotLoadedError as error:
            model_names = self._connection.models()
            if self.address.model not in model_names:
                raise ConfigError(
                    f"{self.address}: no such model. The server has: {', '.join(model_names) or '(none)'}."
                ) from None
            raise UnavailableError(f"not loaded: {error}") from None
        self._is_known = True
        return answer

    def _compare(self) -> None:
        """Raises a ConfigError if the server has another model than the experiment."""
        fingerprint = self._connection.fingerprint()
        if fingerprint is None:
            raise ConfigError(f"{self.address}: the model has no fingerprint. Serve it with a command of src.serving.")
        if fingerprint != self._fingerprint:
            raise ConfigError(
                f"{self.address}: expected the model with fingerprint {self._fingerprint[:12]}, as in the experiment, "
                f"got {fingerprint[:12]}. Serve that model, or change the address."
            )

    def note_answer(self) -> None:
        """Reset the count of failures."""
        if self._failures >= FAILURES:
            log.warning("%s: answers again.", self.address)
        self._failures = 0

    def note_failure(self, trouble: str) -> None:
        """Pause the instance: briefly at first, longer after FAILURES consecutive failures."""
        self.trouble, self._is_known = trouble, False
        self._failures += 1
        over = self._failures - FAILURES
        if over == 0:
            log.warning("%s: does not answer (%s).", self.address, trouble)
        pause = (
            SHORT_PAUSE * 2 ** (self._failures - 1) if over < 0 else min(FIRST_REST * 2 ** min(over, 10), LONGEST_REST)
        )
        self.ready_at = time.monotonic() + pause

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _describe(answer: Tensor) -> str:
    return f"{len(answer.values)} numbers of shape {list(answer.shape)}"
