"""The policy's answers to prompts, generated during training.

This module has the prompts and reads the buffer. Recipes set `Rollouts.fill`, which generates and scores the answers.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from src.data import jsonl
from src.data.orders import Cursor
from src.errors import ConfigError, DataError
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.dataset_protocols import Batch
from src.experiments.interfaces import DatasetConfig, DatasetField, NewTokens, require_fit
from src.experiments.kinds import TokenizerSource
from src.runs.history.branches import Branch
from src.support.call_once import call_once
from src.systems.assistants.conversations import dataset, templates
from src.systems.assistants.conversations.rendering import Renderer
from src.systems.assistants.rollouts.order import RolloutOrder
from src.systems.assistants.rollouts.prompts import PROMPT_KINDS, Prompts, check_beginning, check_lengths

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

ROWS = "input_ids"
"""The tensor that defines the length of the buffer."""
LENGTHS, ITERATION = "lengths", "iteration"


class Sampling(StrictConfig):
    """How to sample a token."""

    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the logits, also in the loss."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens with this total probability. The loss ignores it."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the most likely tokens; 0 for all. The loss ignores it."""
    batching: Literal["static", "continuous"] = "static"
    """continuous: replace finished answers by new prompts immediately, for GPUs and answers of uneven lengths
    (transformers' generate_batch). The order depends on timing, so a restart can sample different answers."""

    def options(self) -> dict[str, Any]:
        """Options for transformers' `generate`, except the temperature."""
        return {"top_p": self.top_p, "top_k": self.top_k}


class Config(DatasetConfig):
    """Prompts, and the number and use of rollouts per iteration."""

    has_order: ClassVar[bool] = True

    prompts: DatasetField
    """Conversations. If a conversation ends with an answer, only rewards read that answer."""
    rollouts: int = Field(gt=0)
    """Number of rollouts per iteration. The policy does not change while they are generated."""
    group_size: int = Field(default=1, gt=0)
    """Number of answers per prompt."""
    passes: int = Field(default=1, gt=0)
    """Number of training passes over each rollout."""
    max_new_tokens: int = Field(gt=0)
    """Maximum tokens of an answer."""
    sampling: Sampling = Sampling()
    generation_batch: int = Field(default=64, gt=0)
    """Number of rollouts that are generated and scored together. Samples depend on it, but not on the number of
    processes."""
    long_prompts: Literal["refuse", "leave_out"] = "refuse"
    """Whether prompts with more than prompts.sequence_tokens tokens raise an error or are skipped."""

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if not isinstance(self.prompts, dataset.Config):
            raise ValueError(f"prompts: expected 'conversations', got {self.prompts.name!r}.")
        if self.prompts.shuffle != "numpy":
            raise ValueError("prompts.shuffle: would be ignored, as rollouts have their own order. Remove it.")
        if self.rollouts % self.group_size:
            raise ValueError(f"rollouts: expected a multiple of group_size = {self.group_size}, got {self.rollouts}.")
        return self

    @property
    def _conversations(self) -> dataset.Config:
        assert isinstance(self.prompts, dataset.Config), "the validator has checked it"
        return self.prompts

    def _train_path(self, places: Places) -> Path:
        return jsonl.require_file(jsonl.corpus_folder(places, self._conversations.corpus), "train.jsonl")

    @property
    def validation(self) -> DatasetConfig:
        return self.prompts

    def check(self, places: Places) -> None:
        self._conversations.check_split(places, "train", PROMPT_KINDS)
        self._conversations.check_split(places, "val", self._conversations.kinds)

    def check_rows(self, places: Places, keys: Sequence[str]) -> None:
        """Raises DataError if one of the first thousand prompts has no value for one of `keys`."""
        check_beginning(self._train_path(places), keys)

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        self.prompts.check_tokenizer(places, source)
        if source and self.long_prompts == "refuse":
            call_once(self._check_lengths, places, source)

    def _check_lengths(self, places: Places, source: TokenizerSource) -> None:
        """Raises DataError if one of the first thousand prompts is too long."""
        from src.data.text import tokenizers

        conversations, tokenizer = self._conversations, tokenizers.load(source.folder, source.new_tokens)
        path, renderer = self._train_path(places), self._renderer(tokenizer)
        check_lengths(path, renderer, conversations.writing, conversations.sequence_tokens)

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        longest = max(NewTokens(self.max_new_tokens, "data.max_new_tokens"), new_tokens)
        require_fit("data.prompts.sequence_tokens", self._conversations.sequence_tokens, max_positions, longest)

    def check_loop(self, sequences_per_step: int, steps: int) -> None:
        """Raises ConfigError unless an iteration is a multiple of a step."""
        if self.rollouts % sequences_per_step:
            raise ConfigError(
                f"data.rollouts: expected a multiple of loop.sequences_per_step = {sequences_per_step}, so that a step "
                f"has rollouts of one policy, got {self.rollouts}."
            )

    def _renderer(self, tokenizer: "PreTrainedTokenizerFast") -> Renderer:
        writing = self._conversations.writing
        return Renderer(tokenizer, templates.find(writing.template, tokenizer, writing.system))

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> Any:
        """The rollouts of the training split, or the conversations of another split.

        Raises:
            DataError: the prompts are missing or malformed, or one is too long.
        """
        if split != "train":
            return self.prompts.build(places, tokenizer, split, seed)
        conversations = self._conversations
        renderer = self._renderer(tokenizer)
        prompts = Prompts(
            conversations.read(places, split), renderer, conversations.writing, str(places.data / conversations.corpus)
        )
        prompts.limit(conversations.sequence_tokens, self.long_prompts)
        return Rollouts(self, prompts, conversations.digest(places))


class Rollouts:
    """The buffer of an iteration. Its rows are samples."""

    def __init__(self, config: Config, prompts: Prompts, digest: str) -> None:
        identity = [digest, config.model_dump(mode="json", exclude={"prompts"})]
        self.fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.config, self.prompts = config, prompts
        self.buffer: dict[str, Tensor] = {}
        """An iteration's rollouts: "input_ids" and more (N, T), "lengths" (N,), "facts" (N, K), and "iteration" ()."""
        self.fill: Callable[[int, int, Cursor], Cursor] | None = None
        """Set by the recipe: see `RolloutOrder.roll_out`."""

    def order(self, seed: int, per_step: int, steps: int, branches: Sequence[Branch]) -> RolloutOrder:
        """See `orders.OrderedDataset`."""
        if any(branch.deny_list for branch in branches):
            raise DataError(
                "rollouts: deny lists are only for data that is streamed from tars. "
                "Undo it: python -m src.operations.interventions undo RUN."
            )
        assert self.fill is not None, "the recipe has put it in"
        return RolloutOrder(seed, len(self), per_step, self.config.passes, self.fill, self.is_filled, branches)

    def is_filled(self, iteration: int) -> bool:
        """Whether the buffer has the rollouts of an iteration."""
        return ITERATION in self.buffer and int(self.buffer[ITERATION]) == iteration

    def __len__(self) -> int:
        return self.config.rollouts

    def sample(self, epoch: int, index: int) -> Mapping[str, "Tensor"]:
        """Row `index` of the buffer of an iteration, without padding.

        Raises:
            IndexError: the buffer has another iteration.
        """
        if not self.is_filled(epoch):
            raise IndexError(f"row {index} of iteration {epoch}, which is not in the buffer")
        length = int(self.buffer[LENGTHS][index])
        rows = {name: tensor[index] for name, tensor in self.buffer.items() if name not in (ITERATION, LENGTHS)}
        return {name: row if name in PER_ROLLOUT else row[:length] for name, row in rows.items()}

    def collate(self, samples: Sequence[Mapping[str, "Tensor"]]) -> Batch:
        """Stack rows, with zeros as padding on the right of the values per token."""
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
"""Tensors of the buffer that have values per rollout, not per token."""
