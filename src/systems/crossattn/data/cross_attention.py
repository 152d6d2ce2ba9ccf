"""Questions about contexts: the decoder reads question and answer, the encoder reads the context."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from src.data import jsonl
from src.data.text.tokenizers import tokenizer_digest
from src.errors import DataError
from src.experiments.batches import ContextBatch, EncodedBatch
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig, require_fit
from src.experiments.kinds import CROSS_ATTENTION
from src.systems.crossattn.data import encoded_store, encoder_inputs, fim, questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(questions.DecoderConfig):
    """Questions, and how the encoder reads their contexts."""

    context_tokens: int = Field(gt=0)
    """Maximum tokens of one encoder input: of all contexts joined, or with `chunked_contexts` of each context."""
    questions_on_contexts: bool = False
    """Whether the encoder reads the question before the context."""
    chunked_contexts: bool = False
    """Whether to encode each of a row's contexts separately, instead of all contexts joined by spaces."""
    include_contexts: bool = False
    """Whether an epoch also trains language modelling of the useful contexts, half of them by filling in the middle."""
    too_long: encoder_inputs.TooLong = "truncate"
    """Whether to truncate longer contexts, split them into chunks, or raise an error when the data is loaded."""
    encoded_contexts: bool = False
    """Whether to read the hidden states written by data_prep.crossattn.preproc_nq, instead of encoding contexts at each
    step."""

    @property
    def reader(self) -> str:
        return CROSS_ATTENTION

    def check(self, places: Places) -> None:
        super().check(places)
        if self.encoded_contexts:
            self._check_store(places)

    def check_base(self, places: Places, model: ModelConfig) -> None:
        """With `encoded_contexts`, require that the base of `model` has encoded the contexts.

        Raises:
            ConfigError: another base has encoded the contexts.
            DataError: the contexts are not encoded.
        """
        if self.encoded_contexts:
            encoded_store.check_base(places.data / self.corpus / encoded_store.FOLDER, model, places)

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens, max_positions, new_tokens)
        require_fit("data.context_tokens", self.context_tokens, max_positions)

    def longest(self) -> int:
        return max(self.sequence_tokens, self.context_tokens if self.include_contexts else 0)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "QADataset":
        """The rows of one split, tokenised on access.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or has fewer than `val_samples` rows.
            ConfigError: the token limits are too small for the template, a source has no rows, or the contexts were
                encoded with other options.
        """
        rows, fingerprint, content = questions.read(places, self, split)
        dataset = self.open(rows, tokenizer, seed, fingerprint, split)
        dataset.content = content
        if self.encoded_contexts:
            dataset.use_store(self._check_store(places), places.data / self.corpus / encoded_store.FOLDER, tokenizer)
        return dataset

    def open(
        self,
        rows: Sequence[questions.Row],
        tokenizer: "PreTrainedTokenizerFast",
        seed: int,
        fingerprint: str,
        split: str,
    ) -> "QADataset":
        both_views = self.include_contexts and split == "train"
        return QADataset(self, rows, tokenizer, seed, both_views=both_views, fingerprint=fingerprint)

    def encoding_options(self) -> encoder_inputs.EncodingOptions:
        """The options that define the encoder inputs."""
        return encoder_inputs.EncodingOptions(
            self.context_tokens, self.template, self.questions_on_contexts, self.chunked_contexts, self.too_long
        )

    def _check_store(self, places: Places) -> dict[str, Any]:
        """Content of store.json. Raises a UserError if the contexts were not encoded with these options."""
        folder = places.data / self.corpus
        return encoded_store.check(folder / encoded_store.FOLDER, self.encoding_options(), jsonl.fingerprint(folder))


class Sample(questions.Sample):
    """One training sample, or one prompt."""

    context_chunks: list[list[int]]
    """One or more chunks, none empty."""


class QADataset(questions.DecoderQuestions):
    """Samples are pure functions of (seed, epoch, index)."""

    def __init__(
        self,
        config: Config,
        rows: Sequence[questions.Row],
        tokenizer: "PreTrainedTokenizerFast",
        seed: int,
        both_views: bool,
        fingerprint: str,
    ) -> None:
        """both_views: whether the contexts are samples too, see `include_contexts`."""
        super().__init__(config, rows, tokenizer, seed, fingerprint)
        self._config = config
        self._both_views = both_views
        self._inputs = encoder_inputs.EncoderInputs(self._prompter, config.encoding_options())
        self._truncations = questions.truncation_counter(config.corpus, "context_tokens", config.context_tokens)
        self._store: encoded_store.Store | None = None
        self._fim_tokens = fim.fim_tokens(self._encoder)
        questions.require_room("context_tokens", config.context_tokens, self._prompter.fixed_context_tokens + 1)
        if config.too_long == "refuse":
            self._check_rows(lambda row: self._inputs.chunks(row, row["question"]))

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows) * (2 if self._both_views else 1)

    def sample(self, epoch: int, index: int) -> Sample:
        """Question and answer of a row if `index` is below the number of rows, else a row's contexts as text."""
        if self._both_views and len(self._rows) <= index < len(self):
            return self._context_sample(epoch, index)
        return {**super().sample(epoch, index), "context_chunks": self._chunks(index)}

    def prompt(self, index: int) -> Sample:
        """The sample without its answer, for generation. `index` must be below the number of rows."""
        return {**super().prompt(index), "context_chunks": self._chunks(index)}

    def use_store(self, store: dict[str, Any], folder: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Make EncodedBatches from now on, with the states in `folder`. store: from `encoded_store.check`.

        Shuffled contexts that were encoded after a question are read with that question, as no other is encoded.

        Raises:
            DataError: the contexts were encoded with another tokenizer, or an index is damaged.
        """
        digest = tokenizer_digest(tokenizer)
        if digest not in {entry["tokenizer"] for entry in store["prepared"]}:
            raise DataError(f"{folder}: encoded with another tokenizer than this base's. {encoded_store.AGAIN}")
        self._store, self.stored_bytes_per_token = encoded_store.Store(folder, store), encoded_store.row_bytes(store)
        identity = [self.fingerprint, store["dtype"], encoded_store.base_content(store["model"])]
        self.fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def _collate(self, samples: Sequence[Sample], pad_left: bool) -> ContextBatch | EncodedBatch:
        from src.data import collate

        tokens, chunks = super()._collate(samples, pad_left), [s["context_chunks"] for s in samples]
        if self._store is not None:
            context_hidden, context_mask = self._store.pad(chunks)
            return {**tokens, "context_hidden": context_hidden, "context_mask": context_mask}
        context_ids, context_mask = collate.pad_chunks(chunks, self._encoder.pad_id)
        return {**tokens, "context_ids": context_ids, "context_mask": context_mask}

    def _context_sample(self, epoch: int, index: int) -> Sample:
        """A row's useful contexts as text to predict, truncated to `context_tokens`, with an end token if it fits."""
        most = self._config.context_tokens
        row = index - len(self._rows)
        ids = self._prompter.context(" ".join(questions.useful_contexts(self._rows[row])), "", most)
        reordered_ids = fim.maybe_fill_in_the_middle(ids, self._fim_tokens, most, self._seed, epoch, index)
        input_ids = [*reordered_ids, self._encoder.eos_id][:most]
        return {
            "input_ids": input_ids,
            "loss_mask": [False] + [True] * (len(input_ids) - 1),
            "context_chunks": self._chunks(row),
        }

    def _chunks(self, index: int) -> list[list[int]]:
        row = self._context_row(index)
        question_row = row if self._store is not None else self._rows[index]
        chunks, too_long = self._inputs.chunks_and_cuts(row, question_row["question"])
        if self._config.too_long == "truncate":  # one chunk per context
            self._truncations.count(len(chunks), too_long)
        return chunks
