"""Columns copied into prepared rows, and rows that preparation refuses, skips or counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants import prepare_conversations
from data_prep.assistants.conversation_forms.rows import CHANGES
from src.errors import DataError
from src.evaluation.metrics.math import Judge
from src.files import read_manifest

QUESTIONS = [
    {
        "question": f"Ann has {n} owls and buys {n + 1} more. How many?",
        "answer": f"{n} + {n + 1} = <<{n}+{n + 1}={2 * n + 1}>>{2 * n + 1}\n#### {2 * n + 1:,}",
    }
    for n in range(5, 800, 20)
]
"""In the layout of GSM8K."""


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepare(folder: Path, *words: str, code: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    assert prepare_conversations.main([*words, "--data_path", str(folder)]) == code
    name = words[words.index("--name") + 1]
    if code:
        assert not (folder / name).exists()
        return [], []
    paths = [folder / name / f"{split}.jsonl" for split in ("train", "val")]
    train, val = ([json.loads(line) for line in path.read_text().split("\n") if line] for path in paths)
    return train, val


def counts(folder: Path) -> dict[str, int]:
    return read_manifest(folder, DataError)["counts"]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)],
        **more,
    }


def check_math(rows: list[dict[str, Any]]) -> None:
    """Reward `math` accepts the last answer of each row, and not the next number."""
    judge = Judge(5.0)
    for row in rows:
        gold = row["answer"].rpartition("####")[2].strip()
        assert judge.agrees(f"So it is {gold}.", row["answer"]), row
        assert judge.agrees(row["messages"][-1]["content"], row["answer"]), row
        assert not judge.agrees(str(float(gold.replace(",", "")) + 1), row["answer"]), row


@pytest.mark.slow
def test_gsm8k_rows_have_answers_for_reward_math(tmp_path: Path):
    pytest.importorskip("math_verify")
    train, val = prepare(tmp_path, "--name", "gsm8k", "--train", write(tmp_path / "rows.jsonl", QUESTIONS))
    assert len(train) + len(val) == 40
    check_math([*train, *val])


def test_released_gsm8k_rows_have_answers_for_reward_math(shared_data: Path, tmp_path: Path):
    pytest.importorskip("math_verify")
    train, val = prepare(
        tmp_path, "--name", "gsm8k", "--train", str(shared_data / "instruct" / "gsm8k" / "train.jsonl")
    )
    check_math([*train[::97], *val[::97]])


def test_mbpp_rows_have_tests_for_reward_python(shared_data: Path, tmp_path: Path):
    source = shared_data / "instruct" / "mbpp" / "mbpp.train.jsonl"
    train, val = prepare(tmp_path, "--name", "mbpp", "--train", str(source))
    assert len(train) + len(val) == 474
    for row in train[::50]:
        program = row["messages"][-1]["content"].removeprefix("```python\n").removesuffix("\n```")
        for test in row["tests"]:
            exec(f"{program}\n{test}", {})
        assert len(row["tests"]) >= 3


def test_setup_code_comes_before_each_test(tmp_path: Path):
    rows = [
        {"text": f"Task {n}", "code": "pass", "test_list": ["assert a", "assert b"], "test_setup_code": "a = b = 1"}
        for n in range(20)
    ]
    train, _ = prepare(tmp_path, "--name", "mbpp", "--train", write(tmp_path / "rows.jsonl", rows))
    assert train[0]["tests"] == ["a = b = 1\nassert a", "a = b = 1\nassert b"]


@pytest.mark.parametrize("form", ["completion", "messages", "alpaca", "pairs", "columns"])
def test_columns_are_copied_whatever_the_form(form: str, tmp_path: Path):
    more: Any = {"answer": ["4", None], "level": 3, "note": None}
    rows: dict[str, Any] = {
        "completion": lambda n: {"prompt": f"{n}?", "completion": "x", **more},
        "messages": lambda n: chat(f"{n}?", "x", **more),
        "alpaca": lambda n: {"instruction": f"{n}?", "output": "x", **more},
        "pairs": lambda n: {"prompt": f"{n}?", "chosen": "x", "rejected": "y", **more},
        "columns": lambda n: {"q": f"{n}?", "a": "x", **more},
    }
    source = write(tmp_path / "rows.jsonl", [rows[form](n) for n in range(20)])
    entry = {"train": [source], "licence": "ours", "form": form, "keep": ["answer", "note"], "val_rate": 0.4}
    if form == "columns":
        entry["form"] = {"name": "columns", "user": "{q}", "assistant": "{a}"}
    (tmp_path / "mine.yaml").write_text(json.dumps({"mine": entry}))
    train, val = prepare(tmp_path, "--name", "mine", "--release_file", str(tmp_path / "mine.yaml"), "--keep", "level")
    assert all(row | more == row for row in [*train, *val])


def test_group_with_different_values_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [
        {
            "question": {"full_text": f"{n // 2}?"},
            "answer_0": "a",
            "answer_1": f"b{n}",
            "score_0": 1,
            "score_1": 0,
            "id": n,
        }
        for n in range(20)
    ]
    source = write(tmp_path / "rows.jsonl", rows)
    prepare(tmp_path, "--name", "webgpt", "--train", source, "--keep", "id", code=1)
    assert f"{source}:1: column 'id'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "words", "places"),
    [
        ([chat("a", "b", answer=1), chat("c", "d")], ["--keep", "answer"], ["rows.jsonl:2: ", "'answer'", ("--columns "
                                                                                                          "answer=COLUMN")]),
        ([chat("a", "b")], ["--keep", "messages"], ["--keep: keep: 'messages'"]),
        ([chat("a", "b", x="\ud800")], ["--keep", "x"], ["rows.jsonl:1: column 'x': ", "\\ud800"]),
        ([chat("a", "b", x={"y": ["a\0"]})], ["--keep", "x"], ["rows.jsonl:1: column 'x': ", "U+0000"]),
        ([chat("a", "b", x=float("nan"))], ["--keep", "x"], ["rows.jsonl:1: column 'x': "]),
        ([chat("a", "b\0c")], [], ["rows.jsonl:1: messages[1]: content: ", "U+0000", "character 1"]),
        ([chat("a", "b"), chat("a", "b", label=False)], [], ["rows.jsonl:2: label: False", "--negatives"]),
        ([chat("a", "b", kto_tag="False")], [], ["rows.jsonl:1: kto_tag: 'False'"]),
        ([chat("a", "b", label=0)], [], ["rows.jsonl:1: label: 0"]),
        ([{}], [], ["rows.jsonl:1: "]),
        ([chat("a", "b", tools="[{\"a\": \"\\u0000\"}]")], [], ["rows.jsonl:1: tools: ", "U+0000"]),
    ],
)  # fmt: skip
def test_bad_row_is_refused_with_its_place(
    rows: Any, words: list[str], places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prepare(
        tmp_path, "--name", "own", "--form", "messages", "--train", write(tmp_path / "rows.jsonl", rows), *words, code=1
    )
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for place in places:
        assert place in message


@pytest.mark.parametrize(("negatives", "total"), [("skip", 15), ("learn", 20)])
def test_negative_rows_are_skipped_and_counted_or_learned(negatives: str, total: int, tmp_path: Path):
    rows = [chat(f"{n}?", "x", label=n % 4 != 0) for n in range(20)]
    words = [
        "--form",
        "messages",
        "--train",
        write(tmp_path / "rows.jsonl", rows),
        "--val_rate",
        "0.4",
        "--negatives",
        negatives,
    ]
    train, val = prepare(tmp_path, "--name", "own", *words)
    assert len(train) + len(val) == total
    assert counts(tmp_path / "own").get("negative", 0) == 20 - total


def test_released_negative_rows_are_refused(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = str(shared_data / "preference" / "llamafactory_demos" / "kto_en_demo.json")
    prepare(tmp_path, "--name", "kto", "--form", "messages", "--train", source, code=1)
    assert "label: False" in capsys.readouterr().err
    prepare(tmp_path, "--name", "kto", "--form", "messages", "--train", source, "--negatives", "skip")
    assert counts(tmp_path / "kto")["negative"] > 0


def test_class_label_of_other_data_is_no_verdict(tmp_path: Path):
    rows = [{"sentence": f"{n}", "label": 0} for n in range(20)]
    form = {"name": "columns", "user": "{sentence}", "assistant": "{label}"}
    entry = {"train": [write(tmp_path / "rows.jsonl", rows)], "licence": "ours", "form": form}
    (tmp_path / "mine.yaml").write_text(json.dumps({"mine": entry}))
    train, val = prepare(tmp_path, "--name", "mine", "--release_file", str(tmp_path / "mine.yaml"))
    assert len(train) + len(val) == 20


def test_skipped_and_joined_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [chat(f"{n}?", "x") for n in range(20)]
    rows += [chat("q", ""), chat("r", "  "), chat(" ", "x"), {"messages": []}]
    rows.append({"messages": [*chat("a")["messages"], *chat("b")["messages"], {"role": "assistant", "content": "c"}]})
    words = [
        "--form",
        "messages",
        "--train",
        write(tmp_path / "rows.jsonl", rows),
        "--val_rate",
        "0.4",
        "--name",
        "own",
    ]
    train, val = prepare(tmp_path, *words)
    assert len(train) + len(val) == 21
    numbers = counts(tmp_path / "own")
    assert {name: numbers[name] for name in ("silent", "empty", "unusable", "joined")} == {
        "silent": 2,
        "empty": 1,
        "unusable": 1,
        "joined": 1,
    }
    assert not any("joined" in message for row in [*train, *val] for message in row["messages"])
    last = capsys.readouterr().out
    assert "2 in which the assistant says nothing" in last
    assert "1 messages joined" in last


def test_reasoning_reaches_prepared_rows(tmp_path: Path):
    answer = {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, answer]} for n in range(20)]
    rows += [
        {"messages": [{"role": "user", "content": f"{n}!"}, {"role": "assistant", "content": "5", "thinking": "Hm"}]}
        for n in range(9)
    ]
    train, val = prepare(
        tmp_path,
        "--name",
        "own",
        "--form",
        "messages",
        "--train",
        write(tmp_path / "rows.jsonl", rows),
        "--val_rate",
        "0.4",
    )
    assert sum(row["messages"][-1].get("reasoning_content") == "2 + 3" for row in [*train, *val]) == 20
    assert sum(row["messages"][-1].get("thinking") == "Hm" for row in [*train, *val]) == 9
    pairs = [
        {"prompt": f"{n}?", "chosen": [answer], "rejected": [{**answer, "reasoning_content": "2 - 3"}]}
        for n in range(20)
    ]
    train, _ = prepare(
        tmp_path, "--name", "pairs", "--form", "pairs", "--train", write(tmp_path / "pairs.jsonl", pairs)
    )
    assert [reply["reasoning_content"] for reply in train[0]["replies"]] == ["2 + 3", "2 - 3"]


def test_validation_rows_that_equal_a_training_row_are_removed(tmp_path: Path):
    train_rows = [chat(f"How many owls are {n}?", "x") for n in range(10)]
    val_rows = [chat(f"how many  OWLS are {n}?\n", "X ") for n in range(8, 12)] + [chat("How many owls are 1?", "y")]
    words = ["--train", write(tmp_path / "a.jsonl", train_rows), "--val", write(tmp_path / "b.jsonl", val_rows)]
    train, val = prepare(tmp_path, "--name", "own", "--form", "messages", *words)
    assert len(train) == 10
    assert [row["messages"][0]["content"].strip()[-3:] for row in val] == ["10?", "11?", " 1?"]
    assert counts(tmp_path / "own")["duplicate"] == 2


def test_duplicates_are_in_one_split(tmp_path: Path):
    rows = [chat(f"{'  ' * (n % 3)}Owl {n // 3}" if n % 2 else f"OWL {n // 3}", str(n)) for n in range(120)]
    train, val = prepare(
        tmp_path,
        "--name",
        "own",
        "--form",
        "messages",
        "--train",
        write(tmp_path / "rows.jsonl", rows),
        "--val_rate",
        "0.3",
    )
    prompts = [{row["messages"][0]["content"].strip().casefold() for row in split} for split in (train, val)]
    assert len(train) + len(val) == 120
    assert not prompts[0] & prompts[1]


def test_blank_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n" + "".join(json.dumps(chat(f"{n}?", "x")) + "\n \n" for n in range(20)))
    train, val = prepare(tmp_path, "--name", "own", "--form", "messages", "--train", str(source), "--val_rate", "0.4")
    assert len(train) + len(val) == counts(tmp_path / "own")["read"] == 20
    assert counts(tmp_path / "own")["blank"] == 21
    assert "21 blank lines" in capsys.readouterr().out


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("form", "row", "change", "count"),
    [
        ("messages", chat("{n}", "x", "bye"), "removed", 1),
        ("sharegpt", {"conversations": turns("{n}", "x", "bye")}, "removed", 1),
        ("sharegpt", {"conversations": turns("{n}", "x" * 32_769)}, "shortened", 1),
        ("soda", {"narrative": "{n}", "dialogue": ["a", "x" * 32_769], "speakers": ["A", "B"]}, "shortened", 1),
        ("dialogues", {name: f"\n\nHuman: {{n}}\n\nHuman: b\n\nAssistant: {name}" for name in ("chosen", "rejected")},
         "joined", 1),
        ("pairs", {"prompt": "{n}", "chosen": chat("a", "b", "c", "d")["messages"], "rejected": "e"}, "removed", 3),
        ("pairs", {"prompt": "{n}", "chosen": [{"role": "assistant", "content": "a"}] * 2, "rejected": "e"},
         "joined", 1),
    ],
)  # fmt: skip
def test_changed_conversations_are_counted(form: str, row: dict[str, Any], change: str, count: int, tmp_path: Path):
    rows = [json.loads(json.dumps(row).replace("{n}", f"{n}?")) for n in range(20)]
    train, val = prepare(
        tmp_path, "--name", "own", "--form", form, "--train", write(tmp_path / "rows.jsonl", rows), "--val_rate", "0.4"
    )
    assert {name: counts(tmp_path / "own")[name] for name in CHANGES} == {
        **dict.fromkeys(CHANGES, 0),
        change: 20 * count,
    }
    messages = [message for each in (*train, *val) for message in (*each["messages"], *each.get("replies", ()))]
    assert not {key for message in messages for key in message} - {"role", "content", "rank"}


def test_key_named_like_a_count_stays_in_its_message(tmp_path: Path):
    rows = [chat(f"{n}?", "x") for n in range(20)]
    for row in rows:
        row["messages"][0]["joined"] = "2020"
        row |= {"messages": row["messages"][:1], "replies": [{"content": "a", "rank": 0}, {"content": "b", "rank": 1}]}
    train, _ = prepare(
        tmp_path,
        "--name",
        "own",
        "--form",
        "ranked",
        "--train",
        write(tmp_path / "rows.jsonl", rows),
        "--val_rate",
        "0.4",
    )
    assert train[0]["messages"][0]["joined"] == "2020"
    assert counts(tmp_path / "own")["joined"] == 0


def test_messages_that_are_no_list_are_refused_with_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"messages": 5, "replies": [{"content": "a", "rank": 0}]}]
    prepare(tmp_path, "--name", "own", "--form", "ranked", "--train", write(tmp_path / "rows.jsonl", rows), code=1)
    assert "rows.jsonl:1: " in capsys.readouterr().err


def test_blank_replies_are_skipped(tmp_path: Path):
    rows = [{"prompt": f"{n}?", "chosen": "a", "rejected": "b"} for n in range(20)] + [
        {"prompt": "?", "chosen": " ", "rejected": ""}
    ]
    prepare(
        tmp_path,
        "--name",
        "own",
        "--form",
        "pairs",
        "--train",
        write(tmp_path / "rows.jsonl", rows),
        "--val_rate",
        "0.4",
    )
    assert counts(tmp_path / "own")["silent"] == 1


def test_reasoning_in_the_form_of_sharegpt_reaches_prepared_rows(tmp_path: Path):
    rows = [
        {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "5", "thinking": "Hm"}]}
        for n in range(20)
    ]
    train, val = prepare(
        tmp_path,
        "--name",
        "own",
        "--form",
        "sharegpt",
        "--train",
        write(tmp_path / "rows.jsonl", rows),
        "--val_rate",
        "0.4",
    )
    assert {row["messages"][1].get("thinking") for row in (*train, *val)} == {"Hm"}
