"""What a person prefers on the page: rows that are trained on, none of them lost, and one line for a mistake."""

import json
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from data_prep.assistants import prepare_conversations
from src.errors import ConfigError, RunError
from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.systems.assistants.serving import page
from src.systems.assistants.serving.preferences import Conversation
from tests import toy
from tests.systems.assistants.train_assistants import DPO, REWARD, SFT, write_data

TALKER = {name: part for name, part in override(SFT, {"loop.steps": 4}).items() if name != "answers"}
FROM_PREFERENCES = {"model": ref(TALKER), "data.corpus": "preferences", "loop.steps": 4}
JUDGE = override(REWARD, {**FROM_PREFERENCES, "model": {"name": "reward", "base": ref(TALKER)}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_data(folder / "data")
    assert toy.main(["-e", "sft"], {"sft": [TALKER]}, folder) == 0
    return folder


@pytest.fixture
def conversation(folder: Path, tmp_path: Path) -> Conversation:
    """With two samples of one model."""
    run = folder / "runs" / exp_id(TALKER)
    sides = page.load_sides([run, run], Places(folder / "data", folder / "runs"), "cpu")
    options = {"max_new_tokens": 4, "do_sample": True, "temperature": 2.0}
    return Conversation(sides, tmp_path / "preferences.jsonl", Lock(), options)


def ask(conversation: Conversation, text: str) -> list[str]:
    """The replies, which came piece by piece."""
    pieces: list[list[str]] = [[] for _ in conversation.sides]
    replies = conversation.ask(text, [each.append for each in pieces])
    assert ["".join(each) for each in pieces] == replies
    assert len(set(replies)) == 2, "the setting of the test"
    assert len(conversation.remarks) == len(replies)
    return replies


def rows(conversation: Conversation) -> list[dict[str, Any]]:
    return [json.loads(line) for line in conversation.output.read_text(encoding="utf-8").splitlines()]


def test_reward_models_and_preferences_train_on_preferred_replies(conversation: Conversation, folder: Path):
    for number in range(4):
        ask(conversation, f"{number}?")
        conversation.prefer(number % 2)
    source, data = str(conversation.output), folder / "data"
    assert prepare_conversations.main(
        ["--form", "ranked", "--train", source, "--val", source, "--name", "preferences", "--data_path", str(data)]
    ) == 0  # fmt: skip
    assert toy.main(["-e", "reward", "dpo"], {"reward": [JUDGE], "dpo": [override(DPO, FROM_PREFERENCES)]}, folder) == 0


def test_conversation_continues_with_the_preferred_reply(conversation: Conversation):
    first = ask(conversation, "2?")
    conversation.prefer(1)
    second = ask(conversation, "more?")
    third = ask(conversation, "é?")
    conversation.prefer(0)
    turns = [*zip(("user", "assistant") * 2, ("2?", first[1], "more?", second[0]), strict=True), ("user", "é?")]
    assert [[(message["role"], message["content"]) for message in row["messages"]] for row in rows(conversation)] == [
        turns[:1],
        turns,
    ]
    by = f"{exp_id(TALKER)[:8]} step-00000004"
    assert rows(conversation)[0]["replies"] == [
        {"content": text, "rank": rank, "by": by} for text, rank in zip(first, (1, 0), strict=True)
    ]
    assert [reply["content"] for reply in rows(conversation)[1]["replies"]] == third
    assert conversation.ask(" !reset ", [print, print]) == []
    assert conversation.messages == []


def test_a_preference_can_be_repeated_after_a_write_error(conversation: Conversation):
    ask(conversation, "2?")
    before = list(conversation.messages)
    conversation.output.mkdir()
    with pytest.raises(RunError, match=r"preferences\.jsonl: cannot write"):
        conversation.prefer(1)
    assert conversation.messages == before
    with pytest.raises(ConfigError, match=r"exceed the 96 positions of the model\..*/reset"):
        conversation.ask("x" * 90, [print, print])
    conversation.output.rmdir()
    conversation.output.write_text('{"text": "a last line without its end"}')
    conversation.prefer(1)
    assert len(rows(conversation)) == 2
    with pytest.raises(ConfigError, match="no replies to compare"):
        conversation.prefer(0)
    assert len(rows(conversation)) == 2


def command(folder: Path, *words: str) -> int:
    places = ["--data_path", str(folder / "data"), "-sb", str(folder / "runs")]
    return page.main(["--port", "0", "--device", "cpu", *places, *words])


@pytest.mark.parametrize(
    ("runs", "words", "message"),
    [
        (3, [], "error: expected one or two runs, got 3.\n"),
        (1, ["--top_p", "0"], "error: expected --max_new_tokens >= 1"),
        (1, ["--address", "256.0.0.1"], "error: --port 0: cannot listen on 256.0.0.1: "),
        (2, ["--output", "torn.jsonl"], "error: torn.jsonl:2: not valid JSON"),
        (
            2,
            ["--output", "foreign.jsonl"],
            "error: foreign.jsonl:1: expected messages, prompt or text, got the keys a.\n",
        ),
        (2, ["--output", "torn.jsonl/x"], "error: torn.jsonl/x: cannot write: "),
    ],
)
def test_mistakes_are_one_line(
    runs: int,
    words: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(folder)
    truncated_rows = '{"text": "whole"}\n{"text": "to'
    Path("torn.jsonl").write_text(truncated_rows)
    Path("foreign.jsonl").write_text('{"a": 1}\n')
    assert command(folder, *[str(folder / "runs" / exp_id(TALKER))] * runs, *words) == 1
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert Path("torn.jsonl").read_text() == truncated_rows


def test_a_reward_model_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    judge = override(REWARD, {"model.base": ref(TALKER), "loop.steps": 4})
    assert toy.main(["-e", "reward"], {"reward": [judge]}, folder) == 0
    capsys.readouterr()
    assert command(folder, str(folder / "runs" / exp_id(judge))) == 1
    assert capsys.readouterr().err.startswith("error: a reward model ")
