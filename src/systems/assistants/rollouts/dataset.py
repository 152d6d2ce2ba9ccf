"""Answers of the policy to prompts of a data set, made while it trains.

What is made, and how it is scored, recipes say: they put `fill` into the data set. Here is where prompts come from, and
how the buffer is read.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from src.data import jsonl
from src.data.orders import Cursor
from src.errors import ConfigError, DataError
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.dataset_protocols import Batch
from src.experiments.interfaces import DatasetConfig, DatasetField
from src.runs.history.branches import Branch
from src.systems.assistants.conversations import dataset, templates
from src.systems.assistants.conversations.rendering import Renderer
from src.systems.assistants.rollouts.order import RolloutOrder
from src.systems.assistants.rollouts.prompts import Prompts, check_beginning

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

ROWS = "input_ids"
"""The tensor whose length is that of the buffer."""
LENGTHS, ITERATION = "lengths", "iteration"


class Sampling(StrictConfig):
    """How a token is drawn."""

    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by it, also where the loss asks how likely a token was."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw among the likeliest tokens that have so much of the probability together."""
    top_k: int = Field(default=0, ge=0)
    """Draw among so many of the likeliest tokens; 0: among all.
    The log-probabilities that the loss compares know neither it nor top_p."""
    batching: Literal["static", "continuous"] = "static"
    """continuous: an answer that has ended makes room for the next prompt at once, for GPUs and answers of uneven
    lengths (transformers' generate_batch). When a prompt is taken in is a matter of time, so that a restart may not
    draw what was drawn before."""

    def options(self) -> dict[str, Any]:
        """For transformers' `generate`, beside the temperature."""
        return {"top_p": self.top_p, "top_k": self.top_k}


class Config(DatasetConfig):
    """Which prompts, how many answers at a time, and how often each is learned from."""

    has_order: ClassVar[bool] = True

    prompts: DatasetField
    """Conversations; an answer that a conversation ends with is left out, and only rewards read it."""
    rollouts: int = Field(gt=0)
    """Of an iteration, between which the policy learns."""
    group_size: int = Field(default=1, gt=0)
    """Answers to each prompt."""
    passes: int = Field(default=1, gt=0)
    """Times that each rollout is learned from."""
    max_new_tokens: int = Field(gt=0)
    """Of an answer."""
    sampling: Sampling = Sampling()
    generation_batch: int = Field(default=64, gt=0)
    """Rollouts that are made and scored together. What is drawn depends on it, not on the number of processes."""
    long_prompts: Literal["refuse", "leave_out"] = "refuse"
    """What becomes of prompts that have more tokens than prompts.sequence_tokens."""

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if not isinstance(self.prompts, dataset.Config):
            raise ValueError(f"prompts: expected data of the name 'conversations', got {self.prompts.name!r}.")
        if self.prompts.shuffle != "numpy":
            raise ValueError("prompts.shuffle: would be ignored: rollouts have an order of their own. Leave it out.")
        if self.rollouts % self.group_size:
            raise ValueError(f"rollouts: {self.rollouts} are no whole number of groups of {self.group_size}.")
        return self

    @property
    def validation(self) -> DatasetConfig:
        return self.prompts

    def check(self, places: Places) -> None:
        self.prompts.check(places)

    def check_rows(self, places: Places, keys: Sequence[str]) -> None:
        """Raises DataError where rewards read `keys` of rows, and one of the first thousand lacks one."""
        assert isinstance(self.prompts, dataset.Config), "the validator has checked it"
        check_beginning(jsonl.require_file(jsonl.corpus_folder(places, self.prompts.corpus), "train.jsonl"), keys)

    def check_tokenizer(self, folder: Any) -> None:
        self.prompts.check_tokenizer(folder)

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        self.prompts.check_length(max_positions, max(self.max_new_tokens, new_tokens))

    def check_loop(self, sequences_per_step: int, steps: int) -> None:
        """Raises ConfigError where a step reads no whole part of an iteration."""
        if self.rollouts % sequences_per_step:
            raise ConfigError(
                f"data.rollouts: {self.rollouts} are no multiple of loop.sequences_per_step = {sequences_per_step}, "
                "so a step would read rollouts of two policies."
            )

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> Any:
        """The rollouts of the training split; of another split its conversations.

        Raises:
            DataError: the prompts are missing or malformed, or one is too long.
        """
        assert isinstance(self.prompts, dataset.Config), "the validator has checked it"
        if split != "train":
            return self.prompts.build(places, tokenizer, split, seed)
        conversations = self.prompts
        renderer = Renderer(tokenizer, templates.find(conversations.writing.template, tokenizer))
        prompts = Prompts(
            conversations.read(places, split), renderer, conversations.writing, str(places.data / conversations.corpus)
        )
        prompts.limit(conversations.sequence_tokens, self.long_prompts)
        return Rollouts(self, prompts, conversations.digest(places))


class Rollouts:
    """The buffer of an iteration, whose rows are samples."""

    def __init__(self, config: Config, prompts: Prompts, digest: str) -> None:
        identity = [digest, config.model_dump(mode="json", exclude={"prompts"})]
        self.fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.config, self.prompts = config, prompts
        self.buffer: dict[str, Tensor] = {}
        """An iteration's rollouts: "input_ids" and more (N, T), "lengths" (N,), "facts" (N, K), and "iteration" ()."""
        self.fill: Callable[[int, int, Cursor], Cursor] | None = None
        """Put in by the recipe: see `RolloutOrder.roll_out`."""

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> RolloutOrder:
        """See `orders.OrderedDataset`."""
        if any(branch.denied for branch in branches):
            raise DataError("a deny list is for data that are streamed from tars, and these are not. Undo it.")
        assert self.fill is not None, "the recipe has put it in"
        return RolloutOrder(seed, len(self), per_step, self.config.passes, self.fill, self.is_filled, branches)

    def is_filled(self, iteration: int) -> bool:
        """Whether the buffer is that of an iteration."""
        return ITERATION in self.buffer and int(self.buffer[ITERATION]) == iteration

    def __len__(self) -> int:
        return self.config.rollouts

    def sample(self, epoch: int, index: int) -> Mapping[str, "Tensor"]:
        """Row `index` of the buffer of an iteration, without padding.

        Raises:
            IndexError: the buffer is of another iteration.
        """
        if not self.is_filled(epoch):
            raise IndexError(f"row {index} of iteration {epoch}, whose buffer is not here")
        length = int(self.buffer[LENGTHS][index])
        rows = {name: tensor[index] for name, tensor in self.buffer.items() if name not in (ITERATION, LENGTHS)}
        return {name: row if name in PER_ROLLOUT else row[:length] for name, row in rows.items()}

    def collate(self, samples: Sequence[Mapping[str, "Tensor"]]) -> Batch:
        """Padded on the right: what has a value for each token gets zeros behind it."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        batch: dict[str, Tensor] = {}
        for name in samples[0]:
            rows = [sample[name] for sample in samples]
            batch[name] = torch.stack(rows) if name in PER_ROLLOUT else pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(sample[ROWS]) for sample in samples])
        batch["attention_mask"] = torch.arange(batch[ROWS].shape[1])[None] < lengths[:, None]
        return batch


PER_ROLLOUT = frozenset({"facts"})
"""Tensors of the buffer whose rows are no tokens."""
