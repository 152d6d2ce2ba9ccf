"""Run a sweep file of Weights & Biases without a server. Several of these commands can work on a sweep in parallel.

python -m src.sweeps resources/sweeps/base_tiny_bayes.yaml --trials 20 --workers 2
python -m src.sweeps resources/sweeps/base_tiny_bayes.yaml --dry-run
"""

import argparse
import contextlib
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from src.errors import ConfigError
from src.experiments.config import Places
from src.runs import plan
from src.runs.store import SavedRun
from src.support.command_line import aligned_lines, make_parser, run_command
from src.sweeps.search_space import random_values, values_of
from src.sweeps.study import EXP_ID, POLL_SECONDS, Study, Training, TrialResult
from src.sweeps.sweep import Sweep, combinations, load

if TYPE_CHECKING:
    from src.sweeps.study import ClaimedTrial

log = logging.getLogger(__name__)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments."""
    parser = make_parser("src.sweeps", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="sweep in the schema of Weights & Biases")
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="trials of the sweep, including earlier calls (default: run_cap or the grid)",
    )
    parser.add_argument(
        "-sb", "--savedir_base", type=Path, default=Path("results/runs"), metavar="DIR", help="save directories"
    )
    parser.add_argument(
        "--data_path", type=Path, default=Path("results/data"), metavar="DIR", help="prepared data sets"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="K", help="concurrent trials, which split CUDA_VISIBLE_DEVICES evenly"
    )
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="check the file, print the first trials, and exit"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 if every trial has ended and none failed."""
    return run_command(lambda: act(parse(argv)))


def act(args: argparse.Namespace) -> int:
    """Check the sweep, then describe or run it."""
    for name, number in (("--trials", args.trials), ("--workers", args.workers)):
        if number is not None and number < 1:
            raise ConfigError(f"{name}: expected a number above 0, got {number}.")
    sweep = load(args.file, Places(args.data_path, args.savedir_base))
    total = _trial_count(args.trials, sweep)
    if args.dry_run:
        sys.stdout.write("\n".join(describe(sweep, total)) + "\n")
    check_place(sweep)
    if args.dry_run:
        return 0
    with contextlib.closing(
        Study(sweep.places.runs, sweep.name, sweep.file, sweep.dimensions, sweep.identity())
    ) as study:
        if args.workers > 1:
            _run_workers(args, total)
        work(sweep, study, total)
        trials = study.trials()
        sys.stdout.write("\n".join(table(sweep, study)) + "\n")
    return 1 if any(trial.state.name == "FAIL" for trial in trials) else 0


def check_place(sweep: Sweep) -> None:
    """Check that this machine has the data and parents that a trial needs.

    Raises:
        ConfigError: one line for each problem.
    """
    problems = plan.find_problems([sweep.example], sweep.places) if sweep.example else {}
    if problems:
        raise ConfigError("\n".join(message for messages in problems.values() for message in messages))


def describe(sweep: Sweep, total: int) -> list[str]:
    """Lines of the dry run: the trials of a grid, or an example, and the command."""
    is_grid = sweep.file.method == "grid"
    trial_values = combinations(sweep)[:total] if is_grid else [random_values(sweep.dimensions, random.Random(0))]
    goal = f"{sweep.file.metric.goal} {sweep.metric}" if sweep.file.metric else "no metric"
    lines = [sweep.file.description] if sweep.file.description else []
    lines += [
        f"{sweep.group}: {sweep.file.method}, {total} trials that start from {sweep.source.where}, {goal}; such as"
    ]
    for values in trial_values:
        item = sweep.source.trial(values, "parameters")
        lines.append(f"{item.exp_id}  {' '.join(f'{path}={value}' for path, value in values.items())}")
    return [*lines, " ".join(sweep.command.argv("ID", sweep.places))]


def work(sweep: Sweep, study: Study, total: int) -> None:
    """Run trials sequentially until all have ended, including those of dead workers."""
    while True:
        claim = study.claim(total)
        if claim is not None:
            with claim.heartbeat:
                try:
                    run_trial(sweep, study, claim)
                except (KeyboardInterrupt, SystemExit):
                    study.hand_back(claim)
                    raise
        elif study.is_finished():
            return
        else:
            time.sleep(POLL_SECONDS)


def run_trial(sweep: Sweep, study: Study, claim: "ClaimedTrial") -> None:
    """Train one trial; resumes an earlier training of the same experiment."""
    number = claim.trial.number
    try:
        item = sweep.source.trial(claim.values, "parameters")
    except ConfigError as error:
        study.end(claim, TrialResult("failed", reason=str(error).splitlines()[0]))
        return
    claim.trial.set_user_attr(EXP_ID, item.exp_id)
    log.info(
        "trial %d: %s %s", number, item.exp_id, " ".join(f"{path}={value}" for path, value in claim.values.items())
    )
    run = sweep.places.runs / item.exp_id
    SavedRun(run).write_exp(item.exp, [sweep.group])
    training = Training(run, sweep.command.argv(item.exp_id, sweep.places, item.set_arguments), sweep.metric)
    result = training.follow(lambda values: study.report(claim, values))
    study.end(claim, result)
    log.info(
        "trial %d: %s %s%s", number, result.state, "" if result.value is None else f"{result.value:g} ", result.reason
    )


def table(sweep: Sweep, study: Study) -> list[str]:
    """Lines with the trials in order, the reasons of failures, and the best trial."""
    trials = study.trials()
    rows = [["trial", "state", sweep.metric or "", *(dimension.path for dimension in sweep.dimensions), "id"]]
    for trial in trials:
        values = values_of(sweep.dimensions, trial.params)
        last = (
            trial.value
            if trial.value is not None
            else trial.intermediate_values.get(max(trial.intermediate_values, default=0))
        )
        metric_cell = "" if last is None or sweep.metric is None or trial.state.name == "FAIL" else f"{last:.6g}"
        trial_values = [values.get(dimension.path, "") for dimension in sweep.dimensions]
        cells = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in trial_values]
        rows.append(
            [str(trial.number), trial.state.name.lower(), metric_cell, *cells, str(trial.user_attrs.get(EXP_ID, ""))]
        )
    lines = aligned_lines(rows)
    reasons = [
        f"trial {t.number} failed: {t.user_attrs['reason']}"
        for t in trials
        if t.state.name == "FAIL" and "reason" in t.user_attrs
    ]
    complete_trials = [trial for trial in trials if trial.state.name == "COMPLETE"]
    if not sweep.metric or not complete_trials:
        return [*lines, *reasons]
    best = study.study.best_trial
    return [
        *lines,
        *reasons,
        f"best: trial {best.number}, {sweep.metric} {best.value:.6g}, {best.user_attrs.get(EXP_ID)}",
    ]


def _trial_count(trials: int | None, sweep: Sweep) -> int:
    """Number of trials of the sweep."""
    size = len(combinations(sweep)) if sweep.file.method == "grid" else None
    limits = [limit for limit in (trials, sweep.file.run_cap, size) if limit is not None]
    if not limits:
        raise ConfigError(
            f"--trials: missing. A sweep by method {sweep.file.method!r} has no end. "
            "Give the number of trials, or set run_cap in its file."
        )
    return min(limits)


def _run_workers(args: argparse.Namespace, total: int) -> None:
    """Run `args.workers` processes of this command, and wait for them.
    If one dies, the rest take over its trials."""
    command = [sys.executable, "-m", "src.sweeps", str(args.file), "--trials", str(total)]
    command += ["-sb", str(args.savedir_base), "--data_path", str(args.data_path)]
    devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for place in range(args.workers):
            share = devices[place * len(devices) // args.workers : (place + 1) * len(devices) // args.workers]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(share)} if share else None
            children.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
            )
        for child in children:
            child.wait()
    finally:
        for child in children:
            child.terminate()  # does nothing if it has ended
        for child in children:
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
