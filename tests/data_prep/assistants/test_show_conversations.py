"""What a training on conversations reads is shown before it begins, and what it takes of memory."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import training_memory
from data_prep.assistants import show_conversations
from src.data.orders import IndexedOrder
from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.registry import DATASETS, MODELS, bind
from src.models.load import PLACES
from src.training.config import LoopConfig
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.train_assistants import DPO, REWARD, SFT, TALK, write_data

SHOWN = re.compile(r"^\w+ \d+: \d+ tokens, \d+ learned$", re.MULTILINE)
PARTS = {"a": TALK, "b": {**TALK, "writing": {"system": "short"}}}
MIXED = override(SFT, {"data": {"name": "mixture", "parts": PARTS, "draw": {"b": {"fraction": 0.25}}}})
PACKED = override(SFT, {"data": {"name": "packed", "documents": TALK, "sequence_tokens": 96, "too_long": "drop"}})
JUDGED: dict[str, Any] = {"recipe": "sft", "seed": 0, "model": ref(DPO), "data": TALK, "evaluation": {"micro_batch": 4}}
TEXT = override(SFT, {"recipe": "lm", "answers": None, "data": {"name": "text", "corpus": "x", "sequence_tokens": 8}})
GROUPS = {
    "sft": [SFT, override(SFT, {"data.learn_all": True})],
    "mixed": [MIXED],
    "packed": [PACKED],
    "reward": [REWARD],
    "dpo": [DPO],
    "judged": [JUDGED],
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
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


def built(data: Path, config: dict[str, Any]) -> Any:
    return bind(DATASETS, config).build(Places(data, data), talk.tokenizer(), "train", 0)


def test_the_first_batch_is_shown_with_what_is_learned(show, data: Path):
    out, own = show("sft", "--samples", "9"), built(data, TALK)
    keys = IndexedOrder(0, len(own), 4).keys()
    for _ in range(SFT["loop"]["micro_batch"]):
        found = own.render(*next(keys))
        said = talk.shown(found, talk.tokenizer(), [*show_conversations.Role])
        assert f": {len(found.ids)} tokens, {sum(found.learned)} learned\n" in out
        assert f"\n{said}\n" in re.sub(r"assistant\[\[|\]\]", "", out)
    assert len(SHOWN.findall(out)) == SFT["loop"]["micro_batch"]
    assert re.search(r"<\|prompter\|>\d\?<end><\|assistant\|>assistant\[\[\w+<end>\]\]", out)
    assert "learned" in show("sft[1]")
    assert "template[[<end><|assistant|>]]" in show("sft[1]"), "there all is learned but the first token"


def test_colours_change_nothing_else(show):
    colored, plain = (show("sft", "--color", color) for color in ("always", "auto"))
    assert "\x1b[32;4m" in colored
    assert "\x1b" not in plain
    bare = re.sub(r"\x1b\[[\d;]*m", "", colored).partition("\n\n")[2]
    assert bare == re.sub(r"\w+\[\[|\]\]", "", plain)


def test_all_replies_are_shown(show):
    out = show("reward", "--samples", "1")
    replies = re.findall(r"assistant\[\[(.*?)\]\]", out)
    assert len(replies) == len(SHOWN.findall(out)) >= 2
    assert len(set(replies)) == len(replies)
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
    assert len(SHOWN.findall(out)) == 3
    assert re.search(r"^packed +24 +24 +\d", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stf"], "unknown group 'stf'. Did you mean 'sft'?"),
        (["sft[2]"], "sft[2]: the group has 2 experiments, from sft[0] on."),
        (
            ["judged"],
            "judged: trains on no conversations. Name an experiment of recipe sft, reward, dpo that has a loop.",
        ),
        (["text"], "text: trains on no conversations."),
        (["sft", "--samples", "0"], "--samples: expected at least 1, got 0."),
    ],
)
def test_mistakes_are_told(show, words: list[str], message: str):
    assert message in show(*words, code=1)


LLAMA: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def test_weights_and_optimizer_are_those_of_the_model(data: Path, tmp_path: Path):
    """Of one that is loaded, and of adapters on it, without its weights being there."""
    from transformers import LlamaConfig

    LlamaConfig(**LLAMA).save_pretrained(tmp_path / "llama")
    talk.tokenizer([]).save_pretrained(tmp_path / "llama")
    base = {"name": "hf", "path": str(tmp_path / "llama"), "tokenizer": str(data / "talk_tokenizer")}
    lora = {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["q_proj"], "base": base}
    adapters, new_rows = 3 * 2 * 2 * 64, 2 * len(talk.TOKENS) * 64
    loop = LoopConfig(steps=1, sequences_per_step=1, micro_batch=1, learning_rate=1.0, eval_every=1)
    for config, trained in ((base, None), (lora, adapters + new_rows)):
        places = Places(data, tmp_path)
        empty = training_memory.build_empty(training_memory.without_weights(bind(MODELS, config), places), places)
        found = training_memory.estimate(empty, loop, 2, 10)
        weights = sum(each.numel() for each in empty.parameters())
        assert found.weights == 4 * weights
        assert found.gradients == 4 * (trained or weights)
        assert found.optimizer == 2 * found.gradients
        assert found.logits == 2 * 10 * 300 * 12
        assert found.checkpointed < found.activations


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode"])
def test_activations_are_about_what_is_kept_for_the_backward_pass(family: str, data: Path):
    from torch.autograd.graph import saved_tensors_hooks
    from transformers import LlamaConfig, LlamaForCausalLM

    if family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**LLAMA, max_position_embeddings=64))
    else:
        sizes = {"hidden_size": 64, "num_layers": 3, "num_heads": 4}
        model = bind(MODELS, {**SFT["model"], **sizes}).build(Places(data, PLACES.runs))
    weights = {each.data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, 250, (8, 48))
    with saved_tensors_hooks(count, lambda tensor: tensor):
        output = model.train().base_model(input_ids=ids)
    assert output is not None
    loop = LoopConfig(steps=1, sequences_per_step=8, micro_batch=8, learning_rate=1.0, eval_every=1)
    found = training_memory.estimate(model, loop, 8, 48)
    assert 0.5 < found.activations / sum(kept.values()) < 2
