"""The Optuna study of a sweep, in SQLite, shared by all workers, and the trainings of its trials.

Optuna's heartbeats detect dead workers. A trial is an ordinary training in its own save directory, which runs as a
child process and is followed through its scores.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from src.errors import ConfigError, RunError, UserError
from src.files import writing
from src.runs import lease
from src.runs.checkpoints.pins import StalenessProbe
from src.runs.lease import directory_lock
from src.runs.scores import SCORES, Scores
from src.runs.store import SavedRun
from src.runs.summary import is_finite
from src.support.command_line import end_session, start_bound
from src.sweeps.search_space import SearchDimension, grid_draws, values_of
from src.sweeps.sweep import EarlyTerminate, SweepFile

if TYPE_CHECKING:
    import optuna
    from optuna.storages._heartbeat import BaseHeartbeatThread

LOCK_SECONDS = 120
"""Timeout for another worker that writes to the database."""
HEARTBEAT_SECONDS = 10
STALE_SECONDS = 60
"""If a worker is silent for longer, its trial is repeated as a new trial with the same parameters."""
REASON, IDENTITY, HEARTBEAT = "reason", "asked", "heartbeat"
POLL_SECONDS = 0.2
EXP_ID = "exp_id"
"""The attribute of a trial that holds its experiment id."""
GRACE_SECONDS = 60.0
"""Time for a training to stop with a checkpoint before it is killed."""
RESTARTS = 3
"""How often a training that was killed from outside is restarted."""
_RESTART_EXITS = {75, 128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGUSR1}


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended. value: last value of the metric; None without a metric."""

    state: Literal["done", "pruned", "failed"]
    value: float | None = None
    reason: str = ""


@dataclass
class ClaimedTrial:
    """A trial that this worker runs."""

    trial: "optuna.Trial"
    values: dict[str, Any]
    """Dotted path -> value of the experiment."""
    heartbeat: "BaseHeartbeatThread"


class Study:
    """The trials of a sweep."""

    def __init__(
        self,
        runs: Path,
        name: str,
        sweep: SweepFile,
        dimensions: Sequence[SearchDimension],
        identity: Mapping[str, Any],
    ) -> None:
        """identity: facts that all workers must agree on, JSON values.

        Raises:
            ConfigError: a study with this name exists for another sweep.
            RunError: the disk refuses.
        """
        import optuna
        from sqlalchemy.engine import URL
        from sqlalchemy.exc import DatabaseError

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of heartbeats
        warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used with Study.optimize")
        self.name, self.sweep, self.dimensions = name, sweep, dimensions
        self.folder, file = runs / "sweeps" / name, runs / "sweeps" / f"{name}.sqlite"
        self.grid = grid_draws(dimensions) if sweep.method == "grid" else None
        with directory_lock(self.folder), writing(file):
            try:
                self.storage = optuna.storages.RDBStorage(
                    URL.create("sqlite", database=str(file.resolve())).render_as_string(),
                    engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}},
                    heartbeat_interval=HEARTBEAT_SECONDS,
                    grace_period=STALE_SECONDS,
                    heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(),
                )
                self.study = optuna.create_study(
                    storage=self.storage,
                    study_name=name,
                    load_if_exists=True,
                    direction=sweep.metric.goal if sweep.metric else "minimize",
                    pruner=_pruner(sweep.early_terminate),
                )
            except DatabaseError as error:
                raise RunError(f"{file}: cannot be used: {error.orig}. Move it away to restart the sweep.") from None
            text = json.dumps(identity, sort_keys=True)
            if self.study.user_attrs.setdefault(IDENTITY, text) != text:
                self.close()
                raise ConfigError(
                    f"{file}: this study was started with another method, metric, experiment or parameters. "
                    "Give the sweep another name, or move the file away."
                )
            self.study.set_user_attr(IDENTITY, text)

    def close(self) -> None:
        """Close the connections to the database."""
        self.storage.remove_session()
        self.storage.engine.dispose()

    def trials(self) -> list["optuna.trial.FrozenTrial"]:
        """All trials in order, without those that were repeated under another number."""
        trials = self.study.get_trials(deepcopy=False)
        replaced_numbers = {number for trial in trials for number in trial.system_attrs.get("retry_history", [])}
        return [trial for trial in trials if trial.number not in replaced_numbers]

    def is_finished(self) -> bool:
        """Whether all trials have ended."""
        return all(trial.state.is_finished() for trial in self.trials())

    def claim(self, total: int) -> ClaimedTrial | None:
        """The trial of a dead worker, else a new one if there are fewer than `total`; None without a trial to run."""
        import optuna
        from optuna.storages._heartbeat import get_heartbeat_thread

        with directory_lock(self.folder):
            for trial in self.trials():
                if trial.state.name == "RUNNING" and trial.user_attrs.get(HEARTBEAT) != trial.number:
                    self._begin_heartbeat(
                        trial._trial_id, trial.number
                    )  # its worker died before the first heartbeat: Optuna would wait forever
            optuna.storages.fail_stale_trials(self.study)
            trials = self.trials()
            if not any(trial.state.name == "WAITING" for trial in trials):
                if len(trials) >= min(total, len(self.grid or range(total))) or self._is_target_reached(trials):
                    return None
                if self.grid is not None:
                    self.study.enqueue_trial(self.grid[len(trials)])
            trial = self.study.ask()
            self._begin_heartbeat(trial._trial_id, trial.number)
            self.study.sampler = self._sampler(trial.number)
            values = values_of(self.dimensions, {each.path: _draw(trial, each) for each in self.dimensions})
        return ClaimedTrial(trial, values, get_heartbeat_thread(trial._trial_id, self.storage))

    def report(self, claim: ClaimedTrial, values: Sequence[float]) -> bool:
        """Report the values so far, the first as iteration 1; return True if Optuna prunes the trial.

        Raises:
            RunError: another worker has taken over the trial.
        """
        from optuna.exceptions import UpdateFinishedTrialError

        trial = claim.trial
        num_reported = len(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        for iteration in range(num_reported + 1, len(values) + 1):
            try:
                trial.report(values[iteration - 1], step=iteration)
            except UpdateFinishedTrialError:
                raise RunError(
                    f"trial {trial.number}: no heartbeat for {STALE_SECONDS} s, so another worker has taken it over."
                ) from None
            if self.sweep.early_terminate and iteration < len(values) and trial.should_prune():
                return True
        return bool(self.sweep.early_terminate and values and trial.should_prune())

    def end(self, claim: ClaimedTrial, result: TrialResult) -> None:
        """Record the result of a trial, unless another worker has taken it over."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        if result.reason:
            with contextlib.suppress(UpdateFinishedTrialError):
                claim.trial.set_user_attr(REASON, result.reason)
        state = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}[result.state]
        value = result.value if result.value is not None else 0.0  # a grid needs no metric
        self.study.tell(
            claim.trial.number, value if result.state == "done" else None, state=state, skip_if_finished=True
        )

    def hand_back(self, claim: ClaimedTrial) -> None:
        """Release the interrupted trial, so that any worker can repeat it at once."""
        import optuna

        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self.storage.set_trial_state_values(claim.trial._trial_id, state=optuna.trial.TrialState.FAIL)
            failed = self.storage.get_trial(claim.trial._trial_id)
            optuna.storages.RetryHeartbeatStaleTrialCallback()(self.study, failed)

    def _begin_heartbeat(self, trial_id: int, number: int) -> None:
        self.storage.record_heartbeat(trial_id)
        self.storage.set_trial_user_attr(trial_id, HEARTBEAT, number)

    def _is_target_reached(self, trials: Sequence["optuna.trial.FrozenTrial"]) -> bool:
        metric = self.sweep.metric
        if metric is None or metric.target is None:
            return False
        values = [trial.value for trial in trials if trial.state.name == "COMPLETE" and trial.value is not None]
        return any(value <= metric.target if metric.goal == "minimize" else value >= metric.target for value in values)

    def _sampler(self, number: int) -> "optuna.samplers.BaseSampler":
        """A sampler seeded by the trial's number, so that a single worker always draws the same trials."""
        import optuna

        seed = zlib.crc32(f"{self.name}/{number}".encode())
        if self.sweep.method == "bayes":
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        return optuna.samplers.RandomSampler(seed=seed)


def _draw(trial: "optuna.Trial", dimension: SearchDimension) -> Any:
    if dimension.kind == "choice":
        return trial.suggest_categorical(dimension.path, list(range(len(dimension.choices))))
    if dimension.kind == "int":
        return trial.suggest_int(dimension.path, int(dimension.low), int(dimension.high))
    return trial.suggest_float(dimension.path, dimension.low, dimension.high, log=dimension.kind == "log")


def _pruner(early: EarlyTerminate | None) -> "optuna.pruners.BasePruner":
    import optuna

    if early is None:
        return optuna.pruners.NopPruner()
    if early.type == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=early.first - 1)
    return optuna.pruners.HyperbandPruner(early.first, early.max_iter or "auto", early.eta)


@dataclass
class Training:
    """Starts `argv` to train in the save directory `run`, unless another process trains there, and follows the scores.

    If this process dies, the training that it started is stopped.
    """

    run: Path
    argv: Sequence[str]
    metric: str | None
    grace_seconds: float = GRACE_SECONDS

    def __post_init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._cached_values: tuple[object, list[float | None]] = (None, [])
        self._holder = StalenessProbe(2 * lease.STALE_SECONDS)

    def follow(self, prune: Callable[[Sequence[float]], bool]) -> TrialResult:
        """Train to the end. `prune` gets all values so far whenever there can be new ones; True stops the training.

        If this process is interrupted, it first stops the training gracefully.

        Raises:
            RunError: the log cannot be written, or the command cannot be started.
        """
        try:
            while (result := self._step(prune)) is None:
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._stop()
            raise
        return result

    def _step(self, prune: Callable[[Sequence[float]], bool]) -> TrialResult | None:
        code = self.child.poll() if self.child else None  # before reading the files: they are final if it has ended
        try:
            state, values = SavedRun(self.run).state, self._finite_values()
        except UserError as error:
            self._stop()
            return TrialResult("failed", reason=str(error))
        has_ended = self.child is None or code is not None
        if state == "done":
            if not has_ended:
                return None
            prune(values)
            return self._final_result()
        if prune(values):
            self._stop()
            if SavedRun(self.run).state == "done":
                return self._final_result()
            return TrialResult("pruned", values[-1] if values else None)
        if not has_ended or not self._holder.is_stale(self.run):
            return None  # another process trains there: wait for it
        if code is not None and code >= 0 and code not in _RESTART_EXITS:
            reason = (
                str(SavedRun(self.run).status.get("reason") or f"exit code {code}")
                if state == "failed"
                else f"exit code {code}"
            )
            return TrialResult("failed", reason=f"{reason}. See {self._logs()[1]}")
        return self._start()

    def _start(self) -> TrialResult | None:
        self._starts += 1
        if self._starts > RESTARTS + 1:
            return TrialResult("failed", reason=f"killed {RESTARTS + 1} times. See {self._logs()[1]}")
        logs = self._logs()
        with writing(logs[0].parent):
            logs[0].parent.mkdir(parents=True, exist_ok=True)
        if shutil.which(self.argv[0]) is None:
            raise RunError(f"{self.argv[0]}: no such program. Check `command` of the sweep file.")
        with writing(logs[0]), open(logs[0], "ab") as out, open(logs[1], "ab") as err:
            self.child = start_bound(self.argv, signal.SIGTERM, out, err)
        return None

    def _logs(self) -> tuple[Path, Path]:
        folder = self.run.parent / "logs"
        return folder / f"{self.run.name}.out.log", folder / f"{self.run.name}.err.log"

    def _final_result(self) -> TrialResult:
        """The result of a finished training: failed if its metric is missing or ended in NaN or infinity."""
        values = self._values()
        if self.metric is not None and not values:
            return TrialResult(
                "failed", reason=f"no value of {self.metric!r} in {self.run / SCORES}: the training does not log it."
            )
        if values and values[-1] is None:
            return TrialResult("failed", reason=f"{self.metric!r} ended in NaN or infinity: see {self.run / SCORES}.")
        return TrialResult("done", values[-1] if values else None)

    def _finite_values(self) -> list[float]:
        return [value for value in self._values() if value is not None]

    def _values(self) -> list[float | None]:
        """The values of the metric so far, in the order of the steps; None for NaN and infinity."""
        file = self.run / SCORES
        try:
            facts = os.stat(file)
        except FileNotFoundError:
            return []
        version = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if version != self._cached_values[0]:
            rows = Scores(file, read_only=True).rows()
            column = [row[self.metric] for row in rows if self.metric in row]
            self._cached_values = (version, [float(value) if is_finite(value) else None for value in column])
        return self._cached_values[1]

    def _stop(self) -> None:
        if self.child is not None and self.child.poll() is None:
            end_session(self.child, self.grace_seconds)
