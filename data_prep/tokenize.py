"""Tokenise text for pre-training: `python -m data_prep.tokenize --name c4_t5 --tokenizer t5_tokenizer --train FILE..`.

Writes one folder below --data_path: shards of ids that are read by memory map (src/data/text/token_files.py) and
manifest.json with their provenance. A SOURCE is a file (.jsonl, .json, .txt, plain or with gzip;
.parquet), a folder saved by `datasets`, or hub:ID[@CONFIG]. With --streaming, the text of a hub data set is not written
to the disk. The bytes do not depend on the number of processes. A killed run resumes after the last complete shard.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from data_prep import command, shards, sources, text_sources, token_workers
from src.data import jsonl
from src.data.text import token_files, tokenizers
from src.data.text.tokenizers import tokenizer_digest
from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.support.command_line import require_at_least

COMMAND = "python -m data_prep.tokenize"
_HERE = Path(__file__).parent
_SCRIPTS = [_HERE / f"{name}.py" for name in ("tokenize", "shards", "sources", "text_sources", "token_workers")]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line. All except `processes` can change the result."""

    name: str
    tokenizer: str
    train: Sequence[str] = ()
    val: Sequence[str] = ()
    corpus: str | None = None
    val_rate: float = 0.0
    text_field: str = "text"
    documents_by: text_sources.DocumentsBy = "file"
    streaming: bool = False
    shard_tokens: int = 1 << 27
    processes: int = 1


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--name", required=True, help="the new folder below it, which an experiment names as data.corpus")
    add(
        "--tokenizer",
        required=True,
        help="a folder below --data_path, any other folder, or a hub id: that of the model to be trained",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", help="a prepared folder below --data_path, with train.jsonl and val.jsonl")
    source.add_argument("--train", nargs="+", default=[], metavar="SOURCE", help="sources of the training split")
    add("--val", nargs="+", default=[], metavar="SOURCE", help="sources of the validation split")
    add(
        "--val_rate",
        type=float,
        default=0.0,
        metavar="R",
        help="instead of --val: the share of the documents of --train, by their text",
    )
    add(
        "--text_field",
        default="text",
        help="of JSON objects and table rows: which one is the text (default: %(default)s)",
    )
    add(
        "--documents_by",
        choices=get_args(text_sources.DocumentsBy),
        default="file",
        help="of a text file (default: %(default)s)",
    )
    add("--streaming", action="store_true", help="read sets of the hub over the network while they are tokenised")
    add(
        "--shard_tokens",
        type=int,
        default=1 << 27,
        metavar="N",
        help="number of tokens at which a shard ends (default: %(default)s)",
    )
    add(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="that tokenise (default: one for each core)",
    )


def tokenise(data_path: Path, options: Options) -> bool:
    """Make the folder `data_path / options.name`; False if it is complete and has the same provenance.

    Raises:
        DataError: a source or the tokenizer is missing or damaged, or a split would be empty. Finished shards remain.
        ConfigError: the options contradict each other.
        RunError: the disk refuses, or another process writes the same folder.
    """
    start = time.monotonic()
    _check(options)
    folder = data_path / options.name
    place = data_path / options.tokenizer
    tokenizer = tokenizers.load(place if place.is_dir() else options.tokenizer)
    encoder = tokenizers.SafeTokenizer(tokenizer)
    about = {
        "name": options.tokenizer,
        "fingerprint": tokenizer_digest(tokenizer),
        "eos_id": encoder.eos_id,
        "vocab_size": len(tokenizer),
    }
    opened_sources = _sources(data_path, options)
    made_from = _provenance(options, about, opened_sources)
    if command.is_made([folder], made_from):
        shards.discard(folder)
        return False
    job = token_workers.Job(encoder, token_files.id_dtype(len(tokenizer)), options.text_field, options.val_rate)
    open_writer = functools.partial(token_files.Writer, dtype=job.dtype)
    with (
        shards.partial(folder, made_from, open_writer) as new,
        token_workers.Workers(job, options.processes) as workers,
    ):
        num_reused_tokens = sum(shard["tokens"] for split in jsonl.SPLITS for shard in new.shards_of(split))
        for split, source in opened_sources:
            new.add(split, source, workers.map_batches, options.shard_tokens)
        splits = {split: new.shards_of(split) for split in jsonl.SPLITS}
        for split in jsonl.SPLITS:
            if not splits[split]:
                raise DataError(
                    f"--{split}: no document is left for this split. Use more documents, or change --val or --val_rate."
                )
        facts = {
            "command": COMMAND,
            "format": token_files.FORMAT,
            "dtype": job.dtype,
            "tokenizer": about,
            "splits": splits,
            "empty_documents": (empty := new.empty),
        }
        new.publish({**facts, "made_from": made_from})
    _print_summary(folder, splits, num_reused_tokens, time.monotonic() - start)
    if empty:
        command.report(f"left out: {empty:,} documents without text", empty=empty)
    return True


def _check(options: Options) -> None:
    """Raise ConfigError for options that contradict each other."""
    if not 0 <= options.val_rate < 1:
        raise ConfigError(f"--val_rate: expected a share of at least 0 and below 1, got {options.val_rate}.")
    require_at_least(1, shard_tokens=options.shard_tokens, processes=options.processes)
    if options.corpus is not None and (options.val or options.val_rate):
        raise ConfigError("--corpus: has its own validation split. Remove --val and --val_rate.")
    if options.corpus is None and bool(options.val) == bool(options.val_rate):
        raise ConfigError(
            "--val, --val_rate: set exactly one of them, to sources for validation or to a share of --train."
        )
    if options.corpus is None and options.streaming and not any(name.startswith(sources.HUB) for name in options.train):
        raise ConfigError(
            f"--streaming: only for data sets of the hub ({sources.HUB}ID), and no source in --train is one. Remove it."
        )


def _sources(data_path: Path, options: Options) -> list[tuple[str, text_sources.Source]]:
    """Open the sources; return (split, source) in reading order.

    Raises:
        DataError: a source is missing, or is given twice.
    """
    how = text_sources.Reading(options.text_field, options.documents_by, options.streaming)
    if options.corpus is not None:
        folder = jsonl.corpus_folder(Places(data_path, data_path), options.corpus)
        names_by_split = {split: [str(jsonl.require_file(folder, f"{split}.jsonl"))] for split in jsonl.SPLITS}
    else:
        names_by_split = {"train": list(options.train), "val": list(options.val)}
    opened_sources = [
        (split, text_sources.open_source(name, split, how)) for split in jsonl.SPLITS for name in names_by_split[split]
    ]
    sources.require_distinct((f"--{split} {source.name}", source.facts) for split, source in opened_sources)
    return opened_sources


def _provenance(
    options: Options, about: dict[str, Any], opened_sources: Sequence[tuple[str, text_sources.Source]]
) -> dict[str, Any]:
    """Everything that the content of the folder depends on."""
    ignored = ("name", "tokenizer", "train", "val", "corpus", "processes")
    return {
        "sources": [{"split": split, **source.facts} for split, source in opened_sources],
        "options": {name: value for name, value in dataclasses.asdict(options).items() if name not in ignored},
        "tokenizer": {name: about[name] for name in ("fingerprint", "eos_id", "vocab_size")},
        "packages": {"tokenizers": importlib.metadata.version("tokenizers")},
        "scripts_sha256": command.digest_files(_SCRIPTS),
    }


def _print_summary(
    folder: Path, splits: dict[str, list[dict[str, Any]]], num_reused_tokens: int, seconds: float
) -> None:
    tokens = sum(shard["tokens"] for split_shards in splits.values() for shard in split_shards)
    speed = (tokens - num_reused_tokens) / seconds
    command.report(
        f"{folder}: made in {seconds:.1f} s, {speed:,.0f} tokens/s"
        + (f"; {num_reused_tokens:,} were there" if num_reused_tokens else ""),
        folder=folder,
        made=True,
        seconds=seconds,
        tokens_per_second=speed,
        reused_tokens=num_reused_tokens,
    )
    for split, split_shards in splits.items():
        documents, tokens = (
            sum(shard["documents"] for shard in split_shards),
            sum(shard["tokens"] for shard in split_shards),
        )
        command.report(
            f"{split:6} {documents:,} documents, {tokens:,} tokens with their end tokens, {len(split_shards)} "
            f"shard{'s' * (len(split_shards) > 1)}",
            split=split,
            documents=documents,
            tokens=tokens,
            shards=len(split_shards),
        )


main = command.main_of(
    COMMAND, __doc__, _add_options, lambda data_path, **options: tokenise(data_path, Options(**options))
)

if __name__ == "__main__":
    sys.exit(main())
