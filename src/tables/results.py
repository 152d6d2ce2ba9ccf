"""Experiments as rows for tables and plots, whether finished or running.
Reads only the save directories, not exp_configs.py."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from src.errors import ConfigError, DataError, UserError
from src.experiments import expressions
from src.experiments.config import flatten, unknown
from src.files import reading
from src.runs.store import CODE_VERSIONS, RunStore, SavedRun, list_command
from src.runs.summary import is_finite
from src.support.read_cache import ReadCache
from src.tables.scan import RunIndex, RunRecord, list_names

FACTS = ("exp_id", "state", "group", "step", "tags", "note")
AVERAGE_COLUMNS = ("exp_ids", "runs", "done", "over", "gpu_hours")
ENDS = ("_std", "_ci95", "_n", "_nan")
"""AVERAGE_COLUMNS: additional columns of `statistics.aggregate`. ENDS: suffixes of its columns for each score."""
FINISHED = ("done", "haven", "foreign")
"""States in which the last scores are final results. Runs of haven and other programs have only scores."""
SEED = "seed"
"""The default key to average over."""
_LOWER_IS_BETTER = {
    "loss",
    "ppl",
    "perplexity",
    "error",
    "errors",
    "err",
    "nll",
    "wer",
    "cer",
    "bits",
    "bpb",
    "bpc",
    "mse",
    "mae",
    "rmse",
    "kl",
}

_SIZES = ("projected_bytes_per_context_token", "decoder_cache_bytes_per_context_token")
DIAGNOSTICS = ("grad_norm", "clip_rate", "skipped_steps", "learning_rate", "tokens", CODE_VERSIONS, *_SIZES)
"""Scores that are not results: diagnostics of the training loop, and reference cache sizes."""


class Row(dict[str, Any]):
    """One run, flat: the keys of `FACTS`, the config by dotted key, and the last value of each score,
    None if that was NaN or infinity."""

    scores: tuple[str, ...] = ()
    """The keys that are scores, in order of first appearance."""
    groups: tuple[str, ...] = ()
    """The requested groups that contain the run, or all of its groups. "group" is the first."""
    at_step: int | None = None
    """The step of the values, if they are not the last ones."""
    contact: str = ""
    """See `lease.Holder.lost_contact`; shown for the state "lost"."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return super().__eq__(other)
        attributes = attrgetter("scores", "groups", "at_step", "contact")
        return super().__eq__(other) and attributes(self) == attributes(other)

    __hash__ = None  # type: ignore[assignment]  mutable, as a dict is

    def replace(self, values: Mapping[str, Any]) -> "Row":
        """A copy with new values for some keys."""
        changed = Row({**self, **values})
        changed.scores, changed.groups = self.scores, self.groups
        changed.at_step, changed.contact = self.at_step, self.contact
        return changed

    def in_groups(self) -> list["Row"]:
        """The row once for each of its groups."""
        if len(self.groups) < 2:
            return [self]
        members = [self.replace({"group": group}) for group in self.groups]
        for member in members:
            member.groups = (member["group"],)
        return members


RowCache = ReadCache[tuple[list[str], RunRecord, dict[tuple[str, ...], Row]]]
"""The groups of a run, its record, and its rows by requested groups."""


def load_rows(
    runs: Path, group: str | Sequence[str] | None = None, saved: RowCache | None = None
) -> tuple[list[Row], list[str]]:
    """One row for each save directory in `runs`, and a warning for each that cannot be read.

    group: only the runs of one or several groups; see `Row.groups`. saved: cached rows.

    "tags" (a list) and "note" are a person's remarks. "state" is `SavedRun.state`, or "haven" for a directory written
    by haven, or "foreign" for one with an id of another program. "step" is the step of the last row of scores, or None.
    A config key with the name of a fact or of a table column ("runs", "loss_std") becomes "config.<name>"; a score with
    such a name, or the name of a config key, becomes "score.<name>".

    Raises:
        DataError: there is no such folder, or it contains no run.
        ConfigError: a group has no run.
    """
    if not runs.is_dir():
        raise DataError(
            f"{runs}: no such folder of runs. Train something first, or name the folder given as --savedir_base."
        )
    requested = [group] if isinstance(group, str) else group or []
    rows, warnings, existing = [], [], set()
    with reading(runs):
        names = list_names(runs)
        valid, marks = saved.read(names) if saved else ({}, {})
        index = RunIndex(runs, names, [name for name in names if name not in valid] if saved else None)
        store = RunStore(runs)
        for name in names:
            groups, record, by_groups = valid.get(name, ([], None, {}))
            if record is None:
                try:
                    groups, record = index.read(store[name], None if group is None else requested)
                except UserError as error:
                    warnings.append(f"skipped: {error}")
                    continue
                if saved and record is not None and record.state in (*FINISHED, "failed", "stopped"):
                    saved.save(name, marks, (groups, record, by_groups))
            existing.update(groups)
            members = tuple(each for each in requested if each in groups)
            if record is not None and (members or group is None):
                members = members or tuple(groups) or ("",)
                if members not in by_groups:
                    by_groups[members] = _row(store[name], record, members)
                rows.append(by_groups[members])
        index.save()
    for each in requested:
        if each not in existing:
            raise unknown("group", each, existing, str(runs), list_command(runs, "--by group"))
    if not rows and not warnings:
        raise DataError(
            f"{runs}: no runs in this folder. Train something first, or name the folder given as --savedir_base."
        )
    scores, config_keys = score_names(rows), {*all_config_keys(rows)}
    reserved = {name + end for name in scores for end in ENDS}
    of_both = {name for name in scores if name in config_keys}
    return [_rename(row, reserved, of_both) for row in rows], warnings


def group_rows(rows: Iterable[Row], by: Sequence[str]) -> list[list[Row]]:
    """Rows that agree in all of `by`, in order of first appearance. 1 and 1.0 differ, as their ids do.

    By "group", a run in several groups is in each of them.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    if "group" in by:
        rows = [each for row in rows for each in row.in_groups()]
    for row in rows:
        groups.setdefault(tuple(spell(row, key) for key in by), []).append(row)
    return list(groups.values())


def varying_keys(rows: Sequence[Row]) -> list[str]:
    """Dotted config keys that differ between rows, or are missing in some."""
    return [key for key in all_config_keys(rows) if _varies(rows, key)]


def _varies(rows: Sequence[Row], key: str) -> bool:
    first = spell(rows[0], key)
    return any(spell(row, key) != first for row in rows)


def distinguishing_keys(rows: Sequence[Row], seed: str = SEED) -> list[str]:
    """`varying_keys` without the key `seed`, and without the id of a parent if each seed has its own parent.

    For several groups: "group", and the keys that vary within a group, since two groups can differ in every key.
    """
    groups = group_rows(rows, ["group"])
    if len(groups) > 1:
        return ["group", *dict.fromkeys(key for group in groups for key in distinguishing_keys(group, seed))]
    keys = [key for key in varying_keys(rows) if key != seed]
    parents = [key for key in keys if key.endswith(".exp_id")]
    groups_but_seed = group_rows(rows, [key for key in keys if key not in parents])

    def follows_seed(key: str) -> bool:
        counts = [[len(group_rows(group, by)) for by in ([seed], [key], [seed, key])] for group in groups_but_seed]
        return all(len(set(count)) == 1 for count in counts) and any(count[0] > 1 for count in counts)

    return [key for key in keys if key not in parents or not follows_seed(key)]


def describe_differences(experiments: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    """The values that differ between the experiments of a group: {id: "seed=1 learning_rate=0.001"}.
    experiments: {id: (group, dict)}."""
    result: dict[str, str] = {}
    for group in {group for group, _ in experiments.values()}:
        rows = {name: Row(flatten(exp)) for name, (of, exp) in experiments.items() if of == group}
        short = short_names(varying_keys(list(rows.values())))
        result |= {
            name: " ".join(f"{short[key]}={row[key]}" for key in short if key in row) for name, row in rows.items()
        }
    return result


def config_keys(row: Row) -> list[str]:
    """Keys of the row that come from its experiment dict."""
    return [key for key in row if key not in FACTS and key not in row.scores]


def all_config_keys(rows: Iterable[Row]) -> list[str]:
    """`config_keys` of all rows, in the order of first appearance."""
    shapes = {(tuple(row), row.scores): row for row in rows}  # most runs have the same keys
    return list(dict.fromkeys(key for row in shapes.values() for key in config_keys(row)))


def score_names(rows: Iterable[Row]) -> list[str]:
    """Every score of any row, in the order of first appearance."""
    return list(dict.fromkeys(name for scores in dict.fromkeys(map(attrgetter("scores"), rows)) for name in scores))


def headline_scores(names: Sequence[str]) -> list[str]:
    """The main scores: no diagnostics, no parts such as "em/nq" or "inference/em/nq"; all scores if none remains."""
    return [name for name in names if name not in DIAGNOSTICS and "/" not in name.removeprefix("inference/")] or list(
        names
    )


def lower_is_better(name: str) -> bool:
    """Whether a score with this name is a loss, a perplexity or an error. For all other scores, higher is better."""
    return any(word in _LOWER_IS_BETTER for word in re.split(r"[^a-z0-9]+", name.lower()))


def sort_best_first(rows: Iterable[dict[str, Any]], metric: str, lowest: bool | None = None) -> list[dict[str, Any]]:
    """Rows sorted by `metric`; rows without it last.
    lowest: put the lowest first; None: decide by the metric's name."""
    lowest = lower_is_better(metric) if lowest is None else lowest

    def place(row: dict[str, Any]) -> tuple[bool, float]:
        value = row.get(metric)
        return (True, 0.0) if value is None else (False, value if lowest else -value)

    return sorted(rows, key=place)


def short_names(keys: Sequence[str]) -> Mapping[str, str]:
    """The shortest unique suffix of each dotted key: {"model.stride": "stride"}.
    It is never the name of a table column, such as "runs"."""
    return _short_names(tuple(keys))


@lru_cache
def _short_names(keys: tuple[str, ...]) -> Mapping[str, str]:
    names = {}
    columns = {*FACTS, *AVERAGE_COLUMNS}
    for key in keys:
        words = [key] if key.startswith("config.") else key.split(".")
        ends = [".".join(words[start:]) for start in range(len(words) - 1, -1, -1)]
        names[key] = next(
            end
            for end in ends
            if end == key
            or (end not in columns and sum(other == end or other.endswith("." + end) for other in keys) == 1)
        )
    return names


def select(
    runs: Path,
    group: str | Sequence[str] | None = None,
    question: str | None = None,
    names: Collection[str] | None = None,
) -> tuple[list[Row], list[str]]:
    """`load_rows`, then only runs with the ids `names`, then `filter_rows`. Empty only if no run is readable.

    question: an expression, see `filter_rows`.

    Raises:
        DataError: there is no such folder, or it contains no run.
        ConfigError: a group has no runs, or `question` is malformed or matches no run.
    """
    rows, warnings = load_rows(runs, group)
    if names is not None:
        rows = [row for row in rows if row["exp_id"] in names]
        warnings = [text for text in warnings if any(name in text for name in names)]
        if not rows and not warnings:
            raise ConfigError(
                f"{runs}: none of the named runs is in "
                f"{' or '.join([group] if isinstance(group, str) else group or [])}. Leave out -e, or name other runs."
            )
    if question is None or not rows:
        return rows, warnings
    matches = filter_rows(rows, question)
    if not matches:
        names = [
            name
            for name in sorted(expressions.compile(question).names)
            if name in config_keys(rows[0]) or name in FACTS
        ]
        values = {name: list(dict.fromkeys(str(row.get(name)) for row in rows)) for name in names}
        examples = "; ".join(
            f"{name} is {', '.join(of_name[:5])}{', …' * (len(of_name) > 5)}" for name, of_name in values.items()
        )
        raise ConfigError(
            f"--where: {question!r} matches none of {len(rows)} runs.{f' In these, {examples}.' if examples else ''}"
        )
    return matches, warnings


def filter_rows(rows: Sequence[Row], text: str, place: str = "--where") -> list[Row]:
    """The rows that match the expression `text`: see `expressions`.
    "status" means "state", unless it is a config key.

    Without rows, any name is accepted. place: start of error messages.

    Raises:
        ConfigError: the expression is malformed, or uses a name that no row has.
    """
    expression = expressions.compile(text, place)
    if not rows:
        return []
    existing = {key for row in rows for key in row}
    uses_status = "status" in expression.names and "status" not in existing
    check_known("name", sorted(expression.names - {"status"} if uses_status else expression.names), existing, place)
    selected_rows = []
    for row in rows:
        candidates = row.in_groups() if "group" in expression.names else [row]
        matches = [
            each
            for each in candidates
            if expression.matches({**each, "status": each["state"]} if uses_status else each)
        ]
        if matches and matches[0] is not row:
            matches[0].groups = tuple(each["group"] for each in matches)
        selected_rows += matches[:1]
    return selected_rows


def _row(run: SavedRun, record: RunRecord, groups: Sequence[str]) -> Row:
    state = run.state if record.state == "running" else record.state
    facts = {"exp_id": run.name, "state": state, "group": groups[0], "step": record.summary.step}
    row = Row({**facts, "tags": record.tags, "note": record.note})
    row.groups = tuple(groups)
    columns = {*FACTS, *AVERAGE_COLUMNS}
    row.update({f"config.{key}" if key in columns else key: value for key, value in record.config.items()})
    # haven's rows can have keys that are not strings
    last = {str(name): value for name, value in record.summary.last.items()}
    scores = {
        f"score.{name}" if name in row or name in AVERAGE_COLUMNS else name: value for name, value in last.items()
    }
    row.scores = tuple(scores)
    row.update(scores)
    row.contact = run.holder.lost_contact if state == "lost" else ""
    return row


def _rename(row: Row, reserved: Set[str], of_both: Set[str]) -> Row:
    """The row with new names for its `reserved` keys, and for scores `of_both`: config keys of other runs."""
    clashes = (reserved & row.keys()) | (of_both & {*row.scores})
    if not clashes:
        return row
    names = {key: f"{'score' if key in row.scores else 'config'}.{key}" if key in clashes else key for key in row}
    new_row = Row({names[key]: value for key, value in row.items()})
    new_row.scores, new_row.groups, new_row.contact = tuple(names[key] for key in row.scores), row.groups, row.contact
    return new_row


def resolve_key(existing: Collection[str], key: str) -> str:
    """`key`, or "config.<key>" if that is the existing key because `key` is the name of a column."""
    return key if key in existing or f"config.{key}" not in existing else f"config.{key}"


def sort_key(value: Any) -> tuple[int, Any, str]:
    """Key to sort numbers by value, then strings, then all other values."""
    if is_finite(value):
        return 0, value, ""
    return (1, 0, value) if isinstance(value, str) else (2, 0, json.dumps(value))


def spell(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return ""
    value = row[key]
    plain = (
        type(value) is str or type(value) is int or (type(value) is float and value)
    )  # the cache would confuse 0.0 and -0.0
    return _spell_scalar(value) if plain else json.dumps(value, sort_keys=True)


_spell_scalar = lru_cache(maxsize=1 << 16, typed=True)(json.dumps)


def check_known(kind: str, names: Iterable[str], existing: Iterable[str], place: str = "results") -> None:
    existing = set(existing)
    for name in names:
        if name not in existing:
            raise unknown(kind, name, existing, place)
