"""Checkpoints are scored by lm-evaluation-harness as they come, by the plan in resources/. `.ci/lm_eval` installs the
harness."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.models.trained_model import from_checkpoint
from src.operations.checkpoint_jobs.__main__ import main
from src.operations.checkpoint_jobs.stages import EVALUATIONS
from src.runs import jsonl_records
from src.runs.checkpoints import checkpoints
from tests import toy
from tests.systems.assistants.train_assistants import SFT, WORDS, write_data
from tests.systems.metadata.test_metadata_lm import WITH_GAINS, write_metadata

ROOT = Path(__file__).parents[3]
LM_EVAL = Path(os.environ.get("LM_EVAL", ROOT / ".venv" / "lm_eval" / "bin" / "python"))
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
"""A task of the harness about rows of a text, choices and a label."""
SHORT = override(WITH_GAINS, {"gains": None, "loop.steps": 40, "loop.eval_every": 20})


@pytest.mark.slow
@pytest.mark.skipif(
    not LM_EVAL.exists(), reason="needs lm-evaluation-harness: .ci/lm_eval, or LM_EVAL names its Python"
)
def test_the_harness_scores_a_local_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_metadata(toy.write_data(tmp_path / "data"))
    assert toy.main(["-e", "short"], {"short": [SHORT]}, tmp_path) == 0
    rows = [
        {"text": f"the {thing} is", "choices": [f" {colour}", " cat"], "label": 0}
        for thing in toy.THINGS
        for colour in toy.COLOURS[:2]
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (result,) = score(tmp_path, monkeypatch, "checkpoint_jobs_lm_eval.yaml", "arc_easy", CHOICES, SHORT)
    run = tmp_path / "runs" / exp_id(SHORT)
    assert (result["step"], result["task"]) == (40, "colours")
    assert result["scores"]["colours/acc"] == pytest.approx(
        accuracy(run, Places(tmp_path / "data", tmp_path / "runs"), rows)
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not LM_EVAL.exists(), reason="needs lm-evaluation-harness: .ci/lm_eval, or LM_EVAL names its Python"
)
def test_the_harness_uses_the_chat_template_of_assistants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever learned by heart that "2?" is two answers so, and only where it is asked as it was trained."""
    write_data(tmp_path / "data")
    exp = override(
        SFT, {"model.hidden_size": 32, "loop.steps": 200, "loop.eval_every": 100, "loop.learning_rate": 1e-2}
    )
    assert toy.main(["-e", "learned"], {"learned": [exp]}, tmp_path) == 0
    rows = [{"question": f"{number}?", "answer": WORDS[number - 1]} for number in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    (result,) = score(tmp_path, monkeypatch, "checkpoint_jobs_lm_eval_chat.yaml", "gsm8k", task, exp)
    assert result["scores"]["colours/exact_match"] >= 0.75


def score(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plan_name: str,
    stands_for: str,
    task: dict[str, Any],
    exp: dict[str, Any],
) -> list[dict[str, Any]]:
    """What the harness told of the last checkpoint of a run, by a plan whose task `stands_for` is a local one about
    rows.jsonl."""
    (folder / "tasks").mkdir()
    facts = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
    }
    (folder / "tasks" / "colours.yaml").write_text(yaml.safe_dump({"task": "colours", **facts, **task}))
    plan = yaml.safe_load((ROOT / "resources" / plan_name).read_text())
    plan["checkpoints"] = {"last": True}
    plan["evaluate"]["tasks"] = {"colours": plan["evaluate"]["tasks"][stands_for]}
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    monkeypatch.setenv("LM_EVAL", str(LM_EVAL))
    monkeypatch.setenv("LM_EVAL_FLAGS", f"--include_path {folder / 'tasks'} --device cpu")
    monkeypatch.setenv("EXPORT_FLAGS", f"--data_path {folder / 'data'}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    assert main([str(folder / "runs"), "--plan", str(folder / "plan.yaml"), "--once"]) == 0
    return [*jsonl_records.rows(folder / "runs" / exp_id(exp) / EVALUATIONS)]


def accuracy(run: Path, places: Places, rows: list[dict]) -> float:
    """The share of rows whose first choice is likelier than the second, by the checkpoint's own model."""
    from src.data.text import tokenizers

    checkpoint = checkpoints.newest_complete(run)
    assert checkpoint
    model = from_checkpoint(checkpoint, "here", places).eval()
    tokenizer = tokenizers.load(checkpoint / "tokenizer")
    right = 0
    for row in rows:
        likelihoods = []
        for choice in row["choices"]:
            prompt_ids, whole = tokenizer(row["text"])["input_ids"], tokenizer(row["text"] + choice)["input_ids"]
            with torch.no_grad():
                logs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            likelihoods.append(
                sum(float(logs[place - 1, whole[place]]) for place in range(len(prompt_ids), len(whole)))
            )
        right += likelihoods[0] > likelihoods[1]
    return right / len(rows)
