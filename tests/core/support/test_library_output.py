"""Commands print only their own lines: no progress bars in a log, no remarks of libraries."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from src.experiments.identity import exp_id
from tests import toy
from tests.core.serving import pretrained_folders
from tests.systems.assistants.conversations.talk import row, write_rows

VARIABLES = ("TRANSFORMERS_VERBOSITY", "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")
FOREIGN = re.compile(r"warning|\[transformers\]|%\||get_accelerator", re.IGNORECASE)
LORA = {
    "recipe": "sft",
    "seed": 0,
    "model": {
        "name": "lora",
        "rank": 2,
        "alpha": 4.0,
        "target_modules": ["q_proj"],
        "base": {"name": "hf", "path": "base"},
    },
    "data": {"name": "conversations", "corpus": "talks", "sequence_tokens": 64, "writing": {"template": "tokenizer"}},
    "loop": {"steps": 2, "sequences_per_step": 2, "micro_batch": 1, "learning_rate": 1e-3, "eval_every": 2},
}


def lines_of(folder: Path, *words: str) -> list[str]:
    """Run a command as a user does, with its output in a pipe; returns its lines of both streams."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment["PYTHONPATH"] = str(toy.ROOT)
    result = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [*result.stdout.splitlines(), *result.stderr.splitlines()]


@pytest.mark.slow
def test_training_and_serving_of_a_pretrained_model_print_only_their_own_lines(tmp_path: Path):
    data = tmp_path / "data"
    pretrained_folders.save(data / "base")
    talks = [row(f"{number} plus 1?", f"{number + 1}.") for number in range(8)]
    write_rows(data / "talks", {"train": talks, "val": talks[:2]})
    root = toy.project(tmp_path, f"EXP_GROUPS = {{'lora': [{LORA!r}]}}\n")
    run, places = str(tmp_path / "runs" / exp_id(LORA)), ["--data_path", str(data), "-sb", str(tmp_path / "runs")]
    greedy = ["--temperature", "0", "--max_new_tokens", "8"]
    (tmp_path / "context.txt").write_text("The cat is red.")
    training = ["trainval.py", "-e", "lora", *places]
    commands = [
        [*training, "--dry-run"],
        training,
        ["-m", "results.table", str(tmp_path / "runs")],
        ["-m", "src.serving.chat", run, "hello", *greedy, *places],
        ["-m", "src.systems.crossattn.ask", run, "--context", str(tmp_path / "context.txt"), "Which?", *places],
        ["-m", "src.models.export", run, "exported", *places],
    ]
    for words in commands:
        lines = lines_of(root, *words)
        assert lines
        assert not [line for line in lines if FOREIGN.search(line)]
