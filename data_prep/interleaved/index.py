"""Index tars of documents: `python -m data_prep.interleaved.index shards/*.tar [--verify]`.

Writes FILE.tar.idx next to each tar: the positions of all documents and their parts, the sizes of images, and
which documents are bad and why. Only headers and texts are read; --verify also decodes each image. A truncated tar is
an error; its index has the documents before the cut. Existing indexes are reused if their tar has the same size. If
shards.json lists the sha256 of a tar, as for tars written by this project, --verify compares it, which detects every
changed bit.

--output FOLDER writes the indexes and the list of tars, shards.json, into FOLDER. The tars can then be anywhere, such
as s3://BUCKET/KEY or pipe:COMMAND, and are read once; existing indexes are reused unless the size or ETag of their tar
has changed. With --slice I/N, as in a Slurm array, each of N commands indexes its share; the last one to finish writes
shards.json.

The last lines and shards.json count every member that is not read, by reason and suffix. --fields names members that
the suffixes do not identify, and values in JSON members. Tars without a readable document are an error. --data adds a
line on the rows that training makes: their documents, images, tokens and fill.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from data_prep import command
from data_prep.interleaved import index_report, shard_indexes
from data_prep.interleaved.index_report import Indexed
from data_prep.interleaved.shard_indexes import PLAIN, Making
from src.data.text import tokenizers
from src.errors import ConfigError, DataError, RunError
from src.experiments.config import load
from src.files import writing
from src.support.command_line import require_at_least
from src.support.parsing import parse_json
from src.systems.interleaved.streaming import manifest
from src.systems.interleaved.streaming.chats import make_tokens
from src.systems.interleaved.streaming.dataset import Config
from src.systems.interleaved.streaming.manifest import Manifest
from src.systems.interleaved.streaming.remote.transfer import REMOTE
from src.systems.interleaved.streaming.shard_lists import ShardSource, list_shards
from src.systems.interleaved.streaming.tars.fields import Fields
from src.systems.interleaved.streaming.tars.image_files import MAX_PIXELS

COMMAND = "python -m data_prep.interleaved.index"


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = (
        "tars of documents, not compressed: files, s3://BUCKET/KEY, pipe:COMMAND, patterns, ranges {000..123}, "
        "lists NAME.txt, folders"
    )
    add("tars", nargs="+", metavar="SHARD", help=what)
    add(
        "--verify",
        action="store_true",
        help="decode each image once; documents with one that cannot be decoded are bad",
    )
    add("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="(default: one for each core)")
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where indexes and shards.json are written (default: each index next to its tar)",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="count the tokens of each text, so that a training plans its rows without reading a tar",
    )
    add(
        "--chat",
        action="store_true",
        help="count the tokens of conversations, with the tokenizer's chat template; implied by messages in --fields",
    )
    mapping = (
        """members by kind: '{"image": ["input.jpg", "left.jpg"], "text": "json:caption"}' """
        '(default: by suffix), or a conversation: \'{"messages": "json:messages"}\'; needs --output'
    )
    add("--fields", metavar="JSON", help=mapping)
    most = "larger images make a document bad, without decoding them (default: %(default)s)"
    add("--max_pixels", type=int, default=MAX_PIXELS, metavar="N", help=most)
    add(
        "--source",
        default="",
        metavar="NAME",
        help="with --output: the name under which a training counts the documents",
    )
    add(
        "--data",
        metavar="JSON",
        help="options of a training's data set, for its rows: '{\"sequence_tokens\": 2048, ...}'",
    )
    add("--slice", default="0/1", metavar="I/N", help="index every N-th shard, starting with the I-th, counted from 0")


def index_tars(tars: Sequence[Path], processes: int = 1, how: Making = PLAIN) -> list[Indexed]:
    """Write the missing indexes, each next to its tar.

    Raises:
        DataError: tars are unreadable or truncated (one line per tar, after the rest was indexed), or have no
            readable document.
        ConfigError: `processes` is below 1.
    """
    try:
        return _index_all(functools.partial(shard_indexes.index_tar, how=how), tars, processes)
    finally:
        shard_indexes.update_lists(tars)


def index_into(
    output: Path,
    shard_sources: Sequence[ShardSource],
    processes: int = 1,
    part: slice = slice(None),
    how: Making = PLAIN,
) -> list[Indexed]:
    """Write the missing indexes into a folder, and shards.json once all exist.
    part: slice of the list to index now.

    Raises:
        DataError: see `index_tars`.
        RunError: the disk refuses.
        ConfigError: `processes` is below 1.
    """
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    results = _index_all(
        functools.partial(shard_indexes.index_listed, output=output, how=how), shard_sources[part], processes
    )
    indexed = [shard_indexes.load_listed(output, one) for one in shard_sources]
    complete = [
        (one, index) for one, index in zip(shard_sources, indexed, strict=True) if index and not how.lacks(index)
    ]
    if len(complete) == len(shard_sources):
        shards = [shard_indexes.describe(output, one, index) for one, index in complete]
        facts = index_report.manifest_facts([index_report.summarize(one.url, index) for one, index in complete])
        manifest.save(Manifest(output, shards, {"command": COMMAND, **facts}))
    return results


def _index_all(index: Callable[[Any], Indexed], tars: Sequence[Any], processes: int) -> list[Indexed]:
    require_at_least(1, processes=processes)
    errors, results = list[str](), list[Indexed]()
    workers = min(processes, len(tars))
    context = multiprocessing.get_context("forkserver")  # the fork server can have an older environment
    with concurrent.futures.ProcessPoolExecutor(max(workers, 1), context, _begin, (dict(os.environ),)) as pool:
        futures = [pool.submit(index, tar) for tar in tars] if workers > 1 else []
        for number, tar in enumerate(tars):
            try:
                results.append(futures[number].result() if futures else index(tar))
            except DataError as error:
                errors.append(str(error))
            except BrokenProcessPool:
                raise RunError(
                    f"--processes {processes}: a process was killed, perhaps because it ran out of memory. "
                    "Start again with fewer processes; finished indexes are saved."
                ) from None
            else:
                if results[-1].cut:
                    errors.append(f"{results[-1].tar}: {results[-1].cut}")
    if errors:
        raise DataError("\n".join(errors))
    index_report.require_documents(results)
    return results


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at Ctrl-C only the command reports it


def _print(tars: Sequence[str], output: Path | None, source: str, processes: int, verify: bool, **more: Any) -> None:
    part, shards = _slice(more["slice"]), list_shards(tars)
    require_at_least(1, max_pixels=more["max_pixels"])
    fields, config = _fields(more["fields"]), _data(more["data"])
    if more["chat"] and not more["tokenizer"]:
        raise ConfigError("--chat: needs --tokenizer, whose chat template it uses. Add it.")
    is_chat = more["chat"] or bool(fields and fields.messages)
    loaded = tokenizers.load(more["tokenizer"]) if more["tokenizer"] else None
    texts = None if loaded is None else make_tokens(loaded, "idefics3", is_chat, "--tokenizer")
    how = Making(verify, texts, fields, more["max_pixels"])
    if config and not (output and texts):
        raise ConfigError("--data: needs --output and --tokenizer. Add them.")
    if output is None:
        remote = next((one.url for one in shards if one.url.startswith(REMOTE)), None)
        if remote or source or how.fields:
            option = remote or ("--source" if source else "--fields")
            raise ConfigError(f"{option}: needs --output, a folder for shards.json and the indexes. Add it.")
        results = index_tars([Path(one.url) for one in shards[part]], processes, how)
    else:
        results = index_into(
            output, [ShardSource(one.url, source or one.source) for one in shards], processes, part, how
        )
    if output is not None and not (output / manifest.NAME).exists():
        text = f"{output}: shards.json is written when all slices of the {len(shards)} tars are indexed."
        command.report(text, folder=output, made=False, tars=len(shards))
    command.report("\n".join(index_report.lines(results)), **index_report.totals(results))
    if config and output and (output / manifest.NAME).exists():
        row = index_report.measure_rows(output, more["tokenizer"], config)
        command.report(index_report.describe_row(row), row=row)


def _fields(text: str | None) -> Fields | None:
    if text is None:
        return None
    try:
        raw = parse_json(text, f"--fields {text:.60}", ConfigError)
    except ConfigError as error:
        raise ConfigError(f'{error} Example: \'{{"text": "json:caption"}}\'.') from None
    return load(Fields, raw, "--fields")


def _data(text: str | None) -> Config | None:
    """Parse the data config of an experiment. Its only source is a placeholder."""
    if text is None:
        return None
    raw = parse_json(text, f"--data {text:.60}", ConfigError)
    if not isinstance(raw, dict):
        raise ConfigError(f'--data {text:.60}: expected an object of options, such as {{"sequence_tokens": 2048}}.')
    return load(Config, {"sources": {"tars": {"path": "."}}, **raw}, "--data")


def _slice(text: str) -> slice:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise ConfigError(
            f"--slice {text}: expected I/N, with I from 0 to N - 1, such as "
            f"$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT."
        )
    return slice(int(number), None, int(count))


main = command.main_of(COMMAND, __doc__, _add_options, _print)

if __name__ == "__main__":
    sys.exit(main())
