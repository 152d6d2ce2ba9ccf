"""<run>/validation.json: the sums of the last validation by sample, from which `results.compare` makes intervals."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from src.experiments.dataset_protocols import Dataset, content_of
from src.files import write_json
from src.runs.context import Run
from src.runs.environment import evaluation_digest
from src.runs.store import VALIDATION
from src.support import distributed
from src.training.state import content_samples
from src.training.validation import SampleSums

if TYPE_CHECKING:
    from accelerate import Accelerator

Scores = Mapping[str, float]
MAX_ROWS = 4096
"""Maximum number of rows. With more samples, each row is the sum of consecutive samples."""


def evaluate_and_write(
    run: Run, parts: Mapping[str, Dataset], evaluate: Callable[["Accelerator", list[SampleSums] | None], Scores]
) -> "Callable[[Accelerator, int], Scores]":
    """For `TrainSpec.evaluate_last`: a function that evaluates and then writes the record of `parts`.

    evaluate: (accelerator, samples) -> scores; adds the sums of all samples to `samples`, if it knows them.
    """

    def evaluate_last(accelerator: "Accelerator", step: int) -> Scores:
        samples: list[SampleSums] = []
        scores = evaluate(accelerator, samples)
        write(run, step, parts, samples)
        return scores

    return evaluate_last


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
    bounds = [count * row // max(1, min(count, MAX_ROWS)) for row in range(min(count, MAX_ROWS) + 1)]
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
        facts = {"code": evaluation_digest(), "content": content_samples(run)}
        write_json(run.path / VALIDATION, {**record, **facts})

    distributed.broadcast_from_rank0(replace)
