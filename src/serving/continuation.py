"""Models without a chat template: they continue a text.
Models that were trained with metadata do so under given metadata."""

from collections.abc import Iterable, Sequence
from typing import Any

from src.data.text.tokenizers import SafeTokenizer, control_ids
from src.errors import ConfigError, DataError
from src.experiments.config import unknown_text
from src.serving.conversation import require_room, stream_to
from src.systems.metadata.data import dataset as metadata
from src.systems.metadata.data.annotations import COLUMNS, Annotated, Item, read_row
from src.systems.metadata.data.examples import ExampleMaker


class Continuation:
    """A model that continues texts."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._is_seq2seq = bool(getattr(model.config, "is_encoder_decoder", False))

    def prompt(self, text: str, items: Sequence[Item] = ()) -> list[int]:
        """Ids of the text. items: the metadata before it, for `MetadataWriter`."""
        return list(self._tokenizer(text)["input_ids"]) or [self._tokenizer.eos_token_id]

    def streamer(self, show: Any = None) -> Any:
        """See `conversation.stream_to`."""
        return stream_to(self._tokenizer, show)

    def write(self, text: str, items: Sequence[Item] = (), streamer: Any = None, **options: Any) -> str:
        """The continuation of a text. options: of transformers' `generate`.

        Raises:
            ConfigError: it could be longer than the model can read.
        """
        import torch

        ids = torch.tensor([self.prompt(text, items)], device=self._model.device)
        require_room(self._model, 0 if self._is_seq2seq else ids.shape[1], options["max_new_tokens"])
        end = self._tokenizer.eos_token_id
        with torch.no_grad():
            rows = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                eos_token_id=end,
                pad_token_id=end if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id,
                suppress_tokens=control_ids(self._tokenizer) or None,
                streamer=streamer,
                **options,
            )
        if self._is_seq2seq:
            return self._tokenizer.decode(rows[0], skip_special_tokens=True)
        # Decoded with the text before them: a tokenizer can drop a blank at the start.
        before, new = self._tokenizer(text, add_special_tokens=False)["input_ids"], rows[0, ids.shape[1] :].tolist()
        start, complete = (self._tokenizer.decode(part, skip_special_tokens=True) for part in (before, [*before, *new]))
        return complete[len(start) :]


class MetadataWriter(Continuation):
    """A model that was trained on documents with metadata, written as in its experiment."""

    def __init__(self, model: Any, tokenizer: Any, data: metadata.Config) -> None:
        super().__init__(model, tokenizer)
        self._data = data
        self._maker = ExampleMaker(data.writing, SafeTokenizer(tokenizer), data.sequence_tokens)

    def items(self, texts: Iterable[str]) -> list[Item]:
        """The metadata of `KEY=VALUE` texts.

        Raises:
            ConfigError: malformed, or a key that the experiment does not write before documents.
        """
        items = []
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
        return items

    def prompt(self, text: str, items: Sequence[Item] = ()) -> list[int]:
        """Ids of the metadata and the text; without both the end token, which separates documents."""
        document = Annotated(text, tuple(items))
        return [*self._maker.prefix_ids(document), *self._maker.text_ids(document)] or [
            SafeTokenizer(self._tokenizer).eos_id
        ]
