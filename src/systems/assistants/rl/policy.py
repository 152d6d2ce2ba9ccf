"""Sample answers from a policy, and compute log-probabilities of tokens.

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
    """Scores (B, T) of each token given the tokens before it. The first token has no context and score 0."""

    logps: Tensor
    """Log-probabilities, in nats, float32."""
    entropies: Tensor
    """Entropies of the distributions of the tokens, in nats. They have a gradient only on request."""
    values: Tensor | None
    """Values of the states before the tokens; None if the model has no values."""


def score_tokens(
    model: Any, batch: Mapping[str, Tensor], temperature: float = 1.0, entropy_gradient: bool = False
) -> TokenScores:
    """Score "input_ids" (B, T) with their "attention_mask", padded on the right."""
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
    """How to sample answers."""

    max_new_tokens: int
    temperature: float
    options: Mapping[str, Any]
    """More sampling options for transformers' `generate`."""
    end_ids: Sequence[int]
    """Tokens that end an answer. The first is also the padding."""
    never: Sequence[int] | None
    """Tokens that are never sampled; None if all can be."""
    continuous: bool = False
    """Whether a finished answer is replaced by the next prompt immediately; see transformers' `generate_batch`."""
    has_repeated_prompts: bool = False
    """Whether a prompt can be in several consecutive rows, so that it is processed only once for all of them."""

    def sample(self, model: Any, prompts: Mapping[str, Tensor], seed: int) -> list[list[int]]:
        """Sample answers to B prompts, padded on the left. Answers include the token that ends them.
        Collective for sharded models.

        Samples depend only on `seed` and on the prompts of the batch.
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
            together = distributed.world_size() > 1  # if the model is sharded, every rank must make equally many passes
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
        """The tokens up to and including the first that ends an answer."""
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), len(ids) - 1)
        return list(ids[: end + 1])

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Whether an answer ends with an end token."""
        return bool(sampled) and sampled[-1] in self.end_ids


@contextmanager
def _no_own_settings(model: Any) -> Iterator[None]:
    """Ignore the model's generation_config.json, such as a repetition penalty, inside the block.

    Otherwise `generate` would sample from a different distribution than the one that is trained.
    """
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
    """Key/value cache of all but the last token of prompts (B, T); each run of equal rows is processed once.

    None if the model does not cache every token, or if there is only one token.
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
    """Sample an answer to each prompt by continuous batching.

    Raises:
        RunError: the generating thread has failed, so some prompts have no answer.
    """
    mask_BT = prompts["attention_mask"].bool()
    rows = [ids[real].tolist() for ids, real in zip(prompts["input_ids"], mask_BT, strict=True)]
    options = ContinuousBatchingConfig(seed=seed, drop_unsupported_processors=False)
    results = [*model.generate_batch(rows, generation_config=settings, continuous_batching_config=options).values()]
    if len(results) != len(rows) or any(result.error for result in results):
        reason = next((result.error for result in results if result.error), "its thread has died; see the log above")
        raise RunError(
            f"data.sampling.batching: continuous batching answered {len(results)} of {len(rows)} prompts: {reason}. "
            "Use static."
        )
    return [result.generated_tokens for result in results]
