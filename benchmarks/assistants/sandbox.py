"""Programs that a model wrote, isolated: how many run in a second on this machine.

    python -m benchmarks.assistants.sandbox [--programs 100] [--rounds 3] [--max_parallel N]

By value: one sandbox, which evaluates `7 + 12`. By tests: two, a function of two lines and three assertions about it,
which are three calls through a pipe. Beside them: Python that starts and ends, without any isolation. Rounds alternate;
the fastest counts. Each score is checked.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from src.systems.assistants.rewards import sandbox
from src.systems.assistants.rewards.interface import Rollout
from src.systems.assistants.rewards.python import Config

FUNCTION = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]


def measure(run: Callable[[], None], count: int) -> tuple[float, float]:
    """Programs a second, and milliseconds of a core for one, which other work on the machine changes less."""
    start, before = time.perf_counter(), os.times()
    run()
    after = os.times()
    return count / (time.perf_counter() - start), 1000 * (sum(after[:4]) - sum(before[:4])) / count


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max_parallel", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    sandbox.require()
    limits = sandbox.Limits(max_parallel=args.max_parallel)

    def score(config: Config, text: str) -> None:
        rollout = Rollout([{"role": "user", "content": "?"}], text, {"answer": 19, "tests": TESTS}, [0], 1, True)
        assert config.scores([rollout] * args.programs) == [1.0] * args.programs

    def start_bare() -> None:
        command = [os.path.realpath(sys.executable), "-I", "-S", "-c", "pass"]
        with ThreadPoolExecutor(args.max_parallel) as pool:
            list(pool.map(lambda _: subprocess.run(command, check=True), range(args.programs)))

    ways = {
        "bare Python": start_bare,
        "by value": lambda: score(Config(by="value", limits=limits), "7 + 12"),
        "by tests": lambda: score(Config(by="tests", limits=limits), FUNCTION),
    }
    rounds = [{name: measure(run, args.programs) for name, run in ways.items()} for _ in range(args.rounds)]
    for name in ways:
        speeds, costs = zip(*(results[name] for results in rounds), strict=True)
        print(f"{name:12} {max(speeds):6.1f} programs/s, {args.max_parallel} parallel, {min(costs):5.1f} ms of a core")


if __name__ == "__main__":
    main()
