"""Answer questions about contexts with a model, on the command line or as a server.

python -m src.systems.crossattn.ask MODEL --context notes.txt "When is it due?" "Is it done?"
python -m src.systems.crossattn.ask MODEL --serve 8080 --token secret
curl 'localhost:8080/?token=secret' -d '{"context": "The cat is red.", "question": "Which color is the cat?"}'

MODEL is a run (its save directory or a prefix of its id), a checkpoint, an export, a folder of save_pretrained, or an
id on the hub. A cross-attention model reads the context as in its experiment. All other models read it in their prompt.
The server answers {"answer": "..."}, or {"error": "..."} with status 403 to 500. Waiting requests are batched. Recent
contexts are cached.
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

from src.errors import ConfigError, DataError
from src.experiments.config import Places
from src.experiments.interfaces import load_experiment
from src.files import reading
from src.models.load import add_options, checkpoint_folder, load, move
from src.runs.store import SavedRun
from src.serving.pretrained import SOURCE, find_source, is_pretrained, load_writer
from src.serving.terminal import write_remarks
from src.serving.writer import Writer, describe_truncation
from src.support.command_line import make_parser, parse_arguments, run_command
from src.support.served_page import add_access
from src.systems.crossattn.data import cross_attention

log = logging.getLogger(__name__)

MAX_BATCH = 32
"""Maximum number of requests in a batch."""
CACHED_CONTEXTS = 16
MAX_BYTES = 1 << 24


class Query(NamedTuple):
    """A question about a context."""

    context: str
    question: str


class Answerer:
    """A cross-attention model that reads contexts as in the experiment that trained it."""

    remarks: Sequence[str] = ()
    """`Writer.remark` of each of the last answers."""

    def __init__(self, model: Any, tokenizer: Any, data: cross_attention.Config, max_new_tokens: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._data = data.model_copy(
            update={"encoded_contexts": False, "include_contexts": False, "fixed_length": False}
        )
        self._max_new_tokens = max_new_tokens
        self._encoded: OrderedDict[str, Any] = OrderedDict()

    def to(self, device: str | None) -> None:
        """Move the model, as `models.load.move` does."""
        move(self._model, device)

    def answer(self, queries: Sequence[Query]) -> list[str]:
        """Greedy answers, in order. Questions about the same context are answered in one batch.

        Raises:
            DataError: a context is too long, and the experiment does not truncate contexts.
        """
        import torch

        rows = [
            {"context": context, "question": question, "answer": "", "dataset": ""} for context, question in queries
        ]
        data = cross_attention.QADataset(self._data, rows, self._tokenizer, 0, both_views=False, fingerprint="")
        samples = [data.prompt(i) for i in range(len(rows))]
        together: dict[str, list[int]] = {}  # by context
        for i, sample in enumerate(samples):
            together.setdefault(json.dumps(sample["context_chunks"]), []).append(i)
        texts_by_row, end = [""] * len(rows), self._tokenizer.eos_token_id
        self.remarks = remarks = [""] * len(rows)
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
            for i, new in zip(indices, ids[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
                texts_by_row[i] = self._tokenizer.decode(new, skip_special_tokens=True).strip()
                remarks[i] = describe_truncation(new, self._max_new_tokens, [end])
        return texts_by_row

    def _context(self, key: str, batch: dict[str, Any]) -> Any:
        """The encoded context, shared by all rows of a batch."""
        if key not in self._encoded:
            self._encoded[key] = self._model.make_context(batch["context_ids"][:1], batch["context_mask"][:1])
            while len(self._encoded) > CACHED_CONTEXTS:
                self._encoded.popitem(last=False)
        self._encoded.move_to_end(key)
        return self._encoded[key]


class PromptAnswerer:
    """A model that reads the context in its prompt: a chat message, or a text to continue."""

    remarks: Sequence[str] = ()
    """`Writer.remark` of each of the last answers."""

    def __init__(self, writer: Writer, model: Any, max_new_tokens: int) -> None:
        self._writer, self._model = writer, model
        self._options = {"max_new_tokens": max_new_tokens, "do_sample": False}

    def to(self, device: str | None) -> None:
        """Move the model, as `models.load.move` does."""
        move(self._model, device)

    def answer(self, queries: Sequence[Query]) -> list[str]:
        """Greedy answers, in order, generated one at a time.

        Raises:
            ConfigError: a context is too long for the model.
        """
        self.remarks = remarks = list[str]()
        texts = []
        for query in queries:
            texts.append(self._writer.ask(query.context, query.question, **self._options).strip())
            remarks.append(self._writer.remark)
        return texts


def load_answerer(source: Path, places: Places, max_new_tokens: int | None = None) -> Answerer | PromptAnswerer:
    """Load a model. source: see `pretrained.SOURCE`.
    max_new_tokens: None for the experiment's setting, or 32.

    Raises:
        ConfigError: the model cannot answer questions.
        UserError: a part of the model is missing.
    """
    source = find_source(source, places)
    if not is_pretrained(source):
        folder = checkpoint_folder(source)
        run = folder.parents[1]
        recipe: Any = load_experiment(SavedRun(run).exp, str(run))
        data = getattr(recipe, "data", None)
        if isinstance(data, cross_attention.Config):
            setting = recipe.answers or recipe.inference
            return Answerer(*load(folder, places), data, max_new_tokens or (setting.max_new_tokens if setting else 32))
    writer, model = load_writer(source, places)
    return PromptAnswerer(writer, model, max_new_tokens or 32)


class AskRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")
    context: str
    question: str


def make_server(answerer: Answerer | PromptAnswerer, options: argparse.Namespace) -> Any:
    """The server of --serve. options: of `src.support.served_page.add_address`.

    Raises:
        ConfigError: the address or the port is not free.
    """
    from src.serving.http import Batcher, Endpoint, Server

    batcher = Batcher[Query, str](answerer.answer, MAX_BATCH if isinstance(answerer, Answerer) else 1)

    async def answer(request: AskRequest) -> dict[str, str]:
        return {"answer": await batcher.submit(Query(request.context, request.question))}

    return Server([Endpoint("POST", "/", answer, AskRequest)], MAX_BYTES, options, batcher)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.systems.crossattn.ask", __doc__)
    add = parser.add_argument
    add("run", metavar="MODEL", type=Path, help=SOURCE)
    add("questions", nargs="*", help="questions, each answered separately in a line, by greedy decoding")
    add("--context", type=Path, metavar="FILE", help="the context, as UTF-8 text")
    add("--serve", type=int, metavar="PORT", help="answer requests; 0 for a free port")
    add_access(parser, "anyone with the token can ask")
    add("--max_new_tokens", type=int, help="maximum tokens per answer (default: the experiment's, or 32)")
    add_options(parser)
    args = parse_arguments(parser, argv)
    return run_command(lambda: _act(args))


def _act(args: argparse.Namespace) -> int:
    if (args.serve is None) == (args.context is None) or bool(args.context) != bool(args.questions):
        raise ConfigError("expected either --context FILE with questions, or --serve PORT.")
    answerer = load_answerer(args.run, Places(args.data_path, args.savedir_base), args.max_new_tokens)
    answerer.to(args.device)
    if args.context:
        context = _read_text(args.context)
        texts = answerer.answer([Query(context, question) for question in args.questions])
        for text, remark in zip(texts, answerer.remarks, strict=True):
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
            write_remarks(not text, remark)
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
