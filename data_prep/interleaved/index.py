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
import hashlib
import mmap
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import command
from data_prep.interleaved import index_report
from data_prep.interleaved.index_report import Indexed
from src.data.text import tokenizers
from src.errors import ConfigError, DataError, RunError
from src.experiments.config import load
from src.files import reading, writing
from src.support.command_line import require_at_least
from src.support.parsing import parse_json
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.chats import make_tokens
from src.systems.interleaved.streaming.dataset import Config
from src.systems.interleaved.streaming.manifest import Manifest, Shard
from src.systems.interleaved.streaming.remote.transfer import PIPE, REMOTE, Source, source_of, transfer
from src.systems.interleaved.streaming.shard_lists import ShardSource, list_shards
from src.systems.interleaved.streaming.tars.fields import Fields
from src.systems.interleaved.streaming.tars.image_files import MAX_PIXELS
from src.systems.interleaved.streaming.tars.indexing import build
from src.systems.interleaved.streaming.texts import TextTokens, count_tokens

COMMAND = "python -m data_prep.interleaved.index"


class Making(NamedTuple):
    """Options of making indexes."""

    verify: bool = False
    texts: TextTokens | None = None
    """Counts the tokens of texts; None: not counted."""
    fields: Fields | None = None
    max_pixels: int = MAX_PIXELS

    def lacks(self, index: tar_index.TarIndex) -> bool:
        """Whether an index was made with other options, and must be made again."""
        facts = index.facts
        return (
            (self.verify and not facts.get("verified"))
            or (self.texts is not None and facts.get("tokenizer") != self.texts.digest)
            or facts.get("fields") != (self.fields and self.fields.as_json())
            or facts["max_pixels"] != self.max_pixels
        )

    def build(self, content: memoryview, tar: str) -> tar_index.TarIndex:
        """Build the index of a tar. tar: its name, for error messages."""
        index = build(content, self.fields, self.max_pixels, self.verify)
        if self.texts:
            count_tokens(index, content, self.texts, tar)
        return index


PLAIN = Making()


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
        return _index_all(functools.partial(index_tar, how=how), tars, processes)
    finally:
        _update_lists(tars)


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
    results = _index_all(functools.partial(_index_listed, output=output, how=how), shard_sources[part], processes)
    indexed = [_load_listed(output, one) for one in shard_sources]
    complete = [
        (one, index) for one, index in zip(shard_sources, indexed, strict=True) if index and not how.lacks(index)
    ]
    if len(complete) == len(shard_sources):
        shards = [_shard(output, one, index) for one, index in complete]
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


def index_tar(tar: Path, how: Making) -> Indexed:
    """Write the index of a tar if it is missing.
    The index of a tar listed in shards.json is only replaced if it changes.

    Raises:
        DataError: the tar is unreadable, or it is verified and its hash differs from the one in shards.json.
    """
    index, is_verified = _load_index(tar), how.verify and _is_as_listed(tar)
    if index is None or how.lacks(index):
        before = index
        with tar_index.open_tar(tar) as content:
            index = how.build(content, str(tar))
        if (
            before is not None
            and is_verified
            and how.texts is None
            and before.documents["bad"].tolist() == index.documents["bad"].tolist()
        ):
            return index_report.summarize(tar, before)
        if before is not None and is_verified and how.texts is None:
            index.tokens, index.facts = before.tokens, before.facts | index.facts
        tar_index.save(index, tar)
    return index_report.summarize(tar, index)


def _is_as_listed(tar: Path) -> bool:
    """Whether shards.json in its folder lists the tar with a hash. Raises DataError if the hash differs."""
    if not (tar.parent / manifest.NAME).is_file():
        return False
    for shard in manifest.load(tar.parent).shards:
        if shard.url == tar.name and shard.sha256 is not None:
            with reading(tar, DataError), open(tar, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != shard.sha256:
                raise DataError(
                    f"{tar}: damaged or replaced: its sha256 is {digest[:16]}, but {manifest.NAME} lists "
                    f"{shard.sha256[:16]}. Download or write it again."
                )
            return True
    return False


def _update_lists(tars: Sequence[Path]) -> None:
    """Update the digests of rewritten indexes in the shards.json of their folders."""
    for folder in sorted({tar.parent for tar in tars}):
        if (folder / manifest.NAME).is_file():
            before = manifest.load(folder)
            names = {
                tar.name
                for tar in tars
                if tar.parent == folder and tar.with_name(tar.name + tar_index.SUFFIX).is_file()
            }
            shards = [
                replace(
                    shard, index_digest=tar_index.digest_of(folder / shard.index), **_describe_local(folder / shard.url)
                )
                if shard.url in names and shard.index == shard.url + tar_index.SUFFIX
                else shard
                for shard in before.shards
            ]
            if shards != before.shards:
                manifest.save(replace(before, shards=shards))


def _load_index(tar: Path) -> tar_index.TarIndex | None:
    try:
        index = tar_index.load(tar)
    except DataError:
        return None
    return None if "cut" in index.facts or _is_newer(tar, tar) else index


def _describe_local(tar: Path) -> dict[str, Any]:
    """Fields of a `Shard` from which a reader detects that a local tar was replaced or changed."""
    return {"mtime_ns": tar.stat().st_mtime_ns, "sample": manifest.sample_tar(tar)}


def _is_newer(tar: Path, place: Path) -> bool:
    """Whether a tar was written, moved or copied to its path after its index was written.
    A copy can have an old modification time."""
    return tar.stat().st_ctime_ns > place.with_name(place.name + tar_index.SUFFIX).stat().st_mtime_ns


def _index_listed(one: ShardSource, output: Path, how: Making) -> Indexed:
    """Write the index of a shard into a folder if it is missing."""
    is_file = not one.url.startswith(REMOTE)
    if is_file and not Path(one.url).is_file():
        raise DataError(f"{one.url}: no such file.")
    source = Source(one.url, Path(one.url).stat().st_size) if is_file else source_of(one.url)
    index = _load_listed(output, one)
    is_current = index and (source.url.startswith(PIPE) or (index.facts["bytes"], index.facts["etag"]) == source[1:])
    is_current = is_current and not (is_file and _is_newer(Path(one.url), _place(output, one)))
    if index is None or not is_current or how.lacks(index):
        with tar_index.open_tar(Path(one.url)) if is_file else _fetch(source, output) as content:
            index = how.build(content, one.url)
            sha256 = None if is_file else hashlib.sha256(content).hexdigest()
        index.facts |= {"url": one.url, "etag": source.etag, "sha256": sha256}
        tar_index.save(index, _place(output, one))
    return index_report.summarize(one.url, index)


@contextmanager
def _fetch(source: Source, output: Path) -> Iterator[memoryview]:
    """Copy a remote shard into an unnamed temporary file; yield its bytes."""
    with writing(output), tempfile.TemporaryFile(dir=output, buffering=0) as file:
        transfer(source, file)
        if not os.fstat(file.fileno()).st_size:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as tar:
            yield tar


def _place(output: Path, one: ShardSource) -> Path:
    """Path of an index in the folder, without ".idx".
    Tars with the same name in different folders have different paths."""
    name = re.sub(r"[^\w.-]", "_", "pipe" if one.url.startswith(PIPE) else one.url.rpartition("/")[2])[-100:]
    return output / f"{name}-{hashlib.sha256(os.fsencode(one.url)).hexdigest()[:16]}"


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at Ctrl-C only the command reports it


def _load_listed(output: Path, one: ShardSource) -> tar_index.TarIndex | None:
    """Load the index of a shard; None if it is not in the folder or incomplete."""
    place = _place(output, one)
    path = place.with_name(place.name + tar_index.SUFFIX)
    try:
        with open(path, "rb") as file:
            facts = parse_json(file.readlines(1 << 16)[1], path, DataError)
        index = tar_index.load_file(path, facts["bytes"], one.url)
    except (OSError, DataError, ValueError, LookupError):
        return None
    return index if index.facts.get("url") == one.url and "cut" not in index.facts else None


def _shard(output: Path, one: ShardSource, index: tar_index.TarIndex) -> Shard:
    place, within, facts = _place(output, one), Path(one.url), index.facts
    url = str(within.relative_to(output.resolve())) if within.is_relative_to(output.resolve()) else one.url
    name = place.name + tar_index.SUFFIX
    local = {} if one.url.startswith(REMOTE) else _describe_local(within)
    digest = tar_index.digest_of(output / name)
    return Shard(url, name, len(index), facts["bytes"], one.source, facts["sha256"], facts["etag"], digest, **local)


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
