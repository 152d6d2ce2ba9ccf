"""The sources that are trained and validated on: exact rows, whole-file numbers, encoded contexts, and refusals before
the training."""

import json
import pickle

import pytest
import torch

from src.data import jsonl_index
from src.data.text import tokenizers
from src.data.text.tokenizers import tokenizer_digest
from src.errors import ConfigError, DataError
from src.experiments.config import load
from src.files import new_directory, write_json
from src.systems.crossattn.data import cross_attention, encoded_store, fid, prompted, row_index, templates
from src.systems.crossattn.data.encoded_shards import Writer
from src.systems.crossattn.data.encoder_inputs import EncoderInputs, EncodingOptions

SOURCES = ("nq", "squad", "nq", "msmarco", "squad", "nq")
ROWS = [
    {
        "question": f"q{i}",
        "answer": f"a{i}",
        "context": f"context {i}",
        "dataset": name,
        "kind": "hard" if name == "msmarco" else None,
    }
    for i, name in enumerate(SOURCES)
]
VALUES = {
    cross_attention: {"context_tokens": 64, "sequence_tokens": 64, "loss_on": "answer"},
    prompted: {"contexts": "all", "context_tokens": 64, "sequence_tokens": 64, "loss_on": "answer"},
    fid: {"contexts": "all", "passage_tokens": 64, "answer_tokens": 8},
}
KINDS = pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__.rpartition(".")[2])


@pytest.fixture
def build(places, tokenizer):
    """Build a data set on a corpus that is there."""

    def make(split, kind=cross_attention, **values):
        config = load(kind.Config, {"corpus": "c", **VALUES[kind], **values}, "data")
        config.check(places)
        return config.build(places, tokenizer, split, 0)

    return make


def questions_of(data):
    return [data.row(i)["question"] for i in range(data.num_questions)]


@KINDS
def test_only_rows_of_these_sources_are_used(build, write_corpus, kind):
    write_corpus("c", ROWS)
    train = build("train", kind, train_datasets=["nq", "msmarco_hard"])
    assert questions_of(train) == ["q0", "q2", "q3", "q5"]
    assert (len(train), train.sources, train.source(2)) == (4, ["msmarco_hard", "nq"], "msmarco_hard")
    whole = build("train", kind)
    assert [train.sample(0, i) for i in range(4)] == [whole.sample(0, i) for i in (0, 2, 3, 5)]
    assert questions_of(build("val", kind, train_datasets=["nq"])) == questions_of(whole)
    assert questions_of(build("val", kind, val_datasets=["squad"])) == ["q1", "q4"]
    assert pickle.loads(pickle.dumps(train)).sample(0, 3) == whole.sample(0, 5)
    assert train.fingerprint == whole.fingerprint


@KINDS
def test_an_index_gives_the_same_rows_and_sources(build, write_corpus, places, kind, monkeypatch):
    write_corpus("c", ROWS)
    values = [{}, {"train_datasets": ["nq", "msmarco_hard"]}]
    expected_datasets = [build("train", kind, **options) for options in values]
    monkeypatch.setattr(jsonl_index, "MIN_BYTES", 1)
    for _ in ("made", "mapped"):
        for options, data in zip(values, expected_datasets, strict=True):
            dataset = build("train", kind, **options)
            assert (questions_of(dataset), dataset.sources, dataset.fingerprint) == (
                questions_of(data),
                data.sources,
                data.fingerprint,
            )
    assert len(list((places.data / "c").glob(".train.jsonl.*.index"))) == 1


def test_the_context_views_and_shuffled_contexts_are_of_these_sources_too(build, write_corpus, tokenizer):
    write_corpus("c", ROWS)
    data = build("train", train_datasets=["squad"], include_contexts=True, context_tokens=40)
    assert len(data) == 4
    assert all(data.sample(0, 2 + i)["context_chunks"] == data.sample(0, i)["context_chunks"] for i in range(2))
    shuffled = data.with_shuffled_contexts()
    assert [tokenizer.decode(shuffled.sample(0, i)["context_chunks"][0])[-9:] for i in range(2)] == [
        "context 4",
        "context 1",
    ]


def test_val_samples_are_taken_of_these_sources(build, write_corpus):
    write_corpus("c", [{**ROWS[0], "question": f"q{i}", "dataset": ("nq", "squad")[i % 2]} for i in range(40)])
    some = build("val", val_datasets=["squad"], val_samples=7)
    assert len(some) == len({*questions_of(some)}) == 7
    assert all(int(question[1:]) % 2 for question in questions_of(some))
    with pytest.raises(DataError, match=r"21 requested, only 20 available"):
        build("val", val_datasets=["squad"], val_samples=21)


def test_all_rows_of_other_splits_are_used(build, places):
    with new_directory(places.data / "c") as folder:
        for split in ("train", "val", "test"):
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert build("test", train_datasets=["nq"], val_datasets=["squad"]).num_questions == 6


def test_rows_are_named_by_their_place_in_the_file(build, write_corpus):
    write_corpus("c", [*ROWS, {**ROWS[1], "context": "x" * 90}])
    for kind, message in ((cross_attention, r"^c: row 7: the context '"), (prompted, r"^c: row 7: the contexts have")):
        assert build("train", kind, train_datasets=["nq"], too_long="refuse")
        with pytest.raises(DataError, match=message):
            build("train", kind, train_datasets=["squad"], too_long="refuse")
        with pytest.raises(DataError, match=message):
            build("val", kind, val_samples=7, too_long="refuse")


@KINDS
def test_an_unknown_source_is_refused_with_those_that_there_are(build, write_corpus, kind):
    write_corpus("c", ROWS, ROWS[:2])
    with pytest.raises(
        ConfigError,
        match=(
            r"^data\.train_datasets: c/train\.jsonl: unknown source 'squda'\. Did you mean 'squad'\? Known: ms.*, "
            r"squad\.$"
        ),
    ):
        build("train", kind, train_datasets=["nq", "squda"])
    with pytest.raises(
        ConfigError, match=r"^data\.val_datasets: c/val\.jsonl: unknown source 'msmarco_hard'\. Known: nq, squad\.$"
    ):
        build("val", kind, val_datasets=["msmarco_hard"])


@KINDS
def test_it_is_known_before_rows_are_read_where_the_manifest_counts_them(places, kind):
    counts = {split: {"rows": {"nq": 3, "squad": 2}} for split in ("train", "val")}
    with new_directory(places.data / "c", {"counts": counts}) as folder:
        for split in counts:
            (folder / f"{split}.jsonl").write_text("these rows are not read\n")
    load(
        kind.Config, {"corpus": "c", **VALUES[kind], "train_datasets": ["squad"], "val_datasets": ["nq"]}, "data"
    ).check(places)
    for field in ("train_datasets", "val_datasets"):
        config = load(kind.Config, {"corpus": "c", **VALUES[kind], field: ["nqq"]}, "data")
        with pytest.raises(
            ConfigError, match=rf"^data\.{field}: c/{field[:-9]}\.jsonl: unknown source 'nqq'\. Did you mean 'nq'\?"
        ):
            config.check(places)


@pytest.mark.parametrize("counts", [None, 3, {"train": 5, "val": 1}, {"train": {"calls": 4}}])
def test_without_counts_in_the_manifest_rows_are_read_until_each_source_occurred(places, counts):
    with new_directory(places.data / "c", {"counts": counts}) as folder:
        for split in ("train", "val"):
            rows = "".join(json.dumps({**ROWS[0], "dataset": name}) + "\n" for name in ("nq", "squad", "marco"))
            (folder / f"{split}.jsonl").write_text(rows + "this row is not read\n")
    values = {"corpus": "c", **VALUES[cross_attention]}
    load(cross_attention.Config, {**values, "train_datasets": ["squad"]}, "data").check(places)
    with pytest.raises(DataError, match=r"train\.jsonl:4: not valid JSON"):
        load(cross_attention.Config, {**values, "train_datasets": ["squat"]}, "data").check(places)


@KINDS
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "data.train_datasets: expected"),
        (["nq", "squad", "nq"], r"data.train_datasets: duplicate sources: nq\."),
        ("nq", "data.train_datasets: expected"),
    ],
)
def test_lists_that_are_refused(kind, names, message):
    with pytest.raises(ConfigError, match=message):
        load(kind.Config, {"corpus": "c", **VALUES[kind], "train_datasets": names}, "data")


def test_row_indices_of_a_subset_are_refused(places, write_corpus):
    folder = write_corpus("c", ROWS)
    (folder / "hard.txt").write_text("1\n")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["hard.txt"] = {"bytes": 2, "sha256": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    config = load(cross_attention.Config, {"corpus": "c", **VALUES[cross_attention], "train_datasets": ["nq"]}, "data")
    row_index.check(places, config, "val", "hard.txt")
    row_index.check(places, config, "train", None)
    with pytest.raises(
        ConfigError,
        match=(
            r"^inference\.index_file: refers to all rows of train\.jsonl, but data\.train_datasets selects some\. "
            r"Remove one"
        ),
    ):
        row_index.check(places, config, "train", "hard.txt")


def test_encoded_contexts_are_those_of_the_chosen_rows(build, places, write_corpus, tokenizer):
    folder = write_corpus("c", ROWS)
    rules = EncodingOptions(64, "assistant", False, False, "truncate")
    inputs = EncoderInputs(templates.Prompter(tokenizers.SafeTokenizer(tokenizer), "assistant"), rules)
    (folder / "encoded").mkdir()
    writer = Writer(folder / "encoded", "s", 1, "float32")
    tokens = 0
    for i, row in enumerate(ROWS):  # of all rows of the file; each one's states say its number
        (ids,) = inputs.chunks(row, row["question"])
        writer.append(encoded_store.context_key(ids), torch.full((len(ids), 1), i + 1.0))
        tokens += len(ids)
    writer.close()
    entry = {
        **vars(rules),
        "corpus": cross_attention.jsonl.fingerprint(folder),
        "tokenizer": tokenizer_digest(tokenizer),
    }
    store = {
        "format": 1,
        "model": {"name": "hf", "fingerprint": "f"},
        "hidden_size": 1,
        "dtype": "float32",
        "prepared": [entry],
    }
    write_json(folder / "encoded" / "store.json", {**store, "shards": {"s": {"entries": len(ROWS), "tokens": tokens}}})
    data = build("train", train_datasets=["squad", "msmarco_hard"], encoded_contexts=True)
    batch = data.collate([data.sample(0, i) for i in range(3)])
    assert batch["context_hidden"][:, 0, 0].tolist() == [2, 4, 5]
    shuffled = data.with_shuffled_contexts()
    assert {*shuffled.collate([shuffled.sample(0, i) for i in range(3)])["context_hidden"][:, 0, 0].tolist()} == {
        2,
        4,
        5,
    }
