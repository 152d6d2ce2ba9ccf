"""Answers of a trained run: those of the model, whoever else asks at the same time, and each context encoded once."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from src.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.serving import ask
from tests import toy

FACTS = [(f"the {thing} is {colour} .", colour) for thing, colour in zip(toy.THINGS[:8], toy.COLOURS[:8], strict=True)]
QUESTION = "what is it ?"
BASE = override(toy.BASE, {"loop.learning_rate": 1e-6})  # states of a base that has learned nothing still tell the words apart
READER = override(toy.CROSSATTN, {"model.final_layer": True, "model.base": toy.ref(BASE)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that has learned to say the colour of its context."""
    folder = tmp_path_factory.mktemp("ask")
    toy.write_data(folder / "data")
    assert toy.main(["-e", "base", "reader"], {"base": [BASE], "reader": [READER]}, folder) == 0
    return folder


@pytest.fixture
def answerer(folder: Path) -> ask.Answerer:
    places = Places(folder / "data", folder / "runs")
    return ask.load_answerer(folder / "runs" / exp_id(READER), places)


@pytest.fixture
def server(answerer: ask.Answerer) -> Iterator[ask.Server]:
    with ask.Server(answerer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def request(server: ask.Server, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", body, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_it_answers_from_the_context(answerer: ask.Answerer):
    together = answerer.answer([ask.Asked(context, QUESTION) for context, _ in FACTS])
    assert together == [answerer.answer([ask.Asked(context, QUESTION)])[0] for context, _ in FACTS]
    assert sum(text == colour for text, (_, colour) in zip(together, FACTS, strict=True)) >= 6, "it has learned to read"


def test_a_context_is_encoded_once(answerer: ask.Answerer):
    encoded, model = [], answerer._model
    encode = model.encode
    model.encode = lambda ids, mask: (encoded.append(len(ids)), encode(ids, mask))[1]
    for _ in range(2):
        answerer.answer([ask.Asked(FACTS[i][0], question) for question in (QUESTION, "is it red ?") for i in range(3)])
    assert encoded == [1, 1, 1]


def test_many_requests_at_once_keep_their_contexts(answerer: ask.Answerer, server: ask.Server):
    wanted = [answerer.answer([ask.Asked(context, QUESTION)])[0] for context, _ in FACTS]
    bodies = [json.dumps({"context": context, "question": QUESTION}).encode() for context, _ in FACTS * 4]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda body: request(server, body), bodies))
    assert found == [(200, {"answer": text}) for text in wanted * 4]
    assert len(set(wanted)) > 4, "the setting of the test"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "request: not valid JSON: "),
        (b"[]", 'expected {"context": "...", "question": "..."}, both text.'),
        (b'{"context": "a"}', "expected {"),
        (b'{"context": "a", "question": 3}', "expected {"),
    ],
)
def test_a_bad_request_is_told_and_the_server_goes_on(server: ask.Server, body: bytes, message: str):
    status, reply = request(server, body)
    assert status == 400
    assert reply["error"].startswith(message)
    assert request(server, json.dumps({"context": FACTS[0][0], "question": QUESTION}).encode())[0] == 200


def test_the_command(folder: Path, answerer: ask.Answerer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "context.txt").write_text(FACTS[2][0])
    place = ["--data_path", str(folder / "data"), "-sb", str(folder / "runs")]
    run = exp_id(READER)[:10]
    given = [run, "--context", str(tmp_path / "context.txt"), QUESTION, "what ?", "--device", "cpu", *place]
    assert ask.main(given) == 0
    expected = answerer.answer([ask.Asked(FACTS[2][0], question) for question in (QUESTION, "what ?")])
    assert capsys.readouterr().out.splitlines() == expected
    assert ask.main([run, *place]) == 1
    assert "error: expected --context FILE with questions, or --serve PORT." in capsys.readouterr().err
    assert ask.main([str(folder / "runs" / exp_id(BASE)), "--serve", "0", *place]) == 1
    assert "not trained to read contexts by cross-attention" in capsys.readouterr().err
    assert ask.main([run, "--context", str(tmp_path / "none.txt"), QUESTION, *place]) == 1
    assert "none.txt: no such file." in capsys.readouterr().err
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert ask.main([run, "--context", str(tmp_path / "latin.txt"), QUESTION, *place]) == 1
    assert "not UTF-8 text" in capsys.readouterr().err
    assert ask.main([run, "--serve", "99999", *place]) == 1
    assert "--serve 99999" in capsys.readouterr().err
