"""A model that servers run, maybe several instances of it: rewards and log-probabilities of token ids.

A server that is away is waited for. One that serves another model, or answers what cannot be right, ends the run with
one line.
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
"""Failures in a row after which an instance is skipped for a while."""
SHORT_PAUSE, FIRST_REST, LONGEST_REST = 0.1, 1.0, 10.0
"""Seconds: before the second try of an instance, twice that before the third; after FAILURES;
and at most, as it doubles each time."""
BEAT_SECONDS = 1.0
"""How often `wait` is called while nothing answers."""


class RemoteModel:
    """The model with a fingerprint, wherever it runs."""

    def __init__(
        self,
        addresses: str,
        fingerprint: str,
        wait: Callable[[str, float], None],
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        """addresses: as `parse_addresses` reads them. fingerprint: the identity of the expected model.

        wait: see `RewardSetting.wait`. The wait of a batch starts with its first request.

        Raises:
            ConfigError: an address cannot be read, or a package is missing.
        """
        self._instances = [_Instance(address, fingerprint, request_seconds) for address in parse_addresses(addresses)]
        self._wait = wait
        self._next = os.getpid()  # processes start with different instances

    def rewards(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """One reward per sequence, all in one batch.

        Raises:
            UserError: another model is served, or the answer cannot be right.
        """
        answer, address = self._ask(ids, "rewards")
        if answer.shape not in ((len(ids),), (len(ids), 1)) or len(answer.values) != len(ids):
            raise RunError(
                f"{address}: gave {_describe(answer)} for {len(ids)} sequences. Expected one reward for each."
            )
        for row, value in enumerate(answer.values):
            if not math.isfinite(value):
                raise RunError(
                    f"{address}: the reward of sequence {row + 1} of {len(ids)} is {value}. Expected a number."
                )
        return [float(value) for value in answer.values]

    def logps(self, ids: Sequence[Sequence[int]], sampled: Sequence[int]) -> list[list[float]]:
        """Log-probabilities of the last `sampled[i]` tokens of each sequence, all in one batch.
        The first one of a sequence has none.

        Raises:
            UserError: another model is served, or the answer cannot be right.
        """
        for row, count in zip(ids, sampled, strict=True):
            assert 0 <= count < len(row), "the first token has no log-probability"
        answer, address = self._ask(ids, "logps")
        longest = max(map(len, ids), default=0)
        if answer.shape != (len(ids), longest) or len(answer.values) != len(ids) * longest:
            raise RunError(f"{address}: gave {_describe(answer)} for {len(ids)} sequences of up to {longest} tokens.")
        logps = []
        for i, (row, count) in enumerate(zip(ids, sampled, strict=True)):
            end = i * longest + len(row)
            logps.append([float(value) for value in answer.values[end - count : end]])
            if not all(map(math.isfinite, logps[-1])):
                raise RunError(f"{address}: a log-probability of sequence {i + 1} of {len(ids)} is no finite number.")
        return logps

    def close(self) -> None:
        """Close all connections."""
        for instance in self._instances:
            instance.close()

    def _ask(self, ids: Sequence[Sequence[int]], output: str) -> tuple[Tensor, Address]:
        """The answer to one batch, and which instance gave it."""
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
        """The next instance that is not paused, in turn."""
        now = time.monotonic()
        for step in range(len(self._instances)):
            instance = self._instances[(self._next + step) % len(self._instances)]
            if instance.ready_at <= now:
                self._next += step + 1
                return instance
        return None

    def _beat_until_done(self, instance: "_Instance", since: float, work: Callable[[], Tensor]) -> Tensor:
        """What `work` returns or raises. It runs in a thread that the process does not wait for at its end."""
        done: Future[Tensor] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  raised again where it is waited for
                done.set_exception(error)

        start_time = time.monotonic()
        threading.Thread(target=run, name=f"request to {instance.address}", daemon=True).start()
        while True:
            try:
                return done.result(timeout=BEAT_SECONDS)
            except NotYet:
                if done.done():
                    return done.result()
                self._wait(f"{instance.address}: has not answered for {time.monotonic() - start_time:.0f} s", since)


class _Instance:
    """One address: its connection, whether its model is known to be the right one, and how it has failed lately."""

    def __init__(self, address: Address, fingerprint: str, request_seconds: float) -> None:
        self.address, self.trouble, self.ready_at = address, "", 0.0
        self._fingerprint, self._request_seconds = fingerprint, request_seconds
        self._connection: Connection = connect(address)
        self._failures, self._is_known = 0, False

    def infer(self, rows: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], output: str) -> Tensor:
        """Send one request. The model is compared after it, too: a server can exchange it at any moment.

        Raises:
            UnavailableError: nothing answers.
            UserError: the response does not match the request.
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
                    f"{self.address}: no such model there. It has {', '.join(model_names) or 'none'}."
                ) from None
            raise UnavailableError(f"not loaded: {error}") from None
        self._is_known = True
        return answer

    def _compare(self) -> None:
        """Raises a ConfigError where the server has another model than the experiment names."""
        fingerprint = self._connection.fingerprint()
        if fingerprint is None:
            raise ConfigError(
                f"{self.address}: reports no fingerprint of its model. Serve it with a command of src.serving."
            )
        if fingerprint != self._fingerprint:
            raise ConfigError(
                f"{self.address}: serves another model (fingerprint {fingerprint[:12]}) than the experiment "
                f"({self._fingerprint[:12]}). "
                "Serve that one, or give the address where it is."
            )

    def note_answer(self) -> None:
        """Its failures are forgotten."""
        if self._failures >= FAILURES:
            log.warning("%s: answers again.", self.address)
        self._failures = 0

    def note_failure(self, trouble: str) -> None:
        """Pause the instance: briefly at first, longer after FAILURES in a row."""
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
        """Its connection is closed."""
        self._connection.close()


def _describe(answer: Tensor) -> str:
    return f"{len(answer.values)} numbers of the shape {list(answer.shape)}"
