"""The arguments of trainval.py: parsing, checks, and the options of a training."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from src.errors import ConfigError
from src.support.command_line import parse_arguments, require_at_least
from src.support.torch_settings import GRADIENT_CHECKPOINTING

if TYPE_CHECKING:  # --help must not wait for this import
    from src.runs.context import Options

STATES = ("never", "queued", "running", "done", "failed", "stopped", "lost", "unknown")
"""States of an experiment in src/launch/status.py."""
JOB_OPTIONS = ("run", "status", "logs", "kill", "reset", "retry", "throttle")
PASSED_ON = (
    *(
        "log_every",
        "save_every",
        "stop_after",
        "max_host_memory",
        "num_workers",
        "micro_batch",
        "statistics_every",
        "profile",
    ),
    *("keep_last", "keep_every", "keep_best", "fsdp_replicas", "gradient_checkpointing"),
)
"""Arguments passed on to launched experiments, in addition to those for Weights & Biases and for sharded models."""
LEAST = {
    0: ("max_running", "statistics_every", "profile", "num_workers"),
    1: ("log_every", "save_every", "keep_last", "keep_every", "keep_best", "fsdp_replicas", "gpus"),
}
"""Minimum value -> numeric arguments with this minimum."""
SWITCHES = ("fsdp", "fsdp_sharded_gradients", "offload_activations", "deterministic", "wandb_log_gradients")
"""Switches passed on to launched experiments."""


def parse(argv: Sequence[str] | None, about: str, root: Path) -> argparse.Namespace:
    """The arguments. about: the text of --help. root: of the project."""
    return parse_arguments(make_parser(about, root), argv, has_json=True)


def make_parser(about: str, root: Path) -> argparse.ArgumentParser:
    """The parser for `parse`. Argument names follow haven where haven has the same argument."""
    parser = argparse.ArgumentParser(
        prog="trainval.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_argument_group("what to run")
    groups = what.add_argument(
        "-e",
        "--exp_group",
        "--exp_group_list",
        nargs="+",
        default=[],
        metavar="GROUP",
        help="groups of exp_configs.py, or GROUP[3]",
    )
    groups.completer = _complete_names("exp_configs", "EXP_GROUPS")  # type: ignore[attr-defined]  argcomplete's
    what.add_argument(
        "--exp_id", metavar="ID", help="one experiment, by its id (the name of its save directory) or a prefix of it"
    )
    what.add_argument(
        "--from-run",
        "--from_run",
        metavar="ID",
        help="run an experiment of -sb again with the code of its run, in a git worktree, into <runs>/reruns/ID",
    )
    what.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="a.b=value",
        help="change values (and the id) of each experiment; a.b=1,2,3: one per value",
    )
    what.add_argument(
        "--where",
        metavar="EXPR",
        help="only experiments that match, such as \"seed == 0 and state == 'failed'\"",
    )
    what.add_argument("--steps", type=int, metavar="N", help="short for --set loop.steps=N")
    what.add_argument(
        "--with-parents", "--with_parents", action="store_true", help="first run the parents of these experiments"
    )
    what.add_argument("--list", action="store_true", help="print the groups, or the experiments of -e, and exit")
    what.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="check everything that can be checked, print the plan, and exit",
    )
    estimate, with_ = "with --dry-run: also estimate", "with --memory or --cost:"
    what.add_argument("--memory", action="store_true", help=f"{estimate} GPU memory, tokens per second and hours")
    what.add_argument("--cost", action="store_true", help=f"{estimate} tokens, GPU hours and bytes of checkpoints")
    what.add_argument("--gpus", type=int, metavar="N", help=f"{with_} number of GPUs (default: 1)")
    what.add_argument("--gpu", metavar="NAME", help=f'{with_} GPU model, such as H100 or "RTX 4090" (default: H100)')
    what.add_argument("--mfu", metavar="X", help=f"{with_} share of the peak, or a run that measured it (default: 0.4)")
    _add_place(parser, root)
    _add_wandb(parser)
    return parser


def _add_place(parser: argparse.ArgumentParser, root: Path) -> None:
    where = parser.add_argument_group("where and how")
    where.add_argument(
        "-sb",
        "--savedir_base",
        type=Path,
        default=root / "results" / "runs",
        metavar="DIR",
        help="save directories (results/runs)",
    )
    where.add_argument(
        "--data_path",
        type=Path,
        default=root / "results" / "data",
        metavar="DIR",
        help="prepared data sets (results/data)",
    )
    where.add_argument("-r", "--reset", type=int, choices=(0, 1), default=0, help="1: back up the run and start over")
    where.add_argument(
        "--log_every", type=int, metavar="N", help="steps between score rows (default: 10; each evaluation adds one)"
    )
    where.add_argument(
        "--save_every",
        type=int,
        metavar="N",
        help="steps between checkpoints (default: each evaluation, and --log_every if that is given)",
    )
    places = where.add_argument(
        "-j",
        "--j",
        "--job_scheduler",
        dest="job_scheduler",
        metavar="NAME",
        help="a launcher of job_configs.py; none: run here",
    )
    places.completer = _complete_names("job_configs", "JOB_CONFIGS")  # type: ignore[attr-defined]
    where.add_argument(
        "--job_option", choices=JOB_OPTIONS, default="run", help="what to do with the jobs (default: run, with -j)"
    )
    where.add_argument(
        "--state",
        nargs="+",
        default=[],
        choices=STATES,
        metavar="STATE",
        help="with --job_option status: only these states, such as failed lost",
    )
    where.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=30.0,
        metavar="SECONDS",
        help="with --job_option status: repeat at this interval (default: 30) until no job is alive",
    )
    where.add_argument(
        "--max_running",
        type=int,
        metavar="N",
        help="with --job_option throttle: how many of a queued Slurm array run at a time; 0: any",
    )
    where.add_argument(
        "--python_binary",
        metavar="COMMAND",
        help='with -j: "torchrun --nproc-per-node NGPUS"; NGPUS becomes the number of GPUs there',
    )
    where.add_argument(
        "--stop_after", type=float, metavar="SECONDS", help="stop gracefully (resumable) this long after the start"
    )
    where.add_argument(
        "--max_host_memory",
        type=float,
        metavar="SHARE",
        help="stop gracefully when this share of host memory is in use, such as 0.9",
    )
    where.add_argument(
        "--num_workers", type=int, metavar="N", help="data-loading processes per rank (default: 2 with a GPU)"
    )
    where.add_argument(
        "--micro_batch",
        "--micro-batch",
        type=int,
        metavar="N",
        help="replace loop.micro_batch for this start: same id, no dropout",
    )
    where.add_argument(
        "--statistics_every", type=int, metavar="N", default=50, help="steps between statistics; 0: none (default: 50)"
    )
    where.add_argument(
        "--profile", type=int, metavar="N", default=0, help="profile N steps of this start into <run>/profile/"
    )
    where.add_argument("--keep_last", type=int, metavar="N", help="newest checkpoints to keep (default: 2)")
    where.add_argument(
        "--keep_every", type=int, metavar="N", help="also keep checkpoints at multiples of N steps (default: off)"
    )
    where.add_argument(
        "--keep_best", type=int, metavar="N", help="also keep the N best by loop.best_metric (default: 1)"
    )
    where.add_argument("--deepspeed", type=Path, metavar="JSON", help="shard the model with DeepSpeed ZeRO")
    where.add_argument("--fsdp", action="store_true", help="shard the model with FSDP2")
    where.add_argument(
        "--fsdp_replicas",
        type=int,
        metavar="N",
        help="shard within each of N equal parts of the processes (default: 1)",
    )
    where.add_argument(
        "--fsdp_sharded_gradients", action="store_true", help="keep gradients sharded between the passes of a step"
    )
    where.add_argument(
        "--gradient_checkpointing",
        nargs="?",
        const="full",
        choices=GRADIENT_CHECKPOINTING,
        help="recompute layers in the backward pass; selective: not products",
    )
    where.add_argument("--offload_activations", action="store_true", help="keep saved activations in host memory")
    where.add_argument(
        "--deterministic",
        action="store_true",
        help="use only deterministic algorithms of torch; slower",
    )
    where.add_argument(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # appended by deepspeed and old launchers; LOCAL_RANK is used


def _add_wandb(parser: argparse.ArgumentParser) -> None:
    logs = parser.add_argument_group("Weights & Biases (offline unless entity and project are given)")
    logs.add_argument("--wandb_entity_name", metavar="NAME", help="user or team; with a project: log online")
    logs.add_argument("--wandb_project_name", metavar="NAME", help="project")
    logs.add_argument("--wandb_run_name", metavar="NAME", help="name of the run (default: the group)")
    logs.add_argument(
        "--wandb_log_gradients",
        nargs="?",
        type=_flag,
        const=True,
        default=False,
        metavar="true|false",
        help="histograms of gradients",
    )


def _complete_names(module: str, name: str) -> Callable[..., list[str]]:
    """A completer for argcomplete: the keys of the dict `name` in a top-level file."""

    def names(**_: object) -> list[str]:
        from src.experiments.config import top_level

        return list(top_level(module, name))

    return names


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text.lower() == "true"


def check(args: argparse.Namespace, processes: int) -> None:
    """Raise ConfigError for arguments that would be ignored. processes: number started by torchrun."""
    if args.job_scheduler in ("None", "0"):
        args.job_scheduler = None
    if args.from_run and (args.exp_group or args.exp_id or args.set or args.steps or args.where or args.job_scheduler):
        raise ConfigError(
            "--from-run: repeats a run as it was. Leave out -e, --exp_id, --set, --steps, --where and -j."
        )
    if args.from_run and (processes > 1 or args.list or args.job_option != "run" or args.reset):
        raise ConfigError(
            "--from-run: starts the processes itself, from the start. Leave out torchrun, --list, --job_option and -r."
        )
    if not args.list and not args.exp_group and not args.exp_id and not args.from_run:
        raise ConfigError(
            "-e, --exp_id: nothing to run. Name a group with -e, or an experiment with --exp_id; see --list."
        )
    if args.exp_group and args.exp_id:
        raise ConfigError("-e and --exp_id: give one of them.")
    if args.job_option in ("reset", "retry") and not args.job_scheduler:
        raise ConfigError(f"--job_option {args.job_option}: submits jobs. Add -j NAME, a launcher of job_configs.py.")
    if args.job_option != "status" and (args.state or args.watch is not None):
        raise ConfigError("--state and --watch: only for --job_option status. Add it, or leave them out.")
    if (args.job_option == "throttle") != (args.max_running is not None):
        raise ConfigError("--job_option throttle and --max_running N: each needs the other. Give both, or neither.")
    if args.watch is not None and not args.watch > 0:
        raise ConfigError(f"--watch: expected seconds above 0, got {args.watch:g}.")
    if args.python_binary and not args.job_scheduler:
        raise ConfigError(
            "--python_binary: only for launched jobs. Add -j NAME, or start trainval.py with that command."
        )
    if args.python_binary:
        from src.launch.command import check_python_binary  # imports pydantic

        check_python_binary(args.python_binary)
    if args.job_scheduler and processes > 1:
        raise ConfigError(
            "-j: each process that torchrun started would submit. "
            "Start trainval.py with python; put torchrun in --python_binary."
        )
    if args.job_option != "run" and processes > 1:
        raise ConfigError(
            f"--job_option {args.job_option}: each process that torchrun started would do it. "
            "Start trainval.py with python."
        )
    if args.wandb_entity_name and not args.wandb_project_name:
        raise ConfigError("--wandb_entity_name: needs --wandb_project_name. Give both, or neither to log to files.")
    for least, names in LEAST.items():
        require_at_least(least, **{name: getattr(args, name) for name in names})
    if args.stop_after is not None and not args.stop_after > 0:
        raise ConfigError(f"--stop_after: expected seconds above 0, got {args.stop_after:g}.")
    if args.max_host_memory is not None and not 0 < args.max_host_memory < 1:
        raise ConfigError(f"--max_host_memory: expected a share between 0 and 1, got {args.max_host_memory:g}.")
    _check_memory(args)
    if args.deepspeed and args.fsdp:
        raise ConfigError("--deepspeed and --fsdp: give one of them.")
    if (
        args.dry_run and not args.fsdp and "ACCELERATE_USE_FSDP" not in os.environ
    ):  # a training does this in `Options.check_parts`
        from src.runs.context import refuse_without_fsdp

        refuse_without_fsdp(args)


def _check_memory(args: argparse.Namespace) -> None:
    is_planned = args.memory or args.cost
    if is_planned and not args.dry_run:
        raise ConfigError(f"{'--memory' if args.memory else '--cost'}: only for --dry-run. Add it.")
    if not is_planned and (args.gpus is not None or args.gpu or args.mfu):
        raise ConfigError(
            "--gpus, --gpu and --mfu: only for --memory and --cost. Add --dry-run --cost, or leave them out."
        )
    if args.memory and args.offload_activations:
        raise ConfigError("--memory: cannot estimate --offload_activations. Leave one of the two out.")


def training_options(args: argparse.Namespace, processes: int) -> "Options":
    """The options of a training, from the command line and from `accelerate launch` if that started it.

    Raises:
        ConfigError: the two contradict each other.
    """
    from src.launch import accelerate_env
    from src.runs.context import Limits, Wandb

    choices = accelerate_env.take_choices(os.environ, processes, args.deepspeed, args.fsdp)
    use_wandb = args.wandb_entity_name or args.wandb_project_name or args.wandb_run_name or args.wandb_log_gradients
    use_wandb = use_wandb or "WANDB_SWEEP_ID" in os.environ  # a trial of `wandb agent`
    wandb = (
        Wandb(args.wandb_entity_name, args.wandb_project_name, args.wandb_run_name, args.wandb_log_gradients)
        if use_wandb
        else None
    )
    options = replace(
        saving_options(args),
        wandb=wandb,
        deepspeed=choices.deepspeed,
        fsdp=choices.fsdp,
        fsdp_replicas=args.fsdp_replicas or 1,
        fsdp_sharded_gradients=args.fsdp_sharded_gradients,
        gradient_checkpointing=args.gradient_checkpointing,
        offload_activations=args.offload_activations,
        profile=args.profile,
        statistics_every=args.statistics_every,
        limits=Limits(args.stop_after and time.monotonic() + args.stop_after, args.max_host_memory),
        num_workers=args.num_workers,
        launcher_settings=choices.settings,
    )
    options.check_parts(processes)
    return options


def saving_options(args: argparse.Namespace) -> "Options":
    """The options for when to write checkpoints and which to keep."""
    from src.runs.checkpoints.retention import RotationRule
    from src.runs.context import Options

    keep = {name: value for name in ("last", "every", "best") if (value := getattr(args, f"keep_{name}")) is not None}
    return Options(log_every=args.log_every, save_every=args.save_every, keep=RotationRule(**keep))


def child_arguments(args: argparse.Namespace, exp_id: str) -> list[str]:
    """The command line of one launched experiment."""
    child = ["--exp_id", exp_id, "-sb", str(args.savedir_base.resolve()), "--data_path", str(args.data_path.resolve())]
    for name in (*PASSED_ON, "wandb_entity_name", "wandb_project_name", "wandb_run_name"):
        if getattr(args, name) is not None:
            child += [f"--{name}", str(getattr(args, name))]
    if args.deepspeed:
        child += ["--deepspeed", str(args.deepspeed.resolve())]
    return [*child, *(f"--{name}" for name in SWITCHES if getattr(args, name))]
