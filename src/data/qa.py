"""Questions on contexts: the decoder reads question and answer, the encoder reads the context."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from pydantic import Field

from src.batches import ContextBatch
from src.config import Config as StrictConfig
from src.config import Places
from src.data import fim, jsonl, questions, templates
from src.data.positions import require_fit
from src.data.tokenizers import Encoder
from src.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(StrictConfig):
    """A prepared folder of rows {"context", "question", "answer", "dataset"} in train.jsonl and val.jsonl."""

    corpus: str = Field(min_length=1)
    """Folder below `--data_path`."""
    context_tokens: int = Field(gt=0)
    """Most tokens of one encoder input: of all contexts joined, or of each with `chunked_contexts`. A longer context loses its end."""
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
    val_samples: int | None = Field(default=None, gt=0)
    """Rows of the validation split that are used, the same ones whatever the seed; None for all."""


class Sample(TypedDict):
    """One training sample, or one prompt."""

    input_ids: list[int]
    loss_mask: list[bool]
    """As long as input_ids. True where the prediction of the token is scored."""
    context_chunks: list[list[int]]
    """At least one, none of them empty."""


def check(config: Config, places: Places) -> None:
    """Refuse a data set that is missing or incomplete, without reading its rows.

    Raises:
        DataError: says what makes it.
    """
    jsonl.require_splits(places, config.corpus)


def fits(config: Config, max_positions: int | None, new_tokens: int = 0) -> None:
    """Raises ConfigError where a model of `max_positions` (None: unknown) cannot read the sequences or contexts, or write `new_tokens`."""
    require_fit("data.sequence_tokens", config.sequence_tokens + new_tokens, max_positions)
    require_fit("data.context_tokens", config.context_tokens, max_positions)


def one_shape(config: Config, compiled: bool) -> None:
    """Raises ConfigError where batches of several lengths would meet `loop.compile`."""
    if compiled and not config.fixed_length:
        raise ConfigError("data.fixed_length: False, but loop.compile needs batches of one length. Write True, or leave loop.compile out.")


def build(config: Config, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "QADataset":
    """The rows of one split, tokenised when they are asked for.

    Raises:
        DataError: the data set is missing, incomplete or malformed, or smaller than `val_samples`.
        ConfigError: too few tokens are allowed for the template alone.
    """
    rows, fingerprint = questions.read(places, config.corpus, split, config.val_samples)
    return QADataset(config, rows, tokenizer, seed, both_views=config.include_contexts and split == "train", fingerprint=fingerprint)


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
        self._encoder = Encoder(tokenizer)
        self._prompter = templates.Prompter(self._encoder, config.template)
        self._fim_tokens = fim.fim_tokens(self._encoder)
        longest = max(config.sequence_tokens, config.context_tokens if both_views else 0)
        self._length = longest if config.fixed_length else None
        questions.require_room("sequence_tokens", config.sequence_tokens, self._prompter.fixed_tokens + 2)
        questions.require_room("context_tokens", config.context_tokens, self._prompter.fixed_context_tokens + 1)

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

    def collate(self, samples: Sequence[Sample]) -> ContextBatch:
        """Pad on the right."""
        return self._collated(samples, left=False)

    def collate_prompts(self, samples: Sequence[Sample]) -> ContextBatch:
        """Pad the prompts on the left, so that all end where generation begins; contexts as ever on the right."""
        return self._collated(samples, left=True)

    def _collated(self, samples: Sequence[Sample], left: bool) -> ContextBatch:
        from src.data import collate

        ids, masks = [s["input_ids"] for s in samples], [s["loss_mask"] for s in samples]
        context_ids, context_mask = collate.pad_chunks([s["context_chunks"] for s in samples], self._encoder.pad_id)
        tokens = collate.pad_tokens(ids, masks, self._encoder.pad_id, left, None if left else self._length)
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
        contexts = questions.all_contexts(self._context_row(index))
        question = self._rows[index]["question"] if self._config.questions_on_contexts else ""
        texts = contexts if self._config.chunked_contexts else [" ".join(contexts)]
        return [self._prompter.context(text, question, self._config.context_tokens) for text in texts]


def _all_but_first(count: int) -> list[bool]:
    return [False] + [True] * (count - 1)
