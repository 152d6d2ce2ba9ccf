"""A validated entry of job_configs.py: a launcher, its config, and overrides for some experiments."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from src.errors import ConfigError
from src.experiments import expressions
from src.experiments.config import Problems, describe_value, flatten, join, shorten, top_level, unknown, unknown_text
from src.files import ROOT
from src.launch.job import LauncherConfig, bind_launcher

ENV_PATH = "ENV_PATH"
"""Environment variable: the folder of the Python environment of the jobs."""
_EXAMPLES = "resources/job_configs"
_SUBMISSIONS = "submissions"
"""Field of a launcher Config that stores state in the folder of the submissions."""


@dataclass(frozen=True)
class Resources:
    """A launcher and the resources of its jobs."""

    name: str
    """Its key in JOB_CONFIGS."""
    launcher: LauncherConfig
    overrides: tuple[tuple[expressions.Query, dict[str, Any]], ...]
    """(query that selects experiments, changes for them)."""
    raw: dict[str, Any]

    @property
    def where(self) -> str:
        """Its place, for messages."""
        return f"JOB_CONFIGS[{self.name!r}]"

    def config_for(self, exp: Mapping[str, Any]) -> LauncherConfig | None:
        """The launcher's config for one experiment; None: no override. Later overrides win.

        Raises:
            ConfigError: the overrides contradict each other.
        """
        row, raw = flatten(exp), self.raw
        for where, changes in self.overrides:
            raw = _merge(raw, changes) if where.matches(row) else raw
        return None if raw is self.raw else bind_at(raw, self.where)

    def check_names(self, experiments: Iterable[Mapping[str, Any]]) -> None:
        """Raise ConfigError, with the nearest name, if an override uses a name that is in none of the `experiments`."""
        names = {name for exp in experiments for name in flatten(exp)}
        for i, (where, _) in enumerate(self.overrides):
            for name in sorted(where.names - names):
                raise unknown("name", name, names, f"{self.where}.overrides[{i}].where")


def load(name: str, raw: Any, runs: Path, env_path: str | None = None) -> Resources:
    """Check the entry `name` of JOB_CONFIGS. env_path: default of `processes.env_path`.

    Raises:
        ConfigError: one line for each mistake in it.
    """
    where = f"JOB_CONFIGS[{name!r}]"
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a dict with 'launcher', got {describe_value(raw)}.")
    if _SUBMISSIONS in raw:
        raise ConfigError(f"{where}.{_SUBMISSIONS}: filled in when jobs are submitted. Leave it out.")
    config = {key: value for key, value in raw.items() if key != "overrides"}
    launcher = bind_at(config, where)
    fields = type(launcher).model_fields
    if env_path and "processes" in fields and not config.get("processes", {}).get("env_path"):
        config = _merge(config, {"processes": {"env_path": env_path}})
    if _SUBMISSIONS in fields:
        config[_SUBMISSIONS] = str(runs.resolve() / _SUBMISSIONS)
    overrides = raw.get("overrides", [])
    if not isinstance(overrides, list):
        raise ConfigError(f"{where}.overrides: expected a list, got {describe_value(overrides)}.")
    checked_overrides = tuple(
        _override(config, override, f"{where}.overrides[{i}]") for i, override in enumerate(overrides)
    )
    return Resources(name, bind_at(config, where), checked_overrides, config)


def load_named(name: str, runs: Path, experiments: Iterable[Mapping[str, Any]]) -> Resources:
    """Load the entry `name` of job_configs.py; check it for `experiments` and with its launcher.

    Raises:
        ConfigError: the entry is missing or invalid.
        LaunchError: no jobs could be queued from here.
    """
    entries = top_level("job_configs", "JOB_CONFIGS")
    if name not in entries:
        examples = ", ".join(sorted(f"{_EXAMPLES}/{path.name}" for path in ROOT.joinpath(_EXAMPLES).glob("*.md")))
        raise ConfigError(
            f"-j: {unknown_text('job config', name, entries)} Add it to job_configs.py; examples: {examples}."
        )
    target = load(name, entries[name], runs, os.environ.get(ENV_PATH))
    target.check_names(experiments)
    target.launcher.check()
    return target


def _override(base: dict[str, Any], override: Any, where: str) -> tuple[expressions.Query, dict[str, Any]]:
    if not isinstance(override, dict) or not isinstance(override.get("where"), str):
        example = 'an expression such as "model.num_layers > 4"'
        raise ConfigError(f"{where}: expected a dict with 'where', {example}, got {shorten(override)}.")
    changes = {key: value for key, value in override.items() if key != "where"}
    for fixed_key in ("launcher", _SUBMISSIONS, "overrides"):
        if fixed_key in changes:
            raise ConfigError(f"{where}.{fixed_key}: is the same for all jobs of a submission. Leave it out.")
    if not changes:
        raise ConfigError(f"{where}: changes nothing. Add the changes for these experiments, or remove the override.")
    try:
        compiled = expressions.compile(override["where"])
    except ConfigError as error:
        raise ConfigError(f"{where}.where: {error}") from None
    bind_at(_merge(base, changes), where)
    return compiled, changes


def bind_at(raw: Mapping[str, Any], where: str) -> LauncherConfig:
    """The launcher of a config. Raises ConfigError with each mistake and its path below `where`."""
    try:
        return bind_launcher(raw)
    except Problems as error:
        raise ConfigError("\n".join(f"{join(where, path)}: {text}" for path, text in error.problems)) from None


def with_submissions(launcher: LauncherConfig, folder: Path) -> LauncherConfig:
    """The launcher with the current folder of the submissions, if it stores state there."""
    return (
        launcher.model_copy(update={_SUBMISSIONS: str(folder)})
        if _SUBMISSIONS in type(launcher).model_fields
        else launcher
    )


def _merge(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with `changes`; dicts are merged key by key."""
    nested = {
        key: _merge(raw[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(raw.get(key), dict)
    }
    return {**raw, **changes, **nested}
