"""The Optuna study of a sweep, in SQLite, shared by any number of workers.
Optuna's heartbeats reveal the trials of dead ones."""

import contextlib
import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import ConfigError, RunError
from src.files import writing
from src.runs.lease import directory_lock
from src.sweeps.plan import EarlyTerminate, SweepFile
from src.sweeps.space import SearchDimension, grid_indices
from src.sweeps.trial import TrialResult

if TYPE_CHECKING:
    import optuna
    from optuna.storages._heartbeat import BaseHeartbeatThread

LOCK_SECONDS = 120
"""How long a worker waits for another that writes to the database."""
HEARTBEAT_SECONDS = 10
STALE_SECONDS = 60
"""A trial whose worker was silent for longer is repeated, as a new trial of the same parameters."""
REASON, ASKED, HEARTBEAT = "reason", "asked", "heartbeat"


@dataclass
class ClaimedTrial:
    """A trial of this worker."""

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
        """`identity`: what all workers must agree on, JSON values.

        Raises:
            ConfigError: a study of that name was begun for something else.
            RunError: the disk refuses.
        """
        import optuna
        from sqlalchemy.exc import DatabaseError

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of heartbeats
        warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used with Study.optimize")
        self.name, self.sweep, self.dimensions = name, sweep, dimensions
        self.folder, file = runs / "sweeps" / name, runs / "sweeps" / f"{name}.sqlite"
        self.grid = grid_indices(dimensions) if sweep.method == "grid" else None
        with directory_lock(self.folder), writing(file):
            try:
                self.storage = optuna.storages.RDBStorage(
                    f"sqlite:///{file.resolve()}",
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
                raise RunError(f"{file}: cannot be used: {error.orig}. Move it away to begin the sweep anew.") from None
            text = json.dumps(identity, sort_keys=True)
            if self.study.user_attrs.setdefault(ASKED, text) != text:
                self.close()
                raise ConfigError(
                    f"{file}: this study was begun with another method, metric, experiment or parameters. "
                    "Give the sweep another name, or move that file away."
                )
            self.study.set_user_attr(ASKED, text)

    def close(self) -> None:
        """Close the connections to the database."""
        self.storage.remove_session()
        self.storage.engine.dispose()

    def trials(self) -> list["optuna.trial.FrozenTrial"]:
        """All trials in their order, without those that were repeated under another number."""
        trials = self.study.get_trials(deepcopy=False)
        replaced = {number for trial in trials for number in trial.system_attrs.get("retry_history", [])}
        return [trial for trial in trials if trial.number not in replaced]

    def is_finished(self) -> bool:
        """Whether no trial waits or runs."""
        return all(trial.state.is_finished() for trial in self.trials())

    def claim(self, total: int) -> ClaimedTrial | None:
        """The trial of a dead worker, else a new one while there are fewer than `total`; None: nothing to do now."""
        import optuna
        from optuna.storages._heartbeat import get_heartbeat_thread

        with directory_lock(self.folder):
            for trial in self.trials():
                if trial.state.name == "RUNNING" and trial.user_attrs.get(HEARTBEAT) != trial.number:
                    self._begin_heartbeat(
                        trial._trial_id, trial.number
                    )  # its worker died right after asking: Optuna would wait for ever
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
            values = {dimension.path: dimension.value(_draw(trial, dimension)) for dimension in self.dimensions}
        return ClaimedTrial(trial, values, get_heartbeat_thread(trial._trial_id, self.storage))

    def report(self, claimed: ClaimedTrial, values: Sequence[float]) -> bool:
        """Report the values so far, the first as iteration 1; True if Optuna wants the trial stopped.

        Raises:
            RunError: another worker has taken the trial over.
        """
        from optuna.exceptions import UpdateFinishedTrialError

        trial = claimed.trial
        num_reported = len(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        for iteration in range(num_reported + 1, len(values) + 1):
            try:
                trial.report(values[iteration - 1], step=iteration)
            except UpdateFinishedTrialError:
                raise RunError(
                    f"trial {trial.number}: silent for {STALE_SECONDS} seconds, so another worker has taken it over."
                ) from None
            if self.sweep.early_terminate and iteration < len(values) and trial.should_prune():
                return True
        return bool(self.sweep.early_terminate and values and trial.should_prune())

    def end(self, claimed: ClaimedTrial, result: TrialResult) -> None:
        """Close a trial, unless another worker has taken it over."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        if result.reason:
            with contextlib.suppress(UpdateFinishedTrialError):
                claimed.trial.set_user_attr(REASON, result.reason)
        state = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}[result.state]
        value = result.value if result.value is not None else 0.0  # a grid needs no metric
        self.study.tell(
            claimed.trial.number, value if result.state == "done" else None, state=state, skip_if_finished=True
        )

    def hand_back(self, claimed: ClaimedTrial) -> None:
        """Let any worker repeat the interrupted trial at once."""
        import optuna

        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self.storage.set_trial_state_values(claimed.trial._trial_id, state=optuna.trial.TrialState.FAIL)
            failed = self.storage.get_trial(claimed.trial._trial_id)
            optuna.storages.RetryHeartbeatStaleTrialCallback()(self.study, failed)

    def values_of(self, trial: "optuna.trial.FrozenTrial") -> dict[str, Any]:
        """Dotted path -> value, of the parameters that the trial has drawn."""
        return {
            dimension.path: dimension.value(trial.params[dimension.path])
            for dimension in self.dimensions
            if dimension.path in trial.params
        }

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
        """Seeded by the trial's number, so that a single worker always draws the same trials."""
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
