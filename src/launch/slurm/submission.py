"""Hands one array to sbatch: never twice, also where sbatch does not say whether it was queued."""

import contextlib
import re
import time
from collections.abc import Sequence

from src.errors import LaunchError
from src.launch.slurm.commands import Away, Refused, ask, once
from src.launch.slurm.states import named

_WAIT_SECONDS = 0.5
# What sbatch says, and the setting that it means.
_MEANT = {
    "account/qos|accounting/qos": "'account', 'qos' or 'time', or queue fewer jobs: a limit of the cluster is exceeded",
    "partition specified|partition name": "'partition'",
    "account": "'account'",
    "qos": "'qos'",
    "feature": "'constraint'",
    "time limit|--time": "'time'",
    "memory": "'mem'",
    "generic resource|gres": "'gpus_per_node'",
    "node configuration|node count|cpu count|processors": "'processes.nodes', 'cpus_per_task', 'mem', 'gpus_per_node' or 'constraint'",
    "option": "'options'",
}


def queue(argv: Sequence[str], name: str, patience_seconds: float) -> str:
    """Run sbatch; returns the id of the array called `name`, a name that no other array has.

    When Slurm does not answer, the array may have been queued all the same: it is looked for by its name before sbatch runs again.

    Raises:
        LaunchError: Slurm refused, with its message and the setting to change; or it does not answer, and what may have been queued is
            cancelled as far as Slurm can be told to.
    """
    deadline = time.monotonic() + patience_seconds
    left, doubtful = patience_seconds, False
    while True:
        try:
            array_id = _array_id(once(argv, max(0.1, left / 2)))
            break
        except Refused as error:
            raise _refusal(error) from None
        except Away as error:
            doubtful = True
            time.sleep(max(0.0, min(_WAIT_SECONDS, deadline - time.monotonic())))
            left = deadline - time.monotonic()
            ids = _queued(name, max(0.1, left))
            if ids:
                array_id = ids[-1]
                break
            if left <= 0 or ids is None:
                raise _away(error, name) from None
    if doubtful and (others := [other for other in _queued(name, patience_seconds) or () if other != array_id]):
        ask(["scancel", *others], patience_seconds)
    return array_id


def _queued(name: str, seconds: float) -> list[str] | None:
    """Ids of the arrays called `name`, the newest last; None where Slurm does not tell."""
    try:
        return named([name], seconds, ended=False).get(name, [])
    except LaunchError:
        return None


def _array_id(printed: str) -> str:
    match = re.search(r"^(\d+)(;\S*)?$", printed.strip(), re.MULTILINE)
    if not match:
        raise LaunchError(f"sbatch: expected the id of a job, got {printed.strip()[:200]!r}.")
    return match[1]


def _away(error: Away, name: str) -> LaunchError:
    cancel = ["scancel", f"--name={name}"]
    with contextlib.suppress(LaunchError):
        once(cancel, 5.0)
        return LaunchError(f"{error} Nothing stays queued.")
    return LaunchError(f"{error} Whether the jobs were queued is not known; once Slurm answers, `{' '.join(cancel)}` cancels them.")


def _refusal(error: Refused) -> LaunchError:
    setting = next((setting for words, setting in _MEANT.items() if re.search(words, error.said, re.IGNORECASE)), None)
    said = error.said if error.said.endswith(".") else f"{error.said}."
    return LaunchError(f"sbatch refused the jobs: {said}{f' Change {setting} of the job config.' if setting else ''}")
