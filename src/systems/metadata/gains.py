"""Measure gains from metadata: the loss on the same tokens with, without and with wrong metadata.

A document counts if it fits into one block in all three cases. The scored tokens have the same characters in both,
except the first token of the text, which has no context without metadata. Wrong metadata are those of another document,
and marked spans at random places.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field, model_validator

from src.errors import DataError
from src.experiments.config import Config
from src.systems.metadata.data.annotations import Document, Item
from src.systems.metadata.data.dataset import Documents, Sample, collate_rows
from src.systems.metadata.data.examples import PROMPT, ExampleMaker, Piece

if TYPE_CHECKING:
    import numpy as np

    from src.experiments.batches import TokenBatch

log = logging.getLogger(__name__)
TokenLosses = Callable[["Blocks"], list[list[float]]]
"""`training.validation.token_losses` of a model."""
TOGETHER = "together"
_ANY_NUMBER = 1 << 40
"""Tokens in a block, to measure the size of documents."""


class Gains(Config):
    """Gains to measure at each evaluation."""

    columns: list[str] = Field(min_length=1)
    """Each column separately, and "together": all of them, in documents that have all."""
    documents: int = Field(gt=1)
    """Maximum number of validation documents for each."""
    prompt: bool = False
    """Also measure metadata written as a prompt: val_gain_prompt/COLUMN."""
    chunked: bool = False
    """Also measure all blocks of longer documents, without wrong metadata: val_gain_chunked/COLUMN."""
    positions: list[int] = [8, 32]
    """Also report gains for the text tokens before, between and after these positions: val_gain/COLUMN/0-8, ..."""
    resamples: int = Field(default=1000, gt=0)
    """Bootstrap samples of documents for 95 % intervals (paired bootstrap, Efron and Tibshirani 1993, chapter 13)."""

    @model_validator(mode="after")
    def _ascending(self) -> "Gains":
        if sorted({*self.positions, 0}) != [0, *self.positions]:
            raise ValueError(f"positions: expected ascending numbers above 0, got {self.positions}.")
        if len(set(self.columns)) < len(self.columns):
            raise ValueError(f"columns: duplicate {max(self.columns, key=self.columns.count)!r}. Remove one.")
        return self

    @property
    def column_groups(self) -> dict[str, list[str]]:
        """Columns that a document must have, by name in the scores."""
        groups = {column: [column] for column in self.columns}
        return groups if len(groups) == 1 else {**groups, TOGETHER: self.columns}

    def names(self) -> list[str]:
        """List the names of all scores.

        Text perplexities give no probability to control tokens, unlike val_perplexity, so that both variants predict
        the same symbols.
        """
        bounds = [0, *self.positions]
        spans = (
            [f"/{low}-{high}" for low, high in zip(bounds, [*bounds[1:], ""], strict=True)] if self.positions else []
        )
        styles = [
            "val_gain",
            *(["val_gain_prompt"] if self.prompt else []),
            *(["val_gain_chunked"] if self.chunked else []),
        ]
        names = []
        for column in self.column_groups:
            names += [f"val_text_perplexity_with/{column}", f"val_text_perplexity_without/{column}"]
            names += [
                f"{name}{end}/{column}" for name in [*styles, "val_gain_control"] for end in ("", "_low", "_high")
            ]
            names += [f"val_gain/{column}{span}" for span in spans]
        return names


class ScoredPiece(NamedTuple):
    """A piece and the mask of its scored tokens."""

    piece: Piece
    mask: list[bool]


class Blocks:
    """Pieces of documents as samples with their scored tokens."""

    def __init__(self, documents: Documents, pieces: Sequence[ScoredPiece]) -> None:
        self.fingerprint = documents.fingerprint
        self._config, self._pieces = documents.config.model_copy(update={"open_rows": 0}), pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def sample(self, epoch: int, index: int) -> Sample:
        """Return piece `index`."""
        piece, mask = self._pieces[index]
        return {"input_ids": piece.ids, "loss_mask": mask, "lengths": [len(piece.ids)]}

    def collate(self, samples: Sequence[Sample]) -> "TokenBatch":
        """Pad to the longest."""
        return collate_rows(samples, self._config)


class Both(NamedTuple):
    """Pieces of a document with and without metadata."""

    with_metadata: list[Piece]
    plain: list[Piece]


class Pair(NamedTuple):
    """Losses of the same tokens of a document."""

    with_metadata: list[float]
    without: list[float]


def measure(config: Gains, documents: Documents, losses: TokenLosses) -> dict[str, float]:
    """Measure the scores `config.names()`: perplexities, gains in nats per token and their intervals. Collective.

    Raises:
        DataError: see `select`.
    """
    scores = dict[str, float]()
    for column, variants, fits in select(config, documents.maker, documents.read):
        for name, variant in variants.items():
            scores |= _scores(config, name, column, _pairs(documents, [variant[number] for number in fits], losses))
        if config.chunked:
            scores |= _scores(config, "val_gain_chunked", column, _pairs(documents, variants["val_gain"], losses))
    return {name: scores[name] for name in config.names()}


def select(
    config: Gains, maker: ExampleMaker, documents: Callable[[], Iterable[Document]]
) -> Iterator[tuple[str, dict[str, list[Both]], list[int]]]:
    """(column, the two sides of its documents by score, numbers of those that fit into one block in all of them).

    documents: reads the validation split, as far as it is iterated.

    Raises:
        DataError: fewer than two documents of the split have a column and fit into a block.
    """
    for column, names in config.column_groups.items():
        having = _having(documents(), names, config.documents)
        variants = _variants(config, maker, having)
        fits = [
            number
            for number in range(len(having))
            if all(_is_one_block(variant[number]) for variant in variants.values())
        ]
        if len(fits) < 2:
            raise DataError(
                f"gains.columns: fewer than two of the {len(having)} documents with {' and '.join(names)} fit into a "
                f"block of data.sequence_tokens {maker.room}, with their own metadata and with another's. "
                f"{_advise(_variants(config, maker.with_room(_ANY_NUMBER), having))}"
            )
        yield column, variants, fits


def _variants(config: Gains, maker: ExampleMaker, having: Sequence[Document]) -> dict[str, list[Both]]:
    """The two sides of each document, by score."""
    prompts = maker.rewritten(style="prompt", separators=PROMPT) if config.prompt else maker
    return {
        "val_gain": [_both(maker, document) for document in having],
        "val_gain_control": [_both(maker, document) for document in _wrong(having, maker)],
        **({"val_gain_prompt": [_both(prompts, document) for document in having]} if config.prompt else {}),
    }


def _advise(variants: Mapping[str, Sequence[Both]]) -> str:
    """The number of tokens with which two documents fit. variants: without a limit of tokens."""
    sizes = sorted(
        max(len(piece.ids) for both in sides for side in both for piece in side)
        for sides in zip(*variants.values(), strict=True)
        if all(map(_is_one_block, sides))
    )
    if len(sizes) < 2:
        return "Fewer than two have text to score. Remove the column."
    return (
        f"The two shortest need {sizes[0]} and {sizes[1]} tokens. "
        f"Set data.sequence_tokens to {sizes[1]} or more, or remove the column."
    )


def _both(maker: ExampleMaker, document: Document) -> Both:
    return Both(maker.pieces(document), maker.pieces(document, with_metadata=False))


def _is_one_block(both: Both) -> bool:
    return len(both.with_metadata) == len(both.plain) == 1


def _pairs(documents: Documents, sides_of_documents: Sequence[Both], losses: TokenLosses) -> list[Pair]:
    """Compute the losses of each document with a scored token."""
    scored_pairs = [_score_same(both) for both in sides_of_documents]
    pieces = [piece for both in scored_pairs for side in both for piece in side]
    order = sorted(
        range(len(pieces)), key=lambda i: len(pieces[i].piece.ids)
    )  # similar lengths in a batch need little padding
    by_piece = dict(zip(order, losses(Blocks(documents, [pieces[i] for i in order])), strict=True))
    read = iter(range(len(pieces)))
    pairs = [Pair(*([value for _ in side for value in by_piece[next(read)]] for side in both)) for both in scored_pairs]
    return [pair for pair in pairs if pair.without]


def _score_same(both: Both) -> tuple[list[ScoredPiece], list[ScoredPiece]]:
    """Score the tokens with the same characters on both sides, except the first token of a piece."""
    same = set.intersection(*({key for piece in side for key in _keys(piece)[1:] if key} for side in both))
    first = min((key for side in both for piece in side for key in _keys(piece) if key), default=None)
    same.discard(first)  # it has no context without metadata
    with_metadata, plain = (
        [ScoredPiece(piece, [key in same for key in _keys(piece)]) for piece in side] for side in both
    )
    return with_metadata, plain


def _keys(piece: Piece) -> list[tuple[int, int, int] | None]:
    """Identify each text token by its span and its number among tokens of that span; None for metadata."""
    counts = Counter[tuple[int, int]]()
    keys = list[tuple[int, int, int] | None]()
    for span in piece.spans:
        keys.append(None if span is None else (*span, counts[span]))
        if span is not None:
            counts[span] += 1
    return keys


def check_fits(config: Gains, maker: ExampleMaker, documents: Callable[[], Iterable[Document]]) -> None:
    """Raise the error of `select`, without making the blocks of more documents than necessary."""
    makers = [maker, *([maker.rewritten(style="prompt", separators=PROMPT)] if config.prompt else [])]
    for names in config.column_groups.values():
        having = _having(documents(), names, config.documents)
        fits = 0
        for document, wrong in zip(having, _wrong(having, maker), strict=True):
            if len(maker.pieces(document, with_metadata=False)) == 1:  # first, as metadata can have many tags
                sides = [_both(maker, wrong), *(_both(each, document) for each in makers)]
                fits += all(map(_is_one_block, sides))
            if fits == 2:
                break
        if fits < 2:
            list(select(config, maker, documents))


def check_columns(config: Gains, documents: Callable[[], Iterable[Document]]) -> None:
    """Raise DataError if fewer than two documents of the validation split have the columns."""
    for names in config.column_groups.values():
        _having(documents(), names, 2)


def _having(documents: Iterable[Document], columns: Sequence[str], most: int) -> list[Document]:
    """Return the first documents with an item of each column, without other items."""
    matches = list[Document]()
    for document in documents:
        items = tuple(item for item in document.items if {item.column, item.key} & {*columns})
        if {*columns} <= {name for item in items for name in (item.column, item.key)}:
            matches.append(Document(document.text, items))
        if len(matches) == most:
            break
    if len(matches) < 2:
        raise DataError(
            f"gains.columns: fewer than two documents of the validation split have {' and '.join(columns)}. "
            "Remove the column, or add such documents."
        )
    return matches


def _wrong(documents: Sequence[Document], maker: ExampleMaker) -> list[Document]:
    """Return each text with the metadata of another document, as far as they are written differently, and its spans at
    random places."""
    items_of = [_global_items(document) for document in documents]
    prefixes = [maker.prefix_ids(Document("", tuple(items))) for items in items_of]
    if any(prefixes) and all(prefix == prefixes[0] for prefix in prefixes):
        log.warning(
            "gains: all documents have the same metadata, %r, so the control has no metadata.",
            maker.prefix(Document("", tuple(items_of[0]))),
        )
    shuffled = []
    for number, document in enumerate(documents):
        draws = Random(f"wrong metadata/{number}")
        others = ((number + step) % len(documents) for step in range(1, len(documents)))
        items = next((items_of[other] for other in others if prefixes[other] != prefixes[number]), [])
        items = [*items, *_move([item for item in document.items if item.start is not None], len(document.text), draws)]
        shuffled.append(Document(document.text, tuple(items)))
    return shuffled


def _global_items(document: Document) -> list[Item]:
    return [item for item in document.items if item.start is None]


def _move(items: Sequence[Item], length: int, draws: Random) -> Iterator[Item]:
    """Move spans to random places; relative positions follow the order of the items."""
    counts = Counter[tuple[str, int]]()
    for item in items:
        start, end = item.span
        begin = draws.randint(0, length - (end - start))
        places: list[int | None] = [None, None]
        if item.start_place is not None:
            for side, index in enumerate((begin, begin + end - start)):
                places[side] = counts[item.key, index]
                counts[item.key, index] += 1
        yield item._replace(start=begin, end=begin + end - start, start_place=places[0], end_place=places[1])


def _scores(config: Gains, name: str, column: str, pairs: Sequence[Pair]) -> dict[str, float]:
    import numpy as np

    sums = np.array([[sum(pair.without) - sum(pair.with_metadata), len(pair.without)] for pair in pairs])
    gain, low, high = _interval(sums, config.resamples)
    scores = {f"{name}/{column}": gain, f"{name}_low/{column}": low, f"{name}_high/{column}": high}
    if name != "val_gain":
        return scores
    for kind, lists in (
        ("with", [pair.with_metadata for pair in pairs]),
        ("without", [pair.without for pair in pairs]),
    ):
        scores[f"val_text_perplexity_{kind}/{column}"] = float(np.exp(sum(map(sum, lists)) / sums[:, 1].sum()))
    bounds = [0, *config.positions]
    for begin, end in zip(bounds, [*bounds[1:], None], strict=True) if config.positions else ():
        without = [value for pair in pairs for value in pair.without[begin:end]]
        with_metadata = [value for pair in pairs for value in pair.with_metadata[begin:end]]
        part = f"{begin}-{'' if end is None else end}"
        scores[f"val_gain/{column}/{part}"] = float(np.mean(without) - np.mean(with_metadata)) if without else 0.0
    return scores


def _interval(sums: "np.ndarray", resamples: int) -> tuple[float, float, float]:
    """Compute the ratio of the columns' sums and its 2.5th and 97.5th bootstrap percentile. sums: (documents, 2)."""
    import numpy as np

    samples = np.random.default_rng(0).integers(len(sums), size=(resamples, len(sums)))
    ratios = sums[samples].sum(axis=1)
    low, high = np.percentile(ratios[:, 0] / ratios[:, 1], [2.5, 97.5])
    total = sums.sum(axis=0)
    return float(total[0] / total[1]), float(low), float(high)
