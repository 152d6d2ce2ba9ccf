"""Log-probabilities of replies under the initial model: computed once and saved in the run."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from src.data.mixture.dataset import leaves
from src.errors import RunError
from src.experiments.batches import to_device
from src.experiments.dataset_protocols import Batch, Dataset
from src.files import read_json, write_json
from src.support import distributed
from src.support.deferred import copy_frozen
from src.support.weights import is_unfilled
from src.systems.assistants.preferences.losses import AnswerSums, answer_logps
from src.training.validation import rank_batches

FILE = "reference.json"


class WithReference:
    """A data set of ranked replies with `reference_logps` in its batches."""

    def __init__(self, data: Any, logps: Mapping[str, Sequence[float]]) -> None:
        """logps: one number per row of a sample, by the sample's `digest`."""
        self.data, self.logps = data, logps

    @property
    def parts(self) -> "Mapping[str, WithReference]":
        """The parts of a mixture, or the data set itself."""
        inner_parts = getattr(self.data, "parts", None)
        return (
            {name: WithReference(part, self.logps) for name, part in inner_parts.items()} if inner_parts else {"": self}
        )

    def __getattr__(self, name: str) -> Any:
        """Delegate all other attributes to the data set."""
        if name in ("data", "logps"):
            raise AttributeError(name)
        return getattr(self.data, name)

    def __len__(self) -> int:
        return len(self.data)

    def sample(self, *key: Any) -> tuple[Any, Sequence[float]]:
        """A sample and the log-probabilities of its rows.

        Raises:
            RunError: the sample has changed since the log-probabilities were computed.
        """
        sample = self.data.sample(*key)
        logps = self.logps.get(digest(sample))
        if logps is None:
            raise RunError(
                f"sample {key}: {FILE} has no log-probabilities of it. "
                "Delete that file in the run to compute them again."
            )
        return sample, logps

    def collate(self, samples: Sequence[tuple[Any, Sequence[float]]]) -> Batch:
        """The data set's batch with `reference_logps`, (B,) float32."""
        batch = self.data.collate([sample for sample, _ in samples])
        return {**batch, "reference_logps": torch.tensor([value for _, values in samples for value in values])}


def digest(sample: Any) -> str:
    """Digest of a sample's tokens and loss mask. A mixture's sample has the digest of its part's sample."""
    while isinstance(sample, tuple):  # (number of the part, its sample)
        sample = sample[-1]
    return hashlib.blake2b(json.dumps([sample["input_ids"], sample["loss_mask"]]).encode(), digest_size=12).hexdigest()


def add_references(
    model: Any, train: Any, val: Any, run: Path, micro_batch: int, precision: str
) -> tuple[WithReference, WithReference]:
    """Both data sets with the summed log-probabilities of the learned tokens of each row of every sample.
    Loads them from the run if they are saved there, else computes and saves them.

    model: a causal language model with the initial weights, or built without weights; then a sharded copy is used.
    train, val: with the same samples in every epoch.
    Collective: each of W processes reads every W-th batch.

    Raises:
        RunError: the file cannot be written, or the run's file belongs to other data.
    """
    parts = {name: [part for _, part in leaves(name, data)] for name, data in (("train", train), ("val", val))}
    key = {name: [data.fingerprint for data in each] for name, each in parts.items()}
    path = run / FILE
    if distributed.broadcast_from_rank0(path.is_file):
        with distributed.raise_together():
            saved = read_json(path, RunError)
            if saved.get("of") != key:
                raise RunError(f"{path}: belongs to other data. Delete it to compute it again with the initial model.")
        logps = saved["logps"]
        return WithReference(train, logps), WithReference(val, logps)
    device = torch.device("cuda", distributed.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if is_deferred := is_unfilled(model):
        from src.training.parallel.fsdp import shard_model

        model = shard_model(copy_frozen(model, model), device, precision == "bfloat16", frozen=True)
    else:
        model.to(device).eval()
    datasets = itertools.chain(*parts.values())
    local_logps = [pair for data in datasets for pair in _logps(model, data, micro_batch, device, precision)]
    if not is_deferred:
        model.to("cpu")
    logps = dict(sorted(distributed.all_gather_list(local_logps)))
    with distributed.raise_together():
        if distributed.is_main():
            write_json(path, {"of": key, "logps": logps})
    return WithReference(train, logps), WithReference(val, logps)


@torch.no_grad()
def _logps(
    model: Any, data: Dataset, micro_batch: int, device: torch.device, precision: str
) -> Iterator[tuple[str, list[float]]]:
    dtype = getattr(torch, precision)
    for indices, counts in rank_batches(len(data), micro_batch):
        distributed.stop_together()
        samples = [data.sample(0, index) for index in indices]
        batch = to_device(data.collate(samples), device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logps = reply_sums(model, batch).logps
        if counts:
            rows = logps.cpu().split([len(sample["ranks"]) for sample in samples])
            yield from ((digest(sample), row_logps.tolist()) for sample, row_logps in zip(samples, rows, strict=True))


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable adapters, dropout and gradients inside the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers, training = [module for module in model.modules() if isinstance(module, BaseTunerLayer)], model.training
    model.eval()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        model.train(training)


def reply_sums(model: Any, batch: Mapping[str, Tensor]) -> AnswerSums:
    """`answer_logps` of a padded batch."""
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long(), use_cache=False)
    return answer_logps(output.logits, batch["input_ids"], batch["loss_mask"])


def log_ratios(model: Any, batch: Mapping[str, Tensor], source: str) -> tuple[AnswerSums, Tensor]:
    """The model's `reply_sums`, and log pi(y|x) - log pi_ref(y|x) of each row, (R,) float32.
    source: see `dpo.Preference.reference`; with "none" the second term is 0."""
    sums = reply_sums(model, batch)
    if source == "none":
        return sums, sums.logps
    if source == "stored":
        return sums, sums.logps - batch["reference_logps"]
    with adapters_off(model):
        reference = reply_sums(model, batch).logps
    return sums, sums.logps - reference
