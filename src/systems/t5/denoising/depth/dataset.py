"""DEPTH: the decoder predicts masked words and the order of sentences (Bamberger et al. 2024, arXiv 2405.07788).

A sample has consecutive sentences of one document: <eosen> <sent_i> words <eosen> <sent_j> words ... <eosen> </s>, with
masked runs replaced by sentinels. Its target has the same sentence tokens in the order of the text, each with its
masked words.

Sentence tokens are sampled without replacement, so they do not reveal the order. Sentinels do not reveal it either:
they are numbered after shuffling, in the order in which the encoder reads them.
"""

import copy
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from src.data import jsonl
from src.errors import ConfigError, DataError
from src.experiments.batches import DepthBatch, Seq2SeqBatch
from src.experiments.config import Places
from src.experiments.interfaces import Architecture, require_fit
from src.experiments.kinds import TokenizerSource
from src.systems.t5.denoising import noise, sentinels
from src.systems.t5.denoising.dataset import DenoisingConfig, Sample, mask_rng
from src.systems.t5.denoising.depth.sentence_groups import Groups, Room

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

EOSEN = "<eosen>"


class Config(DenoisingConfig):
    """Rows {"text"} in train.jsonl and val.jsonl (not token files), and how to shuffle and mask their sentences."""

    same_length_advice: ClassVar[str] = "Set data.fixed_length: true, or remove loop.compile."
    input_tokens: int = Field(default=512, gt=0)
    """Maximum tokens of an input, including special tokens."""
    target_tokens: int = Field(default=512, gt=0)
    """Maximum tokens of a target, including special tokens."""
    noise_density: float = Field(default=0.3, ge=0, lt=1)
    """Share of a sample's tokens to mask."""
    mean_span_tokens: float = Field(default=3.0, ge=1)
    """Mean length of masked runs in tokens. Runs do not cross the end of a sentence."""
    num_sentences: int = Field(default=20, gt=0)
    """Maximum number of sentences per sample, and number of sentence tokens to choose from.
    A longer document gives several samples."""
    shuffle_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of the samples in which the encoder reads the sentences in random order."""
    sentence_weight: float = Field(default=1.0, ge=0)
    """Weight of sentence tokens in the training loss, relative to other tokens (the paper's lambda).
    In validation it is 1."""
    fixed_length: bool = False
    """Whether to pad every batch to the maximum lengths, instead of its longest rows, for `loop.compile`."""

    @model_validator(mode="after")
    def _has_room(self) -> "Config":
        try:
            self._make_room(self.input_tokens)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def _make_room(self, num_sentinels: int) -> Room:
        return Room(self.input_tokens, self.target_tokens, self.noise_density, self.mean_span_tokens, num_sentinels)

    def check(self, places: Places) -> None:
        jsonl.require_splits(places, self.corpus)
        super().check(places)

    def check_tokenizer(self, places: Places, source: TokenizerSource | None) -> None:
        super().check_tokenizer(places, source)
        added_tokens = sentinels.read_added_tokens(source.folder) if source else None
        if source and added_tokens is not None:
            _require_sentence_tokens(
                [name for name, (_, special) in added_tokens.items() if special], self.num_sentences, str(source.folder)
            )
            sentinels.require_in_folder(source.folder, 1, "data")

    def check_length(self, max_positions: int | None, new_tokens: int = 0) -> None:
        require_fit("data.input_tokens", self.input_tokens, max_positions)
        require_fit("data.target_tokens", max(self.target_tokens, new_tokens), max_positions)

    def check_model(self, sizes: Architecture | None) -> None:
        if sizes and sizes.model_type == "longt5":
            raise ConfigError(
                "data: DEPTH needs attention masks with a row per token, which LongT5's encoder does not support. "
                "Use another objective."
            )

    def batch_lengths(self) -> tuple[int, ...] | None:
        return (self.input_tokens, self.target_tokens) if self.fixed_length else None

    def build(self, places: Places, tokenizer: "PreTrainedTokenizerFast", split: str, seed: int) -> "DepthDataset":
        """The sentences of one split, tokenised.
        Masks and orders are functions of (seed, epoch, index) in training, and of the index in other splits.

        Raises:
            DataError: the tokenizer has no sentinels or sentence tokens; the data set is missing, incomplete, malformed
                or empty, or has fewer than `val_sequences` samples.
            ConfigError: there are too few sentinels for any text.
        """
        folder = jsonl.corpus_folder(places, self.corpus)
        path = jsonl.require_file(folder, f"{split}.jsonl")
        words = Words(tokenizer, self.num_sentences)
        rows = jsonl.read_rows(path, {"text": str}, rules="text 1")
        room = self._make_room(len(words.sentinels))
        groups = Groups((row["text"] for row in rows), tokenizer, room, self.num_sentences, jsonl.fingerprint(folder))
        if not len(groups):
            raise DataError(f"{path}: no text except white space. Add text.")
        max_samples = self.max_samples(split)
        group_indices = (
            range(len(groups)) if max_samples is None else jsonl.select_validation_rows(len(groups), max_samples, path)
        )
        return DepthDataset(self, groups, group_indices, words, (split, seed))


def sentence_tokens(number: int) -> list[str]:
    """The token between sentences, and the names of `number` sentences."""
    return [EOSEN, *(f"<sent_{n}>" for n in range(number))]


def _require_sentence_tokens(special: Container[str], number: int, where: str) -> list[str]:
    """`sentence_tokens`. Raises DataError if one is missing from the special tokens of the tokenizer `where`."""
    names = sentence_tokens(number)
    missing = [name for name in names if name not in special]
    if missing:
        raise DataError(
            f"{where}: has no special token {missing[0]}; data.num_sentences {number} needs {EOSEN} and {names[1]} to "
            f"{names[-1]}. Add them: python -m data_prep.t5.t5_tokenizer --from {where} --name NAME --sentences "
            f"{number}"
        )
    return names


class Words:
    """Ids of special tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", num_sentences: int) -> None:
        """Raises DataError if one is missing from the tokenizer's special tokens."""
        import numpy as np

        special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = _require_sentence_tokens(special, num_sentences, tokenizer.name_or_path)
        self.eosen, *sentences = (special[name] for name in names)
        self.sentences = np.array(sentences, np.int32)
        self.sentinels = np.array(sentinels.sentinel_ids(tokenizer), np.int32)
        assert isinstance(tokenizer.eos_token_id, int), "load refuses a tokenizer without an end token"
        self.eos = tokenizer.eos_token_id
        self.pad = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else self.eos


class DepthDataset:
    """Samples are pure functions of (seed, epoch, index)."""

    def __init__(
        self, config: Config, groups: Groups, group_indices: Sequence[int], words: Words, drawn_for: tuple[str, int]
    ) -> None:
        """drawn_for: split and seed."""
        self.fingerprint, self.content, self.shuffle = groups.fingerprint, groups.content, config.shuffle
        self._config, self._groups, self._group_indices, self._words = config, groups, group_indices, words
        self._draws = mask_rng(*drawn_for)
        self._sentences_alone = False
        self._weighted = drawn_for[0] == "train" and config.sentence_weight != 1

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._group_indices)

    def sample(self, epoch: int, index: int) -> Sample:
        """Sentences as input and target of this epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        rng = self._draws.generator(epoch, index)
        ids, bounds = self._groups.sentences(self._group_indices[index])
        count, config = len(bounds) - 1, self._config
        names = rng.permutation(self._words.sentences)[:count]
        shuffled = rng.random() < config.shuffle_rate
        order = rng.permutation(count) if shuffled else range(count)
        # Without `roll` the mask would always include the last word of the text, and so reveal the last sentence.
        mask = noise.noise_mask(len(ids), config.noise_density, config.mean_span_tokens, rng, roll=True)
        inputs, targets = corrupt(ids, bounds, mask, order, self._words.sentinels)
        return {
            "input_ids": self._join_sentences(inputs, names, order),
            "labels": self._join_sentences(targets, names, range(count)),
        }

    def _join_sentences(
        self, pieces: "Sequence[np.ndarray]", names: "np.ndarray", order: Iterable[int]
    ) -> "np.ndarray":
        """Concatenate the `pieces` of sentences in this order, each after <eosen> and its name."""
        import numpy as np

        eosen = self._words.eosen
        parts = [part for j in order for part in ((eosen, names[j]), pieces[j])]
        return np.concatenate([*parts, (eosen, self._words.eos)], dtype=np.int32)

    def sentence_targets(self) -> Self:
        """The same samples with loss only on sentence tokens, which measures the order of the sentences."""
        view = copy.copy(self)
        view._sentences_alone = True
        return view

    def collate(self, samples: Sequence[Sample]) -> DepthBatch:
        """Pad on the right. The decoder starts with the padding token, like T5's."""
        import torch

        from src.data import collate

        config, pad = self._config, self._words.pad
        sizes = (config.input_tokens, config.target_tokens) if config.fixed_length else (0, 0)
        plain = collate.seq2seq([s["input_ids"] for s in samples], [s["labels"] for s in samples], pad, pad, sizes)
        sentence_ids = torch.from_numpy(self._words.sentences)
        batch = with_masks(plain, sentence_ids)
        names_BT = torch.isin(batch["labels"], sentence_ids)
        if self._sentences_alone:
            return {**batch, "labels": batch["labels"].where(names_BT, collate.NOT_LEARNED), "loss_mask": names_BT}
        if self._weighted:
            batch["loss_weights"] = 1 + (config.sentence_weight - 1) * names_BT.float()
        return batch


def corrupt(
    ids: "np.ndarray", bounds: "np.ndarray", mask: "np.ndarray", order: Iterable[int], sentinels: "np.ndarray"
) -> "tuple[list[np.ndarray], list[np.ndarray]]":
    """(inputs, targets): for each sentence, in the order of the text, the encoder's tokens and the masked runs.

    ids: (N,), all sentences. bounds: (K + 1,), boundaries of the K sentences. mask: (N,) bool, True on masked tokens.
    order: order of the sentences in the encoder, by which runs are numbered. sentinels: at least one per run.
    """
    import numpy as np

    starts = noise.run_starts(mask)
    starts[bounds[:-1]] = mask[bounds[:-1]]
    row, run_sentinels, first = ids.copy(), np.zeros_like(ids), 0
    for j in order:
        places = starts[bounds[j] : bounds[j + 1]].nonzero()[0] + bounds[j]
        row[places] = run_sentinels[places] = sentinels[first : first + len(places)]
        first += len(places)
    input_mask = starts | ~mask
    repeats = mask.astype(np.int64) + starts
    places = np.arange(len(ids)).repeat(repeats)
    target_ids = ids[places]
    ends = repeats.cumsum()
    target_ids[ends[starts] - 2] = run_sentinels[starts]
    cuts = np.concatenate([[0], ends])[bounds]
    sentences = range(len(bounds) - 1)
    inputs = [row[bounds[j] : bounds[j + 1]][input_mask[bounds[j] : bounds[j + 1]]] for j in sentences]
    return inputs, [target_ids[cuts[j] : cuts[j + 1]] for j in sentences]


def with_masks(batch: Seq2SeqBatch, sentence_ids: "Tensor") -> DepthBatch:
    """Add DEPTH's attention masks to a batch.
    Each input and each target is [<eosen> <sent_i> words]... <eosen> </s>.

    Encoder: a sentence token attends to its sentence: itself, its words and the <eosen> that ends it; the first one
    also to the <eosen> before it, the last one also to the end token, as in the authors' code. Other tokens attend to
    all tokens. Decoder: a sentence token attends to itself, to earlier sentence tokens and to the encoder's sentence
    tokens. Other tokens attend as in T5. Padding attends like other tokens, so that no softmax is empty.

    sentence_ids: ids of <sent_0>, <sent_1>, ...; text does not contain them.
    """
    import torch

    real_BS, real_BT = batch["attention_mask"], batch["loss_mask"]
    read_BS = torch.isin(batch["input_ids"], sentence_ids) & real_BS
    written_BT = torch.isin(batch["decoder_input_ids"], sentence_ids) & real_BT
    sentence_BS = read_BS.cumsum(1).clamp(min=1).masked_fill(~real_BS, -1)
    S, T = real_BS.shape[1], real_BT.shape[1]
    encoder_BSS, cross_BTS = real_BS[:, None].repeat(1, S, 1), real_BS[:, None].repeat(1, T, 1)
    decoder_BTT = real_BT[:, None] & torch.ones(T, T, dtype=torch.bool).tril()
    b, s = read_BS.nonzero(as_tuple=True)  # only few rows differ from T5's
    encoder_BSS[b, s] = sentence_BS[b] == sentence_BS[b, s, None]
    b, t = written_BT.nonzero(as_tuple=True)
    decoder_BTT[b, t] &= written_BT[b]
    cross_BTS[b, t] = read_BS[b]
    return {**batch, "encoder_mask": encoder_BSS, "decoder_mask": decoder_BTT, "cross_mask": cross_BTS}
