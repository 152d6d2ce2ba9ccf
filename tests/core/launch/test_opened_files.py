"""No command opens a small file of a run twice, but where a lock or a start comes between."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results import table
from src.experiments.grid import set_path
from src.experiments.identity import exp_id
from src.runs.run_dir import RunDir
from tests import toy

SMALL = re.compile(r"[0-9a-f]{32}/(lease|[a-z_]+\.jsonl?)|[0-9]{8}-[^/]+/(submission|jobs)\.json")
GROUP = [set_path(toy.BASE, "seed", seed, must_exist=True) for seed in range(5)]
STATES = ("done", "failed", "stopped", "running")
CHILDREN = [set_path(toy.CROSSATTN, "model.num_layers", layers, must_exist=True) for layers in (1, 2)]
GROUPS = {"base": GROUP, "children": CHILDREN}


def count_opens(action: Callable[[], Any], folder: Path) -> Counter[str]:
    """How often `action`, in a process of its own, opens each small file below `folder` to read."""
    counts_file = folder / "opened.json"
    if (child := os.fork()) == 0:
        counts: Counter[str] = Counter()

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str | os.PathLike):
                path = Path(arguments[0])
                name = f"{path.parent.name}/{path.name}"
                reads = not arguments[2] & (os.O_WRONLY | os.O_RDWR)
                if reads and SMALL.fullmatch(name) and path.is_relative_to(folder) and path.exists():
                    counts[name] += 1

        sys.addaudithook(count)
        code = 1
        try:
            code = action()
        finally:
            counts_file.write_text(json.dumps(counts))
            os._exit(code)
    _, exit_status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(exit_status) == 0
    return Counter(json.loads(counts_file.read_text()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with data, and runs in four states and a parent."""
    toy.write_data(tmp_path / "data")
    for exp, state in zip(GROUP, STATES, strict=False):
        with RunDir.open(tmp_path / "runs", exp, exp, facts={"groups": ["base"]}) as run:
            run.scores.append({"step": 1, "val_loss": 1.0, "train_loss": 1.0})
            run.set_status(state, step=1)
    (tmp_path / "runs" / exp_id(GROUP[0]) / "config.json").unlink()
    return tmp_path


def repeated_opens(counts: Counter[str]) -> dict[str, int]:
    assert counts
    return {name: number for name, number in counts.items() if number > 1}


def test_a_table_opens_each_file_once(folder: Path):
    assert repeated_opens(count_opens(lambda: table.main([str(folder / "runs"), "--json"]), folder)) == {}


@pytest.mark.parametrize("group", ["base", "children"])
@pytest.mark.parametrize("words", [["--job_option", "status"], ["--dry-run"], ["--dry-run", "--where", "state != 'x'"]])
def test_a_look_opens_each_file_once(folder: Path, words: list[str], group: str):
    words = ["-e", group, *words, *(["--with-parents"] if group == "children" else [])]
    assert repeated_opens(count_opens(lambda: toy.main(words, GROUPS, folder) and 0, folder)) == {}


@pytest.mark.slow
def test_a_submission_opens_each_file_once_before_the_lock_and_once_under_it(folder: Path):
    (folder / "runs" / exp_id(GROUP[3]) / "status.json").unlink()  # and one job is submitted, which ends at once
    words = ["-e", "base[0]", "base[1]", "base[2]", "base[3]", "-j", "local", "--job_option", "retry"]
    counts = count_opens(lambda: toy.main(words, GROUPS, folder) and 0, folder)
    assert {name: 2 for name in repeated_opens(counts) if name.endswith("status.json")} == repeated_opens(counts)


def test_a_start_opens_each_file_once_before_the_lock_and_once_under_it(folder: Path):
    for place in (0, 4):
        counts = repeated_opens(
            count_opens(lambda place=place: toy.main(["-e", f"base[{place}]"], GROUPS, folder), folder)
        )
        # The lease is confirmed, and the status changed, each time that something is written.
        assert not place or {name.partition("/")[2] for name in counts} <= {"lease", "status.json", "scores.jsonl"}
        assert place or set(counts.values()) <= {2}
