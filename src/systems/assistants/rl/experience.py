"""Sample answers, score them and compute advantages: the rollouts of an iteration.

Batches have a fixed composition. Each is processed by one process, and the results are gathered, so samples and scores
do not depend on the number of processes. Shapes: N rollouts of an iteration, T tokens of the longest.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from src.data.orders import Cursor
from src.errors import ConfigError
from src.experiments.batches import to_device
from src.runs import jsonl_records
from src.support import distributed
from src.systems.assistants.rewards.interface import Rollout
from src.systems.assistants.rl.policy import Generation, score_tokens
from src.systems.assistants.rl.scoring import Judges, Scores, ServerUnavailableError
from src.training.parallel.engine import Engine
from src.training.seeds import rollout_seed
from src.training.validation import rank_batches

FILE = "rollouts.jsonl"
"""File in a save directory with rollouts for people to read."""
NUM_SAVED_ROLLOUTS = 64
"""Number of rollouts per iteration to save in `FILE`. Saving all of them would dominate the size of a run."""


class RolloutData(Protocol):
    """Prompts, and the buffer of an iteration; see `systems.assistants.rollouts.dataset`."""

    prompts: Any
    buffer: dict[str, Tensor]


class Rollouts(NamedTuple):
    """The rollouts of an iteration, without advantages. Padded on the right with zeros."""

    tokens: Mapping[str, Tensor]
    """"input_ids" (N, T) int64; "sampled" (N, T) bool, True on sampled tokens; and (N, T) float32, 0 elsewhere: "logps"
    if they are saved, "values" if the policy has values, "reference_logps" if there is a reference."""
    scores: Tensor
    """(N,) float32."""
    is_complete: Tensor
    """(N,) bool, False for truncated answers."""


class Estimates(NamedTuple):
    """Advantages and other inputs of the training steps."""

    tokens: Mapping[str, Tensor]
    """Inputs of the loss by name, (N, T): "learned", bool, the tokens that count; "advantages", float32, and more."""
    facts: Mapping[str, Tensor]
    """Facts by name, (N,). Score rows have their means."""
    cursor: Cursor
    """State for the next iteration."""


Estimate = Callable[[Rollouts, Cursor], Estimates]
"""Computes advantages. The cursor is the one before the iteration."""
Reference = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""(training model, batch with "input_ids", "attention_mask" and "sampled") -> (B, T) reference log-probabilities."""
Record = Callable[[int, int, Sequence[Rollout], Sequence[Mapping[str, float]]], None]
"""(finished steps, iteration, rollouts, facts of each): saves rollouts for people to read. Called on rank 0."""


@dataclass
class Experience:
    """The `training.spec.Experience` of a training on rollouts."""

    seed: int
    data: RolloutData
    numbers: Callable[[int], Sequence[int]]
    """iteration -> indices of its prompts, one per rollout."""
    batch: int
    """Number of rollouts that are generated and scored together."""
    micro_batch: int
    """Number of rollouts per forward pass."""
    generation: Generation
    decode: Callable[[Sequence[int]], str]
    judges: Judges
    estimate: Estimate
    record: Record
    reference: Reference | None = None
    server_logps: Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[float]]] | None = None
    """(ids, numbers of sampled tokens) -> reference log-probabilities of the sampled tokens, from servers."""
    needs_sampled_logps: bool = True
    """Whether to save log-probabilities and values of sampled tokens. Not needed if an iteration is a single step,
    which computes the same log-probabilities."""
    _seconds: dict[str, float] = field(default_factory=dict)

    def begin(self, engine: Engine) -> None:
        """See `training.spec.Experience`.

        Raises:
            ConfigError: continuous batching with a sharded model.
        """
        if self.generation.continuous and engine.sharded:
            raise ConfigError(
                "data.sampling.batching: continuous batching does not support sharded models "
                f"({engine.name}). Use static."
            )
        self.engine = engine

    def tensors(self) -> Mapping[str, Tensor]:
        """The buffer."""
        return self.data.buffer

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the buffer."""
        self.data.buffer = dict(tensors)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase in this process, since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - before

    def roll_out(self, step: int, iteration: int, cursor: Cursor) -> Cursor:
        """Fill the buffer of an iteration, after `step` finished steps.
        Returns the changed entries of the cursor. Collective.

        Raises:
            RunError: a reward returns invalid scores.
            distributed.StopTraining: a process received a stop request, or a server stays unavailable.
        """
        numbers = self.numbers(iteration)
        local: list[tuple[int, list[dict[str, Any]]]] = []
        for places, counts in rank_batches(len(numbers), self.batch):
            distributed.stop_together()
            rows = self._make(iteration, places.start // self.batch, [numbers[place] for place in places], counts)
            local += [(places.start, rows)] if counts else []
        with self._phase("gathering"):
            gathered = sorted(distributed.all_gather_list(local), key=lambda pair: pair[0])
        rows = [row for _, some in gathered for row in some]
        rollouts: list[Rollout] = [row["rollout"] for row in rows]
        tokens = {
            name: pad_sequence([row["tokens"][name] for row in rows], batch_first=True) for name in rows[0]["tokens"]
        }
        scores, is_complete = (
            torch.tensor([row["score"] for row in rows]),
            torch.tensor([rollout.is_complete for rollout in rollouts]),
        )
        estimates = self.estimate(Rollouts(tokens, scores, is_complete), cursor)
        facts = {
            "reward": scores,
            **{
                f"reward/{name}": torch.tensor([row["parts"][place] for row in rows])
                for place, name in enumerate(self.judges.names)
            },
            "answer_tokens": tokens["sampled"].sum(dim=1).float(),
            "ended": is_complete.float(),
            **estimates.facts,
        }
        self.data.buffer = {
            "iteration": torch.tensor(iteration),
            "lengths": torch.tensor([len(rollout.ids) for rollout in rollouts]),
            "input_ids": tokens["input_ids"],
            **estimates.tokens,
            "facts": torch.stack([*facts.values()], dim=1).float(),
        }
        with distributed.raise_together():
            if distributed.is_main():
                gains = estimates.tokens["advantages"].sum(dim=1) / estimates.tokens["learned"].sum(dim=1).clamp(min=1)
                logged_facts = {**facts, "advantage": gains}
                rows = [
                    {name: float(fact[place]) for name, fact in logged_facts.items()} for place in range(len(rollouts))
                ]
                self.record(step, iteration, rollouts, rows)
        return estimates.cursor

    def _make(self, iteration: int, number: int, indices: Sequence[int], counts: bool) -> list[dict[str, Any]]:
        """Sample, score and measure one batch. counts: False for a filler batch, so that all processes make equally
        many passes; it gets no scores and returns no rows."""
        device = self.engine.accelerator.device
        prompts = [self.data.prompts[index] for index in indices]
        with self._phase("generation"), self.engine.generating() as model:
            batch = to_device(self.data.prompts.collate(prompts), device)
            answers = self.generation.sample(model, batch, rollout_seed(self.seed, iteration, number))
        rollouts = [self._rollout(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        try:
            with self._phase("rewards"), distributed.raise_together():
                scores = self.judges.score(rollouts) if counts else Scores((), ())
                lengths = [each.sampled for each in rollouts]
                served_logps = (
                    self.server_logps([each.ids for each in rollouts], lengths)
                    if self.server_logps and counts
                    else None
                )
            with self._phase("measuring"), self.engine.generating() as model:
                tokens = [
                    row for part in _split(rollouts, self.micro_batch) for row in self._measure(model, part, device)
                ]
        except ServerUnavailableError as error:
            distributed.stop_together()  # requested by the user
            raise distributed.StopTraining(distributed.Reason(str(error), "limit"), everywhere=True) from None
        if not counts:
            return []
        for row, logps in zip(tokens, served_logps or (), strict=False):
            row["reference_logps"] = torch.cat([torch.zeros(len(row["input_ids"]) - len(logps)), torch.tensor(logps)])
        return [
            {"rollout": rollout, "score": total, "parts": parts, "tokens": row}
            for rollout, total, parts, row in zip(rollouts, scores.totals, scores.parts, tokens, strict=True)
        ]

    def _rollout(self, prompt: Any, sampled: list[int]) -> Rollout:
        is_complete = self.generation.has_ended(sampled)
        messages = [message.raw for message in prompt.messages]
        text = self.decode(sampled[:-1] if is_complete else sampled)
        return Rollout(messages, text, prompt.row, [*prompt.ids, *sampled], len(sampled), is_complete)

    def _measure(self, model: Any, rollouts: Sequence[Rollout], device: torch.device) -> list[dict[str, Tensor]]:
        """Log-probabilities of each token under the policy and the reference, and values."""
        rows = [torch.tensor(rollout.ids) for rollout in rollouts]
        ids, lengths_B1 = pad_sequence(rows, batch_first=True), torch.tensor([[len(row)] for row in rows])
        places_T = torch.arange(ids.shape[1])
        real_BT = places_T < lengths_B1
        sampled_BT = real_BT & (places_T >= lengths_B1 - torch.tensor([[rollout.sampled] for rollout in rollouts]))
        batch = to_device({"input_ids": ids, "attention_mask": real_BT, "sampled": sampled_BT}, device)
        columns: dict[str, Tensor | None] = {"reference_logps": self.reference and self.reference(model, batch)}
        if self.needs_sampled_logps:
            sampled = score_tokens(model, batch, self.generation.temperature)
            columns |= {"logps": sampled.logps, "values": sampled.values}
        columns_BT = {
            name: torch.where(sampled_BT, column.cpu(), 0.0) for name, column in columns.items() if column is not None
        }
        tensors = {"input_ids": ids, "sampled": sampled_BT, **columns_BT}
        return [
            {name: tensor[row, : lengths_B1[row, 0]] for name, tensor in tensors.items()} for row in range(len(rows))
        ]


def _split(rollouts: Sequence[Rollout], size: int) -> list[Sequence[Rollout]]:
    return [rollouts[first : first + size] for first in range(0, len(rollouts), size)]


class Recorder:
    """Appends rollouts to `FILE` in a save directory. After a restart, repeated rollouts replace the old ones."""

    def __init__(self, run: Path) -> None:
        self.path = run / FILE

    def record(
        self, step: int, iteration: int, rollouts: Sequence[Rollout], facts: Sequence[Mapping[str, float]]
    ) -> None:
        """See `Record`.

        Raises:
            RunError: the file cannot be written.
        """
        jsonl_records.truncate_after(self.path, step - 1, "a rollout")
        rows = [
            {
                "step": step,
                "iteration": iteration,
                "prompt": rollout.messages[-1]["content"],
                "answer": rollout.text,
                **values,
            }
            for rollout, values in list(zip(rollouts, facts, strict=True))[:NUM_SAVED_ROLLOUTS]
        ]
        jsonl_records.append(self.path, rows)
