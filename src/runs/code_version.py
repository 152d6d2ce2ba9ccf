"""The code of a run: its commit, and all changes as a patch from which `git apply` restores the same tree."""

import contextlib
import functools
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from src.errors import RunError
from src.files import MANIFEST, read_json, read_manifest, sample_digest, sha256
from src.support.redaction import has_secret_name, looks_secret, secret_in

MAX_DIFF_BYTES = 1_000_000
"""Size limit of a file in the patch, and of the patch. Larger files are listed by name, size and hash."""
MAX_OMITTED = 1000
"""Maximum number of files in the list."""
_MAX_HASHED_BYTES = 100_000_000
"""For larger files, only samples are hashed."""
_GIT_SECONDS = 10.0
SNAPSHOT = "snapshot.json"
"""File in a job's code snapshot: the `code_version` of the original."""
_UNKNOWN = {"commit": None, "branch": None, "dirty": None, "diff": None}
_REPOSITORY_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
)
DIFF_OPTIONS = (
    *(
        "--binary",
        "--full-index",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        "--no-renames",
        "--unified=3",
        "--ignore-submodules=all",
    ),
    "--no-relative",
)


def code_version(root: Path, leave_out: Sequence[Path] = ()) -> dict[str, Any]:
    """The code in the folder `root`; never raises. Unknown facts are None.

    - "commit", "branch", and "dirty": whether any file of code differs from the commit.
    - "diff": the patch from the commit to the tree, with new files that are not ignored and the content of submodules.
    - "omitted": changed files that are not in the patch: likely secrets, files over `MAX_DIFF_BYTES`, unreadable files.
    - "submodules": submodules that are dirty, or at another commit than recorded.

    A snapshot for a job has no git repository: a file in it describes the original. leave_out: folders without code.
    """
    try:
        original = read_json(root / SNAPSHOT, RunError, None)
    except RunError:
        original = None
    if isinstance(original, dict):
        facts = {**_UNKNOWN, **{key: original[key] for key in (*_UNKNOWN, "omitted", "submodules") if key in original}}
        if changes := _changes_of_snapshot(root):
            facts |= {"dirty": True, "omitted": [*(facts.get("omitted") or []), *changes]}
        return facts
    facts = dict(_UNKNOWN)
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        _add_version(facts, root, leave_out)
    return facts


def is_python_installation(folder: Path) -> bool:
    """Whether the folder is a Python installation, whatever its name."""
    return any((folder / sign).exists() for sign in ("pyvenv.cfg", "conda-meta"))


@dataclass
class _Changes:
    """The changes of a repository and its submodules."""

    patch: list[tuple[str, bytes]] = field(default_factory=list)
    """(name of a file relative to the top, its part of the patch)."""
    omitted_files: list[tuple[str, str]] = field(default_factory=list)
    """(name of a file relative to the top, reason)."""
    submodules: list[dict[str, Any]] = field(default_factory=list)


class Git:
    """Git with a separate index and object store, so that the repository is only read."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.scratch = scratch
        self.environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        for name in ("GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS", "GIT_INDEX_FILE", "GIT_PREFIX", *_REPOSITORY_VARIABLES):
            self.environment.pop(name, None)
        self.options = ["--literal-pathspecs", "-c", "core.safecrlf=false"]
        self.folder = folder
        self.folder = Path(os.fsdecode(self("rev-parse", "--show-toplevel").removesuffix(b"\n")))
        index, objects = (
            self.folder / os.fsdecode(self("rev-parse", "--git-path", name).removesuffix(b"\n"))
            for name in ("index", "objects")
        )
        with contextlib.suppress(subprocess.CalledProcessError):  # no filter is configured
            for name in self("config", "--name-only", "--get-regexp", r"^filter\..*\.required$").decode().splitlines():
                self.options += ["-c", f"{name}=false"]  # a filter that is not installed here changes nothing
        store = tempfile.mkdtemp(dir=scratch)
        if index.exists():
            shutil.copy2(index, f"{store}/index")
        self.environment |= {
            "GIT_INDEX_FILE": f"{store}/index",
            "GIT_OBJECT_DIRECTORY": store,
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{objects}"' if ":" in str(objects) else str(objects),
        }

    def __call__(self, *arguments: str, text: bytes = b"") -> bytes:
        """The output of a command. Raises subprocess.SubprocessError."""
        command = ["git", "-C", str(self.folder), *self.options, *arguments]
        return subprocess.run(
            command, capture_output=True, timeout=_GIT_SECONDS, check=True, input=text, env=self.environment
        ).stdout

    def try_read(self, *arguments: str) -> str | None:
        """The first line of the output; None if the command fails."""
        try:
            return os.fsdecode(self(*arguments)).partition("\n")[0]
        except subprocess.CalledProcessError:
            return None

    def names(self, *arguments: str) -> list[str]:
        return [os.fsdecode(name) for name in self(*arguments).split(b"\0") if name]


def _add_version(facts: dict[str, Any], root: Path, leave_out: Sequence[Path]) -> None:
    """Add commit, patch and omitted files to `facts`. The commit comes first, so a failing diff does not lose it."""
    with tempfile.TemporaryDirectory() as scratch:
        git = Git(root, Path(scratch))
        inside = os.path.relpath(root.resolve(), git.folder.resolve())
        if not git.names("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", inside):
            return  # git ignores the folder: the repository is of other code
        facts["commit"] = commit = git.try_read("rev-parse", "--verify", "HEAD")
        facts["branch"] = git.try_read("rev-parse", "--abbrev-ref", "HEAD") if commit else None
        changes = _Changes()
        _add_changes(changes, git, commit, inside, "", [path.resolve() for path in leave_out])
        patch = _fit(changes)
        omitted_files = [
            _describe(git.folder / name, name, reason) for name, reason in sorted(changes.omitted_files)[:MAX_OMITTED]
        ]
    dirty = bool(patch or omitted_files or changes.submodules)
    diff = patch.decode("utf-8", "surrogateescape") or ("" if not dirty else None)
    facts |= {"dirty": dirty, "diff": diff}
    if (more := len(changes.omitted_files) - MAX_OMITTED) > 0:
        omitted_files.append({"name": f"and {more} more"})
    facts |= {
        key: entries for key, entries in (("omitted", omitted_files), ("submodules", changes.submodules)) if entries
    }


def _add_changes(
    changes: _Changes, git: Git, base: str | None, inside: str, prefix: str, leave_out: Sequence[Path]
) -> None:
    """Add the changes from the commit `base` to the files below `inside`.
    prefix: path of the repository relative to the top, with a final slash."""
    tree = base or git.try_read("hash-object", "-t", "tree", "-w", "/dev/null") or ""
    _clear_flags(git)
    tree_entries = _entries(git, "ls-tree", "-r", "-z", "--full-tree", tree)
    index_entries = _entries(git, "ls-files", "-s", "-z")
    names = dict.fromkeys(
        git.names("diff", "--name-only", "-z", "--no-renames", "--ignore-submodules=all", tree, "--", inside)
    )
    names |= dict.fromkeys(
        git.names(
            "diff", "--cached", "--name-only", "-z", "--no-renames", "--ignore-submodules=all", tree, "--", inside
        )
    )
    untracked_names = git.names("ls-files", "-z", "--others", "--exclude-standard", "--full-name", "--", inside)
    is_left_out = functools.cache(lambda folder: _is_left_out(git.folder, folder, leave_out))
    new = [name for name in untracked_names if not is_left_out(PurePath(name).parent)]
    links = {
        name for entries in (tree_entries, index_entries) for name, (mode, _) in entries.items() if mode == "160000"
    }
    links = {name for name in links if inside == "." or PurePath(name).is_relative_to(inside)}
    repositories = [*sorted(links), *(name.rstrip("/") for name in new if name.endswith("/"))]
    names |= dict.fromkeys(name for name in new if not name.endswith("/") and not looks_secret(PurePath(name).name))
    patch_names = []
    for name in sorted(names.keys() - links):  # a folder that was a file comes before its files
        if reason := _reason_to_omit(git.folder / name, name):
            changes.omitted_files.append((prefix + name, reason))
        else:
            patch_names.append(name)
    omitted_names = names.keys() - set(patch_names)
    index_lines = b"".join(
        _index_line(name, *tree_entries.get(name, ("0", "0" * 40)))
        for name in omitted_names
        if name in tree_entries or name in index_entries
    )
    git("update-index", "-z", "--index-info", text=index_lines)
    git(
        "update-index",
        "--add",
        "--remove",
        "--replace",
        "-z",
        "--stdin",
        text=b"".join(os.fsencode(name) + b"\0" for name in patch_names),
    )
    for name, part in _parts(git, tree, inside, prefix):
        if reason := secret_in(Path(name), part):  # in lines that were removed
            changes.omitted_files.append((name, reason))
        else:
            changes.patch.append((name, part))
    for name in repositories:
        _add_submodule(changes, git, name, tree_entries.get(name), prefix, leave_out)


def _parts(git: Git, tree: str, inside: str, prefix: str) -> Iterable[tuple[str, bytes]]:
    """Name and patch of each changed file in the index."""
    status = git(
        "diff", "--cached", "--name-status", "-z", "--no-renames", "--ignore-submodules=all", tree, "--", inside
    ).split(b"\0")
    prefixes = (f"--src-prefix=a/{prefix}", f"--dst-prefix=b/{prefix}")
    patch = git("diff", "--cached", *DIFF_OPTIONS, *prefixes, tree, "--", inside)
    sections = re.split(rb"(?m)^(?=diff --git )", patch)[1:]
    start = 0
    for kind, name in zip(status[:-1:2], status[1::2], strict=True):
        count = 2 if kind == b"T" else 1  # a change of type is a deletion and an addition
        yield prefix + os.fsdecode(name), b"".join(sections[start : start + count])
        start += count


def _add_submodule(
    changes: _Changes, git: Git, name: str, tree_entry: tuple[str, str] | None, prefix: str, leave_out: Sequence[Path]
) -> None:
    """Add the changes in a submodule, or in an uncommitted nested repository, relative to its recorded commit."""
    folder = git.folder / name
    base = tree_entry[1] if tree_entry and tree_entry[0] == "160000" else None
    if not (folder / ".git").exists():
        if base and not folder.is_dir():
            changes.submodules.append({"path": prefix + name, "commit": None, "recorded": base, "dirty": True})
        return  # not initialised
    inner = Git(folder, git.scratch)
    commit = inner.try_read("rev-parse", "--verify", "HEAD")
    has_base = base and inner.try_read("cat-file", "-e", f"{base}^{{commit}}") is not None
    before = len(changes.patch), len(changes.omitted_files), len(changes.submodules)
    _add_changes(changes, inner, base if has_base else commit if base else None, ".", f"{prefix}{name}/", leave_out)
    dirty = before != (len(changes.patch), len(changes.omitted_files), len(changes.submodules))
    if dirty or commit != base:
        changes.submodules.append({"path": prefix + name, "commit": commit, "recorded": base, "dirty": dirty})


def _clear_flags(git: Git) -> None:
    """Clear assume-unchanged and skip-worktree, which hide changes."""
    lines = [line for line in git("ls-files", "-v", "-z").split(b"\0") if line]
    for flags, option in ((b"abcdefghijklmnopqrstuvwxyz", "--no-assume-unchanged"), (b"Ss", "--no-skip-worktree")):
        hidden = [
            line[2:] for line in lines if line[:1] in flags and os.path.lexists(git.folder / os.fsdecode(line[2:]))
        ]
        if hidden:
            git("update-index", option, "-z", "--stdin", text=b"".join(name + b"\0" for name in hidden))


def _entries(git: Git, *arguments: str) -> dict[str, tuple[str, str]]:
    """(mode, hash) by name."""
    entries = {}
    for line in git(*arguments).split(b"\0"):
        facts, tab, name = line.partition(b"\t")
        if tab:
            words = facts.decode().split()
            entries[os.fsdecode(name)] = words[0], words[2] if arguments[0] == "ls-tree" else words[1]
    return entries


def _index_line(name: str, mode: str, digest: str) -> bytes:
    return f"{mode} {digest}\t".encode() + os.fsencode(name) + b"\0"


def _is_left_out(top: Path, folder: PurePath, leave_out: Sequence[Path]) -> bool:
    """Whether `folder` is in a folder without code, such as a Python installation."""
    if leave_out and any((top / folder).resolve().is_relative_to(each) for each in leave_out):
        return True
    return any(is_python_installation(top / each) for each in (folder, *folder.parents) if each != PurePath())


def _reason_to_omit(path: Path, name: str) -> str:
    """Why a changed file is not in the patch; "" if it is."""
    if has_secret_name(name):
        return "its name looks like a secret"
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):
            return ""
        if facts.st_size > MAX_DIFF_BYTES:
            return f"more than {MAX_DIFF_BYTES} bytes"
        if not os.access(path, os.R_OK):
            return "unreadable"
        return secret_in(path, path.read_bytes())
    return ""


def _describe(path: Path, name: str, reason: str) -> dict[str, Any]:
    """Name, size and hash of a file that is not in the patch; no hash for secrets."""
    facts: dict[str, Any] = {"name": name, "reason": reason}
    with contextlib.suppress(OSError):
        facts["bytes"] = path.stat().st_size
        if reason.startswith("more than"):
            large = facts["bytes"] > _MAX_HASHED_BYTES
            facts["sample_sha256" if large else "sha256"] = sample_digest(path) if large else sha256(path)
    return facts


def _fit(changes: _Changes) -> bytes:
    """The patch. If it exceeds `MAX_DIFF_BYTES`, the largest parts are left out and their files listed as omitted."""
    total, dropped = 0, set()
    for name, part in sorted(changes.patch, key=lambda each: len(each[1])):
        total += len(part)
        if total > MAX_DIFF_BYTES:
            dropped.add(name)
            changes.omitted_files.append((name, f"more than {MAX_DIFF_BYTES} bytes of changes"))
    return b"".join(part for name, part in changes.patch if name not in dropped)


def _changes_of_snapshot(root: Path) -> list[dict[str, Any]]:
    """Files of a snapshot that were changed, removed or (modules) added after it was made."""
    try:
        files: Mapping[str, Any] = read_manifest(root, RunError)["files"]
    except RunError:
        return []
    changed = []
    for name, facts in files.items():
        path = root / name
        try:
            is_unchanged = path.stat().st_size == facts["bytes"] and sha256(path) == facts["sha256"]
        except OSError:
            is_unchanged = False
        if not is_unchanged:
            changed.append(_describe(path, name, "changed in the snapshot"))
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name not in files and name != MANIFEST:
            changed.append(_describe(path, name, "added to the snapshot"))
    return changed
