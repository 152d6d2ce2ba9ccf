"""Prepare rows with metadata: `python -m data_prep.metadata.prepare --name c4_html --train FILE.. --val FILE..`.

The result is a folder below --data_path with train.jsonl and val.jsonl for the data set `metadata`, and manifest.json.
A SOURCE is a file, a folder or a pattern of WARC, Parquet or JSON lines, plain or with gzip. `--extract html url text`
extracts pages; rows of BigScience's layout have their metadata and are copied unchanged. Each source is processed once,
on the cores of this machine or as a Slurm array. After a kill, start the command again: it resumes with the remaining
sources.
"""

import argparse
import hashlib
import importlib.metadata
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from data_prep import command, sources
from data_prep.metadata import charset, description, entities, extraction, html, page_sources, processes, text, url
from data_prep.metadata.extraction import EXTRACTORS, Options, Part
from src.data import jsonl
from src.errors import ConfigError, DataError
from src.files import encodable, reading, sample_digest
from src.support.command_line import require_at_least

log = logging.getLogger(__name__)
COMMAND = "python -m data_prep.metadata.prepare"
_SCRIPTS = [
    Path(module.__file__ or "")
    for module in (charset, description, entities, extraction, html, page_sources, text, url)
]


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--name", required=True, help="the new folder, which an experiment names as data.corpus")
    add(
        "--train",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="sources of the training split; those of --val are excluded",
    )
    add("--val", nargs="+", required=True, metavar="SOURCE", help="sources of the validation split")
    add("--extract", nargs="+", default=[], choices=EXTRACTORS, help="extractors to run on each row (default: none)")
    add(
        "--wiki_index",
        type=Path,
        metavar="FILE",
        help="for --extract description: made by data_prep.metadata.wiki_index",
    )
    add(
        "--mentions",
        type=Path,
        metavar="FILE",
        help="for --extract entities: a mention, a tab and a Wikipedia title per line",
    )
    add(
        "--removal_rules",
        type=Path,
        metavar="FILE",
        help=f"for --extract html: YAML like {html.RULES_FILE.name} (default: that file)",
    )
    kinds = page_sources.RECORDS
    add(
        "--records",
        nargs="+",
        default=kinds[:1],
        choices=kinds,
        help="kinds of WARC records to read as pages (default: 2xx)",
    )
    add(
        "--compatible",
        action="store_true",
        help="reproduce the reference's faults and layout, for its published strings",
    )
    add(
        "--max_errors",
        type=float,
        default=0.01,
        metavar="R",
        help="maximum share of rows on which an extractor fails (default: %(default)s)",
    )
    add(
        "--max_replaced",
        type=float,
        default=0.01,
        metavar="R",
        help="maximum share of pages with U+FFFD (default: %(default)s)",
    )
    add(
        "--page_seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="processor time per page; slower ones are skipped (default: %(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="sources processed at once (default: the cores)",
    )
    add(
        "--slurm",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="run as a Slurm array: partition=cpu time=02:00:00 mem_per_cpu_gb=4 ..",
    )


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    name: str
    train: Sequence[str]
    val: Sequence[str]
    extract: Sequence[str] = ()
    wiki_index: Path | None = None
    mentions: Path | None = None
    removal_rules: Path | None = None
    records: Sequence[str] = page_sources.RECORDS[:1]
    compatible: bool = False
    max_errors: float = 0.01
    max_replaced: float = 0.01
    page_seconds: float = 10.0
    workers: int = 1
    slurm: Sequence[str] = ()


def prepare(data_path: Path, request: Request) -> None:
    """Make the folder `data_path / request.name`, unless it exists and is made from the same sources.

    Raises:
        DataError: a source is damaged, too many pages failed, or a document is in both splits. Finished sources are
            reused after a restart.
        ConfigError: the options contradict each other.
    """
    for name, share in (("max_errors", request.max_errors), ("max_replaced", request.max_replaced)):
        if not 0 <= share <= 1:
            raise ConfigError(f"--{name}: expected a share from 0 to 1, got {share:g}.")
    require_at_least(1, workers=request.workers)
    if not 0 < request.page_seconds < float("inf"):
        raise ConfigError(f"--page_seconds: expected a number above 0, got {request.page_seconds:g}.")
    settings, folder, (options, required_files) = _settings(request.slurm), data_path / request.name, _options(request)
    held_out = page_sources.list_files(request.val)
    held_out_paths = {path.resolve() for path in held_out}
    splits = {
        "train": [path for path in page_sources.list_files(request.train) if path.resolve() not in held_out_paths],
        "val": held_out,
    }
    assert not held_out_paths & {path.resolve() for path in splits["train"]}, "the validation files were subtracted"
    crawl = next(
        (path for paths in splits.values() for path in paths if path.name.endswith((".warc", ".warc.gz"))), None
    )
    if crawl and "html" not in options.extract:
        raise ConfigError(f"--extract: {crawl} has pages, whose text is found by html. Add --extract html.")
    facts = dict[Path, dict[str, Any]]()
    for path in (path for split_files in splits.values() for path in split_files):
        with reading(path, DataError):
            sample, size = sample_digest(path), path.stat().st_size
        facts[path] = {"name": encodable(path.name), "bytes": size, "sample": sample}
    sources.require_distinct(
        (f"--{split} {path}", facts[path]) for split, split_files in splits.items() for path in split_files
    )
    if not splits["train"]:
        raise DataError("--train: all of its sources are also in --val. Add other sources for training.")
    made_from = {
        "sources": {split: [facts[path] for path in split_files] for split, split_files in splits.items()},
        "extract": list(options.extract),
        "compatible": options.compatible,
        "removal": [rule.model_dump() for rule in options.removal],
        "records": list(options.records),
        "page_seconds": options.page_seconds,
        "last_year": url.last_year(options.compatible) if "url" in options.extract else None,
        **required_files,
        "packages": {name: importlib.metadata.version(name) for name in ("lxml", "charset-normalizer")},
        "scripts_sha256": command.digest_files(_SCRIPTS),
    }
    parts_folder = data_path / f"{request.name}.parts"
    with command.exclusive_lock(parts_folder, f"{folder}: another process prepares it."):
        if command.is_made([folder], made_from):
            shutil.rmtree(parts_folder)  # in case a command was killed at its end
            return
        key = hashlib.sha256(
            orjson.dumps([required_files, *(made_from[name] for name in ("last_year", "packages", "scripts_sha256"))])
        ).hexdigest()
        parts = {
            split: [extraction.part_of(path, {**facts[path], "by": key}, options, parts_folder) for path in split_files]
            for split, split_files in splits.items()
        }
        processes.run(
            [part for split_files in parts.values() for part in split_files],
            options,
            request.workers,
            settings,
            parts_folder / "datatrove",
        )
        command.make_folder(folder, COMMAND, made_from, lambda new: _join(parts, request, new))
    shutil.rmtree(parts_folder)


def _options(request: Request) -> tuple[Options, dict[str, str]]:
    """Build the extraction options; return them with {option: digest of the file it needs}."""
    if request.removal_rules and "html" not in request.extract:
        raise ConfigError("--removal_rules: needs --extract html. Add it, or remove --removal_rules.")
    options = Options(
        tuple(key for key in EXTRACTORS if key in request.extract),
        request.compatible,
        removal=html.read_rules(request.removal_rules or html.RULES_FILE) if "html" in request.extract else (),
        records=tuple(sorted(set(request.records))),
        page_seconds=request.page_seconds,
    )
    required_files = dict[str, str]()
    for extractor, field, path in (
        ("description", "wiki_index", request.wiki_index),
        ("entities", "mentions", request.mentions),
    ):
        if (extractor in options.extract) != (path is not None):
            raise ConfigError(f"--{field}: belongs to --extract {extractor}. Set both or neither.")
        if path:
            if not path.exists():
                raise DataError(f"--{field} {path}: no such file.")
            with reading(path, DataError):
                required_files[field] = sample_digest(path)
            options = replace(options, **{field: str(path.resolve())})
    if "description" in options.extract:
        description.open_descriptions(options.wiki_index)
    if "entities" in options.extract:
        entities.read_linker(options.mentions)
    return options, required_files


def _settings(slurm: Sequence[str]) -> dict[str, Any]:
    """Arguments of datatrove's executor."""
    settings: dict[str, Any] = {}
    for setting in slurm:
        key, sign, value = setting.partition("=")
        if not sign:
            raise ConfigError(f"--slurm {setting}: expected KEY=VALUE, such as partition=cpu.")
        settings[key] = int(value) if value.isdecimal() else value
    if settings and not {"partition", "time"} <= settings.keys():
        raise ConfigError(
            f"--slurm: expected partition=NAME and time=HH:MM:SS among the settings, got {', '.join(slurm)}."
        )
    return settings


def _join(parts: dict[str, list[Part]], request: Request, new: Path) -> dict[str, Any]:
    """Write both splits into the folder; return their counts."""
    reports = {part: extraction.read_report(part) for split in parts.values() for part in split}
    _check_errors(reports, request.max_errors)
    pages, skipped = _totals(reports, "pages"), _totals(reports, "skipped")
    if pages["replaced"] / max(pages["all"], 1) > request.max_replaced:
        examples = [where for report in reports.values() for where in report["replaced"]][:3]
        raise DataError(
            f"--max_replaced {request.max_replaced:g}: {pages['replaced']} of {pages['all']} pages have "
            f"replacement characters (U+FFFD), "
            f"{pages['guessed']} pages have a guessed charset. First: {', '.join(examples)}. "
            "Check the charsets that the pages declare, or raise the limit."
        )
    _require_disjoint(parts)
    columns = list(dict.fromkeys(column for report in reports.values() for column in report["columns"]))
    for split in jsonl.SPLITS:
        with open(new / f"{split}.jsonl", "wb") as file:
            for part in parts[split]:
                _copy_rows(part, [column for column in columns if column not in reports[part]["columns"]], file)
    counts = {split: sum(reports[part]["rows"] for part in parts[split]) for split in jsonl.SPLITS}
    totals = {
        "empty": sum(report["empty"] for report in reports.values()),
        "skipped": dict(skipped),
        "pages": dict(pages),
    }
    dropped = ", ".join(f"{count} {name}" for name, count in sorted(skipped.items()))
    for split, count in counts.items():
        if not count:
            raise DataError(
                f"--{split}: no row has text. Skipped: {dropped or 'none'}; {totals['empty']} rows are empty. "
                "Add sources with text."
            )
    errors = {
        name: sum(report["errors"][name][0] for report in reports.values())
        for name in next(iter(reports.values()))["errors"]
    }
    command.report(
        f"{counts['train']} and {counts['val']} rows, {totals['empty']} without a text left out; errors: {errors}",
        rows=counts,
        empty=totals["empty"],
        errors=errors,
    )
    if pages:
        command.report(
            f"{pages['all']} pages, "
            f"{pages['guessed']} with a guessed charset, {pages['replaced']} with replacement characters, "
            f"{pages['truncated']} truncated",
            pages=pages,
        )
    if skipped:
        command.report(f"skipped: {dropped}", skipped=skipped)
    return {"counts": counts, **totals, "errors": errors}


def _totals(reports: Mapping[Part, Mapping[str, Any]], name: str) -> Counter[str]:
    total = Counter[str]()
    for report in reports.values():
        total.update(report[name])
    return total


def _check_errors(reports: dict[Part, dict[str, Any]], most: float) -> None:
    rows = sum(report["rows"] + report["empty"] + report["errors"][extraction.ROWS][0] for report in reports.values())
    for name in next(iter(reports.values()))["errors"]:
        errors = [report["errors"][name] for report in reports.values()]
        count = sum(number for number, _ in errors)
        if count / max(rows, 1) > most:
            examples = "\n".join([line for _, lines in errors for line in lines][:3])
            problem = (
                "--train, --val: malformed metadata in" if name == extraction.ROWS else f"--extract {name}: failed on"
            )
            advice = f"Fix them, or raise --max_errors (now {most:g}). First errors:"
            raise DataError(f"{problem} {count} of {rows} rows. {advice}\n{examples}")


def _require_disjoint(parts: dict[str, list[Part]]) -> None:
    """Raise DataError if a document is in both splits. Loads only the digests of the validation split into memory."""
    validation = {digest: (part, number) for part in parts["val"] for digest, number in extraction.digests_of(part)}
    for part in parts["train"]:
        for digest, number in extraction.digests_of(part):
            if digest in validation:
                other, place = validation[digest]
                raise DataError(
                    f"{part.source}: row {number}: same text as row {place} of {other.source} (--val). "
                    "Remove one of them: validation must not contain training documents."
                )


def _copy_rows(part: Part, missing: Sequence[str], file: BinaryIO) -> None:
    """Append the rows of a part, with empty lists for the columns that only other sources have."""
    with open(part.rows, "rb") as rows:
        if not missing:
            shutil.copyfileobj(rows, file, 1 << 20)
            return
        for line in rows:
            row = orjson.loads(line)
            file.write(
                line if "metadata" in row else orjson.dumps({**row, **{column: [] for column in missing}}) + b"\n"
            )


main = command.main_of(
    COMMAND, __doc__, _add_options, lambda data_path, **options: prepare(data_path, Request(**options))
)

if __name__ == "__main__":
    sys.exit(main())
