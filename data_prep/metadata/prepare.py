"""Rows with metadata for training: `python -m data_prep.metadata.prepare --name c4_html --train 'pages/*.warc.gz' --val held_out.warc.gz`.

One folder is made below --data_path, with train.jsonl and val.jsonl as data set `metadata` reads them, and manifest.json. A SOURCE is a
file, a folder or a pattern of WARC, parquet or JSON lines, plain or with gzip. Pages are extracted by --extract html url text; rows of
BigScience's layout, which have their metadata, are taken as they lie. Each source is worked on once, by datatrove's executors: on the cores
of this machine, or as an array of Slurm. Started again after it was killed, it goes on with the sources that are left.
"""

import argparse
import concurrent.futures
import hashlib
import importlib.metadata
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from data_prep import command, sources
from data_prep.metadata import description, entities, extraction, html, page_sources, text, url
from data_prep.metadata.extraction import EXTRACTORS, Options, Part
from src.data import jsonl
from src.errors import ConfigError, DataError
from src.files import reading, sample_digest

log = logging.getLogger(__name__)
COMMAND = "python -m data_prep.metadata.prepare"
ROOT = Path(__file__).resolve().parents[2]
_SCRIPTS = [Path(module.__file__ or "") for module in (description, entities, extraction, html, page_sources, text, url)]


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--name", required=True, help="the new folder below it, which an experiment names as data.corpus")
    add("--train", nargs="+", required=True, metavar="SOURCE", help="sources of the training split; those of --val are left out of them")
    add("--val", nargs="+", required=True, metavar="SOURCE", help="sources of the validation split")
    add("--extract", nargs="+", default=[], choices=EXTRACTORS, help="what is extracted of each row (default: nothing)")
    add("--wiki_index", type=Path, metavar="FILE", help="of --extract description: made by data_prep.metadata.wiki_index")
    add("--mentions", type=Path, metavar="FILE", help="of --extract entities: a mention, a tab and a title of Wikipedia on each line")
    add("--compatible", action="store_true", help="extract with the faults of the original, for its published strings")
    add("--most_errors", type=float, default=0.01, metavar="R", help="share of rows that an extractor may fail on (default: %(default)s)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="sources that are worked on at once (default: the cores)")
    add("--slurm", nargs="+", default=[], metavar="KEY=VALUE", help="as an array of Slurm: partition=cpu time=02:00:00 mem_per_cpu_gb=4 ..")


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    name: str
    train: Sequence[str]
    val: Sequence[str]
    extract: Sequence[str] = ()
    wiki_index: Path | None = None
    mentions: Path | None = None
    compatible: bool = False
    most_errors: float = 0.01
    workers: int = 1
    slurm: Sequence[str] = ()


def prepare(data_path: Path, asked: Request) -> None:
    """Make the folder `data_path / asked.name`, unless it is there and of the same sources.

    Raises:
        DataError: a source is damaged, an extractor failed too often, or a document is in both splits. Finished sources are kept.
        ConfigError: the options do not go together.
    """
    if not 0 <= asked.most_errors <= 1 or asked.workers < 1:
        raise ConfigError("expected --most_errors from 0 to 1, and --workers of at least 1.")
    settings, folder, (options, needed) = _settings(asked.slurm), data_path / asked.name, _options(asked)
    held_out = page_sources.list_files(asked.val)
    held = {path.resolve() for path in held_out}
    splits = {"train": [path for path in page_sources.list_files(asked.train) if path.resolve() not in held], "val": held_out}
    assert not held & {path.resolve() for path in splits["train"]}, "the validation files were subtracted"
    facts = {
        path: {"name": path.name, "bytes": path.stat().st_size, "sample": sample_digest(path)} for own in splits.values() for path in own
    }
    sources.require_distinct((f"--{split} {path}", facts[path]) for split, own in splits.items() for path in own)
    if not splits["train"]:
        raise DataError("--train: nothing is left of it without the sources of --val.")
    made_from = {
        "sources": {split: [facts[path] for path in own] for split, own in splits.items()},
        "extract": list(options.extract),
        "compatible": options.compatible,
        **needed,
        "packages": {"lxml": importlib.metadata.version("lxml")},
        "scripts_sha256": command.digest_files(_SCRIPTS),
    }
    beside = data_path / f"{asked.name}.parts"
    with command.exclusive_lock(beside, f"{folder}: another process prepares it."):
        if command.is_made([folder], made_from):
            shutil.rmtree(beside)  # perhaps of a command that was killed at its end
            return
        key = hashlib.sha256(orjson.dumps([needed, made_from["packages"], made_from["scripts_sha256"]])).hexdigest()
        parts = {
            split: [extraction.part_of(path, {**facts[path], "by": key}, options, beside) for path in own] for split, own in splits.items()
        }
        _run([part for own in parts.values() for part in own], options, asked.workers, settings, beside / "datatrove")
        command.make_folder(folder, COMMAND, made_from, lambda new: _join(parts, options, asked.most_errors, new))
    shutil.rmtree(beside)


def _options(asked: Request) -> tuple[Options, dict[str, str]]:
    """What is extracted; and digests of the files that it needs, by option."""
    options = Options(tuple(key for key in EXTRACTORS if key in asked.extract), asked.compatible)
    needed = dict[str, str]()
    for extractor, field, path in (("description", "wiki_index", asked.wiki_index), ("entities", "mentions", asked.mentions)):
        if (extractor in options.extract) != (path is not None):
            raise ConfigError(f"--{field}: it belongs to --extract {extractor}. Give both, or none.")
        if path:
            with reading(path, DataError):
                needed[field] = sample_digest(path)
            options = replace(options, **{field: str(path.resolve())})
    if "description" in options.extract:
        description.open_descriptions(options.wiki_index)
    if "entities" in options.extract:
        entities.read_linker(options.mentions)
    return options, needed


def _settings(slurm: Sequence[str]) -> dict[str, Any]:
    """Arguments of datatrove's executor."""
    found: dict[str, Any] = {}
    for given in slurm:
        key, sign, value = given.partition("=")
        if not sign:
            raise ConfigError(f"--slurm {given}: expected KEY=VALUE, such as partition=cpu.")
        found[key] = int(value) if value.isdigit() else value
    if found and not {"partition", "time"} <= found.keys():
        raise ConfigError("--slurm: it needs partition=NAME and time=HH:MM:SS.")
    return found


def _run(parts: Sequence[Part], options: Options, workers: int, settings: dict[str, Any], logs: Path) -> None:
    """Make the parts that are not there.

    Raises:
        DataError: a source cannot be read; one line for each, after all others were made.
    """
    missing = [part for part in parts if not part.report.exists()]
    if missing:
        log.info("%d of %d sources are worked on ...", len(missing), len(parts))
        if settings:
            _run_array(missing, options, workers, settings, logs)
        else:
            _run_here(missing, options, workers)
    failed = [part for part in missing if not part.report.exists()]
    if failed:
        unknown = "its process was killed, as for lack of memory. Start again, with fewer --workers"
        raise DataError("\n".join(part.failure.read_text() if part.failure.exists() else f"{part.source}: {unknown}." for part in failed))


def _run_here(parts: Sequence[Part], options: Options, workers: int) -> None:
    """Make the parts in processes of this machine. Where one is killed, what was begun is tried again, each by itself, and then given up.

    datatrove's own executor for this waits for ever for the task of a process that was killed (0.10.1).
    """
    left = list(parts) if workers > 1 else []
    for part in parts if workers == 1 else ():
        extraction.make_part(part, options)
    while left and not _make_all(left, options, workers):
        begun = [part for part in left if not part.is_settled() and part.leftovers()]
        for part in begun:  # which of them had its process killed nobody tells
            _make_all([part], options, 1)
        left = [part for part in left if begun and not part.is_settled() and part not in begun]


def _make_all(parts: Sequence[Part], options: Options, workers: int) -> bool:
    """Whether no process was killed meanwhile."""
    for leftover in (path for part in parts for path in part.leftovers()):
        leftover.unlink()
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(parts)), multiprocessing.get_context("forkserver")) as pool:
        futures = [pool.submit(extraction.make_part, part, options) for part in parts]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BrokenProcessPool:
            return False
    return True


class Step:
    """A step of a pipeline of datatrove, of which task `rank` makes one part."""

    def __init__(self, parts: Sequence[Part], options: Options) -> None:
        from loguru import logger

        self.parts, self.options = parts, options
        logger.disable("datatrove")  # in each process: it tells every task in a dozen lines

    def __reduce__(self) -> Any:
        return Step, (self.parts, self.options)

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        """Make it."""
        extraction.make_part(self.parts[rank], self.options)

    def __repr__(self) -> str:
        return f"{len(self.parts)} sources"


def _run_array(parts: Sequence[Part], options: Options, workers: int, settings: dict[str, Any], logs: Path) -> None:
    """Make the parts as an array of Slurm, and wait for the end of all of its jobs."""
    try:
        from datatrove.executor import SlurmPipelineExecutor
    except ModuleNotFoundError:
        needs = f"pip install -r {page_sources.PACKAGES}"
        raise ConfigError(f"--slurm: a package that submits the preparation is not installed: {needs}") from None
    shutil.rmtree(logs, ignore_errors=True)  # it takes for done what it did before, whole or not
    environment = f"export PYTHONPATH={ROOT} PATH={Path(sys.executable).parent}:$PATH"
    given: dict[str, Any] = {
        "pipeline": [Step(parts, options)],
        "tasks": len(parts),
        "logging_dir": str(logs),
        "skip_completed": False,
        "job_name": "metadata",
        "env_command": environment,
        "requeue": False,
        "sbatch_args": {"wait": ""},
        "workers": workers,
    }
    try:
        executor = SlurmPipelineExecutor(**{**given, **settings})
    except TypeError as error:
        raise ConfigError(f"--slurm: datatrove's executor refuses it ({sources.first_line(error)})") from None
    executor.launch_merge_stats = lambda: None  # another job, for figures that nobody reads
    try:
        executor.run()
    except (OSError, subprocess.CalledProcessError) as error:
        if not getattr(error, "output", None):  # of jobs that were submitted and failed, the parts are missing
            raise ConfigError(f"--slurm: the scheduler refuses ({sources.first_line(error)})") from None


def _join(parts: dict[str, list[Part]], options: Options, most_errors: float, new: Path) -> dict[str, Any]:
    """Write both splits into the folder; returns their counts."""
    reports = {part: extraction.read_report(part) for own in parts.values() for part in own}
    _check_errors(reports, most_errors)
    _require_apart(parts)
    columns = list(dict.fromkeys(column for report in reports.values() for column in report["columns"]))
    for split in jsonl.SPLITS:
        with open(new / f"{split}.jsonl", "wb") as file:
            for part in parts[split]:
                _copy_rows(part, [column for column in columns if column not in reports[part]["columns"]], file)
    counts = {split: sum(reports[part]["rows"] for part in parts[split]) for split in jsonl.SPLITS}
    for split, count in counts.items():
        if not count:
            raise DataError(f"--{split}: no row has a text.")
    errors = {name: sum(report["errors"][name][0] for report in reports.values()) for name in next(iter(reports.values()))["errors"]}
    empty = sum(report["empty"] for report in reports.values())
    print(f"{counts['train']} and {counts['val']} rows, {empty} without a text left out; errors: {errors}")
    return {"counts": counts, "empty": empty, "errors": errors}


def _check_errors(reports: dict[Part, dict[str, Any]], most: float) -> None:
    rows = sum(report["rows"] + report["empty"] + report["errors"][extraction.ROWS][0] for report in reports.values())
    for name in next(iter(reports.values()))["errors"]:
        found = [report["errors"][name] for report in reports.values()]
        count = sum(number for number, _ in found)
        if count > most * rows:
            shown = "\n".join([line for _, lines in found for line in lines][:3])
            what = "no rows with metadata are" if name == extraction.ROWS else f"--extract {name}: failed on"
            raise DataError(f"{what} {count} of {rows} rows, above --most_errors {most:g}:\n{shown}")


def _require_apart(parts: dict[str, list[Part]]) -> None:
    """Raises DataError where a document is in both splits. In memory are digests of the validation split."""
    held = {digest: (part, number) for part in parts["val"] for digest, number in extraction.digests_of(part)}
    for part in parts["train"]:
        for digest, number in extraction.digests_of(part):
            if digest in held:
                other, place = held[digest]
                raise DataError(
                    f"{part.source}: row {number}: the same text as row {place} of {other.source}, which is for validation. "
                    "Leave one of them out: a model must not be measured on what it has read."
                )


def _copy_rows(part: Part, missing: Sequence[str], file: BinaryIO) -> None:
    """Append the rows, with empty lists for columns that other sources have."""
    with open(part.rows, "rb") as rows:
        if not missing:
            shutil.copyfileobj(rows, file, 1 << 20)
            return
        for line in rows:
            row = orjson.loads(line)
            file.write(line if "metadata" in row else orjson.dumps({**row, **{column: [] for column in missing}}) + b"\n")


main = command.main_of(COMMAND, __doc__, _add_options, lambda data_path, **given: prepare(data_path, Request(**given)))

if __name__ == "__main__":
    sys.exit(main())
