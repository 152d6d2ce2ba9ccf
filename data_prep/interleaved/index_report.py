"""Report on indexed tars: documents, and all unread members by reason and suffix."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from src.data.orders import RankShare
from src.data.text import tokenizers
from src.errors import DataError
from src.systems.interleaved.streaming import manifest, tar_index
from src.systems.interleaved.streaming.chats import make_tokens
from src.systems.interleaved.streaming.dataset import Config, StreamedDataset
from src.systems.interleaved.streaming.documents import Documents
from src.systems.interleaved.streaming.images import ImageTokens
from src.systems.interleaved.streaming.shard_files import ShardFiles
from src.systems.interleaved.streaming.tar_index import TarIndex
from src.systems.interleaved.streaming.tars.fields import MESSAGES

_MAX_LINES = 100
"""Maximum number of lines about unread members. The rest are summed in one more line."""
_LANES, _STEPS = 8, 50
"""Rows per step and number of steps in the sample of `measure_rows`."""
PassedOver = dict[str, dict[str, list[int]]]
"""{reason: {suffix: [members, bytes]}}"""


class Indexed(NamedTuple):
    """Counts of the index of one tar."""

    tar: Path | str
    documents: int
    images: int
    bad: Counter[str]
    """{reason: number of bad documents}."""
    text_tokens: int | None
    """None if they were not counted."""
    facts: dict[str, Any]
    """See `TarIndex`."""

    @property
    def cut(self) -> str:
        """Error message about a truncated tar; "" if the tar is complete."""
        reason, _, advice = self.facts.get("cut", ("", 0, ""))
        return f"{reason}. {self.documents} documents before it are indexed. {advice}" if reason else ""


def summarize(tar: Path | str, index: TarIndex) -> Indexed:
    """Count the documents and members of an index."""
    bad = Counter(tar_index.REASONS[reason] for reason in index.documents["bad"] if reason)
    tokens = None if index.tokens is None else int(index.tokens.sum())
    return Indexed(tar, len(index), int(index.documents["images"].sum()), bad, tokens, index.facts)


def passed_over(results: Sequence[Indexed]) -> PassedOver:
    """Sum the unread members of all tars."""
    total: PassedOver = {}
    for one in results:
        for reason, suffixes in one.facts["passed_over"].items():
            for suffix, (members, size) in suffixes.items():
                count = total.setdefault(reason, {}).setdefault(suffix, [0, 0])
                count[0] += members
                count[1] += size
    return total


def manifest_facts(results: Sequence[Indexed]) -> dict[str, Any]:
    """Facts on documents and members of tars, for their manifest."""
    fields = results[0].facts.get("fields") if results else None
    return {
        "max_pixels": results[0].facts["max_pixels"] if results else 0,
        "documents": sum(one.documents for one in results),
        "bad_documents": dict(sum((one.bad for one in results), Counter[str]())),
        "members": sum(one.facts["members"] for one in results),
        "passed_over": passed_over(results),
        **({"fields": fields} if fields else {}),
    }


def require_documents(results: Sequence[Indexed]) -> None:
    """Raise an error for tars without a readable document.

    Raises:
        DataError: no document is readable, or an entry of the field mapping matches no document.
    """
    if not results:
        return
    documents, bad = sum(one.documents for one in results), sum((one.bad for one in results), Counter[str]())
    where = f"{results[0].tar}{f' and {len(results) - 1} more' if len(results) > 1 else ''}"
    counts = [f"{count} {suffix or 'members'} ({reason})" for count, _, reason, suffix in _unread(results)]
    unread = f"Not read: {', '.join(counts[:_MAX_LINES]) or 'nothing'}."
    mapped_counts = sum((Counter(one.facts.get("mapped")) for one in results), Counter[str]())
    problem = next((one.facts["problems"][0] for one in results if "problems" in one.facts), None)
    for entries in results[0].facts.get("fields", {}).values():
        for entry in entries:
            if not mapped_counts[entry] and not (problem and bad.total() == documents):
                raise DataError(
                    f"{where}: --fields: none of {documents} documents has {entry!r}. {unread} Name one of these."
                )
    if bad.total() == documents:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in bad.items()) or "the tars are empty"
        advice = f"The first: {problem}" if problem else ""
        if not problem and tar_index.REASONS[tar_index.NO_TEXT] in bad:
            advice = 'Name their text with --fields, such as \'{"text": "json:caption"}\'.'
        raise DataError(f"{where}: none of {documents} documents can be read ({reasons}). {unread} {advice}".rstrip())


def lines(results: Sequence[Indexed]) -> list[str]:
    """Lines of the report: bad documents by tar, totals, mapped fields, and unread members."""
    report = [
        f"{one.tar}: {one.bad.total()} of {one.documents} documents are bad: "
        + ", ".join(f"{r}: {n:,}" for r, n in one.bad.items())
        + "".join(f". The first: {problem}" for problem in one.facts.get("problems", ()))
        for one in results
        if one.bad
    ]
    documents, members = sum(one.documents for one in results), sum(one.facts["members"] for one in results)
    counts = [one.text_tokens for one in results if one.text_tokens is not None]
    tokens = f", {sum(counts):,} text tokens" if len(counts) == len(results) else ""
    report.append(
        f"{len(results)} tars, {documents:,} documents, {sum(one.images for one in results):,} images{tokens}"
    )
    mapped_counts = sum((Counter(one.facts.get("mapped")) for one in results), Counter[str]())
    report += [f"field {entry}: in {count:,} of {documents:,} documents" for entry, count in mapped_counts.items()]
    unread = _unread(results)
    for count, size, reason, suffix in unread[:_MAX_LINES]:
        report.append(f"not read: {count:,} {suffix or 'members'}, {size:,} bytes: {reason}")
    if rest := unread[_MAX_LINES:]:
        report.append(
            f"not read: {sum(row[0] for row in rest):,} more of {len(rest)} suffixes: see passed_over in the index"
        )
    report.append(f"{members:,} members: {sum(one.facts['read'][0] for one in results):,} read")
    return report


def totals(results: Sequence[Indexed]) -> dict[str, Any]:
    """The numbers of `lines`."""
    counts = [one.text_tokens for one in results if one.text_tokens is not None]
    return {
        **manifest_facts(results),
        "tars": len(results),
        "images": sum(one.images for one in results),
        "text_tokens": sum(counts) if len(counts) == len(results) else None,
        "bad_documents_by_tar": {str(one.tar): [one.bad, one.documents] for one in results if one.bad},
        "mapped": sum((Counter(one.facts.get("mapped")) for one in results), Counter[str]()),
        "members_read": sum(one.facts["read"][0] for one in results),
    }


def describe_row(row: Mapping[str, float]) -> str:
    """The result of `measure_rows` in one line."""
    return (
        f"a row of {row['tokens']} tokens: {row['documents']:.1f} documents, {row['images']:.1f} images, "
        f"{row['text_tokens']:.0f} text tokens, {row['image_tokens']:.0f} image tokens; fill {row['fill']:.3f}"
    )


def measure_rows(folder: Path, tokenizer: str, config: Config) -> dict[str, float]:
    """Means of the rows that training makes of the tars in a folder, from a sample of the indexes.

    Raises:
        DataError: no document fits into a row, or the tokenizer is missing.
    """
    loaded, shard_manifest = tokenizers.load(tokenizer, config.images.special_tokens()), manifest.load(folder)
    is_chat = config.sources["tars"].chat or MESSAGES in shard_manifest.facts.get("fields", {})
    texts, images = make_tokens(loaded, config.images.style, is_chat), ImageTokens(config.images, loaded)
    data = StreamedDataset(
        config, {"tars": Documents(shard_manifest, ShardFiles(shard_manifest.folder), texts, images, config.rules)}
    )
    batches = data.order(0, _LANES, 0, ()).micro_batches(0, RankShare(_LANES, _LANES, 0, 1), {})
    num_settling_rows = 2 * config.open_rows  # the first rows of a lane have less padding than later ones
    sample = list(islice(batches, num_settling_rows, num_settling_rows + _STEPS))
    padding, total = (sum(batch.counters["padding"][i] for batch in sample) for i in range(2))
    keys = [key for batch in sample for key in batch.keys]
    pieces = [data.pieces(key[i])[key[i + 1]] for key in keys for i in range(1, len(key), 3)]
    elements = [element for piece in pieces for element in piece.elements if element.grid]
    image_tokens, rows = sum(element.image_tokens for element in elements), len(keys)
    text_tokens = sum(piece.tokens for piece in pieces) - image_tokens
    return {
        "tokens": config.sequence_tokens,
        "documents": len(pieces) / rows,
        "images": len(elements) / rows,
        "text_tokens": text_tokens / rows,
        "image_tokens": image_tokens / rows,
        "fill": 1 - padding / total,
    }


def _unread(results: Sequence[Indexed]) -> list[tuple[int, int, str, str]]:
    """List (members, bytes, reason, suffix) of unread members, most frequent first."""
    rows = [
        (count[0], count[1], reason, suffix)
        for reason, suffixes in passed_over(results).items()
        for suffix, count in suffixes.items()
    ]
    return sorted(rows, key=lambda row: (-row[0], row[2], row[3]))
