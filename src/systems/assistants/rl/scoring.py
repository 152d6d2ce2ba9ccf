"""Scores of rollouts by each reward, and their weighted sums."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from src.errors import RunError, UserError
from src.runs import heartbeat
from src.runs.context import Run
from src.support import distributed
from src.systems.assistants.rewards.interface import Rollout, Scorer

log = logging.getLogger(__name__)
_LOG_AFTER_SECONDS = 5.0
"""Log a wait after this time."""
MAX_WAIT_SECONDS = 900.0
"""Maximum wait for a server: half of the timeout of collective operations."""


class ServerUnavailableError(UserError):
    """A server of a reward or of the reference is unavailable, so the run stops and can be restarted."""


class Patience:
    """Keeps the run's heartbeat alive while it waits for a server, and limits the wait."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._logged_wait = 0.0

    def wait(self, text: str, since: float) -> None:
        """See `systems.assistants.rewards.interface.RewardSetting.wait`.

        Raises:
            ServerUnavailableError: a process has received a stop request, or the wait has reached its limit.
        """
        wait_seconds = time.monotonic() - since
        if wait_seconds > _LOG_AFTER_SECONDS and self._logged_wait != since:
            log.warning("%s: waiting for %s.", self._run.path, text)
            self._logged_wait = since
        heartbeat.keep_alive(self._run.path, self._run.dir.attempt)
        if distributed.stop_requested():
            raise ServerUnavailableError(f"stop requested while waiting for {text}")
        if wait_seconds > MAX_WAIT_SECONDS:
            raise ServerUnavailableError(f"waited {MAX_WAIT_SECONDS:.0f} s for {text}")


@dataclass(frozen=True)
class Scores:
    """Scores of rollouts."""

    parts: Sequence[Sequence[float]]
    """For each rollout, the score of each reward."""
    totals: Sequence[float]
    """For each rollout, the weighted sum of its scores."""


@dataclass(frozen=True)
class Judges:
    """The rewards of an experiment, ready to score."""

    names: Sequence[str]
    """Names in score rows."""
    scorers: Sequence[Scorer]
    weights: Sequence[float]

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        """Score one batch of rollouts.

        Raises:
            RunError: a reward returns a wrong number of scores, or scores that are not finite.
        """
        columns = [
            require_scores(name, scorer(rollouts), len(rollouts))
            for name, scorer in zip(self.names, self.scorers, strict=True)
        ]
        parts = [*zip(*columns, strict=True)]
        return Scores(
            parts, [math.fsum(w * value for w, value in zip(self.weights, row, strict=True)) for row in parts]
        )


def require_scores(name: str, scores: object, num_rollouts: int) -> list[float]:
    """Check the scores of the reward `name`; returns them as floats.

    Raises:
        RunError: not a sequence of `num_rollouts` finite numbers.
    """
    if isinstance(scores, str) or not isinstance(scores, Sequence) or len(scores) != num_rollouts:
        description = (
            f"{len(scores)} scores"
            if isinstance(scores, Sequence) and not isinstance(scores, str)
            else f"{scores!r:.40}"
        )
        raise RunError(f"reward {name!r}: expected a score for each of {num_rollouts} rollouts, got {description}.")
    for place, value in enumerate(scores):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise RunError(
                f"reward {name!r}: rollout {place} of {num_rollouts}: expected a finite number, got {value!r:.40}."
            )
    try:
        return [float(value) for value in scores]
    except OverflowError:
        raise RunError(f"reward {name!r}: a score is too large for a 64-bit float. Scale the scores down.") from None
