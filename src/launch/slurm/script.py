"""The script of a Slurm array, the same for all tasks, and a file with the command of each task."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from src.errors import RunError
from src.files import reading, write_atomic, writing
from src.launch.command import STOP_AFTER_FAILURES, STOPPED_EXIT, Processes, shell_line
from src.launch.job import Job

SCRIPT = "job.sh"
GRACE_SECONDS = 60
"""How long an experiment in a shared task can take to stop before it is killed."""
REQUEUE_OUTCOME = "requeue"
"""Replaces the exit code of an experiment in a shared task that requests a requeue."""
REQUEUE = """\
    for pause in 1 2 4 8 16; do
        if scontrol requeue "$this"; then exit 0; fi
        sleep $pause
    done
    echo "slurm: a limit is reached, and the job could not be requeued; submit it again" >&2
"""
_SCRIPT_TEXT = (
    (
        """\
#!/bin/bash
# One experiment of an array: number $3, or the number of the task. The file $1 has six fields per experiment, each
# terminated by a zero byte: experiment id, save directory, files for output and errors, whether to requeue it, and the
# bash to run.
# Near the time limit Slurm sends USR1 only to this script. It stops the task, and requeues it once the task has written
# its checkpoint. A task that stopped at its own limit is requeued as well.
# Slurm's TERM (preemption, scancel) reaches every process; Slurm decides whether to requeue.
# An experiment in a shared task (see jobs.sh) writes its exit code, or a request to requeue, into $4.code.
# If the file $4.kill exists, the experiment is stopped, and killed after a grace period.
this=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
index=${3:-$SLURM_ARRAY_TASK_ID} shared=$4 ended= watch=
if [ -n "$shared" ]; then
    leave() {
        [ -z "$watch" ] || kill "$watch" 2> /dev/null
        echo "${ended:-$1}" > "$shared.new" && mv "$shared.new" "$shared.code"
    }
    trap 'leave $?' EXIT
fi
mapfile -d '' -s $((6 * index)) -n 6 task < "$1"
if [ ${#task[@]} -ne 6 ]; then
    echo "$this: $1 does not hold its command" >&2
    exit 1
fi
exec >> "${task[2]}" 2>> "${task[3]}"
submission=${1%/*} submission=${submission##*/}
why=${shared:-${1%/*/*}/shared_tasks/$this.$submission}.why  # exists if it was not started
rm -f "$why"
FAILURES=${1%/*}/quick_failures MOST=${2:-0}
"""
        + STOP_AFTER_FAILURES
        + """\
if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] && queue_is_stopped; then
    echo "slurm: $STOP_REASON" >&2
    mkdir -p "${why%/*}" && echo "$STOP_REASON" > "$why"
    exit 1
fi
newest() { ls "${task[1]}/checkpoints" 2> /dev/null | grep '^step-' | sort -V | tail -n 1; }
had=$(newest)
fruitless=${1%.tasks}.$index.fruitless  # exists if the previous start wrote no checkpoint

step= stop_signal= signals=0
send_stop() {
    if [ "$NNODES" -eq 1 ]; then
        kill -TERM -- "-$step"
        return
    fi
    # A signal to srun itself would kill its tasks.
    local i
    for i in 1 2 3 4 5 6 7 8 9 10; do
        if squeue --noheader --steps="$this.0" --format=%i 2> /dev/null | grep -q . &&
            scancel --signal=TERM "$this.0"; then return; fi
        kill -0 "$step" 2> /dev/null || return
        sleep 1
    done
    echo "slurm: the processes could not be signalled that the time limit is near" >&2
}
trap 'stop_signal=USR1; signals=$((signals + 1)); [ -z "$step" ] || send_stop' USR1
trap 'stop_signal=${stop_signal:-TERM}; signals=$((signals + 1))' TERM
family() {  # includes processes in other sessions, such as torchrun's ranks
    local child
    for child in $(cat "/proc/$1/task/"*/children 2> /dev/null); do family "$child"; done
    echo "$1"
}

[ -n "$shared" ] || export JOBS_PER_GPU=1
export NNODES=${SLURM_NNODES:-1} MASTER_ADDR=127.0.0.1
export MASTER_PORT=$((20000 + (SLURM_JOB_ID + 3989 * ${SLURM_RESTART_COUNT:-0} + 1013 * ${3:-0}) % 10000))
start=(bash -c "${task[5]}")
if [ "$NNODES" -gt 1 ]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # The address, as node names need not resolve outside Slurm.
    MASTER_ADDR=$(scontrol --oneliner show node "$first" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
    MASTER_ADDR=${MASTER_ADDR:-$first}
    [ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    # A failed rank ends all ranks.
    start=(srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 "${start[@]}")
fi
set -m  # run in a separate process group, so that it can be signalled
"${start[@]}" < /dev/null &
step=$!
set +m
[ "$stop_signal" != USR1 ] || send_stop
if [ -n "$shared" ]; then
    (
        until [ -e "$shared.kill" ]; do sleep 1; done
        send_stop
        for ((i = 0; i < GRACE_SECONDS; i++)); do sleep 1; done
        kill -KILL -- "-$step" $(family "$step")
    ) &
    watch=$!
fi
while :; do
    before=$signals
    wait "$step"
    code=$?
    [ "$signals" != "$before" ] || break
done
# The training stopped at its own limit, such as memory, or to rewind to an earlier checkpoint.
limit=
if [ $code -eq STOPPED_EXIT ] && grep -qs '"stopped_by": "limit"' "${task[1]}/status.json"; then limit=1; fi
if [ -z "$stop_signal$limit" ] && [ "$NNODES" -gt 1 ]; then
    case $code in STOPPED_EXIT | 143) code=1 ;; esac  # stopped by srun, as another node failed
fi
if [ -n "$shared" ] && [ -e "$shared.kill" ]; then exit $code; fi
if { [ "$stop_signal" = USR1 ] || [ -n "$limit" ]; } && [ "${task[4]}" = 1 ]; then
    case $code in
        STOPPED_EXIT | 137 | 143)
            if [ "$(newest)" != "$had" ]; then
                rm -f "$fruitless"
            elif [ -e "$fruitless" ]; then
                echo "slurm: two starts in a row reached their limit without a new checkpoint," \
                    "so it is not requeued. Raise 'time' of the job config, then submit it again" >&2
                exit $code
            else
                touch "$fruitless"
            fi
            if [ -n "$shared" ]; then
                ended=REQUEUED
                exit 0
            fi
"""
        + REQUEUE
        + """\
            ;;
    esac
fi
count_failure $code $SECONDS
exit $code
"""
    )
    .replace("REQUEUED", REQUEUE_OUTCOME)
    .replace("STOPPED_EXIT", str(STOPPED_EXIT))
)


def write_script(folder: Path) -> Path:
    """Write the script that every array of the submission in `folder` runs. Raises RunError if the disk refuses."""
    write_atomic(folder / SCRIPT, _SCRIPT_TEXT.replace("GRACE_SECONDS", str(GRACE_SECONDS)), private=True)
    return folder / SCRIPT


def write_tasks(tasks: Path, jobs: Sequence[Job], lines: Sequence[str], requeue: bool) -> None:
    """Write the file of an array: task i is jobs[i] and runs lines[i]. Raises RunError if the disk refuses."""
    with writing(tasks):
        for log_dir in {job.log_dir for job in jobs}:
            log_dir.mkdir(parents=True, exist_ok=True)
    fields = []
    for job, line in zip(jobs, lines, strict=True):
        logs = job.log_dir.absolute()
        out, err = (f"{logs}/{job.exp_id}.{stream}.log" for stream in ("out", "err"))
        fields += [job.exp_id, str(job.run.absolute()), out, err, str(int(requeue)), line]
    write_atomic(tasks, os.fsencode("".join(f"{field}\0" for field in fields)), private=True)
    tasks.with_suffix(".log").touch(mode=0o600)


def task_line(job: Job, processes: Processes, environment: Mapping[str, str], setup: Sequence[str]) -> str:
    """Bash that each node runs for `job`.

    Bash itself ignores the stop signal. Only the first node exits with `STOPPED_EXIT`: srun would kill it in the middle
    of writing the checkpoint as soon as another node exits with a code other than 0.
    """
    return "\n".join(
        [
            "trap : TERM USR1",
            "export NODE_RANK=${SLURM_NODEID:-0}",
            f"cd -- {shlex.quote(str(job.cwd.absolute()))} || exit 1",
            *setup,
            f"bash -c {shlex.quote(shell_line(job, processes, environment))}",
            "code=$?",
            f'[ $code -ne {STOPPED_EXIT} ] || [ "$NODE_RANK" = 0 ] || code=0',
            "exit $code",
        ]
    )


def read_exp_ids(tasks: Path) -> list[str]:
    """The experiments of an array, in the order of its tasks. Raises RunError if the file cannot be read."""
    with reading(tasks, RunError):
        return [os.fsdecode(field) for field in tasks.read_bytes().split(b"\0")[:-1:6]]
