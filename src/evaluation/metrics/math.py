"""Whether an answer is mathematically equal to a reference, by the library math-verify.

For example, 1/2 equals 0.5 and \\frac{1}{2}, and x + 1 equals 1 + x.
Words and letters, such as "yes" or the choice "A", are compared as text. An answer can end in `#### 42`, as in GSM8K.

The library calls sympy, which never returns for some texts. So it runs in another process, which forks for each
answer. Answers that time out quickly are judged a second time, all in parallel, and are wrong at the end of one longer
time limit. Limits are of processor time, so that verdicts do not depend on what else runs.
"""

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field

from src.errors import ConfigError, DataError
from src.experiments.dataset_protocols import Prediction
from src.experiments.interfaces import MetricConfig
from src.files import ROOT

CpuSeconds = Annotated[float, Field(gt=0)]
"""CPU time limit of one answer, and on each core for all slow answers of a batch; after it they are wrong."""

_METRIC = "metric 'math'"
_RIGHT, _WRONG, _NOTHING, _READY = "correct", "incorrect", "nothing", b"ready\n"
_MEMORY = 2 << 30
"""Bytes of address space per judging process."""
_QUICK_SECONDS = 0.3
"""CPU time of the first try. Answers of a few tokens take about 0.02 s, and several times as long on a busy machine."""
_POLL_MS = 20
"""How often the CPU time of slow answers is checked."""
_SLOW_AT_ONCE = 16
_BOXED_ANSWER = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_CONCLUSION = re.compile(r"(?i:\banswer(?: is:?|:))\s*(.+)")
_WRAPPED = re.compile(
    r"^(?:\\(?:boxed|text|textbf|mathbf|mathrm)\{([^{}]*)\}|\$+([^$]*)\$+|\*+([^*]+)\*+|\(([A-Za-z])\)|([A-Za-z])\)|(.+?)\.|([^\W\d_]{2,})!)$"
)
_WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*")


class Config(MetricConfig):
    """How long the judge may compute."""

    cpu_seconds: CpuSeconds = 5.0
    """See `CpuSeconds`."""

    def check(self) -> None:
        require_library(_METRIC)

    def score_names(self) -> tuple[str]:
        return ("solved",)

    def score(self, answers: Sequence[Prediction]) -> dict[str, list[float]]:
        """{"solved"}: whether each answer equals a reference, which can end in `#### 42`. A truncated answer can be
        right.

        Raises:
            DataError: no reference of an answer can be parsed.
        """
        self.check()
        references = [
            [each for each in answer.references if final_answer(each)] or answer.references for answer in answers
        ]
        pairs = [(answer.text, each) for answer, some in zip(answers, references, strict=True) for each in some]
        verdicts = iter(Judge(self.cpu_seconds, _METRIC).agree(pairs))
        by_answer = [[next(verdicts) for _ in some] for some in references]
        return {"solved": [float(any(each)) for each in by_answer]}


def require_library(user: str) -> None:
    """Raise ConfigError if math-verify is not installed. user: what needs it."""
    if find_spec("math_verify") is None:
        raise ConfigError(f"{user}: math-verify is not installed. Run: pip install -r requirements/math.txt")


def final_answer(text: str) -> str:
    """The text after the last `####`, as in GSM8K; all of the text if there is no `####`."""
    return text.rpartition("####")[2].strip()


class Judge:
    """The judging process. It is killed when this object is deleted or this process ends."""

    def __init__(self, cpu_seconds: float, user: str = "reward 'math'") -> None:
        """user: what needs the verdicts, for errors."""
        self.cpu_seconds, self.user = cpu_seconds, user
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def agrees(self, answer: str, expected: str) -> bool:
        """Whether one answer is equal to the expected answer; see `agree`."""
        return self.agree([(answer, expected)])[0]

    def agree(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether the answers of each (answer, expected answer) are equal.

        Raises:
            DataError: an expected answer cannot be parsed.
            ConfigError: the process cannot be started.
        """
        if not pairs:
            return []
        request = [[final_answer(answer), final_answer(expected)] for answer, expected in pairs]
        # Try twice: the system can have killed the process since the last batch.
        verdicts = self._ask(request) or self._ask(request)
        if verdicts is None:
            raise ConfigError(f"{self.user}: the judging process dies. Check that there is enough memory.")
        for (_, expected), verdict in zip(pairs, verdicts, strict=True):
            if verdict == _NOTHING:
                raise DataError(
                    f'{self.user}: cannot parse a row\'s "answer": {expected[-200:]!r}. Change or remove the row.'
                )
        return [verdict == _RIGHT for verdict in verdicts]

    def _ask(self, request: list[list[str]]) -> list[str] | None:
        """The verdicts; None if the process has died."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._stop()
            return None
        return json.loads(line)

    def _start(self) -> "subprocess.Popen[bytes]":
        command, root = (
            [sys.executable, "-m", "src.evaluation.metrics.math", str(self.cpu_seconds)],
            ROOT,
        )
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
        )
        self._process, self._end = process, weakref.finalize(self, _stop, process)
        assert process.stdout is not None
        if process.stdout.readline() != _READY:
            self._stop()
            raise ConfigError(f"{self.user}: {' '.join(command)} does not start in {root}. Run it by hand to see why.")
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.communicate()


def compare(answer: str, expected: str) -> str:
    """The verdict on an answer. There is no time limit."""
    from math_verify import parse, verify

    if _as_text(answer) == (text := _as_text(expected)) != "":
        return _RIGHT
    conclusion = (_BOXED_ANSWER.findall(answer) or _CONCLUSION.findall(answer) or [""])[-1]
    if conclusion and _as_text(conclusion) == text:
        return _RIGHT
    if (
        _WORDS.fullmatch(text) and len(text) > 1
    ):  # as mathematics it would be a product of letters, equal to any anagram
        return _WRONG
    reference: Any = parse(f"${expected}$", parsing_timeout=0) or parse(expected, parsing_timeout=0)
    if not reference:
        return _NOTHING
    readings = [answer, f"${answer}$"] if "$" not in answer and "\n" not in answer.strip() else [answer]
    parsed: Any = [parse(reading, parsing_timeout=0) for reading in readings]
    if conclusion and not any(parsed):
        parsed = [parse(f"${conclusion.strip(' .')}$", parsing_timeout=0)]
    return _RIGHT if any(verify(reference, each, timeout_seconds=0) for each in parsed) else _WRONG


def _as_text(answer: str) -> str:
    r"""The answer without \boxed, \text, dollar signs, asterisks, parentheses around a letter and the final period.
    Words are in lower case."""
    text = " ".join(answer.split())
    while True:
        shorter = _WRAPPED.sub(_first_group, text).strip()
        if shorter == text:
            break
        text = shorter
    return text.casefold() if _WORDS.fullmatch(text) and len(text) > 1 else text


def _first_group(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group is not None), "")


def _judge_all(pairs: Sequence[Sequence[str]], seconds: float) -> list[str]:
    """The verdict on each pair: first with little CPU time, then all slow pairs in parallel with one time limit."""
    verdicts = [_WRONG] * len(pairs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    slow = _judge(pairs, range(len(pairs)), verdicts, min(_QUICK_SECONDS, seconds), cores, None)
    if slow and seconds > _QUICK_SECONDS:
        _judge(pairs, slow, verdicts, seconds, _SLOW_AT_ONCE, seconds * cores)
    return verdicts


def _judge(
    pairs: Sequence[Sequence[str]],
    places: Sequence[int],
    verdicts: list[str],
    cpu_seconds: float,
    max_parallel: int,
    budget: float | None,
) -> list[int]:
    """Fill in `verdicts` at these places, with one child process each; returns the places without a verdict.
    budget: CPU seconds of all children together, after which they are killed; None: no limit."""
    waiting, running, failed = list(reversed(places)), dict[int, tuple[int, int]](), list[int]()
    poll, cpu_time = select.poll(), 0.0
    while running or (waiting and (budget is None or cpu_time < budget)):
        while waiting and len(running) < max_parallel:
            place = waiting.pop()
            descriptor, child = _fork(pairs[place], cpu_seconds)
            running[descriptor] = (place, child)
            poll.register(descriptor, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(None if budget is None else _POLL_MS)}
        is_over = budget is not None and cpu_time + sum(_cpu_seconds(child) for _, child in running.values()) >= budget
        for descriptor in [*running] if is_over else readable:
            place, child = running.pop(descriptor)
            if descriptor not in readable:
                os.kill(child, signal.SIGKILL)
            text = os.read(descriptor, 64).decode() if descriptor in readable else ""
            poll.unregister(descriptor)
            os.close(descriptor)
            usage = os.wait4(child, 0)[2]
            cpu_time += usage.ru_utime + usage.ru_stime
            if text:
                verdicts[place] = text
            else:
                failed.append(place)
    return failed


def _cpu_seconds(child: int) -> float:
    """CPU time of a running process, by the clock id that Linux's clock_getcpuclockid gives it; 0 elsewhere."""
    try:
        return time.clock_gettime((~child << 3) | 2)
    except OSError:
        return 0.0


def _fork(pair: Sequence[str], cpu_seconds: float) -> tuple[int, int]:
    """Start a child process that writes its verdict to a pipe; returns the pipe's descriptor and the child's id.
    The timer has no handler, so it kills the child."""
    outlet, inlet = os.pipe()
    child = os.fork()
    if child:
        os.close(inlet)
        return outlet, child
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        os.write(inlet, compare(*pair).encode())
    finally:
        os._exit(0)


def main() -> None:
    """Judge batches from standard input until it ends."""
    import resource

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for answer, expected in (("$\\frac{1}{2}$", "0.5"), ("so 42", "7"), ("1", "")):
        compare(answer, expected)  # load and compile everything that the children need
    answers = sys.stdout.buffer
    answers.write(_READY)
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_judge_all(json.loads(line), float(sys.argv[1]))).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
