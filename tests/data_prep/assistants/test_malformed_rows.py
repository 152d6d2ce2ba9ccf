"""Rows with unknown roles, and with missing or misspelled columns: the place, the names that exist, the nearest."""

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants.conversation_forms.columns import fill
from data_prep.assistants.conversation_forms.comparisons import Endings, ScoredReplies
from data_prep.assistants.conversation_forms.rows import ROLES
from data_prep.assistants.prepare_conversations import prepare
from src.errors import DataError

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
MESSAGES = {"messages": [USER, ANSWER]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
PREFERENCES = {"messages": [USER], "replies": [{"content": "b", "rank": 0}, {"content": "c", "rank": 1}]}
ALPACA = {"instruction": "a", "output": "b"}
TREE = {"tree_state": "ready_for_export", "prompt": {"text": "a", "role": "prompter", "lang": "en"}}


def error_of(tmp_path: Path, form: str, row: dict[str, Any], good: dict[str, Any], **options: Any) -> str:
    """The error, after "FILE:2: ", for a file with a good and a malformed row."""
    source = tmp_path / "rows.jsonl"
    source.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    with pytest.raises(DataError) as error:
        prepare(tmp_path, "own", form=form, train=[str(source)], **options)
    assert not (tmp_path / "own").exists()
    where, message = str(error.value).split(": ", 1)
    assert where == f"{source}:2"
    return message


@pytest.mark.parametrize(
    ("form", "row", "place", "role"),
    [
        *(
            ("messages", {"messages": [{**USER, "role": role}, ANSWER]}, "messages[0]", role)
            for role in ("teacher", "User", "bot", "")
        ),
        ("messages", {"messages": [USER, {"role": "Assistant", "content": "b"}]}, "messages[1]", "Assistant"),
        ("messages", {"conversations": [{"from": "me", "value": "a"}]}, "conversations[0]", "me"),
        ("completion", {"prompt": [{"role": "asker", "content": "a"}], "completion": "b"}, "prompt[0]", "asker"),
        ("pairs", {**PAIR, "rejected": [{"role": "liar", "content": "a"}]}, "rejected[0]", "liar"),
        ("pairs", {**PAIR, "chosen": {"role": "guru", "content": "a"}}, "chosen", "guru"),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "bing", "value": "b"}]},
            "conversations[1]",
            "bing",
        ),
        ("ranked", {"messages": [{**USER, "role": "teacher"}], "replies": []}, "messages[0]", "teacher"),
        ("oasst", {**TREE, "prompt": {**TREE["prompt"], "role": "teacher"}}, "prompt", "teacher"),
        (
            "oasst",
            {**TREE, "prompt": {**TREE["prompt"], "replies": [{"text": "b", "role": "bot"}]}},
            "prompt.replies[0]",
            "bot",
        ),
    ],
)
def test_an_unknown_role_is_refused_with_its_place(
    tmp_path: Path, form: str, row: dict[str, Any], place: str, role: str
):
    good = {
        "messages": MESSAGES,
        "completion": {"prompt": "a", "completion": "b"},
        "pairs": PAIR,
        "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        "ranked": PREFERENCES,
        "oasst": TREE,
    }
    message = error_of(tmp_path, form, row, good[form])
    assert message.startswith(f"{place}: unknown role {role!r}.")
    known_roles = {"sharegpt": ["gpt", "human"], "ranked": ["assistant", "system", "tool", "user"]}
    assert message.endswith(f"Known: {', '.join(known_roles.get(form, sorted(ROLES)))}.")


@pytest.mark.parametrize(
    ("form", "good", "new_names", "names"),
    [
        ("messages", MESSAGES, {"messages": "message"}, "'messages' or 'conversations'"),
        ("completion", {"prompt": "a", "completion": "b"}, {"prompt": "promt"}, "'prompt'"),
        ("completion", {"prompt": "a", "completion": "b"}, {"completion": "completions"}, "'completion'"),
        ("pairs", PAIR, {"chosen": "choosen"}, "'chosen'"),
        ("pairs", PAIR, {"rejected": "reject"}, "'rejected'"),
        ("pairs", PAIR, {"prompt": "prompts"}, "'prompt' or 'conversations'"),
        ("alpaca", ALPACA, {"instruction": "instructions"}, "'instruction'"),
        ("alpaca", {**ALPACA, "input": "x"}, {"input": "inputs"}, "'input'"),
        ("messages", {**MESSAGES, "tools": [{"name": "add"}]}, {"tools": "tool"}, "'tools'"),
        ("text", {"text": "a"}, {"text": "texts"}, "'text'"),
        ("oasst", TREE, {"prompt": "promt"}, "'prompt'"),
    ],
)
def test_a_misspelled_column_is_named(
    tmp_path: Path, form: str, good: dict[str, Any], new_names: dict[str, str], names: str
):
    """Also an optional one, whose content would be lost silently."""
    row = {new_names.get(name, name): value for name, value in good.items()}
    message = error_of(tmp_path, form, row, good)
    (typo,) = new_names.values()
    assert message.startswith(f"no column {names}. Did you mean {typo!r}? It has: {', '.join(row)}.")
    assert "split_name" not in message


@pytest.mark.parametrize(
    ("talk", "place", "error"),
    [
        (
            [USER, {"role": "assistant", "contents": "b"}],
            "[1]",
            "no key 'content' or 'value'. Did you mean 'contents'?",
        ),
        ([{"rol": "user", "content": "a"}, ANSWER], "[0]", "no key 'role' or 'from'. Did you mean 'rol'?"),
        ([USER, {"role": "assistant", "content": None}], "[1]", "column 'content': null."),
        ([USER, {"role": "assistant", "content": [1]}], "[1]", "content: expected text, got [1] (list)."),
        ([{"role": ["user"], "content": "a"}, ANSWER], "[0]", "unknown role \"['user']\"."),
        ([USER, "b"], "[1]", "expected a message with role and content, got 'b' (str)."),
        (3, "", "expected a message with role and content, got 3 (int)."),
    ],
)
def test_a_malformed_message_is_named(tmp_path: Path, talk: Any, place: str, error: str):
    message = error_of(tmp_path, "messages", {"messages": talk}, MESSAGES)
    assert message.startswith(f"messages{place}: {error}")
    assert "--columns" not in message


def test_a_message_of_sharegpt_without_value_is_refused(tmp_path: Path):
    """It would become a request to continue."""
    good = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    row = {"conversations": [{"from": "human", "vlaue": "a"}, {"from": "gpt", "value": "b"}]}
    message = error_of(tmp_path, "sharegpt", row, good)
    assert message.startswith("conversations[0]: no key 'value'. Did you mean 'vlaue'?")


def test_a_null_column_is_not_called_missing(tmp_path: Path):
    message = error_of(tmp_path, "completion", {"prompt": None, "completion": "b"}, {"prompt": "a", "completion": "b"})
    assert message.startswith("column 'prompt': null.")


def test_a_wrong_name_in_columns_is_named(tmp_path: Path):
    good, row = {"question": "a", "completion": "b"}, {"questions": "a", "completion": "b"}
    message = error_of(tmp_path, "completion", row, good, columns=["prompt=question"])
    assert "prompt=question: no column 'question'. Did you mean 'questions'?" in message


def test_similar_columns_that_are_not_misspelled_are_allowed(tmp_path: Path):
    rows = [{"prompt_id": n, "chosen": f"b{n}", "rejected": f"c{n}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare(tmp_path, "own", form="pairs", train=[str(tmp_path / "rows.jsonl")], fold="1/2")


@pytest.mark.parametrize(
    ("form", "row", "places"),
    [
        ("messages", {"messages": [USER, {**ANSWER, "weight": 0}]}, ["messages[1]", "weight 0"]),
        ("alpaca", {**ALPACA, "input": ["x", None]}, ["'input'", "list"]),
        ("alpaca", {**ALPACA, "input": 0}, ["'input'", "int"]),
        ("alpaca", {**ALPACA, "history": [["a", "b", "c"]]}, ["'history'", "[['a', 'b', 'c']]"]),
        ("alpaca", {**ALPACA, "system": ["x"]}, ["'system'", "list"]),
        ("ranked", {**PREFERENCES, "replies": [{"content": ["b"], "rank": [0]}]}, ["replies[0]", "[0]"]),
        ("ranked", {**PREFERENCES, "messages": [{**USER, "note": "\ud800"}]}, ["messages[0]: note", "\\ud800"]),
        (
            "ranked",
            {**PREFERENCES, "messages": [{**USER, "note": {"of": [1.0, float("nan")]}}]},
            ["note: of[1]", "nan"],
        ),
    ],
)
def test_a_value_that_no_prepared_row_can_have_is_named(
    tmp_path: Path, form: str, row: dict[str, Any], places: list[str]
):
    good = {"messages": MESSAGES, "alpaca": ALPACA, "ranked": PREFERENCES}[form]
    message = error_of(tmp_path, form, row, good)
    assert all(place in message for place in places), message


@pytest.mark.parametrize("score", [float("nan"), float("inf"), True, "5"])
def test_a_score_that_is_no_finite_number_is_refused(score: Any):
    """With NaN, the worse reply would be the best one."""
    form = ScoredReplies(prompt="{q}", replies=[["a", "of_a"], ["b", "of_b"]])
    row = {"q": "1 + 1?", "a": "2", "of_a": 5.0, "b": "3", "of_b": 1.0}
    assert [reply["content"] for reply in next(form.read(row, "rows:1"))["replies"]] == ["2", "3"]
    with pytest.raises(DataError) as error:
        list(form.read({**row, "of_b": score}, "rows:1"))
    assert str(error.value).startswith("rows:1: column 'of_b'")
    assert repr(score) in str(error.value)


def test_a_digit_that_is_no_decimal_is_refused():
    with pytest.raises(DataError, match=r"^rows:1: column 'label'.*²"):
        list(Endings().read({"ctx": "a", "endings": ["b", "c", "d"], "label": "²"}, "rows:1"))


def test_rows_of_a_group_have_one_prompt():
    form = ScoredReplies(prompt="{q}", replies=[["a", "of_a"], ["b", "of_b"]])
    row = {"q": "1 + 1?", "a": "2", "of_a": 5.0, "b": "3", "of_b": 1.0}
    with pytest.raises(DataError) as error:
        list(form.read({"rows": [row, {**row, "q": "1 + 2?"}]}, "rows:1"))
    assert "'1 + 1?'" in str(error.value)
    assert "'1 + 2?'" in str(error.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(["x", None, "y"], "x y"), ([None], ""), (float("nan"), ""), (0, "0"), ([1, 2], "1 2"), (None, ""), ([], "")],
)
def test_columns_become_text_without_nulls(value: Any, text: str):
    assert fill("<{a}>", {"a": value}, "rows:1") == f"<{text}>"


@pytest.mark.parametrize("value", [[{"t": 1}, "x"], {"t": 1}, [["x"]]])
def test_columns_with_objects_are_refused(value: Any):
    with pytest.raises(DataError) as error:
        fill("<{a}>", {"a": value}, "rows:1")
    assert str(error.value).startswith("rows:1: column 'a'")
