"""Forecast of a training on streamed documents: `python -m data_prep.interleaved.plan FOLDER... --tokenizer FOLDER`.

FOLDERs are splits with shards.json; the other options are those of the data set `streamed`. Printed are how well rows
are filled, what is left out, the rows that one process reads in a second, how many tars are open, memory, how far
documents move, and recommended settings. Rows are made as training makes them, of a sample of documents, from the
indexes alone; for the speed some rows are read.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import command
from data_prep.interleaved import planning
from data_prep.interleaved.planning import Simulation
from src import files
from src.errors import ConfigError
from src.experiments import config as strict
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.dataset import Config, StreamedDataset
from src.systems.interleaved.streaming.documents import Documents
from src.systems.interleaved.streaming.images import ImageTokens
from src.systems.interleaved.streaming.remote.transfer import REMOTE
from src.systems.interleaved.streaming.shard_files import ShardFiles
from src.systems.interleaved.streaming.texts import TextTokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMAND = "python -m data_prep.interleaved.plan"
_STEPS_A_WINDOW = 10
"""A window with the documents of so many steps mixes enough that no step is of one tar."""
_DATA = ("sequence_tokens", "max_frames", "open_rows", "shuffle", "window")
_IMAGES = ("style", "frame_size", "image_tokens", "max_size")


@dataclass(frozen=True)
class Training:
    """What else is known of the training."""

    rows_a_step: int
    processes: int
    rows_a_second: float | None
    """That the models of all processes read; None where it is not known."""


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="a split of a source, with shards.json")
    add("--tokenizer", required=True, metavar="FOLDER", help="that of the model; tokens of images are added")
    add("--rates", nargs="+", type=float, metavar="R", help="share of each source (default: by their documents)")
    add("--sequence_tokens", type=int, default=2048, metavar="N", help="tokens of a row (default: %(default)s)")
    add("--max_frames", type=int, default=64, metavar="N", help="frames of a row (default: %(default)s)")
    add(
        "--open_rows",
        type=int,
        default=16,
        metavar="N",
        help="rows that each lane fills at a time (default: %(default)s)",
    )
    add("--shuffle", choices=("none", "shards", "window"), default="window", help="(default: %(default)s)")
    add("--window", type=int, default=10_000, metavar="N", help="documents that are mixed (default: %(default)s)")
    add(
        "--style",
        choices=("idefics3", "idefics2"),
        default="idefics3",
        help="the text around frames (default: %(default)s)",
    )
    add("--frame_size", type=int, default=384, metavar="N", help="pixels of a side of a frame (default: %(default)s)")
    add("--image_tokens", type=int, default=81, metavar="N", help="tokens of a frame (default: %(default)s)")
    add(
        "--max_size",
        type=int,
        default=1536,
        metavar="N",
        help="pixels of the longer side of an image (default: %(default)s)",
    )
    add("--sequences_per_step", type=int, default=256, metavar="N", help="rows of a step (default: %(default)s)")
    add("--processes", type=int, default=8, metavar="N", help="of the training (default: %(default)s)")
    add(
        "--rows_per_second",
        type=float,
        metavar="R",
        help="that the models of all processes read (default: not compared)",
    )
    add("--sample", type=int, default=4000, metavar="N", help="documents that are looked at (default: %(default)s)")
    add(
        "--measure",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="of reading rows; 0 for none (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the order (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="a plot: PNG, or another format that matplotlib knows")


def open_data(
    folders: Sequence[Path], tokenizer: str, rates: Sequence[float] | None, options: dict[str, Any]
) -> StreamedDataset:
    """The data set that a training would read. options: of the data set, by name.

    Raises:
        ConfigError: an option makes no sense.
        DataError: a list, an index or the tokenizer is missing or damaged.
    """
    from src.data.text import tokenizers

    names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError("a folder is given twice.")
    if rates is not None and len(rates) != len(names):
        raise ConfigError(f"--rates: expected {len(names)}, one for each folder, got {len(rates)}.")
    sources = {
        name: {"path": name, **({"rate": rate} if rate else {})}
        for name, rate in zip(names, rates or [None] * len(names), strict=True)
    }
    images = {name: options[name] for name in _IMAGES}
    config = strict.load(
        Config, {"sources": sources, "images": images, **{name: options[name] for name in _DATA}}, "options"
    )
    loaded = tokenizers.load(tokenizer, config.images.special_tokens())
    texts, made = TextTokens(loaded), ImageTokens(config.images, loaded)
    lists = {name: manifest.load(Path(name)) for name in sorted(names)}
    documents = {name: Documents(one, ShardFiles(one.folder), texts, made, config.rules) for name, one in lists.items()}
    return StreamedDataset(config, documents)


def describe(simulation: Simulation, training: Training) -> list[str]:
    """What is expected, one line for each thing."""
    rows, data = simulation.rows, simulation.data
    side, config = data.config.images.frame_size, data.config
    count, frames = len(rows.keys), sum(rows.frames) / len(rows.keys)
    pieces = sum(len(key) // 3 for key in rows.keys) / count
    lines = [
        (
            f"sample: {len(simulation.documents):,} of {len(data):,} documents; {count:,} rows of "
            f"{config.sequence_tokens} tokens"
        ),
        f"fill: {rows.fill:.3f}; with other open_rows: "
        + ", ".join(f"{n}: {fill:.3f}" for n, fill in simulation.fills.items()),
        (
            f"a row: {pieces:.1f} documents, {frames:.1f} frames of {config.max_frames}; "
            f"{config.open_rows} are open in each lane"
        ),
    ]
    for own in simulation.by_source():
        share, tokens = max(1, own.documents), max(1, own.text_tokens + own.image_tokens)
        lines.append(
            f"{own.name}: a document has {own.images / share:.1f} images and {tokens / share:.0f} tokens, "
            f"{own.image_tokens / tokens:.0%} "
            f"of images; {own.left_out / share:.2%} of documents are bad or left out by the rules, "
            f"{own.too_long / share:.2%} lose parts "
            f"as they are too long, in all {own.tokens_left_out / tokens:.2%} of tokens"
        )
        if not _is_counted(data, own.name):
            lines.append(
                f"{own.name}: the indexes have no counts of this tokenizer's tokens: training reads each document twice"
            )
    for name, source in zip(data.source_names, planning.sources_of(simulation), strict=True):
        together = planning.shards_together(source, 2 * round(simulation.documents_a_step))
        size = sum(shard.bytes for shard in data.documents[data.source_names.index(name)].manifest.shards) / len(
            source.sizes
        )
        moved = planning.moves(source, simulation.sample)
        lines.append(
            f"{name}: up to {together} of {len(source.sizes)} tars are open, {together * size / 1e9:.2f} GB; "
            f"a document moves by {sum(moved) / len(moved):,.0f} places on average, "
            f"by {planning.quantile(moved, 0.95):,} at 95 %"
        )
    own_rows = -(-training.rows_a_step // training.processes)
    lines.append(
        f"memory of a process: {_index_bytes(data) / 1e6:.1f} MB of indexes, "
        f"{frames * 3 * side * side * 4 / 1e6:.2f} MB of frames a row, {own_rows} rows a step, "
        f"{min(64, sum(len(d.manifest.shards) for d in data.documents))} files open at most for each source"
    )
    return lines


def recommend(simulation: Simulation, training: Training) -> list[str]:
    """Settings that would be better, each with its reason; none where all is well."""
    config, lines = simulation.data.config, list[str]()
    open_rows = simulation.enough_open_rows()
    if open_rows > config.open_rows:
        lines.append(
            f"open_rows: {open_rows}. It fills {simulation.fills[open_rows]:.3f} of a row instead of "
            f"{simulation.rows.fill:.3f}."
        )
    without = simulation.without_limit.fill
    if without > simulation.rows.fill + planning.ENOUGH:
        frames = simulation.enough_frames()
        lines.append(
            f"max_frames: {frames}. Rows without a limit have no more, but for one in 100, and fill {without:.3f}."
        )
    long = sum(own.too_long for own in simulation.by_source()) / max(1, len(simulation.documents))
    if long > 0.01:
        tokens = simulation.enough_tokens()
        lines.append(
            f"sequence_tokens: {tokens}. "
            f"It has room for 99 of 100 documents; {long:.1%} are larger than a row or its frames."
        )
    mixed = all(documents.manifest.facts.get("seed") is not None for documents in simulation.data.documents)
    wanted = _STEPS_A_WINDOW * round(simulation.documents_a_step)
    if not mixed and (config.shuffle != "window" or config.window < wanted):
        lines.append(
            f"shuffle: window, window: {wanted}. "
            f"It mixes the documents of {_STEPS_A_WINDOW} steps; the tars were written in order."
        )
    if training.rows_a_step % training.processes:
        lines.append(f"sequences_per_step: a multiple of {training.processes} processes.")
    return lines


def compare(read: int, seconds: float, training: Training) -> list[str]:
    """The rows that were read in this process beside those that are wanted."""
    rate = read / seconds
    line = (
        f"speed: {rate:.1f} rows/s of one process ({read} rows in {seconds:.1f} s), "
        f"{rate * training.processes:.1f} of {training.processes}"
    )
    if training.rows_a_second is None:
        return [line]
    share = training.rows_a_second / (rate * training.processes)
    more = f"wanted are {training.rows_a_second:.1f}: "
    if share <= 1:
        return [f"{line}; {more}{share:.0%} of the time of a core for each process"]
    return [
        f"{line}; {more}{share:.1f} times as many. Make images smaller when they are converted, or take more processes."
    ]


def _is_counted(data: StreamedDataset, name: str) -> bool:
    """Whether the first index of a source has counts of the tokens of its tokenizer."""
    documents = data.documents[data.source_names.index(name)]
    return _first_index(documents).facts.get("tokenizer") == documents.texts.digest


def _first_index(documents: Documents) -> tar_index.TarIndex:
    shard = documents.manifest.shards[0]
    return tar_index.load_file(documents.manifest.folder / shard.index, shard.bytes, shard.url)


def _index_bytes(data: StreamedDataset) -> int:
    """Of those that are held at the same time, by the first of each source."""
    total = 0
    for documents in data.documents:
        index = _first_index(documents)
        own = index.documents.nbytes + index.parts.nbytes + (0 if index.tokens is None else index.tokens.nbytes)
        total += own * min(64, len(documents.manifest.shards))
    return total


def draw(simulation: Simulation) -> "Figure":
    """Tokens of documents, frames of rows, fill over open rows, and how far documents move."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    config = simulation.data.config
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, frames, fill, moved = figure.subplots(2, 2).ravel()
    lengths.hist(simulation.lengths, bins=50)
    lengths.axvline(config.sequence_tokens, color="black", linestyle="--", label="a row")
    lengths.set(xlabel="tokens of a document", ylabel="documents")
    frames.hist(simulation.without_limit.frames, bins=30)
    frames.axvline(config.max_frames, color="black", linestyle="--", label="max_frames")
    frames.set(xlabel="frames of a row, without a limit", ylabel="rows")
    fill.plot(list(simulation.fills), list(simulation.fills.values()), marker="o")
    fill.axvline(config.open_rows, color="black", linestyle="--", label="open_rows")
    fill.set_xscale("log", base=2)
    fill.set(xlabel="open rows", ylabel="fill")
    for name, source in zip(simulation.data.source_names, planning.sources_of(simulation), strict=True):
        moved.hist(planning.moves(source, simulation.sample), bins=50, alpha=0.6, label=f" {name}")
    moved.set(xlabel="places by which a document moves", ylabel="documents")
    for axes in (lengths, frames, fill, moved):
        axes.legend(fontsize="small")
    return figure


def _print(
    folders: Sequence[Path], tokenizer: str, rates: Sequence[float] | None, output: Path | None, **given: Any
) -> None:
    for name in ("sequences_per_step", "processes", "sample"):
        if given[name] < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {given[name]}.")
    data = open_data(folders, tokenizer, rates, given)
    training = Training(given["sequences_per_step"], given["processes"], given["rows_per_second"])
    simulation = Simulation(data, given["seed"], training.rows_a_step, given["sample"])
    print("\n".join(describe(simulation, training)))
    if given["measure"] > 0 and not any(
        shard.url.startswith(REMOTE) for own in data.documents for shard in own.manifest.shards
    ):
        print("\n".join(compare(*simulation.read(given["measure"]), training)))
        print(f"this machine has {os.cpu_count()} cores")
    elif given["measure"] > 0:
        print("speed: not measured, as tars are elsewhere")
    better = recommend(simulation, training)
    print("\n".join(f"recommended: {line}" for line in better) if better else "recommended: these settings")
    if output is not None:
        with files.writing(output):
            output.parent.mkdir(parents=True, exist_ok=True)
            try:
                draw(simulation).savefig(output)
            except ValueError as error:
                raise ConfigError(f"--output {output}: {error}") from None
        print(f"wrote {output}")


main = command.main_of(COMMAND, __doc__, _add_options, _print)

if __name__ == "__main__":
    sys.exit(main())
