"""State of the loop without weights and optimizer, saved in each checkpoint's state.json."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from src import files
from src.data.orders import Cursor
from src.errors import CheckpointError, DataError
from src.experiments.dataset_protocols import Dataset
from src.runs import parents
from src.runs.context import Run

CONTENT = "content of "
"""Begins the names of inputs that `content_samples` gives."""
TOTALS = ("since_row", "since_brief_row")
"""Fields of `State` that are `IntervalTotals`."""


@dataclass
class IntervalTotals:
    """Sums over some steps, for a score row."""

    steps: int = 0
    tokens: float = 0
    """The divisor of the losses (`TrainSpec.count`, tokens by default), over the steps with a finite loss."""
    loss: float = 0.0
    grad_norm: float = 0.0
    clipped: int = 0
    skipped: int = 0
    """Steps that moved nothing: a gradient overflowed float16, or the batch was left out.
    They have no gradient norm."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """[sum, count] of further values that are reported as means, by name."""

    def add_step(self, loss: float, tokens: float, grad_norm: float | None, clipped: bool) -> None:
        """Add an optimizer step, but for its `sums`. loss: summed over the `tokens`.
        grad_norm: None where it moved nothing."""
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
        """Add (sum, count) of a step by name, where both are finite."""
        for name, pair in totals.items():
            if all(map(math.isfinite, pair)):
                self.sums[name] = [a + b for a, b in zip(self.sums.get(name, (0.0, 0.0)), pair, strict=True)]

    def scores(self) -> dict[str, float]:
        """Means over the interval, sorted by name, as a restart adds them in a different order.
        The loss is NaN if no step's is finite."""
        num_updates = max(1, self.steps - self.skipped)
        loss = {"train_loss": self.loss / self.tokens if self.tokens else math.nan} if self.steps else {}
        loss |= {name: total / count for name, (total, count) in sorted(self.sums.items()) if count}
        scores = {**loss, "grad_norm": self.grad_norm / num_updates, "clip_rate": self.clipped / num_updates}
        return {**scores, "skipped_steps": self.skipped} if self.skipped else scores


@dataclass
class State:
    """The loop's state after `step` optimizer steps."""

    step: int = 0
    """Optimizer steps finished. The data position, the learning rate and all random draws follow from it."""
    tokens: int = 0
    """Loss tokens seen, over all ranks."""
    since_row: IntervalTotals = field(default_factory=IntervalTotals)
    """Since the last evaluation, or the last multiple of --log_every."""
    since_brief_row: IntervalTotals = field(default_factory=IntervalTotals)
    """Since the last row of any kind."""
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
        """Count an optimizer step, in the totals too: see `IntervalTotals.add_step`."""
        self.step += 1
        self.since_row.add_step(loss, tokens, grad_norm, clipped)
        self.since_brief_row.add_step(loss, tokens, grad_norm, clipped)

    def add_sums(self, totals: Mapping[str, Sequence[float]]) -> None:
        """Add to both totals: see `IntervalTotals.add_sums`."""
        self.since_row.add_sums(totals)
        self.since_brief_row.add_sums(totals)

    def to_json(self) -> dict[str, Any]:
        """A copy as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "State":
        """The state that `to_json` gave.

        Raises:
            CheckpointError: another version of this code wrote it.
        """
        if saved.keys() != cls.__dataclass_fields__.keys() or any(
            saved[name].keys() != IntervalTotals.__dataclass_fields__.keys() for name in TOTALS
        ):
            raise CheckpointError("its checkpoints were written by another version of this code. Start over with -r 1.")
        return cls(**{**saved, **{name: IntervalTotals(**saved[name]) for name in TOTALS}})


def fingerprints(run: Run, data: Dataset, tokenizer: Any, pretrained: str | None) -> dict[str, str]:
    """{"data": …, "tokenizer": …, "parent <id>/last": …, "pretrained model": …} by digest.

    `tokenizer` is a fast tokenizer; `pretrained` is the fingerprint of a model from elsewhere, if any;
    a parent's is that of its trained weights and its tokenizer.
    """
    of_parents = parents.fingerprints(run.dir.exp, run.places.runs)
    return {
        **({"pretrained model": pretrained} if pretrained else {}),
        "data": data.fingerprint,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        **{f"parent {name}": digest for name, digest in of_parents.items()},
    }


def content_samples(run: Run) -> dict[str, str]:
    """{"content of NAME": digest} of each prepared data set that the experiment's data name.

    Its fingerprint is that of its manifest; this is of samples of the files themselves, about 6 MiB of a data set. So a
    file that was changed in place is noticed, unless few bytes of a large one were. Stores of encoded contexts are not
    sampled.
    """
    digests = {}
    for name in sorted(
        {value for value in _texts(run.dir.exp.get("data")) if os.path.isfile(run.places.data / value / files.MANIFEST)}
    ):
        folder = run.places.data / name
        file_names = sorted(files.read_manifest(folder, DataError)["files"])
        pieces = max(4, 1024 // max(1, len(file_names)))
        with files.reading(folder, DataError):
            samples = [[file, files.sample_digest(folder / file, 1024 * pieces, pieces)] for file in file_names]
        digests[CONTENT + name] = hashlib.sha256(json.dumps(samples).encode()).hexdigest()
    return digests


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value but those called "name", which are kinds of data sets, not folders."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([item for key, item in value.items() if key != "name"])
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
