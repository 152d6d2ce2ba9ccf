"""Saves the batch of a suspicious step for a person to read: its documents and their text.

<run>/offending/step-00000012-rank-0.json, one of each process, as it had its own share of the batch:
{"step": 12, "rank": 0, "documents": [{"micro_batch", "epoch", "index", "tokens", "loss_tokens", "text", "contexts",
"cut"}, ...]}.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from src.data.orders import Key
from src.files import write_atomic, writing

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

FOLDER = "offending"
MOST_FILES = 100
"""Of one process in one run."""
MOST_TOKENS = 2_000
"""Of one document, or one chunk of its context, that are decoded."""
MOST_CHARACTERS = 500_000
"""Of text in one file. The documents that come after have everything but their text."""

log = logging.getLogger(__name__)


def save(
    run_path: Path,
    step: int,
    rank: int,
    batches: Sequence[Mapping[str, "Tensor"]],
    tokenizer: "PreTrainedTokenizerFast",
    keys: Sequence[Sequence[Key]],
) -> Path | None:
    """Write the documents of `batches`; returns the file. Replaces an older file of the same step. Not collective.

    batches: micro-batches of `src.experiments.batches`, on any device. keys: of each micro-batch, those of its samples.
    Row r is of sample `sample_of_row[r]`, of sample r where a batch does not have this entry. Returns None, and writes
    nothing, where this process has written MOST_FILES files already.

    Raises:
        RunError: the disk refuses.
    """
    folder = run_path / FOLDER
    path = folder / f"step-{step:08d}-rank-{rank}.json"
    with writing(path):
        folder.mkdir(exist_ok=True)
        if not path.exists() and len(list(folder.glob(f"step-*-rank-{rank}.json"))) >= MOST_FILES:
            log.warning(
                "%s: holds %d batches of rank %d already, so that of step %d is not saved.",
                folder,
                MOST_FILES,
                rank,
                step,
            )
            return None
    characters_left, documents = MOST_CHARACTERS, []
    for number, (batch, rows) in enumerate(zip(batches, keys, strict=True)):
        samples = batch["sample_of_row"].tolist() if "sample_of_row" in batch else range(len(rows))
        assert len(batch["input_ids"]) == len(samples), "a sample for each row"
        for row, sample in enumerate(samples):
            document = {"micro_batch": number, **_key_fields(rows[sample]), **_counts(batch, row)}
            if characters_left > 0:
                document |= _texts(batch, row, tokenizer, characters_left)
                characters_left -= len(document["text"]) + sum(map(len, document.get("contexts", [])))
            documents.append(document)
    # One line a document, so that a person can search it; text as it is, so that a person can read it.
    lines = ",\n".join(json.dumps(document, ensure_ascii=False) for document in documents)
    write_atomic(path, f'{{"step": {step}, "rank": {rank}, "documents": [\n{lines}\n]}}\n')
    return path


def _key_fields(key: Key) -> dict[str, Any]:
    """{"epoch", "index"} of a data set that is indexed, else {"key"}."""
    return {"epoch": key[0], "index": key[1]} if [type(part) for part in key] == [int, int] else {"key": key}


def _counts(batch: Mapping[str, "Tensor"], row: int) -> dict[str, Any]:
    masks = {"tokens": "attention_mask", "loss_tokens": "loss_mask"}
    return {name: int(batch[mask][row].sum()) for name, mask in masks.items() if mask in batch}


def _texts(batch: Mapping[str, "Tensor"], row: int, tokenizer: "PreTrainedTokenizerFast", most: int) -> dict[str, Any]:
    """The document's text and contexts, `most` characters at most; control tokens are shown."""
    text, cut = _decode(tokenizer, batch["input_ids"][row][batch["attention_mask"][row].bool()], most)
    if "context_ids" not in batch:
        return {"text": text, "cut": cut}
    contexts, characters_left = [], most - len(text)
    for ids, mask in zip(batch["context_ids"][row], batch["context_mask"][row], strict=True):
        if not mask.any():
            continue  # a chunk that this sample does not have
        context, shorter = _decode(tokenizer, ids[mask.bool()], characters_left)
        cut, characters_left = cut or shorter, characters_left - len(context)
        contexts.append(context)
    return {"text": text, "contexts": contexts, "cut": cut}


def _decode(tokenizer: "PreTrainedTokenizerFast", ids: "Tensor", most: int) -> tuple[str, bool]:
    """Text of the first ids, and True where it is not the whole text."""
    text = tokenizer.decode(ids[:MOST_TOKENS].tolist(), skip_special_tokens=False) if most > 0 else ""
    assert isinstance(text, str), "a list of ids makes one text"
    return text[:most], len(ids) > MOST_TOKENS or len(text) > most or most <= 0
