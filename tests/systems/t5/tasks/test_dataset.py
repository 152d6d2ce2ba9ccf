"""Rows of a task as samples: exact ids, what is cut and what never is, and rows that are refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError, DataError
from src.experiments.config import Places, load
from src.experiments.dataset_protocols import Prediction
from src.files import new_directory
from src.systems.t5.tasks import dataset
from tests.systems.metadata.data.test_examples import byte_tokenizer

EOS, PAD = 0, 7
RTE = {"index": 0, "sentence1": "é", "sentence2": "b\tc", "label": "entailment"}
LABELS = ("entailment", "not_entailment")


def ids(text: str) -> list[int]:
    return [8 + byte for byte in text.encode()]


@pytest.fixture
def make_dataset(
    places: Places, tokenizer: Any, write_corpus: Callable[..., Path]
) -> Callable[..., dataset.TaskDataset]:
    """A data set of rows."""

    def make(rows: list[dict[str, Any]], split: str = "train", name: str = "rte", **values: Any) -> dataset.TaskDataset:
        write_corpus("c", rows)
        return load(dataset.Config, {"task": name, "corpus": "c", **values}, "data").build(places, tokenizer, split, 0)

    return make


def test_a_sample_is_the_text_and_the_label_each_with_its_end(make_dataset: Callable[..., dataset.TaskDataset]):
    data = make_dataset([RTE])
    text = "rte sentence1: é sentence2: b\tc"
    assert data.sample(0, 0) == data.sample(3, 0) == {"inputs": [*ids(text), EOS], "targets": [*ids("entailment"), EOS]}
    assert (data.input(0), data.target(0), data.prompt(0)["inputs"]) == (text, "entailment", [*ids(text), EOS])
    assert data.answer_ids == [[*ids(label), EOS] for label in LABELS]
    assert (data.sources, data.source(0), len(data)) == (["rte"], "rte", 1)
    with pytest.raises(IndexError, match="sample 1 of 1"):
        data.sample(0, 1)


def test_a_batch(make_dataset: Callable[..., dataset.TaskDataset]):
    data = make_dataset([{**RTE, "sentence2": ""}, {**RTE, "label": "not_entailment"}])
    batch = data.collate([data.sample(0, i) for i in range(2)])
    short, long = data.sample(0, 0)["targets"], data.sample(0, 1)["targets"]
    assert batch["labels"].tolist() == [[*short, *[-100] * 4], long]
    assert batch["decoder_input_ids"].tolist() == [[PAD, *short, *[PAD] * 3], [PAD, *long[:-1]]]
    assert batch["attention_mask"].sum(1).tolist() == [len(data.sample(0, i)["inputs"]) for i in range(2)]
    assert batch["loss_mask"].sum(1).tolist() == [11, 15]
    prompts = data.collate_prompts([data.prompt(i) for i in range(2)])
    assert prompts.keys() == {"input_ids", "attention_mask"}
    assert prompts["input_ids"].equal(batch["input_ids"])
    assert data.collate_answers([data.prompt(0)], [5, EOS])["labels"].tolist() == [[5, EOS]]


def test_inputs_are_cut_and_counted_once_each(
    make_dataset: Callable[..., dataset.TaskDataset], caplog: pytest.LogCaptureFixture
):
    data = make_dataset([RTE, {**RTE, "sentence1": "", "sentence2": ""}], input_tokens=29)
    with caplog.at_level(logging.WARNING):
        for epoch in range(2):
            for i in range(2):
                data.sample(epoch, i)
    assert data.sample(0, 0)["inputs"] == [*ids("rte sentence1: é sentence2: "[:27]), EOS]
    assert len(data.sample(0, 1)["inputs"]) == 28
    assert caplog.messages == ["c: truncated 1 of 1 inputs read by this process: data.input_tokens is 29."]


def test_a_target_is_never_cut(make_dataset: Callable[..., dataset.TaskDataset]):
    message = (
        r"task 'rte': the target 'not_entailment' has 15 tokens with its end token, but data\.target_tokens is 14\."
    )
    with pytest.raises(DataError, match=message):
        make_dataset([RTE], target_tokens=14, long_targets="cut")
    with pytest.raises(DataError, match=r"data\.max_new_tokens is 14\. Raise it, as labels are never truncated"):
        make_dataset([RTE], max_new_tokens=14)
    assert len(make_dataset([RTE], target_tokens=15)) == 1


class TestOfText:
    """A task whose answers are any text."""

    ROW = {
        "index": 3,
        "query": "q",
        "entities": "A, B",
        "passage": "p",
        "label": "B",
        "answers": ["B", "Be"],
        "group": "7",
    }

    def test_every_answer_is_right(self, make_dataset: Callable[..., dataset.TaskDataset]):
        data = make_dataset([self.ROW], name="record")
        assert data.sample(0, 0)["targets"] == [*ids("B"), EOS]
        assert data.prediction(0, "x") == Prediction("x", ["B", "Be"], "7", source="record")
        assert data.answer_ids == []

    LONG = {**ROW, "label": "Wonderful"}

    def test_a_long_target_is_refused(self, make_dataset: Callable[..., dataset.TaskDataset]):
        message = r"the target 'Wonderful' has 10 tokens with its end token, .* is 9\. 1 more targets are too long\."
        with pytest.raises(DataError, match=message):
            make_dataset([self.ROW, self.LONG, self.LONG], name="record", target_tokens=9)
        assert len(make_dataset([self.LONG], name="record", target_tokens=10)) == 1

    def test_a_long_target_is_cut(self, make_dataset: Callable[..., dataset.TaskDataset]):
        data = make_dataset([self.LONG], name="record", target_tokens=9, long_targets="cut")
        assert data.sample(0, 0)["targets"] == [*ids("Wonderfu"), EOS]
        assert data.prediction(0, "x").references == ["B", "Be"], "answers are compared with the whole text"

    def test_rows_with_long_targets_are_left_out(
        self, make_dataset: Callable[..., dataset.TaskDataset], caplog: pytest.LogCaptureFixture
    ):
        data = make_dataset([self.LONG, self.ROW, self.LONG], name="record", target_tokens=9, long_targets="drop")
        assert (len(data), data.num_questions, data.target(0)) == (1, 1, "B")
        assert caplog.messages == ["c: 2 of 3 rows are skipped, as their targets are longer than 9 tokens."]
        with pytest.raises(DataError, match=r"every target is longer than data\.target_tokens, 9\."):
            make_dataset([self.LONG], name="record", target_tokens=9, long_targets="drop")

    def test_answers_have_a_length_of_their_own(self, make_dataset: Callable[..., dataset.TaskDataset]):
        assert make_dataset([self.ROW], name="record").answer_tokens == 64
        assert make_dataset([self.ROW], name="record", max_new_tokens=5).answer_tokens == 5


def test_a_number_is_written_in_steps(make_dataset: Callable[..., dataset.TaskDataset]):
    data = make_dataset([{"index": 0, "sentence1": "a", "sentence2": "b", "label": "3.75"}], name="stsb")
    assert data.target(0) == "3.8"
    assert data.prediction(0, "1.0") == Prediction("1.0", ["3.8"], source="stsb")
    assert len(data.answer_ids) == 26


def test_only_test_rows_can_omit_the_label(
    make_dataset: Callable[..., dataset.TaskDataset], places: Places, tokenizer: Any
):
    with new_directory(places.data / "c") as folder:
        for split in ("val", "test"):
            (folder / f"{split}.jsonl").write_text(json.dumps({**RTE, "label": None}) + "\n")
    config = load(dataset.Config, {"task": "rte", "corpus": "c"}, "data")
    assert config.build(places, tokenizer, "test", 0).target(0) == "<unk>"
    with pytest.raises(DataError, match=r"val\.jsonl:1: no label\. Only rows of the split 'test' can omit it\."):
        config.build(places, tokenizer, "val", 0)
    with pytest.raises(DataError, match=r"c: has no train\.jsonl"):
        config.check(places)


@pytest.mark.parametrize(
    ("row", "values", "message"),
    [
        (
            {**RTE, "label": "maybe"},
            {},
            r"train\.jsonl:1: expected a label of 'rte': entailment, not_entailment; got 'maybe'",
        ),
        (
            {"index": 0, "label": "entailment"},
            {},
            r"train\.jsonl:1: missing column 'sentence1' of task 'rte', got index, label\.",
        ),
        ({**RTE, "sentence1": 3}, {}, r"train\.jsonl:1: field 'sentence1': expected str, got 3 \(int\)"),
        (
            {"sentence1": "", "sentence2": "", "label": "5.1"},
            {"name": "stsb"},
            r"train\.jsonl:1: expected a label from 0 to 5, got '5\.1'",
        ),
        (
            {"sentence1": "", "sentence2": "", "label": "x"},
            {"name": "stsb"},
            r"expected a number from 0 to 5 as label, got 'x'",
        ),
        (
            {"sentence1": "", "sentence2": "", "label": "nan"},
            {"name": "stsb"},
            r"expected a label from 0 to 5, got 'nan'",
        ),
    ],
)
def test_rows_that_do_not_fit(
    make_dataset: Callable[..., dataset.TaskDataset], row: dict[str, Any], values: dict[str, Any], message: str
):
    with pytest.raises(DataError, match=message):
        make_dataset([row], **values)


def test_errors_before_rows_are_read(places: Places, write_corpus: Callable[..., Path]):
    write_corpus("c", [RTE])
    with pytest.raises(ConfigError, match=r"task: unknown task 'rtee'\. Did you mean 'rte'\?"):
        load(dataset.Config, {"task": "rtee", "corpus": "c"}, "data").check(places)
    with pytest.raises(ConfigError, match=r"data\.task: 'ax' has no training rows\."):
        load(dataset.Config, {"task": "ax", "corpus": "c"}, "data").check(places)
    with pytest.raises(DataError, match=r"train\.jsonl:1: missing column 'passage' of task 'boolq'"):
        load(dataset.Config, {"task": "boolq", "corpus": "c"}, "data").check(places)
    with pytest.raises(DataError, match=r"d: no such data set"):
        load(dataset.Config, {"task": "rte", "corpus": "d"}, "data").check(places)
    assert load(dataset.Config, {"task": "rte", "corpus": "c"}, "data").weight(places) == 2490
    with pytest.raises(ConfigError, match=r"loop\.compile"):
        load(dataset.Config, {"task": "rte", "corpus": "c"}, "data").check_compiled()


def test_a_tokenizer_that_cannot_write_a_label_is_refused(places: Places, write_corpus: Callable[..., Path]):
    """As one that knows no capitals."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, "true": 2, "false": 3}, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    lower = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")
    write_corpus("c", [{"passage": "", "question": "", "label": "True"}])
    with pytest.raises(DataError, match=r"task 'boolq': the tokenizer decodes the label 'False' to 'false'\."):
        load(dataset.Config, {"task": "boolq", "corpus": "c"}, "data").build(places, lower, "train", 0)


def test_validation_rows_are_the_same_whatever_the_seed(make_dataset: Callable[..., dataset.TaskDataset]):
    rows = [{**RTE, "index": i} for i in range(9)]
    data = make_dataset(rows, split="val", val_samples=4)
    assert len({data.row(i)["index"] for i in range(4)}) == len(data) == 4
    with pytest.raises(DataError, match="10 validation samples requested, only 9 available"):
        make_dataset(rows, split="val", val_samples=10)


def test_the_task_is_part_of_the_fingerprint(make_dataset: Callable[..., dataset.TaskDataset]):
    row = {**RTE, "premise": "", "hypothesis": "", "sentence1": "", "sentence2": ""}
    prints = {make_dataset([row], name=name).fingerprint for name in ("rte", "mnli", "wnli")}
    assert len(prints) == 3
    assert make_dataset([row]).fingerprint in prints


def test_sentinel_ends_inputs_and_starts_targets(
    places: Places, write_corpus: Callable[..., Path], make_dataset: Callable[..., dataset.TaskDataset]
):
    """As `*_1_sentinel` of T5's code."""
    write_corpus("c", [RTE])
    tokenizer = byte_tokenizer("<extra_id_0>")
    config = load(dataset.Config, {"task": "rte", "corpus": "c", "sentinel": True, "input_tokens": 16}, "data")
    data = config.build(places, tokenizer, "train", 0)
    mark, sample = tokenizer.convert_tokens_to_ids("<extra_id_0>"), data.sample(0, 0)
    assert tokenizer.decode(sample["inputs"]) == "rte sentence1:<extra_id_0><eos>"
    assert tokenizer.decode(sample["targets"]) == "<extra_id_0>entailment<eos>"
    assert [answer[0] for answer in data.answer_ids] == [mark, mark]
    assert data.prompt(0)["targets"] == [tokenizer.eos_token_id]
    with pytest.raises(DataError, match="sentinel"):
        make_dataset([RTE], sentinel=True)


def test_a_length_above_the_positions_names_its_setting():
    values = {"input_tokens": 8, "target_tokens": 8}
    config = load(dataset.Config, {"task": "rte", "corpus": "c", **values, "max_new_tokens": 12}, "data")
    config.check_length(12)
    with pytest.raises(ConfigError, match=r"^data\.max_new_tokens: 12 tokens are more than the 11 positions"):
        config.check_length(11)
    with pytest.raises(ConfigError, match=r"^data\.input_tokens: 8 tokens are more than the 7 positions"):
        config.check_length(7)
