"""<run>/validation.json: the sums of the last validation by sample, from which `results.compare` makes intervals."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from src.experiments.dataset_protocols import Dataset, content_of
from src.files import write_json
from src.runs.context import Run
from src.runs.environment import evaluation_digest
from src.runs.inputs import content_samples
from src.runs.store import VALIDATION
from src.support import distributed
from src.training.validation import SampleSums

MAX_ROWS = 4096
"""Maximum number of rows. With more samples, each row is the sum of consecutive samples."""


def write(run: Run, step: int, parts: Mapping[str, Dataset], samples: Sequence[SampleSums] = ()) -> None:
    """Replace the file. Collective. parts: the validation data by name. samples: all of them, in order; none if the
    loss is no mean over tokens.

    "data" has the digest of the content of each part, "content" those of samples of the prepared files, "code" that of
    the evaluation code, "samples" the number of samples, "step" the optimizer steps; "nats", "tokens" and "bytes" are
    lists of sums, without "bytes" if the bytes of the text are unknown.

    Raises:
        RunError: the disk refuses, or another process has taken over the save directory.
    """
    count = len(samples)
    num_rows = min(count, MAX_ROWS)
    bounds = [row * count // max(1, num_rows) for row in range(num_rows + 1)]
    rows = [samples[begin:end] for begin, end in pairwise(bounds)]
    record: dict[str, Any] = {
        "step": step,
        "data": {name: content_of(part) for name, part in parts.items()},
        "samples": count,
        "nats": [round(sum(sample.nats for sample in row), 4) for row in rows],
        "tokens": [sum(sample.tokens for sample in row) for row in rows],
    }
    if any(sample.text_bytes for sample in samples):
        record["bytes"] = [sum(sample.text_bytes for sample in row) for row in rows]

    def replace() -> None:
        run.dir.confirm()
        facts = {"code": evaluation_digest(), "content": content_samples(run.dir.exp, run.places)}
        write_json(run.path / VALIDATION, {**record, **facts})

    distributed.broadcast_from_rank0(replace)
