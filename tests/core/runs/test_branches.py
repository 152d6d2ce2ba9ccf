"""What a rewind changes, as functions of the step: learning rate, moments, and the file that says so."""

import json
from pathlib import Path

import pytest

from src.errors import ConfigError, RunError
from src.runs.history import branches
from src.runs.history.branches import (
    Branch,
    Rate,
    chain,
    must_reset_optimizer,
    override_learning_rate,
    parse_data,
    parse_rate,
)


def base(step: int) -> float:
    """A warm-up of 4 steps, then down to 0 at step 20."""
    return step / 4 if step < 4 else (20 - step) / 16


def branch(number: int, step: int, rate: str | None = None, **others: object) -> Branch:
    return Branch(number=number, from_step=step, learning_rate=parse_rate(rate) if rate else None, **others)  # type: ignore[arg-type]


def test_without_branches_the_rate_is_the_schedules():
    assert override_learning_rate(base, []) is base


def test_a_factor_holds_from_the_first_step_of_the_branch():
    rate = override_learning_rate(base, [branch(1, 8, "x0.75")])
    assert [rate(step) for step in (7, 8, 12)] == [base(7), 0.75 * base(8), 0.75 * base(12)]


def test_factors_of_a_chain_multiply():
    rate = override_learning_rate(base, [branch(1, 8, "x0.5"), branch(2, 12, "x0.5")])
    assert [rate(step) for step in (4, 8, 12)] == [1.0, 0.375, 0.125]


def test_a_value_sets_the_first_step_and_scales_the_schedule():
    rate = override_learning_rate(base, [branch(1, 6, "x0.5"), branch(2, 12, "=1e-4")])
    assert rate(12) == 1e-4, "exactly"
    assert rate(16) == pytest.approx(1e-4 * 4 / 8)
    assert rate(20) == 0
    assert rate(11) == 0.5 * base(11)


def test_a_value_needs_a_shape():
    with pytest.raises(ConfigError, match=r"branch 1: the schedule's learning rate is 0 after step 20"):
        override_learning_rate(base, [branch(1, 20, "=1e-4")])


def test_a_hold_ends_by_itself():
    rate = override_learning_rate(base, [branch(1, 8, "hold0:3")])
    assert [rate(step) for step in range(7, 13)] == [base(7), 0, 0, 0, base(11), base(12)]


def test_a_hold_ends_early_where_a_later_branch_names_a_rate():
    hold_branch = branch(1, 8, "hold0:8")
    assert [override_learning_rate(base, [hold_branch, branch(2, 10)])(step) for step in (9, 10, 15, 16)] == [
        0,
        0,
        0,
        base(16),
    ]
    assert [override_learning_rate(base, [hold_branch, branch(2, 10, "x2")])(step) for step in (9, 10, 15)] == [
        0,
        2 * base(10),
        2 * base(15),
    ]
    assert [override_learning_rate(base, [hold_branch, branch(2, 10, "=0.125")])(step) for step in (9, 10, 15)] == [
        0,
        0.125,
        0.0625,
    ]
    again = override_learning_rate(base, [hold_branch, branch(2, 10, "hold0:1")])
    assert [again(step) for step in (9, 10, 11)] == [0, 0, base(11)]


def test_moments_are_reset_only_at_the_start_of_a_branch():
    chain = [branch(1, 8, reset_optimizer=True), branch(2, 12), branch(3, 14, reset_optimizer=True)]
    assert [step for step in range(20) if must_reset_optimizer(chain, step)] == [8, 14]


def test_a_rewind_before_a_change_drops_it():
    before = [branch(1, 8, "x0.5"), branch(2, 12, "x0.5")]
    assert [item.number for item in chain(before, branch(3, 15))] == [1, 2, 3]
    assert [item.number for item in chain(before, branch(3, 12))] == [1, 3]
    assert [item.number for item in chain(before, branch(3, 10))] == [1, 3]
    assert [item.number for item in chain(before, branch(3, 2))] == [3]


def test_branch_numbers_distinguish_checkpoints_of_a_step():
    chain = [branch(1, 8), branch(2, 12)]
    assert [branches.branch_numbers(chain, step) for step in (8, 9, 12, 13)] == [[], [1], [1], [1, 2]]


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("x0.75", Rate(factor=0.75)),
        ("X2", Rate(factor=2.0)),
        ("x.5", Rate(factor=0.5)),
        ("=1e-4", Rate(value=1e-4)),
        ("=3E-05", Rate(value=3e-5)),
        ("hold0:20", Rate(hold_steps=20)),
    ],
)
def test_rates_are_understood(text: str, rate: Rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    ["0.75", "1e-4", "x", "x0", "=0", "x-1", "=-1e-4", "xnan", "xinf", "=1e999", "hold0:0", "hold0:-1", "hold:5"],
)
def test_other_rates_are_refused(text: str):
    with pytest.raises(ConfigError, match=r"^--lr: expected 'x0\.75' .* got '"):
        parse_rate(text)


@pytest.mark.parametrize(
    "text",
    ["skip", "skip:0", "skip:-1", "skip:x", "Same", "", "reshuffle:2", "skip:1 ", "skip:5+", "skip:5+0", "skip:5 + 3"],
)
def test_other_data_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"^--data: expected 'same', 'skip:K' .* got '"):
        parse_data(text)


def write(run: Path, *entries: dict[str, object]) -> None:
    (run / branches.FILE).write_text(json.dumps({"branches": entries}))


def test_branches_are_read_as_written(tmp_path: Path):
    assert branches.read(tmp_path) == ()
    chain = [
        branch(1, 8, "hold0:2", data="skip:5+3"),
        branch(4, 9, "=1e-4", reset_optimizer=True, wandb="abc-branch-4"),
    ]
    write(tmp_path, *(item.model_dump(mode="json") for item in chain))
    assert branches.read(tmp_path) == tuple(chain)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"number": 1}], r"branches\[0\]\.from_step: missing"),
        ([{"number": 1, "from_step": 0}], r"branches\[0\]\.from_step: expected a number > 0, got 0"),
        ([{"number": 1, "from_step": 4, "data": "skip:0"}], r"branches\[0\]\.data"),
        ([{"number": 1, "from_step": 4, "lr": 2}], r"unknown key 'lr'"),
        (
            [{"number": 1, "from_step": 4, "learning_rate": {"factor": 2.0, "value": 1.0}}],
            "expected exactly one of factor",
        ),
        (
            [{"number": 2, "from_step": 4}, {"number": 1, "from_step": 8}],
            "branch 1 from step 8 cannot follow branch 2 from step 4",
        ),
        (
            [{"number": 1, "from_step": 8}, {"number": 2, "from_step": 8}],
            "branch 2 from step 8 cannot follow branch 1 from step 8",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, entries: list[dict[str, object]], message: str):
    write(tmp_path, *entries)
    with pytest.raises(RunError, match=message) as error_info:
        branches.read(tmp_path)
    assert str(error_info.value).startswith(str(tmp_path / branches.FILE))


def test_a_torn_file_is_refused(tmp_path: Path):
    (tmp_path / branches.FILE).write_text('{"branches": [')
    with pytest.raises(RunError, match=r"branch\.json:1: not valid JSON"):
        branches.read(tmp_path)
