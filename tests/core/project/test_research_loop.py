"""The research loop: killed and started again, it makes the same decisions and the same report."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.research_loop import loop
from src.experiments.grid import parse_assignments
from src.files import new_directory
from src.runs import plan
from tests import toy
from tests.core.recipes.test_bits_per_byte import byte_tokenizer

LOOP = toy.ROOT / "examples" / "research_loop" / "loop.py"


def test_every_proposal_is_a_valid_experiment():
    groups = plan.read_groups()
    for changes in [*loop.PROPOSALS, *loop.draw_proposals(30, 0)]:
        items = plan.load_combinations(groups, [loop.GROUP], parse_assignments(loop.assignments(changes, (0, 1))))
        assert len({item.exp_id for item in items}) == 2


def test_random_proposals_depend_only_on_the_seed():
    assert loop.draw_proposals(9, 1) == loop.draw_proposals(9, 1) != loop.draw_proposals(9, 2)


@pytest.mark.slow
def test_a_loop_killed_twice_ends_with_the_same_report(tmp_path: Path):
    write_data(tmp_path / "data")
    reports = []
    for name, kills in (("killed", 2), ("at_once", 0)):
        runs = tmp_path / name
        command = [sys.executable, str(LOOP), "-sb", str(runs), "-d", str(tmp_path / "data"), "--experiments", "2"]
        for kill in range(kills):
            process = subprocess.Popen(command, env=toy.environment(), stdout=subprocess.DEVNULL)
            until = time.monotonic() + toy.LONGEST
            while len(list(runs.glob("*/scores.jsonl"))) < 2 + 3 * kill:
                assert process.poll() is None
                assert time.monotonic() < until
            process.kill()
            process.wait()
        done = subprocess.run(command, env=toy.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        reports.append((runs / "report.md").read_text())
    assert reports[0] == reports[1]
    assert '"loop.learning_rate": 0.004' in reports[0]  # the planted improvement
    assert os.path.getsize(tmp_path / "killed" / "progress.png")


def write_data(data: Path) -> None:
    """A tokenizer and texts under the names of the embedded corpus."""
    byte_tokenizer(300).save_pretrained(data / "stdlib_tokenizer")
    (data / "stdlib_tokenizer" / "manifest.json").write_text(json.dumps({"files": {"tokenizer.json": {}}}))
    with new_directory(data / "stdlib_text") as folder:
        for split, numbers in (("train", range(1500)), ("val", range(1500, 2000))):
            rows = (
                {"text": f"# {number} is the number, {7 * number} is seven times the number\n"} for number in numbers
            )
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
