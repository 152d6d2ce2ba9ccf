"""What a training on conversations reads is shown before it begins, and what it takes of memory."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants import show_conversations
from src.data.orders import IndexedOrder
from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.registry import DATASETS, bind
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.train_assistants import DPO, KTO, REWARD, SFT, TALK, write_data

SAMPLE_HEADING = re.compile(r"^\w+ \d+: \d+ tokens, \d+ learned$", re.MULTILINE)
PARTS = {"a": TALK, "b": {**TALK, "writing": {"system": "short"}}}
MIXTURE = override(SFT, {"data": {"name": "mixture", "parts": PARTS, "draw": {"b": {"fraction": 0.25}}}})
PACKED = override(SFT, {"data": {"name": "packed", "documents": TALK, "sequence_tokens": 96, "too_long": "drop"}})
EVALUATION: dict[str, Any] = {
    "recipe": "sft",
    "seed": 0,
    "model": ref(DPO),
    "data": TALK,
    "evaluation": {"micro_batch": 4},
}
TEXT = override(SFT, {"recipe": "lm", "answers": None, "data": {"name": "text", "corpus": "x", "sequence_tokens": 8}})
BUDGET = {"tokens": PACKED["loop"]["steps"] * PACKED["loop"]["sequences_per_step"] * 96}
GROUPS = {
    "sft": [SFT, override(SFT, {"data.train_all_roles": True})],
    "mixed": [MIXTURE],
    "packed": [PACKED],
    "budget": [{**PACKED, "loop": {**{k: v for k, v in PACKED["loop"].items() if k != "steps"}, "budget": BUDGET}}],
    "reward": [REWARD],
    "dpo": [DPO],
    "kto": [KTO],
    "judged": [EVALUATION],
    "text": [{name: value for name, value in TEXT.items() if name != "answers"}],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("shown") / "data")


@pytest.fixture
def show(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What the command prints; and its exit code, if it is another than is expected."""
    module = types.ModuleType("exp_configs")
    module.EXP_GROUPS = GROUPS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exp_configs", module)

    def run(*words: str, code: int = 0) -> str:
        before = sorted(data.parent.rglob("*"))
        assert show_conversations.main([*words, "--data_path", str(data), "-sb", str(data.parent / "runs")]) == code
        assert sorted(data.parent.rglob("*")) == before, "nothing is written"
        output = capsys.readouterr()
        return output.err if code else output.out

    return run


def build_data(data: Path, config: dict[str, Any]) -> Any:
    return bind(DATASETS, config).build(Places(data, data), talk.tokenizer(), "train", 0)


def test_the_first_batch_is_shown_with_its_loss_mask(show, data: Path):
    out, train_data = show("sft", "--samples", "9"), build_data(data, TALK)
    keys = IndexedOrder(0, len(train_data), 4).keys()
    for _ in range(SFT["loop"]["micro_batch"]):
        sample = train_data.render(*next(keys))
        marked_text = talk.mark_roles(sample, talk.tokenizer(), [*show_conversations.Role])
        assert f": {len(sample.ids)} tokens, {sum(sample.loss_mask)} learned\n" in out
        assert f"\n{marked_text}\n" in re.sub(r"assistant\[\[|\]\]", "", out)
    assert len(SAMPLE_HEADING.findall(out)) == SFT["loop"]["micro_batch"]
    assert re.search(r"<\|prompter\|>\d\?<end><\|assistant\|>assistant\[\[\w+<end>\]\]", out)
    assert "learned" in show("sft[1]")
    assert "template[[<end><|assistant|>]]" in show("sft[1]"), "there all is learned but the first token"


def test_colours_change_nothing_else(show):
    with_colors, plain = (show("sft", "--color", color) for color in ("always", "auto"))
    assert "\x1b[32;4m" in with_colors
    assert "\x1b" not in plain
    bare = re.sub(r"\x1b\[[\d;]*m", "", with_colors).partition("\n\n")[2]
    assert bare == re.sub(r"\w+\[\[|\]\]", "", plain)


def test_all_replies_are_shown(show):
    out = show("reward", "--samples", "1")
    replies = re.findall(r"assistant\[\[(.*?)\]\]", out)
    assert len(replies) == len(SAMPLE_HEADING.findall(out)) >= 2
    assert len(set(replies)) == len(replies)
    assert len(SAMPLE_HEADING.findall(show("kto", "--samples", "1"))) == KTO["data"]["group_size"]
    assert "\x1b[36m3?" in show("reward", "--samples", "1", "--color", "always"), "what a user says has its colour"
    assert "assistant[[" in show("dpo"), "its parent is not trained yet"


def test_a_mixture_is_counted_by_part(show):
    rows = {line.split()[0]: line.split()[1:] for line in show("mixed").splitlines() if re.match(r"[ab] +\d+ ", line)}
    assert rows["a"][:2] == ["24", "24"]
    assert rows["b"][:2] == ["24", "6"]
    times = [float(rows[name][2]) for name in "ab"]
    assert times[0] == pytest.approx(8 * 4 * 24 / 30 / 24, rel=1e-2)
    assert times[1] == pytest.approx(times[0] / 4, rel=1e-2)
    assert float(rows["b"][4]) > float(rows["a"][4]), "the system message is counted"


def test_packed_conversations_are_shown_one_by_one(show):
    out = show("packed", "--samples", "3")
    assert len(SAMPLE_HEADING.findall(out)) == 3
    assert re.search(r"^packed +24 +24 +\d", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stf"], "unknown group 'stf'. Did you mean 'sft'?"),
        (["sft[2]"], "sft[2]: the group has 2 experiments."),
        (
            ["judged"],
            "judged: trains on no conversations. Name an experiment of recipe sft, reward, dpo, kto that has a loop.",
        ),
        (["text"], "text: trains on no conversations."),
        (["sft", "--samples", "0"], "--samples: expected at least 1, got 0."),
    ],
)
def test_errors_name_the_mistake(show, words: list[str], message: str):
    assert message in show(*words, code=1)


@pytest.mark.parametrize(
    ("group", "line"),
    [("sft", r"\d+\.\d\d GiB \(weights "), ("dpo", "cannot plan a training on 'ranked_replies' data")],
)
def test_memory_is_that_of_the_memory_plan(show, group: str, line: str):
    assert re.search(rf"^memory of a GPU: .*{line}", show(group), re.MULTILINE)


def test_budget_is_shown_as_its_steps(show: Any):
    assert show("budget").replace("budget", "packed") == show("packed")
