"""Encoded contexts on disk: the bits that were written come out, and nothing else does."""

import contextlib
import json
import os
import pickle

import pytest
import torch

from src.data.text import tokenizers
from src.data.text.tokenizers import tokenizer_digest
from src.errors import ConfigError, DataError
from src.experiments.config import load
from src.experiments.dataset_protocols import content_of
from src.experiments.registry import MODELS, bind
from src.files import write_json
from src.systems.crossattn.data import cross_attention, encoded_store, templates
from src.systems.crossattn.data.encoded_shards import RECORD, Writer, read_index, recover, unlisted_shards
from src.systems.crossattn.data.encoder_inputs import EncoderInputs, EncodingOptions

D = 4
RULES = {
    "context_tokens": 64,
    "template": "assistant",
    "questions_on_contexts": False,
    "chunked_contexts": False,
    "too_long": "truncate",
}
CHUNKS = [[1, 2, 3], [4], [2**40, 0], [1, 2]]


def states_of(ids, dtype=torch.float32):
    """Made of the ids, so that any mix-up shows; not all of them round to themselves in 16 bits."""
    return torch.tensor([[(i % 1000) + d / 3 for d in range(D)] for i in ids]).to(dtype)


def write_store(folder, chunks, dtype="bfloat16", shards=2, **facts):
    """A finished store with `chunks` dealt to `shards`."""
    folder.mkdir(parents=True)
    shard_facts = {}
    for n in range(shards):
        writer = Writer(folder, f"s{n}", D, dtype)
        for ids in chunks[n::shards]:
            writer.append(encoded_store.context_key(ids), states_of(ids))
        writer.close()
        shard_facts[f"s{n}"] = {"entries": len(chunks[n::shards]), "tokens": sum(map(len, chunks[n::shards]))}
    store = {
        "format": 1,
        "model": {"name": "hf", "path": "p", "fingerprint": "f"},
        "hidden_size": D,
        "dtype": dtype,
        "shards": shard_facts,
    }
    write_json(folder / "store.json", {**store, "prepared": [{**RULES, "corpus": "c", "tokenizer": "t"}], **facts})
    return encoded_store.Store(folder, encoded_store.read_store(folder))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_are_read_bit_exactly(tmp_path, dtype):
    store = write_store(tmp_path / "e", CHUNKS, dtype)
    kind = getattr(torch, dtype)
    for copy in (store, pickle.loads(pickle.dumps(store))):
        for ids in CHUNKS:
            assert torch.equal(copy.pad([[ids]])[0][0], states_of(ids, kind))
    assert len(store) == 4


def test_batches_have_each_chunk_where_encoding_puts_it(tmp_path):
    store = write_store(tmp_path / "e", CHUNKS, "float32")
    hidden, mask = store.pad([[[4], [1, 2]], [[1, 2, 3]]])
    expected = torch.zeros(2, 6, D)
    expected[0, 0], expected[0, 3:5], expected[1, :3] = states_of([4])[0], states_of([1, 2]), states_of([1, 2, 3])
    assert torch.equal(hidden, expected)
    assert mask.int().tolist() == [[1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]]


def test_keys_with_equal_prefixes_are_distinguished(tmp_path):
    folder = tmp_path / "e"
    folder.mkdir()
    writer = Writer(folder, "s", D, "float32")
    key = encoded_store.context_key([1])
    writer.append(key[:8] + bytes(24), states_of([9]))
    writer.append(key, states_of([1]))
    writer.close()
    facts = {"hidden_size": D, "dtype": "float32", "shards": {"s": {"entries": 2, "tokens": 2}}, "prepared": []}
    assert torch.equal(encoded_store.Store(folder, facts).pad([[[1]]])[0][0], states_of([1]))


def test_an_input_that_was_not_encoded_is_named(tmp_path):
    store = write_store(tmp_path / "e", CHUNKS)
    message = (
        r"e: no states for an input of 2 tokens \(sha256 [0-9a-f]{12}\)\. "
        r".*context_tokens.*64.*preproc_nq again"
    )
    with pytest.raises(DataError, match=message):
        store.pad([[[1, 2, 3], [3, 2]]])


def test_altered_states_are_never_given_out(tmp_path):
    store = write_store(tmp_path / "e", CHUNKS, shards=1)
    data = bytearray((tmp_path / "e" / "s0.states").read_bytes())
    data[3 * D * 2 + 1] ^= 4  # in the only token of the second entry
    (tmp_path / "e" / "s0.states").write_bytes(data)
    assert torch.equal(store.pad([[CHUNKS[0]]])[0][0], states_of(CHUNKS[0], torch.bfloat16))
    for _ in range(2):
        with pytest.raises(
            DataError,
            match=r"s0\.states: damaged from token 3 on\. Run data_prep\.crossattn\.preproc_nq again with --verify",
        ):
            store.pad([[CHUNKS[1]]])[0][0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda e: os.truncate(e / "s1.states", 5),
            r"s1\.states: expected \d+ bytes, got 5\. Run data_prep.crossattn.preproc_nq again",
        ),
        (lambda e: (e / "s1.states").unlink(), r"s1\.states: expected \d+ bytes, got no file"),
        (lambda e: (e / "s0.index").unlink(), r"s0\.index: missing"),
        (lambda e: os.truncate(e / "s0.index", RECORD.itemsize + 3), r"s0\.index: damaged: 1 of 2 records are intact"),
        (lambda e: (e / "store.json").unlink(), r"store\.json: no such file"),
        (lambda e: (e / "store.json").write_text('{"format": 2}'), r"store\.json: not a store of format 1"),
    ],
)
def test_damaged_stores_are_refused(tmp_path, damage, message):
    write_store(tmp_path / "e", CHUNKS)
    damage(tmp_path / "e")
    with pytest.raises(DataError, match=message):
        encoded_store.Store(tmp_path / "e", encoded_store.check(tmp_path / "e", EncodingOptions(**RULES), "c"))


def test_another_byte_in_the_index_is_found(tmp_path):
    write_store(tmp_path / "e", CHUNKS)
    data = bytearray((tmp_path / "e" / "s0.index").read_bytes())
    data[35] ^= 1
    (tmp_path / "e" / "s0.index").write_bytes(data)
    with pytest.raises(DataError, match=r"s0\.index: damaged: 0 of 2"):
        read_index(tmp_path / "e", "s0", 2)


def test_only_the_options_and_rows_that_were_encoded_pass(tmp_path):
    write_store(tmp_path / "e", CHUNKS)
    assert encoded_store.check(tmp_path / "e", EncodingOptions(**RULES), "c")["hidden_size"] == D
    with pytest.raises(
        ConfigError,
        match=r"e: data\.context_tokens is 32, encoded with 64 \(--maximum_input_length\)\. Make them equal",
    ):
        encoded_store.check(tmp_path / "e", EncodingOptions(**{**RULES, "context_tokens": 32}), "c")
    with pytest.raises(ConfigError, match=r"data\.chunked_contexts is True, encoded with False \(--chunked_contexts\)"):
        encoded_store.check(tmp_path / "e", EncodingOptions(**{**RULES, "chunked_contexts": True}), "c")
    with pytest.raises(DataError, match=r"e: the rows have changed since they were encoded"):
        encoded_store.check(tmp_path / "e", EncodingOptions(**RULES), "d")
    write_store(tmp_path / "unfinished", CHUNKS, prepared=[])
    with pytest.raises(
        DataError,
        match=r"unfinished: not finished\. Run data_prep\.crossattn\.preproc_nq again\.",
    ):
        encoded_store.check(tmp_path / "unfinished", EncodingOptions(**RULES), "c")
    with pytest.raises(DataError, match=r"none: no such folder\. Run data_prep\.crossattn\.preproc_nq"):
        encoded_store.check(tmp_path / "none", EncodingOptions(**RULES), "c")


@pytest.fixture
def base(tmp_path):
    """A folder that is enough of a model to have a fingerprint."""

    def make(name="base", weights=b"w"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "unheard_of"}')
        (folder / "model.safetensors").write_bytes(weights)
        return {"name": "hf", "path": str(folder)}

    return make


def cross(base, **more):
    return bind(MODELS, {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": base, **more})


def test_the_base_must_be_the_one_that_encoded(tmp_path, places, base):
    mine, moved_base, other = base(), base("moved"), base("other", b"x")
    stored_base = encoded_store.base_identity(bind(MODELS, mine), places)
    write_store(tmp_path / "e", CHUNKS, model=stored_base)
    for same in (mine, moved_base):
        encoded_store.check_base(tmp_path / "e", cross(same), places)
    message = r"e: expected contexts .* \S+/other \(fingerprint \w{12}, float32\), got \S+/base \(fingerprint"
    with pytest.raises(ConfigError, match=message):
        encoded_store.check_base(tmp_path / "e", cross(other), places)
    with pytest.raises(
        ConfigError, match=r"\S+/base \(fingerprint \w{12}, bfloat16\), got \S+/base \(fingerprint \w{12}, float32\)"
    ):
        encoded_store.check_base(tmp_path / "e", cross({**mine, "dtype": "bfloat16"}), places)
    with_adapters = {
        "name": "lora",
        "rank": 1,
        "alpha": 1.0,
        "target_modules": ["x"],
        "base": {**cross(mine).model_dump(mode="json")},
    }
    with_adapters["base"]["name"] = "cross_attention"
    with pytest.raises(
        ConfigError,
        match=r"data\.encoded_contexts: true, but the encoder of the contexts changes in training \(adapters\)",
    ):
        encoded_store.check_base(tmp_path / "e", bind(MODELS, with_adapters), places)
    with pytest.raises(ConfigError, match=r"changes in training \(train_all_params\)"):
        encoded_store.check_base(tmp_path / "e", cross(mine, train_all_params=True), places)


def test_model_of_a_run_is_encoded_by_its_base(tmp_path, places, base):
    mine = base()
    stored_base = encoded_store.base_identity(bind(MODELS, mine), places)
    write_store(tmp_path / "e", CHUNKS, model=stored_base)
    cross_config = cross(mine).model_dump(mode="json") | {"name": "cross_attention"}
    with_adapters = {"name": "lora", "rank": 1, "alpha": 1.0, "target_modules": ["x"], "base": cross_config}

    def child(exp_id, model):
        (places.runs / exp_id).mkdir(parents=True, exist_ok=True)
        write_json(places.runs / exp_id / "exp_dict.json", {"recipe": "crossattn", "model": model})
        return bind(MODELS, {"name": "experiment", "exp_id": exp_id})

    trained = child("1" * 32, cross_config)  # not trained yet: its base is known all the same
    grandchild = child("2" * 32, {"name": "experiment", "exp_id": "1" * 32})
    for model in (trained, grandchild):
        assert encoded_store.base_identity(model, places) == stored_base
        encoded_store.check_base(tmp_path / "e", model, places)
    with pytest.raises(ConfigError, match=r"e: expected contexts .* \S+/other \(.*\), got \S+/base \("):
        encoded_store.check_base(tmp_path / "e", child("3" * 32, {**cross_config, "base": base("other", b"x")}), places)
    for exp_id, model, how in (
        ("4" * 32, with_adapters, "adapters"),
        ("5" * 32, {**cross_config, "train_all_params": True}, "train_all_params"),
    ):
        assert encoded_store.base_identity(child(exp_id, model), places) is None
        with pytest.raises(
            ConfigError, match=rf"the encoder of the contexts changes in training \({how} of {exp_id}\)\."
        ):
            encoded_store.check_base(tmp_path / "e", child(exp_id, model), places)


def test_killed_writer_leaves_committed_entries(tmp_path):
    writer = Writer(tmp_path, "s", D, "float32")
    for ids in CHUNKS[:2]:
        writer.append(encoded_store.context_key(ids), states_of(ids))
    writer.commit()
    writer.append(encoded_store.context_key(CHUNKS[2]), states_of(CHUNKS[2]))
    writer._states.flush()
    with open(tmp_path / "s.index", "ab") as file:
        file.write(b"torn")
    writer._index.close()  # as the system does for a killed process
    writer._states.close()
    records = recover(tmp_path, "s", D * 4)
    assert [bytes(r["key"]) for r in records] == [encoded_store.context_key(ids) for ids in CHUNKS[:2]]
    assert (tmp_path / "s.states").stat().st_size == 4 * D * 4
    assert (tmp_path / "s.index").stat().st_size == 2 * RECORD.itemsize
    assert unlisted_shards(tmp_path, []) == ["s"]
    assert unlisted_shards(tmp_path, ["s"]) == []


def test_recovery_cuts_at_the_first_damage(tmp_path):
    write_store(tmp_path / "e", CHUNKS, shards=1)
    os.truncate(tmp_path / "e" / "s0.states", 5 * D * 2)  # the third entry has lost its last token
    assert len(recover(tmp_path / "e", "s0", D * 2)) == 2
    data = bytearray((tmp_path / "e" / "s0.states").read_bytes())
    data[0] ^= 1
    (tmp_path / "e" / "s0.states").write_bytes(data)
    assert len(recover(tmp_path / "e", "s0", D * 2, num_compared=1)) == 2  # the first is not looked at
    assert len(recover(tmp_path / "e", "s0", D * 2)) == 0
    assert not list((tmp_path / "e").glob("s0*"))


@pytest.mark.parametrize(("dtype", "bad"), [("bfloat16", float("nan")), ("float16", 1e5), ("float32", float("inf"))])
def test_states_that_are_not_finite_are_refused(tmp_path, dtype, bad):
    message = rf"states of an input of 1 tokens are not finite in {dtype}"
    with contextlib.closing(Writer(tmp_path, "s", D, dtype)) as writer, pytest.raises(DataError, match=message):
        writer.append(bytes(32), torch.full((1, D), bad))


@pytest.fixture
def inputs(tokenizer):
    """Encoder inputs with 6 tokens of template."""

    def make(**more):
        prompter = templates.Prompter(tokenizers.SafeTokenizer(tokenizer), "assistant")
        return EncoderInputs(prompter, EncodingOptions(**{**RULES, "context_tokens": 10, **more}))

    return make


HEAD = "<|user|>\n<|C|>\n<|assistant|>\n"


def test_a_long_context_is_cut_short_cut_in_chunks_or_refused(inputs, tokenizer):
    row = {"context": "0123456789", "question": "q"}

    def texts(**more):
        return [tokenizer.decode(ids).removeprefix(HEAD) for ids in inputs(**more).chunks(row, "q")]

    assert texts() == ["0123"]
    assert texts(too_long="chunk") == ["0123", "4567", "89"]
    assert texts(context_tokens=16, too_long="refuse") == ["0123456789"]
    assert inputs(too_long="chunk").chunks_and_cuts(row, "q")[1] == 1
    assert inputs(context_tokens=16).chunks_and_cuts(row, "q")[1] == 0
    with pytest.raises(
        DataError,
        match=r"the context '0123456789'\.\.\. has 16 tokens with its template, but data\.context_tokens is 10",
    ):
        texts(too_long="refuse")


def test_a_long_question_leaves_room_for_every_chunk(inputs, tokenizer):
    chunks = inputs(too_long="chunk", questions_on_contexts=True, context_tokens=12).chunks(
        {"context": "abcdef"}, "0123456789"
    )
    assert [tokenizer.decode(ids) for ids in chunks] == [
        f"<|user|>\n789<|C|>\n<|assistant|>\n{part}" for part in ("abc", "def")
    ]  # 6 tokens beside the template, half of them for the question


def test_bytes_of_one_character_in_two_chunks_lose_nothing(inputs):
    text = "äö漢字🎉"
    chunks = inputs(too_long="chunk").chunks({"context": text}, "")
    assert bytes(i - 8 for ids in chunks for i in ids[6:]).decode() == text


@pytest.fixture
def encoded_corpus(places, write_corpus, tokenizer):
    """Rows, and their contexts encoded by `states_of`."""

    def make(rows, **more):
        folder = write_corpus("c", rows)
        rules = EncodingOptions(**{**RULES, **more})
        inputs = EncoderInputs(templates.Prompter(tokenizers.SafeTokenizer(tokenizer), "assistant"), rules)
        chunks = [ids for row in rows for ids in inputs.chunks(row, row["question"])]
        entry = {
            **RULES,
            **more,
            "corpus": cross_attention.jsonl.fingerprint(folder),
            "tokenizer": tokenizer_digest(tokenizer),
        }
        write_store(
            folder / "encoded", [list(ids) for ids in dict.fromkeys(map(tuple, chunks))], "float32", prepared=[entry]
        )
        config = load(
            cross_attention.Config,
            {"corpus": "c", "sequence_tokens": 64, "loss_on": "answer", "encoded_contexts": True, **RULES, **more},
            "data",
        )
        config.check(places)
        return config

    return make


def row(question, context, **more):
    return {"question": question, "answer": "an", "context": context, "dataset": "d", **more}


def test_batches_have_states_and_are_equal_except_for_them(encoded_corpus, places, tokenizer):
    rows = [row("q1", "ctx"), row("q2", "Ünï 漢字", contexts_list=["Ünï", "漢字"])]
    config = encoded_corpus(rows, chunked_contexts=True)
    data = config.build(places, tokenizer, "train", 0)
    plain = config.model_copy(update={"encoded_contexts": False}).build(places, tokenizer, "train", 0)
    for ours, theirs in ((data.collate, plain.collate), (data.collate_prompts, plain.collate_prompts)):
        got, expected = ours([data.sample(0, i) for i in range(2)]), theirs([plain.sample(0, i) for i in range(2)])
        ids, mask = expected.pop("context_ids"), expected.pop("context_mask")
        hidden = (
            torch.stack([torch.cat([states_of(chunk) for chunk in chunks.tolist()]) for chunks in ids])
            * mask.flatten(1)[..., None]
        )
        assert torch.equal(got.pop("context_hidden"), hidden)
        assert torch.equal(got.pop("context_mask"), mask.flatten(1))
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert got.keys() == expected.keys()
    assert data.fingerprint != plain.fingerprint
    assert content_of(data) == content_of(plain)
    assert (data.stored_bytes_per_token, plain.stored_bytes_per_token) == (D * 4, None)
    assert encoded_store.row_bytes({"hidden_size": D, "dtype": "bfloat16"}) == D * 2


def test_shuffled_contexts_are_in_the_store_too(encoded_corpus, places, tokenizer):
    config = encoded_corpus([row("q1", "one"), row("q2", "two")], questions_on_contexts=True)
    data = config.build(places, tokenizer, "val", 0)
    shuffled = data.with_shuffled_contexts()
    for i in range(2):
        assert shuffled.sample(0, i)["context_chunks"] == data.sample(0, 1 - i)["context_chunks"]
        assert shuffled.sample(0, i)["input_ids"] == data.sample(0, i)["input_ids"]
    assert shuffled.collate([shuffled.sample(0, 0)])["context_mask"].all()


def test_another_tokenizer_is_refused(encoded_corpus, places, make_tokenizer):
    config = encoded_corpus([row("q1", "one")])
    with pytest.raises(DataError, match=r"encoded: encoded with another tokenizer"):
        config.build(places, make_tokenizer(["<|endoftext|>"], pad=None), "train", 0)


def test_altered_rows_and_options_are_found_without_reading_rows(encoded_corpus, places, write_corpus):
    config = encoded_corpus([row("q1", "one")])
    with pytest.raises(ConfigError, match=r"data\.too_long is 'chunk', encoded with 'truncate'"):
        config.model_copy(update={"too_long": "chunk"}).check(places)
    text = (places.data / "c" / "train.jsonl").read_text().replace("one", "two")
    (places.data / "c" / "train.jsonl").write_text(text)
    config.check(places)  # of the right size: what it holds is not read
    manifest = json.loads((places.data / "c" / "manifest.json").read_text())
    manifest["files"]["train.jsonl"]["sha256"] = "0" * 64
    (places.data / "c" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"the rows have changed since they were encoded"):
        config.check(places)


def test_too_long_contexts_are_refused_before_the_first_step(places, write_corpus, tokenizer):
    write_corpus("c", [row("q", "x" * 20), row("q", "x" * 60)])
    config = load(
        cross_attention.Config,
        {"corpus": "c", "sequence_tokens": 64, "loss_on": "answer", **RULES, "too_long": "refuse"},
        "data",
    )
    with pytest.raises(DataError, match=r"c: row 2: the context .* has 66 tokens with its template"):
        config.build(places, tokenizer, "train", 0)


def test_truncated_contexts_are_logged_without_reading_them_first(places, write_corpus, tokenizer, caplog):
    write_corpus("c", [row("q", "short"), *(row("q", f"{n}" + "x" * 60) for n in range(12))])
    raw = {"corpus": "c", "sequence_tokens": 64, "loss_on": "answer", **RULES}
    data = load(cross_attention.Config, raw, "data").build(places, tokenizer, "train", 0)
    assert not caplog.messages
    for sample in (
        *(data.sample(0, i) for i in range(10)),
        data.prompt(10),
        data.with_shuffled_contexts().sample(0, 5),
    ):
        assert len(sample["context_chunks"][0]) <= 64
    warning = "contexts read by this process: data.context_tokens is 64 and data.too_long is 'truncate'."
    assert caplog.messages == [f"c: truncated 1 of 2 {warning}"]
    for i in range(1, 13):
        for _ in range(8):
            data.sample(0, i)
    assert caplog.messages[1:] == [f"c: truncated 100 of 101 {warning}"], "whichever data set read them"
    caplog.clear()
    data = load(cross_attention.Config, {**raw, "too_long": "chunk"}, "data").build(places, tokenizer, "train", 0)
    assert len(data.sample(0, 1)["context_chunks"]) == 2
    assert not caplog.messages
