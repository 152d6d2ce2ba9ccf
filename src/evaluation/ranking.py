"""What an encoder-decoder answers to the rows of a task: generated, the likeliest of the task's answers, or under teacher forcing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from src import distributed
from src.evaluation.generation import Respondent
from src.evaluation.task_config import Answering
from src.training.validation import share, to_device


@dataclass(frozen=True)
class TextRespondent:
    """Who answers."""

    model: Any
    """An encoder-decoder with transformers' `generate`, in eval mode."""
    tokenizer: Any
    config: Answering
    batch_size: int
    device: torch.device

    def rounds(self, dataset: Any, indices: Sequence[int]) -> Iterator[list[str]]:
        """Answers to the rows `indices` of a data set of a task, in order, a batch of each process at a time. Collective.

        The same on every rank, and the same batches whatever the number of processes.

        Raises:
            distributed.Stopped: a process was asked to stop meanwhile.
        """
        if self.config.by == "generate":
            writer = Respondent(self.model, dataset, self.tokenizer, self.batch_size, self.device)
            yield from writer.rounds(indices, dataset.target_tokens)
            return
        answer = self._ranked if self.config.by == "rank" else self._teacher_forced
        together = self.batch_size * distributed.world_size()
        for start in range(0, len(indices), together):
            distributed.stop_together()
            some = indices[start : start + together]
            ((batch, counts),) = share(len(some), self.batch_size)
            texts = answer(dataset, [some[place] for place in batch])
            mine = list(zip(batch, texts, strict=True)) if counts else []
            yield [text for _, text in sorted(distributed.gathered(mine))]

    @torch.no_grad()
    def _teacher_forced(self, dataset: Any, indices: Sequence[int]) -> list[str]:
        """The likeliest token at each place of the target, given the target before it: what a model would do that never erred before."""
        batch = to_device(dataset.collate([dataset.sample(0, i) for i in indices]), self.device)
        read = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
        ids_BT = self.model(**read, use_cache=False).logits.argmax(-1)
        found = [ids_T[mask_T].tolist() for ids_T, mask_T in zip(ids_BT, batch["loss_mask"], strict=True)]
        end = self.tokenizer.eos_token_id
        cut = [ids[: ids.index(end)] if end in ids else ids for ids in found]
        return [text.strip() for text in self.tokenizer.batch_decode(cut, skip_special_tokens=True)]

    def _ranked(self, dataset: Any, indices: Sequence[int]) -> list[str]:
        """The likeliest of the task's answers, the first of equals."""
        return [dataset.task.answers[best] for best in self.log_probabilities(dataset, indices).argmax(1).tolist()]

    @torch.no_grad()
    def log_probabilities(self, dataset: Any, indices: Sequence[int]) -> Tensor:
        """(B, A) float32: of each of the A answers of the task, end token included, in nats; per token if `length_normalised`."""
        prompts = [dataset.prompt(i) for i in indices]
        encoded, found = None, []
        for answer in dataset.answer_ids:
            batch = to_device(dataset.collate_answers(prompts, answer), self.device)
            read = {name: batch[name] for name in ("attention_mask", "decoder_input_ids")}
            # The encoder is not called on its own: where the model is shared, only a call of the whole gathers all of it.
            inputs = {"input_ids": batch["input_ids"]} if encoded is None else {"encoder_outputs": (encoded,)}
            out = self.model(**inputs, **read, use_cache=False)
            encoded = out.encoder_last_hidden_state
            of_targets_BT = out.logits.float().log_softmax(-1).gather(2, batch["labels"][:, :, None]).squeeze(2)
            found.append(of_targets_BT.mean(1) if self.config.length_normalised else of_targets_BT.sum(1))
        return torch.stack(found, dim=1)
