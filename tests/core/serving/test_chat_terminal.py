"""Chat in a pseudo-terminal: prompt, line editing, streaming, commands, Ctrl-C."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.core.serving import pretrained_folders

SECONDS = 120
UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"


_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);os.execv(sys.executable, "
    "[sys.executable, '-m', *sys.argv[1:]])"
)
"""Makes standard input the controlling terminal, whose Ctrl-C is a signal, and runs a module."""


class Keyboard:
    """A command in a pseudo-terminal."""

    def __init__(self, words: list[str]) -> None:
        self.screen, terminal = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *words],
            cwd=ROOT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"},
        )
        os.close(terminal)
        self.text, self.seen = "", 0

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def wait_for(self, text: str) -> int:
        """Read until a text appears after the last one that was waited for; returns where it ends."""
        end = time.monotonic() + SECONDS
        while text not in self.text[self.seen :]:
            assert time.monotonic() < end, self.text
            if select.select([self.screen], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.screen, 4096).decode("utf-8", "replace")
                except OSError:
                    pytest.fail(f"ended: {self.text}")
        self.seen = self.text.index(text, self.seen) + len(text)
        return self.seen

    def type_until(self, keys: str, text: str) -> None:
        """Type `keys` until a text appears, as a key is lost while the terminal changes its mode."""
        end = time.monotonic() + SECONDS
        while text not in self.text[self.seen :]:
            assert time.monotonic() < end, self.text
            self.type(keys)
            if select.select([self.screen], [], [], 5)[0]:
                self.text += os.read(self.screen, 4096).decode("utf-8", "replace")
        self.wait_for(text)

    def end(self) -> int:
        return self.process.wait(SECONDS)


@pytest.fixture
def keyboard(tmp_path: Path) -> Iterator[Keyboard]:
    pretrained_folders.save(tmp_path / "model", positions=1 << 20)
    keyboard = Keyboard(
        ["src.serving.chat", str(tmp_path / "model"), "--temperature", "0", "--max_new_tokens", "1000000"]
    )
    yield keyboard
    keyboard.process.kill()
    keyboard.process.wait()
    os.close(keyboard.screen)


@pytest.mark.slow
def test_chat_in_a_terminal(keyboard: Keyboard, tmp_path: Path):
    keyboard.wait_for("Loading")
    keyboard.wait_for("Loaded in")
    keyboard.wait_for("> ")
    keyboard.type_until(CTRL_C, "Ctrl-D")
    keyboard.wait_for("> ")
    keyboard.type("helxo\x7f\x7flo\r")  # line editing: two characters are deleted
    keyboard.wait_for("\n")
    start = keyboard.seen
    while len(keyboard.text) < start + 200:  # streamed: the answer has 1,000,000 tokens
        keyboard.text += os.read(keyboard.screen, 64).decode("utf-8", "replace")
    keyboard.type(CTRL_C)
    keyboard.wait_for("(stopped)")
    keyboard.wait_for("> ")
    keyboard.type(UP)
    keyboard.wait_for("hello")
    keyboard.type("\x15/help\r")
    keyboard.wait_for("/save FILE")
    keyboard.wait_for("> ")
    keyboard.type(f"/save {tmp_path}/saved.jsonl\r")
    keyboard.wait_for("saved\r\n")
    keyboard.wait_for("> ")
    keyboard.type("/reset\r")
    keyboard.wait_for("(restarted)")
    keyboard.wait_for("> ")
    keyboard.type("/quit\r")
    assert keyboard.end() == 0
    messages = json.loads((tmp_path / "saved.jsonl").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "hello"
    assert len(messages[1]["content"]) > 50


@pytest.mark.slow
def test_end_of_file_ends_the_chat(keyboard: Keyboard):
    keyboard.wait_for("> ")
    keyboard.type(CTRL_D)
    assert keyboard.end() == 0
