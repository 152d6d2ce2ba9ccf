"""Fill in the middle: split a sequence into three parts and move the middle to the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from src.data.text.tokenizers import SafeTokenizer

_SPM_RATE = 0.5
_RATE = 0.5


@dataclass(frozen=True)
class FimTokens:
    """Ids of the marker before each part; several ids if the vocabulary has no such control token."""

    prefix: Sequence[int]
    middle: Sequence[int]
    suffix: Sequence[int]


def fim_tokens(encoder: SafeTokenizer) -> FimTokens:
    """The three markers in the vocabulary of `encoder`."""
    return FimTokens(*(encoder.encode_token(f"<fim_{part}>") for part in ("prefix", "middle", "suffix")))


def maybe_fill_in_the_middle(
    ids: Sequence[int], tokens: FimTokens, max_tokens: int, seed: int, epoch: int, index: int
) -> list[int]:
    """Apply `fill_in_the_middle` with probability 1/2. All choices are a pure function of (seed, epoch, index)."""
    rng = Random(f"fim/{seed}/{epoch}/{index}")
    return fill_in_the_middle(ids, tokens, rng, max_tokens) if rng.random() < _RATE else list(ids)


def fill_in_the_middle(ids: Sequence[int], tokens: FimTokens, rng: Random, max_tokens: int, skip: int = 4) -> list[int]:
    """Split `ids` at two random points after the first `skip` tokens and move the middle to the end.

    The format is PSM or SPM, with probability 1/2 each. PSM is [prefix] P [suffix] S [middle] M. SPM is variant 2 of
    Bavarian et al. 2022 (arXiv:2207.14255, section 3 and appendix D), [prefix] [suffix] S [middle] P M. The suffix is
    truncated to return at most `max_tokens`. A sequence that is too short to split is returned unchanged.
    """
    num_marker_tokens = len(tokens.prefix) + len(tokens.middle) + len(tokens.suffix)
    last = min(max_tokens - num_marker_tokens - 1, len(ids) - 1)
    if last <= skip:
        return list(ids)
    first_cut, second_cut = sorted(rng.randrange(skip, last) for _ in range(2))
    prefix, middle = ids[:first_cut], ids[first_cut:second_cut]
    suffix = ids[second_cut : max_tokens - num_marker_tokens]
    if rng.random() < _SPM_RATE:
        return [*tokens.prefix, *tokens.suffix, *suffix, *tokens.middle, *prefix, *middle]
    return [*tokens.prefix, *prefix, *tokens.suffix, *suffix, *tokens.middle, *middle]
