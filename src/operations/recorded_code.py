"""The recorded code of runs: the difference of two, and a copy of the project with the code of a run, to run it again.

`trainval.py --from-run ID` uses it. The code is the commit of the last start and the patch of its uncommitted changes.
"""

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from src.errors import ConfigError, RunError
from src.files import ROOT, read_json, writing
from src.launch import arguments
from src.runs import ledger
from src.runs.code_version import DIFF_OPTIONS, Git
from src.runs.environment import code_digest, recorded_processes
from src.runs.parents import parent_ids
from src.runs.store import DIFF, ENV, SavedRun
from src.support.torch_settings import WORKSPACE

FOLDER = "reruns"
"""Folder next to the save directories: <id>/code is a worktree, <id>/runs the save directories of its runs."""
_SHARDING = ("deepspeed", "fsdp", "fsdp_replicas", "fsdp_sharded_gradients")
_OPTIONS = ("micro_batch", "gradient_checkpointing", "offload_activations", "deterministic", "log_every")
"""Options that change the rounding or the rows of scores, as those of sharding do: --from-run repeats them."""
_ROUNDING = (WORKSPACE, "NVIDIA_TF32_OVERRIDE")
"""Environment variables that change how torch rounds."""

log = logging.getLogger(__name__)


def difference(one: SavedRun, other: SavedRun, root: Path = ROOT) -> list[str]:
    """The lines of the patch from the code of one run to that of another.

    Raises:
        RunError: the code of a run is not recorded, or its commit is not in the repository of `root`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        git = _open(root, Path(scratch))
        trees = [_tree(git, run) for run in (one, other)]
        return git("diff", *DIFF_OPTIONS, *trees).decode(errors="replace").splitlines()


def rerun(run: SavedRun, data: Path, options: Sequence[str], is_dry: bool, root: Path = ROOT) -> int:
    """Run the experiment of `run` again with its code, in <runs>/reruns/<id>/runs; returns the exit code.

    data: folder of prepared data sets. options: more arguments of trainval.py. is_dry: only check that it is possible.

    Raises:
        RunError: see `recreate`; or the run used several machines.
    """
    folder = run.path.resolve().parent / FOLDER / run.name
    processes = recorded_processes(run.env.get("variables", {}))
    if processes is None:
        raise RunError(f"{run.path}: ran on several machines. Recreate it with `git worktree`, and start it as it was.")
    if is_dry:
        _check(run, root)
        return 0
    code = recreate(run, folder / "code", root)
    runs = folder / "runs"
    SavedRun(runs / run.name).write_exp(run.exp, run.groups)
    _link_ancestors(run, runs)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    places = ["-sb", str(runs), "--data_path", str(data.resolve())]
    words = [*(torchrun if processes > 1 else ()), "trainval.py", "--exp_id", run.name, *places, *options]
    log.info("%s: %s", code, " ".join(words))
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=code, check=False, stdout=sys.stderr, env=_environment(run)).returncode


def _environment(run: SavedRun) -> dict[str, str]:
    """The variables of this process, and those of the last start that change rounding, if they are not set here."""
    settings = run.env.get("torch", {})
    variables = {name: value for name, value in settings.get("variables", {}).items() if name in _ROUNDING}
    if "threads" in settings:
        variables["OMP_NUM_THREADS"] = str(settings["threads"])
    return variables | os.environ


def recorded_options(args: argparse.Namespace, run: SavedRun) -> tuple[list[str], list[str]]:
    """The options of the last start of a run that change its numbers, but for those in `args`; and a warning if they
    cannot be known, or do not suffice."""
    paths = (run.path / "attempts" / f"{number:03d}" / ENV for number in range(1, run.attempts + 1))
    starts = [record for path in paths if isinstance(record := read_json(path, RunError, None), dict)]
    commands = [record.get("command") or [""] for record in starts]
    if not commands or any(Path(command[0]).name != "trainval.py" for command in commands):
        return [], [f"{run.path}: the options of its start were not recorded. Give those such as --micro_batch again."]
    choices = [_repeated_options(args, command) for command in commands]
    processes = [recorded_processes(record.get("variables", {})) for record in starts]
    options, problems = choices[-1], []
    if any(each != (options, processes[-1]) for each in zip(choices, processes, strict=True)):
        problems.append("its starts had different options or numbers of processes, and this one has those of the last")
    engines = [event.get("engine") for event in ledger.read(run.path) if event["event"] == "start"]
    is_sharded = args.deepspeed or args.fsdp or {"--deepspeed", "--fsdp"}.intersection(options)
    if engines and engines[-1] not in (None, "replicated", "evaluation") and not is_sharded:
        problems.append(f"its engine {engines[-1]} was not chosen by an option. Add --deepspeed FILE or --fsdp")
    files = filter(os.path.isabs, options)
    problems += [f"the content of {file} was not recorded, and this one has the present one" for file in files]
    return options, [f"{run.path}: the numbers can differ: {'; '.join(problems)}."] if problems else []


def _repeated_options(args: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """The options of a recorded command of trainval.py that change numbers, but for those that `args` has itself.
    A settings file of the project is relative, so that the recreated code uses its own."""
    old_args = arguments.make_parser("", ROOT).parse_known_args(command[1:])[0]
    is_sharded = any(getattr(args, name) for name in _SHARDING)
    words = []
    for name in _OPTIONS if is_sharded else (*_SHARDING, *_OPTIONS):
        value = getattr(old_args, name)
        if isinstance(value, Path):
            value = (ROOT / value).resolve()
            value = value.relative_to(ROOT) if value.is_relative_to(ROOT) else value
        if value and not getattr(args, name):
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def recreate(run: SavedRun, folder: Path, root: Path = ROOT) -> Path:
    """A git worktree at `folder` with the code of `run`; returns the folder of the project in it. Reuses it if it is
    there.

    Raises:
        RunError: see `_check`; or the folder has other code.
    """
    digest, top, inside = _check(run, root)
    if not folder.exists():
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        # By force, as the folder can have been removed by hand. No prune, which would forget other worktrees, too.
        _run(top, "worktree", "add", "--force", "--quiet", "--detach", str(folder), run.env["commit"])
        if run.patch:
            _run(folder, "apply", "--whitespace=nowarn", "-", text=run.patch)
    if code_digest.__wrapped__(folder / inside) != digest:  # not the cached one of an earlier call
        raise RunError(
            f"{folder}: its code is not that of {run.name[:8]}. Remove it with `git worktree remove --force {folder}`."
        )
    return folder / inside


def _check(run: SavedRun, root: Path) -> tuple[str, Path, str]:
    """Check that the code of `run` can be recreated from the repository of `root`; returns its digest, the top of the
    repository, and the folder of the project in it.

    Raises:
        RunError: no commit, patch or digest was recorded, or not all changes, or there is no git or no such commit; or
            several versions of the code trained the run.
    """
    digests = set(ledger.codes_of_starts(run.path, sys.maxsize))
    if len(digests) != 1:
        raise RunError(f"{run.path}: {len(digests)} versions of its code are recorded, not one. Choose another run.")
    with tempfile.TemporaryDirectory() as scratch:
        git = _open(root, Path(scratch))
        _tree(git, run)
        inside = os.path.relpath(root.resolve(), git.folder.resolve())
    unknown = [each["name"] for each in run.env.get("omitted", []) if "reason" not in each or _runs(each, inside)]
    unknown += [each["path"] for each in run.env.get("submodules", [])]
    if unknown:
        raise RunError(
            f"{run.path}: changes of {', '.join(unknown)} were not recorded. Commit them, and run it again with -e."
        )
    return digests.pop(), git.folder, inside


def _runs(file: Mapping[str, str], inside: str) -> bool:
    """Whether a training can read this file: one of src or resources, as for `code_digest` and settings of DeepSpeed,
    or another module, as exp_configs.py can import any. inside: folder of the project in its repository."""
    name = PurePath(file["name"])
    if name.is_relative_to(inside):  # not so for the changes of a snapshot
        name = name.relative_to(inside)
    return name.suffix == ".py" or name.parts[0] in ("src", "resources")


def _open(root: Path, scratch: Path) -> Git:
    """Git that only reads the repository of `root`. ConfigError without a repository."""
    try:
        return Git(root, scratch)
    except (OSError, subprocess.SubprocessError):
        raise ConfigError(f"{root}: is in no git repository. Run this in a clone of the project.") from None


def _tree(git: Git, run: SavedRun) -> str:
    """The tree object with the code of `run`. RunError if its commit or changes are not recorded, or do not fit."""
    commit = run.env.get("commit")
    if not commit:
        raise RunError(f"{run.path}: no commit is recorded: the code was in no git repository. Run it with -e.")
    if not run.patch and run.env.get("dirty") is not False and not run.env.get("omitted"):
        raise RunError(f"{run.path}: it has no {DIFF}, but its code had changes. Run it with -e.")
    try:
        git("read-tree", f"{commit}^{{commit}}")
    except (OSError, subprocess.SubprocessError):
        raise RunError(f"{run.path}: commit {commit} is not in {git.folder}. Fetch its branch.") from None
    try:
        if run.patch:
            git("apply", "--cached", "--whitespace=nowarn", "-", text=run.patch)
        return os.fsdecode(git("write-tree")).strip()
    except (OSError, subprocess.SubprocessError):
        raise RunError(f"{run.path}: its {DIFF} does not fit commit {commit}. The file was changed.") from None


def _link_ancestors(run: SavedRun, runs: Path) -> None:
    """Link the save directories of all ancestors in the folder `runs`."""
    names = parent_ids(run.exp)
    for name in names:  # grows
        parent = SavedRun(run.path.parent / name)
        if parent.path.is_dir():
            names += [each for each in parent_ids(parent.exp) if each not in names]
            with writing(runs):
                if not os.path.lexists(runs / name):
                    (runs / name).symlink_to(parent.path.resolve())


def _run(folder: Path, *arguments: str, text: bytes = b"") -> None:
    done = subprocess.run(["git", "-C", str(folder), *arguments], input=text, capture_output=True, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip().splitlines()
        raise RunError(f"{folder}: git {arguments[0]}: {message[-1] if message else done.returncode}. Repair it.")
