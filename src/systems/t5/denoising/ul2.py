"""UL2's mixture of denoisers over packed text (Tay et al. 2022, arXiv 2205.05131, section 3.1).

Each sample is made by one denoiser: span corruption with some density and span length, or prefix language modelling.
The denoiser determines the length of its rows of text, so no text is truncated and an input has at most one token of
padding. An epoch reads every token once.
"""

from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field, model_validator

from src.data.text import documents
from src.data.text.tokenizers import SafeTokenizer
from src.errors import ConfigError
from src.experiments.config import Config as StrictConfig
from src.experiments.config import Places
from src.experiments.interfaces import require_fit
from src.experiments.kinds import TokenizerSource
from src.systems.t5.denoising import noise, sentinels, words
from src.systems.t5.denoising.dataset import DenoisingConfig, mask_rng
from src.systems.t5.denoising.denoiser_mixture import DenoiserMixture, DenoiserSpec
from src.systems.t5.denoising.ngrams import NO_NGRAMS
from src.systems.t5.denoising.prefix_lm import cut_row
from src.systems.t5.denoising.span_corruption import span_objective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Denoiser(StrictConfig):
    """A denoiser of the mixture. Without span and density it is prefix language modelling."""

    rate: float = Field(gt=0)
    """Share of the samples, relative to the other rates."""
    mode: str = ""
    """Prefix of the inputs, such as "[NLU]": one token if it is a control token of the tokenizer, else plain text."""
    mean_span_tokens: float | None = Field(default=None, ge=1)
    """Mean tokens of a masked span."""
    noise_density: float | None = Field(default=None, gt=0, lt=1)
    """Share of the tokens that are masked."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> "Denoiser":
        if (self.mean_span_tokens is None) != (self.noise_density is None):
            got = "mean_span_tokens" if self.noise_density is None else "noise_density"
            raise ValueError(
                f"expected mean_span_tokens and noise_density, or neither for a prefix language model, got only {got}."
            )
        return self

    def lengths(self, input_tokens: int) -> "Lengths":
        """Lengths of a sample with inputs of at most `input_tokens`, not including the mode.

        Raises:
            ConfigError: `input_tokens` is too small.
        """
        if self.mean_span_tokens is None or self.noise_density is None:
            return Lengths(input_tokens, input_tokens, 0)
        raw, counts = noise.longest_row(input_tokens, self.noise_density, self.mean_span_tokens)
        return Lengths(raw, counts.target_tokens, counts.spans)


class Lengths(NamedTuple):
    """Tokens of a row of text, maximum tokens of its targets, and number of its sentinels."""

    raw: int
    targets: int
    sentinels: int


def _published_denoisers() -> list[Denoiser]:
    """The denoisers of UL2 (table 1 of the paper) with FAT5's shares: two regular, one prefix, four extreme."""
    return [
        Denoiser(rate=0.165, mode="[NLU]", mean_span_tokens=3.0, noise_density=0.15),
        Denoiser(rate=0.165, mode="[NLU]", mean_span_tokens=8.0, noise_density=0.15),
        Denoiser(rate=0.34, mode="[S2S]"),
        Denoiser(rate=0.0825, mode="[NLG]", mean_span_tokens=3.0, noise_density=0.5),
        Denoiser(rate=0.0825, mode="[NLG]", mean_span_tokens=8.0, noise_density=0.5),
        Denoiser(rate=0.0825, mode="[NLG]", mean_span_tokens=64.0, noise_density=0.15),
        Denoiser(rate=0.0825, mode="[NLG]", mean_span_tokens=64.0, noise_density=0.5),
    ]


class Config(DenoisingConfig):
    """Text and the denoisers."""

    same_length_advice: ClassVar[str] = "Set data.fixed_length: true, or remove loop.compile."
    input_tokens: int = Field(default=512, gt=3)
    """Maximum tokens of an input, with mode, sentinels and end token, and of a prefix."""
    denoisers: list[Denoiser] = Field(default_factory=_published_denoisers, min_length=1)
    """Spans of 3 at density 0.5 need 100 sentinels for 400 input tokens and 128 for 512
    (data_prep.t5.t5_tokenizer --sentinels)."""
    whole_words: bool = False
    """Whether masked runs consist of complete words. The lengths do not change."""
    fixed_length: bool = False
    """Whether to pad every batch to the maximum lengths of all denoisers, instead of its longest rows, for
    `loop.compile`."""

    @model_validator(mode="after")
    def _has_room(self) -> "Config":
        for number, denoiser in enumerate(self.denoisers):
            try:
                denoiser.lengths(self.input_tokens)
            except ConfigError as error:
                raise ValueError(f"denoisers[{number}]: {error}") from None
        return self

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        super().check_tokenizer(places, source)
        if source is None:
            return
        if self.whole_words:
            words.require_in_folder(source.folder)
        for number, denoiser in enumerate(self.denoisers):
            max_mode_tokens = len(denoiser.mode.encode()) + 1  # at most one per byte, and one more
            room = self.input_tokens - max_mode_tokens
            if room > max_mode_tokens and (num_sentinels := denoiser.lengths(room).sentinels):
                sentinels.require_in_folder(source.folder, num_sentinels, f"data.denoisers[{number}]")

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.input_tokens", self.input_tokens, max_positions)
        targets = self._target_tokens()
        require_fit(
            f"data.denoisers: their targets have up to {targets} tokens", max(targets, new_tokens), max_positions
        )

    def batch_lengths(self) -> tuple[int, ...] | None:
        return (self.input_tokens, self._target_tokens()) if self.fixed_length else None

    def _target_tokens(self) -> int:
        """Maximum tokens of a target."""
        return max(denoiser.lengths(self.input_tokens).targets for denoiser in self.denoisers)

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> DenoiserMixture:
        """The samples of one split. A sample's denoiser and mask are functions of (seed, epoch, index) in training, and
        of the index in other splits.

        Raises:
            DataError: the tokenizer has no sentinels; the data set is missing, incomplete, malformed, or too small for
                one sequence or for `val_sequences`.
            ConfigError: the tokenizer has too few sentinels for a denoiser, or its mode leaves too few input tokens.
        """
        encoder = SafeTokenizer(tokenizer)
        kinds = [self._make_spec(number, encoder, tokenizer) for number in range(len(self.denoisers))]
        corpus = documents.read(places, self.corpus, tokenizer, split)
        return DenoiserMixture(corpus, kinds, mask_rng(split, seed), encoder, self.max_samples(split), self)

    def _make_spec(self, number: int, encoder: SafeTokenizer, tokenizer: "PreTrainedTokenizerFast") -> DenoiserSpec:
        """The spec of denoiser `number`. Raises the errors of `build`."""
        import numpy as np

        denoiser, where = self.denoisers[number], f"data.denoisers[{number}]"
        mode = np.array(encoder.encode_token(denoiser.mode) if denoiser.mode else [], dtype=np.int32)
        try:
            lengths = denoiser.lengths(self.input_tokens - len(mode))
        except ConfigError as error:
            raise ConfigError(f"{where}: without the {len(mode)} tokens of its mode, {error}") from None
        if denoiser.mean_span_tokens is None or denoiser.noise_density is None:
            if lengths.raw < 2:
                raise ConfigError(
                    f"{where}: the {len(mode)} tokens of its mode leave no room in {self.input_tokens} input tokens. "
                    "Raise data.input_tokens."
                )
            return DenoiserSpec(denoiser.rate, lengths.raw, mode, partial(cut_row, eos_id=encoder.eos_id))
        ids = np.array(sentinels.require(tokenizer, lengths.sentinels, where), dtype=np.int32)
        shares = denoiser.noise_density, denoiser.mean_span_tokens
        vocabulary = NO_NGRAMS if self.whole_words else None
        objective = span_objective(tokenizer, shares, ids, encoder.eos_id, vocabulary)
        return DenoiserSpec(denoiser.rate, lengths.raw, mode, objective)
