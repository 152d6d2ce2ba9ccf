# PYTHON_ARGCOMPLETE_OK
"""Check experiments, run them here, or submit them to a launcher.

python trainval.py --list                                        list the groups
python trainval.py -e crossattn_tiny --dry-run                   find all mistakes, without loading a model
torchrun --nproc-per-node 2 trainval.py -e crossattn_tiny        train a group, one experiment after another
python trainval.py -e crossattn_tiny -j local                    run each experiment as a job of a launcher
python trainval.py -e crossattn_tiny --job_option status         show the states; also logs, kill, retry, reset
"""

import argparse
import contextlib
import functools
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from src.errors import end_with_reader
from src.launch import arguments
from src.support import documents

ROOT = Path(__file__).resolve().parent
LOGGERS = ("trainval", "src")
log = logging.getLogger("trainval")


@end_with_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    with documents.scope():
        return run(arguments.parse(argv, __doc__ or "", ROOT))


def run(args: argparse.Namespace) -> int:
    """`act`, with errors and stops as messages and exit codes."""
    from src.errors import LaunchError, UserError
    from src.support import distributed

    logging.basicConfig(format="%(message)s")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if distributed.is_main() else logging.ERROR)
    try:
        return act(args)
    except UserError as error:
        # Each process reports a failed start: the launcher ends the remaining ones as soon as the first exits.
        if distributed.is_main() or isinstance(error, LaunchError):
            complain(str(error))
        kind, message, code = type(error).__name__, str(error), 1
    except KeyboardInterrupt:
        kind, message, code = "KeyboardInterrupt", "interrupted", 130
    except distributed.StopTraining as stopped:
        message = f"{stopped.reason.by}: stopped. The same command resumes from here."
        log.info(message)
        kind, code = "StopTraining", stopped.exit_code
    if distributed.is_main():
        documents.show_error(kind, message)
    return code


def complain(mistakes: str) -> None:
    """Print one line per mistake to stderr."""
    for line in mistakes.splitlines():
        print(f"error: {line}", file=sys.stderr)


def prefix_lines(error: Exception, where: str) -> str:
    """The lines of `error`, each starting with the place of the experiment."""
    return "\n".join(line if line.startswith(where) else f"{where}: {line}" for line in str(error).splitlines())


def act(args: argparse.Namespace) -> int:
    """List, check, submit or train."""
    from src.errors import ConfigError
    from src.experiments.config import Places
    from src.launch import actions, resources
    from src.runs import inputs, parents, plan
    from src.runs.store import RunStore
    from src.support import distributed

    arguments.check(args, distributed.world_size())
    if args.from_run:
        return repeat(args)
    groups = plan.read_groups()
    if args.list and not args.exp_group and not args.exp_id:
        all_items = plan.load_all(groups)
        rows = [[name, len(group), plan.describe_group(group, all_items)] for name, group in groups.items()]
        dicts = [dict(zip(("group", "experiments", "about"), row, strict=True)) for row in rows]
        head = ["group", "experiments", "recipe: model on data"]
        documents.show("trainval.groups/1", {"groups": dicts}, lambda: print_table([head, *rows]))
        return 0
    store = RunStore(args.savedir_base)
    selected = select(args, groups, store)
    # Other groups are needed only for parents; the selected groups too, if --set changed their experiments.
    other_groups = {
        name: group for name, group in groups.items() if args.set or args.steps or name not in args.exp_group
    }
    all_items = plan.load_all(other_groups) if any(parents.parent_ids(item.exp) for item in selected) else {}
    all_items |= {item.exp_id: item for item in selected}
    places = Places(args.data_path, args.savedir_base, {exp_id: item.exp for exp_id, item in all_items.items()})
    if args.list:
        differs = describe(selected) if len(selected) > 1 else {selected[0].exp_id: json.dumps(selected[0].exp)}
        rows = [[item.exp_id, item.where, differs[item.exp_id]] for item in selected]
        dicts = [dict(zip(("exp_id", "where", "differs"), row, strict=True)) for row in rows]
        content = [{**row, "exp": item.exp} for row, item in zip(dicts, selected, strict=True)]
        documents.show("trainval.experiments/1", {"experiments": content}, lambda: print_table(rows))
        return 0
    items = plan.add_parents(selected, all_items, args.with_parents)
    selected_ids = {item.exp_id for item in selected}
    if args.job_option in ("status", "logs", "kill", "throttle"):
        return look(args, items, places)
    target = (
        resources.load_named(args.job_scheduler, places.runs, [item.exp for item in items])
        if args.job_scheduler
        else None
    )
    pending_ids = actions.pending_parents(places.runs, items) if target else ()
    reset = selected_ids if args.reset or args.job_option == "reset" else ()
    problems = plan.find_problems(items, places, reset, pending_ids, args.micro_batch, target is None, store)
    saving = arguments.saving_options(args)
    for exp_id, lines in plan.find_unkept_steps(items, places, store, saving, reset).items():
        problems.setdefault(exp_id, []).extend(lines)
    for exp_id, line in inputs.find_changed_data(items, places, store, reset).items():
        if store[exp_id].state_or_damage != "done":
            problems.setdefault(exp_id, []).append(line)
        elif distributed.is_main():
            documents.warn([f"warning: {line}"])
    messages = plan.merge_problems(problems, all_items)
    if args.dry_run:
        memory = plan_memory(args, items, places) if args.memory or args.cost else None
        return show(items, problems, messages, store, memory, places)
    if problems:
        raise ConfigError("\n".join(messages))
    return submit(target, args, items, selected_ids, places) if target else train(args, items, selected_ids, places)


def print_table(rows: Sequence[Sequence[Any]]) -> None:
    """Print rows with aligned columns."""
    from src.support.command_line import aligned_lines

    for line in aligned_lines([list(map(str, row)) for row in rows]):
        print(line)


def repeat(args: argparse.Namespace) -> int:
    """Run an experiment again with the code of its run; returns the exit code of that training."""
    from src.operations import recorded_code
    from src.runs.store import SavedRun
    from src.tables.run_arguments import find_run

    run = SavedRun(find_run(args.from_run, args.savedir_base))
    more_options, remarks = recorded_code.recorded_options(args, run)
    documents.warn(remarks)
    options = [*arguments.child_arguments(args, run.name)[6:], *more_options]
    code = recorded_code.rerun(run, args.data_path, options, args.dry_run)
    folder = run.path.resolve().parent / recorded_code.FOLDER / run.name
    text = f"{run.name}  {'can be repeated' if args.dry_run else folder / 'runs' / run.name}"
    state = "new" if args.dry_run else "failed" if code else "done"
    experiments = [{"exp_id": run.name, "where": str(folder), "state": state}]
    documents.show("trainval.training/1", {"experiments": experiments}, lambda: print(text))
    return code


def describe(items: Sequence[Any]) -> dict[str, str]:
    """The values that differ between experiments of a group, by id."""
    from src.tables.results import describe_differences

    return describe_differences({item.exp_id: (item.group, item.exp) for item in items})


def select(args: argparse.Namespace, groups: Any, store: Any) -> list[Any]:
    """The experiments that the command line selects, with --set and --steps applied."""
    from src.experiments.grid import parse_assignments
    from src.runs import plan

    combinations = parse_assignments(args.set)
    if args.steps is not None:
        combinations = [[*assignments, ("loop.steps", args.steps)] for assignments in combinations]
    if args.exp_group:
        experiments = plan.load_combinations(groups, args.exp_group, combinations)
    else:
        item = plan.find(args.exp_id, plan.load_all(groups), args.savedir_base)
        group = {item.group: [item.with_operational]}
        experiments = [item]
        if combinations != [[]]:
            changed = plan.load_combinations(group, [item.group], combinations)
            experiments = [replace(each, groups=item.groups) for each in changed]
    return experiments if args.where is None else choose(experiments, args.where, store)


def choose(experiments: Sequence[Any], where: str, store: Any) -> list[Any]:
    """The experiments that match --where, by the keys of their dicts and `exp_id`, `group` and `state`."""
    from src.errors import ConfigError
    from src.experiments.config import flatten
    from src.tables import results

    def row(item: Any) -> results.Row:
        facts = {"exp_id": item.exp_id, "group": item.group, "state": store[item.exp_id].state_or_damage}
        return results.Row({**flatten(item.exp), **facts})

    selected_ids = {each["exp_id"] for each in results.filter_rows([row(item) for item in experiments], where)}
    if not selected_ids:
        raise ConfigError(f"--where: none of {len(experiments)} experiments matches {where!r}.")
    return [item for item in experiments if item.exp_id in selected_ids]


def show(
    items: Sequence[Any],
    problems: dict[str, list[str]],
    messages: Sequence[str],
    store: Any,
    memory: tuple[dict[str, Any], list[str], list[str]] | None,
    places: Any,
) -> int:
    """Print the plan, with the steps of budgets, and all problems; return exit code 1 if there is a problem. memory: of
    `plan_memory`."""
    states = {item.exp_id: store[item.exp_id].state_or_damage for item in items}
    steps = {
        item.exp_id: item.recipe.with_steps(places).loop.steps
        for item in items
        if (item.exp.get("loop") or {}).get("budget") and item.exp_id not in problems
    }
    done = sum(state == "done" and exp_id not in problems for exp_id, state in states.items())
    to_run = len(items) - len(problems) - done
    plans, lines, mistakes = memory or ({}, [], [])

    def write() -> None:
        for item in items:
            of_budget = f"  {steps[item.exp_id]} steps" if item.exp_id in steps else ""
            print(f"{item.exp_id}  {item.where:<30}  {states[item.exp_id]}{of_budget}")
        complain("\n".join(messages))
        not_ready = f", {len(problems)} that cannot run" if problems else ""
        print(f"{len(items)} experiment{'s' * (len(items) != 1)}: {done} done, {to_run} to run{not_ready}.")
        print("\n".join(lines), end="\n" * bool(lines))
        complain("\n".join(mistakes))

    errors = [mistake for line in (*messages, *mistakes) for mistake in documents.mistakes("ConfigError", line)]
    experiments = [
        {"exp_id": exp_id, "where": item.where, "state": states[exp_id], "can_run": exp_id not in problems}
        | ({"steps": steps[exp_id]} if exp_id in steps else {})
        for item in items
        for exp_id in [item.exp_id]
    ]
    counts = {"done": done, "to_run": to_run, "cannot_run": len(problems)}
    documents.show(
        "trainval.plan/1", {"experiments": experiments, **counts, "memory": [], "cost": [], **plans}, write, errors
    )
    return 1 if errors else 0


def plan_memory(
    args: argparse.Namespace, items: Sequence[Any], places: Any
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The estimated GPU memory, hours and cost of each training, the same as lines, and mistakes of failed
    estimates."""
    from src.launch import memory_table
    from src.runs.plan import merge_mistakes, replace_micro_batch

    machines = {
        name: getattr(args, name) for name in ("fsdp", "fsdp_sharded_gradients", "deepspeed", "gradient_checkpointing")
    }
    machines |= {"gpus": args.gpus or 1, "gpu": args.gpu or "H100"}
    machines["mfu"] = memory_table.read_mfu(args.mfu or "0.4", places.runs)
    plans, mistakes = memory_table.plan_all(
        [replace_micro_batch(item, args.micro_batch) for item in items], places, machines
    )
    costs = memory_table.costs(plans, machines["gpus"], arguments.saving_options(args)) if args.cost else []
    lines = memory_table.table(plans, machines) if args.memory else []
    content = {"memory": memory_table.to_dicts(plans) if args.memory else [], "cost": costs}
    return content, [*lines, *memory_table.cost_table(costs, machines)], merge_mistakes(mistakes)


def submit(target: Any, args: argparse.Namespace, items: Sequence[Any], selected_ids: set[str], places: Any) -> int:
    """Submit one job per experiment to the launcher. -r resets only `selected_ids`."""
    from src.launch import actions

    by_id = {item.exp_id: item for item in items}

    def command(exp_id: str) -> list[str]:
        return ["trainval.py", *arguments.child_arguments(args, exp_id), *by_id[exp_id].set_arguments]

    request = actions.Request(
        places.runs, items, selected_ids, ROOT, command, args.python_binary, args.reset, (places.data,)
    )
    job_ids = actions.run(request, target, args.job_option)
    show_jobs(args.job_option, job_ids, [item.exp_id for item in items])
    return 0


def show_jobs(action: str, job_ids: Mapping[str, str], exp_ids: Sequence[str]) -> None:
    """With --json, print the jobs that an action started or changed, and the experiments without one."""
    jobs = [{"exp_id": exp_id, "job_id": job_id} for exp_id, job_id in job_ids.items()]
    skipped_ids = [exp_id for exp_id in exp_ids if exp_id not in job_ids]
    documents.show("trainval.jobs/1", {"action": action, "jobs": jobs, "skipped": skipped_ids}, lambda: None)


def look(args: argparse.Namespace, items: Sequence[Any], places: Any) -> int:
    """Show the states or the logs of the experiments, or kill or throttle their jobs."""
    from src.launch import actions, logs, status
    from src.launch.tracking import ALIVE
    from src.runs.store import RunStore

    exp_ids = [item.exp_id for item in items]
    if args.job_option == "kill":
        show_jobs("kill", actions.kill(places.runs, exp_ids), exp_ids)
    elif args.job_option == "throttle":
        show_jobs("throttle", actions.throttle(places.runs, exp_ids, args.max_running), exp_ids)
    elif args.job_option == "logs" and args.json:
        documents.show("trainval.logs/1", {"lines": logs.last_lines(places.runs, exp_ids)}, lambda: None)
    elif args.job_option == "logs":
        for line in logs.follow(places.runs, exp_ids):
            print(line, flush=True)
    else:
        differs = describe(items)
        while True:
            rows = status.table(RunStore(places.runs), exp_ids)
            visible_rows = [row for row in rows if not args.state or row.state in args.state]
            if visible_rows:
                lines = [*status.format_table(visible_rows, differs), status.summarize(visible_rows)]
            else:
                lines = [f"No experiment has the state {' or '.join(args.state)}. {status.summarize(rows)}"]
            content = {"experiments": status.to_dicts(visible_rows, differs)}
            documents.show("trainval.status/1", content, functools.partial(print, "\n".join(lines), flush=True))
            if args.watch is None or not any(row.state in ALIVE or (row.doubt and row.job_id) for row in rows):
                break
            time.sleep(args.watch)
    return 0


def train(args: argparse.Namespace, items: Sequence[Any], selected_ids: set[str], places: Any) -> int:
    """Run the experiments here, one after another, in every process that torchrun started.

    -r resets `selected_ids`, not the parents that were added.
    """
    import torch  # noqa: F401  fails here if it is missing, before anything is written

    from src.errors import UserError
    from src.support import distributed

    options = arguments.training_options(args, distributed.world_size())
    failures: dict[str, tuple[str, str]] = {}
    with distributed.stoppable(), distributed.session(args.deterministic):
        for item in items:
            if any(
                distributed.all_gather_list([distributed.stop_requested()])
            ):  # signalled at the end of the previous experiment, too late for its loop
                raise distributed.agreed_stop(None)
            try:
                run_one(item, args.reset if item.exp_id in selected_ids else 0, places, options, args.micro_batch)
            except UserError as error:
                # The next experiment can start only if all ranks failed at the same point; this rank cannot know.
                if distributed.world_size() > 1 and not error.everywhere:
                    if not distributed.is_main():
                        complain(f"rank {distributed.rank()}: {error}")
                    raise
                message = prefix_lines(error, item.where)
                if distributed.is_main():
                    complain(message)
                failures[item.exp_id] = type(error).__name__, message
    lines = [f"{exp_id} ({message.splitlines()[0]})" for exp_id, (_, message) in failures.items()]
    if failures and len(items) > 1 and distributed.is_main():
        complain(f"{len(items) - len(failures)} done, {len(failures)} failed: {'; '.join(lines)}")
    if distributed.is_main():
        experiments = [
            {"exp_id": item.exp_id, "where": item.where, "state": "failed" if item.exp_id in failures else "done"}
            for item in items
        ]
        errors = [mistake for failure in failures.values() for mistake in documents.mistakes(*failure)]
        documents.show("trainval.training/1", {"experiments": experiments}, lambda: None, errors)
    return 1 if failures else 0


def run_one(item: Any, reset: int, places: Any, options: Any, micro_batch: int | None = None) -> None:
    """Train one experiment in its save directory; does nothing if it is done.
    micro_batch: replaces the experiment's value."""
    from src.errors import ConfigError
    from src.experiments.registry import resolved_dict
    from src.runs import parents, plan
    from src.runs.context import Run, log_to_file
    from src.runs.environment import describe
    from src.runs.run_dir import RunDir
    from src.runs.store import SavedRun
    from src.support import distributed, torch_settings

    run_dirs: list[RunDir] = []

    def begin() -> str:
        problems = parents.missing_parents(item.exp, places)
        if problems and (reset or SavedRun(places.runs / item.exp_id).state != "done"):
            raise ConfigError("\n".join(problems))
        facts = {
            "groups": list(item.groups),
            **describe(sys.argv, (places.runs, places.data)),
            "torch": torch_settings.describe(),
        }
        recipe = item.recipe.with_steps(places)
        resolved = resolved_dict(recipe, key="recipe")
        run_dirs.append(RunDir.open(places.runs, item.exp, resolved, recipe=recipe, reset=reset, facts=facts))
        return run_dirs[0].saved_run.status["state"]

    distributed.defer_stop()  # until `carry_out` handles the status
    state = distributed.broadcast_from_rank0(begin)
    run_dir = run_dirs[0] if run_dirs else RunDir.attach(places.runs / item.exp_id)
    with (
        run_dir,
        torch_settings.flight_recorder_in(run_dir.logs),
        log_to_file(run_dir.logs, LOGGERS if distributed.is_main() else ()),
    ):
        if state == "done":
            log.info("%s %s: already done.", item.where, item.exp_id)
        else:
            log.info("%s %s", item.where, run_dir.path)
            carry_out(plan.replace_micro_batch(item, micro_batch), Run(run_dir, places, options))


def carry_out(item: Any, run: Any) -> None:
    """Run the recipe and record its status, also after errors and signals."""
    from src.errors import UserError
    from src.support import distributed

    def mark(state: str, **facts: Any) -> None:
        if distributed.is_main():
            with contextlib.suppress(
                UserError
            ):  # with a full disk or a lost lease, the original error is more important
                run.dir.set_status(state, **facts)

    try:
        try:
            distributed.allow_stop()
            item.recipe.with_steps(run.places).run(run)
        finally:
            distributed.defer_stop()  # no signal prevents writing the status
    except KeyboardInterrupt:
        mark("stopped", reason="interrupted by the user", stopped_by="person")
        raise
    except distributed.StopTraining as stopped:
        at, step = (
            ("while it was starting", {})
            if stopped.step is None
            else (f"at step {stopped.step}", {"step": stopped.step})
        )
        mark(
            "stopped",
            reason=f"{stopped.reason.by}: stopped {at}; restart it to resume",
            stopped_by=stopped.reason.kind,
            **step,
        )
        raise
    except UserError as error:
        mark("failed", reason=str(error))
        raise
    except Exception as error:
        request = distributed.stop_requested()
        if (
            request and distributed.world_size() > 1
        ):  # another rank exited at the same signal while this one waited for it
            mark(
                "stopped",
                reason=f"{request.by}: stopped while it was starting; restart it to resume",
                stopped_by=request.kind,
            )
            raise distributed.StopTraining(request) from error
        mark("failed", reason=f"{type(error).__name__}: {error}")
        raise
    if distributed.is_main():
        run.dir.set_status("done")
        log.info("done: %s", run.path)


if __name__ == "__main__":
    sys.exit(main())
