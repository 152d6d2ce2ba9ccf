"""Queue jobs on a Slurm cluster: one array for all experiments of a submission with equal resources and parents."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, StrictBool, model_validator

from src.errors import LaunchError, UserError
from src.experiments.config import unknown_text
from src.launch.command import QueueConfig, check_no_key
from src.launch.job import Job, Note, SchedulerState
from src.launch.slurm import shared_tasks
from src.launch.slurm.commands import Refusal, check_programs, collapse, parse_seconds, run_slurm
from src.launch.slurm.sbatch import job_name, queue_array, sbatch_command
from src.launch.slurm.script import read_exp_ids, task_line, write_script, write_tasks
from src.launch.slurm.states import array_ids_by_name, scheduler_states
from src.launch.slurm.waves import Array, Waves

_TIME = re.compile(r"(\d+-)?\d+:[0-5]?\d:[0-5]?\d")
_TASKS = re.compile(r"array-\d+(?:x(\d+))?")  # x<number of experiments per task>, if more than one
_IDS_PER_CALL = 500
# Options of sbatch that this file sets itself, and the setting to use instead; None: it cannot be changed.
_OURS = {
    **{option: option.replace("-", "_") for option in ("partition", "account", "time", "mem", "qos", "constraint")},
    **{option: option.replace("-", "_") for option in ("cpus-per-task", "gpus-per-node", "requeue")},
    "no-requeue": "requeue",
    "nodes": "processes.nodes",
    "signal": "signal_seconds",
    **dict.fromkeys(
        ("array", "chdir", "dependency", "error", "export", "job-name", "kill-on-invalid-dep", "open-mode", "output"),
        None,
    ),
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "parsable", "test-only", "wait", "wrap", "input", "help", "version", "usage"),
        None,
    ),
}


def _check_time(time: int | str) -> int | str:
    if isinstance(time, str) and not _TIME.fullmatch(time):
        raise ValueError(f"expected minutes as an int, 'HH:MM:SS' or 'D-HH:MM:SS', got {time!r}.")
    if _seconds(time) <= 0:
        raise ValueError(f"expected a time longer than 0, got {time!r}.")
    return time


def _seconds(time: int | str) -> float:
    return 60 * time if isinstance(time, int) else parse_seconds(time) or 0.0


def _check_options(options: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
    for option, value in options.items():
        check_no_key(str(value))
        if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
            raise ValueError(f"expected a long option of sbatch without its dashes, such as 'exclude', got {option!r}.")
        if option in _OURS:
            instead = (
                f"Write {_OURS[option]!r} of the job config." if _OURS[option] else "The launcher needs it for itself."
            )
            raise ValueError(f"{option!r} cannot be set here. {instead}")
        if isinstance(value, str) and not re.fullmatch(r"[^\x00-\x1f]+", value):
            raise ValueError(f"{option!r}: expected text on one line, got {value!r}.")
    return options


Word = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f]+$")]


class Config(QueueConfig):
    """Resources and Slurm options of one job. None: the default of the cluster."""

    holds_jobs: ClassVar[bool] = True

    partition: Word | None = None
    """Partition to queue in."""
    account: Word | None = None
    """Account to charge."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that a node must have, as for `sbatch --constraint`."""
    time: Annotated[int | str, AfterValidator(_check_time)] | None = None
    """Time limit of one attempt: minutes, "HH:MM:SS" or "D-HH:MM:SS"."""
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    """CPUs per node."""
    mem: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory per node, such as "32G"."""
    gpus_per_node: Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^[\w.-]+:\d+$")] | None = None
    """Number, or type and number such as "a100:4"."""
    max_running: Annotated[int, Field(ge=1)] | None = None
    """Maximum running tasks of a submission. If several arrays together exceed it, they run in waves: an array starts
    when all tasks of the earlier arrays have ended."""
    jobs_per_task: int = Field(default=1, ge=1)
    """Number of experiments that run in parallel in one task and share its CPUs, memory and GPUs. An experiment with
    children in the submission has its own task."""
    signal_seconds: int = Field(default=120, ge=0, le=65535)
    """How long before the time limit the job writes a checkpoint and is requeued.
    Slurm can signal up to a minute early. 0: never."""
    requeue: bool = True
    """Whether a job is requeued near its time limit, after a preemption and when its node fails. At the time limit, it
    is not requeued if two starts in a row wrote no new checkpoint."""
    options: Annotated[dict[str, str | int | StrictBool], AfterValidator(_check_options)] = {}
    """Additional long options of sbatch: {"exclude": "node7", "exclusive": true}."""
    setup: list[Annotated[str, Field(pattern=r"^[^\x00]*$"), AfterValidator(check_no_key)]] = []
    """Bash that each node runs before the command, such as "module load cuda/12"."""
    patience_seconds: float = Field(default=60.0, gt=0)
    """How long to retry a scheduler that does not answer."""

    @model_validator(mode="after")
    def _signal_before_the_end(self) -> "Config":
        if self.time is not None and self.signal_seconds >= _seconds(self.time):
            raise ValueError(
                f"signal_seconds: expected less than 'time', {self.time!r}, got {self.signal_seconds} seconds. "
                "Lower it."
            )
        return self

    @model_validator(mode="after")
    def _one_node_shared(self) -> "Config":
        if self.jobs_per_task > 1 and self.processes.nodes > 1:
            raise ValueError(
                f"jobs_per_task: {self.jobs_per_task} experiments cannot share a task of {self.processes.nodes} nodes. "
                "Write 1."
            )
        return self

    @property
    def _outcomes(self) -> Path:
        """Folder with the exit codes of experiments in shared tasks."""
        return Path(self.submissions, shared_tasks.FOLDER)

    def submit(self, jobs: Sequence[Job], folder: Path, note: Note) -> list[str]:
        """Queue `jobs`; return "ARRAY_TASK" for each, with "+PLACEofCOUNT.SUBMISSION" if it shares the task.

        One array holds all jobs with the same resources and parents, up to the cluster's MaxArraySize. Job names start
        with the name of `folder`, so that `find` can find them.
        """
        if not jobs:
            return []
        patience = self.patience_seconds
        largest = _largest_array(patience)
        script = write_script(folder)
        _refuse_shared_parents(jobs)
        job_ids_by_experiment: dict[str, str] = {}
        try:
            waves = Waves(self.max_running)
            for array in self._group_into_arrays(jobs, largest):
                limit, before = waves.place(array)
                tasks = _write_task_file(array, folder)
                program = [str(script.absolute()), str(tasks), str(array.config.stop_after_failures)]
                if array.jobs_per_task > 1:
                    program[0] = str(shared_tasks.write_shared_script(folder, self._outcomes).absolute())
                    program += [str(array.jobs_per_task), str(self._outcomes.absolute())]
                array_id = queue_array(
                    [*sbatch_command(array, tasks, job_ids_by_experiment, limit, before), *program],
                    job_name(tasks),
                    patience,
                )
                waves.add(array, array_id)
                job_ids = shared_tasks.job_ids(array_id, len(array.jobs), array.jobs_per_task, folder)
                ids = {job.exp_id: job_id for job, job_id in zip(array.jobs, job_ids, strict=True)}
                job_ids_by_experiment |= ids
                note(ids)
                shared_tasks.forget_notes(array_id, folder, self._outcomes)
        except UserError:
            with contextlib.suppress(LaunchError):  # the refusal is reported, not this error
                self.kill(list(job_ids_by_experiment.values()))
            raise
        return [job_ids_by_experiment[job.exp_id] for job in jobs]

    def states(self, job_ids: Sequence[str]) -> dict[str, SchedulerState]:
        tasks = dict.fromkeys(map(shared_tasks.task_of, job_ids))
        states = scheduler_states(list(tasks), self.patience_seconds) if tasks else {}
        return shared_tasks.with_outcomes(job_ids, states, self._outcomes)

    def kill(self, job_ids: Sequence[str]) -> None:
        """Cancel the jobs; they are not requeued. Other experiments in their tasks continue.

        Raises:
            LaunchError: Slurm does not answer, or refuses, for example because the jobs belong to another user.
            RunError: the disk refuses.
        """
        words = collapse(shared_tasks.kill(job_ids, self._outcomes))
        for i in range(0, len(words), _IDS_PER_CALL):
            try:
                run_slurm(["scancel", *words[i : i + _IDS_PER_CALL]], self.patience_seconds)
            except Refusal as error:
                if not re.search("invalid job id|already completing or completed", error.message, re.IGNORECASE):
                    raise

    def hold(self, job_ids: Sequence[str]) -> None:
        """Keep the jobs from starting or restarting.
        Raises LaunchError if Slurm refuses, for example because they have ended."""
        run_slurm(["scontrol", "hold", ",".join(_require_own_tasks(job_ids))], self.patience_seconds)

    def release(self, job_ids: Sequence[str]) -> None:
        run_slurm(["scontrol", "release", ",".join(_require_own_tasks(job_ids))], self.patience_seconds)

    def throttle(self, job_ids: Sequence[str], max_running: int) -> None:
        """Set the limit of running tasks. The arrays of a wave share it; waves do not run at the same time.

        Raises:
            LaunchError: Slurm refuses, or a wave has more arrays than `max_running`.
        """
        arrays = list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
        waves: dict[str, list[str]] = {}
        if len(arrays) > 1:
            lines = run_slurm(
                ["squeue", "--noheader", f"--jobs={','.join(arrays)}", "--format=%F|%E"], self.patience_seconds
            ).splitlines()
            dependencies = {array: text for array, _, text in (line.strip().partition("|") for line in lines)}
            for array in arrays:
                waves.setdefault(",".join(re.findall(r"afterany:(\d+)", dependencies.get(array, ""))), []).append(array)
        for wave in waves.values() or [arrays]:
            if 0 < max_running < len(wave):
                raise LaunchError(
                    f"--max_running {max_running}: {len(wave)} arrays are queued at once. Write at least {len(wave)}."
                )
            for place, array in enumerate(wave):
                limit = max_running // len(wave) + (place < max_running % len(wave))
                run_slurm(["scontrol", "update", f"JobId={array}", f"ArrayTaskThrottle={limit}"], self.patience_seconds)

    def find(self, folder: Path, exp_ids: Sequence[str]) -> dict[str, str]:
        tasks_of = {job_name(tasks): tasks for tasks in _task_files(folder)}
        if not tasks_of:
            return {}
        job_ids_by_experiment: dict[str, str] = {}
        for name, array_ids in array_ids_by_name(list(tasks_of), self.patience_seconds).items():
            exp_ids_there = read_exp_ids(tasks_of[name])
            ids = shared_tasks.job_ids(array_ids[-1], len(exp_ids_there), _jobs_per_task(tasks_of[name]), folder)
            job_ids_by_experiment |= dict(zip(exp_ids_there, ids, strict=True))
        return {exp_id: job_ids_by_experiment[exp_id] for exp_id in exp_ids if exp_id in job_ids_by_experiment}

    def check(self) -> None:
        """Raise LaunchError if Slurm's commands or the partition are missing, or the controller does not answer."""
        check_programs("sbatch", "squeue", "scancel", "scontrol")
        lines = run_slurm(["scontrol", "--oneliner", "show", "partition"], self.patience_seconds).splitlines()
        partitions = re.findall(r"^PartitionName=(\S+)", "\n".join(lines), re.MULTILINE)
        for name in (self.partition or "").split(","):
            if name and name not in partitions:
                raise LaunchError(f"partition: {unknown_text('partition', name, partitions)}")

    def _group_into_arrays(self, jobs: Sequence[Job], largest: int) -> "list[Array]":
        """Group jobs with equal resources and parents into arrays, the arrays of parents first.

        A parent does not share a task: its children would wait for all experiments of the task, and not start if
        another one fails.
        """
        place = {job.exp_id: i for i, job in enumerate(jobs)}
        parent_ids = {exp_id for i, job in enumerate(jobs) for exp_id in job.after if place.get(exp_id, i) < i}
        groups: dict[object, Array] = {}
        same_limit = self.model_dump_json()
        for i, job in enumerate(jobs):
            parents = frozenset(exp_id for exp_id in job.after if place.get(exp_id, i) < i)
            resources = self.settings_of(job)
            each = 1 if job.exp_id in parent_ids else resources.jobs_per_task
            # A config that contains a dict cannot be hashed; its JSON can.
            key = (
                same_limit if resources is self else resources.model_dump_json(),
                each,
                parents,
                frozenset(job.after_jobs),
            )
            groups.setdefault(key, Array(resources, [], each)).jobs.append(job)
        return [
            group._replace(jobs=group.jobs[i : i + largest * group.jobs_per_task])
            for group in groups.values()
            for i in range(0, len(group.jobs), largest * group.jobs_per_task)
        ]


def _require_own_tasks(job_ids: Sequence[str]) -> list[str]:
    """`job_ids`, if each has a task of its own. Raises LaunchError for experiments that share a task."""
    for job_id in job_ids:
        if shared_tasks.task_of(job_id) != job_id:
            raise LaunchError(
                f"job {job_id}: it shares its task, and Slurm can only hold complete tasks. Kill it, or let it start."
            )
    return list(job_ids)


def _refuse_shared_parents(jobs: Sequence[Job]) -> None:
    """Raise LaunchError for a job that waits for an experiment of an earlier submission in a shared task."""
    for job in jobs:
        for parent in job.after_jobs:
            if shared_tasks.task_of(parent) != parent:
                raise LaunchError(
                    f"{job.exp_id}: it starts from the experiment of job {parent}, which shares a Slurm task, "
                    "and Slurm can only wait for complete tasks. Submit it after that task has ended."
                )


def _largest_array(patience_seconds: float) -> int:
    output = run_slurm(["scontrol", "show", "config"], patience_seconds)
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", output, re.MULTILINE)
    return max(1, int(match[1])) if match else 1


def _task_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("array-*.tasks") if _TASKS.fullmatch(path.stem))


def _jobs_per_task(tasks: Path) -> int:
    match = _TASKS.fullmatch(tasks.stem)
    return int((match and match[1]) or 1)


def _write_task_file(array: Array, folder: Path) -> Path:
    shared = f"x{array.jobs_per_task}" if array.jobs_per_task > 1 else ""
    tasks = folder.absolute() / f"array-{len(_task_files(folder)):03d}{shared}.tasks"
    config = array.config
    lines = [task_line(job, config.processes, config.environment, config.setup) for job in array.jobs]
    write_tasks(tasks, array.jobs, lines, config.requeue)
    return tasks
