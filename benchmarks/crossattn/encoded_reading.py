"""Batches of encoded contexts: our store against the Python float lists of the reference.

    python -m benchmarks.crossattn.encoded_reading [--contexts 48] [--tokens 512] [--hidden_size 512] [--rounds 3]

The same hidden states are written three ways: to a store in bfloat16, to a Hugging Face dataset as lists of floats (as
xc-cache's preprocessing does: `tolist`, then `save_to_disk`), and to JSON lines. Then batches of 4 contexts are read in
one random order and made into a padded (B, P, D) tensor with a mask, by one process, until nothing but the tensor is
left to do. "first" reads each context for the first time, when its checksum is compared too. The dataset is also read
in its "numpy" format, which makes no Python floats, but the reference does not use it. Rounds alternate; the fastest
counts. Files are in the page cache throughout.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from src.systems.crossattn.data import encoded_store
from src.systems.crossattn.data.encoded_shards import Writer

BATCH = 4
TARGETS = {"times as fast": 20.0, "times as small": 4.0}
Batch = tuple[torch.Tensor, torch.Tensor]


def contexts(args: argparse.Namespace) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Ids and float32 states (S, D) of contexts with 50 % to 100 % of `tokens` tokens."""
    generator = torch.Generator().manual_seed(0)
    for n in range(args.contexts):
        length = args.tokens - n * 7 % (args.tokens // 2)
        yield (
            torch.randint(0, 50_000, (length,), generator=generator).tolist(),
            torch.randn(length, args.hidden_size, generator=generator),
        )


def write(folder: Path, args: argparse.Namespace) -> list[list[int]]:
    """All three; returns the ids of each context."""
    import datasets

    (folder / "store").mkdir()
    writer = Writer(folder / "store", "shard", args.hidden_size, "bfloat16")
    all_ids = []
    with open(folder / "lists.jsonl", "w") as lines:
        for ids, states in contexts(args):
            all_ids.append(ids)
            writer.append(encoded_store.context_key(ids), states)
            lines.write(json.dumps({"encoder_hidden_states": states.tolist()}) + "\n")
    writer.close()
    dataset = datasets.Dataset.from_generator(_rows, gen_kwargs={"args": args}, cache_dir=str(folder / "cache"))
    assert isinstance(dataset, datasets.Dataset)
    dataset.save_to_disk(folder / "lists")
    return all_ids


def _rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for _, states in contexts(args):
        yield {"encoder_hidden_states": states.tolist()}


def store_of(folder: Path, args: argparse.Namespace, all_ids: Sequence[Sequence[int]]) -> encoded_store.Store:
    """Reopen the store, so that no checksum has been compared yet."""
    shard = {"entries": len(all_ids), "tokens": sum(map(len, all_ids))}
    facts = {"hidden_size": args.hidden_size, "dtype": "bfloat16", "shards": {"shard": shard}, "prepared": []}
    return encoded_store.Store(folder / "store", facts)


def padded(rows: Sequence[Any]) -> Batch:
    """Collate B lists or arrays (S, D)."""
    states = [torch.as_tensor(row, dtype=torch.float32) for row in rows]
    hidden = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    lengths = torch.tensor([len(s) for s in states])
    return hidden, torch.arange(hidden.shape[1]) < lengths[:, None]


def readers(
    folder: Path, args: argparse.Namespace, all_ids: list[list[int]]
) -> dict[str, Callable[[list[int]], Batch]]:
    """How each makes a batch of the contexts with the given numbers."""
    import datasets

    lists = datasets.load_from_disk(folder / "lists")
    arrays = lists.with_format("numpy")
    with open(folder / "lists.jsonl", "rb") as lines:
        offsets = list(accumulate(map(len, lines), initial=0))
    file = open(folder / "lists.jsonl", "rb")  # noqa: SIM115  open to the end of the process
    first, again = store_of(folder, args, all_ids), store_of(folder, args, all_ids)

    def from_json(numbers: list[int]) -> Batch:
        rows = []
        for n in numbers:
            file.seek(offsets[n])
            rows.append(json.loads(file.read(offsets[n + 1] - offsets[n]))["encoder_hidden_states"])
        return padded(rows)

    def from_store(store: encoded_store.Store) -> Callable[[list[int]], Batch]:
        return lambda numbers: store.pad([[all_ids[n]] for n in numbers])

    def first_time(numbers: list[int]) -> Batch:
        first._is_verified[:] = False
        return first.pad([[all_ids[n]] for n in numbers])

    return {
        "store": from_store(again),
        "store, first": first_time,
        "float lists, datasets": lambda numbers: padded([lists[n]["encoder_hidden_states"] for n in numbers]),
        "float lists, JSON": from_json,
        "datasets, numpy format": lambda numbers: padded(
            [_stacked(arrays[n]["encoder_hidden_states"]) for n in numbers]
        ),
    }


def _stacked(rows: Any) -> Any:
    import numpy as np

    return np.stack(list(rows))


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Write, read, compare, print."""
    all_ids = write(folder, args)
    order = random.Random(0).sample(range(args.contexts), args.contexts)
    batches = [order[i : i + BATCH] for i in range(0, args.contexts, BATCH)]
    readers_by_name, best = readers(folder, args, all_ids), {}
    right = padded([states for _, states in contexts(args)][order[0] : order[0] + 1])
    for name, read in readers_by_name.items():
        hidden, mask = read(order[:1])
        assert torch.equal(mask, right[1]), name
        assert torch.equal(hidden.bfloat16(), right[0].bfloat16()), name
    for _ in range(args.rounds):
        for name, read in readers_by_name.items():
            began = time.perf_counter()
            for numbers in batches:
                read(numbers)
            best[name] = min(best.get(name, 1e9), time.perf_counter() - began)
    places = {
        "store": folder / "store",
        "float lists, datasets": folder / "lists",
        "float lists, JSON": folder / "lists.jsonl",
    }
    sizes = {name: _size(place) for name, place in places.items()}
    sizes |= {"store, first": sizes["store"], "datasets, numpy format": sizes["float lists, datasets"]}
    tokens = sum(map(len, all_ids))
    print(
        f"{args.contexts} contexts, {tokens} tokens of {args.hidden_size}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s)"
    )
    print(f"{'':24}{'tokens/s':>12}{'bytes/token':>13}{'slower':>9}{'larger':>9}")
    for name, took in best.items():
        row = f"{name:24}{tokens / took:12.0f}{sizes[name] / tokens:13.0f}"
        print(f"{row}{took / best['store']:8.1f}x{sizes[name] / sizes['store']:8.2f}x")
    peer = "float lists, datasets"
    got = {"times as fast": best[peer] / best["store, first"], "times as small": sizes[peer] / sizes["store"]}
    for name, target in TARGETS.items():
        print(f"{name} as {peer}: {got[name]:.2f} (target {target:.0f}): {'met' if got[name] >= target else 'MISSED'}")


def _size(place: Path) -> int:
    return (
        sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        if place.is_dir()
        else place.stat().st_size
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="encoded-reading-") as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
