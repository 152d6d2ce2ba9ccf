"""What the processes of a training read of a mixture: together what is drawn for each epoch, each sample once."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.data.mixture.dataset import MixtureDataset
from src.data.orders import RankShare
from src.errors import DataError
from src.experiments.config import Places
from src.experiments.registry import DATASETS, bind
from tests import warm
from tests.systems.assistants.conversations import read_draws, talk
from tests.systems.assistants.conversations.read_draws import DRAWN, ROWS

EPOCH = sum(DRAWN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("draws")
    for n, rows in enumerate(ROWS):
        own = [talk.row(f"{n} {i}", "a" * (1 + i % 9)) for i in range(rows)]
        talk.write_rows(made / f"talk_{n}", {"train": own, "val": own})
    return made


def require_drawn(found: list[list[Any]]) -> None:
    """Two epochs, whatever process has read what: of each part as many as were drawn, disjoint, and others in the
    second epoch."""
    epochs = [{(part, row) for epoch, part, _, row in found if epoch == number} for number in (0, 1)]
    assert len(found) == 2 * EPOCH
    for epoch in epochs:
        assert Counter(part for part, _ in epoch) == {"talk_0": DRAWN[0], "talk_1": DRAWN[1]}
    assert not epochs[0] & epochs[1], "a part goes on where it stopped, and neither is read whole"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_of_torchrun_read_the_drawn_samples_once(folder: Path, processes: int, tmp_path: Path):
    """B8, B13: each process of the reference read all of them, and the same ones in every epoch."""
    assert warm.torchrun(Path(read_draws.__file__), [str(folder)], processes, tmp_path / "log") == ""
    each = [json.loads((folder / f"read-{rank}.json").read_text()) for rank in range(processes)]
    require_drawn([key for read in each for key in read])


@pytest.mark.parametrize(
    ("world_size", "per_step"), [(1, 6), (2, 6), (3, 6), (4, 6), (8, 6), (4, 12), (5, 12), (6, 12), (8, 24), (12, 24)]
)
def test_processes_on_any_number_of_nodes_read_what_one_would(folder: Path, world_size: int, per_step: int):
    """Four processes may be two nodes of two: a share depends on the rank among all (B13), and micro-batches need not
    divide (B14)."""
    shares = [RankShare(per_step, 2, rank, world_size) for rank in range(world_size)]
    steps = 2 * EPOCH // per_step
    each = [
        [*islice(read_draws.read(folder, share), steps * len(share.numbers) * 2)] if share.numbers else []
        for share in shares
    ]
    assert sum(map(bool, each)) == min(world_size, per_step // 2)
    require_drawn([key for read in each for key in read])
    whole = islice(read_draws.read(folder, RankShare(per_step, 2, 0, 1)), 2 * EPOCH)
    assert sorted(key for read in each for key in read) == sorted(whole)


@dataclass
class Numbers:
    """A part of a mixture: its samples are their numbers."""

    size: int
    fingerprint: str = "numbers"

    def __len__(self) -> int:
        return self.size

    def sample(self, epoch: int, index: int) -> int:
        """The number of a sample."""
        del epoch
        return index

    def collate(self, samples: Any) -> Any:
        """Nothing to put together."""
        return samples


draws = st.none() | st.builds(
    lambda fraction, size: {name: value for name, value in (("fraction", fraction), ("size", size)) if value} or None,
    st.none() | st.sampled_from([0.01, 0.1, 0.25, 1 / 3, 0.5, 0.999, 1.0, 1.5, 2.5]) | st.floats(0.01, 3),
    st.none() | st.integers(1, 60),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), draws), min_size=1, max_size=4), st.integers(0, 3))
def test_what_is_drawn_is_exact_for_any_size(given_parts: list[tuple[int, dict[str, Any] | None]], seed: int):
    """Or is refused; and all of a part is read before some of it again. (The reference drew by chance, and the same in
    each epoch, B8.)"""
    sizes = {f"part_{n}": size for n, (size, _) in enumerate(given_parts)}
    told = {f"part_{n}": draw for n, (_, draw) in enumerate(given_parts) if draw}
    part = {"name": "conversations", "corpus": "any", "sequence_tokens": 8}
    config: Any = bind(
        DATASETS, {"name": "mixture", "parts": dict.fromkeys(sizes, part), **({"draw": told} if told else {})}
    )
    wanted = dict[str, int]()
    for name, size in sizes.items():
        fraction, most = told.get(name, {}).get("fraction"), told.get(name, {}).get("size")
        wanted[name] = size if name not in told else min(round(fraction * size), most or math.inf) if fraction else most
    if any(not count or (count > sizes[name] and "fraction" not in told[name]) for name, count in wanted.items()):
        with pytest.raises(DataError, match=r"less than one sample|the part has only"):
            config._counts(sizes, Places(Path(), Path()))
        return
    data = MixtureDataset(
        {name: Numbers(size) for name, size in sizes.items()}, config._counts(sizes, Places(Path(), Path())), seed, 0
    )
    read = dict[str, list[tuple[int, int]]]({name: [] for name in sizes})
    for epoch in range(3):
        found = [data.locate(epoch, index) for index in range(len(data))]
        assert Counter(name for name, *_ in found) == wanted
        for name, own_epoch, index in found:
            read[name].append((own_epoch, index))
    for name, keys in read.items():
        whole = len(keys) // sizes[name]
        ordered = sorted(keys)
        assert ordered[: whole * sizes[name]] == [
            (epoch, index) for epoch in range(whole) for index in range(sizes[name])
        ]
        assert len(set(keys)) == len(keys)
