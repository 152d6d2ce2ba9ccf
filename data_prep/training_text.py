"""Text from which a command trains, for example a tokenizer: documents of sources, and a sample of their lines."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep import command, sources, text_sources

MAX_CHARACTERS = 1 << 28
"""Maximum size of the training sample. SentencePiece needs about ten times as many bytes of memory."""
_LINE = re.compile(r"\S(?:.{0,1022}\S)?(?!\S)|\S{1,1024}")


@dataclass(frozen=True)
class Corpus:
    """Documents of --train. The documents of a text file are its paragraphs."""

    sources: Sequence[text_sources.Source]
    field: str

    @property
    def facts(self) -> dict[str, Any]:
        """Identity of the documents: equal for equal documents in any folder."""
        return {"sources": [source.facts for source in self.sources], "text_field": self.field}

    def batches(self, name: str) -> Iterator[list[str]]:
        """Yield the documents in batches of some hundreds, and log the progress. name: reader named in the log."""
        progress = command.Progress(name, "documents")
        for source in self.sources:
            for batch in source.read(None):
                texts = batch.documents(self.field)
                yield texts
                progress.count(len(texts), sum(len(text.split()) for text in texts))


def open_corpus(names: Sequence[str], field: str) -> Corpus:
    """Open the sources `names` as a corpus; see `text_sources.open_source` for their kinds.

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
    """Sample lines, which are cut between words to at most 1,024 characters.
    Returns all lines, or every second, fourth, eighth, ... line if they are longer than `most` in total."""
    lines, size, step = [], 0, 1
    for number, line in enumerate(line for text in texts for line in _LINE.findall(text)):
        if number % step == 0:
            lines.append(line)
            size += len(line)
        if size > most:
            lines, step = lines[::2], 2 * step
            size = sum(map(len, lines))
    return lines
