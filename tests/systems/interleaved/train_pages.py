"""A training on streamed pages whose processes write down what they read. For torchrun; test_interleaved.py compares.

python tests/systems/interleaved/train_pages.py FOLDER [STEP]      FOLDER has data/; it is asked to stop in this step
"""

import itertools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from src.data.orders import Key, RankShare
from src.experiments.grid import override
from src.experiments.interfaces import load_experiment
from src.runs import ledger
from src.runs.context import Options
from src.support import distributed
from src.systems.interleaved import recipe
from src.systems.interleaved.streaming import dataset
from tests.core.training import small
from tests.systems.interleaved.streaming import pages

PAGES: dict[str, Any] = {
    "recipe": "interleaved",
    "seed": 0,
    "model": {
        "name": "vision_language",
        "tokenizer": "pages_tokenizer",
        "vision": {"frame_size": pages.SIDE, "patch_size": 4, "hidden_size": 16, "num_layers": 1, "num_heads": 2},
        "max_tiles": 2,
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "max_positions": 128,
    },
    "data": pages.config({"pages": {"path": "toy_pages", "rate": 2.0}, "more": {"path": "more_pages", "rate": 1.0}}),
    "loop": {"steps": 24, "sequences_per_step": 4, "micro_batch": 2, "learning_rate": 3e-3, "eval_every": 8},
    "answers": {"questions": 4, "max_new_tokens": 3, "metrics": [{"name": "words"}], "shuffled_context": True},
}


def write_data(data: Path) -> Path:
    """Write two sources of pages, and their tokenizer, below `data`."""
    for split in ("train", "val"):
        pages.write_pages(data / "toy_pages" / split, 60 if split == "train" else 12, seed=1, asking=True)
        pages.write_pages(data / "more_pages" / split, 40 if split == "train" else 8, "more", seed=2)
    pages.tokenizer().save_pretrained(data / "pages_tokenizer")
    return data


EXP = override(PAGES, {"loop.steps": 40, "loop.eval_every": 10, "loop.sequences_per_step": 6, "loop.micro_batch": 1})
EXP.pop("answers")


def delivered_documents(folder: Path, step: int) -> Counter[Any]:
    """How often each (epoch, document, piece) was trained on up to a step: of each step what its last start has
    read."""
    last_reads: dict[tuple[int, int], tuple[int, list[Key]]] = {}
    for path in folder.glob("keys-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            for number, key in zip(record["numbers"], record["keys"], strict=True):
                place = (record["step"], number)
                if place not in last_reads or last_reads[place][0] <= record["start"]:
                    last_reads[place] = (record["start"], key)
    pieces: Counter[Any] = Counter()
    for (read_step, _), (_, key) in last_reads.items():
        if read_step <= step:
            pieces.update(zip(key[::3], key[1::3], key[2::3], strict=True))
    return pieces


def main(folder: Path, stop_at: int | None = None) -> None:
    """Train, or go on. Each process appends the keys of each step to <folder>/keys-RANK.jsonl."""
    experiment: Any = load_experiment(EXP, "here")
    keys: list[Key] = []
    read = dataset.StreamedDataset.sample

    def sample(data: Any, *key: int, **more: Any) -> Any:
        if "swaps" not in more:  # else it is for an evaluation
            keys.append(key)
        return read(data, *key, **more)

    def training_loss(config: Any) -> Callable[..., Any]:
        whole, calls = recipe.Config.training_loss(config), itertools.count()
        share = RankShare(6, 1, distributed.rank(), distributed.world_size())

        def recording_loss(model: Any, batch: Any) -> Any:
            finished, number = divmod(next(calls), share.passes)
            if number == 0:
                starts = [event for event in ledger.read(run.path) if event["event"] == "start"]
                record = {
                    "step": starts[-1]["step"] + finished + 1,
                    "start": len(starts),
                    "numbers": [*share.numbers],
                    "keys": keys[:],
                }
                with open(folder / f"keys-{distributed.rank()}.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
                keys.clear()
                if record["step"] == stop_at and distributed.is_main():
                    os.kill(os.getpid(), signal.SIGTERM)
            return whole(model, batch)

        return recording_loss

    dataset.StreamedDataset.sample = sample  # pyright: ignore[reportAttributeAccessIssue]
    experiment.__class__ = type(
        "Told", (recipe.Config,), {"training_loss": training_loss, "__module__": recipe.__name__}
    )
    options = Options(log_every=4, num_workers=0)
    with distributed.session(), distributed.stoppable(), small.opened_together(folder, options, EXP) as run:
        experiment.run(run)
        if distributed.is_main():
            run.dir.set_status("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
