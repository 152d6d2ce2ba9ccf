"""One release as given on the command line: a file, a folder saved by `datasets`, a parquet file, or a hub data set."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from data_prep import sources
from data_prep.crossattn.qa_releases import msmarco, prepared, triviaqa
from data_prep.crossattn.qa_releases.detection import LAYOUTS, layout_of
from data_prep.crossattn.qa_releases.question import Question, Record, Skipped
from src.errors import DataError


class Release:
    """Questions of one source. Each iteration reads the source again."""

    def __init__(self, source: str, split: str, layout: str | None = None, evidence: Path | None = None) -> None:
        """source: see `sources.open_rows`. layout: None detects it from the first record.

        Raises:
            DataError: there is no such source.
        """
        self.source = source
        self._layout = layout
        self._evidence = evidence
        self._rows = sources.open_rows(source, sources.HUB_SPLITS[split])
        if self._rows is not None:
            self._rows = self._rows.select_columns(_choose_columns(self._rows.column_names))

    def facts(self) -> dict[str, Any]:
        """See `sources.identify`."""
        return sources.identify(self.source, self._rows)

    def questions(self) -> Iterator[tuple[str, Question | Skipped]]:
        """Yield (layout, question) for each question, in the order of the source.

        Raises:
            DataError: the source is damaged or of unknown layout; the message has the place.
        """
        name, read = "", None
        for where, record in sources.read_rows(self.source, self._rows, _choose_columns, columns=msmarco.COLUMNS):
            if read is None:
                name = layout_of(record, where, self._layout)
                read = LAYOUTS[name].questions
                if self._evidence is not None:
                    if name != "triviaqa":
                        raise DataError(
                            f"{where}: --evidence is only for the layout triviaqa, got {name}. Remove --evidence."
                        )
                    read = partial(triviaqa.questions, evidence=self._evidence)
            for question in read(Record(record, where)):
                yield name, question
        if read is None:
            raise DataError(f"{self.source}: empty. Expected at least one question.")


def _choose_columns(columns: list[str]) -> list[str]:
    """Select the columns to read. Unused columns take long to decompress."""
    return [name for name in columns if name not in prepared.DROPPED]
