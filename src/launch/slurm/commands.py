"""Run Slurm's commands, with retries while the scheduler does not answer, and parse the job ids in their output."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from src.errors import LaunchError
from src.launch.command import without_torchrun
from src.launch.job import NoAnswer, retry_until_answered

# Messages while the controller or the database is down, busy or restarting: worth a retry.
_AWAY = re.compile(
    "socket timed out|unable to contact slurm controller|connection refused|connection timed out|zero "
    "bytes were transmitted|resource temporarily unavailable|transport "
    "endpoint|backup controller|slurmctld.*shut ?down|problem talking to the database|sending "
    "persconn|unable to establish controller|communication connection failure|connection reset|no route to host",
    re.IGNORECASE,
)
# Variables of the user's shell that would change the commands' output, without those that locate the cluster.
_NOT_OURS = re.compile(r"(SQUEUE|SACCT|SCANCEL)_.*|SLURM_(?!CONF$|CONF_SERVER$|CLUSTERS$|JWT$).*")
_ID = re.compile(r"(\d+)(?:_(?:(\d+)|\[([\d,\-]*).*))?")


class Refusal(LaunchError):
    """Slurm refused a command. `message` is its output."""

    def __init__(self, command: str, message: str) -> None:
        super().__init__(f"{command}: {message}")
        self.message = message


def run_slurm(argv: Sequence[str], patience_seconds: float) -> str:
    """Run an idempotent command, with retries while Slurm does not answer; return its output.

    Raises:
        NoAnswer: no answer within `patience_seconds`.
        Refusal: it failed for another reason.
    """
    return retry_until_answered(lambda seconds: run_slurm_once(argv, seconds), patience_seconds)


def run_slurm_once(argv: Sequence[str], seconds: float) -> str:
    """Run a command, with a timeout of `seconds`; return its output.

    Raises:
        NoAnswer, Refusal: like `run_slurm`.
        LaunchError: there is no such command on this machine.
    """
    check_programs(argv[0])
    try:
        done = subprocess.run(
            argv, capture_output=True, stdin=subprocess.DEVNULL, env=_environment(), timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{argv[0]}: no answer from Slurm in {seconds:.0f} s. Check the controller with `scontrol ping`."
        ) from None
    message = done.stderr.decode(errors="replace")
    if done.returncode:
        words = " ".join(message.split()) or f"exit code {done.returncode}"
        words = words.replace(f"{argv[0]}: error: ", "")
        if _AWAY.search(message):
            raise NoAnswer(
                f"{argv[0]}: Slurm does not answer: {words}. Is the controller up? Check with `scontrol ping`."
            )
        raise Refusal(argv[0], words)
    return done.stdout.decode(errors="replace")


def check_programs(*commands: str) -> None:
    """Raise LaunchError with the names of the `commands` that are not on PATH."""
    if missing_commands := [command for command in commands if shutil.which(command) is None]:
        raise LaunchError(
            f"{', '.join(missing_commands)}: no such command on PATH. "
            "Submit from a machine of the cluster, with Slurm's commands."
        )


def _environment() -> dict[str, str]:
    variables = {name: value for name, value in without_torchrun(os.environ).items() if not _NOT_OURS.fullmatch(name)}
    return variables | {"SLURM_BITSTR_LEN": "0", "LC_ALL": "C.UTF-8"}


def expand(job_id: str) -> Iterator[str]:
    """The ids that an id printed by Slurm covers: "7" -> "7"; "7_3" -> "7_3"; "7_[0-1,5%2]" -> "7_0", "7_1", "7_5"."""
    match = _ID.fullmatch(job_id.strip())
    if not match:
        return
    array, task, tasks = match.groups()
    if tasks is None:
        yield array if task is None else f"{array}_{task}"
        return
    for piece in filter(None, tasks.split(",")):
        first, _, last = piece.partition("-")
        if first.isdigit():
            yield from (f"{array}_{i}" for i in range(int(first), int(last or first) + 1))


def parse_seconds(text: str) -> float | None:
    """ "1-02:03:04", "2:03:04" or "03:04" as seconds; None for INVALID and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def collapse(job_ids: Iterable[str]) -> list[str]:
    """The inverse: "7_0", "7_1", "7_5", "9" -> "7_[0-1,5]", "9"."""
    tasks: dict[str, set[int]] = {}
    plain = []
    for job_id in job_ids:
        array, _, task = job_id.partition("_")
        if task.isdigit():
            tasks.setdefault(array, set()).add(int(task))
        elif array.isdigit():
            plain.append(array)
    return [*(f"{array}_[{_ranges(sorted(numbers))}]" for array, numbers in tasks.items()), *plain]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# Pattern of a message of sbatch -> the setting to change.
_SETTING_BY_MESSAGE = {
    "account/qos|accounting/qos": "The job config exceeds a limit of the cluster: "
    "lower 'time', set another 'account' or 'qos', or queue fewer jobs.",
    "partition specified|partition name": "'partition'",
    "account": "'account'",
    "qos": "'qos'",
    "feature": "'constraint'",
    "time limit|--time": "'time'",
    "memory": "'mem'",
    "generic resource|gres": "'gpus_per_node'",
    (
        "node configuration|node count|cpu count|processors"
    ): "'processes.nodes', 'cpus_per_task', 'mem', 'gpus_per_node' or 'constraint'",
    "option": "'options'",
}


def explain_refusal(error: Refusal) -> LaunchError:
    """The message of sbatch, with the setting to change."""
    setting = next(
        (setting for words, setting in _SETTING_BY_MESSAGE.items() if re.search(words, error.message, re.IGNORECASE)),
        None,
    )
    message = error.message if error.message.endswith(".") else f"{error.message}."
    advice = setting if setting and setting.endswith(".") else f"Change {setting} of the job config." if setting else ""
    return LaunchError(f"sbatch refused the jobs: {message} {advice}".strip())
