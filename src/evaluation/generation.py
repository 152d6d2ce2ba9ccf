"""Generate answers to the questions of a data set with all processes, and score them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from src.evaluation.config import Answers
from src.evaluation.metrics.answers import SHUFFLED, make_prediction
from src.evaluation.metrics.answers import scores as metric_scores
from src.experiments.batches import to_device
from src.experiments.dataset_protocols import Prediction, QuestionDataset
from src.support import distributed
from src.training.validation import rank_batches

T = TypeVar("T")


@dataclass(frozen=True)
class AnswerGenerator:
    """A model that answers the questions of a data set."""

    model: Any
    """Model with transformers' `generate`, in eval mode."""
    dataset: QuestionDataset
    tokenizer: Any
    batch_size: int
    device: torch.device
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """Options for transformers' `generate`; see `Decoding.decoding`."""

    def batches(self, indices: Sequence[int], max_new_tokens: int) -> Iterator[list[tuple[str, int]]]:
        """Answer the questions `indices` in order; yields batches of (text, number of generated tokens), see
        `gather_batches`.

        The end token is not in the text but counts as generated.
        """

        def answer(questions: Sequence[int]) -> list[tuple[str, int]]:
            ids = self.generate(self.prompts(questions), max_new_tokens, **self.decoding)
            texts = [text.strip() for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]
            return list(zip(texts, generated_counts(ids, self.tokenizer.eos_token_id), strict=True))

        return gather_batches(answer, indices, self.batch_size)

    def prompts(self, indices: Sequence[int]) -> dict[str, Any]:
        """Prompts of the questions as one batch for `generate`, on the device."""
        prompts = self.dataset.collate_prompts([self.dataset.prompt(i) for i in indices])
        return to_device({name: tensor for name, tensor in prompts.items() if name != "loss_mask"}, self.device)

    @torch.no_grad()
    def generate(self, batch: dict[str, Any], max_new_tokens: int, **options: Any) -> torch.Tensor:
        """Generate tokens (B, T) after the prompts, T <= max_new_tokens, greedily, padded with the end token.
        Collective.

        options: override options of transformers' `generate`.
        """
        ids = self.model.generate(
            **batch,
            max_new_tokens=max_new_tokens,
            eos_token_id=[self.tokenizer.eos_token_id, *getattr(self.dataset, "answer_ends", ())],
            pad_token_id=self.tokenizer.eos_token_id,
            synced_gpus=distributed.world_size() > 1,  # sharded: every rank must run the same number of passes
            **{"do_sample": False, **options},
        )
        # A decoder's output includes the prompt; an encoder-decoder's output starts with one start token.
        return ids[:, 1:] if self.model.config.is_encoder_decoder else ids[:, batch["input_ids"].shape[1] :]

    def predictions(self, indices: Sequence[int], texts: Sequence[str]) -> list[Prediction]:
        """Pair questions with answers, for scoring."""
        return [make_prediction(self.dataset.row(i), text) for i, text in zip(indices, texts, strict=True)]


def generated_counts(ids_BT: torch.Tensor, eos_id: int) -> list[int]:
    """Number of generated tokens per row, end token included."""
    ends = ids_BT == eos_id
    return (ends.logical_not().sum(1) + ends.any(1)).tolist()


def gather_batches(
    answer: Callable[[Sequence[int]], Sequence[T]], indices: Sequence[int], batch_size: int
) -> Iterator[list[T]]:
    """Yield the results of `answer` for `indices` in order, one batch of every process at a time. Collective.

    Equal on every rank. Batches do not depend on the number of processes.

    Raises:
        distributed.StopTraining: a process received a stop signal.
    """
    together = batch_size * distributed.world_size()
    for start in range(0, len(indices), together):
        distributed.stop_together()
        some = indices[start : start + together]
        ((batch, counts),) = rank_batches(len(some), batch_size)
        answers = answer([some[place] for place in batch])
        local_answers = list(zip(batch, answers, strict=True)) if counts else []
        yield [value for _, value in sorted(distributed.all_gather_list(local_answers), key=lambda pair: pair[0])]


def evaluate(config: Answers, generator: AnswerGenerator, shuffled: QuestionDataset | None = None) -> dict[str, float]:
    """Answer the first questions and score the answers, overall and by source: {"em": …, "em/nq": …}. Collective.

    With `shuffled_context` also score `shuffled`, the same questions with other contexts: {"em_shuffled_context": …}.

    Raises:
        distributed.StopTraining: a process received a stop signal.
    """
    indices = range(config.questions)

    def scores(asking: AnswerGenerator) -> dict[str, float]:
        texts = [text for batch in asking.batches(indices, config.max_new_tokens) for text, _ in batch]
        return metric_scores(config.metrics, generator.predictions(indices, texts), config.best_answer)

    all_scores = scores(generator)
    if config.shuffled_context:
        assert shuffled is not None, "Answers.require has checked it"
        control = scores(replace(generator, dataset=shuffled))
        all_scores |= {name + SHUFFLED: value for name, value in control.items() if "/" not in name}
    return all_scores
