"""What the processes of a training read of a mixture: together what is drawn for each epoch, each sample once."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from src.orders import RankShare
from tests import warm
from tests.data.conversations import read_draws, talk
from tests.data.conversations.read_draws import DRAWN, PER_STEP, ROWS

EPOCH = sum(DRAWN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("draws")
    for n, rows in enumerate(ROWS):
        own = [talk.row(f"{n} {i}", "a" * (1 + i % 9)) for i in range(rows)]
        talk.write_rows(made / f"talk_{n}", {"train": own, "val": own})
    return made


def require_drawn(found: list[list[Any]]) -> None:
    """Two epochs, whatever process has read what: of each part as many as were drawn, disjoint, and others in the second epoch."""
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_processes_on_any_number_of_nodes_read_what_one_would(folder: Path, world_size: int):
    """Four processes may be two nodes of two: a share depends on the rank among all (B13), and a step has three micro-batches (B14)."""
    shares = [RankShare(PER_STEP, 2, rank, world_size) for rank in range(min(world_size, 3))]
    steps = 2 * EPOCH // PER_STEP
    each = [[*islice(read_draws.read(folder, share), steps * len(share.numbers) * 2)] for share in shares]
    require_drawn([key for read in each for key in read])
    assert sorted(key for read in each for key in read) == sorted(islice(read_draws.read(folder, RankShare(6, 2, 0, 1)), 2 * EPOCH))
