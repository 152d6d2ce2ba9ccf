"""The command of one experiment, written so that every value arrives unchanged."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

_NGPUS = re.compile(r"(?<![\w${])NGPUS(?!\w)")
_COUNT_GPUS = (
    'export GPUS_HERE=$(if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then tr , \'\\n\' <<< "$CUDA_VISIBLE_DEVICES";'
    " else nvidia-smi -L 2> /dev/null | grep '^GPU '; fi | grep -c '^[^-]');"
    ' [ "$GPUS_HERE" -gt 0 ] || GPUS_HERE=1; '
)


@dataclass(frozen=True)
class Job:
    """One experiment to be run somewhere."""

    exp_id: str
    args: tuple[str, ...]
    """trainval.py and its arguments, as they must arrive."""
    cwd: Path
    """The folder that holds trainval.py."""
    python_binary: str | None = None
    """What stands before `args`, in bash: "source activate ENV ; torchrun --nproc-per-node NGPUS ". None: this Python."""
    after: tuple[str, ...] = ()
    """Ids that must have ended well before it starts, as far as they stand before it in the same submission."""


def shell_line(job: Job) -> str:
    """A line of bash that runs `job`; a value with a newline makes it several lines.

    The word NGPUS in `python_binary` becomes the number of GPUs of the machine that runs the line: those of
    CUDA_VISIBLE_DEVICES where it is set, else those of `nvidia-smi -L`, and 1 where there are none.
    """
    prefix = shlex.quote(sys.executable) if job.python_binary is None else job.python_binary
    counted = _NGPUS.sub("$GPUS_HERE", prefix)
    return f"{_COUNT_GPUS if counted != prefix else ''}{counted} {shlex.join(job.args)}"


def argv(job: Job) -> list[str]:
    """`shell_line` as the argument list of a process that any launcher can start without a shell of its own.

    bash outlives a SIGTERM until the command that it runs has ended, so that the end of the process means the end of the job.
    """
    return ["bash", "-c", f"trap 'exit 143' TERM; {shell_line(job)}"]
