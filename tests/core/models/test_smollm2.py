"""The real pretrained model of `make smollm2`: answers, losses, templates, caches, adapters, exports and commands."""

import json
import math
import pydoc_data.topics
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.assistants import prepare_conversations
from src.data.text.tokenizers import SafeTokenizer
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.registry import MODELS, bind
from src.files import new_directory
from src.models.export import export
from src.models.load import load as load_run
from src.serving.pretrained import load_writer
from src.systems.crossattn.data.templates import Prompter
from tests import toy
from tests.core.operations import test_lm_eval

ROOT = Path(__file__).resolve().parents[3]
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL = ROOT / "results" / "data" / NAME
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not MODEL.exists(), reason="needs the model of `make smollm2`")]
BASE = {"name": "hf", "path": NAME}
QUESTIONS = [
    "What is the capital of France?",
    "Name a color of the sky.",
    "Write one sentence about cats.",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
]
LORA: dict[str, Any] = {
    "recipe": "sft",
    "seed": 0,
    "model": {"name": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"], "base": BASE},
    "data": {
        "name": "conversations",
        "corpus": "talks",
        "sequence_tokens": 96,
        "writing": {"template": "tokenizer"},
    },
    "loop": {
        "steps": 4,
        "sequences_per_step": 2,
        "micro_batch": 1,
        "learning_rate": 1e-3,
        "eval_every": 2,
    },
}
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and conversations in data/."""
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "data").mkdir()
    (folder / "data" / "HuggingFaceTB").symlink_to(MODEL.parent)
    with new_directory(folder / "data" / "talks") as talks:
        for split in ("train", "val"):
            rows = [
                {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"Ahoy, {split}!"}]}
                for text in QUESTIONS
            ]
            (talks / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any]:
    """Model and tokenizer as transformers loads them."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(MODEL)


def places(folder: Path) -> Places:
    return Places(folder / "data", folder / "runs")


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """A greedy answer by transformers alone."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        generated = model.generate(**ids, **GREEDY)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(generated, skip_special_tokens=True).strip()


def test_greedy_answers_are_those_of_transformers(world: Path, plain: tuple[Any, Any]):
    talk: Any
    talk, _ = load_writer(Path(NAME), places(world))
    expected = [answer(*plain, question) for question in QUESTIONS]
    replies = []
    for question in QUESTIONS:
        talk.reset()
        replies.append(talk.answer(question, **GREEDY).strip())
    assert replies == expected
    assert "Paris" in expected[0]


def test_the_perplexity_of_real_text_is_that_of_transformers(world: Path, plain: tuple[Any, Any]):
    """20 kB of Python's documentation, as `lm` reads it."""
    text = "\n".join(pydoc_data.topics.topics.values())[:20_000]
    with new_directory(world / "data" / "topics") as folder:
        for split in ("train", "val"):
            (folder / f"{split}.jsonl").write_text(json.dumps({"text": text, "source": "topics"}) + "\n")
    exp = {
        "recipe": "lm",
        "seed": 0,
        "model": BASE,
        "data": {"name": "text", "corpus": "topics", "sequence_tokens": 256},
        "evaluation": {"micro_batch": 4},
    }
    assert toy.main(["-e", "text"], {"text": [exp]}, world) == 0
    model, tokenizer = plain
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    windows = ids[:, : ids.shape[1] // 256 * 256].view(-1, 256)
    assert len(windows) > 10
    with torch.no_grad():
        losses = [float(model(row[None], labels=row[None]).loss) for row in windows]
    (row,) = toy.evaluations(world, exp_id(exp))
    assert row["val_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert row["val_perplexity"] == pytest.approx(math.exp(row["val_loss"]), rel=1e-5)


def test_conversations_have_the_ids_of_its_chat_template(plain: tuple[Any, Any]):
    from src.systems.assistants.conversations import templates
    from src.systems.assistants.conversations.entries import Message
    from src.systems.assistants.conversations.rendering import Renderer

    _, tokenizer = plain
    turns = [("user", "2 + 3?"), ("assistant", "5, of course."), ("user", "\n\n12 <|im_end|>?"), ("assistant", "No.")]
    renderer = Renderer(tokenizer, templates.find("tokenizer", tokenizer))
    for start in ([], [("system", "Be brief.")]):
        for count, answering in ((1, True), (2, False), (4, False)):
            messages = [*start, *turns[:count]]
            rendered = renderer.render([Message(role, text) for role, text in messages], answering=answering)
            rows = [{"role": role, "content": text} for role, text in messages]
            expected = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=answering)
            assert tokenizer.decode(rendered.ids) == expected
            ends = sum(number == tokenizer.eos_token_id for number in rendered.ids)
            assert ends == len(messages) + (not start), "text of messages never becomes a control token"


@pytest.mark.parametrize("template", ["assistant", "instruct", "chat"])
def test_questions_have_every_template(plain: tuple[Any, Any], template: Any):
    _, tokenizer = plain
    prompter = Prompter(SafeTokenizer(tokenizer), template)
    text = tokenizer.decode(prompter.prompt("How old?", 64, "She is 12.\n\n12", 64))
    assert text.index("She is 12.\n\n12") < text.index("How old?")
    assert tokenizer.decode(prompter.answer("12", 8)) == f"{' ' if template == 'instruct' else ''}12<|im_end|>"


def test_cross_attention_with_caches_is_as_without(world: Path, plain: tuple[Any, Any]):
    _, tokenizer = plain
    config = bind(MODELS, {"name": "cross_attention", "num_layers": 3, "stride": 4, "base": BASE})
    torch.manual_seed(0)
    model = config.build(places(world)).eval()
    for block in model.blocks.values():  # new blocks add little; larger ones make a wrong cache visible
        for weight in block.parameters():
            weight.data.mul_(2.0)
    ids = tokenizer(["What color is it?", "Say:"], return_tensors="pt", padding=True, padding_side="left")
    context = tokenizer(["The house is red.", "It rains in Spain."], return_tensors="pt", padding=True)
    inputs = {
        "input_ids": ids["input_ids"],
        "attention_mask": ids["attention_mask"].bool(),
        "context_ids": context["input_ids"][:, None],
        "context_mask": context["attention_mask"].bool()[:, None],
    }
    outputs = [model.generate(**inputs, **GREEDY, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*outputs)
    other = model.generate(**{**inputs, "context_ids": inputs["context_ids"].flip(0)}, **GREEDY)
    assert not torch.equal(outputs[0], other)


def test_adapters_resume_after_a_kill_and_are_exported(world: Path):
    root = toy.project(world, f"EXP_GROUPS = {{'lora': [{LORA!r}]}}\n")
    run = world / "runs" / exp_id(LORA)
    toy.kill_midway(root, ["-e", "lora"], world, exp_id(LORA))
    done = toy.run(root, ["-e", "lora"], world)
    assert done.returncode == 0, done.stderr
    resumed_weights = weights(run)
    run.rename(world / "killed")
    assert toy.run(root, ["-e", "lora"], world).returncode == 0
    assert resumed_weights.keys() == weights(run).keys()
    assert all(torch.equal(value, resumed_weights[name]) for name, value in weights(run).items())

    export(run, world / "exported", places(world))
    ours, tokenizer = load_run(run, places(world))
    theirs = AutoModelForCausalLM.from_pretrained(world / "exported", dtype=torch.float32).eval()
    ids = tokenizer("What is the capital of France?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(input_ids=ids).logits, atol=1e-4, rtol=1e-4)
    for source in (run, world / "exported"):
        output = command("src.serving.chat", str(source), QUESTIONS[0], "--temperature", "0", "--max_new_tokens", "12")
        assert output.strip() == answer(theirs, tokenizer, QUESTIONS[0])


def test_questions_are_answered_as_a_process(world: Path, plain: tuple[Any, Any]):
    context, question = "The house of Ada is red. Bob's is blue.", "What color is the house of Ada?"
    (world / "context.txt").write_text(context)
    words = ["--context", str(world / "context.txt"), question, "--max_new_tokens", "12"]
    output = command("src.systems.crossattn.ask", str(MODEL), *words)
    assert output.strip() == answer(*plain, f"{context}\n\n{question}")


@pytest.mark.skipif(not test_lm_eval.LM_EVAL.exists(), reason="needs lm-evaluation-harness: .ci/lm_eval")
def test_the_harness_scores_a_checkpoint_as_it_scores_the_model(world: Path, monkeypatch: pytest.MonkeyPatch):
    """Adapters that were trained with a rate of almost zero change no score."""
    rows = [{"text": f"{a} and {b} is", "choices": [f" {a + b}", f" {a + b + 3}"]} for a in range(5) for b in range(10)]
    (world / "rows.jsonl").write_text("".join(json.dumps({**row, "label": 0}) + "\n" for row in rows))
    exp = {**LORA, "seed": 1, "loop": {**LORA["loop"], "steps": 1, "eval_every": 1, "learning_rate": 1e-12}}
    folder = world / "judged"
    folder.mkdir()
    (folder / "data").symlink_to(world / "data")
    (folder / "rows.jsonl").symlink_to(world / "rows.jsonl")
    assert toy.main(["-e", "judged"], {"judged": [exp]}, folder) == 0
    (result,) = test_lm_eval.score(
        folder, monkeypatch, "checkpoint_jobs_lm_eval.yaml", "arc_easy", test_lm_eval.CHOICES, exp
    )
    harness = [
        str(test_lm_eval.LM_EVAL),
        "-m",
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        f"pretrained={MODEL},dtype=float32",
    ]
    harness += ["--tasks", "colours", "--include_path", str(folder / "tasks"), "--device", "cpu", "--batch_size", "16"]
    subprocess.run([*harness, "--output_path", str(folder / "alone")], check=True, env=toy.environment())
    (file,) = (folder / "alone").rglob("results_*.json")
    alone = json.loads(file.read_text())["results"]["colours"]["acc,none"]
    assert result["scores"]["colours/acc"] == alone
    assert 0 < alone < 1


def test_the_page_about_it_holds(world: Path, monkeypatch: pytest.MonkeyPatch):
    """Its conversations and its experiments, as written, but for two steps. All weights are only checked."""
    script, *blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pretrained_model.md").read_text(), re.DOTALL)
    monkeypatch.chdir(world)
    exec(script, {})
    words = ["--form", "messages", "--train", "talks.jsonl", "--name", "own_talks", "--data_path", str(world / "data")]
    assert prepare_conversations.main(words) == 0
    groups: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace('"talks",', '"own_talks",'), {"EXP_GROUPS": groups, "override": override})
    (exp,) = groups["talks"]
    exp["loop"] |= {"steps": 2, "eval_every": 2}
    assert toy.main(["-e", "talks", "talks_whole", "--dry-run"], groups, world) == 0
    assert toy.main(["-e", "talks"], groups, world) == 0
    assert toy.evaluations(world, exp_id(exp))[-1]["step"] == 2


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")


def command(module: str, *words: str) -> str:
    """The output of a command of this project."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=toy.environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
