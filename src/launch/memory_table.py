"""The table of `--dry-run --memory`: estimated GPU memory and duration of each training."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from src.errors import UserError
from src.experiments.config import Places
from src.runs.plan import PlannedExperiment
from src.support.command_line import aligned_lines

PARTS = ("weights", "gradients", "optimizer", "copies", "activations", "logits")
"""Keys of `parts` in a memory plan."""
LOOP_SETTINGS = (
    *("steps", "budget", "sequences_per_step", "micro_batch", "optimizer", "label_smoothing", "z_loss", "precision"),
    *("groups", "layerwise_decay"),
)
"""Settings of the loop that a memory plan depends on."""


def plan_all(
    items: Sequence[PlannedExperiment], places: Places, machines: Mapping[str, Any]
) -> tuple[list[tuple[str, Any]], list[str]]:
    """(experiments, their `MemoryPlan`), and error messages for experiments without a plan.

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
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            plans.append((group[0].where + more, recipe.plan_memory(places, **machines)))
        except UserError as error:
            mistakes += [f"{group[0].where}: {line}" for line in str(error).splitlines()]
    return plans, mistakes


def to_dicts(plans: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of `table`."""
    names = ("parameters", "trained", "operations", "tokens_per_second", "hours")
    return [
        {
            "where": where,
            **{name: getattr(plan, name) for name in names},
            "bytes": {**plan.parts, "total": plan.total},
            "groups": plan.groups,
        }
        for where, plan in plans
    ]


def _key(item: PlannedExperiment) -> str:
    loop = item.exp.get("loop") or {}
    return json.dumps(
        [item.exp["recipe"], item.exp["model"], item.exp["data"], {name: loop.get(name) for name in LOOP_SETTINGS}],
        sort_keys=True,
    )


def _cells(plan: Any) -> list[str]:
    numbers = [*(plan.parts[part] for part in PARTS), plan.total]
    operations = "?" if plan.operations is None else f"{plan.operations / 1e12:,.3g}"
    speed = "?" if plan.tokens_per_second is None else f"{plan.tokens_per_second:,.0f}"
    hours = "?" if plan.hours is None else f"{plan.hours:,.1f}" if plan.hours >= 1 else f"{plan.hours:.2g}"
    return [
        _count(plan.parameters),
        _count(plan.trained),
        *(f"{number / 2**30:.2f}" for number in numbers),
        operations,
        speed,
        hours,
    ]


def _count(parameters: int) -> str:
    """Parameters in millions."""
    return f"{parameters / 1e6:,.1f}"


def table(plans: Sequence[tuple[str, Any]], machines: Mapping[str, Any]) -> list[str]:
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
    head = ["experiment", "parameters", "trained", *PARTS, "GiB", "TFLOP", "tokens/s", "hours"]
    groups = [[where, label, f"{size:,}"] for where, plan in plans for label, size in plan.groups.items()]
    return [
        (f"{kind}{checkpointing}. Parameters in millions; GiB per GPU, for sequences of maximum length;"),
        "TFLOP of a step (?: unknown for this model); tokens/s of all GPUs and hours at 40 % of their peak",
        "(?: unknown TFLOP, or no known peak of this GPU for loop.precision, such as float32).",
        *aligned_lines([head, *([where, *_cells(plan)] for where, plan in plans)]),
        *(aligned_lines([["experiment", "parameter group", "parameters"], *groups]) if groups else []),
    ]
