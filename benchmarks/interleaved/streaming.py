"""Streaming: reading compared to other libraries, indexing, resuming, packing compared to first-fit, and waits for
remote tars.

    python -m benchmarks.interleaved.streaming [--only PART ...] [--documents 20000] [--large 2000] [--peers FOLDER ...]
    [--run RUN]

reading: all parts of documents of 1 KB and 60 KB as bytes, in order, in one process without workers: with the index,
with webdataset from the same tars, and with mosaicml-streaming and litdata from the same documents in their formats. In
turns, best of three, for each library that can be imported, from the environment or a folder of --peers (`pip install
--no-deps --target FOLDER webdataset braceexpand`).
indexing: `data_prep.interleaved.index`, best of three, with one process and with two. resuming: the first row of a lane
at 1 % and at 99 % of an epoch of 10 million documents with known sizes, and its memory. packing: the fill of rows of
1,024 tokens with 16 open rows per lane, compared to m4's first-fit into the open rows of a map over 256 documents; and
the fill with 8 open rows of 16 frames, with and without one document in 1,000 that takes all frames of a row. waits:
reads that wait for a download, in 160 steps of 50 ms over 8 tars that take a second each, with and without prefetching.
--run: the share of time that a training on streamed pages waits for data.
"""

import argparse
import hashlib
import importlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.interleaved.write import Document, Part, Writing, write
from src.data.packing.lanes import Lane, Packing
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.arrangement import JoinedSources, Source
from src.systems.interleaved.streaming.shard_files import ShardFiles
from src.systems.interleaved.streaming.shard_lists import ShardSource
from src.systems.interleaved.streaming.texts import TextTokens
from src.training.config import LoopConfig

Readers = Iterator[tuple[str, Callable[[], int]]]
ROOM, OPEN, DOCUMENTS, LANES = 1024, 16, 10_000_000, 64


def documents_of(count: int, size: int) -> Iterator[Document]:
    """Documents of a text and an image, of `size` bytes together."""
    import io

    from PIL import Image

    draw, out = random.Random(0), io.BytesIO()
    Image.new("RGB", (16, 16), "grey").save(out, "PNG")
    image = out.getvalue() + draw.randbytes(max(0, size * 9 // 10 - len(out.getvalue())))
    text = draw.randbytes((size - min(size, len(image))) // 2 or 50).hex().encode()
    for i in range(count):
        yield Document(f"{i:08}", [Part("text", text), Part("image", image, "png")])


def write_documents(folder: Path, count: int, size: int) -> manifest.Manifest:
    """Tars of them."""
    return write(folder, documents_of(count, size), {}, Writing(5000 if size < 10_000 else 500, "x"))


def read_by_index(dataset_manifest: manifest.Manifest) -> int:
    """Read every part of every document."""
    files, num_documents = ShardFiles(dataset_manifest.folder), 0
    for shard in dataset_manifest.shards:
        index = tar_index.load_file(dataset_manifest.folder / shard.index, shard.bytes, shard.url)
        firsts = [*index.documents["first_part"].tolist(), len(index.parts)]
        offsets, sizes = index.parts["offset"].tolist(), index.parts["size"].tolist()
        for begin, end in pairwise(firsts):
            first = min(offsets[begin:end])
            whole = files.read(shard, first, max(offsets[i] + sizes[i] for i in range(begin, end)) - first)
            parts = [whole[offsets[i] - first : offsets[i] - first + sizes[i]] for i in range(begin, end)]
            num_documents += len(parts) > 0
    files.close()
    return num_documents


def read_documents(documents: Iterable[Any]) -> int:
    """Take every part of every document that another library reads."""
    num_documents = 0
    for document in documents:
        parts = [bytes(document["text"]), bytes(document["image"])]  # bytes are not copied again
        num_documents += len(parts) > 0
    return num_documents


def webdataset_readers(library: Any, dataset_manifest: manifest.Manifest, documents: Iterable[Document]) -> Readers:
    """webdataset reads the same tars; it does not decode."""
    urls = [str(dataset_manifest.folder / shard.url) for shard in dataset_manifest.shards]
    yield "webdataset", lambda: sum(1 for _ in library.WebDataset(urls, shardshuffle=False))


def mosaicml_readers(library: Any, dataset_manifest: manifest.Manifest, documents: Iterable[Document]) -> Readers:
    """mosaicml-streaming reads shards of its own; by number it needs no threads."""
    folder = str(dataset_manifest.folder / "mds")
    with library.MDSWriter(out=folder, columns={"text": "bytes", "image": "bytes"}) as out:
        for document in documents:
            out.write({part.kind: part.content for part in document.parts})
    # Few make it wait for a clock.
    data = library.StreamingDataset(local=folder, shuffle=False, batch_size=1, predownload=100_000)
    yield "mosaicml-streaming", lambda: read_documents(data)
    yield "mosaicml-streaming by number", lambda: read_documents(data[i] for i in range(len(data)))


def litdata_readers(library: Any, dataset_manifest: manifest.Manifest, documents: Iterable[Document]) -> Readers:
    """litdata reads chunks of its own."""
    folder = dataset_manifest.folder / "litdata"
    folder.mkdir()
    out = importlib.import_module("litdata.streaming.writer").BinaryWriter(str(folder), chunk_bytes="64MB")
    for i, document in enumerate(documents):
        out[i] = {part.kind: part.content for part in document.parts}
    out.done()
    out.merge(1)
    data = library.StreamingDataset(str(folder), shuffle=False)
    yield "litdata", lambda: read_documents(data)


PEERS = {"webdataset": webdataset_readers, "streaming": mosaicml_readers, "litdata": litdata_readers}


def best_of_three(count: int, *ways: Callable[[], int]) -> list[float]:
    """Documents a second of each, in turns; each of `count` documents."""
    rates = [0.0 for _ in ways]
    for _ in range(3):
        for number, way in enumerate(ways):
            begin = time.perf_counter()
            num_documents, seconds = way(), time.perf_counter() - begin
            if num_documents != count:
                raise AssertionError(f"{num_documents} of {count} documents were read")
            rates[number] = max(rates[number], count / seconds)
    return rates


def compare_reading(folder: Path, count: int, size: int) -> None:
    """Print documents a second by the index and by the other libraries that are installed."""
    dataset_manifest, others = write_documents(folder, count, size), dict[str, Callable[[], int]]()
    for name, readers in PEERS.items():
        try:
            library = importlib.import_module(name)
        except ImportError as error:
            print(f"{name} cannot be imported: {error}")
            continue
        others |= readers(library, dataset_manifest, documents_of(count, size))
    our_rate, *rates = best_of_three(count, lambda: read_by_index(dataset_manifest), *others.values())
    print(f"reading {size:,} bytes: {our_rate:,.0f} documents/s")
    for name, rate in zip(others, rates, strict=True):
        print(f"  {name} {rate:,.0f}: {our_rate / rate:.1f} times")


def time_indexing(folder: Path, count: int, processes: int) -> float:
    """Documents a second of the command, without its start."""
    from data_prep.interleaved import index

    def work() -> int:
        for path in folder.glob("*.idx"):
            path.unlink()
        return sum(one.documents for one in index.index_tars(sorted(folder.glob("*.tar")), processes=processes))

    return best_of_three(count, work)[0]


def lengths(kind: str) -> np.ndarray:
    """(1,000,000,) tokens of documents: "uniform" from 1 to half a row, or "log-normal" (median 150 tokens, sigma
    0.8)."""
    draw = np.random.default_rng(0)
    if kind == "uniform":
        return draw.integers(1, ROOM // 2, 1_000_000)
    return np.clip(draw.lognormal(np.log(150), 0.8, 1_000_000), 1, ROOM).astype(np.int64)


def fill_of_lanes(sizes: np.ndarray, rows: int) -> float:
    """Share of real tokens in the rows of a lane."""
    packing = Packing(
        JoinedSources([Source([len(sizes)], "none", 2, "s")]), lambda _, i: [(int(sizes[i]),)], (ROOM,), OPEN, "data"
    )
    lane = Lane(packing, 0, 1)
    for _ in range(rows):
        lane.next_row()
    return 1 - lane.padding / (rows * ROOM)


def fill_of_first_fit(sizes: np.ndarray, rows: int) -> float:
    """The same by first-fit into rows that are all closed after 256 documents."""
    num_tokens, num_rows, place = 0, 0, 0
    while num_rows < rows:
        open_rows = list[int]()
        for size in sizes[place : place + 256].tolist():
            fitting = next((i for i, room in enumerate(open_rows) if room >= size), None)
            if fitting is None:
                open_rows.append(ROOM)
                fitting = len(open_rows) - 1
            open_rows[fitting] -= size
        place, num_rows, num_tokens = (
            place + 256,
            num_rows + len(open_rows),
            num_tokens + sum(ROOM - room for room in open_rows),
        )
    return num_tokens / (num_rows * ROOM)


def fill_with_images(heavy: bool, images: int, rows: int = 20_000) -> float:
    """Share of real tokens in the rows of a lane: documents of 20 to 899 tokens with 1 to `images` images, 16 of which
    fill a row.

    heavy: with one document in 1,000 of 30 tokens and 16 images.
    """
    draw = random.Random(0)
    sizes = [(draw.randint(20, 899), draw.randint(1, images)) for _ in range(100_000)]
    if heavy:
        sizes[500::1000] = [(30, 16)] * len(sizes[500::1000])
    lane = Lane(
        Packing(JoinedSources([Source([len(sizes)], "none", 2, "s")]), lambda _, i: [sizes[i]], (ROOM, 16), 8, "data"),
        0,
        1,
    )
    packed_rows = [lane.next_row() for _ in range(rows)]
    return sum(sizes[document][0] for row in packed_rows for document in row[1::3]) / (rows * ROOM)


def write_slow_tars(folder: Path, steps: int, tars: int, seconds: float) -> None:
    """Indexed tars of documents that fill a row each; each tar takes `seconds` to download. And a tokenizer."""
    from data_prep.interleaved import index
    from tests.systems.interleaved.streaming import pages

    pages.tokenizer().save_pretrained(folder / "tokenizer")
    documents = [Document(f"{i:06}", [Part("text", bytes([97 + i % 26]) * 79)]) for i in range(steps)]
    dataset_manifest = write(folder / "made", documents, {}, Writing(steps // tars, "x"))
    urls = [f"pipe:sleep {seconds}; cat {dataset_manifest.folder / shard.url}" for shard in dataset_manifest.shards]
    index.index_into(
        folder / "slow" / "train",
        [ShardSource(url) for url in urls],
        how=index.Making(texts=TextTokens(pages.tokenizer())),
    )


def count_waits(folder: Path, prefetch: int, steps: int, step_seconds: float) -> tuple[int, float, str]:
    """Reads that waited for a download, seconds in all, and a digest of the rows, of a training with a cold cache of
    four tars."""
    from src.experiments.config import Places
    from src.experiments.registry import DATASETS, bind
    from src.training.loader import StepLoader
    from src.training.state import State
    from tests.systems.interleaved.streaming import pages

    config = bind(
        DATASETS, pages.config({"x": {"path": "slow"}}, shuffle="none", open_rows=1, prefetch_shards=prefetch)
    )
    data = config.build(Places(folder, folder), pages.tokenizer(), "train", 0)
    files, rows = data.documents[0].files, hashlib.sha256()
    assert files.cache
    files.cache.folder = folder / f"cache-{prefetch}"
    values = {"steps": steps, "sequences_per_step": 1, "micro_batch": 1, "learning_rate": 1e-3, "eval_every": steps}
    loop = LoopConfig.model_validate({**values, "best_metric": "val_loss", "best_mode": "min"})
    loader = StepLoader(data, data.order(0, 1, steps, []), loop, torch.device("cpu"), num_workers=0)
    stream, begin = loader.steps(State()), time.perf_counter()
    for _ in range(steps):
        rows.update(next(stream).batches[0]["input_ids"].numpy().tobytes())
        time.sleep(step_seconds)
    stream.close()
    return files.counters["misses"], time.perf_counter() - begin, rows.hexdigest()


def resume(share: float) -> tuple[float, int]:
    """Seconds to the first row of each lane after `share` of an epoch of 10 million documents, and bytes of a lane's
    state."""
    begin = time.perf_counter()
    sizes = [DOCUMENTS // 2000] * 2000
    streams = JoinedSources([Source(sizes, "window", 10_000, "s")])
    packing = Packing(streams, lambda _, i: [(i % 700 + 1,)], (ROOM,), OPEN, "data")
    lanes = [Lane(packing, v, LANES, (int(share * DOCUMENTS / LANES), 0, 0, (), (), ())) for v in range(LANES)]
    for lane in lanes:
        lane.next_row()
    seconds = time.perf_counter() - begin
    return seconds, max(len(json.dumps(lane.state())) for lane in lanes)


def waits(run: Path) -> Iterator[float]:
    """The shares of time that a training has waited for data, by logged interval."""
    for line in (run / "perf.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        if "data_wait_rate" in row:
            yield row["data_wait_rate"]


def _resume_apart(share: float) -> tuple[float, int, float]:
    """`resume` in a process of its own; and the memory that it has taken, in MB."""
    code = (
        "import psutil; from benchmarks.interleaved.streaming import resume; "
        "held = lambda: psutil.Process().memory_info().rss; "
        f"before = held(); seconds, state = resume({share}); print(seconds, state, (held() - before) / 1e6)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    seconds, state, memory = done.stdout.split()
    return float(seconds), int(state), float(memory)


PARTS = ("reading", "indexing", "resuming", "packing", "waits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)")
    parser.add_argument("--documents", type=int, default=20_000, help="documents of 1 KB (default: %(default)s)")
    parser.add_argument("--large", type=int, default=2_000, help="documents of 60 KB (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=20_000, help="rows to pack (default: %(default)s)")
    parser.add_argument(
        "--peers", type=Path, nargs="+", default=[], metavar="FOLDER", help="where other libraries are installed"
    )
    parser.add_argument("--run", type=Path, help="a training on streamed pages")
    args = parser.parse_args()
    sys.path.extend(map(str, args.peers))
    for part in args.only:
        with tempfile.TemporaryDirectory() as folder:
            globals()[f"print_{part}"](args, Path(folder))
    if args.run:
        print(f"waiting for data: {np.median([*waits(args.run)]):.4f} of the time, the median of logged intervals")


def print_reading(args: argparse.Namespace, folder: Path) -> None:
    compare_reading(folder / "small", args.documents, 1_000)
    compare_reading(folder / "large", args.large, 60_000)


def print_indexing(args: argparse.Namespace, folder: Path) -> None:
    write_documents(folder, args.documents, 1_000)
    for processes in (1, 2):
        print(f"indexing, processes {processes}: {time_indexing(folder, args.documents, processes):,.0f} documents/s")


def print_resuming(args: argparse.Namespace, folder: Path) -> None:
    early, late = (
        min(tries) for tries in zip(*((_resume_apart(0.01), _resume_apart(0.99)) for _ in range(7)), strict=True)
    )
    print(
        f"first rows of {LANES} lanes at 1 % {early[0]:.3f} s, at 99 % {late[0]:.3f} s: {late[0] / early[0]:.2f} "
        f"times; {late[2]:.0f} MB"
    )
    print(f"state of a lane: at most {max(early[1], late[1])} bytes")


def print_packing(args: argparse.Namespace, folder: Path) -> None:
    for kind in ("uniform", "log-normal"):
        sizes = lengths(kind)
        print(
            f"fill, {kind}: {fill_of_lanes(sizes, args.rows):.4f}, first-fit over 256 "
            f"{fill_of_first_fit(sizes, args.rows):.4f}"
        )
    for images in (1, 3):
        plain, heavy = (fill_with_images(flag, images, args.rows) for flag in (False, True))
        print(f"fill, 1 to {images} images: {plain:.4f}, with one document in 1,000 of 16 images {heavy:.4f}")


def print_waits(args: argparse.Namespace, folder: Path) -> None:
    steps, tars, seconds, step_seconds = 160, 8, 1.0, 0.05
    write_slow_tars(folder, steps, tars, seconds)
    waits = [count_waits(folder, prefetch, steps, step_seconds) for prefetch in (0, 2)]
    for prefetch, (count, total, _) in zip((0, 2), waits, strict=True):
        print(
            f"waits, prefetch_shards {prefetch}: "
            f"{count} of {tars} tars, {total:.1f} s for {steps} steps of {step_seconds} s"
        )
    print(f"  the same rows: {waits[0][2] == waits[1][2]}")


if __name__ == "__main__":
    main()
