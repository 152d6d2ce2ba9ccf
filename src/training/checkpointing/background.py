"""Writes checkpoints in a background thread, one at a time."""

import threading
from collections.abc import Callable


class Writer:
    """One write in the background. Its exception is raised again by `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write. Call `wait` for the previous one first."""
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
        """Block until the write is finished, and raise its exception, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error
