"""Content of the dashboard and the report as plain rows and texts, without markup.
A damaged directory causes only a warning."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from results import diff, table
from results.pages import legend
from src.errors import RunError, UserError
from src.files import reading
from src.launch import status
from src.launch.logs import tail as log_tail
from src.launch.tracking import REFRESH
from src.runs.store import EXP_DICT, RunStore, SavedRun
from src.support.read_cache import ReadCache
from src.tables import results, statistics, terminal_table
from src.tables.curves import choose_values as choose_run_values

SCORES = 5
"""Default number of scores in the table of results."""
JOB_HEADINGS = (
    "experiment",
    "configuration",
    "group",
    "state",
    "reason",
    "step",
    "loss",
    "run time",
    "heartbeat",
    "starts",
    "node",
    "notes",
)
MAX_CHARACTERS = 4000
"""Maximum length of a differing value, such as uncommitted code."""
Job = status.Row
T = TypeVar("T")
_ID = re.compile(r"[0-9a-f]{32}")
_FACTS = ("time", "host", "platform", "python", "commit", "dirty", "cpus", "gpus", "command")


@dataclass(frozen=True)
class Overview:
    """Snapshot of a folder of runs, or of a selection."""

    runs: Path
    rows: list[results.Row] = field(default_factory=list)
    """Experiments with a readable save directory; "state" is the state of the job."""
    jobs: list[status.Row] = field(default_factory=list)
    """The same experiments, and queued or unreadable ones."""
    groups: list[str] = field(default_factory=list)
    """All groups of the folder, including those outside the selection."""
    warnings: list[str] = field(default_factory=list)
    loaded: Sequence[results.Row] = ()
    """The rows before `select`, which determine the colours."""
    unfinished: bool = False
    """Average over all runs, not only over finished ones."""
    seed: str = results.SEED
    """The config key to average over."""
    saved: "Saved | None" = field(default=None, compare=False, repr=False)
    """Cache of values that depend only on the runs."""
    _configs: dict[tuple[str, ...], legend.Configurations] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _members: list[Any] = field(default_factory=list, init=False, compare=False, repr=False)

    def configurations(self, by: Sequence[str]) -> legend.Configurations:
        """Group the rows by the existing keys in `by`, or by the varying keys if no such key exists."""
        if tuple(by) not in self._configs:
            key = ("configurations", *by, self.unfinished, self.seed)

            def compute() -> legend.Configurations:
                return legend.Configurations(self.rows, _existing(self, by), self.loaded, self.unfinished, self.seed)

            is_cacheable = set(by).isdisjoint({*results.FACTS} - {"group"})
            self._configs[tuple(by)] = self.reuse(key, compute).with_rows(self.rows) if is_cacheable else compute()
        return self._configs[tuple(by)]

    def reuse(self, key: tuple[Any, ...], compute: Callable[[], T]) -> T:
        """Return `compute()`, cached while the runs are the same.
        The result must depend only on the configs, as ids are hashes of configs."""
        if self.saved is None:
            return compute()
        if not self._members:
            runs = [self.rows] if self.loaded == self.rows else [self.rows, self.loaded]
            members = [[(row["exp_id"], row.groups) for row in rows] for rows in runs]
            self._members.append((members, results.score_names(self.loaded)))
        members, value = self.saved.results.get(key, (None, None))
        if members != self._members[0]:
            value = compute()
            self.saved.results[key] = self._members[0], value
        return value  # type: ignore[return-value]  of this key

    def row(self, exp_id: str) -> results.Row | None:
        """The row of an experiment, if it has one."""
        return next((row for row in self.rows if row["exp_id"] == exp_id), None)

    def counts(self) -> dict[str, int]:
        """Number of experiments by state, the most frequent first."""
        states = [job.state for job in self.jobs]
        return dict(
            sorted(((state, states.count(state)) for state in set(states)), key=lambda item: (-item[1], item[0]))
        )


@dataclass(frozen=True)
class Ranking:
    """The table of results, best first."""

    headings: list[str] = field(default_factory=list)
    """Scores before configurations, starting with the score that the table is sorted by."""
    lines: list[list[str]] = field(default_factory=list)
    colours: list[str] = field(default_factory=list)
    """Colour of the configuration in each line."""
    best_lines: list[set[int]] = field(default_factory=list)
    """For each score column, the lines with the best value; empty for other columns."""
    same: list[str] = field(default_factory=list)
    """Values shared by all lines, shown without a column: "step 250"."""
    best: str = ""
    """The first line in words; empty without scores."""
    remarks: list[str] = field(default_factory=list)
    """Remarks of `statistics.nan_remarks`."""


class Saved:
    """Cached values of ended runs in a folder, for the next `load`."""

    def __init__(self, runs: Path) -> None:
        self.rows: results.RowCache = ReadCache(runs)
        self.jobs: status.RowCache = ReadCache(runs)
        self.results: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        """Key -> (runs, result), for `Overview.reuse`."""


def load(runs: Path, group: str | Sequence[str] | None = None, saved: Saved | None = None) -> Overview:
    """Load the folder `runs`, or one or several groups. Unreadable files cause warnings, not errors."""
    ids: list[str] = []
    rows_saved, jobs_saved = (saved.rows, saved.jobs) if saved else (None, None)
    try:
        with reading(runs):
            ids = sorted(name for name in os.listdir(runs) if _ID.fullmatch(name)) if runs.is_dir() else []
        everything, warnings = results.load_rows(runs, None, rows_saved)
        ids = sorted({*ids, *(row["exp_id"] for row in everything)})
    except UserError as error:
        everything, warnings = [], [str(error)]
    table_of_jobs = status.table(RunStore(runs), ids, REFRESH, jobs_saved)
    groups = sorted(
        {
            name
            for names in (*(row.groups for row in everything), (job.group for job in table_of_jobs))
            for name in names
            if name
        }
    )
    rows = everything
    if group is not None:
        requested = [group] if isinstance(group, str) else group
        try:
            rows, warnings = results.load_rows(runs, group, rows_saved)
        except UserError as error:
            rows, warnings = [], [*warnings, str(error)]
        members = {row["exp_id"] for row in rows}
        table_of_jobs = [job for job in table_of_jobs if job.exp_id in members or job.group in requested]
    waiting = {job.exp_id for job in table_of_jobs if job.state in ("queued", "never")}
    remaining = [text for text in warnings if not waiting & set(_ID.findall(text))]
    states = {job.exp_id: job.state for job in table_of_jobs}
    rows = [_with_state(row, states.get(row["exp_id"])) for row in rows]
    others = {row["exp_id"]: row["state"] for row in rows if row["state"] in ("haven", "foreign")}
    table_of_jobs = [
        replace(job, state=others[job.exp_id], reason="") if job.exp_id in others else job for job in table_of_jobs
    ]
    return Overview(runs, rows, table_of_jobs, groups, remaining, loaded=rows, saved=saved)


def newest_group(content: Overview) -> str | None:
    """The group of the newest run."""

    def creation_time(row: results.Row) -> float:
        try:
            return os.stat(f"{content.runs}/{row['exp_id']}/{EXP_DICT}").st_mtime
        except OSError:
            return 0.0

    return max(content.rows, key=creation_time)["group"] or None if content.rows else None


def select(content: Overview, states: Sequence[str] = (), where: str = "", text: str = "") -> Overview:
    """Select experiments in `states` (empty: all) with `text` in their id or config, that satisfy expression `where`.

    An expression excludes experiments without a row, as these have no config.

    Raises:
        ConfigError: `where` is malformed, or uses an unknown name.
    """
    rows, jobs = content.rows, content.jobs
    if states:
        jobs = [job for job in jobs if job.state in states]
    if where.strip():
        holds = {row["exp_id"] for row in results.filter_rows(rows, where, "expression")}
        jobs = [job for job in jobs if job.exp_id in holds]
    if text.strip():
        texts = {name: f"{remark} " for name, remark in remarks(content).items()}
        for row in rows:
            texts[row["exp_id"]] += " ".join(f"{key}={row[key]}" for key in results.config_keys(row))
        jobs = [
            job
            for job in jobs
            if text.strip().lower() in f"{texts.get(job.exp_id, '')} {job.exp_id} {job.group} {job.reason}".lower()
        ]
    selected = {job.exp_id for job in jobs}
    return replace(content, rows=[row for row in rows if row["exp_id"] in selected], jobs=jobs)


def choose_values(
    content: Overview, unfinished: bool = False, value: str = "last", at_step: int | None = None
) -> Overview:
    """Choose values and runs to average, like the options of `results.table`. at_step takes precedence over `value`,
    and includes unfinished runs, as runs are comparable at the same step.
    """
    rows, warnings = choose_run_values(content.runs, content.rows, "last" if at_step is not None else value, at_step)
    return replace(
        content, rows=rows, warnings=[*content.warnings, *warnings], unfinished=unfinished or at_step is not None
    )


def tabulate(
    content: Overview,
    by: Sequence[str] = (),
    scores: Sequence[str] = (),
    metric: str | None = None,
    spread: str = "std",
) -> Ranking:
    """The table of results; empty without rows.

    by: config keys to group by; default: all that vary, except the seed. scores: default: `headline`.
    metric: sort key; default: the first score. spread: the value after ±: "std", or "ci95", the 95 % interval of the
    mean. Unknown keys and scores are ignored.
    """
    if not content.rows:
        return Ranking()
    existing = results.score_names(content.rows)
    configs = content.configurations(by)
    names = [name for name in scores if name in existing] or headline(content)
    metric = metric if metric in existing else next(iter(names), None)
    rows, keys, names = table.tabulate(content.rows, configs.keys, names, metric, unfinished=content.unfinished)
    columns, same = terminal_table.arrange(rows, keys, names, metric, None, spread)
    best = ""
    if metric is not None and rows[0][metric] is not None:
        where = legend.label([rows[0]], keys)
        name = terminal_table.plain_score(metric, names)
        best = f"Best {name}: {columns[0].cells[0]}{f' with {where}' if where else ''}, of {len(rows)} configurations."
    return Ranking(
        [column.heading for column in columns],
        [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)],
        [configs.colour_of(row["exp_ids"][0], row.get("group")) for row in rows],
        [table.best_rows(rows, column.name) if column.name in names else set[int]() for column in columns],
        [column.constant for column in same],
        best,
        statistics.nan_remarks(content.rows, names, content.unfinished),
    )


def headline(content: Overview) -> list[str]:
    """The most important scores."""
    return table.headline(results.headline_scores(results.score_names(content.rows)))[:SCORES]


def _existing(content: Overview, by: Sequence[str]) -> list[str] | None:
    keys = {*results.all_config_keys(content.rows), *results.FACTS}
    return [key for key in by if key in keys] or None


def metrics(content: Overview) -> list[str]:
    """All scores, starting with the default of tables."""
    existing = results.score_names(content.rows)
    first = table.default_metric(results.headline_scores(existing))
    return [first, *(name for name in existing if name != first)] if first else []


def differing(content: Overview) -> tuple[list[str], dict[str, str]]:
    """The config keys that vary within any group, and experiment id -> its values of these keys: "stride=2, seed=0"."""

    def compute() -> tuple[list[str], dict[str, str]]:
        varying: dict[str, None] = {}
        labels: dict[str, str] = {}
        for group in results.group_rows(content.rows, ["group"]):
            keys = results.varying_keys(group)
            varying |= dict.fromkeys(keys)
            labels |= {row["exp_id"]: legend.label([row], keys) for row in group}
        return list(varying), labels

    return content.reuse(("differing",), compute)


def remarks(content: Overview) -> dict[str, str]:
    """Experiment id -> its tags and note: "#good looks fine"."""
    return {row["exp_id"]: " ".join([*(f"#{tag}" for tag in row["tags"]), row["note"]]).strip() for row in content.rows}


def job_cells(job: status.Row, label: str, remark: str = "") -> list[str]:
    """The cells of a job under `JOB_HEADINGS`. label: distinguishing config values of the experiment.
    remark: tags and note."""
    step = "–" if job.step is None else str(job.step)
    return [
        job.exp_id[:8],
        label,
        job.group or "–",
        job.state,
        job.reason,
        step if job.steps is None else f"{step} / {job.steps}",
        "–" if job.loss is None else f"{job.loss:.4g}",
        duration(job.seconds),
        duration(job.heartbeat_seconds),
        str(job.attempts),
        job.node or "–",
        remark,
    ]


def duration(seconds: float | None) -> str:
    """Format a duration: 7.2 -> "7 s", 4000 -> "1 h 6 min", None -> "–"."""
    if seconds is None:
        return "–"
    for large, small, size, part in (("d", "h", 86_400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if seconds >= size:
            return f"{int(seconds // size)} {large} {int(seconds % size // part)} {small}"
    return f"{seconds:.0f} s"


def format_value(value: Any) -> str:
    """Format a config value: text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def differences(runs: Path, one: str, other: str) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(key, value in `one`, value in `other`) for each difference that `results.diff` finds;
    and a warning for each unreadable file."""
    sections, warnings = diff.differences(runs / one, runs / other)
    changes = [
        (f"{section}: {key}", _side(pair, "a"), _side(pair, "b"))
        for section, changed in sections.items()
        for key, pair in changed.items()
    ]
    return changes, warnings


def _side(pair: Mapping[str, Any], side: str) -> str:
    return format_value(pair[side])[:MAX_CHARACTERS] if side in pair else "absent"


def environment(runs: Path, exp_id: str) -> dict[str, str]:
    """Code, machine and versions of the last start; empty if unreadable."""
    try:
        env = SavedRun(runs / exp_id).env
    except RunError:
        return {}
    packages = env.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    facts = {key: env[key] for key in _FACTS if env.get(key) is not None}
    facts |= {name: packages[name] for name in ("torch", "transformers", "accelerate", "numpy") if name in packages}
    return {key: " ".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in facts.items()}


def logs(content: Overview, exp_id: str) -> dict[str, Path]:
    """Log files of an experiment by name, starting with the output of its job."""
    job_logs = {f"{end}.log": content.runs / "logs" / f"{exp_id}.{end}.log" for end in ("out", "err")}
    job_log = next((job.log for job in content.jobs if job.exp_id == exp_id and job.log is not None), None)
    run_logs = {path.name: path for path in sorted((content.runs / exp_id / "logs").glob("*.log"))}
    extra_logs = (
        {} if job_log is None or job_log in (*job_logs.values(), *run_logs.values()) else {job_log.name: job_log}
    )
    return {name: path for name, path in (extra_logs | job_logs | run_logs).items() if path.is_file()}


def tail(path: Path, lines: int) -> str:
    """The last lines of a log, or the error if it cannot be read."""
    try:
        return log_tail(path, lines)
    except (UserError, OSError) as error:
        return str(error)


def _with_state(row: results.Row, state: str | None) -> results.Row:
    """The row with the state of its job. Finished runs stay finished, regardless of the scheduler."""
    return row if state in (None, row["state"]) or row["state"] in results.FINISHED else row.replace({"state": state})
