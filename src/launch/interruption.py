"""A process that waits for others ends them in order before it ends itself, whatever signal ends it."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt. A signal that is ignored (nohup) stays ignored."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    here = threading.current_thread() is threading.main_thread()
    replaced = {number: old for number, old in before.items() if here and old is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)
