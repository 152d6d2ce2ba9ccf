"""Run the first experiment of docs/tutorial.md as written.

Other than there: a toy tokenizer stands for that of Python's own source, and a training has a few steps.
"""

import json
import re
import runpy
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from src.experiments.grid import grid
from tests import toy
from tests.core.project.test_readme import commands

RESULTS = {
    "model.num_layers model.stride": "loop.learning_rate seed",
    "model.stride > 1": "seed < 1",
    "crossattn_tiny": "mine",
}
"""What stands in the commands of docs/results.md, and in those that are carried out on the runs of the tutorial."""
LEFT_OUT = (
    "make demo",
    "make test",
    "source .venv",
    "python -c",
    "for path in",
    "python -m data_prep.crossattn.stdlib_qa",
)
"""Commands that set up what the test has, or that have tests of their own."""
Carry = Callable[[str], str]


@pytest.fixture
def carry_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Carry:
    """Run a command next to data, a text and the experiments of the tutorial; return its output."""
    (block,) = re.findall(r"```python\n(MINE = .*?)```", (toy.ROOT / "docs/tutorial.md").read_text(), re.DOTALL)
    block, num_replaced = re.subn(
        r'"steps": \d+(.*"eval_every": )\d+', r'"steps": 4\g<1>2', block.replace("stdlib_tokenizer", "toy_tokenizer")
    )
    assert num_replaced == 1
    namespace: dict[str, Any] = {"EXP_GROUPS": {}, "grid": grid}
    exec(block, namespace)
    toy.write_data(tmp_path / "results" / "data")
    (tmp_path / "my.jsonl").write_text(
        "".join(json.dumps({"text": f"the thing{i % 16} is red . " * 8}) + "\n" for i in range(60))
    )
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> str:
        _, *words = shlex.split(line.replace("stdlib_tokenizer", "toy_tokenizer"))
        if words[0] == "trainval.py":
            code = toy.main(words[1:], namespace["EXP_GROUPS"], tmp_path / "results")
        else:
            code = import_module(words[1]).main(words[2:])
        output_by_command = capsys.readouterr()
        assert code == 0, f"{line}: {output_by_command.err}"
        return output_by_command.out

    return run


def test_the_first_experiment(carry_out: Carry, tmp_path: Path):
    output_by_command = {
        line: carry_out(line) for line in commands("docs/tutorial.md") if not line.startswith(LEFT_OUT)
    }
    assert len(output_by_command) >= 5
    ends = [
        [row["step"] for row in map(json.loads, path.read_text().splitlines())]
        for path in tmp_path.rglob("scores.jsonl")
    ]
    assert len(ends) >= 4
    assert all(steps == [2, 4] for steps in ends)
    (table,) = [out for line, out in output_by_command.items() if "results.table" in line]
    assert "standard deviation" in table
    (plot,) = [out for line, out in output_by_command.items() if "results.plot" in line]
    assert (tmp_path / plot.strip()).stat().st_size > 1000


@pytest.mark.slow
def test_the_commands_of_the_page_of_results(carry_out: Carry, tmp_path: Path):
    """On the runs of the tutorial: all but the live page, and answers, which a language model does not give."""
    for line in commands("docs/tutorial.md"):
        if "data_prep.tokenize" in line or line == "python trainval.py -e mine":
            carry_out(line)
    ids = sorted(path.parent.name for path in tmp_path.rglob("scores.jsonl"))
    page_commands = [
        line
        for line in commands("docs/results.md")
        if "results." in line and not re.search("dashboard|answers|sweep", line)
    ]
    assert len(page_commands) >= 9
    for line in page_commands:
        for there, here in RESULTS.items():
            line = line.replace(there, here)
        carry_out(line.replace("ID1", ids[0]).replace("ID2", ids[1]).replace("ID", ids[0]))
    assert {"report.html", "mine.zip"} <= {path.name for path in tmp_path.iterdir()}


def test_the_text_of_the_tutorial_is_made_of_our_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The one command that no other test has: JSON lines from the files of src."""
    (script,) = re.findall(r'python -c "(.*?)" > my.jsonl', (toy.ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    monkeypatch.chdir(toy.ROOT)
    runpy.run_path(str(tmp_path / "script.py"))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) > 100
    assert all(list(row) == ["text"] for row in rows)
