"""An exported chat model behind `transformers serve`, asked over HTTP as any program that speaks OpenAI's protocol
asks."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.models.export import main as export
from src.models.load import load
from src.systems.assistants.serving.conversation import Talk
from tests import toy
from tests.servers import running_server
from tests.systems.assistants.train_assistants import SFT, WORDS, write_data

pytestmark = pytest.mark.slow
# Enough steps to say the word and then to end.
EXPERIMENT = override(
    SFT, {"data.writing": {"template": "chatml"}, "loop.steps": 300, "loop.eval_every": 300, "model.hidden_size": 32}
)
EXPERIMENT.pop("answers")


def post(address: str, path: str, **body: Any) -> bytes:
    data = json.dumps({"temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{address.rstrip('/')}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read()


def test_an_exported_chat_model_answers_over_http_as_it_does_here(tmp_path: Path):
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'transformers[serving]'")
    write_data(tmp_path / "data")
    assert toy.main(["-e", "sft"], {"sft": [EXPERIMENT]}, tmp_path) == 0
    run, places = tmp_path / "runs" / exp_id(EXPERIMENT), Places(tmp_path / "data", tmp_path / "runs")
    assert export([str(run), str(tmp_path / "out"), "--data_path", str(places.data), "-sb", str(places.runs)]) == 0
    talk = Talk(*load(run, places), load_experiment(EXPERIMENT, "here").data)  # type: ignore[attr-defined]
    model = str(tmp_path / "out")
    serve = ["transformers.cli.transformers", "serve", model, "--device", "cpu", "--host", "127.0.0.1", "--port", "0"]
    with running_server(serve) as at:
        right = 0
        for number in (2, 7):
            talk.messages = []
            expected = talk.answer(f"{number}?", max_new_tokens=20, do_sample=False)
            right += expected == WORDS[number - 1]
            body = {"model": model, "messages": [{"role": "user", "content": f"{number}?"}], "max_tokens": 20}
            whole = json.loads(post(at, "/v1/chat/completions", **body))["choices"][0]
            assert whole["message"]["content"] == expected
            assert whole["finish_reason"] == "stop"
            lines = post(at, "/v1/chat/completions", stream=True, **body).decode().splitlines()
            pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            texts = [piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"]]
            assert "".join(texts) == expected
            assert sum(map(bool, texts)) >= 1
        assert right == 2, "the setting of the test: it has learned the words, and where they end"
        assert "text" in json.loads(post(at, "/v1/completions", model=model, prompt="2", max_tokens=4))["choices"][0]
