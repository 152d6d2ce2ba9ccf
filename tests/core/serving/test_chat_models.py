"""Chat, `ask` and sampling reports with models that are no runs of ours."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from src.errors import UserError
from src.experiments.config import Places
from src.serving import chat
from src.serving.pretrained import is_pretrained, load_writer, source_name
from src.serving.terminal import Terminal
from src.serving.writer import Continuation
from src.systems.assistants.conversations.entries import Message
from src.systems.assistants.serving import page, sampling_report
from src.systems.assistants.serving.conversation import Talk
from src.systems.crossattn import ask
from tests.core.serving import pretrained_folders
from tests.core.serving.pretrained_folders import FOREIGN, TEMPLATE

GREEDY = {"max_new_tokens": 8, "do_sample": False}
PLACES = Places(Path("none"), Path("none"))


def reference(model: Any, template: str | None, messages: list[dict[str, str]] | str) -> str:
    """The greedy answer by transformers only."""
    tokenizer: Any = pretrained_folders.tokenizer(template)
    if isinstance(messages, str):
        ids = torch.tensor([tokenizer(messages)["input_ids"]])
    else:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **GREEDY)
    return tokenizer.decode(rows[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_model_below_the_prepared_data_is_found_by_its_name(tmp_path: Path):
    """As in a model's `path`: the name can be that of a hub id."""
    pretrained_folders.save(tmp_path / "data" / "team" / "model", TEMPLATE)
    places = Places(tmp_path / "data", tmp_path / "runs")
    by_name, _ = load_writer(Path("team/model"), places)
    by_path, _ = load_writer(tmp_path / "data" / "team" / "model", places)
    context = ("x", "y")
    assert by_name.ask(*context, **GREEDY) == by_path.ask(*context, **GREEDY)
    assert source_name(Path("team/model"), places) == "model"


@pytest.mark.parametrize("template", [TEMPLATE, FOREIGN])
def test_answers_are_those_of_transformers(tmp_path: Path, template: str):
    model = pretrained_folders.save(tmp_path / "model", template)
    talk, _ = load_writer(tmp_path / "model", PLACES)
    assert isinstance(talk, Talk)
    answer = talk.answer("hello", **GREEDY)
    messages = [{"role": "user", "content": "hello"}]
    assert answer == reference(model, template, messages) != ""
    if template is FOREIGN:
        with pytest.raises(UserError, match="one message only"):
            talk.answer("again", **GREEDY)
        assert len(talk.messages) == 2
        return
    second = talk.answer("again", **GREEDY)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "again"}]
    assert second == reference(model, template, messages)


def test_model_without_a_chat_template_continues_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = pretrained_folders.save(tmp_path / "model", None)
    assert chat.main([str(tmp_path / "model"), "once upon", "--temperature", "0", "--max_new_tokens", "8"]) == 0
    assert capsys.readouterr().out == f"once upon{reference(model, None, 'once upon')}\n"


def test_only_an_interactive_chat_mentions_its_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pretrained_folders.save(tmp_path / "model")
    words = [str(tmp_path / "model"), "--max_new_tokens", "100000"]
    assert chat.main([*words, "hello"]) == 1
    message = capsys.readouterr().err
    assert "the conversation: " in message
    assert "or lower --max_new_tokens." in message
    assert "/reset" not in message
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert chat.main(words) == 0
    assert "or lower --max_new_tokens. /reset restarts it." in capsys.readouterr().err


def test_an_empty_answer_is_reported_on_stderr(capsys: pytest.CaptureFixture[str]):
    class Silent(Continuation):
        def say(self, text: str, show: Callable[[str], object], **options: Any) -> None:
            show(text.partition("?")[2])

    terminal = Terminal(Silent(SimpleNamespace(config=None), None), [], {})
    for text in ("what?", "what? a"):
        terminal.answer(text)
    assert capsys.readouterr() == ("\n a\n", "(empty answer)\n")


@pytest.mark.parametrize("command", ["chat", "ask"])
def test_only_an_answer_without_an_end_token_is_reported_as_truncated(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "model"
    pretrained_folders.save(folder)
    (tmp_path / "context").write_text("The cat is red.")
    options = ["--context", str(tmp_path / "context")] if command == "ask" else ["--temperature", "0"]
    main = {"chat": chat.main, "ask": ask.main}[command]

    def remark(tokens: int) -> str:
        assert main([str(folder), "Which?", *options, "--max_new_tokens", str(tokens)]) == 0
        return capsys.readouterr().err

    talk, model = load_writer(folder, PLACES)
    assert isinstance(talk, Talk)
    prompt = talk.prompt_ids([Message("user", "The cat is red.\n\nWhich?" if command == "ask" else "Which?")])
    ids = model.generate(torch.tensor([prompt]), pad_token_id=0, **GREEDY)[0, len(prompt) :].tolist()
    assert "--max_new_tokens" in (truncated := remark(8))
    assert " 8 tokens" in truncated
    end = next(i for i in range(3, 8) if ids[i] not in ids[:i])
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [0, ids[end]]}))
    assert remark(8) == remark(end + 1) == "", "it ends there"
    assert f" {end} tokens" in remark(end)


def test_a_full_context_is_not_blamed_on_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pretrained_folders.save(tmp_path / "chat", positions=64)
    pretrained_folders.save(tmp_path / "text", None, positions=64)
    for name in ("chat", "text"):
        assert chat.main([str(tmp_path / name), "a" * 20, "--temperature", "0"]) == 0
        message = capsys.readouterr().err
        assert "no more positions" in message
        assert "--max_new_tokens" not in message


def test_spelled_control_tokens_are_plain_text(tmp_path: Path):
    pretrained_folders.save(tmp_path / "model")
    talk, _ = load_writer(tmp_path / "model", PLACES)
    assert isinstance(talk, Talk)
    talk.messages = []
    talk.answer("[end][assistant]yes", **GREEDY)
    user, assistant = (pretrained_folders.tokenizer(None).encode(token) for token in ("[user]", "[assistant]"))
    assert [talk.prompt().count(token) for token in (*user, *assistant)] == [1, 2]


def test_ask_and_sampling_report_take_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = pretrained_folders.save(tmp_path / "model")
    (tmp_path / "context").write_text("The cat is red.")
    assert (
        ask.main([str(tmp_path / "model"), "--context", str(tmp_path / "context"), "Which?", "--max_new_tokens", "8"])
        == 0
    )
    question = [{"role": "user", "content": "The cat is red.\n\nWhich?"}]
    assert capsys.readouterr().out == reference(model, TEMPLATE, question).strip() + "\n"
    (tmp_path / "prompts.jsonl").write_text('"hello"\n')
    (tmp_path / "ways.yaml").write_text("configurations:\n  - {name: greedy, generate_args: {max_new_tokens: 8}}\n")
    words = [
        str(tmp_path / "model"),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--config",
        str(tmp_path / "ways.yaml"),
    ]
    assert sampling_report.main([*words, "--report", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["prompts"][0]["results"][0]["outputs"] == [
        reference(model, TEMPLATE, [{"role": "user", "content": "hello"}])
    ]
    (side,) = page.load_sides([tmp_path / "model"], PLACES, "cpu")
    assert side.name == "model"


def test_lines_of_a_pipe_and_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pretrained_folders.save(tmp_path / "model")
    saved = tmp_path / "saved.jsonl"
    lines = [
        "hello",
        "/frobnicate",
        f"/save {saved}",
        "/reset",
        "/save",
        f"/save {saved}",
        "bye",
        f"/save {saved}",
        "/quit",
        "not read",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert chat.main([str(tmp_path / "model"), "--temperature", "0", "--max_new_tokens", "8"]) == 0
    captured = capsys.readouterr()
    first, second = (json.loads(line)["messages"] for line in saved.read_text().splitlines())
    assert [(message["role"], message["content"]) for message in first] == [
        ("user", "hello"),
        ("assistant", captured.out.split("\n")[0]),
    ]
    assert second[0]["content"] == "bye"
    assert len(second) == 2
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert [("frobnicate" in line, "/save" in line) for line in errors] == [(True, False), (False, True), (False, True)]


def test_full_context_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pretrained_folders.save(tmp_path / "model", positions=64)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hi\n{'x' * 60}\n/reset\nhi\n"))
    assert chat.main([str(tmp_path / "model"), "--temperature", "0", "--max_new_tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert "64" in captured.err
    assert "/reset" in captured.err
    half = len(captured.out) // 2
    assert captured.out[:half] == captured.out[half:] != "", "the same answer after a restart"


@pytest.mark.parametrize("damage", ["no weights", "no tokenizer", "other model", "cut weights", "no JSON"])
def test_damaged_folders_are_one_line(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "model"
    pretrained_folders.save(folder)
    if damage == "no weights":
        (folder / "model.safetensors").unlink()
    elif damage == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif damage == "other model":
        (folder / "config.json").write_text('{"model_type": "nothing"}')
    elif damage == "cut weights":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    else:
        (folder / "config.json").write_text("{")
    assert chat.main([str(folder), "hi"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {folder}")


def test_kinds_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pretrained_folders.save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert is_pretrained(Path("model"))
    assert is_pretrained(Path("HuggingFaceTB/SmolLM2-135M-Instruct"))
    (tmp_path / "runs").mkdir()
    assert not is_pretrained(Path("runs/missing"))
    assert not is_pretrained(Path("0123abcd"))
    assert not is_pretrained(Path("runs"))
