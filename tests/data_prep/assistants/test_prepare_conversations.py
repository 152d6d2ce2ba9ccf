"""Releases of conversations and of preferences in their layouts, and what is said about rows of another."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from data_prep.assistants import prepare_conversations
from data_prep.assistants.conversation_forms.layouts import Text
from data_prep.assistants.conversation_table import load_form
from src.errors import DataError
from src.systems.assistants.conversations.entries import read_entry


def read_rows(form: str, row: dict[str, Any], **options: Any) -> list[str]:
    """The rows of a row, each message or reply by its first letters."""
    rows = list(load_form({"name": form, **options}, "form").read(row, "here"))
    for each in rows:
        read_entry(each, "here")
    return [
        " ".join(f"{message['role'][0]}:{message['content']}" for message in each["messages"])
        + "".join(f" {reply['rank']}={reply['content']}" for reply in each.get("replies", []))
        for each in rows
    ]


TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
HF = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("form", "row", "expected"),
    [
        ("messages", {"messages": HF}, ["u:a a:b"]),
        ("messages", {"conversations": TURNS}, ["u:a a:b"]),
        ("messages", {"conversations": [*TURNS, {"from": "human", "value": "c"}]}, ["u:a a:b"]),
        ("messages", {"conversations": [TURNS[0], TURNS[0], TURNS[1], TURNS[1]]}, ["u:a\na a:b\nb"]),
        ("messages", {"conversations": [{"from": "system", "value": "s"}, *TURNS]}, ["s:s u:a a:b"]),
        ("messages", {"conversations": [TURNS[0]]}, []),
        ("messages", {"messages": [HF[0], HF[1], {"role": "tool", "content": "t"}, HF[1]]}, ["u:a a:b t:t a:b"]),
        ("completion", {"prompt": "a", "completion": "b"}, ["u:a a:b"]),
        ("completion", {"prompt": HF[:1], "completion": HF[1:]}, ["u:a a:b"]),
        ("alpaca", {"instruction": "a", "input": "", "output": "b"}, ["u:a a:b"]),
        ("alpaca", {"instruction": "a", "input": "i", "output": "b"}, ["u:a\ni a:b"]),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}, ["u:a 0=b 1=c"]),
        (
            "pairs",
            {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "c"}},
            ["u:a 0=b 1=c"],
        ),
        ("pairs", {"chosen": HF, "rejected": [HF[0], {"role": "assistant", "content": "c"}]}, ["u:a 0=b 1=c"]),
        ("pairs", {"chosen": HF, "rejected": [{"role": "user", "content": "x"}, HF[1]]}, []),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, []),
        ("pairs", {"prompt": "a", "chosen": [], "rejected": "b"}, []),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": []}, []),
        ("pairs", {"chosen": [*HF, HF[0]], "rejected": [*HF, {"role": "user", "content": "c"}]}, []),
        ("completion", {"prompt": "a", "completion": []}, []),
        (
            "ranked",
            {"messages": HF[:1], "replies": [{"content": "b", "rank": 1}, {"content": "c", "rank": 0}]},
            ["u:a 1=b 0=c"],
        ),
    ],
)
def test_a_row_of_each_layout(form: str, row: dict[str, Any], expected: list[str]):
    assert read_rows(form, row) == expected


def test_calls_of_tools_are_unchanged(tmp_path: Path):
    """In the hub's form: a call without a text, what the tool gives, and which tools there are."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    talk = [
        HF[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        HF[1],
    ]
    (row,) = load_form("messages", "form").read({"messages": talk, "tools": '[{"name": "add"}]'}, "here")
    entry = read_entry(row, "here")
    assert [(message.role, message.full_text) for message in entry.messages] == [
        ("user", "a"), ("assistant", '{"name": "add", "arguments": {"a": 2}}'), ("tool", "5"), ("assistant", "b"),
    ]  # fmt: skip
    assert entry.messages[0].tools == [{"name": "add"}]


@pytest.mark.parametrize(
    "text", ["No input", "<noinput>", "N/A", "n/a.", " Input: none... no input required ", "Input: N/A"]
)
def test_input_without_content_is_removed(text: str):
    expected = ["u:a a:b"] if "none" not in text else [f"u:a\n{text} a:b"]
    assert read_rows("alpaca", {"instruction": "a", "input": text, "output": "b"}, skip_no_input=True) == expected


@pytest.mark.parametrize("text", ["The Kenya/Namibia border", "def f(x): # n/a values", "There is no input device."])
def test_input_with_similar_letters_stays(text: str):
    assert read_rows("alpaca", {"instruction": "a", "input": text, "output": "b"}, skip_no_input=True) == [
        f"u:a\n{text} a:b"
    ]


def test_worst_of_many_scored_replies_stays():
    """Five that are tied would tell nothing."""
    rows = [{"q": "a", "x": f"x{n}", "y": f"y{n}", "s": 9, "t": 9 if n < 2 else n} for n in range(4)]
    result = read_rows("scored", {"rows": rows}, prompt="{q}", replies=[["x", "s"], ["y", "t"]], most=4)
    assert result == ["u:a 0=x0 0=y0 0=x1 2=y2"]


def test_rows_without_a_ranking_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def ranked_row(number: int, *replies: tuple[str, int]) -> dict[str, Any]:
        raw_replies = [{"content": text, "rank": rank} for text, rank in replies]
        return {"messages": [{"role": "user", "content": str(number)}], "replies": raw_replies}

    rows = [ranked_row(number, ("a", 0), ("b", 1)) for number in range(20)]
    rows += [
        ranked_row(90, ("a", 0), ("b", 0)),
        ranked_row(91, ("a", 0), ("b", 1), ("a", 2)),
        ranked_row(92, ("a", 0), ("a", 2)),
    ]
    words = [
        "--form",
        "ranked",
        "--train",
        write(tmp_path / "a.jsonl", rows),
        "--name",
        "own",
        "--data_path",
        str(tmp_path),
    ]
    assert prepare_conversations.main([*words, "--val_rate", "0.3"]) == 0
    output = capsys.readouterr().out
    assert "2 with one reply at two ranks" in output
    assert "1 rows with only tied replies" in output
    assert sum(len((tmp_path / "own" / f"{split}.jsonl").read_text().splitlines()) for split in ("train", "val")) == 21


def test_a_tree_with_two_equal_replies_does_not_end_the_preparation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trees = [
        {"tree_state": "ready_for_export", "prompt": node(f"p{n}", None, node("a", 0), node("x", 1))} for n in range(20)
    ]
    trees.append({"tree_state": "ready_for_export", "prompt": node("p99", None, node("a", 0), node("a", 1))})
    words = [
        "--form",
        "oasst_ranked",
        "--train",
        write(tmp_path / "a.jsonl", trees),
        "--name",
        "own",
        "--data_path",
        str(tmp_path),
    ]
    assert prepare_conversations.main([*words, "--val_rate", "0.3"]) == 0
    assert "1 with one reply at two ranks" in capsys.readouterr().out


@pytest.mark.parametrize("column", ["frage", "asked.text"])
def test_dotted_column_can_have_another_name(tmp_path: Path, column: str):
    """As the message about a missing one says."""
    rows = [
        {"answer_0": "a", "score_0": 1, "answer_1": "b", "score_1": 0, "frage": f"{n}?", "asked": {"text": f"{n}?"}}
        for n in range(20)
    ]
    words = ["--name", "webgpt", "--train", write(tmp_path / "a.jsonl", rows), "--data_path", str(tmp_path)]
    assert prepare_conversations.main([*words, "--columns", f"question.full_text={column}"]) == 0
    (row, *_) = [json.loads(line) for line in (tmp_path / "webgpt" / "train.jsonl").read_text().splitlines()]
    assert row["messages"][0]["content"].endswith("?")


def node(text: str, rank: int | None, *replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    role = "assistant" if text[0] in "axy" else "prompter"
    return {
        "text": text,
        "role": role,
        "rank": rank,
        "lang": "en",
        "review_result": True,
        "replies": list(replies),
        **more,
    }


def tree(**more: Any) -> dict[str, Any]:
    first = node("a0", 0, node("p0", None, node("x", 0), node("y", 1)), node("p1", None))
    prompt = node("p", None, first, node("a1", 1, node("p0", None), node("p1", None)), node("a2", 2))
    return {"tree_state": "ready_for_export", "prompt": {**prompt, **more}}


def test_threads_of_a_tree():
    """The fixture of the specification: a parent that people answered, but nobody after them, is there once."""
    assert read_rows("oasst", tree()) == ["u:p a:a0 u:p0 a:x", "u:p a:a0 u:p0 a:y", "u:p a:a1", "u:p a:a2"]
    assert read_rows("oasst", tree(), top_k=1) == ["u:p a:a0 u:p0 a:x"]
    assert read_rows("oasst_ranked", tree()) == ["u:p 0=a0 1=a1 2=a2", "u:p a:a0 u:p0 0=x 1=y"]


def test_trees_that_are_not_finished_not_good_or_of_another_language_are_left_out():
    assert read_rows("oasst", {**tree(), "tree_state": "prompt_lottery_waiting"}) == []
    for more in ({"review_result": False}, {"lang": "de"}, {"deleted": True}, {"synthetic": True}):
        assert read_rows("oasst", tree(**more)) == []
    assert len(read_rows("oasst", tree(lang="de"), languages=["en", "de"])) == 4
    assert len(read_rows("oasst", tree(synthetic=True), synthetic=True)) == 4


def test_labels_become_tags():
    labels = {"quality": {"value": 0.75, "count": 3}, "humor": {"value": None}}
    (row,) = load_form("oasst", "form").read({**tree(), "prompt": node("p", None, node("a", 0, labels=labels))}, "here")
    assert row["messages"][1] == {"role": "assistant", "content": "a", "lang": "en", "quality": 0.75}


@pytest.mark.parametrize(
    ("form", "row", "match"),
    [
        (
            "alpaca",
            {"question": "a"},
            r"here: no key 'instruction'\. It has: question\.",
        ),
        ("completion", {"prompt": 3, "completion": "b"}, r"here: prompt: .*got 3 \(int\)"),
        (
            "messages",
            {"messages": [{"role": "narrator", "content": "a"}]},
            r"here: messages\[0\]: unknown role 'narrator'",
        ),
        ("messages", {}, "here: no key 'messages' or 'conversations'"),
        ("pairs", {"chosen": "a"}, "here: no key 'rejected'"),
        ("ranked", {"messages": HF}, "here: no key 'replies'"),
        ("oasst", {"text": "a"}, "here: no key 'prompt'"),
    ],
)
def test_rows_of_another_layout_are_refused(form: str, row: dict[str, Any], match: str):
    with pytest.raises(DataError, match=match):
        read_rows(form, row)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_splits_of_a_file_share_no_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"question": f"q{i % 50}", "answer": f"a{i}"} for i in range(100)]
    words = [
        "--form",
        "completion",
        "--train",
        write(tmp_path / "a.jsonl", rows),
        "--columns",
        "prompt=question",
        "completion=answer",
    ]
    for _ in range(2):
        assert (
            prepare_conversations.main([*words, "--val_rate", "0.3", "--name", "own", "--data_path", str(tmp_path)])
            == 0
        )
    assert "nothing to do" in capsys.readouterr().out
    splits = [
        [json.loads(line) for line in (tmp_path / "own" / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "val")
    ]
    questions = [{row["messages"][0]["content"] for row in split} for split in splits]
    assert sum(map(len, splits)) == 100
    assert questions[0]
    assert questions[1]
    assert not questions[0] & questions[1]


def test_each_question_is_for_validation_in_one_fold(tmp_path: Path):
    rows = [
        {"messages": [{"role": "user", "content": f"{n // 2}?"}, {"role": "assistant", "content": str(n)}]}
        for n in range(80)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folds = list[list[str]]()
    for k in range(1, 6):
        words = [
            "--form",
            "messages",
            "--train",
            str(tmp_path / "rows.jsonl"),
            "--fold",
            f"{k}/5",
            "--name",
            f"fold{k}",
        ]
        assert prepare_conversations.main([*words, "--data_path", str(tmp_path)]) == 0
        splits = [(tmp_path / f"fold{k}" / f"{split}.jsonl").read_text().splitlines() for split in ("train", "val")]
        assert len(splits[0]) + len(splits[1]) == 80
        assert not {json.loads(row)["messages"][0]["content"] for row in splits[0]} & {
            json.loads(row)["messages"][0]["content"] for row in splits[1]
        }
        folds.append(splits[1])
    assert sorted(row for fold in folds for row in fold) == sorted(json.dumps(row) for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--form", "alpacca"], "--form: form: unknown form 'alpacca'. Did you mean 'alpaca'?"),
        (["--form", "alpaca", "--mode", "rm"], "--form: cannot be combined with --release"),
        (["--form", "alpaca", "--top_k", "1"], "--lang, --top_k and --synthetic: "),
        (["--release", "webgtp"], "--name: unknown release 'webgtp'. Did you mean 'webgpt'?"),
        (["--release", "alpaca", "--mode", "rm"], "--mode rm: alpaca has only sft."),
        (["--release", "gsm8k"], "a.jsonl:1: no column 'answer'. It has: question, reply."),
        (["--release", "wmt2019_de-xx"], "pair: unknown language 'xx'. Known: ar, de, en"),
        (["--release", "wmt2019_de-de"], "pair: expected two codes such as de-en, got 'de-de'."),
        (["--form", "messages", "--fold", "6/5"], "--fold '6/5': expected K/N, such as 2/5, with K from 1 to N."),
        (["--form", "messages", "--fold", "2/5", "--val_rate", "0.5"], "--fold: "),
        *(
            (["--release", "augment_oasst", *words], "--fold, --val and --val_rate: column 'split' of augment_oasst")
            for words in (["--fold", "1/5"], ["--val_rate", "0.5"], ["--val", "b.jsonl"])
        ),
        (["--form", "messages", "--val_rate", "1.5"], "--val_rate: expected a number between 0 and 1, got 1.5."),
        (
            ["--form", "completion", "--columns", "prompt=a", "prompt=b"],
            "--columns prompt=b: prompt is already set to a.",
        ),
        (["--form", "messages", "--columns", "x"], "--columns 'x': expected NAME=COLUMN, such as prompt=question."),
        (["--form", "messages"], "a.jsonl:1: no column 'messages' or 'conversations'. It has: question, reply."),
    ],
)
def test_mistakes_are_refused(tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    source = write(tmp_path / "a.jsonl", [{"question": "q", "reply": "a"}])
    assert prepare_conversations.main([*words, "--train", source, "--name", "own", "--data_path", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "own").exists()


def count_forks(message: dict[str, Any]) -> int:
    """Messages of a person below which more than one reply is ranked."""
    ranked_replies = [reply for reply in message["replies"] if type(reply.get("rank")) is int]
    is_fork = message["role"] == "prompter" and len(ranked_replies) > 1
    return is_fork + sum(map(count_forks, message["replies"]))


def test_released_files(shared_data: Path, tmp_path: Path):
    """GSM8K, Alpaca, ShareGPT, preference pairs and trees, as they were released."""
    instruct, pairs = shared_data / "instruct", shared_data / "preference" / "llamafactory_demos" / "dpo_en_demo.json"
    trees = str(instruct / "oasst_format" / "en_100_tree.jsonl")
    forks = sum(count_forks(json.loads(line)["prompt"]) for line in Path(trees).read_text().splitlines())
    expected = {
        "gsm8k": (
            [
                "completion",
                str(instruct / "gsm8k" / "train.jsonl"),
                "--columns",
                "prompt=question",
                "completion=answer",
            ],
            7473,
        ),
        "alpaca": (["alpaca", str(instruct / "alpaca_demo" / "alpaca_en_demo.json")], 999),
        "sharegpt": (["messages", str(instruct / "fastchat" / "dummy_conversation.json")], 500),
        "pairs": (["pairs", str(pairs)], 299),
        "forks": (["oasst_ranked", trees, "--synthetic"], forks),
    }
    for name, ((form, source, *more), count) in expected.items():
        assert (
            prepare_conversations.main(
                ["--form", form, "--train", source, *more, "--name", name, "--data_path", str(tmp_path)]
            )
            == 0
        )
        lines = sum(len((tmp_path / name / f"{split}.jsonl").read_text().splitlines()) for split in ("train", "val"))
        assert abs(lines - count) <= count // 100, (name, lines)


def messages_of(form: str, row: dict[str, Any]) -> list[tuple[str, str]]:
    (converted,) = load_form(form, "form").read(row, "rows:1")
    return [(message["role"], message["content"]) for message in converted["messages"]]


HISTORY = [["a", "b"], ["c", "d"]]
TURNS = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")]


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("alpaca", {"instruction": "a", "output": "b"}),
        ("messages", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
        ("completion", {"prompt": "a", "completion": "b"}),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ],
)
def test_a_column_system_is_the_first_message(form: str, row: dict[str, Any]):
    talk = messages_of(form, row)
    assert talk[0] == ("user", "a")
    assert messages_of(form, {**row, "system": "s"}) == [("system", "s"), *talk]
    assert messages_of(form, {**row, "system_prompt": "s"}) == [("system", "s"), *talk]
    assert messages_of(form, {**row, "system": ""}) == messages_of(form, {**row, "system": None}) == talk
    with pytest.raises(DataError, match="'system'"):
        messages_of(form, {**row, "System": "s"})


def test_functions_of_openai_are_tools():
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (converted,) = load_form("messages", "form").read({**row, "functions": [{"name": "add"}]}, "rows:1")
    assert converted["tools"] == [{"type": "function", "function": {"name": "add"}}]


def test_the_history_of_alpaca_is_earlier_turns():
    assert messages_of("alpaca", {"instruction": "e", "output": "f", "history": HISTORY}) == TURNS


def test_a_function_call_of_openai_is_a_tool_call():
    call = {"name": "add", "arguments": '{"a": 1}'}
    talk = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "add", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    (row,) = load_form("messages", "form").read({"messages": talk}, "rows:1")
    entry = read_entry(row, "rows:1")
    assert entry.messages[1].calls == [{"name": "add", "arguments": {"a": 1}}]
    assert entry.messages[2].links == {"name": "add"}


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize("prompt", ["a", None, chat("a", "b", "c"), chat("a")])
def test_replies_to_a_conversation_have_all_of_it(prompt: Any):
    """Also if the prompt is only the begin of the conversation."""
    row = {"prompt": prompt, "chosen": chat("a", "b", "c", "x"), "rejected": chat("a", "b", "c", "y")}
    (converted,) = load_form("pairs", "form").read(row, "rows:1")
    assert converted["messages"] == chat("a", "b", "c")
    assert [reply["content"] for reply in converted["replies"]] == ["x", "y"]
    row = {**row, "rejected": chat("a", "q", "c", "y")}
    assert prompt == chat("a", "b", "c") or not [*load_form("pairs", "form").read(row, "rows:1")]


def test_a_system_message_of_the_replies_is_read():
    row = {"prompt": "a", "chosen": [SYSTEM, *chat("a", "x")], "rejected": [SYSTEM, *chat("a", "y")]}
    (converted,) = load_form("pairs", "form").read(row, "rows:1")
    assert converted["messages"] == [SYSTEM, *chat("a")]


def test_a_text_with_a_blank_end_is_split():
    pieces = [*Text(characters=2).read({"text": "abc \n  "}, "rows:1")]
    assert pieces == [{"text": "ab"}, {"text": "c "}]


def test_tools_of_parquet_have_only_their_own_arguments(tmp_path: Path):
    """Arrow gives the arguments of all calls the same names."""
    arguments = [{"city": "Rome"}, {"a": 1, "b": [1, None]}] * 20
    talks = [
        [
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": each}}]},
        ]
        for n, each in enumerate(arguments)
    ]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": talk} for talk in talks]), tmp_path / "rows.parquet")
    prepare_conversations.prepare(tmp_path, "own", form="messages", train=[str(tmp_path / "rows.parquet")])
    rows = [
        json.loads(line)
        for split in ("train", "val")
        for line in (tmp_path / "own" / f"{split}.jsonl").read_text().splitlines()
    ]
    assert len(rows) == len(arguments)
    for row in rows:
        call = read_entry(row, "rows").messages[1].calls[0]
        assert call["arguments"] == arguments[int(row["messages"][0]["content"][:-1])]


def test_rows_without_a_group_are_not_merged(tmp_path: Path):
    release = tmp_path / "mine.yaml"
    release.write_text(
        "mine:\n  licence: none\n  val_rate: 0.3\n  group_by: g\n  train: [rows.jsonl]\n"
        "  form: {name: scored, prompt: '{q}', replies: [[a, of_a], [b, of_b]]}\n"
    )
    rows = [{"g": None, "q": f"{n}?", "a": "x", "of_a": 1, "b": "y", "of_b": 0} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_conversations.prepare(tmp_path, "mine", release_file=release, train=[str(tmp_path / "rows.jsonl")])
    lines = [(tmp_path / "mine" / f"{split}.jsonl").read_text().splitlines() for split in ("train", "val")]
    assert sum(map(len, lines)) == 20
