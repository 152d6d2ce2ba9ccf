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
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from src.command_line import make_parser, parse_arguments, run_command
from src.config import Places
from src.data.qa import cross_attention as qa
from src.errors import ConfigError, DataError, UserError
from src.files import parse_json, reading
from src.interfaces import load_experiment
from src.models.load import add_options, checkpoint_folder, load, move
from src.runs.metadata import expand_run, read_exp_dict

log = logging.getLogger(__name__)

TOGETHER = 32
"""Most requests that are answered at once."""
KEPT_CONTEXTS = 16
LONGEST_REQUEST = 1 << 24


class Asked(NamedTuple):
    """A question on a context."""

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

    def answer(self, asked: Sequence[Asked]) -> list[str]:
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
            while len(self._encoded) > KEPT_CONTEXTS:
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


class Server(ThreadingHTTPServer):
    """Reads requests in threads, and answers them in one, many at once."""

    daemon_threads = True

    def __init__(self, answerer: Answerer, host: str, port: int) -> None:
        super().__init__((host, port), _Handler)
        self._answerer = answerer
        self._waiting: queue.Queue[tuple[Asked, Future[str]]] = queue.Queue()
        threading.Thread(target=self._answer_all, name="answers", daemon=True).start()

    def ask(self, asked: Asked) -> str:
        """The answer to one request, when its turn has come. Raises what `Answerer.answer` raises."""
        future: Future[str] = Future()
        self._waiting.put((asked, future))
        return future.result()

    def _answer_all(self) -> None:
        while True:
            taken = [self._waiting.get()]
            while len(taken) < TOGETHER and not self._waiting.empty():
                taken.append(self._waiting.get())
            self._answer_together(taken)

    def _answer_together(self, taken: list[tuple[Asked, "Future[str]"]]) -> None:
        try:
            texts = self._answerer.answer([asked for asked, _ in taken])
        except Exception as error:  # noqa: BLE001  told to who has asked; the others are answered alone
            if len(taken) == 1:
                taken[0][1].set_exception(error)
            else:
                for one in taken:
                    self._answer_together([one])
            return
        for (_, future), text in zip(taken, texts, strict=True):
            future.set_result(text)


class _Handler(BaseHTTPRequestHandler):
    """One request: a JSON object with "context" and "question"."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        try:
            self._reply(200, {"answer": self.server.ask(self._read())})
        except UserError as error:
            self._reply(400, {"error": str(error)})
        except Exception as error:  # noqa: BLE001  the server goes on
            self._reply(500, {"error": f"{type(error).__name__}: {error}"})

    def _read(self) -> Asked:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LONGEST_REQUEST:
            raise DataError(f"Content-Length: expected a number of bytes up to {LONGEST_REQUEST}, got {length!r}.")
        given = parse_json(self.rfile.read(int(length)), "request", DataError)
        if not isinstance(given, dict) or set(given) != set(Asked._fields) or not all(isinstance(text, str) for text in given.values()):
            raise DataError('expected {"context": "...", "question": "..."}, both text.')
        return Asked(**given)

    def _reply(self, status: int, content: dict[str, str]) -> None:
        body = json.dumps(content, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Nothing: a line for each request would be too many."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser("src.serving.ask", __doc__)
    add = parser.add_argument
    add("run", type=Path, help="a save directory, the beginning of its id, or a checkpoint")
    add("questions", nargs="*", help="answered one a line")
    add("--context", type=Path, metavar="FILE", help="what they are asked on, as UTF-8 text")
    add("--serve", type=int, metavar="PORT", help="answer requests instead; 0 for any free port")
    add("--host", default="127.0.0.1", help="of --serve (default: %(default)s)")
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
        for text in answerer.answer([Asked(context, question) for question in args.questions]):
            sys.stdout.write(f"{text}\n")
        return 0
    try:
        server = Server(answerer, args.host, args.serve)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--serve {args.serve}, --host {args.host}: cannot be listened at ({error}).") from None
    with server:
        log.info("Answers at http://%s:%d. Ctrl-C ends it.", args.host, server.server_port)
        server.serve_forever()
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
