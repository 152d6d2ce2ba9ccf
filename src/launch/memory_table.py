"""The tables of `--dry-run --memory` and `--cost`: estimated GPU memory, duration and cost of each training."""

import json
import logging
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from src.errors import ConfigError, UserError
from src.experiments.config import Places
from src.runs import jsonl_records
from src.runs.plan import PlannedExperiment
from src.runs.store import PERF, RunStore, unknown_run
from src.support.command_line import aligned_lines

if TYPE_CHECKING:
    from src.runs.context import Options

PARTS = ("weights", "gradients", "optimizer", "copies", "activations", "logits")
"""Keys of `parts` in a memory plan."""
LOOP_SETTINGS = (
    *("steps", "budget", "sequences_per_step", "micro_batch", "optimizer", "label_smoothing", "z_loss", "precision"),
    *("groups", "layerwise_decay", "ema"),
)
"""Settings of the loop that a memory plan depends on."""


class PlanOfRuns(NamedTuple):
    """Experiments with equal plans."""

    items: list[PlannedExperiment]
    plan: Any
    """Their `MemoryPlan`."""

    @property
    def where(self) -> str:
        """Where the first one is, and the number of others."""
        more = f" and {len(self.items) - 1} more" if len(self.items) > 1 else ""
        return self.items[0].where + more


def plan_all(
    items: Sequence[PlannedExperiment], places: Places, machines: Mapping[str, Any]
) -> tuple[list[PlanOfRuns], list[str]]:
    """The plans, and error messages for experiments without a plan.

    Experiments that train nothing are left out, unless none trains.
    """
    groups: dict[str, list[PlannedExperiment]] = {}
    training_items = [item for item in items if item.exp.get("loop")]
    for item in training_items or items:
        groups.setdefault(_key(item), []).append(item)
    plans, mistakes = [], list[str]()
    logging.getLogger("src").setLevel(logging.WARNING)  # log messages of model building are for trainings
    for group in groups.values():
        recipe: Any = group[0].recipe
        try:
            plans.append(PlanOfRuns(group, recipe.plan_memory(places, **machines)))
        except UserError as error:
            mistakes += [f"{group[0].where}: {line}" for line in str(error).splitlines()]
    return plans, mistakes


def to_dicts(plans: Sequence[PlanOfRuns]) -> list[dict[str, Any]]:
    """The numbers of `table`."""
    names = ("parameters", "trained", "operations", "tokens_per_second", "hours")
    return [
        {
            "where": each.where,
            **{name: getattr(each.plan, name) for name in names},
            "bytes": {**each.plan.parts, "total": each.plan.total},
            "groups": each.plan.groups,
        }
        for each in plans
    ]


def costs(plans: Sequence[PlanOfRuns], gpus: int, options: "Options") -> list[dict[str, Any]]:
    """The cost of the runs of each plan together, and the last one of all: "where", "runs", "tokens", "operations",
    "gpu_hours" and "checkpoint_bytes" at the end of the runs. Unknown numbers are None."""
    rows: list[dict[str, Any]] = []
    for each in plans:
        plan, runs, checkpoints = each.plan, len(each.items), 0
        first_step = each.items[0].exp["model"].get("step") or 0  # of a continuation
        for loop in (item.exp["loop"] for item in each.items):
            intervals = options.save_intervals(loop["eval_every"])
            saved_steps = {step for interval in intervals for step in range(interval, plan.steps + 1, interval)}
            saved_steps |= {*loop.get("extra_eval_steps", ()), plan.steps}
            checkpoints += options.keep.count(sorted(step for step in saved_steps if step > first_step))
        scale = runs * (plan.steps - first_step) / plan.steps
        numbers = {
            "where": each.where,
            "runs": runs,
            "tokens": round(plan.tokens * scale),
            "operations": plan.operations and round(plan.operations * plan.steps * scale),
            "gpu_hours": plan.hours and plan.hours * gpus * scale,
            "checkpoint_bytes": plan.checkpoint_bytes * checkpoints,
        }
        rows.append(numbers)
    names = ("runs", "tokens", "operations", "gpu_hours", "checkpoint_bytes")
    total = {name: None if any(row[name] is None for row in rows) else sum(row[name] for row in rows) for name in names}
    return [*rows, {"where": "total", **total}] if len(rows) > 1 else rows


def cost_table(rows: Sequence[Mapping[str, Any]], machines: Mapping[str, Any]) -> list[str]:
    """The lines of `costs`; none without rows."""
    if not rows:
        return []

    units = {"tokens": 1e6, "operations": 1e15, "gpu_hours": 1.0, "checkpoint_bytes": 2**30}
    lines = [
        [row["where"], f"{row['runs']}", *(_cell(row[name], unit, ",.3g") for name, unit in units.items())]
        for row in rows
    ]
    return [
        f"Cost on {machines['gpus']} x {machines['gpu']} at {machines['mfu']:.1%} of the peak. Millions of tokens, for",
        "sequences of maximum length; GiB of the checkpoints that remain, at most; ?: unknown, see --memory.",
        *aligned_lines([["experiment", "runs", "M tokens", "PFLOP", "GPU hours", "checkpoints"], *lines]),
    ]


def read_mfu(text: str, runs: Path) -> float:
    """The share of the peak that --mfu states, or the median that a run has measured.

    Raises:
        ConfigError: it is neither a number up to 1 nor the start of one id in `runs`, or the run measured nothing.
        RunError: its measurements are damaged.
    """
    if re.fullmatch(r"0?\.\d+|1(\.0*)?", text) and float(text):
        return float(text)
    ids = RunStore(runs).ids(text)
    if len(ids) != 1:
        raise unknown_run(f"--mfu {text}", text, runs, ids, "expected a number above 0 and up to 1, or a run")
    values = [row["mfu"] for row in jsonl_records.rows(runs / ids[0] / PERF) if "mfu" in row]
    if not values:
        raise ConfigError(f"--mfu {text}: {runs / ids[0] / PERF} has no mfu. Name a run on a GPU, or a number.")
    return statistics.median(values)


def _key(item: PlannedExperiment) -> str:
    loop = item.exp.get("loop") or {}
    return json.dumps(
        [item.exp["recipe"], item.exp["model"], item.exp["data"], {name: loop.get(name) for name in LOOP_SETTINGS}],
        sort_keys=True,
    )


def _cells(plan: Any) -> list[str]:
    return [
        _cell(plan.parameters, 1e6, ",.1f"),
        _cell(plan.trained, 1e6, ",.1f"),
        *(_cell(plan.parts[part], 2**30, ".2f") for part in PARTS),
        _cell(plan.total, 2**30, ".2f"),
        _cell(plan.operations, 1e12, ",.3g"),
        _cell(plan.tokens_per_second, 1, ",.0f"),
        _cell(plan.hours, 1, ",.1f" if plan.hours and plan.hours >= 1 else ".2g"),
    ]


def _cell(number: float | None, unit: float, layout: str) -> str:
    """A number in a unit; "?" if it is unknown."""
    return "?" if number is None else f"{number / unit:{layout}}"


def table(plans: Sequence[PlanOfRuns], machines: Mapping[str, Any]) -> list[str]:
    """The lines of the table; none without plans."""
    if not plans:
        return []
    sharing = (
        f"ZeRO by {machines['deepspeed'].name}" if machines["deepspeed"] else "FSDP2" if machines["fsdp"] else "DDP"
    )
    kind = f"{machines['gpus']} x {machines['gpu']}" + (f", {sharing}" if machines["gpus"] > 1 else "")
    checkpointing = (
        f", {machines['gradient_checkpointing']} gradient checkpointing" if machines["gradient_checkpointing"] else ""
    )
    speed = f"tokens/s of all GPUs and hours at {machines['mfu']:.1%} of the peak"
    head = ["experiment", "parameters", "trained", *PARTS, "GiB", "TFLOP", "tokens/s", "hours"]
    groups = [[each.where, label, f"{size:,}"] for each in plans for label, size in each.plan.groups.items()]
    return [
        f"{kind}{checkpointing}. Parameters in millions; GiB per GPU, for sequences of maximum length;",
        f"TFLOP of a step (?: unknown for this model); {speed}",
        "(?: unknown TFLOP, or no known peak of this GPU for loop.precision, such as float32).",
        *aligned_lines([head, *([each.where, *_cells(each.plan)] for each in plans)]),
        *(aligned_lines([["experiment", "parameter group", "parameters"], *groups]) if groups else []),
    ]
