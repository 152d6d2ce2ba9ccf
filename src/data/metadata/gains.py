"""What metadata are worth to a model: the loss of the same tokens of the same documents with and without them, and with wrong ones.

A document counts where it fits into one block in each of the three. The first token of the text is not scored: without metadata
nothing stands before it. The wrong metadata are those of another document; marked spans are moved to places drawn anew.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from src.config import Config
from src.data.metadata.annotations import Annotated, Item
from src.data.metadata.dataset import Documents, Sample, collate_rows
from src.data.metadata.examples import PROMPT, Piece
from src.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from src.batches import TokenBatch

TokenLosses = Callable[["Blocks"], list[list[float]]]
"""`training.validation.token_losses` of a model."""
TOGETHER = "together"


class Gains(Config):
    """Which gains are measured, at each evaluation."""

    columns: list[str] = Field(min_length=1)
    """Each by itself, and "together" all of them, in documents that have every one."""
    documents: int = Field(gt=0)
    """Of the validation split: at most so many for each."""
    prompt: bool = False
    """Whether also with metadata written as a prompt: val_gain_prompt/COLUMN."""
    chunked: bool = False
    """Whether also over all blocks of longer documents, without wrong metadata: val_gain_chunked/COLUMN."""
    positions: list[int] = [8, 32]
    """Gains are told also for the tokens of the text before, between and after these: val_gain/COLUMN/0-8, ..."""
    resamples: int = Field(default=1000, gt=0)
    """Of documents, for the intervals of 95 % (paired bootstrap, Efron and Tibshirani 1993, chapter 13)."""

    def names(self) -> list[str]:
        """All scores."""
        bounds = [0, *self.positions]
        spans = [f"/{low}-{high}" for low, high in zip(bounds, [*bounds[1:], ""], strict=True)] if self.positions else []
        styles = ["val_gain", *(["val_gain_prompt"] if self.prompt else []), *(["val_gain_chunked"] if self.chunked else [])]
        found = []
        for column in [*self.columns, *([TOGETHER] if len(self.columns) > 1 else [])]:
            found += [f"val_perplexity_with/{column}", f"val_perplexity_without/{column}"]
            found += [f"{name}{end}/{column}" for name in [*styles, "val_gain_control"] for end in ("", "_low", "_high")]
            found += [f"val_gain/{column}{span}" for span in spans]
        return found


class Blocks:
    """Blocks of documents as samples, of which the tokens of the text are scored, but for the first."""

    def __init__(self, documents: Documents, pieces: Sequence[Piece]) -> None:
        self.fingerprint = documents.fingerprint
        self._config, self._pieces = documents.config.model_copy(update={"open_rows": 0}), pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def sample(self, epoch: int, index: int) -> Sample:
        """Block `index`."""
        piece = self._pieces[index]
        return {"input_ids": piece.ids, "loss_mask": text_mask(piece), "lengths": [len(piece.ids)]}

    def collate(self, samples: Sequence[Sample]) -> "TokenBatch":
        """Padded to the longest."""
        return collate_rows(samples, self._config)


def text_mask(piece: Piece) -> list[bool]:
    """Tokens of the text, but for the first."""
    mask = list(piece.of_text)
    if True in mask:
        mask[mask.index(True)] = False
    return mask


class Pair(NamedTuple):
    """Losses of one document's tokens."""

    with_metadata: list[float]
    without: list[float]


def measure(config: Gains, documents: Documents, losses: TokenLosses) -> dict[str, float]:
    """The scores `config.names()`: perplexities, gains in nats per token and their intervals. Collective.

    Raises:
        DataError: no document of the split has one of the columns, and fits.
    """
    scores = dict[str, float]()
    makers = {"val_gain": documents.maker, "val_gain_control": documents.maker}
    if config.prompt:
        makers["val_gain_prompt"] = documents.maker.rewritten(style="prompt", separators=PROMPT)
    for column in [*config.columns, *([TOGETHER] if len(config.columns) > 1 else [])]:
        wanted = config.columns if column == TOGETHER else [column]
        having = _having(documents, wanted, config.documents)
        for name, maker in makers.items():
            given = _wrong(having) if name == "val_gain_control" else having
            blocks = [(maker.pieces(document), maker.pieces(document, written=False)) for document in given]
            one = [(both[0], plain[0]) for both, plain in blocks if len(both) == len(plain) == 1]
            scores |= _scores(config, name, column, _pairs(documents, one, losses))
        if config.chunked:
            maker = documents.maker
            chunks = [list(zip(maker.pieces(document), maker.pieces(document, written=False), strict=False)) for document in having]
            scores |= _scores(config, "val_gain_chunked", column, _join_blocks(documents, chunks, losses))
    return {name: scores[name] for name in config.names()}


def _having(documents: Documents, columns: Sequence[str], most: int) -> list[Annotated]:
    """The first documents with an item of each column, with nothing else."""
    found = list[Annotated]()
    for number in range(len(documents)):
        document = documents[number]
        if set(columns) <= set(document.columns):
            found.append(Annotated(document.text, tuple(item for item in document.items if item.column in columns)))
        if len(found) == most:
            break
    if len(found) < 2:
        raise DataError(f"gains.columns: fewer than two documents of the validation split have {' and '.join(columns)}.")
    return found


def _wrong(documents: Sequence[Annotated]) -> list[Annotated]:
    """Each text with another one's metadata, those of spans at other places."""
    found = []
    for number, document in enumerate(documents):
        draws = Random(f"wrong metadata/{number}")
        own = _global_items(document)
        others = (_global_items(documents[(number + step) % len(documents)]) for step in range(1, len(documents)))
        items = next((items for items in others if items != own), [])
        items = [*items, *(_move(item, len(document.text), draws) for item in document.items if item.start is not None)]
        found.append(Annotated(document.text, tuple(items)))
    return found


def _global_items(document: Annotated) -> list[Item]:
    return [item for item in document.items if item.start is None]


def _move(item: Item, length: int, draws: Random) -> Item:
    start, end = item.span
    begin = draws.randint(0, length - (end - start))
    return item._replace(start=begin, end=begin + end - start, start_place=None, end_place=None)


def _pairs(documents: Documents, blocks: Sequence[tuple[Piece, Piece]], losses: TokenLosses) -> list[Pair]:
    if not blocks:
        raise DataError("gains: no document fits into one block of data.sequence_tokens with and without its metadata.")
    found = _losses_by_length(documents, [piece for pair in blocks for piece in pair], losses)
    return [Pair(one, two) for one, two in zip(found[::2], found[1::2], strict=True) if one]


def _losses_by_length(documents: Documents, pieces: Sequence[Piece], losses: TokenLosses) -> list[list[float]]:
    """Of each piece, in order. Those of a batch are of like lengths, so that little is padding."""
    order = sorted(range(len(pieces)), key=lambda i: len(pieces[i].ids))
    found = dict(zip(order, losses(Blocks(documents, [pieces[i] for i in order])), strict=True))
    return [found[i] for i in range(len(pieces))]


def _join_blocks(documents: Documents, chunks: Sequence[Sequence[tuple[Piece, Piece]]], losses: TokenLosses) -> list[Pair]:
    same = [[pair for pair in pairs if sum(text_mask(pair[0])) == sum(text_mask(pair[1]))] for pairs in chunks]
    found = _losses_by_length(documents, [piece for pairs in same for pair in pairs for piece in pair], losses)
    read, joined = iter(found), list[Pair]()
    for pairs in same:
        one, two = list[float](), list[float]()
        for _ in pairs:
            one += next(read)
            two += next(read)
        if one:
            joined.append(Pair(one, two))
    return joined


def _scores(config: Gains, name: str, column: str, pairs: Sequence[Pair]) -> dict[str, float]:
    import numpy as np

    sums = np.array([[sum(pair.without) - sum(pair.with_metadata), len(pair.without)] for pair in pairs])
    gain, low, high = _interval(sums, config.resamples)
    scores = {f"{name}/{column}": gain, f"{name}_low/{column}": low, f"{name}_high/{column}": high}
    if name != "val_gain":
        return scores
    for kind, lists in (("with", [pair.with_metadata for pair in pairs]), ("without", [pair.without for pair in pairs])):
        scores[f"val_perplexity_{kind}/{column}"] = float(np.exp(sum(map(sum, lists)) / sums[:, 1].sum()))
    bounds = [0, *config.positions]
    for begin, end in zip(bounds, [*bounds[1:], None], strict=True) if config.positions else ():
        without = [value for pair in pairs for value in pair.without[begin:end]]
        with_metadata = [value for pair in pairs for value in pair.with_metadata[begin:end]]
        part = f"{begin}-{'' if end is None else end}"
        scores[f"val_gain/{column}/{part}"] = float(np.mean(without) - np.mean(with_metadata)) if without else 0.0
    return scores


def _interval(sums: "np.ndarray", resamples: int) -> tuple[float, float, float]:
    """The ratio of the columns' sums, and its 2.5th and 97.5th percentile over documents drawn again. sums: (documents, 2)."""
    import numpy as np

    drawn = np.random.default_rng(0).integers(len(sums), size=(resamples, len(sums)))
    ratios = sums[drawn].sum(axis=1)
    low, high = np.percentile(ratios[:, 0] / ratios[:, 1], [2.5, 97.5])
    total = sums.sum(axis=0)
    return float(total[0] / total[1]), float(low), float(high)
