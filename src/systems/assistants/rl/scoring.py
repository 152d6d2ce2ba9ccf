"""Scores of rollouts: each reward's, and their weighted sum."""

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
_LONG = 5.0
"""Seconds of a wait after which it is told."""
MOST_SECONDS = 900.0
"""That a run waits for a server: half of what processes wait for each other."""


class ServerUnavailableError(UserError):
    """A reward or a reference cannot be asked, and the run stops, to be started again."""


class Patience:
    """Waits for a server: shows that the run lives, and ends the wait."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._logged_wait = 0.0

    def wait(self, text: str, since: float) -> None:
        """See `systems.assistants.rewards.interface.RewardSetting.wait`.

        Raises:
            ServerUnavailableError: a process is asked to stop, or nothing has answered for long.
        """
        wait_seconds = time.monotonic() - since
        if wait_seconds > _LONG and self._logged_wait != since:
            log.warning("%s: waits for %s.", self._run.path, text)
            self._logged_wait = since
        heartbeat.keep_alive(self._run.path, self._run.dir.attempt)
        if distributed.stop_requested():
            raise ServerUnavailableError(f"asked to stop while waiting for {text}")
        if wait_seconds > MOST_SECONDS:
            raise ServerUnavailableError(f"waited {MOST_SECONDS:.0f} s for {text}")


@dataclass(frozen=True)
class Scores:
    """What several rewards say of rollouts."""

    parts: Sequence[Sequence[float]]
    """Of each rollout, the scores of the rewards in their order."""
    totals: Sequence[float]
    """The weighted sum of each."""


@dataclass(frozen=True)
class Judges:
    """The rewards of an experiment, ready to score."""

    names: Sequence[str]
    """As score rows have them."""
    scorers: Sequence[Scorer]
    weights: Sequence[float]

    def score(self, rollouts: Sequence[Rollout]) -> Scores:
        """One batch of rollouts.

        Raises:
            RunError: a reward gives too few scores, or no finite numbers; names it.
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
    """The scores as floats.

    Raises:
        RunError: they are no list of `wanted` finite numbers; names the reward.
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
        raise RunError(f"reward {name!r}: a score is too large for a number of 64 bits.") from None
