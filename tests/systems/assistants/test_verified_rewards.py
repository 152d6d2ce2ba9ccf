"""From rows as they are published to a policy that learns from verified rewards, by the experiment of
docs/policies.md."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from data_prep.assistants import prepare_conversations
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.experiments.registry import REWARDS, bind
from tests import toy
from tests.conftest import ROOT
from tests.systems.assistants.conversations import talk
from tests.systems.assistants.rewards.rollouts import needs_bubblewrap, rollout, setting
from tests.systems.assistants.train_assistants import SFT as NUMBERS

pytest.importorskip("math_verify")
GSM8K = [{"question": f"{n} owls sit. How many eyes?", "answer": f"2\n#### {n % 2 + 6}"} for n in range(40)]
"""In the layout of GSM8K; a small model learns to guess between two answers."""
SFT = override(
    NUMBERS,
    {
        "data": {"name": "conversations", "corpus": "gsm8k", "sequence_tokens": 64},
        "loop.steps": 200,
        "loop.eval_every": 100,
        "loop.learning_rate": 1e-2,
        "answers.max_new_tokens": 12,
    },
)


def read_experiment() -> dict[str, Any]:
    """The experiment of docs/policies.md, smaller."""
    page = (ROOT / "docs" / "policies.md").read_text()
    names: dict[str, Any] = {"ref": ref, "override": override, "SFT": SFT, "EXP_GROUPS": {}}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]:
        exec(code, names)
    exp = names["GSM8K"]
    small = {
        "data.rollouts": 32,
        "data.max_new_tokens": 16,
        "data.prompts.sequence_tokens": 64,
        "loop.steps": 8,
        "loop.eval_every": 4,
    }
    small |= {"loop.sequences_per_step": 8, "sampled.questions": 4, "sampled.max_new_tokens": 16}
    return override(exp, small)


def prepare(folder: Path, rows: Sequence[dict[str, Any]] = GSM8K) -> None:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        prepare_conversations.main(["--name", "gsm8k", "--train", str(source), "--data_path", str(folder / "data")])
        == 0
    )
    talk.tokenizer().save_pretrained(folder / "data" / "talk_tokenizer")


@pytest.mark.slow
def test_grpo_learns_from_reward_math_on_prepared_rows(tmp_path: Path):
    prepare(tmp_path)
    exp = read_experiment()
    assert [reward["name"] for reward in exp["rewards"]] == ["math", "length"]
    assert exp["data"]["prompts"]["corpus"] == "gsm8k"
    by_hand = tmp_path / "data" / "by_hand"  # prompts without answers, and no manifest
    by_hand.mkdir()
    rows = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in GSM8K]
    (by_hand / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (by_hand / "val.jsonl").write_bytes((tmp_path / "data" / "gsm8k" / "val.jsonl").read_bytes())
    other = override(exp, {"data.prompts.corpus": "by_hand"})
    assert toy.main(["-e", "all"], {"all": [SFT, exp, other]}, tmp_path) == 0
    for each in (exp, other):
        rows = toy.rows(tmp_path, exp_id(each))
        assert all(0 < row["reward/math"] < 1 for row in rows)
        lines = (tmp_path / "runs" / exp_id(each) / "rollouts.jsonl").read_text().splitlines()
        assert {json.loads(line)["reward/math"] for line in lines} == {0, 1}


def test_grpo_learns_from_reward_math_on_rows_of_gsm8k(shared_data: Path, tmp_path: Path):
    """Short rows with one of two answers, which a small model learns to guess."""
    lines = (shared_data / "instruct" / "gsm8k" / "train.jsonl").read_text().splitlines()
    rows = [
        row
        for row in map(json.loads, lines)
        if len(row["question"]) < 140 and row["answer"].endswith(("\n#### 6", "\n#### 10"))
    ]
    prepare(tmp_path, rows)
    guesses = tmp_path / "data" / "guesses"
    guesses.mkdir()
    for split in ("train", "val"):
        prepared_rows = [
            json.loads(line) for line in (tmp_path / "data" / "gsm8k" / f"{split}.jsonl").read_text().splitlines()
        ]
        answers = ["#### " + row["answer"].rpartition("#### ")[2] for row in prepared_rows]
        guess_rows = [
            {"messages": [row["messages"][0], {"role": "assistant", "content": a}]}
            for row, a in zip(prepared_rows, answers, strict=True)
        ]
        (guesses / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in guess_rows))
    sft = override(
        SFT, {"data.corpus": "guesses", "data.sequence_tokens": 192, "model.max_positions": 224, "loop.steps": 80}
    )
    exp = override(read_experiment(), {"model": ref(sft), "data.prompts.sequence_tokens": 160, "loop.steps": 4})
    assert toy.main(["-e", "all"], {"all": [sft, exp]}, tmp_path) == 0
    lines = (tmp_path / "runs" / exp_id(exp) / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["reward/math"] for line in lines} == {0, 1}
    assert 0 < toy.rows(tmp_path, exp_id(exp))[-1]["solved_mean@4"] < 1


@pytest.mark.parametrize(
    "reward", [{"name": "math"}, {"name": "python", "by": "value"}, {"name": "python", "by": "tests"}]
)
def test_rows_without_the_column_are_refused_before_training(
    reward: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    prepare(tmp_path)
    (tmp_path / "data" / "gsm8k" / "manifest.json").unlink()
    path = tmp_path / "data" / "gsm8k" / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    key = "tests" if reward.get("by") == "tests" else "answer"
    path.write_text("".join(json.dumps({name: row[name] for name in row if name != key}) + "\n" for row in rows))
    exp = override(read_experiment(), {"rewards": [reward]})
    assert toy.main(["-e", "all", "--dry-run"], {"all": [SFT, exp]}, tmp_path) == 1
    assert f"gsm8k/train.jsonl:1: a reward reads '{key}'" in capsys.readouterr().err


@needs_bubblewrap
def test_reward_python_accepts_the_programs_of_mbpp(shared_data: Path, tmp_path: Path):
    source = shared_data / "instruct" / "mbpp" / "mbpp.train.jsonl"
    assert prepare_conversations.main(["--name", "mbpp", "--train", str(source), "--data_path", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "mbpp" / "val.jsonl").read_text().split("\n")[:8]]
    score = bind(REWARDS, {"name": "python", "by": "tests"}).scorer(setting())
    right = [rollout(row["messages"][-1]["content"], **row) for row in rows]
    wrong = [rollout(rows[number - 1]["messages"][-1]["content"], **row) for number, row in enumerate(rows)]
    assert sum(score(right)) >= 6
    assert score(wrong) == [0] * 8
