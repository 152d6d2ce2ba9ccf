"""Tasks prepared from the layouts of their releases: exact rows, errors with their line, and the real files."""

import csv
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.t5 import prepare_task
from src.data import jsonl
from src.errors import DataError
from src.files import read_json

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture
def prepare_rows(tmp_path: Path) -> Callable[..., Rows]:
    """Prepare a task from texts, or paths, of its splits; gives the rows of each split. Files are called
    "<split>.<kind>"."""

    def make(task: str, *words: str, kind: str = "tsv", **splits: str | Path) -> Rows:
        for split, source in splits.items():
            path = source if isinstance(source, Path) else tmp_path / f"{split}.{kind}"
            if isinstance(source, str):
                path.write_text(source, encoding="utf-8", newline="")
            words = (*words, f"--{split}", str(path))
        prepare_task.main(["--data_path", str(tmp_path / "data"), "--task", task, *words])
        paths = sorted((tmp_path / "data" / task).glob("*.jsonl"))
        return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in paths}

    return make


@pytest.fixture
def refusal_of(
    prepare_rows: Callable[..., Rows], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What is said of sources that do not fit; nothing is written then."""

    def error_of(task: str, *words: str, **splits: str | Path) -> str:
        assert not prepare_rows(task, *words, **splits)  # type: ignore[arg-type]
        assert not (tmp_path / "data" / task).exists()
        return capsys.readouterr().err.rstrip("\n")

    return error_of


def passage_with(*entities: Any) -> dict[str, Any]:
    """A row of ReCoRD with a question, whose passage is "A b"."""
    return {"passage": {"text": "A b", "entities": entities}, "qas": [{"query": "q", "answers": [{"text": "A"}]}]}


TEXT = ' "it\'s ""so" \\N\\n '


class TestGlue:
    @pytest.mark.parametrize(
        ("task", "source", "expected"),
        [
            ("sst2", "a b \t1\nc\t0\n", [("a b ", "positive"), ("c", "negative")]),
            ("sst2", "sentence\tlabel\na b \t1\r\nc\t0", [("a b ", "positive"), ("c", "negative")]),
            ("cola", f"gj04\t1\t\tx\ngj04\t0\t*\t{TEXT}\n", [("x", "acceptable"), (TEXT, "unacceptable")]),
            ("rte", "index\tsentence1\tsentence2\tlabel\n4\ta\tb\tentailment\n", [("a", "b", "entailment")]),
            ("rte", "4\ta\tb\tnot_entailment\n", [("a", "b", "not_entailment")]),
            ("mrpc", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta\tb\n", [("a", "b", "equivalent")]),
            (
                "qqp",
                "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta\tb\t0\n",
                [("a", "b", "not_duplicate")],
            ),
            ("stsb", "index\tgenre\tsentence1\tsentence2\tscore\n0\tg\ta\tb\t3.800\n", [("a", "b", "3.800")]),
            (
                "mnli",
                "index\tpairID\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label\n0\t1\t(p)\tp\th\tneutral\tcontradiction\n",
                [("h", "p", "contradiction")],
            ),
            ("qnli", "index\tquestion\tsentence\tlabel\n0\tq\ts\tnot_entailment\n", [("q", "s", "not_entailment")]),
            ("wnli", "0\ta\tb\t1\n", [("a", "b", "entailment")]),
            ("stsb", "index\tsentence1\tsentence2\tscore\n0\ta\tb\t0.5\n", [("a", "b", "0.5")]),
            ("wnli", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n", [("a", "b", "entailment")]),
        ],
    )
    def test_original_layouts(
        self, prepare_rows: Callable[..., Rows], task: str, source: str, expected: list[tuple[str, ...]]
    ):
        """A quotation mark is a character like any other."""
        rows = prepare_rows(task, train=source)["train"]
        assert [tuple(value for name, value in row.items() if name != "index") for row in rows] == expected

    def test_a_test_split_has_its_index_and_no_labels(self, prepare_rows: Callable[..., Rows]):
        assert prepare_rows("qnli", test="index\tquestion\tsentence\n7\tq\ts\n5\tq\tt\n")["test"] == [
            {"index": 7, "question": "q", "sentence": "s", "label": None},
            {"index": 5, "question": "q", "sentence": "t", "label": None},
        ]

    def test_rows_without_an_index_of_their_own_are_numbered(self, prepare_rows: Callable[..., Rows]):
        assert [
            row["index"] for row in prepare_rows("rte", train="4\ta\tb\tentailment\n4\ta\tc\tentailment\n")["train"]
        ] == [0, 1]

    @pytest.mark.parametrize(
        ("task", "source", "message"),
        [
            (
                "rte",
                "4\ta\tb\tentailment\n5\ta\tb\tmaybe\n",
                "train.tsv:2: label of 'rte': expected one of entailment, not_entailment, or 0 to 1, got 'maybe'",
            ),
            ("rte", "4\ta\tb\tentailment\n5\ta\tentailment\n", "train.tsv:2: 3 columns, where the first line has 4."),
            ("rte", "index\tsentence1\tsentence2\tlabel\n4\ta\tb\t\n", "train.tsv:2: no label in 'label'."),
            (
                "rte",
                "a\tb\n",
                (
                    "train.tsv:1: expected a column 'sentence1' or 'premise' for 'sentence1' of 'rte', got 2 columns: "
                    "'a', 'b'. A file without a header"
                ),
            ),
            (
                "qnli",
                "0\tq\ts\tentailment\n",
                "train.tsv:1: expected a column 'question' for 'question' of 'qnli', got 4 columns",
            ),
            ("sst2", "a\t2\n", "train.tsv:1: label of 'sst2': expected one of negative, positive, or 0 to 1, got '2'."),
            (
                "stsb",
                "index\tsentence1\tsentence2\tscore\n0\ta\tb\t5.2\n",
                "train.tsv:2: expected a label from 0 to 5, got '5.2'",
            ),
            ("sst2", "\n\n", "train.tsv: empty."),
            ("sst2", "a\t1\n\nb\t1\n", "train.tsv:2: 1 columns, where the first line has 2."),
            ("rtee", "a\t1\n", "task: unknown task 'rtee'. Did you mean 'rte'?"),
            ("ax", "a\t1\n", "--train: the task 'ax' has no training rows."),
        ],
    )
    def test_malformed_rows_are_refused_with_their_line(
        self, refusal_of: Callable[..., str], task: str, source: str, message: str
    ):
        assert message in refusal_of(task, train=source)

    def test_rows_that_do_not_fit_can_be_left_out(self, prepare_rows: Callable[..., Rows], tmp_path: Path):
        """As the few of QQP that lack a column."""
        source = "id\tquestion1\tquestion2\tis_duplicate\n1\ta\tb\t0\n2\ta\n3\tc\td\t1\n"
        rows = prepare_rows("qqp", "--skip_bad_rows", train=source)["train"]
        assert [row["index"] for row in rows] == [1, 3]
        skipped_facts = read_json(tmp_path / "data" / "qqp" / "manifest.json", DataError)["skipped"]["train"]
        assert skipped_facts == {
            "rows": 1,
            "first": [f"{tmp_path}/train.tsv:3: 2 columns, where the first line has 4."],
        }


class TestSuperGlue:
    @pytest.mark.parametrize(
        ("task", "row", "expected"),
        [
            (
                "boolq",
                {"question": "q", "passage": "p", "idx": 3, "label": True},
                {"index": 3, "passage": "p", "question": "q", "label": "True"},
            ),
            (
                "cb",
                {"premise": "p", "hypothesis": "h", "label": "neutral"},
                {"hypothesis": "h", "premise": "p", "label": "neutral"},
            ),
            (
                "copa",
                {"premise": "p", "choice1": "a", "choice2": "b", "question": "cause", "label": 1},
                {"choice1": "a", "choice2": "b", "premise": "p", "question": "cause", "label": "choice2"},
            ),
            (
                "rte",
                {"premise": "p", "hypothesis": "h", "label": "entailment"},
                {"sentence1": "p", "sentence2": "h", "label": "entailment"},
            ),
            (
                "wic",
                {"word": "w", "sentence1": "a", "sentence2": "b", "start1": 1, "label": False},
                {"sentence1": "a", "sentence2": "b", "word": "w", "label": "False"},
            ),
            (
                "copa",
                {"premise": "p", "choice1": "a", "choice2": "b", "question": "effect", "label": True},
                {"label": "choice2"},
            ),
            (
                "axb",
                {"sentence1": "a", "sentence2": "b", "label": "not_entailment"},
                {"premise": "a", "hypothesis": "b"},
            ),
            ("axg", {"premise": "a", "hypothesis": "b", "label": "entailment"}, {"premise": "a", "hypothesis": "b"}),
            (
                "superglue_rte",
                {"premise": "a", "hypothesis": "b", "label": "entailment"},
                {"premise": "a", "hypothesis": "b"},
            ),
        ],
    )
    def test_rows_as_they_are(
        self, prepare_rows: Callable[..., Rows], task: str, row: dict[str, Any], expected: dict[str, Any]
    ):
        (result,) = prepare_rows(task, kind="jsonl", val=json.dumps(row))["val"]
        assert expected.items() <= result.items()

    def test_multirc_is_a_row_for_each_answer(self, prepare_rows: Callable[..., Rows]):
        questions = [
            {
                "question": "q1",
                "answers": [{"text": "a1", "idx": 0, "label": 1}, {"text": "a2", "idx": 1, "label": 0}],
                "idx": 4,
            },
            {"question": "q2", "answers": [{"text": "a3", "idx": 2, "label": 1}], "idx": 5},
        ]
        text = "<b>Sent 1: </b>A.<br><b>Sent 2: </b>B.<br>"
        source = json.dumps({"idx": 9, "passage": {"text": text, "questions": questions}})
        paragraph = "Sent 1: A. Sent 2: B. "
        expected = [("q1", "a1", "True", "9-4"), ("q1", "a2", "False", "9-4"), ("q2", "a3", "True", "9-5")]
        assert prepare_rows("multirc", kind="jsonl", val=source)["val"] == [
            {"index": i, "question": q, "answer": a, "paragraph": paragraph, "label": label, "group": group}
            for i, (q, a, label, group) in enumerate(expected)
        ]

    def test_record(self, prepare_rows: Callable[..., Rows]):
        """Entities by their first and last character, once and in order, as answers; highlights become sentences."""
        text = "Ann met Bo.\n@highlight\nBo is ill\n@highlight\nAnn left"
        passage = {"text": text, "entities": [{"start": 8, "end": 9}, {"start": 0, "end": 2}, {"start": 44, "end": 46}]}
        answers = [{"text": "Bobby"}, {"start": 8, "end": 9, "text": "Bo"}, {"text": "Bobby"}]
        source = json.dumps(
            {"passage": passage, "qas": [{"idx": 6, "query": "@placeholder is ill", "answers": answers}]}
        )
        columns = {"query": "@placeholder is ill", "entities": "Ann, Bo", "passage": "Ann met Bo. Bo is ill. Ann left"}
        rows = prepare_rows("record", kind="jsonl", train=source, val=source.replace("Ann left", "Ann went"))
        more = {"answers": ["Bo", "Bobby"], "group": "6"}
        assert rows["train"] == [
            {"index": i, **columns, "label": label, **more} for i, label in enumerate(["Bo", "Bobby"])
        ]
        (only,) = rows["val"]
        assert (only["label"], only["answers"]) == ("Bo", ["Bo", "Bobby"])

    def test_wsc_marks_noun_and_pronoun(self, prepare_rows: Callable[..., Rows]):
        """By the number of the word; marks before the pronoun count as words."""
        target = {"span1_text": "Mark", "span1_index": 0, "span2_text": "He", "span2_index": 8}
        row = {
            "text": "Mark told Pete many lies about himself. Then He laughed.",
            "target": target,
            "label": False,
            "idx": 2,
        }
        before = {"span1_text": "Pete", "span1_index": 3, "span2_text": "he", "span2_index": 1}
        other = {"text": "When he left Pete cried.", "target": before, "label": True, "idx": 1}
        rows = prepare_rows("wsc", kind="jsonl", train=json.dumps(row) + "\n" + json.dumps(other))["train"]
        assert rows == [
            {"index": 2, "text": "* Mark * told Pete many lies about himself. Then # He # laughed.", "label": "False"},
            {"index": 1, "text": "When # he # left * Pete * cried.", "label": "True"},
        ]

    @pytest.mark.parametrize(
        ("text", "noun", "pronoun", "expected"),
        [
            ("the cat ran. It fell", ("The cat", 0), ("It", 3), "* the cat * ran. # It # fell"),  # another case
            ("Bob ran. he fell", ("Bob", 0), ("He", 2), "* Bob * ran. # he # fell"),
            (
                "We saw Bob Ray, and he fell",
                ("Bob Ray.", 2),
                ("he", 5),
                "We saw * Bob Ray *, and # he # fell",
            ),  # its full stop
            (
                "We saw Bob Ray and he fell",
                ("Bob\nRay", 2),
                ("he", 5),
                "We saw * Bob Ray * and # he # fell",
            ),  # its line end
            (
                "Kamenev met Zinoviev. They left",
                ("Kamenev and Zinoviev", 0),
                ("They", 3),
                "Kamenev met Zinoviev. They left",
            ),
            ("They c as A b.", ("b", 2), ("They", 0), "# They # c as A b."),  # a wrong number
            ("A b. He c", ("z", 9), ("q", 7), "A b. He c"),
        ],
    )
    def test_spans_of_wsc_at_other_words(
        self, prepare_rows: Callable[..., Rows], text: str, noun: Any, pronoun: Any, expected: str
    ):
        """Kinds of the release's 106 rows: repaired as wsc.fixed of TFDS does, else without marks; no row is lost."""
        target = dict(zip(("span1_text", "span1_index", "span2_text", "span2_index"), (*noun, *pronoun), strict=True))
        rows = prepare_rows("wsc", kind="jsonl", val=json.dumps({"text": text, "target": target, "label": True}))["val"]
        assert [row["text"] for row in rows] == [expected]

    def test_the_noun_of_a_pronoun(self, prepare_rows: Callable[..., Rows]):
        """wsc_simple and dpr, as Google's preprocessors write them: "wsc: " and the text, and the noun as the
        target."""
        target = {"span1_text": "The councilmen", "span1_index": 0, "span2_text": "they", "span2_index": 6}
        row = {
            "text": "the councilmen refused a permit because they, alas, feared",
            "target": target,
            "label": True,
            "idx": 0,
        }
        lines = [
            row,
            {**row, "label": False, "idx": 1},
            {**row, "text": row["text"].replace("because", "as because"), "idx": 2},
        ]
        rows = prepare_rows("wsc_simple", kind="jsonl", train="\n".join(map(json.dumps, lines)))["train"]
        assert [(r["text"], r["label"]) for r in rows] == [
            ("the councilmen refused a permit because *they*, alas, feared", "the councilmen"),
            ("the councilmen refused a permit as because *they*, alas, feared", "the councilmen"),
        ]
        (test_row,) = prepare_rows(
            "wsc_simple", kind="jsonl", test=json.dumps({k: v for k, v in row.items() if k != "label"})
        )["test"]
        assert test_row["label"] is None
        sentence = {
            "sentence": "The bee landed on the flower because it, it had pollen.",
            "pronoun": "it",
            "candidates": ["bee", "flower"],
        }
        (dpr_row,) = prepare_rows("dpr", kind="jsonl", train=json.dumps({**sentence, "label": 1}))["train"]
        assert (dpr_row["text"], dpr_row["label"]) == (
            "The bee landed on the flower because *it*, it had pollen.",
            "flower",
        )

    def test_rows_of_the_hub_are_the_same(self, prepare_rows: Callable[..., Rows], tmp_path: Path):
        """There MultiRC, ReCoRD and WSC have been flattened, and labels are numbers."""
        idx = {"paragraph": 9, "question": 4, "answer": 0}
        multirc = {"paragraph": "A.<br>B.", "question": "q", "answer": "<b>a</b>", "idx": idx, "label": 1}
        (result,) = prepare_rows("multirc", kind="jsonl", val=json.dumps(multirc))["val"]
        assert result == {
            "index": 0,
            "question": "q",
            "answer": "a",
            "paragraph": "A. B.",
            "label": "True",
            "group": "9-4",
        }
        wsc = {
            "text": "Bo sees it.",
            "span1_text": "Bo",
            "span1_index": 0,
            "span2_text": "it",
            "span2_index": 2,
            "label": 0,
            "idx": 0,
        }
        (result,) = prepare_rows("wsc", kind="jsonl", val=json.dumps(wsc))["val"]
        assert result["text"] == "* Bo * sees # it #."
        record = {
            "passage": "Ann met Bo.",
            "query": "q",
            "entities": ["Ann"],
            "answers": ["Ann"],
            "idx": {"passage": 0, "query": 1},
        }
        (result,) = prepare_rows("record", kind="jsonl", val=json.dumps(record))["val"]
        assert (result["entities"], result["passage"], result["label"]) == ("Ann", "Ann met Bo.", "Ann")

    @pytest.mark.parametrize(
        ("task", "row", "message"),
        [
            (
                "boolq",
                {"question": "q", "label": True},
                "train.jsonl:1: expected text in 'passage', got only the columns question, label.",
            ),
            (
                "boolq",
                {"question": "q", "passage": 3, "label": True},
                "train.jsonl:1: expected text in 'passage', got '3' (int).",
            ),
            (
                "boolq",
                {"question": "q", "passage": "p", "label": "yes"},
                "train.jsonl:1: label of 'boolq': expected one of False, True, or 0 to 1, got 'yes'",
            ),
            (
                "multirc",
                {"passage": {"text": "t"}},
                "train.jsonl:1: field 'questions': expected list, got 'None' (NoneType).",
            ),
            (
                "dpr",
                {"sentence": "a he.", "pronoun": "he", "candidates": ["x", "y"], "label": 2},
                "label: expected the index of one of 2 candidates, got 2",
            ),
            ("boolq", {"question": "q", "passage": "\ud800", "label": True}, "train.jsonl:1: field 'passage': \\ud800"),
            ("boolq", {"question": "q", "passage": "p", "label": 1, "answers": [3]}, "train.jsonl:1: field 'answers'"),
            ("record", passage_with({"start": 0}), "train.jsonl:1: field 'end'"),
            ("record", passage_with("A"), "train.jsonl:1: field 'start'"),
            ("record", {**passage_with(), "qas": [{"query": "q", "answers": ["A"]}]}, "train.jsonl:1: field 'text'"),
            ("record", {**passage_with(), "qas": [{"query": "q", "answers": "A"}]}, "train.jsonl:1: field 'answers'"),
            (
                "record",
                {"passage": "A b", "query": "q", "entities": ["A", None], "answers": ["A"]},
                "train.jsonl:1: field 'entities'",
            ),
        ],
    )
    def test_malformed_rows(
        self,
        refusal_of: Callable[..., str],
        prepare_rows: Callable[..., Rows],
        task: str,
        row: dict[str, Any],
        message: str,
        capsys: pytest.CaptureFixture[str],
    ):
        assert message in refusal_of(task, train=json.dumps(row), kind="jsonl")
        assert not prepare_rows(task, "--skip_bad_rows", train=json.dumps(row), kind="jsonl")
        assert "--train: no row is left" in capsys.readouterr().err

    def test_record_without_answers(self, prepare_rows: Callable[..., Rows]):
        row = {**passage_with({"start": 0, "end": 0}), "qas": [{"query": "q", "answers": None}]}
        (result,) = prepare_rows("record", kind="jsonl", test=json.dumps(row))["test"]
        assert (result["entities"], result["label"]) == ("A", None)

    @pytest.mark.parametrize("word", [-1, 10**12])
    @pytest.mark.parametrize("task", ["wsc", "wsc_simple"])
    def test_a_span_at_no_word_is_not_marked(self, prepare_rows: Callable[..., Rows], task: str, word: int):
        spans = {"span1_text": "Bo", "span1_index": word, "span2_text": "it", "span2_index": word}
        row = {"text": "Bo sees it", **spans, "label": True, "idx": 0}
        assert prepare_rows(task, kind="jsonl", val=json.dumps(row))["val"][0]["text"] == "Bo sees it"


def test_discoeval(prepare_rows: Callable[..., Rows]):
    (row,) = prepare_rows("SPwiki", kind="txt", train="2\ta\tb\tc\td\te\n")["train"]
    assert row == {
        "index": 0,
        **{
            f"{name}_sentence": text
            for name, text in zip(["first", "second", "third", "fourth", "fifth"], "abcde", strict=True)
        },
        "label": "Third sentence",
    }
    (row,) = prepare_rows("PDTB-I", kind="txt", train="Expansion.List\ta\tb\n")["train"]
    assert row["label"] == "Expansion.List"
    (row,) = prepare_rows("SSPabs", kind="jsonl", train='{"sentence_1": "a", "label": "1"}')["train"]
    assert row["label"] == "Belongs to abstract"


def test_csv_has_quotation_marks_and_a_header(prepare_rows: Callable[..., Rows], refusal_of: Callable[..., str]):
    (row,) = prepare_rows("sst2", kind="csv", train='label,sentence\n1,"a, ""b""\nc"\n')["train"]
    assert row == {"index": 0, "sentence": 'a, "b"\nc', "label": "positive"}
    assert "train.csv:2: more or fewer columns than in the header." in refusal_of(
        "cola", kind="csv", train="label,sentence\n1\n"
    )


@pytest.mark.parametrize(("kind", "sign"), [("csv", ","), ("tsv", "\t")])
def test_names_of_columns(prepare_rows: Callable[..., Rows], refusal_of: Callable[..., str], kind: str, sign: str):
    """A column without a name is not read. Two columns with a name that is read are refused."""
    names = sign.join(["", "sentence", "label", "x", "x"])
    (row,) = prepare_rows("sst2", kind=kind, val=f"{names}\n{sign.join('0a1bc')}\n")["val"]
    assert (row["sentence"], row["label"]) == ("a", "positive")
    message = refusal_of("cola", kind=kind, val=f"{names}{sign}label\n{sign.join('0a1bc0')}\n")
    assert f"val.{kind}:1: 2 columns 'label'" in message


def test_minus_one_means_unlabelled_only_for_classes(prepare_rows: Callable[..., Rows], tmp_path: Path):
    lines = [json.dumps({"context": f"def f{i}(): …", "answer": "-1", "kind": "name"}) for i in range(2)]
    assert [row["label"] for row in prepare_rows("codename", kind="jsonl", train="\n".join(lines))["train"]] == [
        "-1",
        "-1",
    ]
    mine = {"columns": ["a"], "kind": "regression", "range": [-2, 2], "metrics": ["pearson"], "weight": None}
    (tmp_path / "mine.yaml").write_text(json.dumps({"mine": mine}))
    lines = [json.dumps({"a": "x", "label": label}) for label in (-1, "-1", -1.0, 1.5)]
    rows = prepare_rows("mine", "--task_file", str(tmp_path / "mine.yaml"), kind="jsonl", val="\n".join(lines))["val"]
    assert [row["label"] for row in rows] == ["-1", "-1", "-1.0", "1.5"]
    test_rows = prepare_rows(
        "stsb", kind="jsonl", test=json.dumps({"sentence1": "a", "sentence2": "b", "label": -1.0})
    )["test"]
    assert test_rows[0]["label"] is None
    assert (
        prepare_rows("sst2", kind="jsonl", test=json.dumps({"sentence": "a", "label": "-1"}))["test"][0]["label"]
        is None
    )


def test_only_the_rows_that_the_task_is_about(prepare_rows: Callable[..., Rows]):
    kinds = ("does", "name", "calls", "does")
    lines = [
        json.dumps({"context": f"def f{i}(): …", "answer": f"answer {i}", "kind": kind}) for i, kind in enumerate(kinds)
    ]
    result = prepare_rows("codedoc", kind="jsonl", train="\n".join(lines))["train"]
    assert [(row["code"], row["label"]) for row in result] == [("def f0(): …", "answer 0"), ("def f3(): …", "answer 3")]
    assert [row["label"] for row in prepare_rows("codename", kind="jsonl", train="\n".join(lines))["train"]] == [
        "answer 1"
    ]


def test_a_folder_of_datasets(prepare_rows: Callable[..., Rows], refusal_of: Callable[..., str], tmp_path: Path):
    """The names of its classes count, whatever their numbers."""
    import datasets

    classes = datasets.ClassLabel(names=["positive", "negative"])
    rows = {"sentence": ["a", "b", "c"], "label": [0, 1, -1], "idx": [5, 6, 7]}
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": classes, "idx": datasets.Value("int32")}
    )
    dataset = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"validation": dataset.select([0, 1]), "test": dataset.select([2])}).save_to_disk(
        tmp_path / "saved"
    )
    result = prepare_rows("sst2", val=tmp_path / "saved", test=tmp_path / "saved")
    assert [(row["index"], row["label"]) for row in result["val"]] == [(5, "positive"), (6, "negative")]
    assert [(row["index"], row["label"]) for row in result["test"]] == [(7, None)]
    assert "saved: no split 'train'. Splits: validation, test." in refusal_of("cola", train=tmp_path / "saved")


def test_parquet_has_names_of_classes_too(
    prepare_rows: Callable[..., Rows], refusal_of: Callable[..., str], tmp_path: Path
):
    import datasets

    label = datasets.ClassLabel(names=["positive", "negative"])
    features = datasets.Features({"sentence": datasets.Value("string"), "label": label})
    rows = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [0, 1]}, features=features)
    rows.to_parquet(path := tmp_path / "a.parquet")
    assert [row["label"] for row in prepare_rows("sst2", val=path)["val"]] == ["positive", "negative"]
    table = pyarrow.table({"sentence": ["a"], "label": [2]}).replace_schema_metadata(parquet.read_schema(path).metadata)
    parquet.write_table(table, path := tmp_path / "b.parquet")
    shutil.rmtree(tmp_path / "data")
    message = refusal_of("sst2", val=path)
    assert f"{path}: row 1: 'label'" in message
    assert "got 2" in message


def test_only_the_given_parquet_file_is_read(prepare_rows: Callable[..., Rows], tmp_path: Path):
    """Its name is no pattern, and no copy of an older file with the same time of change is used."""
    for name, text in (("q1", "x"), ("q?", "y"), ("x[1]", "z")):
        parquet.write_table(pyarrow.table({"sentence": [text], "label": [1]}), tmp_path / f"{name}.parquet")
    rows = prepare_rows("sst2", train=tmp_path / "q?.parquet", val=tmp_path / "x[1].parquet")
    assert [row["sentence"] for split in rows.values() for row in split] == ["y", "z"]
    path = tmp_path / "x[1].parquet"
    before = path.stat()
    parquet.write_table(pyarrow.table({"sentence": ["w"], "label": [1]}), path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prepare_rows("sst2", train=tmp_path / "q?.parquet", val=path)["val"][0]["sentence"] == "w"


def test_a_damaged_parquet_file_is_refused(refusal_of: Callable[..., str], tmp_path: Path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"sentence": ["a"], "label": [1]}), path)
    content = path.read_bytes()
    for remaining in (content[: len(content) // 2], b""):
        path.write_bytes(remaining)
        assert str(path) in refusal_of("sst2", train=path)


def test_missing_sources(refusal_of: Callable[..., str], tmp_path: Path):
    assert "nowhere.tsv: no such file." in refusal_of("rte", train=tmp_path / "nowhere.tsv")
    message = refusal_of("rte", "--train", "hub:nobody/nothing")
    assert "hub:nobody/nothing: cannot be loaded from the hub or its cache: " in message
    assert ".save_to_disk('FOLDER')" in message
    assert 'Use "hub:nyu-mll/glue@rte"' in refusal_of("rte", "--train", "nyu-mll/glue@rte")
    assert "--train, --val, --test: none is set." in refusal_of("rte")


def test_val_percent_splits_by_question(prepare_rows: Callable[..., Rows], tmp_path: Path):
    def lines(first: int) -> str:
        questions = [
            {"question": "q", "answers": [{"text": f"{i}", "label": 1} for i in range(3)], "idx": q} for q in range(20)
        ]
        return json.dumps({"idx": first, "passage": {"text": "t", "questions": questions}})

    rows = prepare_rows("multirc", "--val_percent", "25", kind="jsonl", train=lines(0))
    groups = {split: {row["group"] for row in some} for split, some in rows.items()}
    assert not groups["train"] & groups["val"]
    assert (len(groups["val"]), len(rows["val"]), len(rows["train"])) == (5, 15, 45)


def test_the_same_sources_give_the_same_bytes_and_are_read_once(
    prepare_rows: Callable[..., Rows], tmp_path: Path, capsys: Any
):
    folder = tmp_path / "data" / "sst2"
    prepare_rows("sst2", "--max_rows", "2", train="a\t1\nb\t0\nc\t1\n", val="d\t1\na\t1\n")
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "train  2 rows: 1 negative; 1 positive" in (output := capsys.readouterr().out)
    assert "1 inputs of train are in another split too." in output
    prepare_rows("sst2", "--max_rows", "2", train="a\t1\nb\t0\nc\t1\n", val="d\t1\na\t1\n")
    assert "nothing to do." in capsys.readouterr().out
    shutil.rmtree(folder)
    prepare_rows("sst2", "--max_rows", "2", train="a\t1\nb\t0\nc\t1\n", val="d\t1\na\t1\n")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    rows = prepare_rows("sst2", train="a\t1\nb\t0\nc\t1\n", val="d\t1\na\t1\n")
    assert len(rows["train"]) == 3


def test_one_source_is_not_given_twice(refusal_of: Callable[..., str]):
    message = refusal_of("sst2", train="a\t1\n", val="a\t1\n")
    assert re.search(r"--val .*val\.tsv: same data as --train .*train\.tsv\.", message)


class TestRealFiles:
    """What is prepare_rows is compared with the same file read another way."""

    @pytest.mark.parametrize(
        ("task", "train", "val", "label"),
        [
            ("rte", "RTE/train.tsv", "RTE/val.tsv", {"entailment": "entailment", "not_entailment": "not_entailment"}),
            ("sst2", "SST-2/train.tsv", "SST-2/dev.tsv", {"1": "positive", "0": "negative"}),
            ("cola", "CoLA/in_domain_train.tsv", "CoLA/in_domain_dev.tsv", {"1": "acceptable", "0": "unacceptable"}),
        ],
    )
    def test_every_row_is_there(
        self,
        prepare_rows: Callable[..., Rows],
        shared_data: Path,
        task: str,
        train: str,
        val: str,
        label: dict[str, str],
    ):
        glue, place, texts = (
            shared_data / "glue",
            {"rte": 3, "sst2": 1, "cola": 1}[task],
            {"rte": [1, 2], "sst2": [0], "cola": [3]}[task],
        )
        if not glue.is_dir():
            pytest.skip(f"{shared_data} holds no glue")
        result = prepare_rows(task, train=glue / train, val=glue / val)
        for split, name in (("train", train), ("val", val)):
            with open(glue / name, newline="\n", encoding="utf-8") as file:
                records = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
            if records[0][0] == "index":
                del records[0]
            expected = [(*(record[i] for i in texts), label[record[place]]) for record in records]
            columns = {"rte": ["sentence1", "sentence2"]}.get(task, ["sentence"])
            assert [(*(row[column] for column in columns), row["label"]) for row in result[split]] == expected
            assert min(Counter(row["label"] for row in result[split]).values()) > 50
        counts = {"rte": (2127, 363), "sst2": (6920, 872), "cola": (8551, 527)}[task]
        assert (len(result["train"]), len(result["val"])) == counts

    def test_the_prepared_rows_are_read_as_samples(
        self, prepare_rows: Callable[..., Rows], shared_data: Path, tmp_path: Path
    ):
        glue = shared_data / "glue" / "RTE"
        if not glue.is_dir():
            pytest.skip(f"{shared_data} holds no glue/RTE")
        prepare_rows("rte", train=glue / "train.tsv", val=glue / "val.tsv")
        rows = jsonl.read_rows(
            tmp_path / "data" / "rte" / "val.jsonl", {"sentence1": str, "sentence2": str, "label": str, "index": int}
        )
        assert len(rows) == 363
