"""Answers of an encoder-decoder to the rows of a task: generated, ranked by likelihood, or with teacher forcing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from src.evaluation.config import Answering
from src.evaluation.generation import AnswerGenerator, gather_batches
from src.experiments.batches import to_device
from src.experiments.dataset_protocols import TaskDataset


@dataclass(frozen=True)
class TaskPredictor:
    """An encoder-decoder that answers the rows of tasks as configured."""

    model: Any
    """Model with transformers' `generate`, in eval mode."""
    tokenizer: Any
    config: Answering
    batch_size: int
    device: torch.device

    def batches(self, dataset: TaskDataset, indices: Sequence[int]) -> Iterator[list[str]]:
        """Answer the rows `indices` of a data set; see `gather_batches`. Collective."""
        if self.config.by == "generate":
            generator = AnswerGenerator(
                self.model, dataset, self.tokenizer, self.batch_size, self.device, self.config.decoding()
            )
            return ([text for text, _ in batch] for batch in generator.batches(indices, dataset.answer_tokens))
        answer = self._rank if self.config.by == "rank" else self._predict_with_targets
        return gather_batches(partial(answer, dataset), indices, self.batch_size)

    @torch.no_grad()
    def _predict_with_targets(self, dataset: TaskDataset, indices: Sequence[int]) -> list[str]:
        """The most likely token at each position, given the target before it (teacher forcing)."""
        batch = to_device(dataset.collate([dataset.sample(0, i) for i in indices]), self.device)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
        ids_BT = self.model(**inputs, use_cache=False).logits.argmax(-1)
        rows = [ids_T[mask_T].tolist() for ids_T, mask_T in zip(ids_BT, batch["loss_mask"], strict=True)]
        end = self.tokenizer.eos_token_id
        cut = [ids[: ids.index(end)] if end in ids else ids for ids in rows]
        return [text.strip() for text in self.tokenizer.batch_decode(cut, skip_special_tokens=True)]

    def _rank(self, dataset: TaskDataset, indices: Sequence[int]) -> list[str]:
        """The most likely of the task's answers; the first one on a tie."""
        return [dataset.task.answers[best] for best in self.log_probabilities(dataset, indices).argmax(1).tolist()]

    @torch.no_grad()
    def log_probabilities(self, dataset: TaskDataset, indices: Sequence[int]) -> Tensor:
        """Log-probabilities (B, A) float32 in nats of each of the task's A answers, end token included; per token if
        `length_normalised`."""
        prompts = [dataset.prompt(i) for i in indices]
        encoded, columns = None, []
        for answer in dataset.answer_ids:
            batch = to_device(dataset.collate_answers(prompts, answer), self.device)
            inputs = {name: batch[name] for name in ("attention_mask", "decoder_input_ids")}
            # The encoder is not called directly: a sharded model gathers its weights only in a call of the full model.
            encoder = {"input_ids": batch["input_ids"]} if encoded is None else {"encoder_outputs": (encoded,)}
            out = self.model(**encoder, **inputs, use_cache=False)
            encoded = out.encoder_last_hidden_state
            of_targets_BT = out.logits.float().log_softmax(-1).gather(2, batch["labels"][:, :, None]).squeeze(2)
            columns.append(of_targets_BT.mean(1) if self.config.length_normalised else of_targets_BT.sum(1))
        return torch.stack(columns, dim=1)
