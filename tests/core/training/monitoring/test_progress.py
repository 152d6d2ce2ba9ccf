"""What a training tells while it runs."""

import logging

import pytest

from src.training.monitoring.progress import QUIET_SECONDS, Progress

PERF = {"tokens_per_second": 1234.5, "steps_per_second": 2.0}
TRAINED = {"grad_norm": 1.0, "clip_rate": 0.0, "learning_rate": 1e-3, "tokens": 7}


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_an_evaluation_is_logged_with_all_its_scores(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    progress = Progress(100, 0)
    progress.on_row(
        {"step": 40, "train_loss": 2.5, **TRAINED, "val_loss": 2.25, "em": 0.125, "rouge": 31.41592}, PERF, True
    )
    assert [record.message for record in caplog.records] == [
        "step 40/100  train_loss 2.5000  val_loss 2.2500  em 0.125  rouge 31.42  1,234 tokens/s  0:00:30 left"
    ]


def test_a_row_without_a_measured_step_has_no_speed_and_no_remaining_time(caplog: pytest.LogCaptureFixture):
    """As when a run resumes in the evaluation after a step."""
    caplog.set_level(logging.INFO)
    Progress(200, 40).on_row({"step": 40, "train_loss": 2.5, **TRAINED, "val_loss": 2.25}, {"seconds": 0.5}, True)
    assert [record.message for record in caplog.records] == ["step 40/200  train_loss 2.5000  val_loss 2.2500"]


def test_rows_between_evaluations_are_logged_now_and_then(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    clock = Clock()
    progress = Progress(100, 0, clock)
    for step, clock.seconds in ((10, 1.0), (20, QUIET_SECONDS), (30, QUIET_SECONDS + 1), (40, 2 * QUIET_SECONDS)):
        progress.on_row({"step": step, "train_loss": 1.0, **TRAINED}, PERF, False)
    assert [record.message.split()[1] for record in caplog.records] == ["20/100", "40/100"]


@pytest.mark.parametrize(("seconds_per_step", "logged"), [(0.1, []), (20.0, ["step 42/60  about 0:06:00 left"])])
def test_the_second_step_logs_the_remaining_time_of_a_long_training(
    caplog: pytest.LogCaptureFixture, seconds_per_step: float, logged: list[str]
):
    caplog.set_level(logging.INFO)
    progress = Progress(60, 40)
    for step in (41, 42, 43):
        progress.on_step(step, 1.0, 10.0, seconds_per_step)
    assert [record.message for record in caplog.records] == logged


def test_the_bar_still_shows_the_scores_of_the_last_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress(100, 0)
    assert progress.bar is not None
    progress.on_row({"step": 40, "train_loss": 2.5, **TRAINED, "em": 0.125}, PERF, True)
    progress.on_row({"step": 50, "train_loss": 2.0, **TRAINED}, PERF, True)
    progress.on_step(51, 1.5, 10.0, 0.1)
    assert progress.bar.postfix == "loss 1.5000  10 tokens/s  em 0.125"
    progress.close()
    capsys.readouterr()
