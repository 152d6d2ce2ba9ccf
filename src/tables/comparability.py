"""Whether runs can be compared, their differences and their costs, from the files of the runs."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from src.errors import ConfigError, RunError, UserError
from src.files import read_json
from src.runs import jsonl_records, ledger
from src.runs.inputs import CONTENT, recorded_inputs
from src.runs.store import PERF, VALIDATION, SavedRun
from src.tables.results import FINISHED, SEED, Row, config_keys, spell

PER_BYTE = "val_bits_per_byte"
"""The score that can be compared between tokenizers."""
LOSSES = (PER_BYTE, "val_loss", "val_perplexity")
"""Scores of the text of the validation data, which no setting of generated answers changes."""
_ANSWER_KEYS = ("answers", "gains", "harness", "inference", "predictions", "ranking", "reward", "rewards", "sampled")
"""Parts of an experiment that set how its answers are scored. Keys that start with "val_" choose validation data."""
_MAX_COVERAGE_RATIO = 1.1
"""Maximum ratio of the bytes, or tokens, of two validations of the same data with different settings of the data. Each
sequence begins with a token that is not scored, so their length matters."""


@dataclass
class Family:
    """Runs of one experiment that differ only in the seed."""

    rows: list[Row]
    folder: Path
    """The folder of runs."""

    @cached_property
    def records(self) -> dict[str, Mapping[str, Any]]:
        """validation.json by id, of runs that have it for their last scores."""
        of_runs = [(row, read_json(self.folder / row["exp_id"] / VALIDATION, RunError, None)) for row in self.rows]
        return {row["exp_id"]: record for row, record in of_runs if record and record["step"] == row["step"]}

    @cached_property
    def diverged_ids(self) -> set[str]:
        """Ids of runs that failed because they diverged in their last attempt."""

        def is_end(event: Mapping[str, Any], run: SavedRun) -> bool:
            is_of_last_attempt = event.get("attempt") == run.status.get("attempt")
            return event["event"] == "divergence" and event.get("action") in ("stop", "rewind") and is_of_last_attempt

        runs = [SavedRun(self.folder / row["exp_id"]) for row in self.rows if row["state"] == "failed"]
        return {run.name for run in runs if any(is_end(event, run) for event in ledger.read(run.path))}

    @property
    def runs(self) -> list[SavedRun]:
        """The save directories."""
        return [SavedRun(self.folder / row["exp_id"]) for row in self.rows]


def families(rows: Sequence[Row], all_rows: Sequence[Row], folder: Path, seed: str = SEED) -> list[Family]:
    """`rows` grouped by their dicts without the seed. Parents that differ only in the seed count as equal.

    all_rows: every run of the folder, to look up parents.
    """
    by_id = {row["exp_id"]: row for row in (*all_rows, *rows)}

    @cache
    def digest(exp_id: str) -> str:
        row = by_id[exp_id]
        keys = [key for key in sorted(config_keys(row)) if key != seed]
        parents = {key: row[key] for key in keys if key.endswith("exp_id") and row[key] in by_id}
        values = [(key, digest(parents[key]) if key in parents else spell(row, key)) for key in keys]
        return hashlib.sha256(repr(values).encode()).hexdigest()

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(digest(row["exp_id"]), []).append(row)
    return [Family(members, folder) for members in groups.values()]


def require_same_evaluation(base: Family, candidate: Family, metric: str) -> list[str]:
    """Check that two families were evaluated on the same data with the same code, as far as `metric` depends on it.
    Returns warnings about facts that no run has recorded.

    Raises:
        ConfigError: a fact differs, within a family or between them. Names two runs and the fact.
    """
    metric = metric.replace("_ema", "")  # the same score of averaged weights
    warnings, per_token = [], metric != PER_BYTE
    rows = [(family, row) for family in (base, candidate) for row in family.rows]
    facts = {row["exp_id"]: _evaluation_facts(family, row, metric) for family, row in rows if row["state"] in FINISHED}
    for name in dict.fromkeys(name for of_run in facts.values() for name in of_run):
        if name == "tokenizer" and not per_token:
            continue
        of_runs = {run: each.get(name) for run, each in facts.items() if name in each or not name.startswith(CONTENT)}
        first_run, first = next(iter(of_runs.items()))
        for run, value in of_runs.items():
            if value != first:
                advice = (
                    "Compare val_bits_per_byte."
                    if name == "tokenizer"
                    else "Their scores are not comparable: run both with the same evaluation."
                )
                raise ConfigError(
                    f"{first_run} and {run}: the {name} differs: {_shorten(first)} and {_shorten(value)}. {advice}"
                )
        if first is None:
            warnings.append(f"the {name} is not recorded in these runs, so it was not compared.")
    data = [{key: row[key] for key in config_keys(row) if key.startswith("data.")} for _, row in rows]
    tokenizers = {of_run["tokenizer"] for of_run in facts.values()}
    is_same = all(each == data[0] for each in data) and len(tokenizers) == 1
    sizes = {
        run: sum(record.get("bytes", record["tokens"]))
        for run, record in (base.records | candidate.records).items()
        if "bytes" in record or (per_token and record["tokens"])
    }
    smallest, largest = (choose(sizes, key=lambda run: sizes[run], default="") for choose in (min, max))
    if sizes and sizes[largest] > (1 if is_same else _MAX_COVERAGE_RATIO) * sizes[smallest]:
        raise ConfigError(
            f"{smallest} and {largest}: the amount of validation text differs: {sizes[smallest]} and {sizes[largest]}. "
            "Use the same validation data in both."
        )
    return warnings


def _evaluation_facts(family: Family, row: Row, metric: str) -> dict[str, Any]:
    """The evaluation of a run by name; None for unknown facts."""
    run, record = SavedRun(family.folder / row["exp_id"]), family.records.get(row["exp_id"], {})
    inputs = recorded_inputs(run)
    settings = {
        key: row[key]
        for key in config_keys(row)
        if key.rpartition(".")[2].startswith("val_") or (metric not in LOSSES and key.split(".")[0] in _ANSWER_KEYS)
    }
    return {
        "evaluation code": evaluation_code(family, run),
        "validation data": record.get("data", inputs.get("data")),
        "settings of the evaluation": settings,
        "tokenizer": inputs.get("tokenizer"),
        **{name: value for name, value in inputs.items() if name.startswith(CONTENT)},
        **record.get("content", {}),
    }


def evaluation_code(family: Family, run: SavedRun) -> str | None:
    """Digest of the code of the last evaluation; of the last start if that is not recorded."""
    return family.records.get(run.name, {}).get("code") or run.env.get("evaluation_code")


def code_warnings(family: Family) -> list[str]:
    """A warning if runs of a family have different code, which no field of their dicts tells."""
    versions = {str(_code(run)) for run in family.runs}
    text = f"{family.rows[0]['exp_id']}: its seeds ran with {len(versions)} versions of the code."
    return [text] if len(versions) > 1 else []


def _shorten(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name or 'all'}: {_shorten(each)}" for name, each in value.items())
    text = "not recorded" if value is None else value[:12] if re.fullmatch("[0-9a-f]{64}", str(value)) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def differences(base: Family, candidate: Family, seed: str = SEED) -> dict[str, dict[str, list[Any]]]:
    """{"experiment", "code", "data"} -> {key: [values in the base, values in the candidate]}; only differences."""
    seeds = {row.get(seed): row for row in candidate.rows}
    one = next((row for row in base.rows if row.get(seed) in seeds), base.rows[0])
    other = seeds.get(one.get(seed), candidate.rows[0])
    keys = [key for key in dict.fromkeys([*config_keys(one), *config_keys(other)]) if key != seed]
    sections = {
        "experiment": {key: [one.get(key), other.get(key)] for key in keys if spell(one, key) != spell(other, key)}
    }
    for name, read in (("code", _code), ("data", recorded_inputs)):
        sides = [_merge(map(read, family.runs)) for family in (base, candidate)]
        changed_keys = [key for key in dict.fromkeys([*sides[0], *sides[1]]) if sides[0].get(key) != sides[1].get(key)]
        sections[name] = {key: [side.get(key) for side in sides] for key in changed_keys}
    return {name: changes for name, changes in sections.items() if changes}


def _merge(facts: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """All values of each key, without repetitions."""
    values: dict[str, list[Any]] = {}
    for of_run in facts:
        for key, value in of_run.items():
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return values


def _code(run: SavedRun) -> dict[str, Any]:
    """Commit, and the digest of the uncommitted changes at the last start; None without changes."""
    digest = hashlib.sha256(run.patch).hexdigest()[:12] if run.patch else None
    return {"commit": run.env.get("commit"), "uncommitted changes": digest}


def cost(family: Family) -> dict[str, float]:
    """Sums over the runs: "tokens", "flops" of the training, "seconds" of all attempts with evaluations. A value is
    missing if a run has not recorded it."""
    of_runs = [_run_cost(row, run.path) for row, run in zip(family.rows, family.runs, strict=True)]
    names = [name for name in ("tokens", "flops", "seconds") if all(name in of_run for of_run in of_runs)]
    return {name: sum(of_run[name] for of_run in of_runs) for name in names}


def _run_cost(row: Row, path: Path) -> dict[str, float]:
    first_step = row.get("model.step") or 0  # of a continuation, whose counts include its parent's
    totals = {"tokens": row["tokens"]} if isinstance(row.get("tokens"), int) and not first_step else {}
    try:
        entries = [entry for entry in jsonl_records.rows(path / PERF) if isinstance(entry.get("step"), int)]
    except UserError:
        return totals
    by_step = {entry["step"]: entry for entry in entries}  # a restart repeats steps
    flops = 0.0
    for before, step in pairwise([first_step, *sorted(by_step)]):
        if by_step[step].get("steps_per_second") and "model_flops_per_second" in by_step[step]:
            flops += by_step[step]["model_flops_per_second"] / by_step[step]["steps_per_second"] * (step - before)
    seconds = {"seconds": sum(entry.get("seconds", 0.0) for entry in entries)} if entries else {}
    return totals | seconds | ({"flops": flops} if flops else {})
