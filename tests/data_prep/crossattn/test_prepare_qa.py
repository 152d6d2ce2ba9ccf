"""From an original release to a prepared folder: whole or none, the same every time, and split without leaks."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from data_prep.crossattn import prepare_qa
from data_prep.crossattn.qa_splits import Options
from src import files
from src.data import jsonl
from src.errors import DataError, UserError
from src.experiments.config import Places


def article(number, questions=2):
    qas = [
        {"id": f"{number}-{q}", "question": f"Where is {q}?", "answers": [{"text": f"town {q}"}]}
        for q in range(questions)
    ]
    return {"title": f"T{number}", "paragraphs": [{"context": f"Paragraph {number} tells of a town.", "qas": qas}]}


def squad(path, numbers):
    path.write_text(json.dumps({"version": "1.1", "data": [article(number) for number in numbers]}))
    return str(path)


def hotpot(path, count, chain=None):
    """Questions on two paragraphs each, P0 P1, P1 P2 and so on, among three distractors. chain: so many questions are
    connected."""
    first = lambda i: i if chain is None else i + i // chain  # noqa: E731
    rows = [
        {
            "_id": f"h{i}",
            "question": f"Is {i} odd?",
            "answer": "yes" if i % 2 else "no",
            "supporting_facts": [[f"P{first(i)}", 0], [f"P{first(i) + 1}", 0]],
            "context": [
                [f"{name}", [f"{name} is.", " Yes."]] for name in (f"P{first(i)}", f"P{first(i) + 1}", "D0", "D1", "D2")
            ],
        }
        for i in range(count)
    ]
    path.write_text(json.dumps(rows))
    return str(path)


@pytest.fixture
def prepare(tmp_path):
    """Make a data set named c of toy sources; gives its rows by split."""

    def make(**options):
        options = Options(**{"name": "c", **options})
        prepare_qa.prepare(tmp_path / "data", options)
        fields = {"context": str, "question": str, "answer": str, "dataset": str, "sample_idx": int}
        lists = {"answers": list[str], "contexts_list": list[str], "titles_list": list[str]}
        optional = {"useful_contexts": list[int], "id": str}
        folder = tmp_path / "data" / options.name
        return {
            split: list(jsonl.read_rows(folder / f"{split}.jsonl", {**fields, **lists}, optional))
            for split in ("train", "val")
        }

    return make


@pytest.fixture
def manifest(tmp_path):
    """Read the manifest of the data set named c."""
    return lambda: json.loads((tmp_path / "data" / "c" / "manifest.json").read_text())


def test_rows_and_manifest(tmp_path, prepare, manifest):
    train, val = squad(tmp_path / "train.json", range(3)), squad(tmp_path / "dev.json", range(3, 5))
    rows = prepare(train=(train,), val=(val,))
    assert rows["train"][3] == {
        "context": "Paragraph 1 tells of a town.",
        "contexts_list": ["Paragraph 1 tells of a town."],
        "titles_list": ["T1"],
        "useful_contexts": [1],
        "question": "Where is 1?",
        "answer": "town 1",
        "answers": ["town 1"],
        "sample_idx": 3,
        "dataset": "squad",
        "id": "1-1",
    }
    assert [row["id"] for row in rows["val"]] == ["3-0", "3-1", "4-0", "4-1"]
    facts = manifest()
    assert facts["counts"]["train"] == {
        "rows": {"squad": 6},
        "unanswerable": 0,
        "useful_contexts": 3,
        "rows_with_fewer_distractors": 0,
    }
    dev = tmp_path / "dev.json"
    assert facts["made_from"]["sources"]["val"] == [
        {"name": "dev.json", "bytes": dev.stat().st_size, "sha256": files.sha256(dev)}
    ]
    assert facts["command"] == "python -m data_prep.crossattn.prepare_qa"
    assert facts["skipped"] == {"train": {}, "val": {}}
    assert str(tmp_path) not in json.dumps(facts), "the same wherever it is made"
    assert files.defect(tmp_path / "data" / "c") is None


def test_twice_gives_the_same_bytes_and_a_third_time_nothing(tmp_path, prepare, capsys):
    source = hotpot(tmp_path / "h.json", 40, chain=2)
    options = {"train": (source,), "val_percent": 40, "distractors": 4, "distractors_from": "rows", "seed": 3}

    def contents(name):
        prepare(name=name, **options)
        return {path.name: path.read_bytes() for path in (tmp_path / "data" / name).iterdir()}

    first = contents("c")
    assert contents("d") == first
    assert "made in" in capsys.readouterr().out
    prepare(**options)
    assert "nothing to do" in capsys.readouterr().out
    options["seed"] = 4
    assert contents("c")["train.jsonl"] != first["train.jsonl"]
    with open(source, "a") as file:
        file.write(" ")
    assert "nothing to do" not in capsys.readouterr().out
    prepare(**options)
    assert "made in" in capsys.readouterr().out


def test_supporting_paragraphs_are_shuffled_among_distractors(tmp_path, prepare):
    rows = prepare(train=(hotpot(tmp_path / "h.json", 60),), val=(hotpot(tmp_path / "v.json", 61),))["train"]
    for i, row in enumerate(rows):
        assert sorted(row["titles_list"]) == sorted([f"P{i}", f"P{i + 1}", "D0", "D1", "D2"])
        assert row["useful_contexts"] == [int(title in {f"P{i}", f"P{i + 1}"}) for title in row["titles_list"]]
        useful = [text for text, mark in zip(row["contexts_list"], row["useful_contexts"], strict=True) if mark]
        assert row["context"] == " ".join(useful)
        assert row["answers"] == ["Yes" if i % 2 else "No"]
    places = Counter(row["titles_list"].index(f"P{i}") for i, row in enumerate(rows))
    assert set(places) == set(range(5))
    in_given_order = prepare(
        train=(str(tmp_path / "h.json"),), val=(str(tmp_path / "v.json"),), position="given", distractors=1
    )["train"]
    assert [row["titles_list"] for row in in_given_order] == [[f"P{i}", f"P{i + 1}", "D0"] for i in range(60)]


def test_no_useful_context_is_in_both_splits(tmp_path, prepare, manifest):
    rows = prepare(train=(squad(tmp_path / "s.json", range(200)),), val_percent=20)
    assert not {row["context"] for row in rows["train"]} & {row["context"] for row in rows["val"]}
    assert 40 < len(rows["val"]) < 140, "about 80 of 400"
    assert len(rows["train"]) + len(rows["val"]) == 400
    more = prepare(train=(squad(tmp_path / "m.json", range(100, 300)),), val_percent=20)
    of_both = {row["context"] for row in more["val"]} & {
        article(n)["paragraphs"][0]["context"] for n in range(100, 200)
    }
    assert of_both == {row["context"] for row in rows["val"]} & {
        article(n)["paragraphs"][0]["context"] for n in range(100, 200)
    }

    rows = prepare(train=(hotpot(tmp_path / "h.json", 200, chain=4),), val_percent=30)
    by_split = {
        split: {
            text
            for row in split_rows
            for text, mark in zip(row["contexts_list"], row["useful_contexts"], strict=True)
            if mark
        }
        for split, split_rows in rows.items()
    }
    assert not by_split["train"] & by_split["val"]
    assert len(rows["train"]) + len(rows["val"]) == 200, "no row is lost"
    assert 30 < len(rows["val"]) < 90, "about 60"
    assert manifest()["useful_contexts_in_both_splits"] == 0


def test_a_large_group_of_connected_questions_is_for_training(tmp_path, prepare):
    large, small = (
        hotpot(tmp_path / "a.json", 100),
        json.loads(Path(hotpot(tmp_path / "b.json", 100, chain=1)).read_text()),
    )
    text = json.dumps(small).replace('"P', '"Q').replace('"h', '"g')
    (tmp_path / "b.json").write_text(text)
    rows = prepare(train=(large, str(tmp_path / "b.json")), val_percent=30)
    assert len(rows["train"]) + len(rows["val"]) == 200
    assert 40 < len(rows["val"]) < 80, "about 60, all of the small groups"
    assert all(row["titles_list"][0].startswith(("Q", "D")) for row in rows["val"])


def test_skip_duplicates_uses_the_first_question_of_an_id(tmp_path, prepare, manifest):
    source_rows = [{**ROW, "question": f"{n}?"} for n in range(2)] + [{**ROW, "id": "2", "context": "another"}]
    rows = prepare(
        train=(lines(tmp_path / "f.jsonl", *source_rows),),
        val=(lines(tmp_path / "v.jsonl", ROW),),
        skip_duplicates=True,
    )
    assert [row["question"] for row in rows["train"]] == ["0?", ROW["question"]]
    assert manifest()["skipped"]["train"] == {"ids that were there before": 1}


def test_contexts_in_both_sources_are_counted(tmp_path, prepare, manifest, capsys):
    prepare(train=(squad(tmp_path / "a.json", range(3)),), val=(squad(tmp_path / "b.json", range(2, 5)),))
    assert manifest()["useful_contexts_in_both_splits"] == 1
    assert "1 useful contexts are in both splits" in capsys.readouterr().out


def test_turns_of_a_conversation_stay_together(tmp_path, prepare, manifest):
    turns = [
        {
            "Conversation_no": c,
            "Turn_no": t + 1,
            "Context": [text for u in range(t) for text in (f"q {c} {u}", f"a {c} {u}")],
            "Question": f"q {c} {t}",
            "Answer": "UNANSWERABLE" if t == 2 else f"a {c} {t}",
        }
        for c in range(30)
        for t in range(4)
    ]
    (tmp_path / "t.json").write_text(json.dumps(turns))
    rows = prepare(train=(str(tmp_path / "t.json"),), val_percent=30)
    assert not {row["id"].split("/")[0] for row in rows["train"]} & {row["id"].split("/")[0] for row in rows["val"]}
    assert sum(manifest()["skipped"]["train"].values()) == 30
    assert sum(manifest()["counts"][split]["unanswerable"] for split in rows) == 30
    assert rows["val"][1]["context"].startswith("Q: q ")


def test_distractors_come_from_the_same_split(tmp_path, prepare, manifest):
    rows = prepare(
        train=(squad(tmp_path / "s.json", range(40)),),
        val_percent=30,
        distractors=3,
        distractors_from="rows",
        position="middle",
    )
    contexts_of_split = {split: {row["context"] for row in split_rows} for split, split_rows in rows.items()}
    for split, split_rows in rows.items():
        for row in split_rows:
            assert row["useful_contexts"] == [0, 1, 0, 0]
            assert row["contexts_list"][1] == row["context"]
            assert len(set(row["contexts_list"])) == 4
            assert set(row["contexts_list"]) <= contexts_of_split[split]
    assert len({tuple(row["contexts_list"]) for row in rows["train"]}) > 30, "drawn anew for each question"
    prepare(train=(squad(tmp_path / "s.json", range(40)),), val_percent=30, distractors=3)
    assert manifest()["counts"]["train"]["rows_with_fewer_distractors"] == len(rows["train"])


def test_a_few_rows_of_each_split(tmp_path, prepare):
    whole = prepare(train=(squad(tmp_path / "s.json", range(100)),), val_percent=20)
    few = prepare(train=(str(tmp_path / "s.json"),), val_percent=20, max_rows=7)
    assert few == {split: rows[:7] for split, rows in whole.items()}
    limited_rows = prepare(
        train=(str(tmp_path / "s.json"),), val=(squad(tmp_path / "v.json", range(100, 110)),), max_rows=1
    )
    assert [len(rows) for rows in limited_rows.values()] == [1, 1]


def test_only_the_questions_of_another_source(tmp_path, prepare, manifest):
    (tmp_path / "nq_open.jsonl").write_text('{"question": "where is, 1", "answer": ["x"]}\n')
    rows = prepare(
        train=(squad(tmp_path / "s.json", range(20)),),
        val_percent=30,
        only_questions_of=str(tmp_path / "nq_open.jsonl"),
    )
    assert {row["question"] for split_rows in rows.values() for row in split_rows} == {"Where is 1?"}, (
        "but for case and punctuation"
    )
    assert manifest()["skipped"]["train"] == {"not among --only_questions_of": 20}
    assert manifest()["made_from"]["only_questions_of"]["name"] == "nq_open.jsonl"


def test_questions_without_contexts(tmp_path, prepare):
    (tmp_path / "o.jsonl").write_text(
        "".join(json.dumps({"question": f"what {i}", "answer": [f"a{i}"]}) + "\n" for i in range(50))
    )
    options = {"train": (str(tmp_path / "o.jsonl"),), "val_percent": 30}
    with pytest.raises(
        DataError, match=r"o.jsonl:1: the question has no contexts. .* --only_questions_of .* --without_contexts"
    ):
        prepare(**options)
    rows = prepare(**options, without_contexts=True)
    assert len(rows["train"]) + len(rows["val"]) == 50
    assert rows["val"][0]["context"] == ""
    assert rows["val"][0]["contexts_list"] == []
    squads = prepare(
        train=(squad(tmp_path / "s.json", range(30)),),
        val=(squad(tmp_path / "v.json", range(30, 35)),),
        without_contexts=True,
    )
    assert {row["context"] for row in squads["train"]} == {""}


def test_several_sources_of_several_layouts(tmp_path, prepare, manifest):
    (tmp_path / "s.json.gz").write_bytes(gzip.compress(Path(squad(tmp_path / "s.json", range(3))).read_bytes()))
    train = (str(tmp_path / "s.json.gz"), hotpot(tmp_path / "h.json", 4))
    rows = prepare(train=train, val=(squad(tmp_path / "v.json", [9]),))
    assert manifest()["counts"]["train"]["rows"] == {"hotpotqa": 4, "squad": 6}
    assert [row["sample_idx"] for row in rows["train"]] == list(range(10))
    rows = prepare(train=train, val=(str(tmp_path / "v.json"),), dataset="mixed")
    assert {row["dataset"] for row in rows["train"]} == {"mixed"}


def test_a_failure_leaves_the_older_folder_as_it_was(tmp_path, prepare, manifest):
    good = squad(tmp_path / "s.json", range(30))
    prepare(train=(good,), val_percent=30)
    before = manifest()
    truncated = tmp_path / "torn.json"
    truncated.write_bytes(Path(good).read_bytes()[:-200])
    with pytest.raises(DataError, match=r"torn.json: ends .* truncated"):
        prepare(train=(str(truncated),), val_percent=30)
    assert manifest() == before
    with pytest.raises(DataError):
        prepare(name="new", train=(str(truncated),), val_percent=30)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["c"]


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


CTX = {"question": "who", "answers": ["a"], "ctxs": [{"text": "a."}]}
DPR = {"question": "who", "answers": ["a"], "positive_ctxs": [{"text": "a."}], "negative_ctxs": [{"text": "b."}]}
HOTPOT = {"_id": "1", "question": "q", "answer": "a", "supporting_facts": [["A", 0]], "context": [["A", ["a."]]]}
ROW = {"id": "1", "context": "c", "question": "q", "answers": {"text": ["a"]}}


def test_passages_are_not_called_useful_where_nobody_said_so(tmp_path, prepare):
    source_rows = [{**CTX, "question": str(i), "ctxs": [{"text": f"{i}."}, {"text": "z."}]} for i in range(9)]
    rows = prepare(train=(lines(tmp_path / "f.jsonl", *source_rows),), val_percent=50)
    for row in rows["train"] + rows["val"]:
        assert row.keys() == {
            "context",
            "contexts_list",
            "titles_list",
            "question",
            "answer",
            "answers",
            "sample_idx",
            "dataset",
        }
        assert row["contexts_list"] == [f"{row['question']}.", "z."]
        assert row["context"] == f"{row['question']}. z."


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([ROW, ROW], {}, "f.jsonl:2: duplicate id '1'."),
        ([ROW, CTX], {}, "f.jsonl:2: field 'context' is missing. Fields: question, answers, ctxs."),
        ([{**ROW, "answers": {"text": [""]}}], {}, "f.jsonl:1: all answers are blank."),
        (
            [{**CTX, "answers": ["\udc00"]}],
            {},
            r"f.jsonl:1: field 'answers'[0]: \udc00 at character 0 is half of a surrogate pair",
        ),
        (
            [{**HOTPOT, "context": [["A", ["\ud800"]]]}],
            {},
            r"f.jsonl:1: context[0]: \ud800 at character 0 is half of a surrogate",
        ),
        ([CTX], {"layout": "squad"}, "f.jsonl:1: expected the layout squad (SQuAD"),
        ([{"text": "x"}], {}, "f.jsonl:1: unknown layout with the fields text."),
        ([DPR], {}, "f.jsonl:1: 2 passages. Set --distractors"),
        ([CTX], {"distractors": 1}, "f.jsonl:1: this release does not mark useful passages"),
        ([CTX], {"val_percent": 1e-9}, "--val: no row is left for this split. Skipped: none."),
        (
            [{**CTX, "ctxs": [{"text": " "}]}],
            {},
            "--train: no row is left for this split. Skipped: 1 no passage has any text.",
        ),
        ([ROW], {"evidence": Path("nowhere")}, "--evidence: nowhere: no such folder."),
    ],
)
def test_bad_sources_are_named_and_nothing_is_written(tmp_path, prepare, records, options, message):
    source = lines(tmp_path / "f.jsonl", *records)
    with pytest.raises(DataError, match=re.escape(message)):
        prepare(**{"train": (source,), "val_percent": 50, **options})
    assert not list((tmp_path / "data").glob("*")) + list((tmp_path / "data").glob(".*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--val, --val_percent: set exactly one of them"),
        ({"val": ("v",), "val_percent": 3}, "--val, --val_percent: set exactly one of them"),
        ({"val_percent": 100}, "--val_percent: expected more than 0 and less than 100, got 100."),
        (
            {"val_percent": 5, "name": "a/b"},
            "--name: expected the name of a folder, of letters, digits, _, - and ., got 'a/b'.",
        ),
        ({"val_percent": 5, "max_rows": 0}, "--max_rows: expected at least 1, got 0."),
        ({"val_percent": 5, "distractors": -1}, "--distractors: expected at least 0, got -1."),
        (
            {"val_percent": 5, "position": "end"},
            "--position: expected one of given, first, middle, last, random, or a number",
        ),
        (
            {"val_percent": 5, "distractors_from": "rows"},
            "--distractors_from rows: --distractors is missing",
        ),
        (
            {"val_percent": 5, "without_contexts": True, "position": "first"},
            "--without_contexts: leaves no passages for --distractors",
        ),
        ({"val_percent": 5}, "none.json: no such file."),
        (
            {"val_percent": 5, "train": ("org/set",)},
            'org/set: no such file. Use "hub:org/set"',
        ),
        (
            {"val_percent": 5, "train": ("hub:org/set@v1",)},
            "hub:org/set@v1: cannot be loaded from the hub or its cache: ",
        ),
        ({"val_percent": 5, "train": ("src",)}, "src: expected a folder that `datasets` saved"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        prepare_qa.prepare(tmp_path, Options(**{"name": "c", "train": ("none.json",), **options}))


def test_the_same_source_twice_is_refused(tmp_path, prepare):
    source, again = squad(tmp_path / "a.json", range(3)), squad(tmp_path / "b.json", range(3))
    with pytest.raises(DataError, match=r"--val \S+b.json: same data as --train \S+a.json."):
        prepare(train=(source,), val=(again,))


def test_the_command_line(tmp_path, capsys):
    source = squad(tmp_path / "s.json", range(40))
    prepare_qa.main(
        [
            "--data_path",
            str(tmp_path / "d"),
            "--name",
            "toy",
            "--train",
            source,
            "--val_percent",
            "25",
            "--distractors",
            "0",
        ]
    )
    assert "toy: made in" in capsys.readouterr().out
    assert jsonl.corpus_folder(Places(data=tmp_path / "d", runs=tmp_path), "toy")
