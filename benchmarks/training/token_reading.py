"""Packed rows of token ids from disk: ours against the `datasets` library, which also memory-maps a table of the same
rows.

    python -m benchmarks.training.token_reading [--rows 20000] [--tokens 568] [--vocab 32100] [--rounds 5]

Documents of random lengths are written as token files (src/data/text/token_files.py) and, joined and cut to rows of
`tokens` ids, as a dataset with one column of lists, saved with `save_to_disk`: of int32, and of uint16 as ours are on
disk. Then all rows are read once in one random order by one process, each as a numpy array, or 32 as an int64 torch
batch (32, tokens) for a step. The dataset is read as users do: with the format "numpy" row by row, or 32 rows at once;
and as its Python lists. Rounds alternate; the fastest counts. Files are in the page cache throughout.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from src.data.text import token_files
from src.data.text.documents import PackedRows, StoredDocuments
from src.files import new_directory

BATCH = 32
EOS = 1
Read = Callable[[Sequence[int]], Any]


def documents(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Ids of documents with their end tokens, as many as fill the rows."""
    generator = np.random.default_rng(0)
    remaining = args.rows * args.tokens
    while remaining > 0:
        length = min(remaining, int(generator.geometric(1 / 800)))
        yield np.append(generator.integers(3, args.vocab, length - 1), EOS)
        remaining -= length


def write(folder: Path, args: argparse.Namespace) -> PackedRows:
    """Both forms."""
    import datasets

    dtype = token_files.id_dtype(args.vocab)
    facts: dict[str, Any] = {
        "format": token_files.FORMAT,
        "dtype": dtype,
        "tokenizer": {"fingerprint": "", "eos_id": EOS},
    }
    with new_directory(folder / "ours", facts) as beside, token_files.Writer(beside, "train-00000", dtype) as writer:
        for ids in documents(args):
            writer.append(ids, np.array([len(ids)]))
        facts["splits"] = {"train": [writer.close()]}
    packed = PackedRows(StoredDocuments(folder / "ours", "train", EOS), args.tokens)
    for kind in ("int32", dtype):
        dataset = datasets.Dataset.from_generator(
            _rows,
            gen_kwargs={"packed": packed},
            features=datasets.Features({"input_ids": datasets.List(datasets.Value(kind))}),
            cache_dir=str(folder / "cache"),
        )
        assert isinstance(dataset, datasets.Dataset)
        dataset.save_to_disk(folder / kind)
    return packed


def _rows(packed: PackedRows) -> Iterator[dict[str, Any]]:
    for index in range(len(packed)):
        yield {"input_ids": packed.row(index)}


def readers(folder: Path, packed: PackedRows, dtype: str) -> dict[str, dict[str, Read]]:
    """{kind of reading: {reader: function that reads 32 rows by index}}."""
    import datasets

    plain = datasets.load_from_disk(folder / "int32")
    tables = {
        f"datasets, {kind}": datasets.load_from_disk(folder / kind).with_format("numpy") for kind in ("int32", dtype)
    }

    def by_row(table: Any) -> Read:
        return lambda numbers: [table[n]["input_ids"] for n in numbers]

    def by_batch(table: Any) -> Read:
        return lambda numbers: torch.from_numpy(np.asarray(table[list(numbers)]["input_ids"]).astype(np.int64))

    return {
        "row by row": {
            "ours": lambda numbers: [packed.row(n) for n in numbers],
            **{name: by_row(table) for name, table in tables.items()},
            "datasets, lists": lambda numbers: [np.array(plain[n]["input_ids"], np.int32) for n in numbers],
        },
        "batches": {
            "ours": lambda numbers: torch.from_numpy(np.stack([packed.row(n) for n in numbers]).astype(np.int64)),
            **{name: by_batch(table) for name, table in tables.items()},
            "datasets, lists": lambda numbers: torch.tensor(plain[list(numbers)]["input_ids"]),
        },
    }


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Write, compare, read, print."""
    packed = write(folder, args)
    order = np.random.default_rng(1).permutation(len(packed)).tolist()
    groups = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    best: dict[tuple[str, str], float] = {}
    readers_by_kind = readers(folder, packed, token_files.id_dtype(args.vocab))
    for kind, ways in readers_by_kind.items():
        right = np.stack([packed.row(n) for n in groups[0]])
        for name, read in ways.items():
            assert np.array_equal(np.stack([np.asarray(row) for row in read(groups[0])]), right), (kind, name)
    for _ in range(args.rounds):
        for kind, ways in readers_by_kind.items():
            for name, read in ways.items():
                began = time.perf_counter()
                for numbers in groups:
                    read(numbers)
                took = time.perf_counter() - began
                best[kind, name] = min(best.get((kind, name), took), took)
    tokens = len(packed) * args.tokens
    print(
        f"{len(packed)} rows of {args.tokens} tokens; "
        f"torch {torch.__version__}, 1 process, fastest of {args.rounds} rounds"
    )
    print(f"{'':14}{'':20}{'million tokens/s':>18}{'ours is':>10}")
    for (kind, name), took in best.items():
        print(f"{kind:14}{name:20}{tokens / took / 1e6:18.1f}{took / best[kind, 'ours']:9.1f}x")
    for kind in readers_by_kind:
        ratio = min(took for (one, name), took in best.items() if one == kind and name != "ours") / best[kind, "ours"]
        print(f"{kind}: ours is {ratio:.1f} times as fast as the fastest other")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=568)
    parser.add_argument("--vocab", type=int, default=32_100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="token-reading-") as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
