"""Finished and running experiments as rows for tables and plots. Needs the save directories only, not exp_configs.py."""

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from src.config import unknown
from src.errors import DataError, RunError, UserError
from src.experiments.saved import ENV, STATUS, flat, read_exp_dict, read_groups, state_of
from src.experiments.scores import SCORE_LIST, SCORES, Scores, read_score_list
from src.files import read_json

FACTS = ("exp_id", "state", "group", "step")
_ID = re.compile(r"[0-9a-f]{32}")
_LOWER_IS_BETTER = {"loss", "ppl", "perplexity", "error", "errors", "err", "nll", "wer", "cer", "bpb", "bpc", "mse", "mae", "rmse", "kl"}

DIAGNOSTICS = ("grad_norm", "clip_rate", "skipped_steps", "learning_rate", "tokens")
"""What the training loop reports of itself in each score row, beside its loss."""


class Row(dict[str, Any]):
    """One run, flat: the keys of `FACTS`, the config by dotted key, and the last value of each score."""

    scores: tuple[str, ...] = ()
    """Which of the keys are scores, in the order in which they first appeared."""


def load_rows(runs: Path, group: str | None = None) -> tuple[list[Row], list[str]]:
    """One row for each save directory in `runs`, those of `group` only if one is given; and a warning for each that cannot be read.

    "state" is that of `saved.state_of`, or "haven" for a directory that haven wrote. "step" is that of the last row of scores,
    or None. A config key named like a fact is called "config.<name>", a score named like any of them "score.<name>".

    Raises:
        DataError: there is no such folder, or it holds no run.
        ConfigError: no run is of `group`.
    """
    if not runs.is_dir():
        raise DataError(f"{runs}: no such folder of runs. Train something first, or name the folder given as --savedir_base.")
    rows, warnings, known = [], [], set()
    for path in sorted(entry for entry in runs.iterdir() if _ID.fullmatch(entry.name)):
        try:
            groups = _groups(path)
            known.update(groups)
            if group is None or group in groups:
                rows.append(_row(path, group or (groups or [""])[0]))
        except UserError as error:
            warnings.append(f"skipped: {error}")
    if not rows and group is not None and group not in known:
        raise unknown("group", group, known, str(runs))
    if not rows and not warnings:
        raise DataError(f"{runs}: no runs in this folder. Train something first, or name the folder given as --savedir_base.")
    return rows, warnings


def history(path: Path) -> list[dict[str, Any]]:
    """All rows of scores of the save directory `path`; haven's where only haven's are there.

    Raises:
        DataError: the scores are damaged.
    """
    if not (path / SCORES).exists() and (path / SCORE_LIST).exists():
        return read_score_list(path / SCORE_LIST)
    return Scores(path / SCORES, read_only=True).rows()


def varying(rows: Sequence[Row]) -> list[str]:
    """Dotted config keys that are not the same in all rows, a key that is missing somewhere included: what names a run by what differs."""
    keys = dict.fromkeys(key for row in rows for key in config_keys(row))
    return [key for key in keys if len({_spelled(row, key) for row in rows}) > 1]


def distinguishing(rows: Sequence[Row]) -> list[str]:
    """`varying` without what belongs to the seed: the seed itself, and the id of a parent where each seed has a parent of its own."""
    keys = [key for key in varying(rows) if key != "seed"]
    parents = [key for key in keys if key.endswith(".exp_id")]
    alike = grouped(rows, [key for key in keys if key not in parents])

    def follows_seed(key: str) -> bool:
        counts = [[len(grouped(group, by)) for by in (["seed"], [key], ["seed", key])] for group in alike]
        return all(len(set(count)) == 1 for count in counts) and any(count[0] > 1 for count in counts)

    return [key for key in keys if key not in parents or not follows_seed(key)]


def config_keys(row: Row) -> list[str]:
    """Keys of the row that come from its experiment dict."""
    return [key for key in row if key not in FACTS and key not in row.scores]


def score_names(rows: Iterable[Row]) -> list[str]:
    """Every score of any row, in the order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.scores))


def headline(names: Sequence[str]) -> list[str]:
    """The scores that a reader wants first: not the loop's diagnostics, not parts such as "em/nq"; all where nothing else is left."""
    return [name for name in names if name not in DIAGNOSTICS and "/" not in name] or list(names)


def grouped(rows: Iterable[Row], by: Sequence[str]) -> list[list[Row]]:
    """Rows that agree in all of `by`, in the order of first appearance. 1 and 1.0 disagree, as their ids do."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(_spelled(row, key) for key in by), []).append(row)
    return list(groups.values())


def aggregate(rows: Sequence[Row], by: Sequence[str], scores: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each combination of `by`.

    Its keys: those of `by`; "runs", how many; "state", one for all or such as "2 done, 1 failed"; "step", the lowest last step; and for
    each score its mean (None of nothing), "<score>_std" (sample, n - 1; None for n < 2) and "<score>_n" (runs that have it).

    Raises:
        ConfigError: a key of `by` or a score that no row has.
    """
    _check_known("key", by, {key for row in rows for key in [*config_keys(row), *FACTS]})
    _check_known("score", scores, score_names(rows))
    return [_aggregated(group, by, scores) for group in grouped(rows, by)]


def lower_is_better(name: str) -> bool:
    """Whether a score by this name is a loss, a perplexity or an error; anything else is better when higher."""
    return any(word in _LOWER_IS_BETTER for word in re.split(r"[^a-z0-9]+", name.lower()))


def best_first(rows: Iterable[dict[str, Any]], metric: str, lowest: bool | None = None) -> list[dict[str, Any]]:
    """Rows sorted by `metric`; those without it last. `lowest`: True puts the lowest first, None decides by the metric's name."""
    lowest = lower_is_better(metric) if lowest is None else lowest

    def place(row: dict[str, Any]) -> tuple[bool, float]:
        value = row.get(metric)
        return (True, 0.0) if value is None else (False, value if lowest else -value)

    return sorted(rows, key=place)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key with the shortest end that tells it from the others: {"model.stride": "stride"}."""
    names = {}
    for key in keys:
        words = key.split(".")
        ends = [".".join(words[start:]) for start in range(len(words) - 1, -1, -1)]
        names[key] = next(end for end in ends if sum(other == end or other.endswith("." + end) for other in keys) == 1 or end == key)
    return names


def _groups(path: Path) -> list[str]:
    """The groups that asked for this run: those noted, and that of its last start."""
    groups = read_groups(path)
    if (path / ENV).exists():
        env = read_json(path / ENV, RunError)
        last = env.get("groups") if isinstance(env, dict) else None
        groups += [name for name in last if isinstance(name, str) and name not in groups] if isinstance(last, list) else []
    return groups


def _row(path: Path, group: str) -> Row:
    row = Row({"exp_id": path.name, "state": _state(path), "group": group, "step": None})
    row.update({f"config.{key}" if key in FACTS else key: value for key, value in flat(read_exp_dict(path)).items()})
    last: dict[str, Any] = {}
    for scores in history(path):
        row["step"] = scores.get("step", row["step"])
        # A value that is not finite does not replace the last one that was: haven's tables do the same.
        last.update({name: value for name, value in scores.items() if _finite(value) or name not in last})
    last.pop("step", None)
    named = {f"score.{name}" if name in row else name: value if _finite(value) else None for name, value in last.items()}
    row.scores = tuple(named)
    row.update(named)
    return row


def _state(path: Path) -> str:
    if not (path / STATUS).exists() and (path / SCORE_LIST).exists():
        return "haven"
    return state_of(path)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and value - value == 0


def _spelled(row: Row, key: str) -> str:
    return json.dumps(row[key], sort_keys=True) if key in row else ""


def _check_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = set(known)
    for name in names:
        if name not in known:
            raise unknown(kind, name, known, "results")


def _aggregated(rows: Sequence[Row], by: Sequence[str], scores: Sequence[str]) -> dict[str, Any]:
    states = [row["state"] for row in rows]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    steps = [row["step"] for row in rows if row["step"] is not None]
    found: dict[str, Any] = {key: rows[0].get(key) for key in by}
    found["runs"] = len(rows)
    found["state"] = states[0] if len(counts) == 1 else ", ".join(f"{n} {state}" for state, n in counts.items())
    found["step"] = min(steps) if steps else None
    for name in scores:
        values = [row[name] for row in rows if row.get(name) is not None]
        found[name] = statistics.fmean(values) if values else None
        found[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else None
        found[f"{name}_n"] = len(values)
    return found
