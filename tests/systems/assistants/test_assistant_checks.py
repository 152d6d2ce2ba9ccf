"""What can be known before a training of an assistant is told by --dry-run, in one line each."""

from pathlib import Path
from typing import Any

import pytest

from src.errors import ConfigError
from src.experiments.grid import override
from src.experiments.interfaces import load_experiment
from tests import toy
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.conversations.test_rendering import NO_END
from tests.systems.assistants.train_assistants import DPO, KTO, REWARD, SFT, TALK, write_data
from tests.systems.assistants.train_policies import GRPO, PPO

ENDS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
ENDS += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
TEMPLATES = {
    "raises": "{{ raise_exception('never') }}",
    "endless": NO_END,
    "no_system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ENDS,
    "good": ENDS,
    "no_template": None,
}
OWN_TEMPLATE = {**TALK, "writing": {"template": "tokenizer"}}
MIXTURE = {"name": "mixture", "parts": {"a": TALK, "b": {**TALK, "sequence_tokens": 32}}}


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
        ("raises", OWN_TEMPLATE, "data.writing.template: the template rejects user assistant user assistant (never)."),
        ("endless", OWN_TEMPLATE, "data.writing.template: no control token ends the answer"),
        ("no_template", OWN_TEMPLATE, "data.writing.template: the tokenizer has no chat template."),
        (
            "no_system",
            {**TALK, "writing": {"template": "tokenizer", "system": "x"}},
            "the template rejects system user (no system).",
        ),
        ("no_end", TALK, "the tokenizer has no eos_token"),
        (
            "good",
            {**TALK, "writing": {"template": "tokenizer", "tags": {}}},
            "data.writing: tags: a tokenizer's chat template cannot write them",
        ),
        (
            "talk_tokenizer",
            {**MIXTURE, "draw": {"a": {"size": 99}}},
            "data.draw.a.size: 99, but the part has only 24 samples.",
        ),
        ("good", OWN_TEMPLATE, None),
        ("no_system", OWN_TEMPLATE, None),
        ("talk_tokenizer", {**MIXTURE, "draw": {"a": {"size": 24}, "b": {"size": 99, "fraction": 9.0}}}, None),
    ],
)
def test_dry_run_refuses(
    folder: Path, tokenizer: str, data: dict[str, Any], message: str | None, capsys: pytest.CaptureFixture[str]
):
    exp = override(SFT, {"model.tokenizer": tokenizer, "data": data, "answers": None})
    assert toy.main(["-e", "x", "--dry-run"], {"x": [exp]}, folder) == (message is not None)
    assert (message or "") in capsys.readouterr().err


@pytest.mark.parametrize("exp", [REWARD, DPO, KTO, PPO, GRPO], ids=lambda exp: exp["recipe"])
@pytest.mark.parametrize("name", ["label_smoothing", "z_loss"])
def test_terms_of_the_cross_entropy_are_refused_for_other_losses(exp: dict[str, Any], name: str):
    if "rewards" in exp:
        exp = override(exp, {"rewards": [{"name": "length", "free_tokens": 2, "worst_tokens": 4}]})
    load_experiment(override(exp, {f"loop.{name}": 0.0}), "x")
    with pytest.raises(ConfigError, match=rf"loop\.{name}: 0\.125"):
        load_experiment(override(exp, {f"loop.{name}": 0.125}), "x")
