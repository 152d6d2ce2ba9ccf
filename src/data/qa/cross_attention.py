"""Questions on contexts: the decoder reads question and answer, the encoder reads the context."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

from pydantic import Field

from src.batches import ContextBatch, EncodedBatch
from src.config import Places
from src.data import jsonl
from src.data.qa import encoded_store, encoder_inputs, fim, questions, templates
from src.data.qa.subsets import RowsConfig, row_number
from src.data.text.tokenizers import SafeTokenizer
from src.errors import DataError
from src.interfaces import ModelConfig, require_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(RowsConfig):
    """A prepared folder of rows {"context", "question", "answer", "dataset"} in train.jsonl and val.jsonl."""

    same_length_advice: ClassVar[str] = "Write data.fixed_length: true, or leave loop.compile out."
    context_tokens: int = Field(gt=0)
    """Most tokens of one encoder input: of all contexts joined, or of each with `chunked_contexts`."""
    sequence_tokens: int = Field(gt=0)
    """Most tokens of question and answer. A longer question loses its beginning; an answer that alone is too long loses its end."""
    loss_on: Literal["answer", "all"]
    """Score the answer and the end token, or every token but the first."""
    template: templates.Name = "assistant"
    questions_on_contexts: bool = False
    """The encoder reads the question before the context."""
    chunked_contexts: bool = False
    """Each of a row's contexts is encoded on its own, rather than all joined by spaces."""
    include_contexts: bool = False
    """The training set is seen twice: then as a language model of the useful contexts, half of them with the middle to fill in."""
    fixed_length: bool = False
    """Every batch is as long as a sequence may be, rather than as its longest one, for `loop.compile`. Contexts stay as they are."""
    too_long: encoder_inputs.TooLong = "truncate"
    """A context of more tokens loses its end, becomes several chunks, or is refused when the data are read."""
    encoded_contexts: bool = False
    """The hidden states that data_prep.preproc_nq wrote beside the rows are read; else contexts are encoded at each step."""

    def check(self, places: Places) -> None:
        questions.check(self, places)
        if self.encoded_contexts:
            self._check_store(places)

    def check_base(self, places: Places, model: ModelConfig) -> None:
        """Refuse a `model` whose base is not the one that encoded the contexts, where they are encoded already.

        Raises:
            ConfigError: names both bases.
            DataError: the contexts are not encoded.
        """
        if self.encoded_contexts:
            encoded_store.check_base(places.data / self.corpus / encoded_store.FOLDER, model, places)

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.sequence_tokens", self.sequence_tokens + new_tokens, max_positions)
        require_fit("data.context_tokens", self.context_tokens, max_positions)

    def batch_lengths(self) -> tuple[int, ...] | None:
        return (self._longest(),) if self.fixed_length else None

    def _longest(self) -> int:
        return max(self.sequence_tokens, self.context_tokens if self.include_contexts else 0)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "QADataset":
        """The rows of one split, tokenised when they are asked for.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or what is used of it smaller than `val_samples`.
            ConfigError: too few tokens are allowed for the template alone, no row is of one of the sources, or the contexts were encoded
                with other options.
        """
        rows, fingerprint = questions.read(places, self, split)
        made = QADataset(self, rows, tokenizer, seed, both_views=self.include_contexts and split == "train", fingerprint=fingerprint)
        if self.encoded_contexts:
            made.use_store(self._check_store(places), places.data / self.corpus / encoded_store.FOLDER, tokenizer)
        return made

    def encoding_options(self) -> encoder_inputs.EncodingOptions:
        """The options that decide what the encoder reads."""
        return encoder_inputs.EncodingOptions(
            self.context_tokens, self.template, self.questions_on_contexts, self.chunked_contexts, self.too_long
        )

    def _check_store(self, places: Places) -> dict[str, Any]:
        """What store.json says, where the contexts are encoded as `config` says."""
        folder = places.data / self.corpus
        return encoded_store.check(folder / encoded_store.FOLDER, self.encoding_options(), jsonl.fingerprint(folder))


class Sample(TypedDict):
    """One training sample, or one prompt."""

    input_ids: list[int]
    loss_mask: list[bool]
    """As long as input_ids. True where the prediction of the token is scored."""
    context_chunks: list[list[int]]
    """At least one, none of them empty."""


class QADataset(questions.Questions):
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
        super().__init__(rows, seed, config.corpus, fingerprint)
        self._config = config
        self._both_views = both_views
        self._encoder = SafeTokenizer(tokenizer)
        self._prompter = templates.Prompter(self._encoder, config.template)
        self._inputs = encoder_inputs.EncoderInputs(self._prompter, config.encoding_options())
        self._truncations = questions.TruncationCounter(config.corpus, "context_tokens", config.context_tokens)
        self._store: encoded_store.Store | None = None
        self._fim_tokens = fim.fim_tokens(self._encoder)
        longest = max(config.sequence_tokens, config.context_tokens if both_views else 0)
        self._length = longest if config.fixed_length else None
        questions.require_room("sequence_tokens", config.sequence_tokens, self._prompter.fixed_tokens + 2)
        questions.require_room("context_tokens", config.context_tokens, self._prompter.fixed_context_tokens + 1)
        if config.too_long == "refuse":
            self._require_short_contexts()

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows) * (2 if self._both_views else 1)

    def sample(self, epoch: int, index: int) -> Sample:
        """Question and answer for index < number of rows; from there on the contexts, for the language model."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if index >= len(self._rows):
            return self._context_sample(epoch, index)
        row, most = self._rows[index], self._config.sequence_tokens
        answer = self._prompter.answer(row["answer"], most - self._prompter.fixed_tokens)
        prompt = self._prompter.prompt(row["question"], most - len(answer))
        if self._config.loss_on == "answer":
            loss_mask = [False] * len(prompt) + [True] * len(answer)
        else:
            loss_mask = _all_but_first(len(prompt) + len(answer))
        return {"input_ids": prompt + answer, "loss_mask": loss_mask, "context_chunks": self._chunks(index)}

    def prompt(self, index: int) -> Sample:
        """What generation starts from: the sample without its answer. Only for the rows themselves."""
        ids = self._prompter.prompt(self._rows[index]["question"], self._config.sequence_tokens - 1)
        return {"input_ids": ids, "loss_mask": [False] * len(ids), "context_chunks": self._chunks(index)}

    def use_store(self, store: dict[str, Any], folder: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
        """From now on batches are EncodedBatches, of the store in `folder`, of which `encoded_store.check` says `store`.

        Shuffled contexts that were encoded behind a question keep that question: no other was encoded.

        Raises:
            DataError: it was made with another tokenizer, or an index is damaged.
        """
        digest = encoded_store.tokenizer_digest(tokenizer)
        if digest not in {made["tokenizer"] for made in store["prepared"]}:
            raise DataError(f"{folder}: encoded with another tokenizer than the one of this base. {encoded_store.AGAIN}")
        self._store, self.stored_bytes_per_token = encoded_store.Store(folder, store), encoded_store.row_bytes(store)
        said = [self.fingerprint, store["dtype"], encoded_store.base_content(store["model"])]
        self.fingerprint = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def collate(self, samples: Sequence[Sample]) -> ContextBatch | EncodedBatch:
        """Pad on the right."""
        return self._collate(samples, left=False)

    def collate_prompts(self, samples: Sequence[Sample]) -> ContextBatch | EncodedBatch:
        """Pad the prompts on the left, so that all end where generation begins; contexts as ever on the right."""
        return self._collate(samples, left=True)

    def _collate(self, samples: Sequence[Sample], left: bool) -> ContextBatch | EncodedBatch:
        from src.data import collate

        ids, masks = [s["input_ids"] for s in samples], [s["loss_mask"] for s in samples]
        chunks = [s["context_chunks"] for s in samples]
        tokens = collate.pad_tokens(ids, masks, self._encoder.pad_id, left, None if left else self._length)
        if self._store is not None:
            context_hidden, context_mask = self._store.pad(chunks)
            return {**tokens, "context_hidden": context_hidden, "context_mask": context_mask}
        context_ids, context_mask = collate.pad_chunks(chunks, self._encoder.pad_id)
        return {**tokens, "context_ids": context_ids, "context_mask": context_mask}

    def _context_sample(self, epoch: int, index: int) -> Sample:
        """The useful contexts of a row to be predicted, as long as one encoder input; the end token stands where nothing was cut."""
        most = self._config.context_tokens
        row = index - len(self._rows)
        ids = self._prompter.context(" ".join(questions.useful_contexts(self._rows[row])), "", most)
        moved = fim.maybe_fill_in_the_middle(ids, self._fim_tokens, most, self._seed, epoch, index)
        ended = [*moved, self._encoder.eos_id][:most]
        return {"input_ids": ended, "loss_mask": _all_but_first(len(ended)), "context_chunks": self._chunks(row)}

    def _chunks(self, index: int) -> list[list[int]]:
        row = self._context_row(index)
        asked = row if self._store is not None else self._rows[index]
        chunks, too_long = self._inputs.chunks_and_cuts(row, asked["question"])
        if self._config.too_long == "truncate":  # where a context is one chunk
            self._truncations.count(len(chunks), too_long)
        return chunks

    def _require_short_contexts(self) -> None:
        for index, row in enumerate(self._rows):
            try:
                self._inputs.chunks(row, row["question"])
            except DataError as error:
                raise DataError(f"{self._name}: row {row_number(self._rows, index) + 1}: {error}") from None


def _all_but_first(count: int) -> list[bool]:
    return [False] + [True] * (count - 1)
