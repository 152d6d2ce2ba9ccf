"""Chat with a model, or continue texts with a model without a chat template.

python -m src.serving.chat MODEL                                 a chat in the terminal; /help lists its commands
python -m src.serving.chat MODEL "2 + 3?"                         one answer
python -m src.serving.chat MODEL "2 + 3?" "Plus 1?"               one conversation: the second answer reads the first
python -m src.serving.chat RUN --metadata url=docs.python.org "The module abc"

MODEL is a run (its save directory or a prefix of its id), a checkpoint, an export, a folder of save_pretrained, or an
id on the hub. Messages and metadata are formatted as in the run's experiment, or by the tokenizer's chat template.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from src.errors import ConfigError
from src.experiments.config import Places
from src.models.load import PLACES, move, require_8bit
from src.serving.pretrained import SOURCE, load_writer
from src.serving.terminal import Terminal
from src.support.command_line import make_parser, parse_arguments, run_command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options for sampling and for the folders of models."""
    add = parser.add_argument
    add(
        "--max_new_tokens",
        type=int,
        help="maximum tokens per answer (default: 100, or fewer if the model has no more positions)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0 for greedy decoding, to compare models (default: %(default)s)",
    )
    add("--top_p", type=float, default=0.95, help="nucleus sampling probability (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of sampling (default: %(default)s)")
    add("--device", help="such as cuda (default: the first GPU if any, else the CPU)")
    add("--data_path", type=Path, default=PLACES.data, metavar="DIR", help="prepared data sets")
    add(
        "-sb",
        "--savedir_base",
        type=Path,
        default=PLACES.runs,
        metavar="DIR",
        help="save directories of the model's parents",
    )


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments for transformers' `generate`, from the options of `add_options`.

    Raises:
        ConfigError: a number is out of range.
    """
    too_few = args.max_new_tokens is not None and args.max_new_tokens < 1
    if too_few or not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1:
        raise ConfigError(
            "expected --max_new_tokens >= 1, --temperature >= 0, and 0 < --top_p <= 1, "
            f"got {args.max_new_tokens}, {args.temperature:g} and {args.top_p:g}."
        )
    sampling = (
        {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}
        if args.temperature
        else {"do_sample": False}
    )
    return {"max_new_tokens": args.max_new_tokens, **sampling}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.serving.chat", __doc__)
    add = parser.add_argument
    add("run", metavar="MODEL", type=Path, help=SOURCE)
    add(
        "texts",
        metavar="TEXT",
        nargs="*",
        help="messages of one conversation, answered in order; or texts, continued separately by a model without a "
        "chat template (default: lines of standard input, with the commands of the chat)",
    )
    add("--metadata", action="append", default=[], metavar="KEY=VALUE", help="metadata of the text; repeatable")
    add("--8bit", dest="eight_bit", action="store_true", help="load matrices in 8 bits, on a GPU, with bitsandbytes")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    import torch

    options = generation_options(args)
    gpu = require_8bit(args.device) if args.eight_bit else None
    start = time.monotonic()
    if sys.stderr.isatty():
        sys.stderr.write(f"Loading {args.run} ...\n")
        sys.stderr.flush()
    writer, model = load_writer(args.run, Places(args.data_path, args.savedir_base), gpu)
    terminal = Terminal(writer, args.metadata, options)
    if gpu is None:
        move(model, args.device)
    if sys.stderr.isatty():
        sys.stderr.write(f"Loaded in {time.monotonic() - start:.1f} s, on {model.device}.\n")
    torch.manual_seed(args.seed)
    for text in args.texts:
        terminal.answer(text)
    if not args.texts:
        terminal.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
