"""Phases: each reads its own data in its own order from a fixed step on, at any number of processes, after restarts and
rewinds."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import pytest

from src.data import phases
from src.data.orders import Cursor, Key, RankShare, order_of
from src.data.packing.dataset import PackedDataset
from src.data.phases import PhasedDataset, PhaseOrder, phase_seed
from src.errors import ConfigError
from src.experiments.config import load
from src.experiments.dataset_protocols import Dataset
from src.experiments.registry import DATASETS, bind, resolved_dict
from src.runs.history.branches import Branch

LANES, MICRO_BATCH, STEPS = 6, 2, 40
ANY = {"name": "documents", "corpus": "any"}
PACKED = {"name": "packed", "documents": ANY, "sequence_tokens": 16, "open_rows": 2}


class Words:
    """Document i has 1 + i % 9 tokens."""

    def __init__(self, count: int) -> None:
        self.count, self.fingerprint = count, f"{count} words"

    def __len__(self) -> int:
        return self.count

    def length(self, epoch: int, index: int) -> int:
        return 1 + index % 9

    def sample(self, epoch: int, index: int) -> Any:
        return {"input_ids": [index] * self.length(epoch, index), "loss_mask": [True] * self.length(epoch, index)}

    def collate(self, samples: Any) -> Any:
        return {"collated": samples}


class Unheld(Words):
    """Words whose epochs are permuted without memory."""

    shuffle = "feistel"


class WordsWithSources(Words):
    """Words of two sources."""

    sources = ("odd", "even")

    def sample_source(self, epoch: int, index: int) -> str:
        return "odd" if index % 2 else "even"


def packed(count: int) -> PackedDataset:
    return PackedDataset(bind(DATASETS, PACKED), Words(count))


def build_phases(until: Sequence[float], data: Sequence[Dataset]) -> PhasedDataset:
    phase_dicts = [{"until": share, "data": ANY} for share in until] + [{"data": ANY}]
    return PhasedDataset(load(phases.Config, {"phases": phase_dicts}, "data"), data)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps({"": value}))[""]


def frozen(key: Sequence[Any]) -> Key:
    """A key as it was before it went through JSON."""
    return tuple(frozen(value) if isinstance(value, list) else value for value in key)


def read_steps(
    order: Any, first: int, last: int, cursor: Cursor, world_size: int = 1
) -> tuple[list[list[Key]], Cursor]:
    """What each step after `first` up to `last` reads, and the cursor behind it, as the loop keeps it."""
    read: dict[tuple[int, int], Any] = {}
    behind = dict(cursor)
    for rank in range(world_size):
        share = RankShare(LANES, MICRO_BATCH, rank, world_size)
        stream = order.micro_batches(first, share, through_json(cursor))
        for step in range(first, last):
            for g in share.numbers:
                keys, entries, _ = next(stream)
                read[step, g] = [frozen(key) for key in through_json(keys)]
                behind |= entries
        next(stream)  # as a DataLoader asks ahead
    groups = range(LANES // MICRO_BATCH)
    return [[key for g in groups for key in read[step, g]] for step in range(first, last)], through_json(behind)


def random_phases(draw: random.Random) -> tuple[PhasedDataset, list[Branch]]:
    """Two to four phases, packed or not, and up to three rewinds, often to where a phase begins."""
    until = sorted(draw.sample([0.1, 0.25, 0.3, 0.5, 0.625, 0.9], draw.randint(1, 3)))
    data = [draw.choice([packed, Words, Unheld])(draw.choice([7, 50, 300])) for _ in range(len(until) + 1)]
    steps = sorted(draw.sample([*{round(share * STEPS) for share in until}, *range(1, STEPS, 3)], draw.randint(0, 3)))
    branches = [
        Branch(number=n, from_step=step, data=draw.choice(["same", "reshuffle", f"skip:{draw.randint(1, 9)}"]))
        for n, step in enumerate(dict.fromkeys(steps), start=1)
    ]
    return build_phases(until, data), branches


@pytest.mark.parametrize("case", range(40))
def test_restarts_at_any_step_and_number_of_processes_read_the_same(case: int):
    draw = random.Random(case)
    data, branches = random_phases(draw)
    order = data.order(case, LANES, STEPS, branches)
    whole, end = read_steps(order, 0, STEPS + 3, {})
    begins = data.config.begins(STEPS)
    assert [step[0][0] for step in whole] == [sum(begin <= step for begin in begins) - 1 for step in range(STEPS + 3)]
    stops = [
        0,
        *sorted({*draw.sample(begins[1:], draw.randint(0, len(begins) - 1)), *draw.sample(range(1, STEPS), 3)}),
        STEPS + 3,
    ]
    read: list[Any] = []
    cursor: Cursor = {}
    for first, last in pairwise(stops):
        steps_read, cursor = read_steps(order, first, last, cursor, draw.choice([1, 2, 3]))
        read += steps_read
    assert (read, cursor) == (whole, end)


@pytest.mark.parametrize("case", range(40))
def test_a_phase_is_what_its_data_would_be_in_a_training_of_their_own(case: int):
    """With the branches that begin in it, counted from its first step, and what skips of earlier phases leave for it to
    pass over."""
    data, branches = random_phases(random.Random(case))
    whole, _ = read_steps(data.order(3, LANES, STEPS, branches), 0, STEPS, {})
    begins = [*data.config.begins(STEPS), STEPS]
    for number, part in enumerate(data.phases):
        begin, end = begins[number : number + 2]
        over = [
            b.model_copy(update={"data": f"skip:{b.from_step + b.skipped_steps - begin}", "from_step": 0})
            for b in branches
            if b.from_step < begin < b.from_step + b.skipped_steps
        ]
        phase_branches = over + [
            b.model_copy(update={"from_step": b.from_step - begin}) for b in branches if begin <= b.from_step < end
        ]
        alone, _ = read_steps(
            order_of(part, phase_seed(3, number), LANES, end - begin, phase_branches), 0, end - begin, {}
        )
        assert whole[begin:end] == [[(number, key) for key in step] for step in alone]
    assert phase_seed(3, 0) == 3, "the first phase is a training without phases"
    assert len({phase_seed(3, number) for number in range(9)}) == 9


@pytest.mark.parametrize(
    ("branch", "changed"),
    [
        (Branch(number=1, from_step=15, data="reshuffle"), range(15, 20)),
        (Branch(number=1, from_step=20, data="reshuffle"), range(20, 40)),
        (Branch(number=1, from_step=13, data="skip:7"), range(13, 20)),
        (Branch(number=1, from_step=14, data="skip:7"), range(14, 40)),
        (Branch(number=1, from_step=30, data="skip:7"), range(30, 40)),
    ],
)
def test_a_branch_moves_no_boundary_and_changes_only_its_own_phase(branch: Branch, changed: range):
    """But for a skip that goes beyond its end."""
    data = build_phases([0.5], [Words(300), Words(300)])
    plain, _ = read_steps(data.order(0, LANES, STEPS, ()), 0, STEPS, {})
    steps_read, _ = read_steps(data.order(0, LANES, STEPS, [branch]), 0, STEPS, {})
    assert [step for step in range(STEPS) if steps_read[step] != plain[step]] == list(changed)


@pytest.mark.parametrize("make", [Words, packed])
@pytest.mark.parametrize(("first", "steps"), [(8, 4), (8, 20), (19, 1), (19, 9), (20, 5), (15, 20)])
def test_skipped_samples_are_read_in_no_phase(make: Any, first: int, steps: int):
    """Where a training diverges behind a boundary and goes back to before it, the batches up to there are not read
    again."""
    data = build_phases([0.25, 0.5], [make(3000), make(3000), make(3000)])
    plain, _ = read_steps(data.order(0, LANES, STEPS, ()), 0, STEPS, {})
    steps_read, _ = read_steps(
        data.order(0, LANES, STEPS, [Branch(number=1, from_step=first, data=f"skip:{steps}")]), 0, STEPS, {}
    )
    assert steps_read[:first] == plain[:first]
    skipped_keys, keys_read = (
        {key for step in part for key in step} for part in (plain[first : first + steps], steps_read[first:])
    )
    assert len(skipped_keys) == LANES * steps
    assert not skipped_keys & keys_read


@pytest.mark.parametrize("make", [Words, packed])
@pytest.mark.parametrize("skips", [(4, 9), (9, 4), (1, 6), (6, 1), (25, 7), (5, 5, 5)])
def test_rewinds_over_a_boundary_skip_only_samples_already_read(make: Any, skips: Sequence[int]):
    """A training that goes back to step 16 again and again: each phase reads on where its last attempt has ended."""
    data, first = build_phases([0.5, 0.75], [make(3000), make(3000), make(3000)]), 16
    begins = [*data.config.begins(STEPS), STEPS]
    alone = [
        read_steps(order_of(part, phase_seed(0, n), LANES, STEPS), 0, 2 * STEPS, {})[0]
        for n, part in enumerate(data.phases)
    ]
    _, cursor = read_steps(data.order(0, LANES, STEPS, ()), 0, first, {})
    num_skipped = [first + skips[0], *(max(0, first + skips[0] - begin) for begin in begins[1:-1])]
    for n, steps in enumerate([*skips[1:], 0], start=1):
        branch = Branch(number=n, from_step=first, data=f"skip:{'+'.join(map(str, skips[:n]))}")
        steps_read, _ = read_steps(data.order(0, LANES, STEPS, [branch]), first, STEPS, cursor)
        for phase, (begin, end) in enumerate(pairwise(begins)):
            phase_keys = [[key for _, key in step] for step in steps_read[max(begin, first) - first : end - first]]
            assert phase_keys == alone[phase][num_skipped[phase] : num_skipped[phase] + len(phase_keys)]
            num_skipped[phase] += max(0, min(end, first + steps) - max(begin, first))


def test_a_cursor_is_read_only_by_its_own_phase():
    """The lanes of two packed phases have the same names."""
    data = build_phases([0.5], [packed(50), packed(60)])
    order = data.order(0, LANES, STEPS, ())
    whole, _ = read_steps(order, 0, STEPS, {})
    _, boundary = read_steps(order, 0, 20, {})
    assert {entry[0] for entry in boundary.values()} == {0}
    assert read_steps(order, 20, 40, boundary)[0] == whole[20:]
    _, later = read_steps(order, 20, 25, boundary)
    assert {entry[0] for entry in later.values()} == {1}, "nothing is left of the first phase"
    assert later.keys() == boundary.keys()
    assert order.describe(20, boundary) == {"phase": 1, "epoch": 0, "documents": 0, "left_out": 0}
    description = order.describe(25, later)
    assert (description["phase"], description["documents"] > 0) == (1, True)
    assert order.describe(19, boundary)["phase"] == 0
    mixed_order = build_phases([0.5], [packed(50), Words(60)]).order(0, LANES, STEPS, ())
    assert mixed_order.describe(25, boundary) == {"phase": 1, "epoch": 0, "offset": 30}


def test_samples_batches_and_sources_are_those_of_the_phase():
    data = build_phases([0.25, 0.5], [WordsWithSources(4), Words(3), packed(20)])
    assert data.sample(0, (5, 3)) == (0, Words(4).sample(5, 3))
    assert data.sample(1, (0, 2)) == data.sample(1, [0, 2]) == data.sample(7, 6) == (1, Words(3).sample(0, 2))
    assert data.sample(2, (0, 1, 0, 0, 2, 0)).sample["lengths"] == [2, 3]
    assert data.collate([data.sample(1, (0, 0)), data.sample(1, (0, 1))]) == {
        "collated": [Words(3).sample(0, 0), Words(3).sample(0, 1)]
    }
    assert data.sources == ["odd", "even", "phases[1]", "phases[2]"]
    assert [data.sample_source(*key) for key in ((0, (9, 3)), (0, (9, 2)), (1, (0, 0)), (2, (0, 1, 0)))] == [
        "odd",
        "even",
        "phases[1]",
        "phases[2]",
    ]
    assert build_phases([0.5], [Words(3), Words(4)]).sources == []


def test_a_phase_can_have_keys_of_one_value():
    """They are not taken for an epoch and an index."""

    class Rollouts(Words):
        def sample(
            self, epoch: int, index: int | None = None
        ) -> Any:  # as a data set with an order of its own, whose keys are numbers
            return {"rollout": epoch} if index is None else super().sample(epoch, index)

    data = build_phases([0.5], [Words(9), Rollouts(9)])
    assert data.sample(1, (4,)) == (1, {"rollout": 4})
    assert data.sample(1, 4) == (0, Words(9).sample(1, 4))


def test_the_fingerprint_covers_all_phases_and_their_starts():
    fingerprints = [
        build_phases(*phases).fingerprint
        for phases in (
            ([0.5], [Words(3), Words(4)]),
            ([0.5], [Words(4), Words(3)]),
            ([0.5], [Words(3), Words(5)]),
            ([0.6], [Words(3), Words(4)]),
        )
    ]
    assert len(set(fingerprints)) == 4


TEXT = {"name": "text", "corpus": "t", "sequence_tokens": 4}
QA = {"name": "qa", "corpus": "t", "sequence_tokens": 4, "context_tokens": 4, "loss_on": "answer"}


@pytest.mark.parametrize(
    ("phase_dicts", "message"),
    [
        ([], "data.phases: expected a list that is not empty"),
        (
            [{"until": 1.0, "data": TEXT}, {"data": TEXT}],
            "data.phases[0].until: expected a number < 1.0, got 1.0 (float).",
        ),
        ([{"data": TEXT}, {"data": TEXT}], "data: phases[0].until: missing."),
        ([{"until": 0.5, "data": TEXT}], "data: phases[0].until: the last phase ends with the training."),
        (
            [{"until": 0.5, "data": TEXT}, {"until": 0.5, "data": TEXT}, {"data": TEXT}],
            "data: phases[1].until: 0.5 is not above 0.5, so the phase has no steps.",
        ),
        ([{"until": 0.5, "data": {**TEXT, "corpus": 1}}, {"data": TEXT}], "data.phases[0].data.corpus: "),
        ([{"data": {"name": "phases", "phases": [{"data": TEXT}]}}], "data: phases[0].data: phases cannot be nested."),
        ([{"until": 0.5, "data": TEXT}, {"data": QA}], "data: phases[1].data: 'qa' data have contexts"),
        (
            [{"until": 0.5, "data": TEXT}, {"data": {"name": "span_corruption", "corpus": "t"}}],
            (
                "data: phases: one model cannot read all of these data: "
                "phases[0].data decoder, phases[1].data encoder_decoder."
            ),
        ),
    ],
)
def test_config_refuses(phase_dicts: list[Any], message: str):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        load(phases.Config, {"phases": phase_dicts}, "data")


def test_parts_with_an_order_are_phases_and_phases_are_no_part():
    inner = {"name": "phases", "phases": [{"until": 0.1, "data": PACKED}, {"data": TEXT}]}
    assert resolved_dict(bind(DATASETS, inner))["phases"][0]["data"]["documents"]["corpus"] == "any"
    with pytest.raises(Exception, match="'phases' data have a fixed order"):
        bind(DATASETS, {"name": "mixture", "parts": {"a": inner}})
    with pytest.raises(Exception, match="samples of 'phases' data cannot be packed"):
        bind(DATASETS, {**PACKED, "documents": inner})


def check(phase_dicts: Sequence[Mapping[str, Any]]) -> phases.Config:
    return load(phases.Config, {"phases": list(phase_dicts)}, "data")


def test_errors_name_the_phase(places: Any, write_corpus: Any):
    write_corpus("t", [{"text": "a", "source": "s"}])
    config = check(
        [{"until": 0.5, "data": {**TEXT, "corpus": "nowhere"}}, {"data": {"name": "mixture", "parts": {"a": TEXT}}}]
    )
    with pytest.raises(ConfigError, match=r"^data\.phases\[0\]\.data: .*nowhere: no such data set"):
        config.check(places)
    with pytest.raises(
        ConfigError,
        match=r"^data\.phases\[0\]\.data\.sequence_tokens: 5 .*\ndata\.phases\[1\]\.data\.parts\.a\.sequence_tok",
    ):
        config.check_length(4, 1)
    with pytest.raises(
        ConfigError, match=r"^data\.phases\[1\]\.data: packed documents are not tested with the model family None"
    ):
        check([{"until": 0.5, "data": TEXT}, {"data": PACKED}]).check_model(None)
    with pytest.raises(
        ConfigError, match=r"data\.phases: loop\.compile needs .*: phases\[0\]\.data 4, phases\[1\]\.data 16\."
    ):
        check([{"until": 0.5, "data": TEXT}, {"data": PACKED}]).check_compiled()


def test_a_phase_without_a_step_is_refused_before_any():
    config = check([{"until": 0.04, "data": ANY}, {"until": 0.98, "data": ANY}, {"data": ANY}])
    config.check_steps(100)
    assert config.begins(100) == [0, 4, 98]
    for steps, number in ((10, 0), (20, 2)):
        with pytest.raises(
            ConfigError, match=rf"^data\.phases\[{number}\]: its share of loop\.steps = {steps} is less"
        ):
            config.check_steps(steps)
        with pytest.raises(ConfigError, match=rf"^data\.phases\[{number}\]: "):
            PhasedDataset(config, [Words(3)] * 3).order(0, LANES, steps, ())


def test_an_order_of_phases_is_endless():
    share = RankShare(LANES, MICRO_BATCH, 0, 1)
    stream = PhaseOrder([order_of(Words(4), 0, LANES, 1)], [0]).micro_batches(90, share, {})
    assert len(list(islice(stream, 50))) == 50
