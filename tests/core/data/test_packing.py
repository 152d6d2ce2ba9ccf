"""Documents packed in lanes: what each step reads at any number of processes, after any restart and after rewinds."""

import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import pytest

from src.data.mixture.dataset import MixtureDataset
from src.data.orders import Cursor, Key, RankShare
from src.data.packing import dataset
from src.data.packing.dataset import PackedDataset, PackedRows, require_token_ids
from src.data.packing.lanes import MAX_AGE, Lane, LaneOrder, Packing, PermutedArrangement, pack_epoch
from src.errors import DataError, RunError, UserError
from src.experiments.config import Problems, added_field
from src.experiments.registry import DATASETS, bind
from src.runs.history.branches import Branch
from src.training import loader

LANES, MICRO_BATCH, ROOM = 12, 2, 64
COUNT = 997
Pieces = Counter[tuple[int, ...]]


def lengths(count: int = COUNT, seed: int = 0) -> list[int]:
    """Log-normal, a twentieth above the room of a row."""
    draw = random.Random(seed)
    return [max(1, round(draw.lognormvariate(3, 0.75))) for _ in range(count)]


def packing(
    tokens: Sequence[int], too_long: str = "cut", seed: int = 0, open_rows: int = 4, digest: str = "d"
) -> Packing:
    def sizes(epoch: int, document: int) -> list[tuple[int]]:
        n = tokens[document]
        if too_long == "drop":
            return [(n,)] if n <= ROOM else []
        return [(ROOM,)] * (n // ROOM) + [(n % ROOM,)] * (n % ROOM > 0)

    return Packing(PermutedArrangement(len(tokens), seed), sizes, (ROOM,), open_rows, "data.documents", digest)


def through_json(cursor: Cursor) -> Cursor:
    return json.loads(json.dumps(cursor))


def read_steps(
    order: LaneOrder, steps: int, world_size: int = 1, first: int = 0, start: Cursor | None = None
) -> tuple[Any, Cursor]:
    """Keys of each step in the order of the lanes, and the cursor that all processes have together behind the last."""
    start = start or {}
    read: dict[tuple[int, int], Sequence[Key]] = {}
    cursor = dict(start)
    for rank in range(world_size):
        share = RankShare(order.lanes, MICRO_BATCH, rank, world_size)
        stream = order.micro_batches(first, share, through_json(start))
        changed: Cursor = {}
        for step in range(steps):
            for g in share.numbers:
                keys, entries, _ = next(stream)
                read[step, g] = through_json({"": keys})[""]
                changed |= entries
        next(stream)  # as a DataLoader asks ahead
        assert not changed.keys() & (cursor.keys() - start.keys()), "a process changes entries of its own"
        cursor |= changed
    groups = range(order.lanes // MICRO_BATCH)
    return [[key for g in groups for key in read[step, g]] for step in range(steps)], through_json(cursor)


def pieces(steps: Sequence[Sequence[Sequence[int]]]) -> Pieces:
    """How often each (epoch, document, piece) was read."""
    return Counter(
        piece for step in steps for key in step for piece in zip(key[::3], key[1::3], key[2::3], strict=True)
    )


def pieces_of_epoch(packed: Packing, epoch: int) -> Pieces:
    return Counter((epoch, d, p) for d in range(packed.arrangement.count) for p in range(len(packed.sizes(epoch, d))))


@pytest.mark.parametrize("too_long", ["cut", "drop"])
@pytest.mark.parametrize("lanes", [1, 5, 12, 2000])
def test_a_lane_reads_each_piece_of_an_epoch_exactly_once(lanes: int, too_long: str):
    packed = packing(lengths(), too_long)
    rows = [Lane(packed, v, lanes) for v in range(lanes)]
    read: list[list[list[int]]] = []
    while min(lane.epoch(lane.num_taken) for lane in rows) < 3:
        read.append([lane.next_row() for lane in rows])
    ends = [row for lane in rows for row in lane.flush()]
    counts = pieces([*read, ends])
    for epoch in range(3):
        assert Counter({key: n for key, n in counts.items() if key[0] == epoch}) == pieces_of_epoch(packed, epoch)
    assert max(counts.values()) == 1
    for key in (key for step in read for key in step):
        assert sum(packed.sizes(e, d)[p][0] for e, d, p in zip(key[::3], key[1::3], key[2::3], strict=True)) <= ROOM
    left_out = sum(lane.left_out for lane in rows)
    assert (left_out == 0) == (too_long == "cut")


def test_rows_are_well_filled_and_epochs_differ():
    packed = packing(lengths(), open_rows=16)
    steps, _ = read_steps(LaneOrder(packed, LANES), 80)
    num_used = sum(packed.sizes(e, d)[p][0] for e, d, p in pieces(steps))
    assert num_used / (80 * LANES * ROOM) > 0.97
    places = {epoch: [d for e, d, _ in pieces(steps) if e == epoch] for epoch in (0, 1)}
    assert places[0] != places[1]
    other, _ = read_steps(LaneOrder(packing(lengths(), open_rows=16, seed=1), LANES), 80)
    assert other != steps


def lane_of(sizes: Sequence[tuple[int, ...]], room: tuple[int, ...], open_rows: int) -> Lane:
    return Lane(
        Packing(PermutedArrangement(len(sizes), 0), lambda epoch, document: [sizes[document]], room, open_rows, "data"),
        0,
        1,
    )


def fill_of(sizes: Sequence[tuple[int, int]], rows: int) -> float:
    lane = lane_of(sizes, (1024, 16), 8)
    emitted_rows = [lane.next_row() for _ in range(rows)]
    return sum(sizes[document][0] for row in emitted_rows for document in row[1::3]) / (rows * 1024)


@pytest.mark.parametrize("images", [(1, 1), (1, 3), (0, 8)])
def test_documents_that_fill_the_frames_of_a_row_do_not_lower_the_fill_of_other_rows(images: tuple[int, int]):
    draw = random.Random(0)
    plain = [(draw.randint(20, 899), draw.randint(*images)) for _ in range(20_000)]
    heavy = [(30, 16) if number % 1000 == 500 else size for number, size in enumerate(plain)]
    assert fill_of(heavy, 5000) > fill_of(plain, 5000) - 0.01 > 0.88


@pytest.mark.parametrize(
    ("first", "rest", "room"),
    [
        ((600,), (650,), (1000,)),
        ((600, 15), (650, 15), (1000, 24)),
        ((1, 12), (900, 15), (1000, 24)),
        ((300,), (701,), (1000,)),
    ],
)
def test_an_open_row_is_emitted_although_every_later_document_makes_a_fuller_one(
    first: tuple[int, ...], rest: tuple[int, ...], room: tuple[int, ...]
):
    sizes = [first, *[rest] * 4000]
    lane = lane_of(sizes, room, 4)
    rows = list[list[int]]()
    while len(rows) < 1000 and not any(document == 0 for row in rows for document in row[1::3]):
        lane = Lane(lane.packing, 0, 1, json.loads(json.dumps(lane.state())))  # the age is part of the state
        rows.append(lane.next_row())
    first_number = next(number for number in range(len(sizes)) if lane.document(number)[1] == 0)
    assert len(rows) - first_number <= MAX_AGE * 4 + 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_every_world_size_reads_the_same(world_size: int):
    order = LaneOrder(packing(lengths(), "drop"), LANES)
    assert read_steps(order, 60, world_size) == read_steps(order, 60)


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_ten_kills_and_other_world_sizes_change_no_key(too_long: str):
    order = LaneOrder(packing(lengths(), too_long), LANES)
    whole, end = read_steps(order, 150)
    draw = random.Random(too_long)
    for _ in range(3):
        stops = [0, *sorted(draw.sample(range(1, 150), 10)), 150]
        read: list[Any] = []
        cursor: Cursor = {}
        for first, last in pairwise(stops):
            fresh = LaneOrder(packing(lengths(), too_long), LANES)
            steps, cursor = read_steps(fresh, last - first, draw.choice([1, 2, 3, 4, 6]), first, cursor)
            read += steps
        assert (read, cursor) == (whole, end)


BRANCHES: dict[str, Callable[[int], list[Branch]]] = {
    "same": lambda at: [Branch(number=1, from_step=at)],
    "skip": lambda at: [Branch(number=1, from_step=at, data="skip:7")],
    "reshuffle": lambda at: [Branch(number=1, from_step=at, data="reshuffle")],
    "all": lambda at: [
        Branch(number=1, from_step=at, data="reshuffle"),
        Branch(number=3, from_step=at + 2, data="skip:7"),
        Branch(number=4, from_step=at + 4, data="reshuffle"),
    ],
}


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("at", [9, 33])
def test_a_rewind_reads_no_document_of_an_epoch_twice(kind: str, at: int):
    packed, branches = packing(lengths()), BRANCHES[kind](at)
    trunk, cursor = read_steps(LaneOrder(packed, LANES), at)
    plain, _ = read_steps(LaneOrder(packed, LANES), 70)
    order = LaneOrder(packed, LANES, branches)
    branch, end = read_steps(order, 70 - at, 2, at, cursor)
    counts = pieces([*trunk, *branch])
    assert max(counts.values()) == 1
    assert (branch == plain[at:]) == (kind == "same")
    if kind in ("same", "reshuffle"):
        last_rows = [row for v in range(LANES) for row in Lane(packed, v, LANES, end[str(v)]).flush()]
        assert not pieces_of_epoch(packed, 0) - pieces([*trunk, *branch, last_rows]), "nothing is lost"
    if kind == "skip":
        skipped, _ = read_steps(LaneOrder(packed, LANES), 77 - at, 1, at, cursor)
        assert branch == skipped[7:]
    if kind == "reshuffle":
        first_epoch = Counter({piece: n for piece, n in counts.items() if piece[0] == 0})
        assert first_epoch <= pieces_of_epoch(packed, 0)
    for crash in (0, 1, 2, 3, 5):  # before the branch's first checkpoint (0) and behind it
        first, behind = read_steps(order, crash, 1, at, cursor)
        rest, last = read_steps(order, 70 - at - crash, 3, at + crash, behind if crash else cursor)
        assert (first + rest, last) == (branch, end)


def test_a_lane_that_no_document_fits_is_refused():
    tokens = [ROOM + 1 + i for i in range(30)]
    with pytest.raises(
        DataError, match=r"data\.documents: none of 30 documents fits into a row of 64 tokens\. Use a larger seq"
    ):
        read_steps(LaneOrder(packing(tokens, "drop"), LANES), 1)
    with pytest.raises(DataError, match="none of 30"):
        pack_epoch(packing(tokens, "drop"))
    tokens[7] = 3
    steps, _ = read_steps(LaneOrder(packing(tokens, "drop", open_rows=1), LANES), 2)
    assert {d for _, d, _ in pieces(steps)} == {7}, "one that fits is found in every lane's order"


def test_a_cursor_of_something_else_is_refused():
    order = LaneOrder(packing(lengths()), LANES)
    _, cursor = read_steps(order, 3)
    for other, message in (
        (
            LaneOrder(packing(lengths()), 10),
            r"^checkpoint of step 3: saved with loop\.sequences_per_step 12, now 10\.",
        ),
        (
            LaneOrder(packing(lengths(), digest="e"), LANES),
            "^checkpoint of step 3: saved with other documents",
        ),
    ):
        with pytest.raises(RunError, match=message):
            read_steps(other, 1, 1, 3, cursor)
        with pytest.raises(RunError, match=message):
            other.describe(3, cursor)
    with pytest.raises(RunError, match=r"^checkpoint of step 3: it has no position"):
        read_steps(order, 1, 1, 3, {})


def test_the_order_describes_where_it_is():
    packed = packing(lengths(), "drop")
    order = LaneOrder(packed, LANES)
    assert order.describe(0, {}) == {"epoch": 0, "documents": 0, "left_out": 0}
    steps, cursor = read_steps(order, 60)
    description = order.describe(60, cursor)
    assert description["documents"] == len({(e, d) for e, d, _ in pieces(steps)})
    assert description["left_out"] > 0
    assert description["epoch"] == min(
        Lane(packed, v, LANES, cursor[str(v)]).epoch(cursor[str(v)][0]) for v in range(LANES)
    )
    json.dumps(description)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_counters_report_dropped_documents_and_padding(world_size: int):
    packed = packing(lengths(), "drop")
    order = LaneOrder(packed, LANES)
    steps, cursor = read_steps(order, 60)
    totals: Counter[str] = Counter()
    for rank in range(world_size):
        share = RankShare(LANES, MICRO_BATCH, rank, world_size)
        for each in islice(order.micro_batches(0, share, {}), 60 * len(share.numbers)):
            assert each.counters.keys() == {"left_out", "padding"}
            for name, (total, count) in each.counters.items():
                totals += {name: total, f"all {name}": count}
    num_used = sum(packed.sizes(e, d)[p][0] for e, d, p in pieces(steps))
    assert totals == {
        "left_out": order.describe(60, cursor)["left_out"],
        "all left_out": sum(cursor[str(v)][0] for v in range(LANES)),
        "padding": 60 * LANES * ROOM - num_used,
        "all padding": 60 * LANES * ROOM,
    }


def test_an_epoch_is_packed_once_for_evaluation():
    packed = packing(lengths())
    rows = pack_epoch(packed)
    assert pieces([rows]) == pieces_of_epoch(packed, 0)


class Counting:
    """Document i has i + 1 tokens, from 10 * i on; those at odd places are learned. It does not know lengths without
    making samples."""

    fingerprint = "counting"

    def __len__(self) -> int:
        return 6

    def sample(self, epoch: int, index: int) -> Any:
        n = index + 1
        return {"input_ids": [*range(10 * index, 10 * index + n)], "loss_mask": [i % 2 == 1 for i in range(n)]}

    def collate(self, samples: Any) -> Any:
        raise NotImplementedError


def test_a_row_joins_its_pieces_and_positions_restart():
    config = bind(
        DATASETS, {"name": "packed", "documents": {"name": "documents", "corpus": "any"}, "sequence_tokens": 4}
    )
    data = PackedDataset(config, Counting())
    assert [data.sizes(0, i) for i in range(6)] == [[(1,)], [(2,)], [(3,)], [(4,)], [(4,), (1,)], [(4,), (2,)]]
    row, alone = data.sample(0, 5, 1, 1, 0, 0), data.sample(0, 4)
    assert row == {"input_ids": [54, 55, 0], "loss_mask": [False, True, False], "lengths": [2, 1]}
    assert alone == {"input_ids": [40, 41, 42, 43], "loss_mask": [False, True, False, True], "lengths": [4]}
    batch: Any = data.collate([row, alone])
    assert batch["input_ids"].tolist() == [[54, 55, 0, 0], [40, 41, 42, 43]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]], "padding is a document of its own"
    assert batch["attention_mask"].tolist() == [[True, True, True, False], [True] * 4]
    assert batch["loss_mask"].tolist() == [[False, True, False, False], [False, True, False, True]]
    dropping = PackedDataset(config.model_copy(update={"too_long": "drop"}), Counting())
    assert [dropping.sizes(0, i) for i in range(6)] == [[(1,)], [(2,)], [(3,)], [(4,)], [], []]
    assert dropping.fingerprint != data.fingerprint
    streams = [data.order(seed, 2, 1, ()).micro_batches(0, RankShare(2, 2, 0, 1), {}) for seed in range(4)]
    assert len({tuple(next(stream)[0]) for stream in streams}) > 1, "the order depends on the seed"
    rows = PackedRows(data)
    assert sorted(token for i in range(len(rows)) for token in rows.sample(0, i)["input_ids"]) == [
        token for i in range(6) for token in Counting().sample(0, i)["input_ids"]
    ]


DOCUMENTS = {"name": "documents", "corpus": "any"}


def test_a_field_that_is_added_leaves_the_digest_of_older_runs():
    class Later(dataset.Config):
        spread: bool = added_field(False)

    config = bind(DATASETS, {"name": "packed", "documents": DOCUMENTS, "sequence_tokens": 4})
    older, *later = (
        PackedDataset(dataset_config, Counting()).fingerprint
        for dataset_config in (
            config,
            Later(documents=config.documents, sequence_tokens=4),
            Later(documents=config.documents, sequence_tokens=4, spread=True),
        )
    )
    options = ["counting", {"sequence_tokens": 4, "open_rows": 16, "too_long": "cut"}]
    assert older == hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    assert [fingerprint == older for fingerprint in later] == [True, False]


class KnownLengths(Counting):
    """It knows lengths, and makes no samples."""

    def length(self, epoch: int, index: int) -> int:
        return index + 1

    def sample(self, epoch: int, index: int) -> Any:
        raise NotImplementedError


def test_sizes_use_known_lengths_and_check_no_protocol_per_document():
    """Such a check takes longer than all the rest."""
    config = bind(DATASETS, {"name": "packed", "documents": DOCUMENTS, "sequence_tokens": 4})
    data = PackedDataset(config, MixtureDataset({"a": KnownLengths(), "b": Counting()}, [6, 6], None, 0))
    calls: set[str] = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.add(frame.f_code.co_name))
    sizes = [data.sizes(0, i) for i in range(12)]
    sys.setprofile(before)
    assert sizes == [[(1,)], [(2,)], [(3,)], [(4,)], [(4,), (1,)], [(4,), (2,)]] * 2
    assert {"sizes", "length", "sample"} <= calls
    assert "__instancecheck__" not in calls


QUESTIONS = {
    "name": "prompted_qa",
    "corpus": "any",
    "contexts": "all",
    "context_tokens": 10,
    "sequence_tokens": 20,
    "loss_on": "answer",
}


@pytest.mark.parametrize(
    ("documents", "path"),
    [
        (QUESTIONS, "documents"),
        (
            {"name": "mixture", "parts": {"a": DOCUMENTS, "b": {"name": "mixture", "parts": {"c": QUESTIONS}}}},
            "documents.parts.b.parts.c",
        ),
    ],
)
def test_questions_that_can_be_longer_than_a_row_are_not_cut(documents: Any, path: str):
    raw = {"name": "packed", "documents": documents}
    with pytest.raises(
        Problems,
        match=re.escape(f"too_long: samples of {path} ('prompted_qa') can have more than 29 tokens"),
    ):
        bind(DATASETS, {**raw, "sequence_tokens": 29})
    bind(DATASETS, {**raw, "sequence_tokens": 29, "too_long": "drop"})
    bind(DATASETS, {**raw, "sequence_tokens": 30})


SHORT = {"name": "mixture", "parts": {"short": {"name": "text", "corpus": "short", "sequence_tokens": 3}}}
MIXTURE = {
    "name": "mixture",
    "parts": {"long": {"name": "documents", "corpus": "long"}, "short": SHORT},
    "draw": {"long": {"size": 4}},
}


@pytest.fixture
def corpora(write_corpus: Any) -> None:
    write_corpus("long", [{"text": letter * 9} for letter in "abcdefgh"])
    write_corpus("short", [{"text": "mnopqrstu"}])


def test_documents_of_a_mixture_are_packed_by_its_counts(places: Any, tokenizer: Any, corpora: None):
    config = bind(DATASETS, {"name": "packed", "documents": MIXTURE, "sequence_tokens": 12})
    config.check(places)
    data = config.build(places, tokenizer, "train", 0)
    assert [sorted(data.sizes(epoch, i)[0][0] for i in range(len(data))) for epoch in (0, 1)] == [
        [3, 3, 3, 10, 10, 10, 10]
    ] * 2
    lane = Lane(data.packing(0), 0, 1)
    keys = [*iter(lambda: lane.fill(6 * len(data)), None), *lane.flush()]
    rows = [data.sample(*key) for key in keys]
    texts = [text for row in rows for text in split(row["input_ids"], row["lengths"])]
    assert Counter(map(len, texts)) == {10: 6 * 4, 3: 6 * 3}
    assert Counter(text[0] for text in texts if len(text) == 10) == {8 + ord(letter): 3 for letter in "abcdefgh"}, (
        "goes on where it stopped"
    )
    assert loader.sources(data) == (), "a row is of several parts"
    val: Any = config.build(places, tokenizer, "val", 0)
    texts = [
        text for i in range(len(val)) for text in split(val.sample(0, i)["input_ids"], val.sample(0, i)["lengths"])
    ]
    assert Counter(map(len, texts)) == {10: 8, 3: 3}


def split(ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [tuple(ids[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def test_mistakes_in_packed_data_have_their_full_path(places: Any, corpora: None):
    wrong = {**MIXTURE, "parts": {**MIXTURE["parts"], "long": {"name": "documents", "corpus": "nowhere"}}}
    config = bind(DATASETS, {"name": "packed", "documents": wrong, "sequence_tokens": 12})
    with pytest.raises(UserError, match=r"^data\.documents\.parts\.long: .*nowhere: no such data set"):
        config.check(places)
    config.check_compiled()


def test_a_part_with_samples_other_than_token_ids_is_refused(places: Any, tokenizer: Any):
    class Richer(Counting):
        def sample(self, epoch: int, index: int) -> Any:
            return {**super().sample(epoch, index), "weight": 1.0}

    documents = MixtureDataset({"a": Counting(), "b": Richer()}, [6, 6], 0, 0)
    with pytest.raises(DataError, match="cannot be packed, as they have more fields than token ids"):
        require_token_ids(documents, "mixture")
    require_token_ids(MixtureDataset({"a": Counting(), "b": Counting()}, [6, 6], 0, 0), "mixture")


def endless(order: LaneOrder) -> Iterator[Key]:
    for keys, *_ in order.micro_batches(0, RankShare(LANES, MICRO_BATCH, 0, 1), {}):
        yield from keys


def test_documents_that_follow_each_other_in_the_data_are_spread():
    firsts = [key[1] for key in islice(endless(LaneOrder(packing(lengths()), LANES)), LANES)]
    assert len(set(firsts)) == LANES
    assert firsts != sorted(firsts)
