"""Checkpoints are written while the training goes on: one at a time, each whole before the next begins."""

import threading
from collections.abc import Callable


class Writer:
    """One write in the background. What it raises is raised again where it is waited for."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write; the one before has been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001  raised again in `wait`
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether `wait` will raise."""
        return self._error is not None

    def wait(self) -> None:
        """Return when nothing is being written; raises what the write raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error
