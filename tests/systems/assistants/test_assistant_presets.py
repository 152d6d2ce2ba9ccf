"""Every published setting of assistants passes its checks, and learns from rows of its data sets on a small model of
its family."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from data_prep.assistants import chat_tokenizer, prepare_conversations
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.interfaces import load_experiment
from src.systems.assistants.conversations.templates import OASST_TOKENS
from src.systems.assistants.presets import DEFAULT_MIX, GROUPS, REWARD_MIX, RLHF, reward
from tests import toy
from tests.core.training.whole.test_flagship import PROGRAMS
from tests.systems.assistants.conversations.talk import tokenizer, write_rows

NEOX, GPT, LLAMA = (
    {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
    },
    {"n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 2048},
    {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
    },
)
OPT = {"hidden_size": 8, "ffn_dim": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "word_embed_proj_dim": 8}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "facebook/galactica-125m": ("opt", OPT),
    **{
        f"EleutherAI/pythia-{size}-deduped": ("gpt_neox", NEOX) for size in ("70m", "1b", "1.4b", "2.8b", "6.9b", "12b")
    },
    "EleutherAI/gpt-neox-20b": ("gpt_neox", NEOX),
    "togethercomputer/GPT-JT-6B-v1": ("gptj", {**GPT, "rotary_dim": 2}),
    "Salesforce/codegen-2B-multi": ("codegen", {**GPT, "n_head": 4, "rotary_dim": 2}),
    **{f"cerebras/Cerebras-GPT-{size}": ("gpt2", GPT) for size in ("6.7B", "13B")},
    **{f"huggyllama/llama-{size}": ("llama", LLAMA) for size in ("7b", "13b", "30b", "65b")},
    "meta-llama/Llama-2-13b-hf": ("llama", {**LLAMA, "max_position_embeddings": 4096}),
    "tiiuae/falcon-7b": ("falcon", {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}),
}
"""Family and sizes of stand-ins; positions are the originals'."""
QUESTION = {"role": "user", "content": "2 and 3"}
TALK = {"messages": [QUESTION, {"role": "assistant", "content": "23"}]}
RANKED_ROW = {"messages": [QUESTION], "replies": [{"content": "23", "rank": 0}, {"content": "32", "rank": 1}]}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("presets")
    plain = tokenizer(())
    for path, (family, sizes) in BASES.items():
        config = transformers.AutoConfig.for_model(
            family, vocab_size=len(plain), bos_token_id=0, eos_token_id=0, pad_token_id=1, **sizes
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / path)
        plain.save_pretrained(folder / path)
    chat_tokenizer.prepare(folder, "facebook/galactica-125m", "oasst", "galactica_oasst")
    for name in (*DEFAULT_MIX, *REWARD_MIX, "oasst_export"):
        if not (folder / name).exists():
            write_rows(
                folder / name, dict.fromkeys(("train", "val"), [RANKED_ROW if name in REWARD_MIX else TALK] * 20)
            )
    return Places(folder, folder)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_it_learns_on_a_small_base_of_its_family(group: str, places: Places):
    """Of the reference, sections of GPT-JT (B10), of adapters (B11) and of reward models (B31) ended before the first
    step, and reward models had no embeddings of new control tokens (B28)."""
    (exp,) = GROUPS[group]
    recipe: Any = load_experiment(exp, group)
    recipe.check(places)
    torch.manual_seed(0)
    model = recipe.model.build(places).float().train()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model.name_or_path)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [*recipe.model.new_tokens()]}, replace_extra_special_tokens=False
    )
    assert tokenizer.convert_tokens_to_ids([*OASST_TOKENS]) == list(range(len(tokenizer) - 5, len(tokenizer)))
    data = recipe.data.build(places, tokenizer, "train", 0)
    key = (0, 0)
    batch = data.collate([data.sample(*key)])
    loss = recipe.training_loss()(model, batch)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for name, p in model.named_parameters() if p.requires_grad and "pad" not in name)


def test_a_dry_run_checks_every_group(places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By the command, as a person would before it begins."""
    (tmp_path / "data").symlink_to(places.data)
    assert toy.main(["-e", *GROUPS, "--dry-run"], GROUPS, tmp_path) == 0
    assert f"{len(GROUPS)} experiments: 0 done, {len(GROUPS)} to run." in capsys.readouterr().out
    few = {name: group for name, group in GROUPS.items() if "pythia-12b" in str(group)}
    wrong = {name: [override(exp, {"loop.best_metric": "val_acuracy"}) for exp in group] for name, group in few.items()}
    assert toy.main(["-e", *wrong, "--dry-run"], wrong, tmp_path) == 1
    assert "val_acuracy" in capsys.readouterr().err


@pytest.mark.parametrize("name", RLHF)
def test_a_policy_learns_from_small_parents(name: str, places: Places, tmp_path: Path):
    """B18: a reward had to be told the tokenizer by a name that a later trlx changed; B19: prompts without answers
    could not be read."""
    (exp,) = RLHF[name]
    policy, judge = GROUPS["assistant_pythia-12b" if "pythia" in name else "assistant_llama-30b"][0], reward("1.4b")
    base = (
        override(exp["model"]["base"], {"base": policy["model"], "frozen_layers": 1})
        if "llama" in name
        else policy["model"]
    )
    (tmp_path / "data").mkdir()
    for path in places.data.iterdir():
        (tmp_path / "data" / path.name).symlink_to(path)
    (tmp_path / "data" / "oasst_export").unlink()
    write_rows(tmp_path / "data" / "oasst_export", {"train": [{"prompt": [QUESTION]}] * 8, "val": [TALK] * 20})
    small = {
        "model.base": base,
        "rewards": [{**exp["rewards"][0], "model": judge["model"]}],
        "data": {**exp["data"], "rollouts": 4, "passes": 1, "max_new_tokens": 2, "generation_batch": 2},
        "loop": {
            **exp["loop"],
            "steps": 1,
            "sequences_per_step": 4,
            "micro_batch": 2,
            "eval_every": 1,
            "precision": "float32",
        },
        "answers": {**exp["answers"], "max_new_tokens": 2},
    }
    assert toy.main(["-e", "x"], {"x": [override(exp, small)]}, tmp_path) == 0


SMALLER = shlex.split("--set loop.steps=2 loop.eval_every=2 loop.sequences_per_step=2 loop.micro_batch=1")


@pytest.mark.slow
def test_the_commands_that_open_assistants_readme_has(places: Places):
    """Those of our page, one after another, in a folder where the releases are prepared and the models are small."""
    (block,) = re.findall(
        r"## Coming from Open-Assistant\n.*?```bash\n# needs the hub\n(.*?)```",
        (toy.ROOT / "docs/assistants.md").read_text(),
        re.DOTALL,
    )
    lines = [re.split(" +#", line)[0] for line in block.splitlines()]
    rows, run = [{"instruction": f"Add 1 to {i}.", "input": "", "output": str(i + 1)} for i in range(20)], ""
    (places.runs / "alpaca.json").write_text(json.dumps(rows))
    arguments = ["--data_path", str(places.data), "--name", "alpaca", "--train", str(places.runs / "alpaca.json")]
    assert prepare_conversations.main(arguments) == 0
    for line in lines:
        program, *words = shlex.split(line)
        more = ["--data_path", str(places.data)]
        if "trainval.py" in words:
            more += ["-sb", str(places.runs / "runs"), *SMALLER]
        elif "src.serving.chat" in words:
            words[words.index("RUN")] = run
            more += ["-sb", str(places.runs / "runs")]
        elif "data_prep.assistants.check_dataset_counts" in words:
            more += ["--output_path", str(places.data / "counts.csv")]
        else:
            continue  # from the hub: tests/data_prep prepares each release from a file
        done = subprocess.run(
            [sys.executable, *PROGRAMS[program], *words, *more],
            cwd=toy.ROOT,
            env=toy.environment(),
            input="Hello\n",
            capture_output=True,
            text=True,
            timeout=toy.LONGEST,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        if "-e" in words and not run:
            (path,) = (places.runs / "runs").glob("*/status.json")
            run = str(path.parent)
    assert "webgpt" in (places.data / "counts.csv").read_text()
    assert len([*(places.runs / "runs").glob("*/status.json")]) == 5
