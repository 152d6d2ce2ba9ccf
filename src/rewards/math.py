"""Whether an answer says what the row's "answer" says, as mathematics: 1/2 is 0.5 and \\frac{1}{2}, x + 1 is 1 + x (library math-verify).

The library calls sympy, which can compute for ever on what a model writes, and its own time limit needs the main thread. So it runs in a
process beside ours: one that is over its processor time or memory for an answer is ended by the system, that answer is wrong, and the
next answer gets a new process. The row's answer may end as GSM8K's do, in `#### 42`; so may the model's.
"""

import json
import logging
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from src.config import Places
from src.errors import ConfigError, DataError
from src.rewards.interface import RewardConfig, RewardSetting, Rollout, Scorer, final_answer, row_entry

_RIGHT, _WRONG, _NOTHING, _READY = b"right\n", b"wrong\n", b"nothing\n", b"ready\n"
_MEMORY = 4 << 30


class Config(RewardConfig):
    """Scores of right and wrong answers. One that was cut off at the most tokens is wrong."""

    right: float = 1.0
    wrong: float = 0.0
    cpu_seconds: float = Field(default=5.0, gt=0)
    """Processor time for one answer; one that takes more is wrong."""

    @property
    def row_key(self) -> str:
        return "answer"

    def check(self, places: Places) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError("reward 'math': the package math-verify is not installed: pip install -r requirements/math.txt")

    def scorer(self, setting: RewardSetting) -> Scorer:
        self.check(setting.places)
        judge = Judge(self.cpu_seconds)
        return lambda rollouts: self.scores(judge, rollouts)

    def scores(self, judge: "Judge", rollouts: Sequence[Rollout]) -> list[float]:
        """One for each."""
        expected = [str(row_entry(rollout.row, "answer")) for rollout in rollouts]
        pairs = zip(rollouts, expected, strict=True)
        return [self.right if rollout.ended and judge.agrees(rollout.text, answer) else self.wrong for rollout, answer in pairs]


class Judge:
    """The process beside ours. It ends when this object is gone, or this process."""

    def __init__(self, cpu_seconds: float) -> None:
        self.cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def agrees(self, answer: str, expected: str) -> bool:
        """Whether an answer says what is expected.

        Raises:
            DataError: what is expected is no mathematics.
            ConfigError: the process cannot be started.
        """
        process = self._process or self._start()
        found = _ask(process, {"answer": final_answer(answer), "expected": final_answer(expected)})
        if found == _NOTHING:
            raise DataError(f"reward 'math': a row's \"answer\" is no mathematics: {expected[-200:]!r}")
        if found not in (_RIGHT, _WRONG):
            self._stop()
        return found == _RIGHT

    def _start(self) -> "subprocess.Popen[bytes]":
        command, root = [sys.executable, "-m", "src.rewards.math", str(self.cpu_seconds)], Path(__file__).resolve().parents[2]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root)
        self._process, self._end = process, weakref.finalize(self, _stop, process)
        assert process.stdout is not None
        if process.stdout.readline() != _READY:
            self._stop()
            raise ConfigError(f"reward 'math': {' '.join(command)} does not start in {root}. Run it by hand to see why.")
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = None


def _ask(process: "subprocess.Popen[bytes]", question: Any) -> bytes:
    """Its line of answer; none where it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def _compare(answer: str, expected: str) -> bytes:
    from math_verify import parse, verify

    wanted: Any = parse(f"${expected}$", parsing_timeout=0) or parse(expected, parsing_timeout=0)
    if not wanted:
        return _NOTHING
    found: Any = parse(answer, parsing_timeout=0)
    return _RIGHT if verify(wanted, found, timeout_seconds=0) else _WRONG


def main() -> None:
    """Answer questions until there are no more. The timer has no handler, so it ends the process inside any computation."""
    import resource

    import math_verify  # noqa: F401  before the first timer

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = sys.stdout.buffer
    answers.write(_READY)
    answers.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
        found = _compare(**json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(found)
        answers.flush()


if __name__ == "__main__":
    main()
