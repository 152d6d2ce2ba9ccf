"""The first experiment of the README and of docs/tutorial.md, carried out as it stands there.

Other than there: a toy tokenizer stands for that of Python's own source, and a training has a few steps.
"""

import json
import re
import runpy
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from src.experiments.grid import grid
from tests import toy
from tests.test_readme import commands

LEFT_OUT = ("make demo", "make test", "source .venv", "python -c", "for path in", "python -m data_prep.stdlib_qa")
"""Commands that set up what the test has, or that have tests of their own."""


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md"])
def test_the_first_experiment(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    text = (toy.ROOT / name).read_text()
    (block,) = re.findall(r"```python\n(MINE = .*?)```", text, re.DOTALL)
    block, found = re.subn(r'"steps": \d+(.*"eval_every": )\d+', r'"steps": 4\g<1>2', block.replace("stdlib_tokenizer", "toy_tokenizer"))
    assert found == 1
    written = {"EXP_GROUPS": {}, "grid": grid}
    exec(block, written)
    toy.write_data(tmp_path / "results" / "data")
    (tmp_path / "my.jsonl").write_text("".join(json.dumps({"text": f"the thing{i % 16} is red . " * 8}) + "\n" for i in range(60)))
    monkeypatch.chdir(tmp_path)
    done = []
    for line in commands(name):
        if line.startswith(LEFT_OUT):
            continue
        words = shlex.split(line.replace("stdlib_tokenizer", "toy_tokenizer"))[1:]
        if words[0] == "trainval.py":
            code = toy.main(words[1:], written["EXP_GROUPS"], tmp_path / "results")
        else:
            code = import_module(words[1]).main(words[2:])
        shown = capsys.readouterr()
        assert code == 0, f"{line}: {shown.err}"
        done.append((line, shown.out))
    assert len(done) >= 5
    ends = [
        [json.loads(row)["step"] for row in path.read_text().splitlines()]
        for path in (tmp_path / "results" / "runs").glob("*/scores.jsonl")
    ]
    assert len(ends) >= 4
    assert all(steps == [2, 4] for steps in ends)
    (table,) = [out for line, out in done if "results.table" in line]
    assert "learning_rate" in table
    (plot,) = [out for line, out in done if "results.plot" in line]
    assert (tmp_path / plot.strip()).stat().st_size > 1000


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
