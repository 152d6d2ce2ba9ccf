"""Data sets that one training reads one after another: conditioning and then cooldown, curricula, annealing.

Each phase starts a new order of its own data, independent of other phases; the optimizer and the learning rate
continue. The validation split is that of the last phase, so that validation losses are comparable throughout.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field, model_validator

from src.data.orders import Cursor, Key, MicroBatch, Order, RankShare, order_of
from src.data.parts import PartsConfig, part_seed
from src.errors import ConfigError
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.dataset_protocols import Batch, Dataset, SourcedDataset, content_of
from src.experiments.interfaces import DatasetConfig, DatasetField
from src.runs.history.branches import Branch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Phase(StrictConfig):
    """The data of one phase, and its end."""

    data: DatasetField
    """The data set of this phase."""
    until: float | None = Field(default=None, gt=0, lt=1)
    """Share of `loop.steps` at which the next phase starts; None for the last phase."""


class Config(PartsConfig):
    """The phases, in order."""

    has_order: ClassVar[bool] = True
    parts_field: ClassVar[str] = "phases"

    phases: list[Phase] = Field(min_length=1)
    """The phases, in order."""

    @model_validator(mode="after")
    def _each_begins(self) -> "Config":
        begin = 0.0
        for number, phase in enumerate(self.phases):
            if (phase.until is None) != (number == len(self.phases) - 1):
                advice = (
                    "the last phase ends with the training. Remove it"
                    if phase.until
                    else "missing. Set the share of the training at which the phase ends, such as 0.5"
                )
                raise ValueError(f"phases[{number}].until: {advice}.")
            if phase.data.name == "phases":
                raise ValueError(f"phases[{number}].data: phases cannot be nested. Write all phases into one list.")
            if phase.until is not None and phase.until <= begin:
                raise ValueError(
                    f"phases[{number}].until: {phase.until:g} is not above {begin:g}, so the phase has no steps. "
                    "Make it larger."
                )
            begin = phase.until or 1.0
        return self

    @property
    def parts_by_path(self) -> Mapping[str, DatasetConfig]:
        return {f"phases[{number}].data": phase.data for number, phase in enumerate(self.phases)}

    @property
    def validation(self) -> DatasetConfig:
        return self.phases[-1].data

    def check_steps(self, steps: int) -> None:
        self.begins(steps)

    def begins(self, steps: int) -> list[int]:
        """Finished steps at the start of each phase, for a training of `steps`.

        Raises:
            ConfigError: a phase has no steps.
        """
        begins = [0, *(round(phase.until * steps) for phase in self.phases if phase.until is not None)]
        for number, (begin, end) in enumerate(pairwise([*begins, steps])):
            if begin >= end:
                raise ConfigError(
                    f"data.phases[{number}]: its share of loop.steps = {steps} is less than one step. "
                    "Change `until` so that each phase has a step, or train longer."
                )
        return begins

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> Dataset:
        """Build all phases of the training split, each with its own seed; for another split, only the last phase.

        Raises:
            UserError: a data set cannot be built.
        """
        if split != "train":
            return self.validation.build(places, tokenizer, split, seed)
        phases = enumerate(self.phases)
        return PhasedDataset(
            self, [phase.data.build(places, tokenizer, split, phase_seed(seed, number)) for number, phase in phases]
        )


def phase_seed(seed: int, number: int) -> int:
    """Seed of a phase's data and order. The first phase has `seed` itself, so that it equals a training without
    phases."""
    return part_seed(seed, f"phases[{number}]") if number else seed


class Sample(NamedTuple):
    """A sample of a phase."""

    phase: int
    sample: Any


class PhasedDataset:
    """Data sets of all phases. A key is (phase, key in its data set), or (epoch, index) with an index over the samples
    of all phases."""

    def __init__(self, config: Config, phases: Sequence[Dataset]) -> None:
        self.config, self.phases = config, phases
        ends = [phase.until for phase in config.phases]
        self.fingerprint, self.content = (
            hashlib.sha256(json.dumps([ends, [digest(data) for data in phases]]).encode()).hexdigest()
            for digest in (attrgetter("fingerprint"), content_of)
        )
        self._names = [list(data.sources) if isinstance(data, SourcedDataset) else [] for data in phases]
        names = [phase_sources or [f"phases[{number}]"] for number, phase_sources in enumerate(self._names)]
        self.sources = (
            list(dict.fromkeys(name for phase_sources in names for name in phase_sources)) if any(self._names) else []
        )
        """Sources of all phases, by name. A phase without sources counts as one source if another phase has sources."""

    def __len__(self) -> int:
        """Sum of the samples in an epoch of each phase."""
        return sum(map(len, self.phases))

    def sample(self, epoch: int, index: int | Sequence[Any]) -> Sample:
        """The sample of a key. If `index` is a sequence, it is a key in the data set of phase number `epoch`."""
        phase, phase_key = self._place(epoch, index)
        return Sample(phase, self.phases[phase].sample(*phase_key))

    def sample_source(self, *key: Any) -> str:
        """The source within the phase, or the name of the phase."""
        phase, phase_key = self._place(*key)
        data = self.phases[phase]
        return (
            data.sample_source(*phase_key)
            if self._names[phase] and isinstance(data, SourcedDataset)
            else f"phases[{phase}]"
        )

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """A batch of samples of one phase."""
        (phase,) = {sample.phase for sample in samples}
        return self.phases[phase].collate([sample.sample for sample in samples])

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> "PhaseOrder":
        """See `orders.OrderedDataset`. A branch belongs to the phase that reads the step after it.

        "skip:K" also applies to phases that start within K steps, as they can have read the data to skip. Each part of
        "skip:K+L" does so by itself, and the phase of the branch skips no more of L than it has read.
        """
        begins = self.config.begins(steps)
        orders = []
        for number, (data, begin, end) in enumerate(zip(self.phases, begins, [*begins[1:], steps], strict=True)):
            phase_branches = []
            for branch in branches:
                if begin <= branch.from_step < end:
                    skips = [*branch.skips[:1], *(min(most, end - branch.from_step) for most in branch.skips[1:])]
                    skip_field = {"data": f"skip:{sum(skips)}"} if skips else {}
                    phase_branches.append(
                        branch.model_copy(update={"from_step": branch.from_step - begin, **skip_field})
                    )
                elif skipped := sum(
                    max(0, branch.from_step + each - begin) for each in branch.skips if branch.from_step < begin
                ):
                    phase_branches.append(branch.model_copy(update={"from_step": 0, "data": f"skip:{skipped}"}))
            orders.append(order_of(data, phase_seed(seed, number), per_step, end - begin, phase_branches))
        return PhaseOrder(orders, begins)

    def _place(self, epoch: int, index: int | Sequence[Any]) -> tuple[int, Key]:
        """The number of the phase, and the key in its data set."""
        if isinstance(index, Sequence):
            return epoch, tuple(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        phase = 0
        while index >= len(self.phases[phase]):
            index, phase = index - len(self.phases[phase]), phase + 1
        return phase, (epoch, index)


@dataclass(frozen=True)
class PhaseOrder:
    """An `orders.Order` of phases. Phases start at fixed steps, independent of branches.

    A cursor entry is [phase, entry of that phase's cursor]. Entries of earlier phases are ignored.
    """

    orders: Sequence[Order]
    begins: Sequence[int]
    """Finished steps at the start of each phase."""

    def micro_batches(self, first_step: int, share: RankShare, cursor: Cursor) -> Iterator[MicroBatch]:
        """See `orders.Order`."""
        phase = self._phase(first_step)
        for number, end in zip(range(phase, len(self.orders)), [*self.begins[phase + 1 :], None], strict=True):
            step = max(first_step, self.begins[number])
            stream = self.orders[number].micro_batches(step - self.begins[number], share, _phase_cursor(cursor, number))
            for keys, entries, counters in islice(stream, None if end is None else (end - step) * len(share.numbers)):
                yield MicroBatch(
                    [(number, key) for key in keys],
                    {name: [number, entry] for name, entry in entries.items()},
                    counters,
                )

    def describe(self, step: int, cursor: Cursor) -> Mapping[str, Any]:
        """The phase, and the description of its order."""
        phase = self._phase(step)
        return {"phase": phase, **self.orders[phase].describe(step - self.begins[phase], _phase_cursor(cursor, phase))}

    def _phase(self, step: int) -> int:
        """The phase after `step` finished steps."""
        return bisect_right(self.begins, step) - 1


def _phase_cursor(cursor: Cursor, phase: int) -> Cursor:
    """The cursor of a phase's order."""
    return {name: entry[1] for name, entry in cursor.items() if entry[0] == phase}
