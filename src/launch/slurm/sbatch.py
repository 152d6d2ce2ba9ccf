"""Queue one array with sbatch, at most once."""

import contextlib
import re
import time
from collections.abc import Sequence
from pathlib import Path

from src.errors import LaunchError
from src.launch.job import NoAnswer
from src.launch.slurm.commands import Refusal, explain_refusal, run_slurm, run_slurm_once
from src.launch.slurm.states import array_ids_by_name
from src.launch.slurm.waves import Array

_WAIT_SECONDS = 0.5


def job_name(tasks: Path) -> str:
    """The job name of an array, unique because the name of the submission is."""
    return f"{tasks.parent.name}.{tasks.stem}"


def sbatch_command(
    array: Array, tasks: Path, job_ids_by_experiment: dict[str, str], limit: int | None, before: Sequence[str]
) -> list[str]:
    """The sbatch command for `array`, without the program. Every value is a separate argument; no shell parses it.

    limit: maximum running tasks. before: ids of arrays that must end first.
    """
    config, job = array.config, array.jobs[0]
    parents = [
        *dict.fromkeys(
            [job_ids_by_experiment[exp_id] for exp_id in job.after if exp_id in job_ids_by_experiment]
            + list(job.after_jobs)
        )
    ]
    waits = [f"{kind}:{':'.join(ids)}" for kind, ids in (("afterok", parents), ("afterany", before)) if ids]
    throttle = f"%{limit}" if limit else ""
    options: dict[str, object] = {
        "job-name": job_name(tasks),
        "array": f"0-{array.tasks - 1}{throttle}",
        "chdir": tasks.parent,
        "output": _escape(f"{tasks.parent}/{tasks.stem}.log"),
        "open-mode": "append",
        "requeue" if config.requeue else "no-requeue": True,
        "kill-on-invalid-dep": "yes",
        "dependency": ",".join(waits) or None,
        "signal": f"B:USR1@{config.signal_seconds}" if config.signal_seconds else None,
        "nodes": config.processes.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": config.cpus_per_task,
        "gpus-per-node": config.gpus_per_node,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "time": config.time,
        "mem": config.mem,
        **config.options,
    }
    words = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in options.items()
        if value is not None and value is not False
    ]
    return ["sbatch", "--parsable", *words]


def _escape(path: str) -> str:
    r"""Escape a path for Slurm, which replaces patterns such as %A. If the path has a backslash, Slurm removes it and
    replaces nothing."""
    return path.replace("\\", r"\\") if "\\" in path else path.replace("%", "%%")


def queue_array(argv: Sequence[str], name: str, patience_seconds: float) -> str:
    """Run sbatch; return the id of the array. name: unique name of the array.

    If Slurm does not answer, look up the array by its name before the next try: it can be queued already.

    Raises:
        LaunchError: Slurm refuses, or does not answer. Then the array is cancelled if possible.
    """
    deadline = time.monotonic() + patience_seconds
    remaining, doubtful = patience_seconds, False
    while True:
        try:
            array_id = _parse_array_id(run_slurm_once(argv, max(0.1, remaining / 2)))
            break
        except Refusal as error:
            raise explain_refusal(error) from None
        except NoAnswer as error:
            doubtful = True
            time.sleep(max(0.0, min(_WAIT_SECONDS, deadline - time.monotonic())))
            remaining = deadline - time.monotonic()
            ids = _find_queued(name, max(0.1, remaining))
            if ids:
                array_id = ids[-1]
                break
            if remaining <= 0 or ids is None:
                raise _no_answer_error(error, name) from None
    if doubtful and (
        duplicate_ids := [other for other in _find_queued(name, patience_seconds) or () if other != array_id]
    ):
        run_slurm(["scancel", *duplicate_ids], patience_seconds)
    return array_id


def _find_queued(name: str, seconds: float) -> list[str] | None:
    """Ids of the arrays called `name`, the newest last; None if Slurm does not answer."""
    try:
        return array_ids_by_name([name], seconds, include_ended=False).get(name, [])
    except LaunchError:
        return None


def _parse_array_id(output: str) -> str:
    match = re.search(r"^(\d+)(;\S*)?$", output.strip(), re.MULTILINE)
    if not match:
        raise LaunchError(
            f"sbatch: expected the id of a job, got {output.strip()[:200]!r}. "
            "Check with `squeue --me` whether the job is queued, and that sbatch on PATH is Slurm's."
        )
    return match[1]


def _no_answer_error(error: NoAnswer, name: str) -> LaunchError:
    cancel = ["scancel", f"--name={name}"]
    with contextlib.suppress(LaunchError):
        run_slurm_once(cancel, 5.0)
        return LaunchError(f"{error} No job is queued.")
    return LaunchError(f"{error} The jobs can be queued; once Slurm answers, `{' '.join(cancel)}` cancels them.")
