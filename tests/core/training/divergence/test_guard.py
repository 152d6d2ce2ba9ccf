"""What the loop does about a step that diverges: the weights do not move, and what is needed to look into it is
there."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from src.data import phases
from src.data.orders import IndexedOrder
from src.errors import TrainingError
from src.experiments.config import load
from src.files import write_json
from src.launch import status
from src.operations import watchdog
from src.runs import ledger
from src.runs.checkpoints import checkpoints, retention
from src.runs.history import branches
from src.runs.store import RunStore
from src.support import distributed
from src.training.config import LoopConfig
from src.training.divergence.detector import Config as Divergence
from tests.core.training import small

STEPS = 40
QUIET = {"on_loss_spike": "warn", "on_loss_drift": "warn", "on_grad_norm": "warn"}
LEAST = {"loss_steps": 1, "grad_norm_steps": 1, **QUIET}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write_data(tmp_path)


def config(**actions: Any) -> LoopConfig:
    return LoopConfig(
        steps=STEPS,
        sequences_per_step=4,
        micro_batch=2,
        learning_rate=0.01,
        eval_every=10,
        divergence=Divergence(**{**LEAST, **actions}),
    )


def spoil(value: float, step: int, first: int = 1) -> Callable[..., Any]:
    """A loss that is multiplied in step number `step`, where `first` is the first that is made. Steps have two
    micro-batches."""
    calls = [2 * (first - 1)]

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        calls[0] += 1
        output = small.loss(model, batch)
        return output * value if (calls[0] + 1) // 2 == step else output

    return learn


def findings(run: Path) -> list[tuple[str, int, str]]:
    return [
        (event["kind"], event["step"], event["action"]) for event in ledger.read(run) if event["event"] == "divergence"
    ]


def documents(run: Path) -> dict[str, list[int]]:
    """Index of the documents in each file of offending batches."""
    files = sorted((run / "offending").glob("*")) if (run / "offending").exists() else []
    return {path.name: [document["index"] for document in json.loads(path.read_text())["documents"]] for path in files}


def test_a_loss_that_is_no_number_stops_with_the_weights_of_the_step_before(folder: Path):
    with small.open_run(folder) as run:
        with pytest.raises(TrainingError, match="step 25: the loss is nan") as error:
            small.train(run, config(), spoil(float("nan"), 25))
        assert "before the update" in str(error.value)
        assert error.value.everywhere
        assert ("non_finite", 25, "stop") in findings(run.path)
        assert list(documents(run.path)) == ["step-00000025-rank-0.json"]
        state, model = small.train(run, config())
    with small.open_run(small.write_data(folder / "undisturbed")) as run:
        expected, other = small.train(run, config())
    assert state == expected
    assert torch.equal(model.guess, other.guess)


def test_a_warning_changes_nothing_and_saves_nothing(folder: Path):
    with small.open_run(folder) as run:
        small.train(run, config(), spoil(100.0, 25))
        assert {("loss_spike", 25, "warn"), ("grad_norm", 25, "warn")} <= set(findings(run.path))
        assert not documents(run.path)
        assert ledger.read(run.path)[-1]["why"] == "finished"


def seen_by_the_watchdog(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[int, list[str], str]:
    """(exit code, new events, reason in the status table) of a look at the only run."""
    caplog.clear()
    with caplog.at_level("INFO", logger="src.operations.watchdog"):
        code = watchdog.main([str(folder / "runs"), "--once"])
    messages = [record.getMessage() for record in caplog.records if record.name == "src.operations.watchdog"]
    (row,) = status.table(RunStore(folder / "runs"), [path.name for path in (folder / "runs").iterdir()])
    return code, messages, row.reason


def test_the_watchdog_reports_a_nan_loss(folder: Path, caplog: pytest.LogCaptureFixture):
    with small.open_run(folder) as run, contextlib.suppress(TrainingError):
        small.train(run, config(), spoil(float("nan"), 25))
    code, messages, reason = seen_by_the_watchdog(folder, caplog)
    assert code == watchdog.NEW_INCIDENT_EXIT
    assert f"{run.path.name} error non_finite: step 25: the loss is nan." in messages
    assert "non_finite: step 25: the " in reason
    assert not any("non_finite" in line for line in seen_by_the_watchdog(folder, caplog)[1]), "each once"


def test_the_watchdog_reports_spikes_with_action_warn(folder: Path, caplog: pytest.LogCaptureFixture):
    with small.open_run(folder) as run:
        small.train(run, config(), spoil(100.0, 25))
        messages, reason = seen_by_the_watchdog(folder, caplog)[1:]
    assert any(line.startswith(f"{run.path.name} warning loss_spike: step 25: the loss is ") for line in messages)
    assert "step 25: the " in reason
    assert not any("warning" in line for line in seen_by_the_watchdog(folder, caplog)[1]), "each once"


def test_the_batch_is_written_down(folder: Path):
    seen: list[list[int]] = []
    inner = spoil(100.0, 25)

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        seen.append(batch["input_ids"][:, 1].tolist())
        return inner(model, batch)

    with small.open_run(folder) as run:
        small.train(run, config(on_loss_spike="save_batch"), learn)
        assert documents(run.path) == {"step-00000025-rank-0.json": seen[48] + seen[49]}


@pytest.mark.parametrize("value", [100.0, float("inf")])
def test_a_batch_that_is_left_out_moves_nothing_but_the_step(folder: Path, value: float):
    settings = config(on_loss_spike="skip_batch", on_grad_norm="skip_batch", on_non_finite="skip_batch")
    weights: list[torch.Tensor] = []
    inner = spoil(value, 25)

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        weights.append(next(model.parameters()).detach().clone())
        return inner(model, batch)

    with small.open_run(folder) as run:
        state, _ = small.train(run, settings, learn)
        assert state.step == STEPS
        assert torch.equal(weights[2 * 24], weights[2 * 25]), "step 26 begins with the weights of step 25"
        assert not torch.equal(weights[2 * 25], weights[2 * 26])
        row = next(row for row in run.dir.scores.rows() if row["step"] == 30)
        assert row["skipped_steps"] == 1
        assert row["train_loss"] < 1e6, "a loss that is no number is in no mean"
        moments = checkpoints.folder(run.path, STEPS) / "optimizer.safetensors"
        assert load_file(moments)["guess::step"] == STEPS - 1


def test_a_run_is_rewound_and_skips_the_diverging_batch(folder: Path):
    settings = config(on_loss_spike="rewind")
    with small.open_run(folder) as run:
        with pytest.raises(distributed.StopTraining, match="rewound to step 20: step 25: the loss is") as stop:
            small.train(run, settings, spoil(100.0, 25))
        assert (stop.value.everywhere, stop.value.step, stop.value.exit_code) == (True, 20, distributed.REQUEUE)
        (branch,) = branches.read(run.path)
        assert (branch.from_step, branch.data) == (20, "skip:5")
        assert run.dir.status()["state"] == "stopped"
        assert list(documents(run.path)) == ["step-00000025-rank-0.json"]
        seen: list[list[int]] = []

        def learn(model: Any, batch: Mapping[str, Any]) -> Any:
            seen.append(batch["input_ids"][:, 1].tolist())
            return small.loss(model, batch)

        state, _ = small.train(run, settings, learn)
    after = IndexedOrder(0, 32, 4).keys(25 * 4)
    assert [index for row in seen[:4] for index in row] == [next(after)[1] for _ in range(8)]
    assert state.step == STEPS


def test_a_second_rewind_skips_both_batches_and_retains_manual_changes(folder: Path):
    settings = config(on_loss_spike="rewind")
    with small.open_run(folder) as run:
        with pytest.raises(distributed.StopTraining):
            small.train(run, settings, spoil(100.0, 25))
        (first,) = branches.read(run.path)
        changed = first.model_copy(update={"learning_rate": branches.parse_rate("x0.5")})
        write_json(run.path / branches.FILE, {"branches": [changed.model_dump(mode="json")]})
        with pytest.raises(distributed.StopTraining, match="rewound to step 20: step 23"):
            small.train(run, settings, spoil(100.0, 23, first=21))
        (branch,) = branches.read(run.path)
    assert (branch.number, branch.from_step, branch.data, branch.learning_rate) == (
        2,
        20,
        "skip:5+3",
        changed.learning_rate,
    )


def test_a_rewind_after_a_phase_boundary_skips_the_samples_read_in_each_phase(folder: Path):
    """Two times: phase 0 is left to read from its step 28 on, phase 1 from its step 6 on."""
    settings, some = config(on_loss_spike="rewind"), {"name": "documents", "corpus": "any"}
    phase_config = load(phases.Config, {"phases": [{"until": 0.55, "data": some}, {"data": some}]}, "data")
    data = phases.PhasedDataset(phase_config, [small.Numbers(), small.Numbers()])  # type: ignore[list-item]
    seen: list[int] = []

    def learn(model: Any, batch: Mapping[str, Any]) -> Any:
        seen.extend(batch["input_ids"][:, 1].tolist())
        return small.loss(model, batch)

    with small.open_run(folder) as run:
        for step, first in ((25, 1), (24, 21)):
            with pytest.raises(distributed.StopTraining, match=f"rewound to step 20: step {step}: the loss is"):
                small.train(run, settings, spoil(100.0, step, first), data=data)
        assert [(branch.from_step, branch.data) for branch in branches.read(run.path)] == [(20, "skip:5+4")]
        small.train(run, settings, learn, data=data)
    for number, read, begin in ((0, seen[:8], 20 + 5 + 2), (1, seen[8:], 3 + 2)):
        keys = IndexedOrder(phases.phase_seed(0, number), 32, 4).keys(begin * 4)
        assert read == [next(keys)[1] for _ in read]


def test_nothing_is_passed_over_where_a_person_has_changed_the_order(folder: Path, caplog: pytest.LogCaptureFixture):
    settings = config(on_loss_spike="rewind")
    with small.open_run(folder) as run:
        with pytest.raises(distributed.StopTraining):
            small.train(run, settings, spoil(100.0, 25))
        (first,) = branches.read(run.path)
        changed = first.model_copy(update={"data": "reshuffle"})
        write_json(run.path / branches.FILE, {"branches": [changed.model_dump(mode="json")]})
        with pytest.raises(TrainingError, match="step 23: the loss is"):
            small.train(run, settings, spoil(100.0, 23, first=21))
        assert "which cannot be combined with a skip" in caplog.text
        assert branches.read(run.path) == (changed,)


@pytest.mark.parametrize("why", ["no checkpoint", "max_rewinds", "continued.json"])
def test_a_run_that_cannot_be_taken_back_stops(folder: Path, why: str, caplog: pytest.LogCaptureFixture):
    settings = config(on_loss_spike="rewind", max_rewinds=1)
    with small.open_run(folder) as run:
        if why == "max_rewinds":
            with pytest.raises(distributed.StopTraining):
                small.train(run, settings, spoil(100.0, 25))
        step = 8 if why == "no checkpoint" else 25
        learn = spoil(1e4, step, 21 if why == "max_rewinds" else 1)

        def mark_and_learn(model: Any, batch: Mapping[str, Any]) -> Any:
            if why == "continued.json" and checkpoints.list_all(run.path):
                retention.mark_continued(run.path, 21)
            return learn(model, batch)

        with pytest.raises(TrainingError, match=f"step {step}: the loss is"):
            small.train(run, settings, mark_and_learn)
        assert why in caplog.text


def test_a_restart_judges_as_if_it_never_was(folder: Path):
    """The window of the detector is carried over: without it a rise just after a restart goes unseen."""
    with small.open_run(folder) as run:
        with pytest.raises(TrainingError):
            small.train(run, config(), spoil(float("nan"), 35))
        small.train(run, config(), spoil(30.0, 32, first=31))
        assert ("loss_spike", 32, "warn") in findings(run.path)
