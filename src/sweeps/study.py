"""The study of a sweep: Optuna's record of its trials in SQLite, shared by any number of workers."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.errors import ConfigError, RunError
from src.files import writing
from src.runs.lease import Lease, guarded, holder_is_dead
from src.sweeps import space as sweep_space
from src.sweeps.file import EarlyTerminate, SweepFile
from src.sweeps.space import Axis
from src.sweeps.trial import Ending

if TYPE_CHECKING:
    import optuna

LOCK_SECONDS = 120
"""How long a worker waits for another that writes to the database."""
EXP_ID, REASON, SAME_AS, ASKED = "exp_id", "reason", "same_as", "asked"


@dataclass
class Claimed:
    """A trial that this worker holds, until it has ended or the worker has."""

    trial: "optuna.Trial"
    values: dict[str, Any]
    """Dotted path -> value of the experiment."""
    lease: Lease


def place(runs: Path, name: str) -> tuple[Path, Path]:
    """The folder of a study, with what its workers hold, and its database."""
    return runs / "sweeps" / name, runs / "sweeps" / f"{name}.sqlite"


class Study:
    """The trials so far, and the next one. Each is held by one worker at a time; that of a dead worker is taken over."""

    def __init__(self, runs: Path, name: str, sweep: SweepFile, axes: Sequence[Axis], asked: Mapping[str, Any]) -> None:
        """`asked`: what all workers must agree on, JSON values.

        Raises:
            ConfigError: a study of that name was begun for something else.
            RunError: the disk refuses.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.name, self.sweep, self.axes = name, sweep, axes
        self.folder, self.file = place(runs, name)
        self.grid = sweep_space.combinations(axes) if sweep.method == "grid" else None
        with guarded(self.folder), writing(self.file):
            self.study = self._open()
            text = json.dumps(asked, sort_keys=True)
            if self.study.user_attrs.setdefault(ASKED, text) != text:
                raise ConfigError(
                    f"{self.file}: this study was begun with another method, metric, experiment or parameters. "
                    "Give the sweep another name, or move that file away."
                )
            self.study.set_user_attr(ASKED, text)

    def _open(self) -> "optuna.Study":
        import optuna
        from sqlalchemy.exc import DatabaseError

        try:
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{self.file.resolve()}", engine_kwargs={"connect_args": {"timeout": LOCK_SECONDS}}
            )
            return optuna.create_study(
                storage=storage,
                study_name=self.name,
                load_if_exists=True,
                direction=self.sweep.metric.goal if self.sweep.metric else "minimize",
                pruner=_pruner(self.sweep.early_terminate),
            )
        except DatabaseError as error:
            raise RunError(f"{self.file}: cannot be used: {error.orig}. Move it away to begin the sweep anew.") from None

    def trials(self) -> list["optuna.trial.FrozenTrial"]:
        """All trials, in their order."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name != "WAITING"]

    def claim(self, total: int) -> Claimed | None:
        """A trial that a dead worker left behind, else a new one while there are fewer than `total`. None: nothing to do now."""
        with guarded(self.folder):
            trials = self.trials()
            running = [trial for trial in trials if trial.state.name == "RUNNING"]
            for trial in running:
                if not self._copied(trial, trials) and holder_is_dead(self._place(trial.number)):
                    return self._take(trial.number, trial._trial_id)
            if len(trials) < min(total, len(self.grid) if self.grid is not None else total) and not self._reached(trials):
                return self._new(len(trials))
        for trial in running:  # of another machine: watched outside the guard, as it takes a while
            if SAME_AS not in trial.user_attrs and holder_is_dead(self._place(trial.number)) is None:
                try:
                    return self._take(trial.number, trial._trial_id)
                except RunError:
                    continue
        return None

    def note(self, claimed: Claimed, exp_id: str) -> bool:
        """Write down the experiment of a trial. False: another trial has it, so it need not be trained; it is let go of."""
        with guarded(self.folder):
            claimed.trial.set_user_attr(EXP_ID, exp_id)
            for other in self.trials():
                if other.number != claimed.trial.number and other.user_attrs.get(EXP_ID) == exp_id and SAME_AS not in other.user_attrs:
                    claimed.trial.set_user_attr(SAME_AS, other.number)
                    claimed.lease.release()
                    return False
        return True

    def report(self, claimed: Claimed, values: Sequence[float]) -> bool:
        """Tell Optuna the values so far, the first as iteration 1; True where it wants the trial stopped."""
        trial = claimed.trial
        told = len(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        for iteration in range(told + 1, len(values) + 1):
            trial.report(values[iteration - 1], step=iteration)
            if self.sweep.early_terminate and iteration < len(values) and trial.should_prune():
                return True
        return bool(self.sweep.early_terminate and values and trial.should_prune())

    def end(self, claimed: Claimed, ending: Ending) -> None:
        """Close a trial, once.

        Raises:
            RunError: another worker has taken it over.
        """
        from optuna.trial import TrialState

        claimed.lease.confirm()
        if ending.reason:
            claimed.trial.set_user_attr(REASON, ending.reason)
        state = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}[ending.state]
        value = ending.value if ending.value is not None else 0.0  # a grid without a metric is only gone through
        self.study.tell(claimed.trial.number, value if ending.state == "done" else None, state=state, skip_if_finished=True)
        claimed.lease.release()

    def values_of(self, trial: "optuna.trial.FrozenTrial") -> dict[str, Any]:
        """Dotted path -> value of the experiment, of what the trial has drawn."""
        return {axis.path: axis.value(trial.params[axis.path]) for axis in self.axes if axis.path in trial.params}

    def _new(self, number: int) -> Claimed | None:
        self.study.sampler = self._sampler(number)
        if self.grid is not None and not any(t.state.name == "WAITING" for t in self.study.get_trials(deepcopy=False)):
            self.study.enqueue_trial(self.grid[number])
        trial = self.study.ask()
        return self._take(trial.number, trial._trial_id, trial)

    def _take(self, number: int, trial_id: int, trial: "optuna.Trial | None" = None) -> Claimed | None:
        """Hold a trial, and draw what it has not drawn yet: its worker may have died in between."""
        import optuna

        lease = Lease.acquire(self._place(number))
        try:
            if self.study.get_trials(deepcopy=False)[number].state.name != "RUNNING":
                lease.release()  # it ended in the meantime
                return None
            if trial is None:
                self.study.sampler = self._sampler(number)
                trial = optuna.trial.Trial(self.study, trial_id)
            values = {axis.path: axis.value(_draw(trial, axis)) for axis in self.axes}
        except BaseException:
            lease.release()
            raise
        return Claimed(trial, values, lease)

    def _copied(self, trial: "optuna.trial.FrozenTrial", trials: Sequence["optuna.trial.FrozenTrial"]) -> bool:
        """Whether another trial has the same experiment; once that has ended, this one has ended alike."""
        if SAME_AS not in trial.user_attrs:
            return False
        other = trials[trial.user_attrs[SAME_AS]]
        if other.state.is_finished():
            value = other.value if other.state.name == "COMPLETE" else None
            self.study.tell(trial.number, value, state=other.state, skip_if_finished=True)
        return True

    def _reached(self, trials: Sequence["optuna.trial.FrozenTrial"]) -> bool:
        metric = self.sweep.metric
        if metric is None or metric.target is None:
            return False
        found = [trial.value for trial in trials if trial.state.name == "COMPLETE" and trial.value is not None]
        return any(value <= metric.target if metric.goal == "minimize" else value >= metric.target for value in found)

    def _sampler(self, number: int) -> "optuna.samplers.BaseSampler":
        """Seeded by the trial, so that one worker alone draws the same trials each time."""
        import optuna

        seed = zlib.crc32(f"{self.name}/{number}".encode())
        if self.sweep.method == "bayes":
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        return optuna.samplers.RandomSampler(seed=seed)

    def _place(self, number: int) -> Path:
        return self.folder / f"trial-{number:05d}"


def _draw(trial: "optuna.Trial", axis: Axis) -> Any:
    if axis.kind == "choice":
        return trial.suggest_categorical(axis.path, list(range(int(axis.high) + 1)))
    if axis.kind == "int":
        return trial.suggest_int(axis.path, int(axis.low), int(axis.high))
    return trial.suggest_float(axis.path, float(axis.low), float(axis.high), log=axis.kind == "log")


def _pruner(early: EarlyTerminate | None) -> "optuna.pruners.BasePruner":
    import optuna

    if early is None:
        return optuna.pruners.NopPruner()
    if early.type == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=early.first - 1)
    return optuna.pruners.HyperbandPruner(early.first, early.max_iter or "auto", early.eta)
