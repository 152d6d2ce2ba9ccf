"""Text that a command reads once, in order, to learn from it: documents of sources, and a sample of their lines."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep import command, sources, text_sources

MAX_CHARACTERS = 1 << 28
"""Size of the training sample. SentencePiece needs about ten times as many bytes of memory."""
_LINE = re.compile(r"\S(?:.{0,1022}\S)?(?!\S)|\S{1,1024}")


@dataclass(frozen=True)
class Corpus:
    """The documents of --train; the paragraphs of a text file."""

    sources: Sequence[text_sources.Source]
    field: str

    @property
    def facts(self) -> dict[str, Any]:
        """Equal for equal documents in any folder."""
        return {"sources": [source.facts for source in self.sources], "text_field": self.field}

    def batches(self, name: str) -> Iterator[list[str]]:
        """The documents, some hundreds at a time, with the progress in the log. name: of the reader."""
        progress = command.Progress(name, "documents")
        for source in self.sources:
            for batch in source.read(None):
                texts = batch.documents(self.field)
                yield texts
                progress.count(len(texts), sum(len(text.split()) for text in texts))


def open_corpus(names: Sequence[str], field: str) -> Corpus:
    """The corpus of the SOURCES `names`; see `text_sources.open_source` for their kinds.

    Raises:
        DataError: a source is missing, of an unknown kind, or given twice.
    """
    corpus_sources = [
        text_sources.open_source(name, "train", text_sources.Reading(field, "paragraph", streaming=False))
        for name in names
    ]
    sources.require_distinct((f"--train {source.name}", source.facts) for source in corpus_sources)
    return Corpus(corpus_sources, field)


def sample_lines(texts: Iterable[str], most: int = MAX_CHARACTERS) -> list[str]:
    """Lines, cut between words to 1,024 characters at most: all of them, or every second, fourth, ..
    where they are longer than `most`."""
    lines, size, step = [], 0, 1
    for number, line in enumerate(line for text in texts for line in _LINE.findall(text)):
        if number % step == 0:
            lines.append(line)
            size += len(line)
        if size > most:
            lines, step = lines[::2], 2 * step
            size = sum(map(len, lines))
    return lines
