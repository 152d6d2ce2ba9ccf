"""Indexes of tars of documents: `python -m data_prep.tar_shards.index shards/*.tar [--verify]`.

Beside each tar FILE.tar.idx is written: where each document and each of its parts is, the sizes of its images, and which documents are bad
and why. Only headers are read; --verify decodes each image once. A tar that is cut, in any way, is an error that names it; its index has
the documents before the cut. A tar whose index is of its size is passed over.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_prep import command
from src.data.streaming import tar_index
from src.errors import ConfigError, DataError

COMMAND = "python -m data_prep.tar_shards.index"


class Indexed(NamedTuple):
    """What was found in a tar."""

    tar: Path
    documents: int
    images: int
    bad: Counter[str]
    """Documents by why they are bad."""
    cut: str


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tars", nargs="+", type=Path, metavar="FILE", help="tars of documents, not compressed")
    parser.add_argument("--verify", action="store_true", help="decode each image once; documents with one that cannot be are bad")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="(default: one for each core)")


def index_tars(tars: Sequence[Path], verify: bool = False, processes: int = 1) -> list[Indexed]:
    """Write the indexes that are not there; what is known of all, in order.

    Raises:
        DataError: tars cannot be read, or are cut: one line for each, after all others were indexed.
        ConfigError: there would be no process.
    """
    if processes < 1:
        raise ConfigError(f"--processes: expected at least 1, got {processes}.")
    errors, found = list[str](), list[Indexed]()
    workers = min(processes, len(tars))
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver")) as pool:
        futures = [pool.submit(index_tar, tar, verify) for tar in tars] if workers > 1 else []
        for number, tar in enumerate(tars):
            try:
                found.append(futures[number].result() if futures else index_tar(tar, verify))
            except DataError as error:
                errors.append(str(error))
            else:
                if found[-1].cut:
                    errors.append(f"{tar}: {found[-1].cut}. {found[-1].documents} documents before it are indexed. Get it again.")
    if errors:
        raise DataError("\n".join(errors))
    return found


def index_tar(tar: Path, verify: bool) -> Indexed:
    """Write the index of a tar, if it is not there.

    Raises:
        DataError: it cannot be read.
    """
    index = _load_index(tar, verify)
    if index is None:
        with tar_index.open_tar(tar) as content:
            index = tar_index.build(content)
            if verify:
                tar_index.verify(index, content)
        tar_index.save(index, tar)
    bad = Counter(tar_index.REASONS[reason] for reason in index.documents["bad"] if reason)
    return Indexed(tar, len(index), int(index.documents["images"].sum()), bad, index.facts.get("cut", [""])[0])


def _load_index(tar: Path, verify: bool) -> tar_index.TarIndex | None:
    try:
        index = tar_index.load(tar)
    except DataError:
        return None
    return None if "cut" in index.facts or (verify and not index.facts.get("verified")) else index


def _print(tars: Sequence[Path], verify: bool, processes: int) -> None:
    found = index_tars(tars, verify, processes)
    for one in found:
        if one.bad:
            print(f"{one.tar}: {sum(one.bad.values())} of {one.documents} documents are bad: {dict(one.bad)}")
    print(f"{len(found)} tars, {sum(one.documents for one in found):,} documents, {sum(one.images for one in found):,} images")


main = command.main_of(COMMAND, __doc__, _add_options, _print)

if __name__ == "__main__":
    sys.exit(main())
