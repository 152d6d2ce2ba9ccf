"""Contexts encoded ahead: each once, whatever kills the command, and training on them is training."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from data_prep.command import Progress
from data_prep.crossattn import distinct_inputs, encoding_workers, preproc_nq
from src.data import jsonl
from src.data.text import tokenizers
from src.errors import ConfigError, DataError, RunError
from src.experiments.config import Places
from src.experiments.registry import MODELS, bind
from src.files import new_directory
from src.systems.crossattn.data import encoded_store
from src.systems.crossattn.data.encoded_shards import read_index, unlisted_shards
from src.systems.crossattn.data.encoder_inputs import EncodingOptions
from src.systems.crossattn.model import encoder
from src.systems.crossattn.model.encoder import encode
from tests import toy

RULES = EncodingOptions(16, "assistant", questions_on_contexts=False, chunked_contexts=False, too_long="truncate")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Two tiny Llamas with the toy tokenizer, "one" and "other"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("bases")
    data = toy.write_data(folder / "data")
    tokenizer = tokenizers.load(data / "toy_tokenizer")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.3, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def cache(tmp_path):
    """A --data_cache_path with toy_qa: 64 rows with 64 contexts, each in one split."""
    return toy.write_data(tmp_path / "cache")


@pytest.fixture
def request_of(bases, cache, tmp_path):
    """`request_of("one", batch_size=...)`."""

    def make(base="one", **changes):
        model = bind(MODELS, {"name": "hf", "path": str(bases / base)})
        new_request = preproc_nq.Request(
            model, Places(cache, tmp_path / "runs"), "toy_qa", RULES, ["cpu"], commit_seconds=0.0
        )
        return replace(new_request, **changes)

    return make


def store_of(request):
    folder = preproc_nq.folder_of(request) / "encoded"
    return encoded_store.Store(folder, encoded_store.read_store(folder))


def rows_of(folder):
    return [
        json.loads(line) for split in ("train", "val") for line in (folder / f"{split}.jsonl").read_text().splitlines()
    ]


def expected_states(request, ids):
    with torch.no_grad():
        return encode(
            request.model.build(request.places).eval(), torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)
        )[0]


def input_of(bases, row):
    tokenizer = tokenizers.load(bases / "one")
    return tokenizer.convert_tokens_to_ids(["<|user|>", "<|C|>", "<|assistant|>", *row["context"].split()])


def rewrite(cache, rows):
    """toy_qa with these rows in both splits."""
    with new_directory(cache / "toy_qa") as folder:
        for split in ("train", "val"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_states_are_those_of_the_base(bases, cache, request_of, dtype):
    request = request_of(batch_size=1, dtype=dtype)
    counts = preproc_nq.prepare(request)
    assert (counts.rows, counts.inputs, counts.encoded, counts.num_reused, counts.too_long) == (64, 64, 64, 0, 0)
    store = store_of(request)
    assert len(store) == 64
    for row in rows_of(cache / "toy_qa"):
        ids = input_of(bases, row)
        assert torch.equal(store.pad([[ids]])[0][0], expected_states(request, ids).to(getattr(torch, dtype)))
    for name in ("train.jsonl", "val.jsonl"):
        assert (preproc_nq.folder_of(request) / name).read_bytes() == (cache / "toy_qa" / name).read_bytes()


def test_nothing_is_encoded_twice(cache, request_of):
    rows = rows_of(cache / "toy_qa")
    rewrite(cache, [*rows[:20], {**rows[0], "question": "another?"}])
    request = request_of()
    first = preproc_nq.prepare(request)
    assert (first.rows, first.inputs, first.encoded) == (42, 20, 20)  # both splits have all rows, and one context twice
    again = preproc_nq.prepare(request)
    assert (again.encoded, again.num_reused) == (0, 20)
    rewrite(cache, [*rows[:20], *rows[30:35], {**rows[0], "context": "ünïcode 漢字 🎉"}])
    more = preproc_nq.prepare(request)
    assert (more.encoded, more.num_reused) == (6, 20)
    store = store_of(request)
    assert len(store) == 26
    folder = preproc_nq.folder_of(request)
    assert rows_of(folder)[-1]["context"] == "ünïcode 漢字 🎉"
    encoded_store.check(folder / "encoded", RULES, jsonl.fingerprint(folder))
    longer = preproc_nq.prepare(replace(request, rules=replace(RULES, context_tokens=20)))
    assert (longer.encoded, longer.num_reused) == (0, 26)  # none was cut before
    for tokens in (16, 20):
        encoded_store.check(folder / "encoded", replace(RULES, context_tokens=tokens), jsonl.fingerprint(folder))


def test_long_contexts_are_counted_cut_or_refused(cache, request_of):
    long = [
        {"context": "the thing0 is red . " * n, "question": "what", "answer": "red", "dataset": "d"} for n in (1, 5)
    ]
    rewrite(cache, long)
    request = request_of(rules=replace(RULES, too_long="chunk"))
    counts = preproc_nq.prepare(request)
    assert (counts.inputs, counts.too_long) == (3, 1)  # 25 words, 13 beside the template of 3
    assert (
        json.loads((preproc_nq.folder_of(request) / "manifest.json").read_text())["encoded"]["contexts_too_long"] == 1
    )
    with pytest.raises(DataError, match=r"train\.jsonl:2: the context .* has 28 tokens with its template"):
        preproc_nq.prepare(request_of(rules=replace(RULES, too_long="refuse")))


def test_a_relative_base_is_found_next_to_the_encoded_corpus(bases, cache, request_of):
    shutil.copytree(bases / "one", cache / "tiny")
    preproc_nq.prepare(request_of(model=bind(MODELS, {"name": "hf", "path": "tiny"})))
    places = Places(cache / "processed_data" / "tiny", cache)
    part = bind(
        MODELS, {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": {"name": "hf", "path": "tiny"}}
    )
    encoded_store.check_base(places.data / "toy_qa" / "encoded", part, places)
    assert tokenizers.load(places.data / "toy_tokenizer").eos_token_id == 0
    new_cache = cache.rename(cache.parent / "moved")
    assert (new_cache / "processed_data" / "tiny" / "tiny" / "config.json").is_file()


def test_contexts_equal_up_to_the_limit_are_encoded_once(cache, request_of):
    begin = "the thing0 is red . " * 3
    rewrite(
        cache,
        [{"context": begin + end, "question": "what", "answer": "red", "dataset": "d"} for end in ("red", "blue")],
    )
    counts = preproc_nq.prepare(request_of())
    assert (counts.rows, counts.inputs, counts.encoded, counts.too_long) == (4, 1, 1, 2)
    assert len(store_of(request_of())) == 1


def in_child(prepare):
    """Run `prepare` in a forked process; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
        finally:
            os._exit(0)
    return child


def num_committed(folder):
    """Whole records of the shards in `folder` that no store lists yet."""
    return sum(len(read_index(folder, name)) for name in unlisted_shards(folder, [])) if folder.is_dir() else 0


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
def test_a_kill_loses_nothing_that_was_committed(cache, request_of):
    rows = [
        {**row, "context": f"{row['context']} {word}"} for row in rows_of(cache / "toy_qa") for word in toy.THINGS[:10]
    ]
    rewrite(cache, rows)
    request = request_of(batch_size=1)
    folder = preproc_nq.folder_of(request) / "encoded"
    child = in_child(lambda: preproc_nq.prepare(request))
    wait_for(lambda: num_committed(folder) >= 20)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    num_before = num_committed(folder)
    assert 20 <= num_before < 640
    before = {path.name: path.read_bytes()[: 16 * 2 * 100] for path in folder.glob("*.states")}
    with pytest.raises(DataError, match=r"encoded: not finished"):
        encoded_store.check(folder, RULES, "c")
    counts = preproc_nq.prepare(request)
    assert (counts.num_reused, counts.encoded) == (num_before, 640 - num_before)
    store = store_of(request)
    assert len(store) == 640
    assert len({bytes(record["key"]) for record in store._records}) == 640
    for name, data in before.items():
        assert (folder / name).read_bytes().startswith(data)


@pytest.mark.slow
def test_two_workers_share_the_work(cache, request_of):
    request = request_of(batch_size=4, devices=["cpu", "cpu"])
    folder = preproc_nq.folder_of(request) / "encoded"
    counts = preproc_nq.prepare(request)
    assert counts.encoded == 64
    store = encoded_store.read_store(folder)
    assert sum(facts["entries"] for facts in store["shards"].values()) == 64
    assert len(store_of(request)) == 64


@pytest.mark.parametrize("unread", [False, True])
def test_an_orphaned_worker_commits_its_work_and_exits(bases, cache, request_of, unread, caplog):
    request = request_of()
    folder = preproc_nq.folder_of(request) / "encoded"
    folder.mkdir(parents=True)
    job = encoding_workers.Job(request.model, request.places, folder, 16, "bfloat16")
    here, there = multiprocessing.Pipe()
    worker = threading.Thread(target=encoding_workers._work, args=(job, "cpu", 1, there))
    worker.start()
    here.send([input_of(bases, row) for row in rows_of(cache / "toy_qa")[:3]])
    assert here.poll(60)
    if not unread:  # else closing resets the connection
        assert here.recv() is None
    here.close()
    worker.join(300)
    assert not worker.is_alive()
    assert "failed" not in caplog.text
    there.close()
    counts = preproc_nq.prepare(request)
    assert (counts.num_reused, counts.encoded) == (3, 61)


def worker_that(says, code=0):
    """A forked process that says one thing and ends."""

    def work(here, there):
        here.close()
        if says is not None:
            there.send(says)
        os._exit(code)

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work, args=(here, there))
    process.start()
    there.close()
    return here, process


@pytest.mark.parametrize(
    ("says", "code", "error", "message"),
    [
        (
            None,
            3,
            RunError,
            r"cuda:1: its process ended with exit code 3\. Fix it and start again: finished work is saved",
        ),
        ("RuntimeError: lost", 1, RunError, r"cuda:1: RuntimeError: lost\. Fix it"),
        (DataError("states are not finite"), 1, DataError, r"^states are not finite$"),
    ],
)
def test_worker_errors_are_reported(says, code, error, message):
    pipe, process = worker_that(says, code)
    with contextlib.closing(pipe), pytest.raises(error, match=message):
        encoding_workers._serve(pipe, {pipe: (process, "cuda:1", [[[1]]])}, iter(()), Progress("", ""))
    process.join()


def test_a_device_that_fails_is_an_error(request_of):
    with pytest.raises(RunError, match=r"cuda:93: \w+: .*Fix it and start again: finished work is saved"):
        preproc_nq.prepare(request_of(devices=["cuda:93"]))


def test_damaged_records_are_encoded_again(request_of):
    request = request_of()
    preproc_nq.prepare(request)
    folder = preproc_nq.folder_of(request) / "encoded"
    (states,) = folder.glob("*.states")
    data = bytearray(states.read_bytes())
    data[-1] ^= 1
    states.write_bytes(data)
    assert preproc_nq.prepare(request).encoded == 0
    counts = preproc_nq.prepare(replace(request, verify=True))
    assert (counts.num_reused, counts.encoded) == (63, 1)
    os.truncate(states, 10)
    assert preproc_nq.prepare(request).encoded == 63
    store_of(request)


def test_states_without_their_index_are_encoded_again(request_of, caplog):
    request = request_of()
    preproc_nq.prepare(request)
    folder = preproc_nq.folder_of(request) / "encoded"
    (index,) = folder.glob("*.index")
    index.unlink()
    with pytest.raises(
        DataError,
        match=rf"{index.name}: missing\. Run data_prep\.crossattn\.preproc_nq again",
    ):
        store_of(request)
    assert preproc_nq.prepare(request).encoded == 64
    assert f"{index.name}: missing. It is encoded again." in caplog.text
    assert len(store_of(request)) == 64
    assert len(list(folder.glob("*.states"))) == 1


def test_another_base_and_another_type_are_refused(cache, bases, request_of, tmp_path):
    preproc_nq.prepare(request_of())
    (cache / "processed_data" / "one").rename(cache / "processed_data" / "other")
    with pytest.raises(
        ConfigError,
        match=r"other/toy_qa/encoded: contains states of \S+/one \(.*\), but --embedding_model is \S+/other \(.*Choose "
        r"another",
    ):
        preproc_nq.prepare(request_of("other"))
    (cache / "processed_data" / "other").rename(cache / "processed_data" / "one")
    with pytest.raises(ConfigError, match=r"encoded: contains states in bfloat16, but --dtype is float32"):
        preproc_nq.prepare(request_of(dtype="float32"))
    with pytest.raises(
        ConfigError, match=r"--maximum_input_length: 65 tokens are more than the 64 positions of the embedding model"
    ):
        preproc_nq.prepare(request_of(rules=replace(RULES, context_tokens=65)))


def test_two_commands_do_not_write_at_once(request_of):
    import fcntl

    request = request_of()
    folder = preproc_nq.folder_of(request) / "encoded"
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match=r"encoded: another process is encoding into it"):
            preproc_nq.prepare(request)


def test_the_command_line(bases, cache, capsys):
    arguments = [
        "--embedding_model",
        str(bases / "one"),
        "--maximum_input_length",
        "16",
        "--batch_size",
        "2",
        "--num_proc",
        "1",
    ]
    arguments += ["--data_cache_path", str(cache), "--corpus", "toy_qa", "--devices", "cpu"]
    assert preproc_nq.main(arguments) == 0
    out = capsys.readouterr().out
    assert "64 rows, 64 distinct inputs, 64 encoded now, 0 before" in out
    assert f"--data_path {cache / 'processed_data' / 'one'}" in out
    assert preproc_nq.main([*arguments, "--corpus", "none"]) == 1
    assert "none: no such data set" in capsys.readouterr().err
    assert preproc_nq.main([*arguments, "--num_proc", "2"]) == 1
    assert "--num_proc: 2, but --devices lists 1" in capsys.readouterr().err
    assert preproc_nq.main([*arguments, "--batch_size", "0"]) == 1
    assert "--batch_size: expected at least 1, got 0" in capsys.readouterr().err


def test_it_runs_as_a_file():
    done = subprocess.run(
        [sys.executable, "data_prep/crossattn/preproc_nq.py", "--help"],
        cwd=toy.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--maximum_input_length" in done.stdout


def losses(exp, data, folder, capsys):
    folder.mkdir()
    (folder / "data").symlink_to(data)
    assert toy.main(["-e", "g"], {"g": [exp]}, folder) == 0, capsys.readouterr().err
    (run,) = (folder / "runs").iterdir()
    names = ("train_loss", "val_loss", "val_loss_shuffled_context", "em")
    return [{name: row[name] for name in names if name in row} for row in toy.rows(folder, run.name)]


@pytest.mark.slow
def test_training_on_them_is_training(bases, cache, request_of, tmp_path, capsys):
    base = {**toy.CROSSATTN["model"], "base": {"name": "hf", "path": str(bases / "one")}}
    loop = {**toy.CROSSATTN["loop"], "steps": 4, "sequences_per_step": 2, "micro_batch": 1, "eval_every": 2}
    exp = {**toy.CROSSATTN, "model": base, "loop": loop, "answers": {**toy.CROSSATTN["answers"], "questions": 2}}
    live = losses(exp, cache, tmp_path / "live", capsys)
    assert len(live) > 1
    for dtype in ("float32", "bfloat16"):
        request = request_of(dtype=dtype, batch_size=1)
        preproc_nq.prepare(request)
        data_folder = preproc_nq.folder_of(request).parent
        read = losses({**exp, "data": {**exp["data"], "encoded_contexts": True}}, data_folder, tmp_path / dtype, capsys)
        assert (read == live) is (dtype == "float32")
        for one, other in zip(read, live, strict=True):
            assert one == pytest.approx(other, rel=2e-2)
        shutil.rmtree(data_folder)


def test_the_dry_run_reports_missing_states(bases, cache, request_of, tmp_path, capsys):
    request = request_of()
    exp = {
        **toy.CROSSATTN,
        "model": {**toy.CROSSATTN["model"], "base": {"name": "hf", "path": str(bases / "one")}},
        "data": {**toy.CROSSATTN["data"], "encoded_contexts": True},
    }

    def dry_run(exp, data):
        folder = tmp_path / "world"
        folder.mkdir(exist_ok=True)
        (folder / "data").unlink(missing_ok=True)
        (folder / "data").symlink_to(data)
        code = toy.main(["-e", "g", "--dry-run"], {"g": [exp]}, folder)
        return code, capsys.readouterr().err

    code, err = dry_run(exp, cache)
    assert code == 1
    assert "toy_qa/encoded: no such folder. Run data_prep.crossattn.preproc_nq" in err
    preproc_nq.prepare(request)
    data_folder = preproc_nq.folder_of(request).parent
    assert dry_run(exp, data_folder)[0] == 0
    code, err = dry_run({**exp, "data": {**exp["data"], "context_tokens": 12}}, data_folder)
    assert (code, "data.context_tokens is 12, encoded with 16 (--maximum_input_length)" in err) == (1, True)
    code, err = dry_run(
        {**exp, "model": {**exp["model"], "base": {"name": "hf", "path": str(bases / "other")}}}, data_folder
    )
    assert (code, "/one (fingerprint" in err and "/other (fingerprint" in err) == (1, True)


@pytest.mark.parametrize(
    ("size", "tokens", "expected"),
    [(2, None, [2, 2, 2, 1]), (None, 12, [1, 1, 2, 3]), (2, 12, [1, 1, 2, 2, 1]), (None, 1, [1] * 7)],
)
def test_batches_have_a_budget_of_inputs_and_of_tokens(size, tokens, expected):
    inputs = [[0] * length for length in (20, 2, 9, 5, 3, 4, 2)]
    batches = list(distinct_inputs.batches(iter(inputs), size, tokens))
    assert [len(batch) for batch in batches] == expected
    assert sorted(len(ids) for batch in batches for ids in batch) == sorted(len(ids) for ids in inputs)


def test_a_batch_is_one_pass_whatever_its_size(request_of, monkeypatch):
    passes, last_hidden = [], encoder.last_hidden

    def counting_last_hidden(model, ids, mask):
        passes.append(len(ids))
        return last_hidden(model, ids, mask)

    monkeypatch.setattr(encoder, "last_hidden", counting_last_hidden)
    counts = preproc_nq.prepare(request_of("one", batch_size=None, batch_tokens=10_000))
    assert passes == [counts.encoded] == [64]


def test_wrong_number_of_useful_marks_is_an_error(request_of, cache):
    row = {**rows_of(cache / "toy_qa")[0], "contexts_list": ["a", "b"], "useful_contexts": [1]}
    rewrite(cache, [row])
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: field 'useful_contexts': expected 2 entries, as in 'contexts_list', got 1"
    ):
        preproc_nq.prepare(request_of("one"))
