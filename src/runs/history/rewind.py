"""Plan a rewind to an earlier checkpoint, a roll-back of evaluations, or the undo of either. See `archive`."""

from collections.abc import Sequence
from pathlib import Path

from src.errors import CheckpointError, RunError
from src.files import defect, read_json
from src.runs import ledger
from src.runs.checkpoints import checkpoints, retention
from src.runs.environment import now
from src.runs.history import archive, branches, journal
from src.runs.history.archive import BEST, WANDB, Plan, PlanBuilder, next_number
from src.runs.history.branches import Branch
from src.runs.scores import SCORES, Scores
from src.runs.store import STATUS, SavedRun

EVALUATIONS = "evaluations*.jsonl"


def plan(run: Path, branch: Branch, why: str = "", new_wandb: bool = False) -> Plan:
    """Plan a rewind to the checkpoint of `branch.from_step`.
    `branch.number` must be `next_number(run)`. Changes nothing.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        RunError: another experiment needs the checkpoint of a later step.
        RunError, DataError: a file of the run is damaged.
    """
    step = branch.from_step
    _require_no_later_children(run, step)
    target = _complete_checkpoint(run, step)
    status = SavedRun(run).status
    Scores(run / SCORES, read_only=True).rows()  # fails here, before any change, if the scores are damaged
    before = branches.read(run)
    if new_wandb:
        branch = branch.model_copy(update={"wandb": f"{run.name}-branch-{branch.number}"})
    after = branches.chain(before, branch)
    builder = PlanBuilder(run, branch.number)
    every = [path.name for path in checkpoints.list_all(run)]
    stay = [name for name in every if checkpoints.step_of(Path(name)) <= step]
    for name in archive.changeable_files(run):
        builder.archive_file(name)
    for name in stay:
        builder.add_step("link", f"{builder.folder}/before/checkpoints/{name}", **{"from": f"checkpoints/{name}"})
    for name in reversed(every[len(stay) :]):
        builder.archive_checkpoint(name)
    for name in archive.files_of_rows(run):
        builder.archive_rows_after(name, step)
    best, warnings = _best_step(run, target)
    if best is None:
        builder.add_step("remove", BEST)
    else:
        builder.add_step("write", BEST, json={"step": best})
    builder.add_step("write", branches.FILE, json={"branches": [item.model_dump(mode="json") for item in after]})
    if branch.wandb:
        builder.add_step(
            "write", WANDB, json={"id": branch.wandb, "forked_from": {"run": _wandb_id(run), "step": step}}
        )
    reason = f"rewound to step {step} by {ledger.user_and_host()}{f' ({why})' if why else ''}; restart it to resume"
    status_facts = {key: value for key, value in status.items() if key != "loss"}
    builder.add_step(
        "conclude", STATUS, json={**status_facts, "state": "stopped", "step": step, "reason": reason, "updated": now()}
    )
    dropped_numbers = [item.number for item in before if item not in after]
    facts = {
        "why": why,
        "step": step,
        "was_at": status.get("step"),
        "branch": branch.model_dump(mode="json", exclude_none=True),
    }
    return builder.build(
        "rewind",
        facts,
        every,
        [f"to step {step}: {describe(branch)}", *warnings, *_warnings(run, branch, builder, dropped_numbers)],
    )


def plan_evaluations(run: Path, step: int, why: str = "") -> Plan:
    """Plan to move the rows after `step` out of the evaluation files. Changes nothing.

    Raises:
        RunError: there are no such rows, or a file cannot be read.
    """
    builder = PlanBuilder(run, next_number(run))
    for path in sorted(run.glob(EVALUATIONS)):
        builder.archive_file(path.name)
    for name in list(builder.files):
        builder.archive_rows_after(name, step)
    if not builder.archived_rows:
        raise RunError(
            f"{run}: {EVALUATIONS} have no rows after step {step}, so there is nothing to roll back. "
            "Name an earlier step."
        )
    return builder.build("rollback-evals", {"why": why, "step": step}, None, [f"evaluations to step {step}"])


def plan_undo(run: Path, why: str = "") -> Plan:
    """Plan to restore the run from before the last rewind or roll-back that was not undone. Changes nothing.

    Later training is archived as a new branch.

    Raises:
        RunError: there is nothing to undo, or a required file is missing.
    """
    done = [record for record in archive.records(run) if record["event"] != "undo"]
    undoable = [record for record in done if not record.get("undone")]
    if not undoable:
        last = f" The last {done[-1]['event']} was undone at {done[-1]['undone']}." if done else ""
        raise RunError(f"{run}: there is nothing to undo.{last}")
    record = undoable[-1]
    builder, old = PlanBuilder(run, next_number(run)), f"{archive.FOLDER}/branch-{record['number']}"
    files, checkpoint_hashes = record["before"]["files"], record["before"]["checkpoints"]
    every = [path.name for path in checkpoints.list_all(run)]
    file_names = sorted(files) if checkpoint_hashes is None else sorted({*files, *archive.changeable_files(run)})
    for name in file_names:
        if (run / name).is_file():
            builder.archive_file(name)
    if checkpoint_hashes is not None:
        _restore_checkpoints(builder, old, checkpoint_hashes, every)
    for name in file_names:
        if name not in files:
            builder.add_step("remove", name)
        elif not (run / old / "before" / name).is_file():
            raise RunError(
                f"{run / old / 'before' / name}: missing, so the run cannot be restored. Restore this file from a copy."
            )
        else:
            builder.add_step("put", name, **{"from": f"{old}/before/{name}"})
    builder.add_step("write", f"{old}/{archive.RECORD}", json={**record, "undone": now()})
    messages = [
        f"to the state before the {record['event']} to step {record['step']} by {record['who']} at {record['when']}"
    ]
    facts = {"why": why, "step": record["step"], "undoes": record["number"]}
    return builder.build("undo", facts, None if checkpoint_hashes is None else every, messages)


def describe(branch: Branch) -> str:
    """Description of the overrides of a branch."""
    rate = branch.learning_rate
    data_texts = {"same": "the same data", "reshuffle": "the rest of the epoch in another order"}
    words = [data_texts.get(branch.data, f"{branch.skipped_steps} steps of data skipped")]
    if rate is not None and rate.factor is not None:
        words.append(f"learning rate x{rate.factor:g}")
    elif rate is not None and rate.value is not None:
        words.append(f"learning rate {rate.value:g}, then the schedule's shape")
    elif rate is not None:
        words.append(f"learning rate 0 for {rate.hold_steps} steps")
    if branch.deny_list:
        words.append(
            f"without {len(branch.deny_list)} denied: "
            f"{', '.join(branch.deny_list[:3])}{' ...' if len(branch.deny_list) > 3 else ''}"
        )
    if branch.reset_optimizer:
        words.append("the optimizer's moments are reset")
    return ", ".join([*words, *([f"Weights & Biases run {branch.wandb}"] if branch.wandb else [])])


def _restore_checkpoints(
    builder: PlanBuilder, old: str, checkpoint_hashes: dict[str, str | None], every: Sequence[str]
) -> None:
    """Archive later checkpoints first, then restore earlier ones: both can have a checkpoint of the same step."""
    run = builder.run
    for name in every:
        was_moved = (run / old / "checkpoints" / name).is_dir()
        if (
            was_moved
            or name not in checkpoint_hashes
            or journal.manifest_hash(run / "checkpoints" / name) != checkpoint_hashes[name]
        ):
            builder.archive_checkpoint(name)
    for name in checkpoint_hashes:
        if name in every and name not in builder.moved_checkpoints:
            continue
        places = {"move": f"{old}/checkpoints/{name}", "link": f"{old}/before/checkpoints/{name}"}
        source = next(((do, place) for do, place in places.items() if (run / place).is_dir()), None)
        if source is None:
            raise RunError(
                f"{run / places['move']}: missing, so the run cannot be restored. Restore this folder from a copy."
            )
        builder.add_step(source[0], f"checkpoints/{name}", **{"from": source[1]})


def _require_no_later_children(run: Path, step: int) -> None:
    """Raise RunError if a rewind to `step` would move a checkpoint that another experiment continues or evaluates."""
    if later_steps := [each for each in retention.read_continued(run) if each > step]:
        raise RunError(
            f"{run / retention.CHILD_STEPS}: other experiments started from step {max(later_steps)}, and a rewind to "
            f"step {step} would move its checkpoint. Rewind to step {max(later_steps)} or later. If these experiments "
            "are no longer needed, remove the step from the file."
        )


def _complete_checkpoint(run: Path, step: int) -> Path:
    target = checkpoints.folder(run, step)
    if not target.is_dir():
        complete_steps = [
            str(checkpoints.step_of(path)) for path in checkpoints.list_all(run) if defect(path, hashes=False) is None
        ]
        elsewhere = sorted((run / archive.FOLDER).glob(f"branch-*/checkpoints/{target.name}"))
        hint = f" {elsewhere[-1]} is on an abandoned branch: `undo` restores it." if elsewhere else ""
        raise CheckpointError(
            f"--to {step}: no such checkpoint in {run}. There are: {', '.join(complete_steps) or 'none'}.{hint}"
        )
    if (run / "checkpoints").stat().st_dev != run.stat().st_dev:
        raise RunError(
            f"{run / 'checkpoints'}: a link to another file system, so checkpoints cannot be moved atomically. "
            "Replace the link by the folder itself."
        )
    if problem := defect(target):
        raise CheckpointError(f"{target}: damaged ({problem}). Choose another step.")
    return target


def _best_step(run: Path, target: Path) -> tuple[int | None, list[str]]:
    """The best step according to the checkpoint `target` (None if unknown or missing), and warnings."""
    state = read_json(target / "state.json", CheckpointError, {})
    selection = state.get("selection") if isinstance(state, dict) else None
    best = selection.get("best_step") if isinstance(selection, dict) else None
    if type(best) is not int:
        return None, []
    if problem := defect(checkpoints.folder(run, best), hashes=False):
        return None, [
            (
                f"the best checkpoint at that time, step {best}, is missing ({problem}); "
                "no checkpoint is marked best until a better one"
            )
        ]
    return best, []


def _wandb_id(run: Path) -> str:
    content = read_json(run / WANDB, RunError, None)
    return content["id"] if isinstance(content, dict) and isinstance(content.get("id"), str) else run.name


def _warnings(run: Path, branch: Branch, builder: PlanBuilder, dropped_numbers: Sequence[int]) -> list[str]:
    lines = []
    if dropped_numbers:
        lines.append(
            f"branch {', '.join(map(str, dropped_numbers))} started here or later, so its changes no longer apply"
        )
    if builder.moved_checkpoints and run.name in {name for name, _ in retention.needed_by_children(run.parent)[0]}:
        lines.append("another experiment starts from this run, and will start from a different checkpoint")
    if (run / WANDB).exists() and not branch.wandb:
        lines.append(
            "Weights & Biases accepts each step once: without --new-wandb-run, repeated steps are not shown there"
        )
    return lines
