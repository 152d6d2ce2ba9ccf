"""Which save directories a command line means: all of a folder, those of a group, or one."""

import os
import re
from pathlib import Path

from src.config import unknown
from src.errors import ConfigError
from src.files import reading
from src.runs import metadata

_ID = re.compile(r"[0-9a-f]{32}")


def chosen(path: Path, group: str | None = None) -> tuple[Path, list[str]]:
    """The folder of save directories, and the ids that are meant: all in `path`, or `path` itself where it is a save directory.

    Raises:
        ConfigError: no such folder, no run in it, or none of `group`.
        RunError: the folder cannot be read.
    """
    path = path.resolve()
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder. Expected one of save directories, or one save directory.")
    if _ID.fullmatch(path.name):
        runs, names = path.parent, [path.name]
    else:
        with reading(path):
            runs, names = path, sorted(name for name in os.listdir(path) if _ID.fullmatch(name))
        if not names:
            raise ConfigError(f"{path}: no runs in it. Their save directories are named by the 32 hex digits of their ids.")
    if group is None:
        return runs, names
    groups = {name: metadata.read_groups(runs / name) for name in names}
    found = [name for name in names if group in groups[name]]
    if not found:
        raise unknown("group", group, {one for listed in groups.values() for one in listed}, "-e")
    return runs, found
