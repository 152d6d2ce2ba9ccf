"""Each process writes down which conversations of a mixture it reads in two epochs. For torchrun; test_draws.py
compares.

python tests/systems/assistants/conversations/read_draws.py FOLDER      FOLDER has talk_0/, talk_1/; writes
FOLDER/read-RANK.json
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from src.data.orders import RankShare, order_of
from src.experiments.config import Places
from src.experiments.registry import DATASETS, bind
from src.support import distributed
from tests.systems.assistants.conversations import talk

ROWS, DRAWN_SAMPLES, PER_STEP = (40, 30), (9, 15), 6
PARTS = {f"talk_{n}": {"name": "conversations", "corpus": f"talk_{n}", "sequence_tokens": 60} for n in range(2)}
DRAW = {"talk_0": {"size": DRAWN_SAMPLES[0]}, "talk_1": {"fraction": 0.5}}


def read(folder: Path, share: RankShare) -> Iterator[list[Any]]:
    """(epoch, part, number of the row) of each sample that a process reads, for ever."""
    config = bind(DATASETS, {"name": "mixture", "parts": PARTS, "draw": DRAW})
    data = config.build(Places(folder, folder), talk.tokenizer(), "train", 0)
    for keys, *_ in order_of(data, 0, share.per_step, 100).micro_batches(0, share, {}):
        for epoch, index in keys:
            part, own_epoch, row = data.locate(epoch, index)
            yield [epoch, part, own_epoch, row]


def main(folder: Path) -> None:
    """Read two epochs."""
    with distributed.session():
        share = RankShare(PER_STEP, 2, distributed.rank(), distributed.world_size())
        count = 2 * sum(DRAWN_SAMPLES) // PER_STEP * len(share.numbers) * 2
        (folder / f"read-{distributed.rank()}.json").write_text(json.dumps([*islice(read(folder, share), count)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
