"""Answers questions on contexts with a trained run, here or as a small server.

python -m src.serving.ask RUN --context notes.txt "What is due on Monday?" "Who is to do it?"
python -m src.serving.ask RUN --serve 8080
curl localhost:8080 -d '{"context": "The cat is red.", "question": "What colour is the cat?"}'

RUN is a save directory, the beginning of its id, or a checkpoint. The server answers {"answer": "..."}, and what it cannot with
{"error": "..."} and the status 400. Requests that wait are answered together; each context is encoded once, as long as it is among those
that were read last.
"""

import argparse
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from src.command_line import make_parser, parse_arguments, run_command
from src.config import Places
from src.data.qa import cross_attention as qa
from src.errors import ConfigError, DataError
from src.files import reading
from src.interfaces import load_experiment
from src.models.load import add_options, checkpoint_folder, load, move
from src.runs.metadata import expand_run, read_exp_dict
from src.served_page import add_access

log = logging.getLogger(__name__)

MAX_BATCH = 32
"""Requests that are answered at once."""
CACHED_CONTEXTS = 16
MAX_BYTES = 1 << 24


class Query(NamedTuple):
    """A question about a context."""

    context: str
    question: str


class Answerer:
    """A cross-attention model that answers as the experiment that trained it reads its data."""

    def __init__(self, model: Any, tokenizer: Any, data: qa.Config, max_new_tokens: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._data = data.model_copy(update={"encoded_contexts": False, "include_contexts": False, "fixed_length": False})
        self._max_new_tokens = max_new_tokens
        self._encoded: OrderedDict[str, Any] = OrderedDict()

    def to(self, device: str | None) -> None:
        """Move the model, as `models.load.move` does."""
        move(self._model, device)

    def answer(self, asked: Sequence[Query]) -> list[str]:
        """Greedy answers, in order. Questions on one context are generated together.

        Raises:
            DataError: a context is too long, and the experiment says to refuse such.
        """
        import torch

        rows = [{"context": context, "question": question, "answer": "", "dataset": ""} for context, question in asked]
        data = qa.QADataset(self._data, rows, self._tokenizer, 0, both_views=False, fingerprint="")
        samples = [data.prompt(i) for i in range(len(rows))]
        together: dict[str, list[int]] = {}  # by context
        for i, sample in enumerate(samples):
            together.setdefault(json.dumps(sample["context_chunks"]), []).append(i)
        found, end = [""] * len(rows), self._tokenizer.eos_token_id
        for key, indices in together.items():
            tensors: Any = data.collate_prompts([samples[i] for i in indices])
            batch = {name: tensor.to(self._model.base.device) for name, tensor in tensors.items()}
            with torch.no_grad(), self._model.reading(self._context(key, batch)):
                ids = self._model.generate(
                    batch["input_ids"],
                    batch["attention_mask"],
                    do_sample=False,
                    max_new_tokens=self._max_new_tokens,
                    eos_token_id=end,
                    pad_token_id=end,
                )
            texts = self._tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            for i, text in zip(indices, texts, strict=True):
                found[i] = text.strip()
        return found

    def _context(self, key: str, batch: dict[str, Any]) -> Any:
        """The encoded context of a batch whose rows share it."""
        if key not in self._encoded:
            self._encoded[key] = self._model.make_context(batch["context_ids"][:1], batch["context_mask"][:1])
            while len(self._encoded) > CACHED_CONTEXTS:
                self._encoded.popitem(last=False)
        self._encoded.move_to_end(key)
        return self._encoded[key]


def load_answerer(source: Path, places: Places, max_new_tokens: int | None = None) -> Answerer:
    """Of a run or a checkpoint. max_new_tokens: None for those of the experiment's answers, or else 32.

    Raises:
        ConfigError: it was not trained to answer questions on contexts by cross-attention.
        UserError: a part of the model is missing.
    """
    source = expand_run(source, places.runs)
    run = checkpoint_folder(source).parents[1]
    recipe: Any = load_experiment(read_exp_dict(run), str(run))
    data = getattr(recipe, "data", None)
    if not isinstance(data, qa.Config):
        raise ConfigError(f"{run}: not trained to read contexts by cross-attention (data set 'qa'), so it cannot be asked on one.")
    asked = recipe.answers or recipe.inference
    model, tokenizer = load(source, places)
    return Answerer(model, tokenizer, data, max_new_tokens or (asked.max_new_tokens if asked else 32))


class AskRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")
    context: str
    question: str


def make_server(answerer: Answerer, options: argparse.Namespace) -> Any:
    """The server of --serve. options: of `src.served_page.add_address`.

    Raises:
        ConfigError: the address or the port is not free.
    """
    from src.serving.http import Batcher, Endpoint, Server

    batcher = Batcher[Query, str](answerer.answer, MAX_BATCH)

    async def answer(request: AskRequest) -> dict[str, str]:
        return {"answer": await batcher.submit(Query(request.context, request.question))}

    return Server([Endpoint("POST", "/", answer, AskRequest)], MAX_BYTES, options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.serving.ask", __doc__)
    add = parser.add_argument
    add("run", type=Path, help="a save directory, the beginning of its id, or a checkpoint")
    add("questions", nargs="*", help="answered one a line")
    add("--context", type=Path, metavar="FILE", help="what they are asked on, as UTF-8 text")
    add("--serve", type=int, metavar="PORT", help="answer requests instead; 0 for any free port")
    add_access(parser, "anyone with the token can ask")
    add("--max_new_tokens", type=int, help="of an answer (default: the experiment's)")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    if (args.serve is None) == (args.context is None) or bool(args.context) != bool(args.questions):
        raise ConfigError("expected --context FILE with questions, or --serve PORT.")
    answerer = load_answerer(args.run, Places(args.data_path, args.savedir_base), args.max_new_tokens)
    answerer.to(args.device)
    if args.context:
        context = _read_text(args.context)
        for text in answerer.answer([Query(context, question) for question in args.questions]):
            sys.stdout.write(f"{text}\n")
        return 0
    args.port = args.serve
    server = make_server(answerer, args)
    log.info("Answering. Press Ctrl-C to stop.")
    server.run()
    return 0


def _read_text(path: Path) -> str:
    try:
        with reading(path, DataError):
            return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}).") from None


if __name__ == "__main__":
    sys.exit(main())
