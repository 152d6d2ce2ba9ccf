"""Answers to the questions of a data set, shared between the processes."""

from typing import Any

import torch

from src import distributed
from src.training.evaluation import share, to_device


@torch.no_grad()
def answer(model: Any, dataset: Any, tokenizer: Any, num_questions: int, max_new_tokens: int, at: tuple[int, torch.device]) -> list[str]:
    """Greedy answers to the first `num_questions` questions of `dataset`, in order, the same list on every rank. Collective.

    `at` is (batch size, device). An answer ends before the tokenizer's end-of-text token.

    Raises:
        distributed.Stopped: a process was asked to stop meanwhile.
    """
    batch_size, device = at
    mine: list[tuple[int, str]] = []
    for indices, counts in share(num_questions, batch_size):
        distributed.stop_together()
        batch = to_device(dataset.collate_prompts([dataset.prompt(i) for i in indices]), device)
        batch.pop("loss_mask")
        width = batch["input_ids"].shape[1]
        ids = model.generate(
            **batch,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
            synced_gpus=distributed.world_size() > 1,  # where the model is shared, all must make as many passes
        )
        texts = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        if counts:
            mine += zip(indices, (text.strip() for text in texts), strict=True)
    return [text for _, text in sorted(distributed.gathered(mine))]
