"""Prepare questions with contexts: `python -m data_prep.crossattn.prepare_qa --name nq --train FILE.. --val FILE..`.

Writes one folder below --data_path, atomically: train.jsonl, val.jsonl and manifest.json, with their provenance and the
counts of skipped questions. Two runs on the same files give the same bytes. A SOURCE is a file (JSON or JSON lines,
plain or with gzip; or parquet), a folder saved by `datasets`, or hub:ID[@CONFIG]. Layouts: SQuAD 1.1 and 2.0, HotpotQA,
Natural Questions (simplified, original, NQ-open), MS MARCO, TopiOCQA, TriviaQA, DPR, questions with retrieved passages,
and rows that are already prepared (data_prep/crossattn/qa_releases).
"""

import argparse
import contextlib
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep import command, sources
from data_prep.crossattn.qa_releases import placing
from data_prep.crossattn.qa_releases.detection import LAYOUTS
from data_prep.crossattn.qa_releases.question import Passage
from data_prep.crossattn.qa_releases.release import Release
from data_prep.crossattn.qa_splits import SPLITS, Choice, Options, SplitFile
from src.errors import DataError

COMMAND = "python -m data_prep.crossattn.prepare_qa"

_HERE = Path(__file__).parent
_SCRIPTS = (
    *(_HERE / f"{name}.py" for name in ("prepare_qa", "qa_splits", "../sources")),
    *sorted((_HERE / "qa_releases").glob("*.py")),
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    command.add_data_path(parser)
    add = parser.add_argument
    add("--name", required=True, help="the new folder below it, which an experiment names as data.corpus")
    add("--train", nargs="+", required=True, metavar="SOURCE", help="sources of the training split")
    add("--val", nargs="+", default=[], metavar="SOURCE", help="sources of the validation split")
    add(
        "--val_percent",
        type=float,
        metavar="P",
        help="instead of --val: use about P %% of the contexts of --train",
    )
    add("--layout", choices=sorted(LAYOUTS), help="of all sources (default: detected by the first record of each)")
    add("--dataset", metavar="NAME", help="what scores are grouped by (default: the layout says)")
    add(
        "--distractors",
        type=int,
        metavar="K",
        help="at most K passages that are not useful, the first ones (default: all)",
    )
    add(
        "--distractors_from",
        choices=("release", "rows"),
        default="release",
        help="rows: draw the missing ones up to K from other questions",
    )
    positions = ", ".join(placing.POSITIONS)
    add(
        "--position",
        metavar="WHERE",
        help=f"of the useful passages: {positions}, or the number of passages before them",
    )
    add("--max_rows", type=int, metavar="N", help="the first N rows of each split")
    add("--seed", type=int, default=0, help="of random orders and drawn distractors (default: %(default)s)")
    add("--only_questions_of", metavar="SOURCE", help="leave out other questions than these, as those of NQ-open")
    add("--without_contexts", action="store_true", help="questions without contexts, to be answered from memory")
    add(
        "--skip_duplicates",
        action="store_true",
        help="use the first of several questions with one id (default: an error)",
    )
    add("--evidence", type=Path, metavar="FOLDER", help="the texts of TriviaQA's pages, in wikipedia/ and web/")


def prepare(data_path: Path, options: Options) -> bool:
    """Make the folder `data_path / options.name`; False if it is complete and has the same provenance.

    Raises:
        DataError: a source is missing, damaged or of unknown layout, or a split would be empty. Nothing is written.
        RunError: the disk refuses.
    """
    folder = data_path / options.name
    releases = {
        split: [Release(source, split, options.layout, options.evidence) for source in getattr(options, split)]
        for split in SPLITS
    }
    only = Release(options.only_questions_of, "train") if options.only_questions_of else None
    made_from = _provenance(options, releases, only)
    facts = command.make_folder(
        folder,
        COMMAND,
        made_from,
        lambda partial_folder: _write(partial_folder, options, Choice(options, releases, only)),
    )
    if facts is not None:
        _print_summary(facts)
    return facts is not None


def _write(partial_folder: Path, options: Options, choice: Choice) -> dict[str, Any]:
    """Write both splits into the temporary folder `partial_folder`; return the facts for the manifest."""
    pools: dict[str, dict[str, Passage]] = {split: {} for split in SPLITS}
    if options.distractors_from == "rows":
        for split, _, question in choice.questions():
            pools[split] |= {passage.text: passage for passage in question.passages if passage.useful}
    with contextlib.ExitStack() as stack:
        split_files: dict[str, SplitFile] = {}
        for split in SPLITS:
            output = stack.enter_context(open(partial_folder / f"{split}.jsonl", "w", encoding="utf-8", newline="\n"))
            split_files[split] = SplitFile(output, options, list(pools[split].values()))
        for split, layout, question in tqdm(choice.questions(), desc="rows", unit="", disable=None, leave=False):
            if options.distractors is None and getattr(LAYOUTS[layout], "MANY_DISTRACTORS", False):
                raise DataError(
                    f"{question.where}: {len(question.passages)} passages. "
                    "Set --distractors to the number of useless passages to keep."
                )
            split_files[split].add(question, shuffled=getattr(LAYOUTS[layout], "SHUFFLED", False))
    skipped = {split: dict(sorted(reasons.items())) for split, reasons in choice.skipped.items()}
    for split in SPLITS:
        if not split_files[split].rows:
            left_out = {reason: n for reasons in skipped.values() for reason, n in reasons.items()}
            why = "; ".join(f"{n} {reason}" for reason, n in left_out.items()) or "none"
            together = (
                " Questions that share useful passages are in one split, and perhaps all of them do."
                if options.val_percent is not None
                else ""
            )
            raise DataError(f"--{split}: no row is left for this split. Skipped: {why}.{together} Use more rows.")
    return {
        "counts": {split: split_files[split].facts() for split in SPLITS},
        "skipped": skipped,
        "useful_contexts_in_both_splits": len(split_files["train"].contexts & split_files["val"].contexts),
    }


def _provenance(options: Options, releases: dict[str, list[Release]], only: Release | None) -> dict[str, Any]:
    """Everything that the content of the folder depends on.

    Raises:
        DataError: one source is given twice.
    """
    facts = {split: [release.facts() for release in releases[split]] for split in SPLITS}
    pairs = [(split, *pair) for split in SPLITS for pair in zip(releases[split], facts[split], strict=True)]
    sources.require_distinct((f"--{split} {release.source}", identity) for split, release, identity in pairs)
    return {
        "sources": facts,
        "options": options.options_for_manifest(),
        "only_questions_of": only.facts() if only is not None else None,
        "evidence_sha256": _digest_of_tree(options.evidence) if options.evidence is not None else None,
        "scripts_sha256": command.digest_files(_SCRIPTS),
    }


def _digest_of_tree(folder: Path) -> str:
    """Digest of the names and sizes of the files below a folder; the files are not read."""
    if not folder.is_dir():
        raise DataError(f"--evidence: {folder}: no such folder. Expected a folder with wikipedia/ and web/.")
    file_digests = sorted(
        (str(path.relative_to(folder)), path.stat().st_size)
        for below, _, names in os.walk(folder)
        for path in (Path(below, name) for name in names)
    )
    return hashlib.sha256(repr(file_digests).encode()).hexdigest()


def _print_summary(facts: dict[str, Any]) -> None:
    for split in SPLITS:
        counts = facts["counts"][split]
        rows, skipped = (
            ", ".join(f"{number} {name}" for name, number in counts["rows"].items()),
            facts["skipped"][split],
        )
        useful_contexts = counts["useful_contexts"]
        lines = [f"{split:6} rows: {rows}; {counts['unanswerable']} unanswerable, on {useful_contexts} useful contexts"]
        if counts["rows_with_fewer_distractors"]:
            lines.append(
                f"{'':6} {counts['rows_with_fewer_distractors']} rows have fewer distractors than --distractors"
            )
        lines += [f"{'':6} left out: {number}, {reason}" for reason, number in skipped.items()]
        command.report("\n".join(lines), split=split, **counts, skipped=skipped)
    if shared := facts["useful_contexts_in_both_splits"]:
        text = f"{shared} useful contexts are in both splits: the sources overlap."
        command.report(text, useful_contexts_in_both_splits=shared)


main = command.main_of(
    COMMAND, __doc__, _add_options, lambda data_path, **options: prepare(data_path, Options(**options))
)

if __name__ == "__main__":
    sys.exit(main())
