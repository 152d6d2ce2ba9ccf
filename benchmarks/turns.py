"""Several trainings in one process that take turns step by step, so that a slow moment of the machine falls on all of
them."""

import ctypes
import threading
from collections.abc import Callable

import torch


class Turns:
    """Threads of which one works at a time: each works until it passes on, in the order in which they were started, or
    ends."""

    def __init__(self) -> None:
        self.waiting: list[threading.Event] = []  # the first of them works
        self.failed: list[BaseException] = []

    def run(self, works: list[Callable[[], None]]) -> None:
        """Do all works, step by step in turns. The first error is raised when all have ended."""
        threads = [
            threading.Thread(target=self._work, args=(work, event)) for work in works for event in [self._event()]
        ]
        for thread in threads:
            thread.start()
        self.waiting[0].set()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]

    def _event(self) -> threading.Event:
        self.waiting.append(threading.Event())
        return self.waiting[-1]

    def _work(self, work: Callable[[], None], event: threading.Event) -> None:
        event.wait()
        try:
            torch.set_num_threads(1)  # a setting of the thread
            if not self.failed:
                work()
        except BaseException as error:  # noqa: BLE001  raised again in `run`
            self.failed.append(error)
        self.waiting.remove(event)
        if self.waiting:
            self.waiting[0].set()

    def pass_on(self) -> None:
        """Let the other threads run one step each."""
        event = self.waiting.pop(0)
        self.waiting.append(event)
        event.clear()
        self.waiting[0].set()
        event.wait()
        if self.failed:
            raise RuntimeError("another way has failed")


def one_arena() -> None:
    """Let all threads take memory from one place, so that none pays for pages that another has freed; to be called
    before they start."""
    arena_max = -8  # malloc.h
    assert ctypes.CDLL(None).mallopt(arena_max, 1), "glibc takes this setting"
