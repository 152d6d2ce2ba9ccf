"""The states of jobs on Slurm: from the controller, and from accounting for jobs that the controller has forgotten."""

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from src.errors import LaunchError
from src.launch.job import SchedulerState
from src.launch.slurm.commands import Refusal, expand, parse_seconds, run_slurm, run_slurm_once

State = Literal["queued", "running", "completed", "failed", "cancelled", "unknown"]
_WORDS: dict[State, str] = {
    "queued": "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT POWER_UP_NODE",
    "running": "RUNNING COMPLETING SUSPENDED RESIZING SIGNALING STAGE_OUT STOPPED UPDATE_DB EXPEDITING",
    "completed": "COMPLETED",
    "failed": "FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED LAUNCH_FAILED RECONFIG_FAIL REVOKED",
    "cancelled": "CANCELLED",
}
STATES: dict[str, State] = {word: state for state in get_args(State) for word in _WORDS.get(state, "").split()}
"""Every job state word of Slurm 22.05 to 24.05."""
_REASONS = {
    "TIMEOUT": "time limit reached",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "out of memory",
    "BOOT_FAIL": "the node did not start",
    "DEADLINE": "deadline passed",
    "PREEMPTED": "preempted, and not requeued",
}
_HOPELESS = "DependencyNeverSatisfied"
_KILL_REASON, _OUT_OF_MEMORY = "killed by SIGKILL", _REASONS["OUT_OF_MEMORY"]
_MEMORY_SECONDS, _MEMORY_JOBS = 5.0, 1000  # a short timeout: the answer is optional
_QUEUE_FIELDS = {
    "JobArrayID": 64,
    "State": 32,
    "Reason": 256,
    "NodeList": 256,
    "TimeUsed": 32,
    "RestartCnt": 16,
    "exit_code": 16,
    "StartTime": 24,
}
_NO_ACCOUNTING = re.compile(
    "accounting storage is disabled|accounting.*not (enabled|configured|supported)", re.IGNORECASE
)
_NO_OUTPUT = "53"  # Slurm's "signal" when the files of --output or --error cannot be opened
_LONGEST_ARGUMENT = 100_000  # bytes; Linux takes 128 KiB
_OLD = "1970-01-01"


def scheduler_states(job_ids: Sequence[str], patience_seconds: float) -> dict[str, SchedulerState]:
    """The states of `job_ids`, with at most two calls, and one more for the memory of killed jobs.

    - The controller knows a job until some minutes after its end; later, accounting has the final state.
    - "unknown": accounting reports a queued or running job that the controller does not know, or does not answer.
    - "cancelled": either knows the array, but not this task. Slurm has no record of a task that was cancelled before
      it started.
    - Absent: neither knows the array, or the cluster has no accounting.

    Raises:
        LaunchError: the controller does not answer.
    """
    states = _find_states(set(job_ids), patience_seconds)
    killed_ids = [
        job_id
        for job_id, state in states.items()
        if state.state == "failed" and state.reason in (_KILL_REASON, _OUT_OF_MEMORY)
    ]
    for job_id, (peak, limit) in _query_memory(killed_ids[:_MEMORY_JOBS]).items():
        if states[job_id].reason == _OUT_OF_MEMORY or _bytes(peak) >= _bytes(limit) > 0:
            memory = f"{peak} of {limit}" if _bytes(limit) else peak
            states[job_id] = replace(states[job_id], reason=f"{_OUT_OF_MEMORY}: MaxRSS {memory}")
    return states


def _find_states(requested: set[str], patience_seconds: float) -> dict[str, SchedulerState]:
    queue = dict(_query_controller(_arrays(requested), patience_seconds))
    queued_states = {job_id: queue[job_id] for job_id in requested & queue.keys()}
    if not (rest := requested - queued_states.keys()):
        return queued_states
    try:
        records = _query_accounting(_arrays(rest), patience_seconds)
    except LaunchError as error:
        if isinstance(error, Refusal) and _NO_ACCOUNTING.search(error.message):
            return queued_states
        return queued_states | {job_id: SchedulerState("unknown", reason=str(error)) for job_id in rest}
    arrays = {job_id.partition("_")[0] for job_id in (*queue, *records)}
    never = SchedulerState("cancelled", "CANCELLED", "cancelled before it started")
    return queued_states | {i: records.get(i, never) for i in rest if i in records or i.partition("_")[0] in arrays}


def array_ids_by_name(
    names: Sequence[str], patience_seconds: float, include_ended: bool = True
) -> dict[str, list[str]]:
    """{name of an array: its ids, newest last} of the arrays that Slurm knows.
    include_ended: also arrays that only accounting knows.

    Raises:
        LaunchError: the controller, or accounting, does not answer.
    """
    array_ids: dict[str, set[int]] = {}
    name_list = ",".join(names)
    lines = run_slurm(
        ["squeue", "--noheader", "--states=all", f"--name={name_list}", "--format=%F|%j"], patience_seconds
    ).splitlines()
    try:
        argv = [
            "sacct",
            "-n",
            "-X",
            "--parsable2",
            f"--name={name_list}",
            f"--starttime={_OLD}",
            "--format=JobID,JobName",
        ]
        lines += run_slurm(argv, patience_seconds).splitlines() if include_ended else []
    except Refusal as error:
        if not _NO_ACCOUNTING.search(error.message):
            raise
    for line in lines:
        job_id, _, name = line.strip().partition("|")
        if name in names and (ids := list(expand(job_id))):
            array_ids.setdefault(name, set()).add(int(ids[0].partition("_")[0]))
    return {name: [str(number) for number in sorted(numbers)] for name, numbers in array_ids.items()}


def _arrays(job_ids: Iterable[str]) -> str:
    """The arrays of `job_ids`, for --jobs; empty if that is too long, so that all jobs must be listed."""
    array_list = ",".join(sorted({job_id.partition("_")[0] for job_id in job_ids}))
    return array_list if len(array_list) < _LONGEST_ARGUMENT else ""


def _query_controller(arrays: str, patience_seconds: float) -> Iterator[tuple[str, SchedulerState]]:
    columns = ",".join(f"{name}:{width}|" for name, width in _QUEUE_FIELDS.items())
    selection = f"--jobs={arrays}" if arrays else "--me"
    try:
        text = run_slurm(
            ["squeue", "--noheader", "--array", "--states=all", selection, f"--Format={columns}"], patience_seconds
        )
    except Refusal as error:
        if "invalid job id" in error.message.lower():  # the controller knows none of them
            return
        raise
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < len(_QUEUE_FIELDS):
            continue
        job_id, word, reason, node, time_used, restarts, status, start = cells[: len(_QUEUE_FIELDS)]
        exit_code = f"{int(status) >> 8}:{int(status) & 127}" if status.isdigit() else ""
        state = _scheduler_state(
            word, reason, node, exit_code, parse_seconds(time_used), int(restarts) if restarts.isdigit() else 0
        )
        if state.state == "queued" and re.fullmatch(r"[\d-]+T[\d:]+", start):
            state = replace(
                state, reason="; ".join(text for text in (state.reason, f"expected to start {start}") if text)
            )
        yield from ((one, state) for one in expand(job_id))


def _query_accounting(arrays: str, patience_seconds: float) -> dict[str, SchedulerState]:
    selection = [f"--jobs={arrays}"] if arrays else [f"--starttime={_OLD}"]
    fields = "--format=JobID,State,Reason,NodeList,ElapsedRaw,ExitCode,Submit"
    text = run_slurm(["sacct", "-n", "-X", "-D", "--parsable2", *selection, fields], patience_seconds)
    attempts: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) == fields.count(",") + 1:
            for one in expand(cells[0]):
                attempts.setdefault(one, []).append(cells)
    states = {}
    for job_id, records in attempts.items():
        # Each start of a requeued job has its own record.
        records.sort(key=lambda cells: cells[6])
        _, word, reason, node, elapsed, exit_code, _ = records[-1]
        state = _scheduler_state(
            word, reason, node, exit_code, float(elapsed) if elapsed.isdigit() else None, len(records) - 1
        )
        if state.state in ("queued", "running"):
            reason = f"accounting reports {state.word}, but the controller does not know the job"
            state = SchedulerState("unknown", state.word, reason, state.node, state.seconds, state.restarts)
        states[job_id] = state
    return states


def _query_memory(job_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """{job id: (peak memory of steps, requested memory)} in Slurm's format: "531620K", "500M"; {} without an answer."""
    try:
        argv = ["sacct", "-n", "--parsable2", f"--jobs={','.join(job_ids)}", "--format=JobID,MaxRSS,ReqMem"]
        lines = run_slurm_once(argv, _MEMORY_SECONDS).splitlines() if job_ids else []
    except LaunchError:
        return {}
    memory_by_job: dict[str, tuple[str, str]] = {}
    for line in lines:
        step, peak, limit = [*line.split("|"), "", ""][:3]
        job_id = step.partition(".")[0]
        before = memory_by_job.get(job_id, ("", ""))
        # The row of the job has the limit, the rows of its steps have the usage. Before 21.08, "500Mn" is per node.
        memory_by_job[job_id] = max(peak, before[0], key=_bytes), before[1] or limit.removesuffix("n")
    return {job_id: memory for job_id, memory in memory_by_job.items() if _bytes(memory[0]) and job_id in job_ids}


def _bytes(text: str) -> float:
    """Bytes in "531620K" or "4G"; 0 for other forms, such as "500Mc" (per CPU)."""
    match = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or " ") if match else 0.0


def _scheduler_state(
    word: str, reason: str, node: str, exit_code: str, seconds: float | None, restarts: int
) -> SchedulerState:
    """Convert Slurm's state. word: "RUNNING", "CANCELLED by 0", "CANCELLED+"…; exit_code: "1:0", code and signal."""
    word = word.split(maxsplit=1)[0].rstrip("+") if word.strip() else ""
    state = STATES.get(word, "unknown")
    if state == "queued" and reason == _HOPELESS:
        state = "cancelled"  # Slurm cancels it in its next scheduling pass, due to --kill-on-invalid-dep
    message = "" if reason in ("None", "NonZeroExitCode", "(null)", "N/A") else reason
    if state in ("running", "completed"):
        message = ""
    elif state == "failed":
        message = _REASONS.get(word) or _describe_exit(exit_code) or message
    elif state == "cancelled" and message != _HOPELESS:
        message = ""
    node = "" if node in ("None assigned", "(null)", "N/A", "n/a") else node
    return SchedulerState(state, word, message, node, None if state == "queued" else seconds, restarts)


def _describe_exit(exit_code: str) -> str:
    code, _, number = exit_code.partition(":")
    if number == _NO_OUTPUT:
        return "the node cannot open the job's output (exit code 0:53); check that the node sees the folder of the runs"
    if number.isdigit() and int(number):
        try:
            return f"killed by {signal.Signals(int(number)).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exit code {code}" if code.isdigit() and int(code) else ""
