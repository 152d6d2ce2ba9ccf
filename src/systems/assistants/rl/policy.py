"""A policy as a model: what it samples behind prompts, and how likely it finds tokens.

Shapes: B rollouts, T tokens of the longest, V tokens of the vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from src.errors import RunError
from src.support import distributed


class TokenScores(NamedTuple):
    """What a model finds of each token of sequences (B, T), from the tokens before it;
    0 for the first, which follows from nothing."""

    logps: Tensor
    """Log-probabilities, in nats, float32."""
    entropies: Tensor
    """Of the distribution that the token was drawn from, in nats; without gradient unless asked for."""
    values: Tensor | None
    """Of the state before the token, where the model has values."""


def score_tokens(
    model: Any, batch: Mapping[str, Tensor], temperature: float = 1.0, entropy_gradient: bool = False
) -> TokenScores:
    """`TokenScores` of "input_ids" (B, T) with their "attention_mask", padded on the right."""
    ids = batch["input_ids"]
    outputs = model(input_ids=ids, attention_mask=batch["attention_mask"].long(), use_cache=False)
    all_BTV = (outputs.logits[:, :-1].float() / temperature).log_softmax(dim=-1)
    logps = all_BTV.gather(2, ids[:, 1:, None]).squeeze(2)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(all_BTV.exp() * all_BTV).sum(dim=-1)
    values = getattr(outputs, "state_values", None)
    return TokenScores(_shift(logps), _shift(entropies), None if values is None else _shift(values[:, :-1].float()))


def _shift(numbers: Tensor) -> Tensor:
    return torch.nn.functional.pad(numbers, (1, 0))


@dataclass(frozen=True)
class Generation:
    """How answers are sampled."""

    max_new_tokens: int
    temperature: float
    options: Mapping[str, Any]
    """For transformers' `generate`: what draws beside the temperature."""
    end_ids: Sequence[int]
    """Tokens that end an answer; the first also pads."""
    never: Sequence[int] | None
    """Tokens that are never drawn; None for none."""
    continuous: bool = False
    """Whether an answer that has ended makes room for the next prompt at once; see `generate_batch` of transformers."""
    has_repeated_prompts: bool = False
    """Whether a prompt stands in several rows, one behind the other: it is then read once for all of them."""

    def sample(self, model: Any, prompts: Mapping[str, Tensor], seed: int) -> list[list[int]]:
        """What is sampled behind B prompts, padded on the left, with the token that ends it where it has ended.
        Collective for shards.

        Draws depend on `seed` and on the prompts of the batch alone.
        """
        settings = GenerationConfig(
            do_sample=True,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=list(self.end_ids),
            pad_token_id=self.end_ids[0],
            suppress_tokens=list(self.never) if self.never else None,
            **self.options,
        )
        with _no_own_settings(model):
            if self.continuous:
                return [self.end(row) for row in _generate_continuously(model, prompts, settings, seed)]
            together = distributed.world_size() > 1  # where the model is shared, every rank must make as many passes
            read = (
                {"past_key_values": cache}
                if self.has_repeated_prompts and (cache := _read_once(model, prompts, together))
                else {}
            )
            torch.manual_seed(seed)
            ids = model.generate(
                input_ids=prompts["input_ids"],
                attention_mask=prompts["attention_mask"].long(),
                generation_config=settings,
                synced_gpus=together,
                **read,
            )
        return [self.end(row) for row in ids[:, prompts["input_ids"].shape[1] :].tolist()]

    def end(self, ids: Sequence[int]) -> list[int]:
        """The tokens up to the first that ends an answer, with it."""
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), len(ids) - 1)
        return list(ids[: end + 1])

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Whether an answer ended by itself."""
        return bool(sampled) and sampled[-1] in self.end_ids


@contextmanager
def _no_own_settings(model: Any) -> Iterator[None]:
    """In the block `generate` adds nothing of the model's generation_config.json, such as a penalty for repetition, to
    what it is given: else it would draw from another distribution than the one whose log-probabilities are learned."""
    saved_configs = [
        (module, config)
        for module in model.modules()
        if isinstance(config := vars(module).get("generation_config"), GenerationConfig)
    ]
    for module, _ in saved_configs:
        module.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for module, config in saved_configs:
            module.generation_config = config


def _read_once(model: Any, prompts: Mapping[str, Tensor], together: bool) -> DynamicCache | None:
    """Keys and values of all tokens of prompts (B, T) but the last, where each run of equal rows is read as one. None
    for a model that does not keep those of every token, and where there is only the last.
    """
    mask_BT = prompts["attention_mask"].long()
    rows_BT, run_B = torch.unique_consecutive(prompts["input_ids"].where(mask_BT > 0, -1), dim=0, return_inverse=True)
    first = GenerationConfig(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    real = (rows_BT >= 0).long()
    cache = model.generate(
        rows_BT.clamp(min=0), attention_mask=real, generation_config=first, synced_gpus=together
    ).past_key_values
    if (
        rows_BT.shape[1] == 1
        or not isinstance(cache, DynamicCache)
        or any(type(layer) is not DynamicLayer for layer in cache.layers)
    ):
        return None
    cache.crop(-1)
    cache.reorder_cache(run_B)
    return cache


def _generate_continuously(
    model: Any, prompts: Mapping[str, Tensor], settings: GenerationConfig, seed: int
) -> list[list[int]]:
    """What is sampled behind each prompt.

    Raises:
        RunError: some prompts were not answered, as the thread that answers them has failed.
    """
    mask_BT = prompts["attention_mask"].bool()
    rows = [ids[real].tolist() for ids, real in zip(prompts["input_ids"], mask_BT, strict=True)]
    options = ContinuousBatchingConfig(seed=seed, drop_unsupported_processors=False)
    results = [*model.generate_batch(rows, generation_config=settings, continuous_batching_config=options).values()]
    if len(results) != len(rows) or any(result.error for result in results):
        reason = next(
            (result.error for result in results if result.error), "its thread has ended; the log above says why"
        )
        raise RunError(
            f"data.sampling.batching: continuous: answered {len(results)} of {len(rows)} prompts: {reason}. Write static."
        )
    return [result.generated_tokens for result in results]
