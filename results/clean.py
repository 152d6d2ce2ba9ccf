"""Delete checkpoints and snapshots, or runs with --delete: `python -m results.clean [RUN ..] [-e GROUP ..] [--apply]`.

Without --apply or --delete it only lists the files. It never touches a live run, a checkpoint that an unfinished run
resumes from, or a parent of a remaining experiment. --delete also empties the folder `deleted`, which has runs that
were restarted with -r 1. It requires a confirmation, or --yes.
"""

import argparse
import contextlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired

from src.errors import ConfigError, DataError, LaunchError, UserError, print_errors
from src.files import writing
from src.launch import submissions
from src.operations import deletion
from src.runs.checkpoints import retention
from src.runs.store import SavedRun
from src.support import documents
from src.support.command_line import make_parser, require_at_least
from src.tables import results, run_arguments

SNAPSHOTS = "snapshots"
_DAY = 86_400.0


@dataclass
class Cleanup:
    """Deletable checkpoints and snapshots, and warnings."""

    plans: list[retention.Plan] = field(default_factory=list)
    snapshots: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    needed_checkpoints: retention.NeededCheckpoints = frozenset()
    """Checkpoints that other experiments needed when the plan was made."""

    @property
    def paths(self) -> list[Path]:
        return [*(path for plan in self.plans for path in plan.deletable), *self.snapshots]


class Document(documents.Document):
    """Deletable or deleted folders and files."""

    schema: Literal["results.clean/1"]
    paths: list[dict[str, Any]]
    """Each with `path` and `bytes`."""
    bytes: int
    """Of all paths."""
    is_deleted: bool
    runs: NotRequired[int]
    """With --delete: the number of runs."""
    restarted_runs: NotRequired[int]
    """With --delete: the number of runs that were restarted with -r 1."""


@print_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print deletable files with their sizes, and delete them if requested.
    Returns the exit code: 1 if a deletion failed."""
    options = run_arguments.parse(_parser(), arguments)
    require_at_least(0, **{"keep-last": options.keep_last, "older-than": options.older_than})
    if options.delete:
        return _delete_runs(options)
    if options.yes:
        raise ConfigError("--yes: needs --delete. To delete checkpoints, use --apply instead.")
    rule = retention.CleanupRule(options.keep_last, options.keep_best, options.older_than * _DAY)
    # Lock out submissions until the deletion: a new child could start from a deletable checkpoint.
    with submissions.lock(options.runs) if options.apply and options.runs.is_dir() else contextlib.nullcontext():
        selection = run_arguments.select(options) if options.groups or options.where or options.paths else None
        cleanup = look(options.runs, rule, selection)
        sizes = {path: retention.folder_bytes(path) for path in cleanup.paths}
        failed = delete(options.runs, cleanup) if options.apply else []
    run_arguments.warn([*cleanup.warnings, *failed])
    deleted_sizes = {path: bytes_ for path, bytes_ in sizes.items() if not (options.apply and path.exists())}
    content, errors = (
        _content(deleted_sizes, options.apply),
        documents.mistakes("RunError", "\n".join(failed)) if failed else (),
    )
    run_arguments.show(
        options.output, "results.clean/1", content, lambda: _report(deleted_sizes, options.apply), errors
    )
    return 1 if failed else 0


def _content(sizes: Mapping[Path, int], is_deleted: bool) -> dict[str, Any]:
    paths = [{"path": path, "bytes": bytes_} for path, bytes_ in sizes.items()]
    return {"paths": paths, "bytes": sum(sizes.values()), "is_deleted": is_deleted}


def _delete_runs(options: argparse.Namespace) -> int:
    """List the chosen runs, delete them after a confirmation, and report the freed space. Returns the exit code."""
    if options.apply:
        raise ConfigError("--apply, --delete: --apply deletes checkpoints, --delete complete runs. Remove one of them.")
    before = time.time() - options.older_than * _DAY
    selected_paths: list[Path] = []
    if options.groups or options.where or options.paths or options.older_than:
        selected_paths = run_arguments.paths(options)
    elif not options.runs.is_dir():
        raise DataError(f"{options.runs}: no such folder. Set --runs to the folder of the runs.")
    else:
        run_arguments.warn(
            ["no run is chosen: name ids, or use -e, --where or --older-than. Only restarted runs are deleted."]
        )
    cleanup = deletion.plan(options.runs, selected_paths, before)
    sizes = {path: retention.folder_bytes(path) if path.is_dir() else path.lstat().st_size for path in cleanup.paths()}
    run_arguments.warn(cleanup.warnings)
    run_arguments.warn(_name_other_groups(cleanup.runs, options.groups or ()))
    parts = [
        _count(len(cleanup.runs), "run"),
        _count(len(cleanup.resets), "restarted run"),
        _format_bytes(sum(sizes.values())),
    ]
    counts = {"runs": len(cleanup.runs), "restarted_runs": len(cleanup.resets)}

    def write() -> None:
        for path, bytes_ in sizes.items():
            print(f"{_format_bytes(bytes_):>10}  {path}")
        print(f"To delete: {', '.join(parts)}." if sizes else "There is nothing to delete.")

    if options.output or not options.json:
        run_arguments.show(options.output, "results.clean/1", counts | _content(sizes, False), write)
    if not sizes or not (options.yes or _confirm()):
        documents.show("results.clean/1", counts | _content(sizes, False), lambda: print("Nothing was deleted."))
        return 0
    with submissions.lock(options.runs):  # no submissions until the deletion: a new child could start from a run
        now = deletion.plan(options.runs, cleanup.runs, before)
        new = [text for text in now.warnings if text not in cleanup.warnings]
        now.resets = [path for path in now.resets if path in cleanup.resets]
        failed = deletion.delete(now)
    run_arguments.warn([*new, *failed])
    deleted_sizes = {path: bytes_ for path, bytes_ in sizes.items() if not os.path.lexists(path)}
    count = sum(not path.exists() for path in cleanup.runs)
    text = f"Deleted: {_count(count, 'run')}, {_format_bytes(sum(deleted_sizes.values()))}."
    content = {**counts, "runs": count, **_content(deleted_sizes, True)}
    errors = documents.mistakes("RunError", "\n".join([*new, *failed])) if new or failed else ()
    documents.show("results.clean/1", content, lambda: print(text), errors)
    return 1 if new or failed else 0


def _name_other_groups(runs: Sequence[Path], groups: Sequence[str]) -> list[str]:
    """A warning if some runs are also in groups other than the chosen ones."""
    names = [set(SavedRun(run).groups).difference(groups) for run in runs] if groups else []
    count, others = sum(map(bool, names)), sorted(set[str]().union(*names))
    return [f"{count} of {_count(len(runs), 'run')} are also in other groups: {', '.join(others)}."] if count else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _confirm() -> bool:
    """Ask the user for confirmation on stderr.

    Raises:
        ConfigError: standard input is closed.
    """
    print("Delete these for good? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        raise ConfigError(
            "--delete: no confirmation on standard input, so nothing was deleted. Add --yes to skip it."
        ) from None


def look(
    runs: Path, rule: retention.CleanupRule, selection: tuple[Sequence[results.Row], Sequence[str]] | None = None
) -> Cleanup:
    """Find the deletable checkpoints of the selected runs (rows, warnings). None: of all runs, and code snapshots.

    Raises:
        DataError: no such folder, or no runs in it.
    """
    rows, warnings = selection or results.select(runs)
    needed_checkpoints, unread = retention.needed_by_children(runs)
    cleanup = Cleanup(warnings=[*warnings, *unread], needed_checkpoints=needed_checkpoints)
    now = time.time()
    for row in rows:
        try:
            plan = retention.plan(runs / row["exp_id"], rule, needed_checkpoints, now)
        except UserError as error:
            cleanup.warnings.append(f"skipped: {error}")
            continue
        if plan.reason_to_keep:
            cleanup.warnings.append(f"{plan.run}: nothing is deleted: {plan.reason_to_keep}.")
        cleanup.plans.append(plan)
    if selection is None:
        cleanup.snapshots = _snapshots(runs, now - max(rule.older_than_seconds, _DAY), cleanup.warnings)
    return cleanup


def _snapshots(runs: Path, before: float, warnings: list[str]) -> list[Path]:
    """Code snapshots that no unfinished job uses. Recent ones are excluded: a submission can be about to use them."""
    folders = [path for path in sorted((runs / SNAPSHOTS).glob("*")) if path.is_dir() and not path.is_symlink()]
    used_names = set()
    for intent in sorted((runs / submissions.FOLDER).glob(f"*/{submissions.INTENT}")):
        try:
            submission = submissions.read(runs, intent.parent.name)
        except LaunchError as error:
            warnings.append(f"{error} All snapshots of code stay.")
            return []
        if submission.snapshot not in used_names and any(
            _may_run(SavedRun(runs / name), submission.name) for name in submission.experiments
        ):
            used_names.add(submission.snapshot)
    return [path for path in folders if path.name not in used_names and path.stat().st_mtime <= before]


def _may_run(run: SavedRun, submission: str) -> bool:
    """Whether a job of the submission can still run the experiment: it is neither done nor in a later submission."""
    try:
        overtaken = run.job is not None and run.job["submission"] not in ("", submission)
        return run.holder.is_dead is not True or (run.status["state"] != "done" and not overtaken)
    except UserError:
        return True


def delete(runs: Path, cleanup: Cleanup) -> list[str]:
    """Delete the result of `look`, except parents of new experiments; returns a message per failure."""
    failed = []
    now, _ = retention.needed_by_children(runs)
    parents = {name for name, _ in now - cleanup.needed_checkpoints}
    for plan in cleanup.plans:
        if plan.deletable and plan.run.name in parents:
            failed.append(
                f"{plan.run}: another experiment starts from it since a moment ago, "
                "so nothing of it was deleted. Look again."
            )
            continue
        try:
            retention.remove(plan)
        except UserError as error:
            failed.append(str(error))
    for path in cleanup.snapshots:
        try:
            with writing(path):
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")))
        except UserError as error:
            failed.append(str(error))
    return failed


def _report(sizes: dict[Path, int], is_applied: bool) -> None:
    for path, bytes_ in sizes.items():
        print(f"{_format_bytes(bytes_):>10}  {path}")
    total = f"{len(sizes)} folders, {_format_bytes(sum(sizes.values()))}"
    if is_applied:
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
    parser = make_parser("results.clean", __doc__)
    run_arguments.add(parser, "only the runs of these groups, and no code snapshots")
    parser.add_argument(
        "--keep-last",
        type=int,
        default=1,
        metavar="N",
        help="newest complete checkpoints to retain per run (default: 1)",
    )
    parser.add_argument(
        "--keep-best", action=argparse.BooleanOptionalAction, default=True, help="keep the best one, too (default: yes)"
    )
    parser.add_argument(
        "--older-than", type=float, default=0.0, metavar="DAYS", help="only files older than this (default: all)"
    )
    parser.add_argument(
        "--apply", action="store_true", help="delete these checkpoints and snapshots (default: only list them)"
    )
    parser.add_argument(
        "--delete", action="store_true", help="list complete runs, and delete them after a confirmation"
    )
    parser.add_argument("--yes", action="store_true", help="with --delete: do not ask")
    return parser


if __name__ == "__main__":
    sys.exit(main())
