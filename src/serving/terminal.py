"""Chat in a terminal, with commands, streamed answers, and Ctrl-C to stop an answer."""

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from src.data.jsonl import check_text
from src.errors import ConfigError, UserError
from src.experiments.config import unknown_text
from src.files import writing
from src.serving.writer import RESET, ConversationTooLong, Writer, is_reset

PROMPT = "> "
EMPTY = "(empty answer)"
"""Written to standard error after an answer without a visible character."""
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?")
_COMMANDS = {
    "help": "/help         lists these commands",
    "reset": "/reset        restarts the conversation",
    "save": "/save FILE    appends the conversation to FILE, as a row of JSON that prepare_conversations reads",
    "quit": "/quit         ends (or Ctrl-D)",
}


class Terminal:
    """One chat."""

    def __init__(self, writer: Writer, metadata: list[str], options: dict[str, Any]) -> None:
        """metadata: `KEY=VALUE` texts. options: for transformers' `generate`.

        Raises:
            ConfigError: the model was not trained with this metadata.
        """
        writer.set_metadata(metadata)
        self._writer, self._options = writer, options

    def answer(self, text: str) -> None:
        """Write the answer to standard output as it is generated.
        Ctrl-C stops it; the part that was written stays in the conversation.

        Raises:
            UserError: the model cannot read the text, or the conversation with it.
        """
        check_text(text, "the message")
        is_empty = True

        def show(piece: str) -> None:
            nonlocal is_empty
            is_empty = is_empty and not piece.strip()
            _show(piece)

        with _stopping_at_ctrl_c() as is_stopped:
            options = {**self._options, "stopping_criteria": [lambda ids, *_: _full(ids, is_stopped())]}
            self._writer.say(text, show, **options)
            _show("\n")
            if is_stopped():
                sys.stderr.write("(stopped)\n")
            else:
                write_remarks(is_empty, self._writer.remark)

    def run(self) -> None:
        """Answer lines of standard input until its end or /quit. In a terminal, with prompt, line editing and
        history."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            import readline  # noqa: F401  gives `input` line editing and a history

            sys.stderr.write(
                f"The model {self._writer.verb}. /help lists commands. Ctrl-C stops an answer, Ctrl-D ends.\n"
            )
        for line in _typed_lines() if is_terminal else sys.stdin:
            try:
                if not self._obey(line.strip()) and not self._say(line.rstrip("\n"), is_terminal):
                    return
            except UserError as error:  # the conversation continues
                advice = f" {RESET} restarts it." if isinstance(error, ConversationTooLong) else ""
                sys.stderr.write(f"error: {error}{advice}\n")

    def _say(self, text: str, is_terminal: bool) -> bool:
        if text.strip() == "/quit":
            return False
        if text.strip() or not is_terminal:
            self.answer(text)
        return True

    def _obey(self, line: str) -> bool:
        """Execute the line if it is a command other than /quit; returns whether it is."""
        match = _COMMAND.fullmatch(RESET if is_reset(line) else line)
        if match is None or line == "/quit":
            return False
        name, argument = match[1], match[2]
        if name not in _COMMANDS:
            raise ConfigError(f"/{name}: {unknown_text('command', name, _COMMANDS)} /help lists them.")
        if name == "help":
            sys.stderr.write("\n".join([*_COMMANDS.values(), ""]))
        elif name == "reset":
            self._writer.reset()
            sys.stderr.write("(restarted)\n")
        else:
            self._save(argument)
        return True

    def _save(self, name: str | None) -> None:
        if not name:
            raise ConfigError("/save: no file. Write /save FILE.")
        path = Path(name).expanduser()
        if not (rows := self._writer.rows()):
            raise ConfigError("/save: the conversation is empty. Write a message first.")
        with writing(path), open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        sys.stderr.write(f"{path}: saved\n")


def write_remarks(is_empty: bool, remark: str) -> None:
    """Write to standard error what an answer does not show: that it is empty, or truncated (`Writer.remark`)."""
    sys.stderr.writelines(f"{line}\n" for line in (EMPTY if is_empty else "", remark) if line)


def _full(ids: Any, value: bool) -> Any:
    import torch

    return torch.full((ids.shape[0],), value, device=ids.device)


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n(/quit or Ctrl-D ends)\n")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _stopping_at_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed in the block. A second Ctrl-C raises
    KeyboardInterrupt."""
    stop_event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop_event.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        if stop_event.is_set():
            raise KeyboardInterrupt
        stop_event.set()

    signal.signal(signal.SIGINT, stop)
    try:
        yield stop_event.is_set
    finally:
        signal.signal(signal.SIGINT, before)
