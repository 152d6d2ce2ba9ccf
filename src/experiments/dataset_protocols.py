"""Protocols of data sets: the methods that training and evaluation call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

Batch = Mapping[str, Any]
"""Tensors by name, as src/experiments/batches.py describes them."""


NUM_CHECKED_QUESTIONS = 100
"""Number of questions that are compared with a metric before the start."""


@dataclass(frozen=True)
class Prediction:
    """An answer of a model, with its question."""

    text: str
    references: Sequence[str]
    """Accepted answers, at least one."""
    question: str = ""
    contexts: Sequence[str] = ()
    source: str = ""
    """Group for its scores, such as the data set of the question."""

    def __post_init__(self) -> None:
        if isinstance(self.references, str) or not self.references:
            raise ValueError(f"references: expected a list of one or more answers, got {self.references!r}.")


class Dataset(Protocol):
    """Samples of one split.
    A sample is a pure function of (epoch, index), independent of earlier reads and of the process."""

    fingerprint: str
    """Digest of the content, and of the options that change it."""

    def __len__(self) -> int:
        """Samples in one epoch."""
        ...

    def sample(self, epoch: int, index: int) -> Any:
        """Sample `index` of an epoch. Raises IndexError if out of range."""
        ...

    def collate(self, samples: Sequence[Any]) -> Batch:
        """One batch."""
        ...


def content_of(data: Dataset) -> str:
    """Digest of the content alone, without options: `data.content` of data sets that have it, else the fingerprint."""
    return getattr(data, "content", data.fingerprint)


@runtime_checkable
class MeasuredDataset(Dataset, Protocol):
    """A data set that knows the length of a sample without building it."""

    def length(self, epoch: int, index: int) -> int:
        """Tokens of sample `index` of an epoch."""
        ...


@runtime_checkable
class DecodedDataset(Dataset, Protocol):
    """A data set with slow samples, such as decoded images."""

    decodes: ClassVar[bool]


@runtime_checkable
class SourcedDataset(Dataset, Protocol):
    """A data set of several sources: the training loss of each is logged by name."""

    @property
    def sources(self) -> Sequence[str]:
        """Names of the sources."""
        ...

    def sample_source(self, *key: Any) -> str:
        """The source of the sample with this key, one of `sources`."""
        ...


class QuestionDataset(Dataset, Protocol):
    """A data set of questions that a model answers."""

    @property
    def num_questions(self) -> int:
        """Number of rows."""
        ...

    def row(self, index: int) -> dict[str, Any]:
        """Question `index` as in the prepared data."""
        ...

    def source(self, index: int) -> str:
        """The group for the scores of question `index`."""
        ...

    def prompt(self, index: int) -> Any:
        """A sample without its answer, from which generation starts."""
        ...

    def collate_prompts(self, samples: Sequence[Any]) -> Batch:
        """One batch of prompts, for `generate`."""
        ...


class ContextDataset(QuestionDataset, Protocol):
    """Questions with contexts."""

    reads_contexts: bool
    """Whether the contexts are part of the samples."""

    @property
    def stored_bytes_per_token(self) -> int | None:
        """Bytes on disk per token of an encoded context; None if contexts are read as text."""
        ...

    def with_shuffled_contexts(self) -> Self:
        """The same questions, each with another row's context: a control."""
        ...


class TaskDataset(QuestionDataset, Protocol):
    """Rows of a task that is written as text."""

    task: Any
    """The task of the rows, a `systems.t5.tasks.task_table.Named`."""
    answer_tokens: int
    """Maximum tokens of an answer."""

    @property
    def answer_ids(self) -> Sequence[Sequence[int]]:
        """Ids of every possible answer, each with its end token; empty if they cannot be listed."""
        ...

    def input(self, index: int) -> str:
        """The prompt."""
        ...

    def target(self, index: int) -> str:
        """The reference answer."""
        ...

    def prediction(self, index: int, text: str) -> Prediction:
        """Row `index` with a model's answer `text`, to be scored."""
        ...

    def collate_answers(self, samples: Sequence[Any], answer: Sequence[int]) -> Batch:
        """The prompts `samples`, each with the target `answer`."""
        ...
