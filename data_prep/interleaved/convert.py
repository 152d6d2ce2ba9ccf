"""Convert documents in other layouts to tars: `python -m data_prep.interleaved.convert LAYOUT FILE... --output FOLDER`.

Layouts: tars of huggingface/smollm's vision/m4: wd (pages), icp (an image and its caption), sft (turns),
vqav2_task_finetuning and docvqa (question and answer), ocr (scanned or printed pages); JSON lines with --images FOLDER:
mmc4, obelics; Parquet files with the bytes of
images: finevision, the_cauldron.

Questions become parts KEY.NNN.prompt.txt, which are masked in the loss; answers and other texts become
KEY.NNN.text.txt. The bytes of images are unchanged; each image is decoded once as a check. Pages are written without
images that are missing or cannot be decoded, and are dropped if no image is left. Other documents are dropped if one
image is bad. Documents without text are dropped. A row in another layout is an error. The counts of rows read, written
and dropped are printed and saved in converted.json. After an interruption, run the same command again: it writes the
same bytes.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import command
from data_prep.interleaved import m4_tars, ocr_pages, rows, turn_tables, web_lines, write
from data_prep.interleaved.rows import ReaderOptions, Row
from data_prep.interleaved.write import Document, Part, Writing
from src import files
from src.errors import ConfigError, DataError
from src.systems.interleaved.streaming.tars.image_files import SUFFIXES, ImageError, image_size, open_image
from src.systems.interleaved.streaming.tars.indexing import SPELLS_IMAGES, unread_text

COMMAND = "python -m data_prep.interleaved.convert"
COUNTS = "converted.json"
NO_TEXT, NO_IMAGE = "it has no text", "none of its images can be read"
_SCRIPTS = [module.__file__ for module in (m4_tars, ocr_pages, rows, turn_tables, web_lines, write)]


class Layout(NamedTuple):
    """Reader of a layout and its options."""

    read: Callable[[Path, ReaderOptions], Iterator[Row]]
    loses_images: bool = False
    """Whether documents are written without their unreadable images, instead of being dropped."""


LAYOUTS = {
    "wd": Layout(m4_tars.read_pages, loses_images=True),
    "icp": Layout(m4_tars.read_pairs),
    "sft": Layout(m4_tars.read_turns),
    "vqav2_task_finetuning": Layout(m4_tars.read_questions),
    "docvqa": Layout(m4_tars.read_questions),
    "ocr": Layout(ocr_pages.read_pages),
    "mmc4": Layout(web_lines.read_mmc4, loses_images=True),
    "obelics": Layout(web_lines.read_obelics, loses_images=True),
    "finevision": Layout(turn_tables.read_turns),
    "the_cauldron": Layout(turn_tables.read_turns),
}


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("layout", choices=list(LAYOUTS), metavar="LAYOUT", help=", ".join(LAYOUTS))
    add(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="tars, JSON lines or Parquet files, in the order of their documents",
    )
    add("--output", type=Path, required=True, metavar="FOLDER", help="where tars, indexes and shards.json are written")
    add("--images", type=Path, metavar="FOLDER", help="where the images are that are files")
    add(
        "--question",
        default=rows.QUESTION,
        metavar="TEXT",
        help="text that is read before an answer (default: %(default)r)",
    )
    add("--per_shard", type=int, default=1000, metavar="N", help="documents of a tar (default: %(default)s)")
    add("--seed", type=int, metavar="N", help="mix all documents, by this seed (default: their order stays)")
    add(
        "--source",
        default="",
        metavar="NAME",
        help="name under which a training counts the documents (default: the layout)",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="count the tokens of texts, so that training plans rows without reading documents",
    )


def convert(layout: str, inputs: Sequence[Path], output: Path, options: ReaderOptions, how: Writing) -> dict[str, int]:
    """Write the documents of `inputs` as tars into `output`.
    Returns the counts of rows, documents, images, and dropped documents by reason.

    Raises:
        DataError: a file is missing or damaged, a row does not have the layout, or no document is left.
        ConfigError: an option makes no sense, or a package is not installed.
        RunError: the disk refuses.
    """
    if options.question.count("{question}") != 1:
        raise ConfigError(f"--question: expected text that contains {{question}} once, got {options.question!r}.")
    if options.images is not None and not options.images.is_dir():
        raise ConfigError(
            f"--images {options.images}: no such folder. Name the folder with the image files of the rows."
        )
    if twice := [path for path, count in Counter(path.resolve() for path in inputs).items() if count > 1]:
        raise ConfigError(f"{twice[0]}: listed twice. List each input once.")
    if missing := [path for path in inputs if not path.is_file()]:
        raise DataError(f"{missing[0]}: no such file.")
    made_from = {
        "command": COMMAND,
        "script": command.digest_files([__file__, *filter(None, _SCRIPTS)]),
        "layout": layout,
        "inputs": [[path.name, files.sha256(path)] for path in inputs],
        "images": _digest_sizes(options.images, output),
        "question": options.question,
    }
    write.write(output, _documents(LAYOUTS[layout], inputs, output, options), made_from, how)
    return files.read_json(output / COUNTS, DataError)


def _digest_sizes(folder: Path | None, output: Path) -> str:
    """Digest of the names and sizes of all files below a folder, except those written here."""
    if folder is None:
        return ""
    paths = (path for path in folder.rglob("*") if path.is_file() and output.name not in str(path.relative_to(folder)))
    sizes = sorted((str(path.relative_to(folder)), path.stat().st_size) for path in paths)
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


def _documents(layout: Layout, inputs: Sequence[Path], output: Path, options: ReaderOptions) -> Iterator[Document]:
    """Yield the documents. The file of counts is written after the last one."""
    tally, progress = Counter[str](rows=0, documents=0, images=0), command.Progress("converted", "documents")
    for number, path in enumerate(inputs):
        for row in layout.read(path, options):
            tally["rows"] += 1
            parts, reason = _check(row, layout.loses_images, tally)
            if reason:
                tally[f"left out: {reason}"] += 1
                continue
            tally["documents"] += 1
            tally["images"] += sum(part.kind == "image" for part in parts)
            progress.count(1, 0)
            yield Document(f"{number:05}-{row.key}", parts)
    tally.update({f"members passed over: {reason}": count for reason, count in options.passed_over.items()})
    if not tally["documents"]:
        raise DataError(f"{output}: no document could be made from {tally['rows']} rows. {_describe(tally)}".rstrip())
    files.write_json(output / COUNTS, dict(tally))


def _check(row: Row, loses_images: bool, tally: Counter[str]) -> tuple[list[Part], str]:
    """Return the parts to write, and the reason to drop the document ("" if it is written)."""
    parts, num_missing, reason = list[Part](), 0, row.left_out
    for part in () if reason else row.parts:
        if part.kind != "image":
            why = unread_text(part.content.decode())
            if why == SPELLS_IMAGES:
                tally[f"texts left out: {why}"] += 1
            parts += [] if why else [part]
            continue
        image_part, why = _image(part.content)
        if image_part:
            parts.append(image_part)
        elif loses_images:
            tally[f"images left out: {why}"] += 1
            num_missing += 1
        else:
            return [], f"an image {why}"
    if not reason and not any(part.kind == "text" for part in parts):
        reason = NO_TEXT
    if not reason and num_missing and not any(part.kind == "image" for part in parts):
        reason = NO_IMAGE
    return parts, reason


def _image(content: bytes) -> tuple[Part | None, str]:
    """Return an image with the suffix of its format, or None and the reason to drop it."""
    if not content:
        return None, "is not there"
    try:
        image = open_image(content)
    except ImageError as error:
        return None, error.reason.removeprefix("an image ")
    if image_size(memoryview(content)) != image.size:
        return None, "has another size than its header says"
    return Part("image", content, next(suffix for suffix, name in SUFFIXES.items() if name == image.format)), ""


def _describe(tally: dict[str, int]) -> str:
    return "; ".join(
        f"{name}: {count:,}" for name, count in tally.items() if name not in ("rows", "documents", "images")
    )


def _print(
    layout: str,
    inputs: Sequence[Path],
    output: Path,
    images: Path | None,
    question: str,
    tokenizer: str | None,
    **how: Any,
) -> None:
    from src.data.text import tokenizers
    from src.systems.interleaved.streaming.texts import TextTokens

    texts = TextTokens(tokenizers.load(tokenizer)) if tokenizer else None
    writing = Writing(how["per_shard"], how["source"] or layout, how["seed"], texts)
    tally = convert(layout, inputs, output, ReaderOptions(images, question.replace("\\n", "\n")), writing)
    text = f"{output}: {tally['rows']:,} rows, {tally['documents']:,} documents, {tally['images']:,} images"
    summary = _describe(tally)
    command.report(f"{text}\n{summary}" if summary else text, folder=output, **tally)


main = command.main_of(COMMAND, __doc__, _add_options, _print)

if __name__ == "__main__":
    sys.exit(main())
