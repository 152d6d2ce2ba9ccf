"""Scores of trained runs over HTTP: those of the model in this process, of the model that a child names; and mistakes as one line."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import urllib3

from src.config import Places
from src.errors import ConfigError, RunError
from src.experiments.grid import ref
from src.experiments.identity import exp_id
from src.models.load import load
from src.registry import MODELS, bind
from src.rewards.remote import RemoteModel
from src.serving import reward_server
from src.serving.served_model import find_run, fingerprint_of, load_served
from tests.serving import small_runs
from tests.serving.small_runs import IDS, JUDGE, TALKER, pad


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return small_runs.train(tmp_path_factory.mktemp("served"))


@contextmanager
def serve(run: Path, places: Places) -> Iterator[str]:
    """The address of a server in this process."""
    with reward_server.Server(load_served(run, places, "cpu"), run.name, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{run.name}"
        server.shutdown()
        thread.join()


def never(text: str, since: float) -> None:
    pytest.fail(f"waited: {text}")


def test_rewards_are_those_of_the_model(places: Places):
    run = places.runs / exp_id(JUDGE)
    model, _ = load(run, places)
    with torch.no_grad():
        wanted = model(**pad(IDS)).tolist()
    named = bind(MODELS, ref(JUDGE)).identity(places)
    assert isinstance(named, str)
    with serve(run, places) as address:
        found = RemoteModel(address, named, never).rewards(IDS)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert len(set(found)) == 3


def test_log_probabilities_are_those_of_the_sampled_tokens(places: Places):
    run = places.runs / exp_id(TALKER)
    model, _ = load(run, places)
    named = bind(MODELS, ref(TALKER)).identity(places)
    assert isinstance(named, str)
    with serve(run, places) as address:
        found = RemoteModel(address, named, never).logps(IDS, [3, 1, 0])
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1) for row in IDS]
    wanted = [[float(alone[i][n - 1, IDS[i][n]]) for n in range(len(IDS[i]) - count, len(IDS[i]))] for i, count in enumerate([3, 1, 0])]
    assert [pytest.approx(row, abs=1e-5) for row in wanted] == found


def test_another_run_is_refused(places: Places):
    """As is a model of the other kind, by what it gives."""
    judge, talker = (places.runs / exp_id(exp) for exp in (JUDGE, TALKER))
    named = fingerprint_of(judge, places)
    with serve(talker, places) as address:
        with pytest.raises(ConfigError, match="serves another model"):
            RemoteModel(address, named, never).rewards(IDS)
        with pytest.raises(RunError, match="refuses the batch: outputs: this model tells 'logps' alone"):
            RemoteModel(address, fingerprint_of(talker, places), never).rewards(IDS)
        with pytest.raises(ConfigError, match=rf"no such model there\. It has {talker.name}\."):
            RemoteModel(address.replace(talker.name, judge.name), named, never).rewards(IDS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [3, 10**6]], r"a token id is 1000000; the model knows 0 to \d+\."),
        ([[1] * 97], r"a sequence has 97 tokens; the model reads 96"),
    ],
)
def test_what_the_model_cannot_read_is_told(ids: list[list[int]], message: str, places: Places):
    run = places.runs / exp_id(JUDGE)
    with serve(run, places) as address, pytest.raises(RunError, match=message):
        RemoteModel(address, fingerprint_of(run, places), never).rewards(ids)


def test_it_answers_the_protocol(places: Places):
    run = places.runs / exp_id(JUDGE)
    tensor = {"name": "input_ids", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}
    with serve(run, places) as address:
        root = address.rpartition("/")[0]

        def ask(method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, object]]:
            answer = urllib3.request(method, f"{root}{path}", body=body, retries=False)
            return answer.status, json.loads(answer.data)

        assert ask("GET", "/v2/health/ready") == (200, {})
        status, told = ask("GET", f"/v2/models/{run.name}")
        assert (status, told["outputs"]) == (200, [{"name": "rewards", "datatype": "FP32", "shape": [-1]}])
        assert ask("GET", "/v2/models/other")[0] == 404
        for body in (
            b"{",
            b"[]",
            b"{}",
            json.dumps({"inputs": [tensor]}).encode(),
            json.dumps({"inputs": [{**tensor, "data": [1]}]}).encode(),
        ):
            status, told = ask("POST", f"/v2/models/{run.name}/infer", body)
            assert status == 400
            assert told["error"]
        mask = {**tensor, "name": "attention_mask", "data": [1, 1]}
        status, told = ask("POST", f"/v2/models/{run.name}/infer", json.dumps({"inputs": [mask, tensor]}).encode())
        assert status == 200


def test_mistakes_are_one_line(places: Places, capsys: pytest.CaptureFixture[str]):
    options = ["--device", "cpu", "--data_path", str(places.data), "-sb", str(places.runs)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, message in (
            ([exp_id(JUDGE)[:8], "--port", port], f"error: --port {port}: cannot listen on 127.0.0.1: Address already in use"),
            ([exp_id(JUDGE)[:8], "--port", "70000"], "error: --port 70000: cannot listen on 127.0.0.1: "),
            (["none"], "error: none/exp_dict.json: no such file."),
        ):
            assert reward_server.main([*words, *options]) == 1
            told = capsys.readouterr().err
            assert told.startswith(message), told
            assert told.count("\n") == 1


def test_a_run_that_is_not_done_has_no_name_yet(places: Places):
    run = places.runs / exp_id(JUDGE)
    status = run / "status.json"
    before = status.read_text()
    status.write_text(before.replace('"done"', '"stopped"'))
    try:
        with pytest.raises(ConfigError, match="is not trained to its end yet"):
            load_served(*find_run(run, places), "cpu")
    finally:
        status.write_text(before)
