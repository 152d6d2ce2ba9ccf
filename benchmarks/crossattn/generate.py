"""Answers on a cached context: cross-attention with its caches, without any as XC-Cache's code generates, and the
context in the prompt.

    python -m benchmarks.crossattn.generate [--family gpt_bigcode llama] [--context 1024] [--new_tokens 256]
        [--rounds 3]

One model of random weights per family on one CPU core, in one process: greedy answers of one length to one question on
one context.
- "cached": the context is encoded and projected once, the decoder caches keys and values of past tokens.
- "uncached": the context is encoded once; each token recomputes all previous tokens and projects the context again.
- "prompted": the context is part of the prompt; the decoder caches keys and values of all its tokens.

All cached answers must equal the uncached ones, token for token. Time to the first token is measured for a second
question, when the context is in the cache; the prompted model has no prefix cache and starts again. Bytes are counted
in live tensors and compared with the formula; operations by torch's counter. Rounds alternate; medians are reported.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from src.experiments.registry import MODELS, bind
from src.models import architecture, kv_cache_size
from src.systems.crossattn.model.config import Config
from src.systems.crossattn.model.layers import Context, CrossAttentionLM

VOCABULARY = 2048
TARGETS = {"tokens/s, cached / uncached": 8.0, "time to first token, prompted / cached": 3.0}
PLACEHOLDER = {"name": "hf", "path": "built below"}


def model_of(family: str, args: argparse.Namespace) -> CrossAttentionLM:
    """Random weights, blocks after every second layer."""
    sizes = {"hidden_size": args.hidden_size, "num_hidden_layers": args.layers, "num_attention_heads": args.heads}
    more = {"intermediate_size": 4 * args.hidden_size} if family == "llama" else {}
    settings = AutoConfig.for_model(
        family, vocab_size=VOCABULARY, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, **sizes, **more
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(settings)
    config = Config(base=bind(MODELS, PLACEHOLDER), num_layers=args.layers // 2, stride=2, final_layer=True)
    return CrossAttentionLM(config, base).eval()


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of random ids and its mask."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (1, count), generator=generator), torch.ones(1, count, dtype=torch.bool)


def greedy(base: Any, ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """`count` tokens by transformers' generate."""
    output = base.generate(
        input_ids=ids,
        attention_mask=mask.long(),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return output[:, ids.shape[1] :]


def generate_uncached(model: CrossAttentionLM, context: Context, ids: torch.Tensor, count: int) -> torch.Tensor:
    """`count` greedy tokens, each from all tokens before it and from the encoded context, and nothing else."""
    start = ids.shape[1]
    for _ in range(count):
        mask = torch.ones_like(ids, dtype=torch.bool)
        logits = model(ids, mask, context_hidden=context.hidden, context_mask=context.mask)
        ids = torch.cat((ids, logits[:, -1:].argmax(dim=-1)), dim=1)
    return ids[:, start:]


def time_call(work: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    """(seconds, result) of `work`."""
    began = time.perf_counter()
    output = work()
    return time.perf_counter() - began, output


def size(value: Any) -> int:
    """Bytes of all tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = value.values()
    return sum(size(item) for item in value) if hasattr(value, "__iter__") else 0


def operations(work: Callable[[], Any]) -> int:
    """Floating-point operations of matrix products."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@torch.no_grad()
def measure(family: str, args: argparse.Namespace) -> None:
    """Print the table of one family."""
    model = model_of(family, args)
    context_ids, context_mask = tokens(args.context, 1)
    question, question_mask = tokens(args.question, 2)
    prompt, prompt_mask = torch.cat((context_ids, question), dim=1), torch.cat((context_mask, question_mask), dim=1)
    context = model.encode(context_ids[:, None], context_mask[:, None])
    seconds: dict[str, list[float]] = {}
    with model.reading(context):
        greedy(model.base, question, question_mask, 1)  # the first question: the context is projected
        for _ in range(args.rounds):
            for count, what in ((args.new_tokens, "tokens"), (1, "first")):
                # generate_uncached encodes the context itself and does not use these projections
                ways = {
                    "cached": lambda n=count: greedy(model.base, question, question_mask, n),
                    "uncached": lambda n=count: generate_uncached(model, context, question, n),
                    "prompted": lambda n=count: alone(model, prompt, prompt_mask, n),
                }
                answers = {}
                for way, work in ways.items():
                    spent, answers[way] = time_call(work)
                    seconds.setdefault(f"{way} {what}", []).append(spent)
                assert torch.equal(answers["cached"], answers["uncached"]), f"{family}: the caches change the answer"
        flops = {
            "cached": operations(lambda: greedy(model.base, question, question_mask, 9))
            - operations(lambda: greedy(model.base, question, question_mask, 1)),
            "uncached": operations(lambda: generate_uncached(model, context, question, 9))
            - operations(lambda: generate_uncached(model, context, question, 1)),
            "prompted": operations(lambda: alone(model, prompt, prompt_mask, 9))
            - operations(lambda: alone(model, prompt, prompt_mask, 1)),
        }
    median = {name: statistics.median(values) for name, values in seconds.items()}
    lengths = f"context {args.context}, question {args.question}, {args.new_tokens} new tokens"
    print(f"{family}: {args.layers} layers of {args.hidden_size}, {lengths}")
    for way in ("cached", "uncached", "prompted"):
        rate, first = args.new_tokens / median[f"{way} tokens"], 1e3 * median[f"{way} first"]
        print(
            f"  {way:9} {rate:8.1f} "
            f"tokens/s   first token {first:8.1f} ms   {flops[way] / 8e6:8.1f} Mflop per further token"
        )
    ratios = {
        "tokens/s, cached / uncached": median["uncached tokens"] / median["cached tokens"],
        "time to first token, prompted / cached": median["prompted first"] / median["cached first"],
    }
    for name, ratio in ratios.items():
        print(f"  {name}: {ratio:.1f} (target: at least {TARGETS[name]:g})")
    compare_bytes(model, context, prompt, prompt_mask)


def alone(model: CrossAttentionLM, ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Generate with the base model without cross-attention blocks, with the context in the prompt."""
    with model.reading(None):
        return greedy(model.base, ids, mask, count)


def compare_bytes(model: CrossAttentionLM, context: Context, prompt: torch.Tensor, prompt_mask: torch.Tensor) -> None:
    """Print the cached bytes per context token, counted in live tensors and by the formula; both must agree."""
    positions = context.mask.shape[1]
    with model.reading(None):
        past = model.base(input_ids=prompt, attention_mask=prompt_mask.long(), use_cache=True).past_key_values
    projected = [block.project(context.hidden, context.mask) for block in model.unique_blocks()]
    num_bytes = {
        "cache_bytes_per_context_token": size(context.hidden) / positions,
        "projected_bytes_per_context_token": size(projected) / positions,
        "decoder_cache_bytes_per_context_token": size([[layer.keys, layer.values] for layer in past.layers])
        / prompt.shape[1],
    }
    sizes = architecture.from_dict(model.config.to_dict())
    assert sizes is not None
    if model.config.model_type == "gpt_bigcode":
        sizes = architecture.Architecture(**{**vars(sizes), "num_key_value_heads": 1})
    attention = model.unique_blocks()[0].attention
    block = attention.v.out_features * 2
    formula = kv_cache_size.cross_attention_bytes(sizes, len(model.blocks), block, value_bytes=4)
    for name, value in num_bytes.items():
        print(f"  {name}: {value:,.0f} counted, {formula[name]:,} by the formula")
        assert value == formula[name], name


def main() -> None:
    """Print one table per family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=["gpt_bigcode", "llama"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens")
    parser.add_argument("--question", type=int, default=32, help="tokens")
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for family in args.family:
        measure(family, args)


if __name__ == "__main__":
    main()
