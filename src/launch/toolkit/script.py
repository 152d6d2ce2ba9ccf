"""Bash script of a toolkit job: wait for parents, append to logs, and stop the training before the time limit."""

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from src.launch.command import STOP_AFTER_FAILURES, STOPPED_EXIT, shell_line
from src.launch.job import Job
from src.launch.toolkit.service import JobConfig
from src.runs.store import STATUS

GAVE_UP = ".gave_up"
"""Suffix of a file next to the script of a job that was not started. The file has the reason if the queue was stopped,
and is empty if the job gave up waiting for a parent."""
PORT = 29501
"""Port on which the first of several nodes listens."""

# The toolkit numbers replicas with torchrun's variables for ranks; a training must not use them as its rank.
_NODES = f"""\
NODE_RANK=${{RANK:-0}}; unset RANK WORLD_SIZE LOCAL_RANK
export NODE_RANK NNODES MASTER_PORT={PORT}
[ "$NODE_RANK" = 0 ] || {{ OUT="$OUT.node$NODE_RANK"; ERR="$ERR.node$NODE_RANK"; }}"""

# Waits until a parent's status.json is "done"; gives up if it does not change for too long, or if the parent's own job
# gave up. A failure from before this job was submitted ($3: digest of the file) does not count: the parent was
# resubmitted together with it.
_WAIT = f"""\
exit_if_signalled() {{ [ -z "$SIGNALLED" ] || exit {STOPPED_EXIT}; }}
pause() {{ exit_if_signalled; sleep "$1" & wait $!; exit_if_signalled; }}
GAVE_UP={GAVE_UP}; rm -f "$0$GAVE_UP"
give_up() {{ echo "not started: it starts from experiment $*" >&2; : > "$0$GAVE_UP"; exit 1; }}
check_queue() {{  # only on the first node, and not after a restart
    [ "$NODE_RANK" != 0 ] || [ "${{EAI_RUN_INDEX:-0}}" != 0 ] || ! queue_is_stopped || {{
        echo "$STOP_REASON" >&2; echo "$STOP_REASON" > "$0$GAVE_UP"; exit 1
    }}
}}
wait_for() {{
    status=$2/{STATUS}; since=$SECONDS; before=
    while check_queue; do
        state=$(sed -n 's/^ *"state": "\\([a-z]*\\)".*/\\1/p' "$status" 2> /dev/null | head -n 1)
        [ "$state" != "$before" ] && {{ since=$SECONDS; before=$state; }}
        limit=$LONGEST
        case "$state" in
            done) return ;;
            failed | stopped) [ "$(md5sum < "$status" | cut -c 1-32)" = "$3" ] || limit=$PATIENCE ;;
        esac
        [ ! -e "${{0%/*}}/$1.sh$GAVE_UP" ] || give_up "$1, which was not started either"
        if [ $((SECONDS - since)) -ge "$limit" ]; then
            give_up "$1, which is ${{state:-not started}} for $limit seconds; see $status"
        fi
        pause "$POLL"
    done
}}"""

# The training has its own process group, so that a signal reaches all its processes; this shell outlives it.
_RUN = """\
exit_if_signalled
set -m
bash -c "$LINE" < /dev/null &
CHILD=$! START_SECONDS=$SECONDS EARLY=$SIGNALLED  # one command: no trap runs in between
[ -z "$EARLY" ] || kill -s KILL -- "-$CHILD"  # it has not started any work
{ sleep "$STOP_AFTER"; kill -s USR1 -- "-$CHILD"; } 2> /dev/null &
CLOCK=$!
set +m
wait "$CHILD"; CODE=$?
while [ -n "$SIGNALLED" ]; do
    SIGNALLED=; wait "$CHILD"; AGAIN=$?
    [ $AGAIN = 127 ] || CODE=$AGAIN
done
kill -- "-$CLOCK" 2> /dev/null
[ -n "$STOP_REQUESTED" ] || [ "$NODE_RANK" != 0 ] || count_failure $CODE $((SECONDS - START_SECONDS))
exit $CODE"""


def render_script(job: Job, parents: Mapping[str, Path], config: JobConfig) -> str:
    """Bash that runs `job` and appends its output to its logs; each replica after the first has separate logs.

    parents: save directories by id. The job waits until they are done, or gives up with a message.
    """
    out, err = (job.log_dir / f"{job.exp_id}.{stream}.log" for stream in ("out", "err"))
    stop_after = config.max_run_seconds - config.stop_before_seconds
    lines = [
        "#!/bin/bash",
        f"OUT={_quote(out)}; ERR={_quote(err)}; SIGNALLED=; STOP_REQUESTED=; CHILD=",
        f"NNODES={config.processes.nodes}",
        _NODES,
        'exec >> "$OUT" 2>> "$ERR" || exit 1',
        *(
            f"trap 'SIGNALLED=1; STOP_REQUESTED=1; "
            f"""[ -z "$CHILD" ] || kill -s {name} -- "-$CHILD" 2> /dev/null' {name}"""
            for name in ("TERM", "USR1")
        ),
        'echo "== $(date -u +%FT%TZ) job ${EAI_JOB_ID:-?} run ${EAI_RUN_INDEX:-0} on $HOSTNAME" >&2',
        (
            f"POLL={config.parent_poll_seconds:g}; PATIENCE={config.parent_patience_seconds}; "
            f"LONGEST={config.parent_wait_seconds}"
        ),
        f"MOST={config.stop_after_failures}; FAILURES=${{0%/*}}/quick_failures",
        STOP_AFTER_FAILURES + _WAIT,
        *(f"wait_for {parent} {_quote(run)} {_digest(run / STATUS)}" for parent, run in parents.items()),
        "check_queue",
        # The time of waiting for parents counts. At the limit the training gets SIGUSR1, saves, and exits.
        f"STOP_AFTER=$(({stop_after} > SECONDS ? {stop_after} - SECONDS : 1))",
        f"cd {_quote(job.cwd)} || exit 1",
        f"LINE={shlex.quote(shell_line(job, config.processes))}",
        _RUN,
    ]
    return "\n".join(lines) + "\n"


def parents_to_await(job: Job, submitted_ids: Sequence[str]) -> dict[str, Path]:
    """Save directories of the parents to wait for:
    those earlier in `submitted_ids`, or all if some are queued from an earlier submission."""
    earlier_ids = set(submitted_ids[: submitted_ids.index(job.exp_id)])
    return {parent: job.run.parent / parent for parent in job.after if parent in earlier_ids or job.after_jobs}


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _digest(path: Path) -> str:
    """MD5 digest of a file, as printed by md5sum; "none" without a file."""
    try:
        return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    except FileNotFoundError:
        return "none"
