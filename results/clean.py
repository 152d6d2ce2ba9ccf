"""Deletes checkpoints and code snapshots that are no longer needed, by rule: `python -m results.clean [RUNS] [-e GROUP] [--apply]`.

Without --apply it only says what would go. It never touches a run that is alive, what an unfinished run resumes from, or what another
experiment in the folder starts from.
"""

import argparse
import contextlib
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from results import run_arguments
from results.run_arguments import RUNS
from src.errors import ConfigError, LaunchError, UserError, print_errors
from src.files import writing
from src.launch import submissions
from src.runs.checkpoints import retention
from src.runs.lease import holder_is_dead
from src.runs.metadata import read_job, read_status
from src.tables import rows as results

SNAPSHOTS = "snapshots"
_DAY = 86_400.0


@dataclass
class Cleanup:
    """What may be deleted, and warnings about what may not."""

    plans: list[retention.Plan] = field(default_factory=list)
    snapshots: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    needed: retention.NeededCheckpoints = frozenset()
    """Checkpoints that other experiments needed at that time."""

    @property
    def paths(self) -> list[Path]:
        return [*(path for plan in self.plans for path in plan.deletable), *self.snapshots]


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print what may be deleted, and its size; delete it with --apply. Returns the exit code: 1 if something could not be deleted."""
    options = _parser().parse_args(arguments)
    if options.keep_last < 0 or options.older_than < 0:
        raise ConfigError("--keep-last and --older-than: expected a number of at least 0.")
    rule = retention.CleanupRule(options.keep_last, options.keep_best, options.older_than * _DAY)
    # No job is submitted between the look and the deletion: a new child may start from what would go.
    with submissions.lock(options.runs) if options.apply and options.runs.is_dir() else contextlib.nullcontext():
        found = look(options.runs, rule, options.group, options.where)
        sizes = {path: retention.folder_bytes(path) for path in found.paths}
        failed = delete(options.runs, found) if options.apply else []
    run_arguments.warn([*found.warnings, *failed])
    _report({path: bytes_ for path, bytes_ in sizes.items() if not (options.apply and path.exists())}, options.apply)
    return 1 if failed else 0


def look(runs: Path, rule: retention.CleanupRule, group: str | None = None, question: str | None = None) -> Cleanup:
    """What may be deleted of the chosen runs and, if all runs are chosen, of the code snapshots.

    Raises:
        DataError: no such folder, or no runs in it.
        ConfigError: no such group, or a question that cannot be understood.
    """
    rows, warnings = results.select(runs, group, question)
    by_others, unread = retention.needed_by_children(runs)
    found = Cleanup(warnings=warnings + unread, needed=by_others)
    now = time.time()
    for row in rows:
        try:
            plan = retention.plan(runs / row["exp_id"], rule, by_others, now)
        except UserError as error:
            found.warnings.append(f"skipped: {error}")
            continue
        if plan.reason_to_keep:
            found.warnings.append(f"{plan.run}: nothing of it goes: {plan.reason_to_keep}.")
        found.plans.append(plan)
    if group is None and question is None:
        found.snapshots = _snapshots(runs, now - max(rule.older_than_seconds, _DAY), found.warnings)
    return found


def _snapshots(runs: Path, before: float, warnings: list[str]) -> list[Path]:
    """Code snapshots of no unfinished job. Those of the last day are kept: a submission may be about to use one."""
    folders = [path for path in sorted((runs / SNAPSHOTS).glob("*")) if path.is_dir() and not path.is_symlink()]
    used = set()
    for intent in sorted((runs / submissions.FOLDER).glob(f"*/{submissions.INTENT}")):
        try:
            submission = submissions.read(runs, intent.parent.name)
        except LaunchError as error:
            warnings.append(f"{error} All snapshots of code stay.")
            return []
        if submission.snapshot not in used and any(_may_run(runs / name, submission.name) for name in submission.experiments):
            used.add(submission.snapshot)
    return [path for path in folders if path.name not in used and path.stat().st_mtime <= before]


def _may_run(run: Path, submission: str) -> bool:
    """Whether a job of the submission may still run the experiment: it is not done, and no other submission has it."""
    try:
        job = read_job(run)
        overtaken = job is not None and job["submission"] not in ("", submission)
        return holder_is_dead(run) is not True or (read_status(run)["state"] != "done" and not overtaken)
    except UserError:
        return True


def delete(runs: Path, found: Cleanup) -> list[str]:
    """Delete what `look` found, except for what an experiment needs since then; returns a message for each that was not deleted."""
    failed = []
    now, _ = retention.needed_by_children(runs)
    parents = {name for name, _ in now - found.needed}
    for plan in found.plans:
        if plan.deletable and plan.run.name in parents:
            failed.append(f"{plan.run}: another experiment starts from it since a moment ago, so nothing of it was deleted. Look again.")
            continue
        try:
            retention.remove(plan)
        except UserError as error:
            failed.append(str(error))
    for path in found.snapshots:
        try:
            with writing(path):
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")))
        except UserError as error:
            failed.append(str(error))
    return failed


def _report(sizes: dict[Path, int], applied: bool) -> None:
    for path, bytes_ in sizes.items():
        print(f"{_format_bytes(bytes_):>10}  {path}")
    total = f"{len(sizes)} folders, {_format_bytes(sum(sizes.values()))}"
    if applied:
        print(f"Deleted: {total}.")
    else:
        print(f"Would go: {total}. Nothing was deleted; add --apply." if sizes else "Nothing would go.")


def _format_bytes(bytes_: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if bytes_ < 1000:
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.1f} {unit}"
        bytes_ /= 1000
    return f"{bytes_:.1f} TB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m results.clean", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="?", type=Path, default=RUNS, help=f"folder of save directories (default: {RUNS})")
    parser.add_argument("-e", "--group", help="only the runs of this group, and no snapshots of code")
    parser.add_argument("--where", metavar="EXPR", help="only the runs for which this holds, such as \"state == 'done'\"")
    parser.add_argument("--keep-last", type=int, default=1, metavar="N", help="newest whole checkpoints kept of each run (default: 1)")
    parser.add_argument("--keep-best", action=argparse.BooleanOptionalAction, default=True, help="keep the best one, too (default: yes)")
    parser.add_argument("--older-than", type=float, default=0.0, metavar="DAYS", help="only what was written before that (default: all)")
    parser.add_argument("--apply", action="store_true", help="delete; without it nothing is changed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
