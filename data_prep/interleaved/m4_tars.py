"""Read the tars of huggingface/smollm's vision/m4: web pages, turns, captioned images, questions with answers.

Members are KEY.POSITION.text.txt, KEY.POSITION.image.jpeg and KEY.metadata.txt, or KEY.image.jpeg with KEY.text.txt, or
with KEY.question.txt and KEY.answer.txt. Incomplete documents are dropped; a truncated tar is an error.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.interleaved.rows import ReaderOptions, Row, make_turns, question_part, text_part
from data_prep.interleaved.write import Part
from src.data import jsonl
from src.errors import DataError
from src.systems.interleaved.streaming import tar_index
from src.systems.interleaved.streaming.tar_index import IMAGE, PROMPT, TEXT
from src.systems.interleaved.streaming.tars.indexing import build

_JUDGED_LATER = (tar_index.GOOD, tar_index.NO_IMAGE, tar_index.TOO_MANY_PIXELS, tar_index.NO_TEXT)
"""Reasons that the command checks for all layouts when it writes."""
Member = tuple[int, bytes]
"""(kind as in tar_index, content)."""


def read_pages(path: Path, options: ReaderOptions) -> Iterator[Row]:
    """Read `wd`: texts and images in the order of their positions."""
    for key, members, bad in _documents(path, options):
        yield Row(key, [_part(kind, content) for kind, content in members if kind in (TEXT, IMAGE)], bad)


def read_pairs(path: Path, options: ReaderOptions) -> Iterator[Row]:
    """Read `icp`: an image and its caption."""
    for key, members, bad in _documents(path, options):
        yield Row(key, [*_images(members), *(_part(kind, content) for kind, content in members if kind == TEXT)], bad)


def read_questions(path: Path, options: ReaderOptions) -> Iterator[Row]:
    """Read `vqav2_task_finetuning` and `docvqa`: an image, a question and its answer."""
    for key, members, bad in _documents(path, options):
        prompts = [question_part(content.decode(), options) for kind, content in members if kind == PROMPT]
        answers = [text_part(content.decode().strip()) for kind, content in members if kind == TEXT]
        yield Row(key, [*_images(members), *prompts, *answers], bad)


def read_turns(path: Path, options: ReaderOptions) -> Iterator[Row]:
    """Read `sft`: images, and turns as JSON with "user" and "assistant"."""
    for key, members, bad in _documents(path, options):
        turns = list[tuple[str, str]]()
        for kind, content in members:
            if kind == TEXT:
                where = f"{path}: document {key}"
                turn = jsonl.parse(content, where)
                for name in ("user", "assistant"):
                    jsonl.check_type(turn.get(name), str, f"{where}: {name}")
                turns.append((turn["user"], turn["assistant"]))
        yield (
            make_turns(key, [part.content for part in _images(members)], turns, options)
            if not bad
            else Row(key, [], bad)
        )


def _documents(path: Path, options: ReaderOptions) -> Iterator[tuple[str, list[Member], str]]:
    """Yield (key, members by position, reason to drop it). A bad document has no members.
    The key is the number of the document in the tar."""
    with tar_index.open_tar(path) as tar:
        index = build(tar)
        if "cut" in index.facts:
            reason, _, advice = index.facts["cut"]
            raise DataError(f"{path}: {reason}. {advice}")
        for reason, suffixes in index.facts["passed_over"].items():
            if reason not in tar_index.REASONS:
                options.passed_over.update({f"{reason}: {suffix}": count for suffix, (count, _) in suffixes.items()})
        for number in range(len(index)):
            reason = int(index.documents["bad"][number])
            records = index.parts_of(number)
            bad = "" if reason in _JUDGED_LATER else tar_index.REASONS[reason]
            contents = index.contents(records, lambda offset, size: bytes(tar[offset : offset + size]))
            yield f"{number:08}", [] if bad else list(zip(records["kind"].tolist(), contents, strict=True)), bad


def _images(members: Sequence[Member]) -> list[Part]:
    return [_part(kind, content) for kind, content in members if kind == IMAGE]


def _part(kind: int, content: bytes) -> Part:
    return Part("image", content) if kind == IMAGE else Part("text", content)
