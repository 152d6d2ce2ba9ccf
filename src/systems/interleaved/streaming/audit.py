"""Report the documents that a training has read: python -m src.systems.interleaved.streaming.audit RUN [--step N]
[--documents FILE].

The command replays the rows of every step from the config, the run's branches and the tar indexes, without reading a
document. At the end, the position of each lane must equal the cursor in the checkpoint.

RUN is a save directory, or the start of an id in --runs. For each shard, the output has the number of documents that
were read once, more often, or not yet. --documents writes a line for each document: source, shard, its number in the
shard, and how often it was read.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from src.data.orders import RankShare
from src.errors import CheckpointError, ConfigError, RunError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.files import read_json, write_atomic, writing
from src.runs.checkpoints import checkpoints
from src.runs.history import branches
from src.runs.store import SavedRun, expand_run
from src.support.command_line import make_parser, run_command
from src.systems.interleaved.streaming.dataset import Config, StreamedDataset
from src.systems.interleaved.streaming.quarantine import FILE


@dataclass(frozen=True)
class Delivery:
    """Pieces of documents in the rows up to a step."""

    data: StreamedDataset
    step: int
    pieces: Counter[tuple[int, int, int]]
    """How often each (epoch, document, piece) was in a row."""
    left_out: int
    """Documents that were dropped because they do not fit into a row, are bad, or are on the deny list."""
    unreadable: set[tuple[int, int, int]]
    """Pieces in the quarantine, which were replaced by padding."""

    def documents(self) -> Counter[int]:
        """How often the first piece of each document was read, without unreadable pieces."""
        return Counter({document: count for (document, piece), count in self._by_piece().items() if piece == 0})

    def _by_piece(self) -> Counter[tuple[int, int]]:
        counts: Counter[tuple[int, int]] = Counter()
        for (epoch, document, piece), count in self.pieces.items():
            if (epoch, document, piece) not in self.unreadable:
                counts[document, piece] += count
        return counts


def replay(run: Path, data_path: Path, step: int | None = None) -> Delivery:
    """Recompute the rows that a run has read up to the checkpoint of a step, by default the newest.

    Raises:
        ConfigError: the run does not use streamed data.
        CheckpointError: there is no such checkpoint.
        RunError: the replayed cursor differs from that of the checkpoint.
    """
    experiment: Any = load_experiment(SavedRun(run).exp, str(run))
    if not isinstance(getattr(experiment, "data", None), Config) or not experiment.loop:
        raise ConfigError(f"{run}: its data set is not 'streamed'. Name a run that trains on streamed data.")
    folder = checkpoints.newest_complete(run) if step is None else checkpoints.folder(run, step)
    if folder is None or not folder.is_dir():
        steps = ", ".join(str(checkpoints.step_of(path)) for path in checkpoints.list_all(run)) or "none"
        raise CheckpointError(
            f"{run}: has no checkpoint{'' if step is None else f' of step {step}'}. Existing steps: {steps}."
        )
    from src.data.text import tokenizers

    tokenizer = tokenizers.load(folder / "tokenizer")
    data: Any = experiment.data.build(Places(data_path, run.parent), tokenizer, "train", experiment.seed)
    state, step = read_json(folder / "state.json", CheckpointError), checkpoints.step_of(folder)
    per_step = experiment.loop.sequences_per_step
    order = data.order(experiment.seed, per_step, experiment.loop.steps, branches.read(run))
    pieces: Counter[tuple[int, int, int]] = Counter()
    left_out, cursor = 0.0, dict[str, Any]()
    for row in islice(order.micro_batches(0, RankShare(per_step, per_step, 0, 1), {}), step):
        for key in row.keys:
            pieces.update(zip(key[::3], key[1::3], key[2::3], strict=True))
        left_out += row.counters["left_out"][0]
        cursor |= row.cursor
    if cursor != state["cursor"]:
        raise RunError(
            f"{folder}: its cursor differs from the one recomputed from the data and branch.json. "
            "If either was changed, restore it from a copy."
        )
    data.quarantine.attach(run)
    unreadable = {key for key in pieces if data.is_unreadable(key[1], key[2])}
    return Delivery(data, step, pieces, int(left_out), unreadable)


def report(delivery: Delivery) -> list[str]:
    """A line for each shard, and totals."""
    data, times = delivery.data, delivery.documents()
    lines = [f"{'source':16} {'shard':32} {'documents':>10} {'once':>8} {'more':>8} {'not read':>9}"]
    total: Counter[str] = Counter()
    for source, documents in enumerate(data.documents):
        first = data.first(source)
        for shard in documents.manifest.shards:
            reads = [times[document] for document in range(first, first + shard.documents)]
            counts = {
                "documents": len(reads),
                "once": reads.count(1),
                "more": sum(n > 1 for n in reads),
                "none": reads.count(0),
            }
            total.update(counts)
            lines.append(_line(data.source_names[source], shard.url, counts))
            first += shard.documents
    lines.append(_line("all", f"up to step {delivery.step}", total))
    lines.append(
        f"{delivery.left_out} times a document was left out: it does not fit into a row, is bad, or is denied."
    )
    if delivery.unreadable:
        lines.append(f"{len(delivery.unreadable)} times a part of a row could not be read, and was padding: {FILE}.")
    return lines


def _line(source: str, shard: str, counts: "Counter[str] | dict[str, int]") -> str:
    numbers = f"{counts['documents']:>10,} {counts['once']:>8,} {counts['more']:>8,} {counts['none']:>9,}"
    return f"{source:16} {shard[-32:]:32} {numbers}"


def write_documents(delivery: Delivery, path: Path) -> None:
    """Write a line for each document: source, shard, number in the shard, and how often it was read.

    Raises:
        RunError: the disk refuses.
    """
    times, lines = delivery.documents(), list[str]()
    for source, documents in enumerate(delivery.data.documents):
        for document in range(len(documents)):
            shard, number = documents.locate(document)
            count = times[delivery.data.first(source) + document]
            lines.append(
                f"{delivery.data.source_names[source]}\t{documents.manifest.shards[shard].url}\t{number}\t{count}\n"
            )
    with writing(path):
        write_atomic(path, "".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)

    def act() -> int:
        delivery = replay(expand_run(Path(options.run), options.runs), options.data_path, options.step)
        sys.stdout.write("".join(f"{line}\n" for line in report(delivery)))
        if options.documents:
            write_documents(delivery, options.documents)
        return 0

    return run_command(act)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("src.systems.interleaved.streaming.audit", __doc__)
    parser.add_argument("run", metavar="RUN", help="save directory, or the start of an id")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("results/runs"),
        metavar="DIR",
        help="folder of save directories (default: %(default)s)",
    )
    parser.add_argument(
        "--data_path", type=Path, default=Path("results/data"), metavar="DIR", help="of the data (default: %(default)s)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest)")
    parser.add_argument("--documents", type=Path, metavar="FILE", help="write how often each document was read")
    return parser


if __name__ == "__main__":
    sys.exit(main())
