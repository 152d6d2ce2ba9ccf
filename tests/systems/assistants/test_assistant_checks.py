"""What can be known before a training of an assistant is told by --dry-run, in one line each."""

from pathlib import Path
from typing import Any

import pytest

from src.experiments.grid import override
from tests import toy
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.conversations.test_rendering import NO_END
from tests.systems.assistants.train_assistants import SFT, TALK, write_data

ENDS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
ENDS += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
TEMPLATES = {
    "raises": "{{ raise_exception('never') }}",
    "endless": NO_END,
    "no_system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ENDS,
    "good": ENDS,
    "no_template": None,
}
OWN = {**TALK, "writing": {"template": "tokenizer"}}
MIXED = {"name": "mixture", "parts": {"a": TALK, "b": {**TALK, "sequence_tokens": 32}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checks")
    write_data(folder / "data")
    for name, template in TEMPLATES.items():
        talk.tokenizer(template=template).save_pretrained(folder / "data" / name)
    plain = talk.tokenizer()
    plain.eos_token = None
    plain.save_pretrained(folder / "data" / "no_end")
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "data", "message"),
    [
        ("raises", OWN, "data.writing.template: the template refuses user assistant user assistant (never)."),
        ("endless", OWN, "data.writing.template: no control token ends the answer"),
        ("no_template", OWN, "data.writing.template: the tokenizer has no chat template of its own."),
        (
            "no_system",
            {**TALK, "writing": {"template": "tokenizer", "system": "x"}},
            "the template refuses system user (no system).",
        ),
        ("no_end", TALK, "the tokenizer has no eos_token"),
        (
            "good",
            {**TALK, "writing": {"template": "tokenizer", "tags": {}}},
            "data.writing: tags: a template of the tokenizer has no place",
        ),
        (
            "talk_tokenizer",
            {**MIXED, "draw": {"a": {"size": 99}}},
            "data.draw.a.size: 99, but the part has only 24 samples.",
        ),
        ("good", OWN, None),
        ("no_system", OWN, None),
        ("talk_tokenizer", {**MIXED, "draw": {"a": {"size": 24}, "b": {"size": 99, "fraction": 9.0}}}, None),
    ],
)
def test_dry_run_refuses(
    folder: Path, tokenizer: str, data: dict[str, Any], message: str | None, capsys: pytest.CaptureFixture[str]
):
    exp = override(SFT, {"model.tokenizer": tokenizer, "data": data, "answers": None})
    assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, folder) == (message is not None)
    assert (message or "") in capsys.readouterr().err
