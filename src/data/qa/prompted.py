"""Questions for a decoder alone: it reads the contexts in its prompt, before the question, or none."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypedDict

from pydantic import Field, model_validator

from src.batches import TokenBatch
from src.config import Places
from src.data.qa import questions, templates
from src.data.qa.subsets import RowsConfig, row_number
from src.data.text.tokenizers import SafeTokenizer
from src.errors import DataError
from src.interfaces import require_fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Config(RowsConfig):
    """A prepared folder of rows as those of `qa`: {"context", "question", "answer", "dataset"} in train.jsonl and val.jsonl."""

    same_length_advice: ClassVar[str] = "Write data.fixed_length: true, or leave loop.compile out."
    contexts: Literal["all", "useful", "none"]
    """Which of a row's contexts stand in the prompt, joined by spaces. useful: all of them where none is marked."""
    context_tokens: int | None = Field(default=None, gt=0)
    """Most tokens that the contexts add to a prompt."""
    too_long: Literal["truncate", "refuse"] = "truncate"
    """Contexts of more tokens lose their end, or are refused when the data are read."""
    sequence_tokens: int = Field(gt=0)
    """Most tokens of question and answer. A longer question loses its beginning; an answer that alone is too long loses its end."""
    loss_on: Literal["answer", "all"]
    """Score the answer and the end token, or every token but the first."""
    template: templates.Name = "assistant"
    fixed_length: bool = False
    """Every batch is as long as a sequence may be, rather than as its longest one, for `loop.compile`."""

    @model_validator(mode="after")
    def _tokens_for_contexts(self) -> "Config":
        if self.contexts == "none" and (self.context_tokens is not None or self.too_long != "truncate"):
            ignored = "context_tokens" if self.context_tokens is not None else "too_long"
            raise ValueError(f"{ignored}: with contexts 'none' there is nothing to read, so it would be ignored. Remove it.")
        if self.contexts != "none" and self.context_tokens is None:
            raise ValueError(f"context_tokens: missing. With contexts {self.contexts!r} it says how much of them is read.")
        return self

    def check(self, places: Places) -> None:
        questions.check(self, places)

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        field = "data.sequence_tokens" + ("" if self.context_tokens is None else " + data.context_tokens")
        require_fit(field, self.longest() + new_tokens, max_positions)

    def batch_lengths(self) -> tuple[int, ...] | None:
        return (self.longest(),) if self.fixed_length else None

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "PromptedQADataset":
        """The rows of one split, tokenised when they are asked for.

        Raises:
            DataError: the data set is missing, incomplete or malformed, or what is used of it smaller than `val_samples`; or a context is
                too long and refused.
            ConfigError: too few tokens are allowed for the template alone, or no row is of one of the sources.
        """
        rows, fingerprint = questions.read(places, self, split)
        return PromptedQADataset(self, rows, tokenizer, seed, fingerprint)

    def longest(self) -> int:
        return self.sequence_tokens + (self.context_tokens or 0)


class Sample(TypedDict):
    """One training sample, or one prompt."""

    input_ids: list[int]
    loss_mask: list[bool]
    """As long as input_ids. True where the prediction of the token is scored."""


class PromptedQADataset(questions.Questions):
    """Samples are the same in every epoch."""

    def __init__(
        self, config: Config, rows: Sequence[questions.Row], tokenizer: "PreTrainedTokenizerFast", seed: int, fingerprint: str
    ) -> None:
        super().__init__(rows, seed, config.corpus, fingerprint)
        self.reads_contexts = config.context_tokens is not None
        self._config = config
        self._encoder = SafeTokenizer(tokenizer)
        self._prompter = templates.Prompter(self._encoder, config.template)
        if config.contexts == "useful":
            self._texts_of = questions.useful_contexts
        questions.require_room("sequence_tokens", config.sequence_tokens, self._prompter.fixed_tokens + 2)
        if config.context_tokens is not None:
            questions.require_room("context_tokens", config.context_tokens, self._prompter.fixed_reading_tokens + 1)
            self._truncations = questions.TruncationCounter(config.corpus, "context_tokens", config.context_tokens)
            if config.too_long == "refuse":
                self._require_short_contexts(config.context_tokens)

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows)

    def sample(self, epoch: int, index: int) -> Sample:
        """Contexts, question and answer, whatever the epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        most = self._config.sequence_tokens
        answer = self._prompter.answer(self._rows[index]["answer"], most - self._prompter.fixed_tokens)
        prompt = self._prompt(index, most - len(answer))
        if self._config.loss_on == "answer":
            loss_mask = [False] * len(prompt) + [True] * len(answer)
        else:
            loss_mask = [False] + [True] * (len(prompt) + len(answer) - 1)
        return {"input_ids": prompt + answer, "loss_mask": loss_mask}

    def prompt(self, index: int) -> Sample:
        """What generation starts from: the sample without its answer."""
        ids = self._prompt(index, self._config.sequence_tokens - 1)
        return {"input_ids": ids, "loss_mask": [False] * len(ids)}

    def collate(self, samples: Sequence[Sample]) -> TokenBatch:
        """Pad on the right."""
        return self._collate(samples, left=False)

    def collate_prompts(self, samples: Sequence[Sample]) -> TokenBatch:
        """Pad the prompts on the left, so that all end where generation begins."""
        return self._collate(samples, left=True)

    def _collate(self, samples: Sequence[Sample], left: bool) -> TokenBatch:
        from src.data import collate

        length = self._config.longest() if self._config.fixed_length and not left else None
        ids, masks = [s["input_ids"] for s in samples], [s["loss_mask"] for s in samples]
        return collate.pad_tokens(ids, masks, self._encoder.pad_id, left, length)

    def _require_short_contexts(self, most: int) -> None:
        """Raises DataError for the first row whose contexts would be cut."""
        for index, row in enumerate(self._rows):
            needed = self._context_tokens(" ".join(self._texts_of(row)))
            if needed > most:
                where = f"{self._name}: row {row_number(self._rows, index) + 1}"
                raise DataError(
                    f"{where}: its contexts take {needed} tokens, more than data.context_tokens, {most}. "
                    "Allow more, or write too_long 'truncate'."
                )

    def _context_tokens(self, context: str) -> int:
        """Tokens that a context adds to a prompt where none is lost."""
        return len(self._encoder.encode(context)) + self._prompter.fixed_reading_tokens

    def _prompt(self, index: int, max_tokens: int) -> list[int]:
        question, most = self._rows[index]["question"], self._config.context_tokens
        if most is None:
            return self._prompter.prompt(question, max_tokens)
        context = " ".join(self._texts_of(self._context_row(index)))
        ids = self._prompter.reading(context, question, most, max_tokens)
        full = len(ids) >= most + self._prompter.fixed_tokens  # only then something may be lost, and tokens are counted once more
        self._truncations.count(1, full and self._context_tokens(context) > most)
        return ids
