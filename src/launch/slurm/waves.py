"""The limit of running tasks for a submission with several arrays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from src.launch.job import Job

if TYPE_CHECKING:
    from src.launch.slurm.launcher import Config


class Array(NamedTuple):
    config: "Config"
    jobs: list[Job]
    jobs_per_task: int

    @property
    def tasks(self) -> int:
        return -(-len(self.jobs) // self.jobs_per_task)


class Waves:
    """Enforces `max_running` across the arrays of a submission; Slurm can only limit each array.

    Arrays that together stay within the limit form a wave. The arrays of the next wave wait until all arrays of this
    wave have ended.
    """

    def __init__(self, max_running: int | None) -> None:
        """max_running: limit of the job config; an override can set a lower limit for its arrays."""
        self._max_running = max_running
        self._waves: dict[int | None, list[list[tuple[Array, str]]]] = {}

    def place(self, array: Array) -> tuple[int | None, list[str]]:
        """The limit of the array's tasks, and the arrays that it waits for. Starts a new wave if it does not fit."""
        limits = [limit for limit in (self._max_running, array.config.max_running) if limit]
        if not limits:
            return None, []
        waves = self._waves.setdefault(self._max_running or array.config.max_running, [[], []])
        if (
            self._running(waves[-1], array, same_limit=False) > limits[0]
            or self._running(waves[-1], array, same_limit=True) > limits[-1]
        ):
            waves.append([])
        return min(limits), [array_id for _, array_id in waves[-2]]

    def add(self, array: Array, array_id: str) -> None:
        """Record the id of the array that was placed last."""
        if key := self._max_running or array.config.max_running:
            self._waves[key][-1].append((array, array_id))

    def _running(self, wave: Sequence[tuple[Array, str]], array: Array, same_limit: bool) -> int:
        """Upper bound of running tasks of `wave` and `array`; 0 for a new wave.
        same_limit: only of arrays with the limit of `array`."""
        arrays = [each for each, _ in wave if not same_limit or each.config.max_running == array.config.max_running]
        limits = [[each.tasks, each.config.max_running, self._max_running] for each in (*arrays, array)]
        return sum(min(filter(None, each)) for each in limits) if wave else 0
