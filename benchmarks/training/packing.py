"""Packing in lanes: microseconds of a row and bytes of state of a lane, for many documents; and packed against padded
training.

    python -m benchmarks.training.packing [--documents 10000000] [--lanes 64] [--steps 60] [--train 20] [--rows 4]
    python -m benchmarks.training.packing --texts FILE.jsonl --tokenizer FOLDER [...]

Lengths are log-normal (median 300 tokens, sigma 0.8), or those of the texts of a file, repeated in random order. Rows
have 1,024 tokens, and 16 rows of a lane are open. The data set is `packed`, with document lengths in an array, as for
token files. The time of a row includes its cursor; the JSON time is that of a full cursor, as in a checkpoint.

--train N: a GPTBigCode of 4 layers of 256 trains N steps on `--rows` packed rows each, and N on the same documents one
a row, padded to the longest (at most 1,024 tokens), alternately, in this process: tokens that are learned a second, as
a ratio.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from src.data import collate
from src.data.orders import Cursor, RankShare
from src.data.packing.dataset import PackedDataset
from src.data.packing.lanes import LaneOrder, Packing
from src.experiments.registry import DATASETS, bind
from src.training.loss import causal_lm_loss

ROOM, OPEN_ROWS, VOCABULARY = 1024, 16, 5000


def document_lengths(args: argparse.Namespace) -> np.ndarray:
    """Tokens of each document."""
    draw = np.random.default_rng(0)
    if args.texts is None:
        return np.maximum(2, draw.lognormal(np.log(300), 0.8, args.documents)).astype(np.int64)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    with open(args.texts, encoding="utf-8") as file:
        lengths = [max(2, len(tokenizer(json.loads(line)["text"])["input_ids"])) for line in file]
    print(
        f"{args.texts}: {len(lengths)} texts of {np.mean(lengths):.0f} tokens, "
        f"median {np.median(lengths):.0f}, longest {max(lengths)}"
    )
    return draw.choice(np.array(lengths, dtype=np.int64), args.documents)


class Lengths:
    """Documents of which only the lengths are known."""

    fingerprint = "lengths"

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def length(self, epoch: int, index: int) -> int:
        return int(self.lengths[index])

    def sample(self, epoch: int, index: int) -> Any:
        raise NotImplementedError

    def collate(self, samples: Any) -> Any:
        raise NotImplementedError


def packing(lengths: np.ndarray) -> Packing:
    """The packing of documents of these lengths."""
    documents = {"name": "documents", "corpus": "any"}
    config = bind(DATASETS, {"name": "packed", "documents": documents, "sequence_tokens": ROOM, "open_rows": OPEN_ROWS})
    return PackedDataset(config, Lengths(lengths)).packing(seed=0)


def measure_order(packed: Packing, args: argparse.Namespace) -> list[Sequence[int]]:
    """Print the cost of a row; return the rows read."""
    order = LaneOrder(packed, args.lanes)
    stream, cursor = order.micro_batches(0, RankShare(args.lanes, args.lanes, 0, 1), {}), Cursor()
    for _, entries, _ in islice(stream, 10):  # open rows are filled
        cursor |= entries
    rows: list[Sequence[int]] = []
    begin = time.process_time()
    for keys, entries, _ in islice(stream, args.steps):
        cursor |= entries
        rows += keys
    seconds = time.process_time() - begin
    begin = time.process_time()
    text = json.dumps(cursor)
    write_seconds = time.process_time() - begin
    begin = time.process_time()
    next(order.micro_batches(args.steps + 10, RankShare(args.lanes, args.lanes, 0, 1), json.loads(text)))
    restore_seconds = time.process_time() - begin
    num_tokens = sum(packed.sizes(*key[i : i + 2])[key[i + 2]][0] for key in rows for i in range(0, len(key), 3))
    pieces = sum(map(len, rows)) / 3 / len(rows)
    print(f"{args.documents:,} documents, {args.lanes} lanes, {len(rows):,} rows of {pieces:.2f} pieces")
    print(f"order: {1e6 * seconds / len(rows):.1f} us a row; fill {num_tokens / len(rows) / ROOM:.4f}")
    print(
        f"cursor: {len(text) / args.lanes:.0f} bytes a lane; JSON {1e3 * write_seconds:.2f} ms; a restart "
        f"{1e3 * restore_seconds:.1f} ms"
    )
    return rows


def measure_training(packed: Packing, rows: Sequence[Sequence[int]], args: argparse.Namespace) -> None:
    """Print tokens that are learned a second, packed and padded."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    torch.manual_seed(0)
    model = GPTBigCodeForCausalLM(
        GPTBigCodeConfig(
            vocab_size=VOCABULARY, n_positions=ROOM, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds, tokens = {"packed": 0.0, "padded": 0.0}, {"packed": 0, "padded": 0}
    batch_rows = args.rows
    for n in range(args.train + 1):
        keys = rows[n * batch_rows : (n + 1) * batch_rows]
        lengths = [[packed.sizes(*key[i : i + 2])[key[i + 2]][0] for i in range(0, len(key), 3)] for key in keys]
        for name, group in (("packed", lengths), ("padded", [[n] for row in lengths for n in row])):
            begin = time.perf_counter()
            batch = _batch(group, ROOM if name == "packed" else max(map(sum, group)), name == "packed")
            causal_lm_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if n:  # the first is for warming up
                seconds[name] += time.perf_counter() - begin
                tokens[name] += int(batch["loss_mask"].sum())
    packed_rate, padded_rate = (tokens[name] / seconds[name] for name in ("packed", "padded"))
    print(
        f"training, tokens a second: {packed_rate:.0f} packed, {padded_rate:.0f} padded: "
        f"{packed_rate / padded_rate:.2f} times"
    )


def _batch(lengths: Sequence[Sequence[int]], length: int, packed: bool) -> Any:
    ids = [torch.randint(0, VOCABULARY, (sum(row),)).tolist() for row in lengths]
    masks = [[i > 0 for n in row for i in range(n)] for row in lengths]
    return collate.pack_tokens(ids, masks, lengths, 0, length) if packed else collate.pad_tokens(ids, masks, 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--train", type=int, default=0)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--texts", metavar="FILE", help='JSON lines with "text"')
    parser.add_argument("--tokenizer", metavar="FOLDER")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    packed_rows = packing(document_lengths(arguments))
    order_rows = measure_order(packed_rows, arguments)
    if arguments.train:
        measure_training(packed_rows, order_rows, arguments)
