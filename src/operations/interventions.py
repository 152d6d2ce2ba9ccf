"""Intervene in a run that goes wrong: rewind, undo, and hold its job.

python -m src.operations.interventions rewind RUN --to 2000 --data skip:50 --lr x0.75 --why "loss spike at 2140"
python -m src.operations.interventions undo RUN             restore the bytes from before the last rewind or deny
python -m src.operations.interventions deny RUN LIST        skip the documents that a file lists (streamed data)
python -m src.operations.interventions rollback-evals RUN [--to STEP]
python -m src.operations.interventions hold RUN             keep Slurm from starting its job until `release RUN`
python -m src.operations.interventions ledger RUN           print past interventions: person, time, reason

To stop a run, make a file `stop` in its save directory: see src/training/stopping/stop_conditions.py. A changed
learning rate is applied by src/runs/history/branches.py.

RUN is a save directory, or a prefix of an id in --runs. `--dry-run` prints the plan and changes nothing. An interrupted
command is finished by the next command, or by the next start of the run.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from src.errors import ConfigError, LaunchError, RunError
from src.files import reading
from src.launch import submissions
from src.launch.job import LauncherConfig, bind_launcher
from src.runs import environment, lease, ledger
from src.runs.checkpoints import checkpoints
from src.runs.history import archive, branches, journal, rewind
from src.runs.history.archive import Plan
from src.runs.history.branches import Branch
from src.runs.lease import Lease
from src.runs.store import EXP_DICT, SavedRun, expand_run, unknown_run
from src.support.command_line import make_parser, run_command

RUNS = Path("results/runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code, 1 if the command was refused."""
    options = _parser().parse_args(arguments)

    def act() -> int:
        lines = _COMMANDS[options.command](find(options.run, options.runs), options)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return 0

    return run_command(act, logging.WARNING)


def find(name: str, runs: Path) -> Path:
    """The save directory called `name`: a path, or a prefix of an id in the folder `runs`.

    Raises:
        ConfigError: there is no such run, or several.
    """
    path = expand_run(Path(name), runs)
    if not (path / EXP_DICT).is_file():
        raise unknown_run(name, path.name, runs, also=f"the folder has no {EXP_DICT}")
    return path.resolve()


def change(run: Path, decide: "Decide", is_same: "IsSame", dry_run: bool) -> list[str]:
    """Under the lease of `run`, finish an interrupted change. Then make the change that `decide` plans, unless
    `is_same` says that the interrupted change was the same.

    Raises:
        RunError: the run is alive.
        UserError: an error of `decide`.
    """
    if dry_run:
        if (holder := lease.holder_of(run)).is_dead is False:
            raise RunError(f"{run}: a process on {holder.host} trains it now. Stop it first.")
        if unfinished_change := journal.describe_unfinished(run):
            return [f"{run}: was interrupted: {unfinished_change}. Without --dry-run, this is finished first."]
        return [f"{run}: would change:", *_plan_lines(decide()), "Nothing was changed."]
    with Lease.acquire(run) as held_lease:
        finished_event = journal.finish(run)
        messages = (
            [f"{run}: finished an interrupted {finished_event['event']} to step {finished_event.get('step')}"]
            if finished_event
            else []
        )
        if finished_event and is_same(finished_event):
            return messages
        plan = decide()
        held_lease.confirm()
        plan.apply()
        return [*messages, f"{run}: changed:", *_plan_lines(plan)]


def _rewind(run: Path, options: argparse.Namespace) -> list[str]:
    data = branches.parse_data(options.data)
    rate = branches.parse_rate(options.lr) if options.lr else None
    if options.to < 1:
        raise ConfigError(f"--to: expected a step of at least 1, got {options.to}. To start over: trainval.py … -r 1.")

    def branch(number: int) -> Branch:
        return Branch(
            number=number, from_step=options.to, data=data, learning_rate=rate, reset_optimizer=options.reset_optimizer
        )

    def decide() -> Plan:
        return rewind.plan(run, branch(archive.next_number(run)), options.why, options.new_wandb_run)

    def is_same(event: dict[str, Any]) -> bool:
        if event["event"] != "rewind":
            return False
        finished_branch = dict(event["branch"])
        new_wandb = finished_branch.pop("wandb", None) is not None
        requested_branch = branch(event["number"]).model_dump(mode="json", exclude_none=True)
        return requested_branch == finished_branch and options.new_wandb_run == new_wandb

    return change(run, decide, is_same, options.dry_run)


def _deny(run: Path, options: argparse.Namespace) -> list[str]:
    """Add a branch from the newest checkpoint. It inherits the changes of an earlier branch from there."""
    with reading(options.list, ConfigError):
        entries = branches.parse_denied(options.list.read_text(), str(options.list))
    newest = checkpoints.newest_complete(run)
    if newest is None:
        raise RunError(
            f"{run}: no complete checkpoint to branch from. Wait for one, or remove the documents from the data."
        )
    step = checkpoints.step_of(newest)

    def branch(number: int) -> Branch:
        before = [branch for branch in branches.read(run) if branch.from_step == step]
        base = before[-1] if before else Branch(number=number, from_step=step)
        return base.model_copy(
            update={"number": number, "deny_list": [*dict.fromkeys([*(base.deny_list or ()), *entries])], "wandb": None}
        )

    def decide() -> Plan:
        return rewind.plan(run, branch(archive.next_number(run)), options.why)

    return change(
        run,
        decide,
        lambda event: event["event"] == "rewind" and event["branch"].get("deny_list") == entries,
        options.dry_run,
    )


def _undo(run: Path, options: argparse.Namespace) -> list[str]:
    return change(
        run, lambda: rewind.plan_undo(run, options.why), lambda event: event["event"] == "undo", options.dry_run
    )


def _rollback(run: Path, options: argparse.Namespace) -> list[str]:
    def decide() -> Plan:
        step = options.to
        if step is None:
            newest = checkpoints.newest_complete(run)
            if newest is None:
                raise RunError(f"{run}: no complete checkpoint. Name the last step to keep with --to STEP.")
            step = checkpoints.step_of(newest)
        return rewind.plan_evaluations(run, step, options.why)

    return change(run, decide, lambda event: event["event"] == "rollback-evals", options.dry_run)


def _hold(run: Path, options: argparse.Namespace) -> list[str]:
    verb: Literal["hold", "release"] = options.command
    earlier = [event for event in ledger.read(run) if event["event"] in ("hold", "release")]
    job_id, launcher = _find_job(run)
    if not launcher.holds_jobs:
        raise LaunchError(
            f"{run}: the launcher {launcher.name!r} of job {job_id} cannot {verb} it. "
            "Only a job of Slurm can be held or released."
        )
    (launcher.hold if verb == "hold" else launcher.release)([job_id])
    ledger.append(run, ledger.event(verb, job=job_id, why=options.why, commit=ledger.commit()))
    line = f"{run}: {'held' if verb == 'hold' else 'released'} job {job_id}"
    if earlier and earlier[-1]["event"] == "hold":
        line += f", which {earlier[-1]['who']} held since {earlier[-1]['when']}{_because(earlier[-1])}"
    return [line]


def _find_job(run: Path) -> tuple[str, LauncherConfig]:
    """The job id last submitted for `run`, else the one that last ran it, and its launcher."""
    saved = SavedRun(run)
    job = saved.job
    if job and job["submission"]:
        return job["job_id"], submissions.read(run.parent, job["submission"]).load_launcher()
    if job:
        job_id = job["job_id"]
    else:
        job_id = environment.slurm_job(saved.env.get("variables") or {})
    if not job_id:
        raise LaunchError(
            f"{run}: it was not submitted and did not run in a job. Only a job of Slurm can be held or released."
        )
    return job_id, bind_launcher({"launcher": "slurm"})


def _ledger(run: Path, options: argparse.Namespace) -> list[str]:
    if options.json:
        return [json.dumps(event, sort_keys=True) for event in ledger.read(run)]
    lines = []
    for event in ledger.read(run):
        step = f" step {event['step']}" if event.get("step") is not None else ""
        lines.append(f"{event.get('when', '')}  {event['event']}{step}  {event.get('who', '')}{_because(event)}")
    return lines


def _because(event: dict[str, Any]) -> str:
    return f" ({event['why']})" if event.get("why") else ""


def _plan_lines(plan: Plan) -> list[str]:
    return [f"  {line}" for line in plan.summary]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("src.operations.interventions", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    subparsers = {name: commands.add_parser(name, help=text, allow_abbrev=False) for name, text in _HELP.items()}
    for name, command in subparsers.items():
        command.add_argument("run", metavar="RUN", help="save directory, or prefix of an id")
        command.add_argument(
            "--runs", type=Path, default=RUNS, metavar="DIR", help=f"folder of save directories (default: {RUNS})"
        )
        if name != "ledger":
            command.add_argument("--why", default="", metavar="TEXT", help="reason, for the ledger")
        if name in ("rewind", "deny", "undo", "rollback-evals"):
            command.add_argument("--dry-run", action="store_true", help="print the plan and change nothing")
    back = subparsers["rewind"]
    back.add_argument("--to", type=int, required=True, metavar="STEP", help="step of an intact checkpoint")
    back.add_argument(
        "--data", default="same", metavar="same|skip:K|reshuffle", help="the data from there on (default: same)"
    )
    back.add_argument("--lr", metavar="x0.75|=1e-4|hold0:K", help=branches.LEARNING_RATES)
    back.add_argument("--reset-optimizer", action="store_true", help="reset the moments, once")
    back.add_argument("--new-wandb-run", action="store_true", help="log to another Weights & Biases run from there on")
    subparsers["deny"].add_argument(
        "list",
        type=Path,
        metavar="LIST",
        help='a file with lines "source NAME", "shard SOURCE URL" or "document NUMBER SOURCE URL"',
    )
    subparsers["rollback-evals"].add_argument(
        "--to", type=int, metavar="STEP", help="remove rows after it (default: the newest checkpoint's)"
    )
    subparsers["ledger"].add_argument("--json", action="store_true", help="one complete event per line")
    return parser


Decide = Callable[[], Plan]
IsSame = Callable[[dict[str, Any]], bool]
_HELP = {
    "rewind": "go back to a checkpoint; later training is archived",
    "deny": "from the newest checkpoint on, skip documents, shards or sources",
    "undo": "restore the state before the last rewind, deny or rollback-evals",
    "rollback-evals": "archive the rows of evaluations*.jsonl after a step",
    "hold": "keep the run's Slurm job from starting",
    "release": "let the run's Slurm job start",
    "ledger": "print past interventions in the run",
}
_COMMANDS: Mapping[str, Callable[[Path, argparse.Namespace], list[str]]] = {
    "rewind": _rewind,
    "deny": _deny,
    "undo": _undo,
    "rollback-evals": _rollback,
    "hold": _hold,
    "release": _hold,
    "ledger": _ledger,
}

if __name__ == "__main__":
    sys.exit(main())
