"""Stop signals, in one process: raised once, noted where they must wait, and never lost."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainval
from src.errors import RunError
from src.runs.run_dir import RunDir
from src.support import distributed
from tests import toy


@pytest.fixture(autouse=True)
def handlers_stay() -> Iterator[None]:
    before = [signal.getsignal(number) for number in distributed.STOP_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in distributed.STOP_SIGNALS] == before
    assert distributed.stop_requested() is None


def tell(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", distributed.STOP_SIGNALS)
def test_a_signal_is_raised_at_once(number: signal.Signals):
    with pytest.raises(distributed.StopTraining) as error_info, distributed.stoppable():
        tell(number)
    assert (error_info.value.reason.by, error_info.value.everywhere, error_info.value.step) == (
        number.name,
        False,
        None,
    )


def test_a_deferred_stop_is_raised_by_allow_stop():
    with distributed.stoppable():
        distributed.defer_stop()
        tell(signal.SIGUSR1)
        tell(signal.SIGTERM)
        assert distributed.stop_requested() == distributed.Reason("SIGUSR1"), "the first counts"
        with pytest.raises(distributed.StopTraining, match="SIGUSR1"):
            distributed.allow_stop()


def test_a_second_signal_does_not_interrupt_the_handling_of_the_first():
    is_tidy = False
    with distributed.stoppable():
        try:
            tell()
        except distributed.StopTraining:
            tell()
            tell(signal.SIGUSR1)
            is_tidy = True
    assert is_tidy


def test_a_signal_where_python_can_raise_nothing_is_recorded_without_a_traceback(capsys: pytest.CaptureFixture[str]):
    class Signals:
        def __del__(self):
            tell()

    before = sys.unraisablehook
    with distributed.stoppable():
        Signals()
        reason = distributed.stop_requested()
    assert reason
    assert reason.by == "SIGTERM"
    assert not capsys.readouterr().err
    assert sys.unraisablehook is before


def test_a_second_ctrl_c_aborts():
    with distributed.stoppable():
        distributed.defer_stop()
        tell(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            tell(signal.SIGINT)


def test_an_interruption_that_the_shell_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with distributed.stoppable():
            tell(signal.SIGINT)
            distributed.allow_stop()
            assert distributed.stop_requested() is None
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_the_exit_code_says_whether_a_scheduler_starts_it_again(number: signal.Signals, code: int):
    with pytest.raises(distributed.StopTraining) as error_info, distributed.stoppable():
        tell(number)
    assert error_info.value.exit_code == code


def test_a_limit_requests_a_stop_like_a_signal():
    reason = distributed.Reason("time limit")
    with distributed.stop_when(lambda: reason), pytest.raises(distributed.StopTraining) as error_info:
        distributed.stop_together()
    assert (error_info.value.reason, error_info.value.everywhere, error_info.value.step) == (reason, True, None)
    distributed.stop_together()


def test_one_signal_stops_one_session_only():
    with pytest.raises(distributed.StopTraining), distributed.stoppable():
        tell()
    with distributed.stoppable():
        distributed.allow_stop()


def test_all_agree_on_the_signal_and_the_step():
    with distributed.stoppable():
        distributed.defer_stop()
        tell()
        stop = distributed.agreed_stop(7)
    assert (stop.reason.by, stop.everywhere, stop.step) == ("SIGTERM", True, 7)


def test_a_thread_does_not_change_handlers():
    exceptions: list[Any] = []

    def work() -> None:
        with distributed.stoppable():
            exceptions.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert exceptions == [before]


def carried_out(folder: Path, work: Any) -> tuple[BaseException | None, dict[str, Any]]:
    """What `carry_out` raises and leaves in status.json where `work` is the recipe."""
    exception = None
    with distributed.stoppable(), RunDir.open(folder, toy.BASE, {}) as run_dir:
        distributed.defer_stop()
        try:
            recipe = SimpleNamespace(run=work, with_steps=lambda _: recipe)
            trainval.carry_out(SimpleNamespace(recipe=recipe), SimpleNamespace(dir=run_dir, places=None))
        except BaseException as error:  # noqa: BLE001  whatever it is, it is what is looked at
            exception = error
        return exception, run_dir.status()


def failing(error: BaseException) -> Any:
    def work(_: Any) -> None:
        raise error

    return work


class InterruptingError(RunError):
    """Its reason is asked for when the status is written, which a signal interrupts."""

    def __str__(self) -> str:
        tell()
        return "the disk is full"


def test_a_signal_does_not_keep_a_failure_from_being_written_down(tmp_path: Path):
    error_info, status = carried_out(tmp_path, failing(InterruptingError()))
    assert isinstance(error_info, InterruptingError)
    assert (status["state"], status["reason"]) == ("failed", "the disk is full")


def test_two_signals_leave_a_stopped_run(tmp_path: Path):
    class Twice(distributed.StopTraining):
        @property
        def step(self) -> None:
            tell(signal.SIGUSR1)

        @step.setter
        def step(self, _: Any) -> None:
            pass

    error_info, status = carried_out(tmp_path, failing(Twice(distributed.Reason("SIGTERM"))))
    assert isinstance(error_info, Twice)
    assert (status["state"], status["reason"]) == (
        "stopped",
        "SIGTERM: stopped while it was starting; restart it to resume",
    )


def test_a_signal_while_it_starts_leaves_a_stopped_run(tmp_path: Path):
    error_info, status = carried_out(tmp_path, lambda _: tell(signal.SIGUSR1))
    assert isinstance(error_info, distributed.StopTraining)
    assert (status["state"], status["reason"]) == (
        "stopped",
        "SIGUSR1: stopped while it was starting; restart it to resume",
    )


def test_a_connection_that_a_stopped_process_closed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Told to stop, one process leaves before the other, which learns of it first from the connection."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def work(_: Any) -> None:
        distributed.defer_stop()  # as a blocking call of a library does
        tell()
        raise RuntimeError("Connection closed by peer")

    error_info, status = carried_out(tmp_path, work)
    assert isinstance(error_info, distributed.StopTraining)
    assert status["state"] == "stopped"


def test_an_interruption_by_the_user_says_so(tmp_path: Path):
    error_info, status = carried_out(tmp_path, failing(KeyboardInterrupt()))
    assert isinstance(error_info, KeyboardInterrupt)
    assert (status["state"], status["reason"]) == ("stopped", "interrupted by the user")
