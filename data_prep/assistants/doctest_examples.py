"""Doctest examples of the standard library with their output; each module runs twice in a separate process."""

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_prep.metadata import stdlib_pages
from src.files import ROOT

MODULE_TIMEOUT = 60
"""Timeout per module."""
_PROGRAM = "import sys; from data_prep.assistants import doctest_examples; doctest_examples.main(sys.argv[1])"
MAX_CHARACTERS = 300
"""Maximum length of the code of an example, including the preceding lines of its docstring."""


def examples() -> list[tuple[str, str]]:
    """List (code, output) of the examples that print the documented output in both runs, in module order."""
    with ThreadPoolExecutor(2) as pool:
        module_examples = pool.map(_run, filter(_has_examples, stdlib_pages.modules()))
        return list(
            dict.fromkeys(
                (code, output) for examples_of_module in module_examples for code, output in examples_of_module
            )
        )


def _has_examples(name: str) -> bool:
    """Whether the source of a module or package contains examples. True for C modules, which have no source."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        return spec is not None
    path = Path(str(spec.origin))
    return path.suffix != ".py" or any(
        b">>>" in each.read_bytes()
        for each in (path.parent.glob("*.py") if spec.submodule_search_locations else [path])
    )


def _run(name: str) -> list[tuple[str, str]]:
    runs = []
    for _ in range(2):
        try:
            done = subprocess.run(
                [sys.executable, "-s", "-W", "ignore", "-c", _PROGRAM, name],
                capture_output=True,
                timeout=MODULE_TIMEOUT,
                check=True,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )
        except (subprocess.SubprocessError, OSError):
            return []
        runs.append([(code, output) for code, output in json.loads(done.stdout.splitlines()[-1])])
    again = set(runs[1])
    return [each for each in runs[0] if each in again]


def run_module(name: str) -> Iterator[tuple[str, str]]:
    """Run the examples of a module in this process; yield those that print the documented output."""
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        code, passed_lines = "", set[int]()
        runner = _Runner(passed_lines)
        with contextlib.redirect_stdout(io.StringIO()):
            runner.run(test, clear_globs=True)
        for number, example in enumerate(test.examples):
            code += example.source
            if (
                number in passed_lines
                and example.want.strip()
                and example.exc_msg is None
                and len(code) <= MAX_CHARACTERS
            ):
                yield code.rstrip("\n"), example.want.rstrip("\n")


class _Runner(doctest.DocTestRunner):
    """Record which examples print exactly the documented output."""

    def __init__(self, passed_lines: set[int]) -> None:
        super().__init__(verbose=False)
        self._passed_lines = passed_lines

    def report_start(self, out: Any, test: doctest.DocTest, example: doctest.Example) -> None:
        pass

    def report_success(self, out: Any, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        if got == example.want:
            self._passed_lines.add(test.examples.index(example))

    def report_failure(self, out: Any, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        pass

    def report_unexpected_exception(
        self, out: Any, test: doctest.DocTest, example: doctest.Example, exc_info: Any
    ) -> None:
        pass


def main(name: str) -> None:
    """Print the examples of a module as JSON in the last line; an empty list if the import fails."""
    all_examples = []
    with contextlib.suppress(Exception, SystemExit):
        all_examples = list(run_module(name))
    print("\n" + json.dumps(all_examples))
