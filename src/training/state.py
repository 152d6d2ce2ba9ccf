"""State of the loop, without weights and optimizer, saved in each checkpoint's state.json."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from src.data.orders import Cursor
from src.errors import CheckpointError, RunError
from src.experiments.dataset_protocols import Dataset
from src.runs import parents
from src.runs.context import Run
from src.runs.inputs import CONTENT

TOTALS = ("since_row", "since_brief_row")
"""Fields of `State` of type `IntervalTotals`."""


@dataclass
class IntervalTotals:
    """Sums over the steps since a score row."""

    steps: int = 0
    tokens: float = 0
    """Divisor of the losses (`TrainSpec.count`, tokens by default), over the steps with a finite loss."""
    loss: float = 0.0
    grad_norm: float = 0.0
    clipped: int = 0
    skipped: int = 0
    """Steps without an update, because a gradient overflowed float16 or the batch was skipped. They have no gradient
    norm."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """[sum, count] of further reported means, by name."""

    def add_step(self, loss: float, tokens: float, grad_norm: float | None, clipped: bool) -> None:
        """Add an optimizer step, without its `sums`. loss: sum over the `tokens`. grad_norm: None for a step without an
        update."""
        self.steps += 1
        if math.isfinite(loss):
            self.tokens += tokens
            self.loss += loss
        if grad_norm is None:
            self.skipped += 1
        else:
            self.grad_norm += grad_norm
            self.clipped += clipped

    def add_sums(self, totals: Mapping[str, Sequence[float]]) -> None:
        """Add (sum, count) of a step by name, if both are finite."""
        for name, pair in totals.items():
            if all(map(math.isfinite, pair)):
                self.sums[name] = [a + b for a, b in zip(self.sums.get(name, (0.0, 0.0)), pair, strict=True)]

    def scores(self) -> dict[str, float]:
        """Means over the interval, sorted by name, as a restart adds them in another order. The loss is NaN if no step
        has a finite loss."""
        num_updates = max(1, self.steps - self.skipped)
        loss = {"train_loss": self.loss / self.tokens if self.tokens else math.nan} if self.steps else {}
        loss |= {name: total / count for name, (total, count) in sorted(self.sums.items()) if count}
        scores = {**loss, "grad_norm": self.grad_norm / num_updates, "clip_rate": self.clipped / num_updates}
        return {**scores, "skipped_steps": self.skipped} if self.skipped else scores


@dataclass
class State:
    """The loop's state after `step` optimizer steps."""

    step: int = 0
    """Finished optimizer steps, which determine data position, learning rate and random seeds."""
    tokens: int = 0
    """Loss tokens so far, over all ranks."""
    since_row: IntervalTotals = field(default_factory=IntervalTotals)
    """Totals since the last evaluation, or the last multiple of --log_every."""
    since_brief_row: IntervalTotals = field(default_factory=IntervalTotals)
    """Totals since the last row of any kind."""
    selection: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    """State of the fp16 loss scaler."""
    detector: dict[str, Any] = field(default_factory=dict)
    """State of the divergence detector."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the inputs of the training, by name."""
    cursor: Cursor = field(default_factory=dict)
    """Position in the order of the data, after `step`."""

    def add_step(self, loss: float, tokens: float, grad_norm: float | None, clipped: bool) -> None:
        """Count an optimizer step, and add it to both totals; see `IntervalTotals.add_step`."""
        self.step += 1
        self.since_row.add_step(loss, tokens, grad_norm, clipped)
        self.since_brief_row.add_step(loss, tokens, grad_norm, clipped)

    def add_sums(self, totals: Mapping[str, Sequence[float]]) -> None:
        """Add to both totals; see `IntervalTotals.add_sums`."""
        self.since_row.add_sums(totals)
        self.since_brief_row.add_sums(totals)

    def take_inputs(self, now: Mapping[str, str], run: Path) -> None:
        """Compare the recorded inputs with those of this start, and record new names.

        Raises:
            RunError: inputs of the save directory `run` have changed.
        """
        before = self.inputs
        # Other versions of the code can have recorded other content samples.
        compared_names = {
            name for name in {**now, **before} if (name in now and name in before) or not name.startswith(CONTENT)
        }
        changed = sorted(name for name in compared_names if now.get(name) != before.get(name))
        if changed:
            raise RunError(
                f"{run}: inputs changed since the start of the run: {', '.join(changed)}. Restore them, "
                "or restart with -r 1."
            )
        self.inputs |= now

    def to_json(self) -> dict[str, Any]:
        """A copy of the state as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "State":
        """Restore the state from `to_json`.

        Raises:
            CheckpointError: it is from another version of this code.
        """
        if saved.keys() != cls.__dataclass_fields__.keys() or any(
            saved[name].keys() != IntervalTotals.__dataclass_fields__.keys() for name in TOTALS
        ):
            raise CheckpointError("checkpoints are from another version of this code. Restart with -r 1.")
        return cls(**{**saved, **{name: IntervalTotals(**saved[name]) for name in TOTALS}})


def fingerprints(run: Run, data: Dataset, tokenizer: Any, pretrained: str | None) -> dict[str, str]:
    """Digests of the inputs: {"data": …, "tokenizer": …, "parent <id>/last": …, "pretrained model": …}.

    tokenizer: a fast tokenizer. pretrained: fingerprint of a pretrained model, if any. A parent's digest covers its
    trained weights and its tokenizer.
    """
    of_parents = parents.fingerprints(run.dir.exp, run.places.runs)
    return {
        **({"pretrained model": pretrained} if pretrained else {}),
        "data": data.fingerprint,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        **{f"parent {name}": digest for name, digest in of_parents.items()},
    }
