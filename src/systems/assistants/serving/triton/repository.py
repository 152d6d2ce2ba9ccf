"""Export a trained run to a Triton model repository, which serves its scores over gRPC and HTTP.

python -m src.systems.assistants.serving.triton.repository RUN FOLDER --mode rm
    rewards of a reward model
python -m src.systems.assistants.serving.triton.repository RUN FOLDER --mode ref
    log-probabilities of tokens by a decoder (the same as --mode sft)
python -m src.systems.assistants.serving.triton.repository RUN FOLDER --mode rm --backend pytorch
    a traced model, for servers without this project

RUN is the save directory of a finished run, or a prefix of its id. FOLDER can have several models; a model of the same
run is replaced. The Python backend loads the last checkpoint from the run. The config has the model's fingerprint, so a
training can verify the model that it queries.
"""

import argparse
import json
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from src.errors import ConfigError, RunError
from src.experiments.config import Places
from src.files import MANIFEST, new_directory, read_manifest, write_json, writing
from src.models.load import ROOT, add_options
from src.serving.served_model import MODES, ServedModel, check_mode, find_run, fingerprint_of, load_served
from src.support.command_line import make_parser, parse_arguments, run_command
from src.systems.assistants.rewards.kserve import FINGERPRINT

log = logging.getLogger(__name__)

MARKER = "repository.json"
"""File that marks a folder as a repository written by this command."""
KIND = "trainval's models for Triton"
BACKENDS = ("python", "pytorch")
TRACED_TOKENS, MAX_BATCH = 512, 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_PBTXT = """\
# Written by src.systems.assistants.serving.triton.repository.
# There is no dynamic batching: a request is a batch of its own, with its own padding.
name: {name}
{backend}
max_batch_size: {max_batch}
input [
  {{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT32 dims: [ -1 ] }}
]
output [ {{ name: {output} data_type: TYPE_FP32 {dims} }} ]
instance_group [ {{ count: 1 {device} }} ]
parameters {{ key: {key} value {{ string_value: {fingerprint} }} }}
"""
_MODEL = """\
# Written by src.systems.assistants.serving.triton.repository. The server's Python imports it.
import sys

sys.path.insert(0, {root!r})

from src.systems.assistants.serving.triton.backend import Model


class TritonPythonModel(Model):
    run, data, mode = {run!r}, {data!r}, {mode!r}
"""


def name_model(text: str) -> str:
    """The model name of a run: "/" becomes "-".

    Raises:
        ConfigError: it cannot be a folder's name.
    """
    name = text.replace("/", "-")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{text!r}: invalid model name. "
            "Expected letters, digits, '.', '_' and '-', starting with a letter or a digit."
        )
    return name


def list_models(folder: Path) -> dict[str, dict[str, Any]]:
    """ "mode", "output", "backend", "fingerprint" and "run" of each model in a repository, by model name.

    Raises:
        RunError: the folder is not a repository written by this command, or a model in it is damaged.
    """
    if not (folder / MARKER).is_file():
        raise RunError(
            f"{folder}: not a model repository of this project. "
            f"Write one with python -m src.systems.assistants.serving.triton.repository RUN {folder} --mode rm"
        )
    places = sorted(path.parent for path in folder.glob(f"[!.]*/{MANIFEST}"))
    return {place.name: read_manifest(place, RunError)["triton"] for place in places}


def check_folder(folder: Path, name: str) -> None:
    """Check that nothing else would be overwritten.

    Raises:
        RunError: the folder or the model's subfolder was not written by this command.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: not a folder. Use a new folder, or a model repository of this command.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise RunError(f"{folder}: not empty, and not a model repository of this command. Use a new folder.")
    if (folder / name).is_symlink() or ((folder / name).exists() and "triton" not in _read_facts(folder / name)):
        raise RunError(f"{folder / name}: not written by this command. Move it, or use another --name.")


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        return read_manifest(folder, RunError)
    except RunError:
        return {}


def write_model(source: Path, folder: Path, places: Places, options: argparse.Namespace) -> str:
    """Write the model of a run into the repository `folder`; returns the model's name.

    options: mode, backend, name, max_batch, device.

    Raises:
        ConfigError: the run is not finished, its model is of a wrong kind, or an option is invalid.
        RunError: the folder was not written by this command, or cannot be written.
    """
    if options.max_batch < 1:
        raise ConfigError(f"--max_batch: expected at least 1, got {options.max_batch}.")
    run, places = find_run(source, places)
    name = name_model(options.name or run.name)
    check_folder(folder, name)
    output, fingerprint = check_mode(run, places, options.mode), fingerprint_of(run, places)
    facts = {
        "mode": options.mode,
        "output": output,
        "backend": options.backend,
        "fingerprint": fingerprint,
        "run": str(run),
    }
    config = _PBTXT.format(
        name=_quote(name),
        backend='backend: "python"'
        if options.backend == "python"
        else 'platform: "pytorch_libtorch"\ndefault_model_filename: "traced-model.pt"',
        max_batch=options.max_batch,
        output=_quote(output),
        dims="dims: [ -1 ]"
        if output == "logps"
        else "dims: [ 1 ]" + (" reshape { shape: [ ] }" if options.backend == "pytorch" else ""),
        device=_write_device(options.device),
        key=_quote(FINGERPRINT),
        fingerprint=_quote(fingerprint),
    )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MARKER).is_file():
        write_json(folder / MARKER, {"kind": KIND})
    with new_directory(folder / name, {"triton": facts}) as model_folder:
        (model_folder / "config.pbtxt").write_text(config, encoding="utf-8")
        (model_folder / "1").mkdir()
        if options.backend == "python":
            model = _MODEL.format(
                root=str(ROOT), run=str(run.resolve()), data=str(places.data.resolve()), mode=options.mode
            )
            (model_folder / "1" / "model.py").write_text(model, encoding="utf-8")
        else:
            trace(load_served(run, places, options.device, options.mode)).save(
                str(model_folder / "1" / "traced-model.pt")
            )
    return name


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _write_device(device: str | None) -> str:
    """The part of a model's config that defines its device."""
    import torch

    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if match is None:
        raise ConfigError(f"--device: expected cpu, cuda or cuda:N, got {device!r}.")
    return "kind: KIND_CPU" if match[0] == "cpu" else f"kind: KIND_GPU gpus: [ {match[1] or 0} ]"


def trace(model: ServedModel) -> Any:
    """Trace the model with torch.jit.trace on a padded example, and compare the trace on batches of other sizes.

    Raises:
        ConfigError: they differ by more than rounding, because the model depends on sizes in a way that cannot be
            traced.
    """
    import torch

    for part in model.module.modules():
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    longest = min(TRACED_TOKENS, model.longest or TRACED_TOKENS)
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns about sizes, which are compared below
        traced_model: Any = torch.jit.trace(model.module, _make_batch(model, 2, longest), check_trace=False)
        for sizes in ((1, 1), (3, longest), (5, max(longest // 3, 2))):
            batch = _make_batch(model, *sizes)
            try:
                difference = (traced_model(*batch).float() - model.module(*batch).float()).abs().max().item()
            except (RuntimeError, IndexError) as error:
                raise ConfigError(
                    f"the traced model fails on {sizes[0]} x {sizes[1]} tokens ({str(error)[:80]!r}). "
                    "Use --backend python."
                ) from None
            if not difference <= 1e-4:
                raise ConfigError(
                    f"the traced model differs by {difference:.2g} on {sizes[0]} x {sizes[1]} tokens. "
                    "Use --backend python."
                )
    return traced_model


def _make_batch(model: ServedModel, rows: int, tokens: int) -> tuple[Any, Any]:
    """Padded ids and their mask, like those of clients."""
    import torch

    ids = torch.arange(rows * tokens, dtype=torch.int32).reshape(rows, tokens) * 7919 % model.vocabulary
    lengths = torch.tensor([max(tokens - row * (tokens // 4), 1) for row in range(rows)])
    mask = (torch.arange(tokens)[None] < lengths[:, None]).int()
    return (ids * mask).to(model.device), mask.to(model.device)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.systems.assistants.serving.triton.repository", __doc__)
    add = parser.add_argument
    add("run", type=Path, help="a save directory, or a prefix of its id")
    add("folder", type=Path, help="the model repository; created if missing")
    add("--mode", choices=list(MODES), required=True, help="rm: rewards. sft, ref: log-probabilities of tokens")
    add("--backend", choices=BACKENDS, default="python", help="default: %(default)s")
    add("--name", help="name of the model in addresses; / becomes - (default: the run's id)")
    add("--max_batch", type=int, default=MAX_BATCH, help="maximum sequences per request (default: %(default)s)")
    add_options(parser)
    args = parse_arguments(parser, argv)

    def act() -> int:
        name = write_model(args.run, args.folder, Places(args.data_path, args.savedir_base), args)
        log.info(
            "%s: model %s. Next: python -m src.systems.assistants.serving.triton.server %s",
            args.folder,
            name,
            args.folder,
        )
        return 0

    return run_command(act)


if __name__ == "__main__":
    sys.exit(main())
