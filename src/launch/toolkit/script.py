"""What runs inside a job of the toolkit: waits for parents, appends to the logs, and has the training stop before the time is over."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from src.launch.command import STOPPED, Processes, shell_line
from src.launch.job import Job
from src.runs.metadata import STATUS

PORT = 29501
"""Where the first of several nodes listens."""

# With replicas the toolkit numbers the nodes by the variables that torchrun gives to processes. No training may take them for its own.
_NODES = f"""\
NODE_RANK=${{RANK:-0}}; unset RANK WORLD_SIZE LOCAL_RANK
export NODE_RANK NNODES MASTER_PORT={PORT}
[ "$NODE_RANK" = 0 ] || {{ OUT="$OUT.node$NODE_RANK"; ERR="$ERR.node$NODE_RANK"; }}"""

# The first line of a status that names a state, and since when it says the same.
_WAIT = f"""\
pause() {{ sleep "$1" & wait $!; [ -z "$TOLD" ] || exit {STOPPED}; }}
wait_for() {{
    status=$2/{STATUS}; since=$SECONDS; before=
    while :; do
        state=$(sed -n 's/^ *"state": "\\([a-z]*\\)".*/\\1/p' "$status" 2> /dev/null | head -n 1)
        [ "$state" != "$before" ] && {{ since=$SECONDS; before=$state; }}
        case "$state" in
            done) return ;;
            failed | stopped) limit=$PATIENCE ;;
            *) limit=$LONGEST ;;
        esac
        if [ $((SECONDS - since)) -ge "$limit" ]; then
            echo "not started: it starts from experiment $1, which is ${{state:-not started}} for $limit seconds; see $status" >&2
            exit 1
        fi
        pause "$POLL"
    done
}}"""

# The training is a process group of its own, so that a signal reaches all of it; this shell goes on until it has ended.
_RUN = """\
set -m
bash -c "$LINE" < /dev/null &
CHILD=$!
{ sleep "$STOP_AFTER"; kill -s USR1 -- "-$CHILD"; } 2> /dev/null &
CLOCK=$!
set +m
wait "$CHILD"; CODE=$?
while [ -n "$TOLD" ]; do
    TOLD=; wait "$CHILD"; AGAIN=$?
    [ $AGAIN = 127 ] || CODE=$AGAIN
done
kill -- "-$CLOCK" 2> /dev/null
exit $CODE"""


@dataclass(frozen=True)
class Times:
    """Seconds."""

    stop_after: float
    """From the start of the job until the training gets SIGUSR1, so that it writes a checkpoint and ends with `STOPPED`."""
    poll: float
    """How often each parent is looked at."""
    patience: float
    """How long a parent may be failed or stopped."""
    longest: float
    """How long a parent may say the same otherwise: not started, or running."""


def render_script(job: Job, parents: Mapping[str, Path], processes: Processes, times: Times) -> str:
    """Bash that runs `job`, appending what it prints to its logs; replicas but the first have logs of their own.

    parents: save directories by id, whose experiments must be done first. One that is late ends the job with a message that names it.
    """
    out, err = (job.log_dir / f"{job.exp_id}.{stream}.log" for stream in ("out", "err"))
    lines = [
        "#!/bin/bash",
        f"OUT={_quote(out)}; ERR={_quote(err)}; TOLD=; CHILD=",
        f"NNODES={processes.nodes}",
        _NODES,
        'exec >> "$OUT" 2>> "$ERR" || exit 1',
        'echo "== $(date -u +%FT%TZ) job ${EAI_JOB_ID:-?} run ${EAI_RUN_INDEX:-0} on $HOSTNAME" >&2',
        *(f"""trap 'TOLD=1; [ -z "$CHILD" ] || kill -s {name} -- "-$CHILD" 2> /dev/null' {name}""" for name in ("TERM", "USR1")),
        f"POLL={times.poll:g}; PATIENCE={times.patience:.0f}; LONGEST={times.longest:.0f}; STOP_AFTER={times.stop_after:.0f}",
        _WAIT,
        *(f"wait_for {parent} {_quote(run)}" for parent, run in parents.items()),
        # What waiting took is no longer there for the training.
        "STOP_AFTER=$((STOP_AFTER > SECONDS ? STOP_AFTER - SECONDS : 1))",
        f"cd {_quote(job.cwd)} || exit 1",
        f"LINE={shlex.quote(shell_line(job, processes))}",
        _RUN,
    ]
    return "\n".join(lines) + "\n"


def parents_to_await(job: Job, submitted: Sequence[str]) -> dict[str, Path]:
    """Save directories of the parents for which `job` waits: those of its own submission, all where some are queued from an earlier one.

    submitted: ids of its submission, in order.
    """
    ahead = set(submitted[: submitted.index(job.exp_id)])
    return {parent: job.run.parent / parent for parent in job.after if parent in ahead or job.after_jobs}


def _quote(path: Path) -> str:
    return shlex.quote(str(path))
