"""A model that was trained on documents with metadata: it continues texts under given metadata."""

from collections.abc import Iterable
from typing import Any

from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError, DataError
from src.experiments.config import unknown_text
from src.serving.writer import Continuation
from src.systems.metadata.data.annotations import COLUMNS, Document, Item, read_row
from src.systems.metadata.data.dataset import Config
from src.systems.metadata.data.examples import ExampleMaker


class MetadataWriter(Continuation):
    """A model that was trained on documents with metadata, written as in its experiment."""

    def __init__(self, model: Any, tokenizer: Any, data: Config) -> None:
        super().__init__(model, tokenizer)
        self._data, self._items = data, tuple[Item, ...]()
        self._maker = ExampleMaker(data.writing, SafeTokenizer(tokenizer), data.sequence_tokens)

    def set_metadata(self, texts: Iterable[str]) -> None:
        """See `serving.writer.Writer`."""
        items: list[Item] = []
        for text in texts:
            key, sign, value = text.partition("=")
            if not sign or not value:
                raise ConfigError(f"--metadata {text!r}: expected KEY=VALUE, such as url=docs.python.org.")
            spans = {kind.key for kind in COLUMNS.values()} - {
                kind.key for kind in COLUMNS.values() if kind.kind == "global"
            }
            keys = [name for name in self._data.writing.keys if name not in spans]
            if key not in keys:
                raise ConfigError(f"--metadata: {unknown_text('key', key, keys)}")
            try:
                items += read_row(
                    {"text": "", "metadata": [{"key": key, "type": "global", "value": value}]}, "--metadata"
                ).items
            except DataError as error:
                raise ConfigError(str(error)) from None
        self._items = tuple(items)

    def prompt(self, text: str) -> list[int]:
        """Ids of the metadata and the text; without both the end token, which separates documents."""
        document = Document(text, self._items)
        return [*self._maker.prefix_ids(document), *self._maker.text_ids(document)] or [
            SafeTokenizer(self._tokenizer).eos_id
        ]
