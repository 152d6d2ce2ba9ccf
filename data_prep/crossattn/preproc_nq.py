"""Encode the contexts of a prepared corpus with a base model, ahead of training: `python -m
data_prep.crossattn.preproc_nq`.

Reads <data_cache_path>/<corpus>, writes <data_cache_path>/processed_data/<model>/<corpus>: the same rows and, in
`encoded`, the hidden states of every distinct encoder input. Train on it with --data_path
<data_cache_path>/processed_data/<model> and {"data": {"encoded_contexts": True, ...}}. If restarted after a crash or
with more rows, it encodes only the missing inputs.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: replace its folder by the root of the project
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_prep import command
from data_prep.crossattn import distinct_inputs, encoding_options, encoding_store, encoding_workers
from src import files
from src.data import jsonl
from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.experiments.interfaces import ModelConfig
from src.support.command_line import require_at_least
from src.systems.crossattn.data import encoded_shards, encoded_store
from src.systems.crossattn.data.encoder_inputs import EncodingOptions

COMMAND = "python -m data_prep.crossattn.preproc_nq"
PROCESSED_FOLDER = "processed_data"


@dataclass(frozen=True)
class Request:
    """Base model, corpus, folders and options of an encoding run."""

    model: ModelConfig
    places: Places
    corpus: str
    rules: EncodingOptions
    devices: Sequence[str]
    """Devices, with one worker each."""
    batch_size: int | None = 8
    batch_tokens: int | None = None
    dtype: str = "bfloat16"
    """Data type of the states on disk."""
    verify: bool = False
    """Whether to verify the checksums of all entries and encode damaged ones again."""
    commit_seconds: float = 1.0
    """Seconds between commits: the work that a crash can lose."""


def _run(**options: Any) -> None:
    start = time.monotonic()
    request = _request(argparse.Namespace(**options))
    counts = prepare(request)
    folder, seconds = folder_of(request), time.monotonic() - start
    command.report(
        f"{folder}: {counts.rows} rows, {counts.inputs} distinct inputs, {counts.encoded} encoded now, "
        f"{counts.num_reused} before; "
        f"{counts.too_long} contexts were too long ({request.rules.too_long}). {seconds:.1f} s\n"
        f"Train on them with: --data_path {folder.parent}",
        folder=folder,
        rows=counts.rows,
        inputs=counts.inputs,
        encoded=counts.encoded,
        reused=counts.num_reused,
        too_long=counts.too_long,
        seconds=seconds,
    )


def prepare(request: Request) -> distinct_inputs.Counts:
    """Encode the missing inputs, and write the rows of the corpus next to their states.

    Raises:
        ConfigError: the base has no weights yet, or the folder has states of another base.
        DataError: the corpus is missing or malformed, or a context is too long and that is refused.
        RunError: another process writes to the folder, a worker failed, or the disk refuses.
    """
    source = jsonl.corpus_folder(request.places, request.corpus)
    jsonl.require_splits(request.places, request.corpus)
    base, hidden_size = encoding_options.architecture(request.model, request.places, request.rules)
    folder = folder_of(request) / encoded_store.FOLDER
    with command.exclusive_lock(folder, f"{folder}: another process is encoding into it."):
        store = encoding_store.open_or_create(
            folder, {"model": base, "hidden_size": hidden_size, "dtype": request.dtype}
        )
        known_keys = encoding_store.recover(folder, store, request.verify)
        inputs, tokenizer = encoding_options.inputs(request.model, request.places, request.rules)
        counts = distinct_inputs.Counts()
        missing = distinct_inputs.missing(source, inputs, known_keys, counts)
        job = encoding_workers.Job(
            request.model, request.places, folder, hidden_size, request.dtype, request.commit_seconds
        )
        counts.encoded = encoding_workers.encode_all(
            job, distinct_inputs.batches(missing, request.batch_size, request.batch_tokens), request.devices
        )
        counts.inputs, counts.num_reused = len(counts.keys), len(counts.keys) - counts.encoded
        encoding_store.recover(folder, store, verify=False)
        facts = {
            **asdict(request.rules),
            "corpus": jsonl.fingerprint(source),
            "tokenizer": tokenizer,
            "rows": counts.rows,
            "inputs": counts.inputs,
            "contexts_too_long": counts.too_long,
        }
        _finish(folder, store, facts, source)
        _link(request)
    return counts


def folder_of(request: Request) -> Path:
    """Folder for the rows and their states."""
    config = request.model
    name = getattr(config, "exp_id", None) or Path(config.path).name  # type: ignore[attr-defined]  hf has one
    return request.places.data / PROCESSED_FOLDER / name / request.corpus


def _finish(folder: Path, store: dict[str, Any], new_facts: dict[str, Any], source: Path) -> None:
    """List the shards, and write the rows next to them. Existing rows are replaced."""
    options = {name: new_facts[name] for name in encoded_store.FLAGS}
    others = [
        p
        for p in store["prepared"]
        if p["corpus"] == new_facts["corpus"] and {n: p[n] for n in encoded_store.FLAGS} != options
    ]
    store["prepared"] = [*others, new_facts]
    files.write_json(folder / encoded_store.STORE, store)
    manifest, target = files.read_manifest(source, DataError), folder.parent
    facts = {k: new_facts[k] for k in ("rows", "inputs", "contexts_too_long", *encoded_store.FLAGS)}
    new = {
        **manifest,
        "encoded": {
            **facts,
            "command": COMMAND,
            "model": store["model"],
            "dtype": store["dtype"],
            "source": new_facts["corpus"],
        },
    }
    if not (target / files.MANIFEST).exists() or files.read_manifest(target, DataError) != new:
        for name in new["files"]:
            _copy(source / name, target / name)
        files.write_json(target / files.MANIFEST, new)


def _link(request: Request) -> None:
    """Link models and tokenizers into the folder of the encoded corpus, which will be the --data_path."""
    data, parent = request.places.data, folder_of(request).parent
    names = {path.parent.name for path in data.glob("*/tokenizer.json")} | {getattr(request.model, "path", "")}
    for name in sorted(names):
        link = parent / name
        if name and not Path(name).is_absolute() and (data / name).is_dir() and not link.exists():
            with files.writing(link):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)  # a broken link
                link.symlink_to(os.path.relpath(data / name, link.parent))


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.new")
    with files.writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)


def _request(options: argparse.Namespace) -> Request:
    positive = ("maximum_input_length", "batch_size", "batch_tokens", "num_proc")
    require_at_least(1, **{name: getattr(options, name) for name in positive})
    return Request(
        encoding_options.model(options),
        Places(options.data_cache_path, options.savedir_base),
        options.corpus,
        encoding_options.rules(options),
        _devices(options.devices, options.num_proc),
        options.batch_size or (None if options.batch_tokens else 8),
        options.batch_tokens,
        options.dtype,
        options.verify,
    )


def _devices(device_list: str | None, num_proc: int | None) -> list[str]:
    """List the devices, one per worker."""
    import torch

    if device_list:
        devices = [name.strip() for name in device_list.split(",") if name.strip()]
        if num_proc not in (None, len(devices)):
            raise ConfigError(
                f"--num_proc: {num_proc}, but --devices lists {len(devices)}. Remove one of the two options."
            )
        return devices
    gpus = torch.cuda.device_count()
    if gpus and (num_proc or 1) > gpus:
        raise ConfigError(
            f"--num_proc: {num_proc} processes, but only {gpus} GPUs, and each process needs one. "
            f"Use at most {gpus}, or set --devices."
        )
    return [f"cuda:{i}" for i in range(num_proc or gpus)] if gpus else ["cpu"] * (num_proc or 1)


def _add_options(parser: argparse.ArgumentParser) -> None:
    encoding_options.add(parser)
    add = parser.add_argument
    add(
        "--batch_tokens",
        type=int,
        metavar="N",
        help="maximum tokens in one batch, with padding: more inputs if they are short",
    )
    add("--num_proc", type=int, help="worker processes, each on a GPU of its own (default: all GPUs, or one process)")
    add(
        "--dtype",
        choices=sorted(encoded_shards.DTYPES),
        default="bfloat16",
        help="of the states on disk (default: %(default)s)",
    )
    add("--devices", help="such as cuda:0,cuda:1 or cpu,cpu (default: the GPUs, or cpu)")
    add(
        "--verify",
        action="store_true",
        help="compare the checksums of all records; damaged ones are encoded again",
    )


main = command.main_of(COMMAND, __doc__, _add_options, _run)

if __name__ == "__main__":
    sys.exit(main())
