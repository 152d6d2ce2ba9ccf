"""A tokenizer with the control tokens of a template, whose ids never differ."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.assistants import chat_tokenizer
from src.data.text import tokenizers
from src.systems.assistants.conversations import templates
from tests import toy
from tests.systems.assistants.conversations import talk


def make(folder: Path, template: str, name: str = "new", source: str = "old") -> int:
    return chat_tokenizer.main(["--from", source, "--template", template, "--name", name, "--data_path", str(folder)])


@pytest.mark.parametrize("template", ["oasst", "chatml"])
def test_control_tokens_are_last_and_the_template_is_there(
    tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str]
):
    talk.tokenizer([]).save_pretrained(tmp_path / "old")
    for _ in range(2):
        assert make(tmp_path, template) == 0
    assert "nothing to do" in capsys.readouterr().out
    old, new = tokenizers.load(tmp_path / "old"), tokenizers.load(tmp_path / "new")
    expected = {"oasst": templates.OASST_TOKENS, "chatml": templates.CHATML_TOKENS}[template]
    assert new.convert_ids_to_tokens([*range(len(old), len(new))]) == [*expected]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]
    spans = templates.find(template, new).spans([templates.Message(each["role"], each["content"]) for each in messages])
    assert new.apply_chat_template(messages, tokenize=False) == "".join(span.text for span in spans)


def test_tokens_that_are_there_keep_their_ids(tmp_path: Path):
    talk.tokenizer(["<|assistant|>", "<|other|>"]).save_pretrained(tmp_path / "old")
    assert make(tmp_path, "oasst") == 0
    old, new = tokenizers.load(tmp_path / "old"), tokenizers.load(tmp_path / "new")
    assert old.get_vocab().items() <= new.get_vocab().items()
    assert len(new) == len(old) + len(templates.OASST_TOKENS) - 1
    assert json.loads((tmp_path / "new" / "manifest.json").read_text())["new_tokens"] == len(new) - len(old)


def test_a_tokenizer_that_names_no_end_token_gets_one_of_its_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """As Galactica's, whose "</s>" is in the vocabulary."""
    old = talk.tokenizer(["</s>"])
    old.eos_token = None
    old.save_pretrained(tmp_path / "old")
    words = ["--from", "old", "--template", "oasst", "--name", "new", "--data_path", str(tmp_path)]
    assert chat_tokenizer.main(words) == 1
    assert "has no eos_token" in capsys.readouterr().err
    assert chat_tokenizer.main([*words, "--end_token", "</t>"]) == 1
    assert "end token '</t>' is not in the vocabulary" in capsys.readouterr().err
    assert chat_tokenizer.main([*words, "--end_token", "</s>"]) == 0
    new = tokenizers.load(tmp_path / "new")
    assert new.eos_token_id == old.convert_tokens_to_ids("</s>")


@pytest.mark.slow
def test_b2_ids_do_not_depend_on_the_hash_seed(tmp_path: Path):
    """Two processes of one training must agree on them."""
    talk.tokenizer([]).save_pretrained(tmp_path / "old")
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    words = ["--from", "old", "--template", "oasst", "--name", "other", "--data_path", str(tmp_path)]
    command = [sys.executable, "-m", "data_prep.assistants.chat_tokenizer", *words]
    other = subprocess.Popen(
        command, cwd=toy.ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.DEVNULL
    )
    assert make(tmp_path, "oasst") == 0
    assert other.wait(toy.LONGEST) == 0
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (tmp_path / "other" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("template", "name", "message"),
    [
        ("oassst", "new", "--template: unknown template 'oassst'. Did you mean 'oasst'? Known: chatml, oasst."),
        ("oasst", "old", "old is also the source (--from)."),
        ("oasst", "endless", "the tokenizer has no eos_token"),
    ],
)
def test_errors_name_the_mistake(
    tmp_path: Path, template: str, name: str, message: str, capsys: pytest.CaptureFixture[str]
):
    tokenizer = talk.tokenizer([])
    if name == "endless":
        tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "old")
    assert make(tmp_path, template, name) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "endless").exists()
