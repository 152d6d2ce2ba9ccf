"""Talks with a model that was trained on conversations, or goes on writing with one of documents with metadata that you give.

python -m src.serving.chat RUN                                   a message a line from the keyboard; an end of file ends it
python -m src.serving.chat RUN "What is 2 + 3?"                  one answer
python -m src.serving.chat RUN --metadata url=docs.python.org "The module abc"

RUN is a save directory, the beginning of its id, or a checkpoint. Messages and metadata are written as the run's experiment writes them.
The line !reset begins a conversation anew.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from src.command_line import make_parser, parse_arguments, run_command
from src.config import Places, unknown_text
from src.data.conversations.dataset import ConversationConfig
from src.data.jsonl import check_text
from src.data.metadata import dataset as metadata
from src.data.metadata.annotations import COLUMNS, Annotated, Item, read_row
from src.data.metadata.examples import ExampleMaker
from src.data.parts import leaf_configs
from src.data.text.tokenizers import SafeTokenizer, control_ids
from src.errors import ConfigError, DataError, UserError
from src.interfaces import load_experiment
from src.models.load import PLACES, checkpoint_folder, load, move, quantize, require_8bit
from src.runs.metadata import expand_run, read_exp_dict
from src.serving.conversation import Talk


class Writer:
    """A model, and how its experiment writes metadata."""

    def __init__(self, model: Any, tokenizer: Any, data: metadata.Config) -> None:
        self._model, self._tokenizer, self._data = model, tokenizer, data
        self._maker = ExampleMaker(data.writing, SafeTokenizer(tokenizer), data.sequence_tokens)

    def items(self, texts: Iterable[str]) -> list[Item]:
        """The metadata of `KEY=VALUE` each.

        Raises:
            ConfigError: another form, a key that the experiment does not write of whole texts, or a date that is none.
        """
        items = []
        for text in texts:
            key, sign, value = text.partition("=")
            if not sign or not value:
                raise ConfigError(f"--metadata {text!r}: expected KEY=VALUE, such as url=docs.python.org.")
            spans = {kind.key for kind in COLUMNS.values()} - {kind.key for kind in COLUMNS.values() if kind.kind == "global"}
            known = [name for name in self._data.writing.keys if name not in spans]
            if key not in known:
                raise ConfigError(f"--metadata: {unknown_text('key', key, known)}")
            try:
                items += read_row({"text": "", "metadata": [{"key": key, "type": "global", "value": value}]}, "--metadata").items
            except DataError as error:
                raise ConfigError(str(error)) from None
        return items

    def prompt(self, beginning: str, items: Sequence[Item]) -> list[int]:
        """Ids of the metadata and of the beginning; of the end token, with which documents follow each other, where there is neither."""
        encoder, document = SafeTokenizer(self._tokenizer), Annotated(beginning, tuple(items))
        return [*self._maker.prefix_ids(document), *self._maker.text_ids(document)] or [encoder.eos_id]

    def write(self, beginning: str, items: Sequence[Item] = (), **options: Any) -> str:
        """The text that the model goes on with. options: of transformers' `generate`.

        Raises:
            ConfigError: it would be longer than the model can read.
        """
        import torch

        ids = torch.tensor([self.prompt(beginning, items)], device=self._model.device)
        longest = getattr(self._model.config, "max_position_embeddings", None)
        if longest and ids.shape[1] + options["max_new_tokens"] > longest:
            given = f"{ids.shape[1]} tokens of metadata and text and --max_new_tokens {options['max_new_tokens']}"
            raise ConfigError(f"{given} are more than the model's {longest}.")
        end = self._tokenizer.eos_token_id
        never = control_ids(self._tokenizer) or None
        with torch.no_grad():
            found = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), eos_token_id=end, pad_token_id=end, suppress_tokens=never, **options
            )
        # Decoded with the text before them: a tokenizer may drop a blank at the beginning.
        before, new = SafeTokenizer(self._tokenizer).encode(beginning), found[0, ids.shape[1] :].tolist()
        begun, text = (self._tokenizer.decode(part, skip_special_tokens=True) for part in (before, [*before, *new]))
        return text[len(begun) :]


def load_writer(source: Path, places: Places, gpu_of_8bit: str | None = None) -> tuple[Writer | Talk, Any]:
    """Of a run or a checkpoint; and its model. gpu_of_8bit: where its matrices are in 8 bits; None: as trained, on the CPU.

    Raises:
        ConfigError: it was not trained on conversations, nor on documents with metadata; it is a reward model; or not one for 8 bits.
        UserError: a part of the model is missing.
    """
    source = expand_run(source, places.runs)
    run = checkpoint_folder(source).parents[1]
    data = getattr(load_experiment(read_exp_dict(run), str(run)), "data", None)
    parts = [part for _, part in leaf_configs("data", data)] if data else []
    told = next((part for part in parts if isinstance(part, metadata.Config | ConversationConfig)), None)
    if told is None:
        raise ConfigError(f"{run}: not trained on conversations, nor on documents with metadata (data set 'metadata').")
    model, tokenizer = load(source, places)
    if gpu_of_8bit:
        model = quantize(model, gpu_of_8bit)
    return (Talk if isinstance(told, ConversationConfig) else Writer)(model, tokenizer, told), model  # type: ignore[arg-type]


def add_options(parser: argparse.ArgumentParser) -> None:
    """How is sampled, and where models are."""
    add = parser.add_argument
    add("--max_new_tokens", type=int, default=100, help="(default: %(default)s)")
    add("--temperature", type=float, default=0.8, help="of sampling; 0 for the likeliest token each time (default: %(default)s)")
    add("--top_p", type=float, default=0.95, help="share of the probability that is sampled from (default: %(default)s)")
    add("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    add("--device", help="such as cuda (default: the first GPU, or the CPU)")
    add("--data_path", type=Path, default=PLACES.data, metavar="DIR", help="prepared data sets")
    add("-sb", "--savedir_base", type=Path, default=PLACES.runs, metavar="DIR", help="save directories of the model's parents")


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `generate` of transformers takes, of `add_options`.

    Raises:
        ConfigError: a number is out of its range.
    """
    if args.max_new_tokens < 1 or not 0 <= args.temperature < math.inf or not 0 < args.top_p <= 1:
        raise ConfigError("expected --max_new_tokens of at least 1, --temperature from 0 on, and --top_p above 0 and up to 1.")
    sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p} if args.temperature else {"do_sample": False}
    return {"max_new_tokens": args.max_new_tokens, **sampling}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.serving.chat", __doc__)
    add = parser.add_argument
    add("run", type=Path, help="a save directory, the beginning of its id, or a checkpoint")
    add("beginnings", nargs="*", help="of texts, each of which is gone on with; or messages (default: lines from the keyboard)")
    add("--metadata", action="append", default=[], metavar="KEY=VALUE", help="what is known of the text; again for more")
    add("--8bit", dest="eight_bit", action="store_true", help="matrices in 8 bits, on a GPU, by bitsandbytes")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    import torch

    options = generation_options(args)
    gpu = require_8bit(args.device) if args.eight_bit else None
    writer, model = load_writer(args.run, Places(args.data_path, args.savedir_base), gpu)
    if isinstance(writer, Talk) and args.metadata:
        raise ConfigError("--metadata: conversations have none. Leave it out.")
    items = [] if isinstance(writer, Talk) else writer.items(args.metadata)
    if gpu is None:
        move(model, args.device)
    torch.manual_seed(args.seed)

    def answer(beginning: str) -> None:
        check_text(beginning, "what was said")
        if isinstance(writer, Talk):
            writer.answer(beginning, writer.streamer(), **options)
        else:
            sys.stdout.write(f"{beginning}{writer.write(beginning, items, **options)}\n")
        sys.stdout.flush()

    for beginning in args.beginnings:
        answer(beginning)
    for line in () if args.beginnings else sys.stdin:
        try:
            answer(line.rstrip("\n"))
        except UserError as error:  # what was said before is not lost
            sys.stderr.write(f"error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
