"""Commands print only their own lines: no progress bars in a log, no remarks of libraries."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from src.experiments.identity import exp_id
from tests import toy
from tests.core.serving import pretrained_folders
from tests.systems.assistants.conversations.talk import row, write_rows

FOREIGN = re.compile(r"it/s|\d%\||\[[A-Z]+\]|Warning|\[transformers\]")
"""Progress bars, loggers of libraries and warnings."""
VARIABLES = ("TRANSFORMERS_VERBOSITY", "TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS")
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


def user_environment() -> dict[str, str]:
    """Without the variables that the tests, or this project in this process, have set."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES} | {"PYTHONPATH": str(toy.ROOT)}


def lines_of(folder: Path, *words: str) -> list[str]:
    """Run a command as a user does, with its output in a pipe; returns its lines of both streams."""
    result = subprocess.run(
        [sys.executable, *words], cwd=folder, env=user_environment(), capture_output=True, text=True, check=False
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
    lines = [lines_of(root, *words) for words in commands]
    foreign_lines = [line for line in itertools.chain(*lines) if FOREIGN.search(line)]
    assert not foreign_lines
    # a line of the plan and a total; the run, its start, a step and its end; an answer and that it was truncated, twice
    assert [len(group) for group in (*lines[:2], *lines[3:])] == [2, 4, 2, 2, 1]
    assert lines[1][-1].endswith(f"done: {run}")


def test_progress_bars_are_drawn_only_in_a_terminal(tmp_path: Path):
    """Libraries draw with tqdm, and so does this; a training draws its own bar."""
    code = "import src; from tqdm.auto import tqdm; list(tqdm(range(3), desc='bar'))"
    assert lines_of(tmp_path, "-c", code) == []
    screen, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    environment = {**user_environment(), "TERM": "dumb"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=terminal, check=True)
    os.close(terminal)
    assert b"bar: 100%" in os.read(screen, 1 << 16)
    os.close(screen)


def test_only_one_message_of_deepspeed_is_left_out(tmp_path: Path):
    code = (
        "import logging, src; logger = logging.getLogger('DeepSpeed'); logging.basicConfig(format='%(message)s');"
        "logger.warning('Setting accelerator to CPU. If you have GPU'); logger.warning('the loss scale is 0')"
    )
    assert lines_of(tmp_path, "-c", code) == ["the loss scale is 0"]


def test_only_the_warning_of_haven_is_left_out(tmp_path: Path):
    """The client, whose import warns in the same words, is that of the tests of the toolkit."""
    fake = toy.ROOT / "tests" / "core" / "launch" / "fakes" / "fake_client" / "eai_toolkit_client"
    shutil.copytree(fake, client := tmp_path / "eai_toolkit_client")
    with open(client / "__init__.py", "a") as file:
        file.write("\nimport warnings; warnings.warn('pkg_resources is deprecated as an API')\n")
    code = "import sys; sys.path.insert(0, '.'); from src.launch.toolkit import client; client.find_packages()"
    lines = lines_of(tmp_path, "-c", code)
    (warning,) = [line for line in lines if "Warning" in line]
    assert str(client) in warning
