"""Servers that end with a test."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import ROOT


@contextmanager
def running_server(arguments: list[str], env: dict[str, str] | None = None) -> Iterator[str]:
    """The address of a server process, which ends with the block. It may tell of no error that nobody has caught."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if match := re.search(r"http://\S+:[1-9]\d*\S*", line):
                yield match[0]
                process.terminate()
                output = process.communicate(timeout=300)[0]
                errors = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", output, re.MULTILINE)
                assert all("Closed" in error for error in errors), output  # a browser that has left is none
                return
        pytest.fail("the server ended: " + "".join(lines))
    finally:
        process.terminate()
        process.communicate(timeout=300)
