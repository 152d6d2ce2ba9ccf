"""The command line: check experiments, run them here, or hand them to a launcher.

python trainval.py --list                                        what there is
python trainval.py -e crossattn_tiny --dry-run                   every mistake, before anything starts
torchrun --nproc-per-node 2 trainval.py -e crossattn_tiny        train a group, one experiment after another
python trainval.py -e crossattn_tiny -j local                    one process per experiment, by a launcher of job_configs.py
"""

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
LOGGERS = ("trainval", "src")
log = logging.getLogger("trainval")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, by haven's names where haven has them."""
    parser = argparse.ArgumentParser(
        prog="trainval.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("-e", "--exp_group", "--exp_group_list", nargs="+", default=[], metavar="GROUP", help="groups of exp_configs.py")
    what.add_argument("--exp_id", metavar="ID", help="one experiment, by the 32 characters that name its save directory")
    what.add_argument("--set", action="append", default=[], metavar="a.b=value", help="change a value in each experiment (another id)")
    what.add_argument("--steps", type=int, metavar="N", help="short for --set loop.steps=N")
    what.add_argument("--with-parents", "--with_parents", action="store_true", help="first run the experiments that these start from")
    what.add_argument("--list", action="store_true", help="print the groups, or the experiments of -e, and exit")
    what.add_argument("--dry-run", "--dry_run", action="store_true", help="check everything that can be checked, print the plan, and exit")
    where = parser.add_argument_group("where and how")
    where.add_argument("-sb", "--savedir_base", type=Path, default=ROOT / "results" / "runs", metavar="DIR", help="save directories")
    where.add_argument("--data_path", type=Path, default=ROOT / "results" / "data", metavar="DIR", help="prepared data sets")
    where.add_argument("-r", "--reset", type=int, choices=(0, 1), default=0, help="1: back up what there is and start over")
    where.add_argument("--log_every", type=int, metavar="N", help="steps between score rows and checkpoints (default: each evaluation)")
    where.add_argument(
        "-j", "--j", "--job_scheduler", dest="job_scheduler", metavar="NAME", help="a launcher of job_configs.py; none: run here"
    )
    where.add_argument("--python_binary", metavar="COMMAND", help='with -j: "torchrun --nproc-per-node NGPUS"; NGPUS is filled in there')
    where.add_argument("--deepspeed", type=Path, metavar="JSON", help="DeepSpeed configuration")
    logs = parser.add_argument_group("Weights & Biases (offline unless entity and project are given)")
    logs.add_argument("--wandb_entity_name", metavar="NAME")
    logs.add_argument("--wandb_project_name", metavar="NAME")
    logs.add_argument("--wandb_run_name", metavar="NAME")
    logs.add_argument("--wandb_log_gradients", nargs="?", type=_flag, const=True, default=False, metavar="true|false")
    return parser.parse_args(argv)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() == "true"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = parse(argv)
    from src import distributed
    from src.errors import UserError

    logging.basicConfig(format="%(message)s")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if distributed.is_main() else logging.ERROR)
    try:
        return act(args)
    except UserError as error:
        if distributed.is_main():
            complain(error)
        return 1
    except KeyboardInterrupt:
        return 130


def complain(error: Exception) -> None:
    """One line for each mistake."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)


def act(args: argparse.Namespace) -> int:
    """List, check, submit or train."""
    from src.config import Places
    from src.experiments import plan, references

    check_arguments(args)
    groups = read_groups()
    if args.list and not args.exp_group:
        for name, experiments in groups.items():
            print(f"{name}  {len(experiments)}")
        return 0
    selected = select(args, groups)
    # Most of exp_configs.py is not needed: other groups only where these start from experiments of theirs.
    lineage = any(references.parents(item.exp) for item in selected)
    known = (
        plan.known({name: group for name, group in groups.items() if args.set or args.steps or name not in args.exp_group})
        if lineage
        else {}
    )
    known |= {item.exp_id: item for item in selected}
    places = Places(args.data_path, args.savedir_base, {exp_id: item.exp for exp_id, item in known.items()})
    if args.list:
        for item in selected:
            print(f"{item.exp_id}  {item.where}  {json.dumps(item.exp)}")
        return 0
    planned = plan.with_parents(selected, known, args.with_parents)
    lacks = plan.problems(planned, places)
    if args.dry_run:
        return show(planned, lacks, places)
    if args.job_scheduler:
        return submit(args, planned, lacks, places)
    return train(args, planned, lacks, places)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what would be ignored."""
    from src.errors import ConfigError, LaunchError

    if args.job_scheduler in ("None", "0"):
        args.job_scheduler = None
    if not args.list and not args.exp_group and not args.exp_id:
        raise ConfigError("nothing to run: name a group with -e, or an experiment with --exp_id. --list shows the groups.")
    if args.exp_group and args.exp_id:
        raise ConfigError("-e and --exp_id: give one of them.")
    if args.python_binary and not args.job_scheduler:
        raise ConfigError("--python_binary: only launched jobs use it. Add -j NAME, or start trainval.py with that command itself.")
    if args.log_every is not None and args.log_every < 1:
        raise ConfigError(f"--log_every: expected a number of steps >= 1, got {args.log_every}.")
    if args.deepspeed:
        raise LaunchError("--deepspeed: this version trains with PyTorch's data parallelism alone. Leave the option out.")


def read_groups() -> dict[str, Any]:
    """EXP_GROUPS of exp_configs.py.

    Raises:
        ConfigError: the file does not run; names the line.
    """
    import traceback

    from src.errors import ConfigError

    try:
        from exp_configs import EXP_GROUPS
    except ConfigError as error:
        raise ConfigError(f"exp_configs.py: {error}") from None
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from None
    except Exception as error:  # noqa: BLE001  the file is the user's: whatever it raises is reported with its line
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(f"{at.filename}:{at.lineno}: {type(error).__name__}: {error}") from None
    return EXP_GROUPS


def select(args: argparse.Namespace, groups: Any) -> list[Any]:
    """The experiments that the command line names, with --set and --steps made in them."""
    from src.experiments import plan
    from src.experiments.grid import parse_assignment

    assignments = [parse_assignment(text) for text in args.set]
    if args.steps is not None:
        assignments.append(("loop.steps", args.steps))
    if args.exp_group:
        return plan.load_groups(groups, args.exp_group, assignments)
    item = plan.find(args.exp_id, plan.known(groups), args.savedir_base)
    return plan.load_groups({item.group: [item.exp]}, [item.group], assignments) if assignments else [item]


def show(planned: Sequence[Any], lacks: dict[str, list[str]], places: Any) -> int:
    """Print the plan and all that stands in its way; exit code 1 where something does."""
    from src.experiments.saved import state_of

    for item in planned:
        print(f"{item.exp_id}  {item.where:<30}  {state_of(places.runs / item.exp_id)}")
    for messages in lacks.values():
        for message in messages:
            print(f"error: {message}", file=sys.stderr)
    print(f"{len(planned)} experiments, {len(planned) - len(lacks)} ready to run.")
    return 1 if lacks else 0


def submit(args: argparse.Namespace, planned: Sequence[Any], lacks: dict[str, list[str]], places: Any) -> int:
    """Hand one job per experiment to the launcher called by -j."""
    import job_configs
    from src import files, registry
    from src.config import unknown
    from src.errors import ConfigError
    from src.experiments import references, saved
    from src.launch.command import Job

    name = args.job_scheduler
    if name not in job_configs.JOB_CONFIGS:
        raise unknown("job config", name, job_configs.JOB_CONFIGS, "-j")
    try:
        launcher = registry.bind(registry.LAUNCHERS, job_configs.JOB_CONFIGS[name], key="launcher")
    except registry.Problems as error:
        raise ConfigError("\n".join(f"JOB_CONFIGS[{name!r}].{path}: {text}" for path, text in error.found)) from None
    refuse(lacks)
    jobs = []
    for item in planned:
        run = places.runs / item.exp_id
        if not (run / saved.EXP_DICT).exists():  # the job finds its experiment there, as haven's jobs do
            with files.writing(run):
                run.mkdir(parents=True, exist_ok=True)
            files.write_json(run / saved.EXP_DICT, item.exp)
        saved.join_groups(run, item.groups)
        arguments = ("trainval.py", *child_arguments(args, item.exp_id))
        jobs.append(Job(item.exp_id, arguments, ROOT, args.python_binary, after=tuple(references.parents(item.exp))))
    launcher(jobs, places.runs / "logs")
    return 0


def child_arguments(args: argparse.Namespace, exp_id: str) -> list[str]:
    """The command line of one launched experiment."""
    child = ["--exp_id", exp_id, "-sb", str(args.savedir_base.resolve()), "--data_path", str(args.data_path.resolve())]
    child += ["-r", str(args.reset)]
    for name in ("log_every", "wandb_entity_name", "wandb_project_name", "wandb_run_name"):
        if getattr(args, name) is not None:
            child += [f"--{name}", str(getattr(args, name))]
    return [*child, "--wandb_log_gradients"] if args.wandb_log_gradients else child


def refuse(lacks: dict[str, list[str]]) -> None:
    """Raises ConfigError with all that stands in the way of the plan."""
    from src.errors import ConfigError

    if lacks:
        raise ConfigError("\n".join(message for messages in lacks.values() for message in messages))


def train(args: argparse.Namespace, planned: Sequence[Any], lacks: dict[str, list[str]], places: Any) -> int:
    """Run the plan here, one experiment after another; every process that torchrun started comes through here."""
    from src import distributed
    from src.errors import UserError
    from src.experiments.run import Options, Wandb

    refuse(lacks)
    wanted = args.wandb_entity_name or args.wandb_project_name or args.wandb_run_name
    wandb = Wandb(args.wandb_entity_name, args.wandb_project_name, args.wandb_run_name, args.wandb_log_gradients) if wanted else None
    options = Options(args.log_every, wandb)
    failed = 0
    with distributed.session():
        for item in planned:
            try:
                run_one(item, args.reset, places, options)
            except UserError as error:
                # Alone, go on with the next experiment. Among others, this process cannot know how far they are: all end.
                if distributed.world_size() > 1:
                    raise
                complain(error)
                failed += 1
    return 1 if failed else 0


def run_one(item: Any, reset: int, places: Any, options: Any) -> None:
    """Train one experiment in its save directory; a finished one is left as it is."""
    from src import distributed
    from src.errors import ConfigError
    from src.experiments import references
    from src.experiments.environment import describe
    from src.experiments.run import Run
    from src.experiments.rundir import RunDir
    from src.registry import resolved

    opened: list[RunDir] = []

    def begin() -> str:
        lacks = references.missing(item.exp, places)
        if lacks:
            raise ConfigError("\n".join(f"{item.where}: {lack}" for lack in lacks))
        facts = {"groups": list(item.groups), **describe(sys.argv)}
        opened.append(RunDir.open(places.runs, item.exp, resolved(item.recipe, key="recipe"), reset=reset, facts=facts))
        return opened[0].status()["state"]

    state = distributed.from_main(begin)
    run_dir = opened[0] if opened else RunDir.attach(places.runs / item.exp_id)
    with run_dir, written_log(run_dir):
        if state == "done":
            log.info("%s %s: done already.", item.where, item.exp_id)
        else:
            log.info("%s %s", item.where, run_dir.path)
            carry_out(item, Run(run_dir, places, options))


@contextlib.contextmanager
def written_log(run_dir: Any) -> Iterator[None]:
    """Append what rank 0 logs to logs/train.log of the save directory."""
    from src import distributed
    from src.files import writing

    if not distributed.is_main():
        yield
        return
    with writing(run_dir.logs):
        run_dir.logs.mkdir(exist_ok=True)
        handler = logging.FileHandler(run_dir.logs / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(handler)
        handler.close()


def carry_out(item: Any, run: Any) -> None:
    """Call the recipe and keep the status true, whatever happens."""
    from src import distributed
    from src.errors import UserError

    def mark(state: str, **facts: Any) -> None:
        if distributed.is_main():
            run.dir.set_status(state, **facts)

    try:
        item.recipe(run)
    except KeyboardInterrupt:
        mark("stopped", reason="interrupted by the user")
        raise
    except UserError as error:
        mark("failed", reason=str(error))
        raise
    except Exception as error:
        mark("failed", reason=f"{type(error).__name__}: {error}")
        raise
    mark("done")


if __name__ == "__main__":
    sys.exit(main())
