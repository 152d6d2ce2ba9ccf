"""Answers of a trained run: those of the model, whoever else asks at the same time, and each context encoded once."""

import json
from pathlib import Path

import pytest

from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.systems.crossattn import ask
from tests import toy
from tests.core.serving.running_servers import options, request, request_at_once, running

FACTS = [(f"the {thing} is {colour} .", colour) for thing, colour in zip(toy.THINGS[:8], toy.COLOURS[:8], strict=True)]
QUESTION = "what is it ?"
BASE = override(
    toy.BASE, {"loop.learning_rate": 1e-6}
)  # states of a base that has learned nothing still tell the words apart
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
    answerer = ask.load_answerer(folder / "runs" / exp_id(READER), places)
    assert isinstance(answerer, ask.Answerer)
    return answerer


def test_it_answers_from_the_context(answerer: ask.Answerer):
    together = answerer.answer([ask.Query(context, QUESTION) for context, _ in FACTS])
    assert together == [answerer.answer([ask.Query(context, QUESTION)])[0] for context, _ in FACTS]
    assert sum(text == colour for text, (_, colour) in zip(together, FACTS, strict=True)) >= 6, "it has learned to read"


def test_a_context_is_encoded_once(answerer: ask.Answerer):
    encoded, model = [], answerer._model
    encode = model.encode
    model.encode = lambda ids, mask: (encoded.append(len(ids)), encode(ids, mask))[1]
    for _ in range(2):
        answerer.answer([ask.Query(FACTS[i][0], question) for question in (QUESTION, "is it red ?") for i in range(3)])
    assert encoded == [1, 1, 1]


@pytest.mark.parametrize("count", [200, 500])
def test_simultaneous_requests_get_the_answers_of_single_ones(answerer: ask.Answerer, count: int):
    queries = [(FACTS[number % len(FACTS)][0], QUESTION if number % 3 else "what ?") for number in range(count)]
    expected = [answerer.answer([ask.Query(*query)])[0] for query in dict.fromkeys(queries)]
    bodies = [json.dumps({"context": context, "question": question}).encode() for context, question in queries]
    server = ask.make_server(answerer, options())
    with running(server):
        responses = request_at_once(server.port, "/", bodies)
    answers = dict(zip(dict.fromkeys(queries), expected, strict=True))
    assert responses == [
        (200, json.dumps({"answer": answers[query]}, separators=(",", ":")).encode()) for query in queries
    ]
    assert len(set(expected)) > 4, "the models answers differ"


MALFORMED_REQUESTS = {
    "truncated": b"{",
    "list": b"[]",
    "missing field": b'{"context": "a"}',
    "number for a text": b'{"context": "a", "question": 3}',
    "huge integer": b'{"context": "a", "question": ' + b"1" + b"0" * 30 + b"}",
    "NaN": b'{"context": "a", "question": NaN}',
    "unknown field": b'{"context": "a", "question": "b", "temperature": 1}',
    "half of a surrogate pair": b'{"context": "a", "question": "\\udc00"}',
    "Latin-1": '{"context": "é", "question": "b"}'.encode("latin-1"),
    "deep": b'{"context": ' + b"[" * 100_000,
}


def test_malformed_requests_get_422_and_the_server_continues(answerer: ask.Answerer):
    with running(ask.make_server(answerer, options())) as root:
        for name, body in MALFORMED_REQUESTS.items():
            status, reply = request(f"{root}/", body=body)
            assert (status, list(reply)) == (422, ["error"]), name
        assert request(f"{root}/", body=b" " * (ask.MAX_BYTES + 1))[0] == 413
        assert request(f"{root}/", "GET")[0] == 405
        assert request(f"{root}/", body=json.dumps({"context": FACTS[0][0], "question": QUESTION}).encode())[0] == 200


def test_an_empty_answer_is_reported_on_stderr(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ask.Answerer, "answer", lambda *_: ["", "red"])
    monkeypatch.setattr(ask.Answerer, "remarks", ["", ""])
    (tmp_path / "context.txt").write_text(FACTS[2][0])
    place = ["--data_path", str(folder / "data"), "-sb", str(folder / "runs"), "--device", "cpu"]
    assert ask.main([exp_id(READER)[:10], "--context", str(tmp_path / "context.txt"), QUESTION, "what ?", *place]) == 0
    output = capsys.readouterr()
    assert output.out == "\nred\n"
    assert output.err.count("(empty answer)") == 1


def test_the_command(folder: Path, answerer: ask.Answerer, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "context.txt").write_text(FACTS[2][0])
    place = ["--data_path", str(folder / "data"), "-sb", str(folder / "runs")]
    run = exp_id(READER)[:10]
    words = [run, "--context", str(tmp_path / "context.txt"), QUESTION, "what ?", "--device", "cpu", *place]
    assert ask.main(words) == 0
    expected = answerer.answer([ask.Query(FACTS[2][0], question) for question in (QUESTION, "what ?")])
    output = capsys.readouterr()
    assert output.out.splitlines() == expected
    assert "truncated" not in output.err, "these answers have end tokens"
    assert ask.main([*words, "--max_new_tokens", "1"]) == 0
    assert capsys.readouterr().err.count("truncated after 1 tokens: raise --max_new_tokens") == 2
    assert ask.main([run, *place]) == 1
    assert "error: expected either --context FILE with questions, or --serve PORT." in capsys.readouterr().err
    assert (
        ask.main([str(folder / "runs" / exp_id(BASE)), "--context", str(tmp_path / "context.txt"), QUESTION, *place])
        == 0
    )
    assert capsys.readouterr().out.count("\n") == 1
    assert ask.main([run, "--context", str(tmp_path / "none.txt"), QUESTION, *place]) == 1
    assert "none.txt: no such file." in capsys.readouterr().err
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert ask.main([run, "--context", str(tmp_path / "latin.txt"), QUESTION, *place]) == 1
    assert "not UTF-8 text" in capsys.readouterr().err
    assert ask.main([run, "--serve", "99999", *place]) == 1
    assert "--port 99999" in capsys.readouterr().err
