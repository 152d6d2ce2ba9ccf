"""Encode the contexts of a prepared corpus with a base model, ahead of training: `python -m data_prep.preproc_nq`.

Reads <data_cache_path>/<corpus>, writes <data_cache_path>/processed_data/<model>/<corpus>: the same rows and, in `encoded`, the
hidden states of every distinct encoder input. Train on it with --data_path <data_cache_path>/processed_data/<model> and
{"data": {"encoded_contexts": True, ...}}. Started again, after a crash or with more rows, it encodes only what is missing.
"""

import argparse
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

if not __package__:  # run as a file rather than with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_prep import encoding_store, encoding_workers
from src import files
from src.config import Places
from src.data import encoded, encoded_shards, jsonl, questions, templates, tokenizers
from src.data.encoder_inputs import EncoderInputs, Rules, TooLong
from src.errors import ConfigError, DataError, UserError
from src.registry import MODELS, Part, bind

COMMAND = "python -m data_prep.preproc_nq"
PROCESSED = "processed_data"
_WINDOW = 64
"""Batches among which inputs of like length are put together."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """What to encode, by what, and where."""

    model: Part
    places: Places
    corpus: str
    rules: Rules
    devices: Sequence[str]
    """One worker each."""
    batch_size: int = 8
    dtype: str = "bfloat16"
    """Of the states on disk."""
    verify: bool = False
    """Whether the checksums of all that is there are compared; what is damaged is encoded anew."""
    commit_seconds: float = 1.0
    """Work that may be lost in a crash."""


@dataclass
class Counts:
    """What a run did."""

    rows: int = 0
    inputs: int = 0
    """Distinct ones."""
    too_long: int = 0
    """Distinct contexts that did not fit."""
    kept: int = 0
    """Inputs that were encoded before."""
    encoded: int = 0
    keys: set[bytes] = field(default_factory=set, repr=False)
    texts: set[bytes] = field(default_factory=set, repr=False)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exits 1 with one line on a mistake that the user can mend."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    start = time.monotonic()
    try:
        request = _request(options)
        counts = prepare(request)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{folder_of(request)}: {counts.rows} rows, {counts.inputs} distinct inputs, {counts.encoded} encoded now, {counts.kept} before; "
        f"{counts.too_long} contexts were too long ({request.rules.too_long}). {time.monotonic() - start:.1f} s"
    )
    print(f"Train on them with: --data_path {folder_of(request).parent}")
    return 0


def prepare(request: Request) -> Counts:
    """Encode what is not encoded yet, and write the rows beside it.

    Raises:
        ConfigError: the base has no weights yet, or the folder holds states of another one.
        DataError: the corpus is missing or malformed, or a context is too long and that is refused.
        RunError: another process encodes into the folder, a worker failed, or the disk refuses.
    """
    source = jsonl.corpus(request.places, request.corpus)
    jsonl.require_splits(request.places, request.corpus)
    base, hidden_size = _base(request)
    folder = folder_of(request) / encoded.FOLDER
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with encoding_store.alone(folder):
        store = encoding_store.opened(folder, {"model": base, "hidden_size": hidden_size, "dtype": request.dtype})
        known = encoding_store.recovered(folder, store, request.verify)
        source_tokenizer = request.model.ask("tokenizer", request.places) or request.model.config.path  # type: ignore[attr-defined]  hf has one
        tokenizer = tokenizers.load(source_tokenizer)
        prompter = templates.Prompter(tokenizers.Encoder(tokenizer), request.rules.template)
        questions.require_room("context_tokens", request.rules.context_tokens, prompter.fixed_context_tokens + 1)
        counts = Counts()
        missing = _missing(source, EncoderInputs(prompter, request.rules), known, counts)
        job = encoding_workers.Job(request.model, request.places, folder, hidden_size, request.dtype, request.commit_seconds)
        counts.encoded = encoding_workers.encode_all(job, _batches(missing, request.batch_size), request.devices)
        counts.inputs, counts.kept = len(counts.keys), len(counts.keys) - counts.encoded
        encoding_store.recovered(folder, store, verify=False)
        made = {
            **asdict(request.rules),
            "corpus": jsonl.fingerprint(source),
            "tokenizer": encoded.tokenizer_digest(tokenizer),
            "rows": counts.rows,
            "inputs": counts.inputs,
            "contexts_too_long": counts.too_long,
        }
        _finish(folder, store, made, source)
    return counts


def folder_of(request: Request) -> Path:
    """Where the rows and their states are written."""
    config = request.model.config
    name = getattr(config, "exp_id", None) or Path(config.path).name  # type: ignore[attr-defined]  hf has one
    return request.places.data / PROCESSED / name / request.corpus


def _base(request: Request) -> tuple[dict[str, Any], int]:
    """The identity of the base, and its hidden size."""
    request.model.ask("check", request.places)
    sizes = request.model.ask("architecture", request.places)
    base = encoded.identity(request.model, request.places)
    if base is None:
        raise ConfigError(f"{request.model.name}: not trained yet, so there is nothing to encode with. Train it first.")
    if sizes is None:
        raise ConfigError(f"{encoded.described(base)}: no decoder that cross-attention can be attached to.")
    if sizes.max_positions is not None and request.rules.context_tokens > sizes.max_positions:
        raise ConfigError(
            f"--maximum_input_length: {request.rules.context_tokens} tokens are more than the {sizes.max_positions} positions of the base."
        )
    return base, sizes.hidden_size


def _missing(source: Path, inputs: EncoderInputs, known: set[bytes], counts: Counts) -> Iterator[list[int]]:
    """Encoder inputs of all rows that are not among the `known` keys, each once. Fills `counts`."""
    for name in _row_files(source):
        for number, row in enumerate(jsonl.read_rows(source / name, questions.FIELDS, questions.OPTIONAL), 1):
            counts.rows += 1
            question = row["question"] if inputs.rules.questions_on_contexts else ""
            text = hashlib.sha256(json.dumps([questions.all_contexts(row), question]).encode()).digest()
            if text in counts.texts:
                continue
            counts.texts.add(text)
            try:
                chunks, too_long = inputs.counted(row, row["question"])
            except DataError as error:
                raise DataError(f"{source / name}:{number}: {error}") from None
            counts.too_long += too_long
            for ids in chunks:
                key = encoded.key_of(ids)
                if key not in counts.keys:
                    counts.keys.add(key)
                    if key not in known:
                        yield ids


def _row_files(source: Path) -> list[str]:
    return sorted(name for name in files.read_manifest(source, DataError)["files"] if re.fullmatch(r"[^/]+\.jsonl", name))


def _batches(inputs: Iterator[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Batches of inputs of like length: each window of the stream is sorted."""
    window: list[list[int]] = []
    for ids in inputs:
        window.append(ids)
        if len(window) == size * _WINDOW:
            yield from _sorted_batches(window, size)
            window = []
    yield from _sorted_batches(window, size)


def _sorted_batches(window: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    ordered = sorted(window, key=len, reverse=True)
    yield from (ordered[first : first + size] for first in range(0, len(ordered), size))


def _finish(folder: Path, store: dict[str, Any], made: dict[str, Any], source: Path) -> None:
    """List the shards, and put the rows beside them. What was prepared for other rows is so no longer."""
    options = {name: made[name] for name in encoded.FLAGS}
    others = [p for p in store["prepared"] if p["corpus"] == made["corpus"] and {n: p[n] for n in encoded.FLAGS} != options]
    store["prepared"] = [*others, made]
    files.write_json(folder / encoded.STORE, store)
    manifest, target = files.read_manifest(source, DataError), folder.parent
    facts = {k: made[k] for k in ("rows", "inputs", "contexts_too_long", *encoded.FLAGS)}
    new = {
        **manifest,
        "encoded": {**facts, "command": COMMAND, "model": store["model"], "dtype": store["dtype"], "source": made["corpus"]},
    }
    if not (target / files.MANIFEST).exists() or files.read_manifest(target, DataError) != new:
        for name in new["files"]:
            _copy(source / name, target / name)
        files.write_json(target / files.MANIFEST, new)


def _copy(source: Path, target: Path) -> None:
    beside = target.with_name(f".{target.name}.new")
    with files.writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, beside)
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, target)


def _request(options: argparse.Namespace) -> Request:
    raw: dict[str, Any] = {"name": "hf", "path": options.embedding_model, "dtype": options.model_dtype}
    if re.fullmatch(r"[0-9a-f]{32}", options.embedding_model):
        raw = {"name": "experiment", "exp_id": options.embedding_model}
    for name in ("maximum_input_length", "batch_size", "num_proc"):
        given = getattr(options, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {given}.")
    rules = Rules(options.maximum_input_length, options.template, options.questions_on_contexts, options.chunked_contexts, options.too_long)
    return Request(
        bind(MODELS, raw),
        Places(options.data_cache_path, options.savedir_base),
        options.corpus,
        rules,
        _devices(options.devices, options.num_proc),
        options.batch_size,
        options.dtype,
        options.verify,
    )


def _devices(named: str | None, num_proc: int | None) -> list[str]:
    """One device for each worker."""
    import torch

    if named:
        listed = [name.strip() for name in named.split(",") if name.strip()]
        if num_proc not in (None, len(listed)):
            raise ConfigError(f"--num_proc: {num_proc}, but --devices names {len(listed)}. Leave one of the two out.")
        return listed
    gpus = torch.cuda.device_count()
    if gpus and (num_proc or 1) > gpus:
        raise ConfigError(f"--num_proc: {num_proc}, but there are {gpus} GPUs, one for each process. Ask for no more, or name --devices.")
    return [f"cuda:{i}" for i in range(num_proc or gpus)] if gpus else ["cpu"] * (num_proc or 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--embedding_model", required=True, help="the base: a folder of save_pretrained, a hub id in the cache, or an experiment's id")
    add("--maximum_input_length", type=int, required=True, help="most tokens of an encoder input: data.context_tokens of the experiments")
    add("--batch_size", type=int, default=8, help="inputs in one batch (default: %(default)s)")
    add("--num_proc", type=int, help="worker processes, each on a GPU of its own (default: all GPUs, or one process)")
    add("--data_cache_path", type=Path, required=True, help="folder of prepared corpora; processed_data is made in it")
    add("--corpus", default="nq", help="folder of the prepared corpus (default: %(default)s)")
    add("--template", choices=get_args(templates.Name), default="assistant", help="data.template (default: %(default)s)")
    add("--chunked_contexts", action="store_true", help="data.chunked_contexts: each context is encoded on its own")
    add("--questions_on_contexts", action="store_true", help="data.questions_on_contexts: the question stands before each context")
    add("--too_long", choices=get_args(TooLong), default="truncate", help="data.too_long, of longer contexts (default: %(default)s)")
    add("--dtype", choices=sorted(encoded_shards.DTYPES), default="bfloat16", help="of the states on disk (default: %(default)s)")
    add("--model_dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the base (default: %(default)s)")
    add("--devices", help="such as cuda:0,cuda:1 or cpu,cpu (default: the GPUs, or cpu)")
    add("--savedir_base", "-sb", type=Path, default=Path("results/runs"), help="where an experiment that is the base was trained")
    add("--verify", action="store_true", help="compare the checksums of all that is there; what is damaged is encoded anew")
    return parser


if __name__ == "__main__":
    sys.exit(main())
