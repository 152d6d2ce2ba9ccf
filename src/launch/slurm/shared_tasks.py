"""Tasks that run several experiments in parallel: script, job ids, and the outcome of each experiment.

Slurm knows only the task. For each experiment, the folder `shared_tasks` next to the submissions has up to three files
named by its job id: `.code` with its exit code, once it has ended; `.kill`, if it was killed; `.why` with the reason if
it was not started (also for unshared tasks), until its next start. The names include the name of the submission, as a
reinstalled cluster counts job ids from 1 again.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from src.files import write_atomic, writing
from src.launch.command import STOPPED_EXIT
from src.launch.job import SchedulerState
from src.launch.slurm.script import REQUEUE, REQUEUE_OUTCOME, SCRIPT

FOLDER = "shared_tasks"
SHARED_SCRIPT = "jobs.sh"
_ID = re.compile(r"(?P<task>\d+_\d+)\+(?P<place>\d+)of(?P<count>\d+)(?P<submission>\.[\w-]+)?")
_SCRIPT_TEXT = (
    """\
#!/bin/bash
# One task of an array with at most $3 experiments per task: runs SCRIPT for each in parallel, and waits for all.
# The file $4/JOB_ID.code has the exit code of each experiment; $4/JOB_ID.kill exists if it was killed.
# A restart of the task skips experiments that have ended for good.
this=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
SUBMISSION=${1%/*} SUBMISSION=${SUBMISSION##*/}
first=$(($3 * SLURM_ARRAY_TASK_ID))
mapfile -d '' -s $((6 * first)) -n $((6 * $3)) fields < "$1"
count=$((${#fields[@]} / 6))
if [ $count -eq 0 ]; then
    echo "$this: $1 does not hold its commands" >&2
    exit 1
fi
export JOBS_PER_GPU=$count${SLURM_GPUS_ON_NODE:+/$SLURM_GPUS_ON_NODE}
pids=() stop_signal= signals=0
send_stop() { [ ${#pids[@]} -eq 0 ] || kill -USR1 "${pids[@]}" 2> /dev/null; }
trap 'stop_signal=1; signals=$((signals + 1)); send_stop' USR1
trap 'signals=$((signals + 1))' TERM
for ((place = 0; place < count; place++)); do
    file=$4/$this+${place}of$count.$SUBMISSION
    ended=$(cat "$file.code" 2> /dev/null)
    if [ -e "$file.kill" ]; then continue; fi
    case $ended in
        "" | STOPPED_EXIT | REQUEUE_OUTCOME)
            rm -f "$file.code"
            bash "${1%/*}/SCRIPT" "$1" "$2" $((first + place)) "$file" &
            pids+=($!)
            ;;
    esac
done
[ -z "$stop_signal" ] || send_stop
for pid in "${pids[@]}"; do
    while :; do
        before=$signals
        wait "$pid"
        [ "$signals" != "$before" ] || break
    done
done
code=0 stopped= again=
for ((place = 0; place < count; place++)); do
    file=$4/$this+${place}of$count.$SUBMISSION
    if [ -e "$file.kill" ]; then continue; fi
    ended=$(cat "$file.code" 2> /dev/null || echo 1)
    case $ended in
        REQUEUE_OUTCOME) again=1 ;;
        STOPPED_EXIT) stopped=1 ;;
        *) [ $code -ne 0 ] || code=$ended ;;
    esac
done
if [ -n "$again" ]; then
    code=STOPPED_EXIT
"""
    + REQUEUE
    + """\
fi
[ -z "$stopped" ] || code=STOPPED_EXIT
exit $code
"""
)


def write_shared_script(folder: Path, outcomes: Path) -> Path:
    """Write the script of the shared tasks of the submission in `folder`, and make the folder of their `outcomes`.

    Raises:
        RunError: the disk refuses.
    """
    text = (
        _SCRIPT_TEXT.replace("REQUEUE_OUTCOME", REQUEUE_OUTCOME)
        .replace("STOPPED_EXIT", str(STOPPED_EXIT))
        .replace("SCRIPT", SCRIPT)
    )
    write_atomic(folder / SHARED_SCRIPT, text, private=True)
    with writing(outcomes):
        outcomes.mkdir(exist_ok=True)
    return folder / SHARED_SCRIPT


def job_ids(array_id: str, experiments: int, jobs_per_task: int, folder: Path) -> list[str]:
    """The job id of each experiment of an array of the submission in `folder`:
    "7_3" if it does not share the task, else "7_3+0of2.SUBMISSION".
    """
    if jobs_per_task == 1:
        return [f"{array_id}_{i}" for i in range(experiments)]
    counts = [min(jobs_per_task, experiments - first) for first in range(0, experiments, jobs_per_task)]
    return [
        f"{array_id}_{task}+{place}of{count}.{folder.name}"
        for task, count in enumerate(counts)
        for place in range(count)
    ]


def task_of(job_id: str) -> str:
    """The id that Slurm knows: "7_3" of "7_3+0of2.SUBMISSION"."""
    return job_id.partition("+")[0]


def with_outcomes(ids: Iterable[str], tasks: dict[str, SchedulerState], outcomes: Path) -> dict[str, SchedulerState]:
    """The state of each experiment, from Slurm's states of the `tasks` and from the experiment's own exit code."""
    states = {}
    notes = {_job_of(path.stem): path for path in sorted(outcomes.glob("*.why"))}
    for job_id in ids:
        if (task := tasks.get(task_of(job_id))) is not None:
            state = _state_of(outcomes / job_id, task) if _ID.fullmatch(job_id) else task
            was_not_started = job_id in notes and (state.word, state.reason) == ("FAILED", "exit code 1")
            states[job_id] = _explain(notes[job_id], state) if was_not_started else state
    return states


def forget_notes(array_id: str, folder: Path, outcomes: Path) -> None:
    """Remove notes of other submissions on an array with this id, from before the cluster was reinstalled."""
    for path in outcomes.glob(f"{array_id}_*.why"):
        if not path.stem.endswith(f".{folder.name}"):
            with writing(path):
                path.unlink(missing_ok=True)


def _job_of(stem: str) -> str:
    """The job id of a note. The id of an unshared task does not contain the name of the submission."""
    return stem if "+" in stem else stem.partition(".")[0]


def _explain(why: Path, failed: SchedulerState) -> SchedulerState:
    try:
        return replace(failed, state="cancelled", word="CANCELLED", reason=why.read_text().strip())
    except OSError:
        return failed


def _state_of(file: Path, task: SchedulerState) -> SchedulerState:
    is_killed = file.with_name(f"{file.name}.kill").exists()
    code = _read_code(file)
    if code == "0":
        return replace(task, state="completed", word="COMPLETED", reason="")
    if is_killed and (code is not None or task.state != "running"):
        return replace(task, state="cancelled", word="CANCELLED", reason="")
    if code in (None, str(STOPPED_EXIT), REQUEUE_OUTCOME):
        return task
    return replace(task, state="failed", word="FAILED", reason=f"exit code {code}")


def _read_code(file: Path) -> str | None:
    try:
        return file.with_name(f"{file.name}.code").read_text().strip() or None
    except OSError:
        return None


def kill(ids: Sequence[str], outcomes: Path) -> list[str]:
    """Stop experiments in shared tasks for good; return the ids to cancel: unshared tasks, and tasks that are over.

    Raises:
        RunError: the disk refuses.
    """
    remaining: dict[str, None] = {}
    for job_id in ids:
        if (match := _ID.fullmatch(job_id)) is None:
            remaining[job_id] = None
        elif outcomes.is_dir():
            if not _is_over(outcomes / job_id):
                with writing(outcomes / job_id):
                    (outcomes / f"{job_id}.kill").touch()
            neighbours = [
                outcomes / f"{match['task']}+{place}of{match['count']}{match['submission'] or ''}"
                for place in range(int(match["count"]))
            ]
            remaining |= dict.fromkeys([match["task"]] if all(map(_is_over, neighbours)) else [])
    return list(remaining)


def _is_over(file: Path) -> bool:
    """Whether the experiment was killed, or has ended for good."""
    return file.with_name(f"{file.name}.kill").exists() or _read_code(file) not in (
        None,
        str(STOPPED_EXIT),
        REQUEUE_OUTCOME,
    )
