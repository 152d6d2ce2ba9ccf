"""Save the documents and text of a suspicious step's batch, for people to read.

<run>/offending/step-00000012-rank-0.json, one file per process for its share of the batch:
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
MAX_FILES = 100
"""Maximum number of files per process and run."""
MAX_TOKENS = 2_000
"""Maximum number of tokens to decode per document or context chunk."""
MAX_CHARACTERS = 500_000
"""Maximum number of characters of text per file. Later documents are saved without text."""

log = logging.getLogger(__name__)


def save(
    run_path: Path,
    step: int,
    rank: int,
    batches: Sequence[Mapping[str, "Tensor"]],
    tokenizer: "PreTrainedTokenizerFast",
    keys: Sequence[Sequence[Key]],
) -> Path | None:
    """Write the documents of `batches`; returns the file. Overwrites the file of the same step. Not collective.

    batches: micro-batches (see `src.experiments.batches`) on any device. keys: sample keys of each micro-batch. Row r
    belongs to sample `sample_of_row[r]`, or to sample r if the batch has no such entry. Returns None and writes nothing
    if this process has already written MAX_FILES files.

    Raises:
        RunError: the disk refuses.
    """
    folder = run_path / FOLDER
    path = folder / f"step-{step:08d}-rank-{rank}.json"
    with writing(path):
        folder.mkdir(exist_ok=True)
        if not path.exists() and len(list(folder.glob(f"step-*-rank-{rank}.json"))) >= MAX_FILES:
            log.warning(
                "%s: already has %d batches of rank %d, so the batch of step %d is not saved.",
                folder,
                MAX_FILES,
                rank,
                step,
            )
            return None
    characters_left, documents = MAX_CHARACTERS, []
    for number, (batch, rows) in enumerate(zip(batches, keys, strict=True)):
        samples = batch["sample_of_row"].tolist() if "sample_of_row" in batch else range(len(rows))
        assert len(batch["input_ids"]) == len(samples), "a sample for each row"
        for row, sample in enumerate(samples):
            document = {"micro_batch": number, **_key_fields(rows[sample]), **_counts(batch, row)}
            if characters_left > 0:
                document |= _texts(batch, row, tokenizer, characters_left)
                characters_left -= len(document["text"]) + sum(map(len, document.get("contexts", [])))
            documents.append(document)
    # One line per document for searching; text is not escaped for reading.
    lines = ",\n".join(json.dumps(document, ensure_ascii=False) for document in documents)
    write_atomic(path, f'{{"step": {step}, "rank": {rank}, "documents": [\n{lines}\n]}}\n')
    return path


def _key_fields(key: Key) -> dict[str, Any]:
    """{"epoch", "index"} for an indexed data set, else {"key"}."""
    return {"epoch": key[0], "index": key[1]} if [type(part) for part in key] == [int, int] else {"key": key}


def _counts(batch: Mapping[str, "Tensor"], row: int) -> dict[str, Any]:
    masks = {"tokens": "attention_mask", "loss_tokens": "loss_mask"}
    return {name: int(batch[mask][row].sum()) for name, mask in masks.items() if mask in batch}


def _texts(batch: Mapping[str, "Tensor"], row: int, tokenizer: "PreTrainedTokenizerFast", most: int) -> dict[str, Any]:
    """Text and contexts of a document, with control tokens, up to `most` characters."""
    text, cut = _decode(tokenizer, batch["input_ids"][row][batch["attention_mask"][row].bool()], most)
    if "context_ids" not in batch:
        return {"text": text, "cut": cut}
    contexts, characters_left = [], most - len(text)
    for ids, mask in zip(batch["context_ids"][row], batch["context_mask"][row], strict=True):
        if not mask.any():
            continue  # padding chunk
        context, shorter = _decode(tokenizer, ids[mask.bool()], characters_left)
        cut, characters_left = cut or shorter, characters_left - len(context)
        contexts.append(context)
    return {"text": text, "contexts": contexts, "cut": cut}


def _decode(tokenizer: "PreTrainedTokenizerFast", ids: "Tensor", most: int) -> tuple[str, bool]:
    """Decode the first ids; returns the text and whether it is truncated."""
    text = tokenizer.decode(ids[:MAX_TOKENS].tolist(), skip_special_tokens=False) if most > 0 else ""
    assert isinstance(text, str), "a list of ids makes one text"
    return text[:most], len(ids) > MAX_TOKENS or len(text) > most or most <= 0
