"""The ancestry of runs as text: five formats of the same graph."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from results import lineage
from src.experiments.identity import exp_id
from src.files import new_directory, write_json
from src.runs.checkpoints import checkpoints
from src.runs.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]


def child_of(*parents: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    bases = [{"name": "experiment", "exp_id": exp_id(parent), "checkpoint": "last"} for parent in parents]
    return {"recipe": "lm", "seed": seed, "model": {"name": "wrapper", "bases": bases}}


OLD = {"recipe": "pretrain", "seed": 0}
MIDDLE = child_of(OLD)
YOUNG = child_of(MIDDLE, OLD)
ORPHAN = child_of({"recipe": "lm", "seed": 99})
old, middle, young, orphan = (exp_id(exp)[:8] for exp in (OLD, MIDDLE, YOUNG, ORPHAN))
missing_id = exp_id({"recipe": "lm", "seed": 99})[:8]


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """Three generations, a child of a parent that is not there, and a directory that is damaged."""
    for exp, group, state in (
        (OLD, 'a "b"', "done"),
        (MIDDLE, "mid", "done"),
        (YOUNG, "mid", "failed"),
        (ORPHAN, "apart", "new"),
    ):
        with RunDir.open(tmp_path, exp, exp, facts={"groups": [group]}) as run:
            with new_directory(checkpoints.folder(run.path, 2)) as folder:
                write_json(folder / "model.json", {})
            run.scores.append({"step": 2, "val_loss": 0.25, "em": 1.0})
            run.set_status("failed" if state == "new" else state, step=2)  # type: ignore[arg-type]
    damaged_run = tmp_path / ("0" * 32)
    damaged_run.mkdir()
    (damaged_run / "exp_dict.json").write_text("{")
    return tmp_path


def print_lineage(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert lineage.main([str(a) for a in arguments]) == 0
    return capsys.readouterr().out


def test_a_row_for_each_experiment_after_its_parents(family: Path, capsys: pytest.CaptureFixture[str]):
    assert lineage.main([str(family)]) == 0
    captured = capsys.readouterr()
    head, *lines = [re.split(r" {2,}", line) for line in captured.out.splitlines()]
    assert head == ["experiment", "group", "recipe", "state", "step", "score", "parents"]
    rows = {line[0]: line[1:] for line in lines}
    assert rows[young] == ["mid", "lm", "failed", "2", "val_loss 0.25", f"{middle} last (done), {old} last (done)"]
    assert rows[missing_id] == ["-", "-", "missing", "-", "-", "-"]
    assert rows[orphan][-1] == f"{missing_id} last (missing)"
    names = list(rows)
    assert names.index(old) < names.index(middle) < names.index(young)
    skipped, problem = captured.err.splitlines()
    assert "0" * 32 in skipped
    assert problem.startswith(f"{exp_id(ORPHAN)}: it starts from experiment ")


def test_a_tree(family: Path, capsys: pytest.CaptureFixture[str]):
    lines = print_lineage(capsys, family, "-e", "mid", "--format", "tree").splitlines()
    top = f'{old}  a "b"  pretrain done  val_loss 0.25'
    one, other = f"{middle}  mid  lm done  val_loss 0.25 from last", f"{young}  mid  lm failed  val_loss 0.25 from last"
    first_child = [top, f"├─ {one}", f"│  └─ {other}", f"└─ {other}"]
    second_child = [top, f"├─ {other}", f"└─ {one}", f"   └─ {other}"]
    assert lines in (first_child, second_child)


def test_the_families_of_several_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed, group in enumerate("abc"):
        exp = {"recipe": "toy", "seed": seed}
        with RunDir.open(tmp_path, exp, exp, facts={"groups": [group]}) as run:
            run.set_status("done")
    assert {line.split()[1] for line in print_lineage(capsys, tmp_path, "-e", "a", "c").splitlines()[1:]} == {"a", "c"}


def test_a_tree_of_diamonds_writes_no_branch_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each generation has two, both children of both before: 2^20 paths, 40 experiments."""
    before: list[dict[str, Any]] = []
    for _ in range(20):
        before = [child_of(*before, seed=seed) for seed in range(2)]
        for exp in before:
            with RunDir.open(tmp_path, exp, exp):
                pass
    lines = print_lineage(capsys, tmp_path, "--format", "tree").splitlines()
    assert 40 < len(lines) < 100
    assert any(line.endswith("(its children: above)") for line in lines)


def test_a_graph_for_graphviz(family: Path, capsys: pytest.CaptureFixture[str]):
    text = print_lineage(capsys, family, "--format", "dot")
    assert f'"{exp_id(OLD)}" -> "{exp_id(MIDDLE)}" [label="last"];' in text
    assert r"a \"b\"" in text
    assert text.count("->") == 4
    if shutil.which("dot"):
        done = subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, text=True, check=True)
        assert done.stdout.count('class="edge"') == 4


def test_a_graph_for_markdown(family: Path, capsys: pytest.CaptureFixture[str]):
    lines = print_lineage(capsys, family, "--format", "mermaid").splitlines()
    assert lines[0] == "flowchart LR"
    assert f'  e{exp_id(OLD)} -- "last" --> e{exp_id(MIDDLE)}' in lines
    assert f'  e{exp_id(OLD)}["{old}<br/>a #quot;b#quot;<br/>pretrain done<br/>val_loss 0.25"]' in lines
    shapes = (r'  e\w{32}\["[^"]*"\]', r"  style e\w{32} fill:#\w{6}", r'  e\w{32} -- "\w+" --> e\w{32}')
    assert all(any(re.fullmatch(shape, line) for shape in shapes) for line in lines[1:])


def test_json_holds_everything(family: Path, capsys: pytest.CaptureFixture[str]):
    value = json.loads(print_lineage(capsys, family, "--json", "--exp_id", middle))
    assert {node["exp_id"] for node in value["nodes"]} == {exp_id(OLD), exp_id(MIDDLE), exp_id(YOUNG)}
    assert {"child": exp_id(MIDDLE), "parent": exp_id(OLD), "checkpoint": "last"} in value["edges"]
    assert next(node for node in value["nodes"] if node["exp_id"] == exp_id(YOUNG))["scores"] == {
        "val_loss": 0.25,
        "em": 1.0,
    }
    assert value["problems"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder of runs"),
        (["{runs}", "-e", "mdi"], "unknown group 'mdi'. Did you mean 'mid'?"),
        (["{runs}", "--exp_id", "zz"], "--exp_id zz: "),
    ],
)
def test_mistakes_are_one_line(family: Path, arguments: list[str], message: str):
    command = [sys.executable, "-m", "results.lineage", *(a.format(runs=family) for a in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_chain_is_in_order_and_each_child_is_indented_further(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    chain = [OLD]
    for _ in range(7):
        chain.append(child_of(chain[-1]))
    for exp in chain:
        with RunDir.open(tmp_path, exp, exp):
            pass
    names = [exp_id(exp)[:8] for exp in chain]
    assert names != sorted(names)
    assert [line[:8] for line in print_lineage(capsys, tmp_path).splitlines()[1:]] == names
    lines = print_lineage(capsys, tmp_path, "--format", "tree").splitlines()
    assert [line.partition("  lm")[0].partition("  pretrain")[0] for line in lines] == [
        f"{'   ' * (depth - 1)}{'└─ ' if depth else ''}{name}" for depth, name in enumerate(names)
    ]
