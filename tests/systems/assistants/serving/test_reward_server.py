"""Scores of trained runs over HTTP: those of the model in this process, of the model that a child names; and mistakes
as one line."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from src.errors import ConfigError, RunError
from src.experiments.config import Places
from src.experiments.grid import ref
from src.experiments.identity import exp_id
from src.experiments.registry import MODELS, bind
from src.models.load import load
from src.serving.served_model import find_run, fingerprint_of, load_served
from src.systems.assistants.rewards.remote import RemoteModel
from src.systems.assistants.serving import reward_server
from tests.core.serving import small_runs
from tests.core.serving.running_servers import options, request, request_at_once, running
from tests.core.serving.small_runs import IDS, JUDGE, TALKER, pad


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return small_runs.train(tmp_path_factory.mktemp("served"))


@contextmanager
def serve(run: Path, places: Places) -> Iterator[str]:
    """The address of a server in this process."""
    with running(reward_server.make_server(load_served(run, places, "cpu"), run.name, options())) as root:
        yield f"{root}/{run.name}"


def never(text: str, since: float) -> None:
    pytest.fail(f"waited: {text}")


def test_rewards_are_those_of_the_model(places: Places):
    run = places.runs / exp_id(JUDGE)
    model, _ = load(run, places)
    with torch.no_grad():
        expected = model(**pad(IDS)).tolist()
    identity = bind(MODELS, ref(JUDGE)).identity(places)
    assert isinstance(identity, str)
    with serve(run, places) as address:
        scores = RemoteModel(address, identity, never).rewards(IDS)
    assert scores == pytest.approx(expected, abs=1e-6)
    assert len(set(scores)) == 3


def test_log_probabilities_are_those_of_the_sampled_tokens(places: Places):
    run = places.runs / exp_id(TALKER)
    model, _ = load(run, places)
    identity = bind(MODELS, ref(TALKER)).identity(places)
    assert isinstance(identity, str)
    with serve(run, places) as address:
        scores = RemoteModel(address, identity, never).logps(IDS, [3, 1, 0])
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1) for row in IDS]
    expected = [
        [float(alone[i][n - 1, IDS[i][n]]) for n in range(len(IDS[i]) - count, len(IDS[i]))]
        for i, count in enumerate([3, 1, 0])
    ]
    assert [pytest.approx(row, abs=1e-5) for row in expected] == scores


def test_other_models_are_refused(places: Places):
    judge, talker = (places.runs / exp_id(exp) for exp in (JUDGE, TALKER))
    fingerprint = fingerprint_of(judge, places)
    with serve(talker, places) as address:
        with pytest.raises(ConfigError, match="expected the model with fingerprint"):
            RemoteModel(address, fingerprint, never).rewards(IDS)
        with pytest.raises(RunError, match=r"outputs: .*'rewards'"):
            RemoteModel(address, fingerprint_of(talker, places), never).rewards(IDS)
        with pytest.raises(ConfigError, match=talker.name):
            RemoteModel(address.replace(talker.name, judge.name), fingerprint, never).rewards(IDS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [3, 10**6]], "token id 1000000"),
        ([[1, 2], [3, 10**30]], r"inputs\.0\.data\.3: .*1000000000000000000000000000000"),
        ([[1, -2]], "token id -2"),
        ([[1] * 97], "97 tokens, more than the 96 of the model"),
    ],
)
def test_unreadable_tokens_are_refused(ids: list[list[int]], message: str, places: Places):
    run = places.runs / exp_id(JUDGE)
    with serve(run, places) as address, pytest.raises(RunError, match=message):
        RemoteModel(address, fingerprint_of(run, places), never).rewards(ids)


def test_metadata_and_health(places: Places):
    run = places.runs / exp_id(JUDGE)
    with serve(run, places) as address:
        root = address.rpartition("/")[0]
        assert request(f"{root}/v2/health/ready", "GET") == (200, {})
        assert request(f"{root}/v2/repository/index") == (200, [{"name": run.name, "version": "1", "state": "READY"}])
        status, metadata = request(f"{root}/v2/models/{run.name}", "GET")
        assert (status, metadata["outputs"]) == (200, [{"name": "rewards", "datatype": "FP32", "shape": [-1]}])
        for path, method in (("", "GET"), ("/config", "GET"), ("/ready", "GET"), ("/infer", "POST")):
            status, reply = request(f"{root}/v2/models/other{path}", method, json.dumps(body_of(IDS)).encode())
            assert (status, list(reply)) == (404, ["error"])


def body_of(ids: list[list[int]]) -> dict[str, Any]:
    """The body of an inference."""
    tensors = pad(ids)
    return {
        "inputs": [
            {"name": name, "datatype": "INT32", "shape": list(tensor.shape), "data": tensor.int().flatten().tolist()}
            for name, tensor in tensors.items()
        ]
    }


def change(path: str, value: Any) -> bytes:
    """A valid body of two sequences in which one value is replaced, or removed if it is None."""
    body = body_of([[5, 6], [4]])
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    place: Any = body
    for part in parents:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return json.dumps(body).encode()


MALFORMED_REQUESTS = {
    "truncated": b'{"inputs": [',
    "list": b"[]",
    "empty object": b"{}",
    "one input": change("inputs.1", None),
    "one input twice": change("inputs.1.name", "input_ids"),
    "unknown input": change("inputs.1.name", "token_type_ids"),
    "name is a list": change("inputs.1.name", ["attention_mask"]),
    "missing data": change("inputs.0.data", None),
    "too little data": change("inputs.0.data", [1]),
    "different shapes": change("inputs.0", {"name": "input_ids", "shape": [1, 2], "data": [5, 6]}),
    "no rows": change("inputs.0", {"name": "input_ids", "shape": [0, 2], "data": []}),
    "negative shape": change("inputs.0.shape", [-2, -2]),
    "huge shape": change("inputs.0.shape", [10**30, 1]),
    "shape of one number": change("inputs.0.shape", [4]),
    "shape of text": change("inputs.0.shape", "22"),
    "nested data": change("inputs.0.data", [[5, 6], [4, 0]]),
    "huge integer": change("inputs.0.data.1", 10**30),
    "NaN": change("inputs.0.data.1", float("nan")),
    "fraction": change("inputs.0.data.1", 1.5),
    "text": change("inputs.0.data.1", "6"),
    "boolean": change("inputs.0.data.1", True),
    "float type": change("inputs.0.datatype", "FP32"),
    "mask of sevens": change("inputs.1.data", [7, 7, 7, 0]),
    "mask with a gap": change("inputs.1.data", [1, 1, 0, 1]),
    "empty row": change("inputs.1.data", [1, 1, 0, 0]),
    "unknown output": change("outputs", [{"name": "logits"}]),
    "outputs of numbers": change("outputs", [1]),
    "deep": b'{"inputs": ' + b"[" * 100_000,
    "Latin-1": '{"inputs": "é"}'.encode("latin-1"),
}


@pytest.mark.slow
def test_malformed_requests_get_422_and_the_server_continues(places: Places):
    run = places.runs / exp_id(JUDGE)
    with serve(run, places) as address:
        url = address.replace(run.name, f"v2/models/{run.name}/infer")
        for name, body in MALFORMED_REQUESTS.items():
            status, reply = request(url, body=body)
            assert (status, list(reply)) == (422, ["error"]), (name, reply)
        assert request(url, body=b" " * (reward_server.MAX_BYTES + 1))[0] == 413
        assert request(url, "PUT")[0] == 405
        assert request(url, body=json.dumps(body_of(IDS)).encode())[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, 500])
def test_simultaneous_requests_get_the_bits_of_single_ones(places: Places, count: int):
    run = places.runs / exp_id(JUDGE)
    batches = [
        [[(7 * number + place) % 20 + 1 for place in range(number % 5 + 1)] for _ in range(number % 3 + 1)]
        for number in range(30)
    ]
    bodies = [json.dumps(body_of(batch)).encode() for batch in batches]
    server = reward_server.make_server(load_served(run, places, "cpu"), run.name, options())
    with running(server):
        path = f"/v2/models/{run.name}/infer"
        alone = [request_at_once(server.port, path, [body])[0] for body in bodies]
        together = request_at_once(server.port, path, [bodies[number % 30] for number in range(count)])
    assert together == [alone[number % 30] for number in range(count)]
    assert {status for status, _ in alone} == {200}
    assert len({body for _, body in alone}) > 15


def test_client_sends_the_token_of_its_address(places: Places):
    run = places.runs / exp_id(JUDGE)
    fingerprint = fingerprint_of(run, places)
    server = reward_server.make_server(load_served(run, places, "cpu"), run.name, options("--token", "secret"))
    with running(server):
        assert len(RemoteModel(server.address(f"/{run.name}"), fingerprint, never).rewards(IDS)) == 3
        for address in (f"{server.root}/{run.name}", f"{server.root}/{run.name}?token=wrong"):
            with pytest.raises(ConfigError, match="token") as error:
                RemoteModel(address, fingerprint, never).rewards(IDS)
            assert "wrong?" not in str(error.value)


def test_scores_that_are_not_finite_are_refused(places: Places):
    run = places.runs / exp_id(JUDGE)
    model = load_served(run, places, "cpu")
    with torch.no_grad():
        for weights in model.module.parameters():
            weights.fill_(float("nan"))
    with (
        running(reward_server.make_server(model, run.name, options())) as root,
        pytest.raises(RunError, match=r"rewards: .*finite"),
    ):
        RemoteModel(f"{root}/{run.name}", model.fingerprint, never).rewards(IDS)


def test_mistakes_are_one_line(places: Places, capsys: pytest.CaptureFixture[str]):
    options = ["--device", "cpu", "--data_path", str(places.data), "-sb", str(places.runs)]
    with socket.socket() as busy_socket:
        busy_socket.bind(("127.0.0.1", 0))
        busy_socket.listen()
        port = str(busy_socket.getsockname()[1])
        for words, message in (
            (
                [exp_id(JUDGE)[:8], "--port", port],
                f"error: --port {port}: cannot listen on 127.0.0.1: Address already in use",
            ),
            ([exp_id(JUDGE)[:8], "--port", "70000"], "error: --port 70000: cannot listen on 127.0.0.1: "),
            (["none"], "error: none: no such folder, and no run in "),
        ):
            assert reward_server.main([*words, *options]) == 1
            message_line = capsys.readouterr().err
            assert message_line.startswith(message), message_line
            assert message_line.count("\n") == 1


def test_a_run_that_is_not_done_has_no_name_yet(places: Places):
    run = places.runs / exp_id(JUDGE)
    status = run / "status.json"
    before = status.read_text()
    status.write_text(before.replace('"done"', '"stopped"'))
    try:
        with pytest.raises(ConfigError, match="the training is not finished"):
            load_served(*find_run(run, places), "cpu")
    finally:
        status.write_text(before)
