"""Tasks of lm-evaluation-harness as scores of a training. `.ci/lm_eval` installs the harness."""

import json
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml

from src.errors import ConfigError
from src.evaluation import harness
from src.experiments.config import Places, load
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.interfaces import load_experiment
from src.runs.checkpoints import checkpoints
from tests import toy
from tests.core.operations.test_lm_eval import CHOICES, LM_EVAL, accuracy

needs_harness = pytest.mark.skipif(
    not LM_EVAL.exists(), reason="needs lm-evaluation-harness: .ci/lm_eval, or LM_EVAL names its Python"
)
EXP = override(
    toy.BASE, {"loop.micro_batch": 4, "harness": {"tasks": ["colours"], "limit": 20, "task_folder": "tasks"}}
)
ROWS = [
    {"text": f"the {thing} is", "choices": [f" {colour}", f" {other}"], "label": 0}
    for thing in toy.THINGS
    for colour, other in (("red", "blue"), ("green", "pink"))
]
for wrong_row in ROWS[20:]:
    wrong_row["choices"] = [" thing0", " red"]  # after the limit: never right


def write_world(folder: Path) -> Path:
    """Toy data, and a task about 32 rows."""
    toy.write_data(folder / "data")
    (folder / "data" / "tasks").mkdir()
    rows = folder / "data" / "tasks" / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {"task": "colours", "dataset_path": "json", "test_split": "test", **CHOICES}
    task["dataset_kwargs"] = {"data_files": {"test": str(rows)}}
    (folder / "data" / "tasks" / "colours.yaml").write_text(yaml.safe_dump(task))
    generated = {
        **task,
        "task": "generated",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 2},
        "metric_list": [{"metric": "exact_match"}],
    }
    del generated["doc_to_choice"]
    (folder / "data" / "tasks" / "generated.yaml").write_text(yaml.safe_dump(generated))
    return folder


def run(folder: Path, exp: dict[str, Any], *words: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """trainval.py with the Python of the harness."""
    number = len([*folder.glob("root-*")])
    (folder / f"root-{number}").mkdir()
    root = toy.project(folder / f"root-{number}", f"EXP_GROUPS = {{'x': [{exp!r}]}}\n")
    command = toy.command(root, ["-e", "x", *words], folder, processes)
    variables = {**toy.environment(), "HF_HOME": str(folder / "hub")}
    return subprocess.run(
        [str(LM_EVAL), *command[1:]], capture_output=True, text=True, env=variables, cwd=root, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("harness"))


@pytest.mark.slow
@needs_harness
def test_tasks_are_scores_that_do_not_depend_on_the_processes(folder: Path, tmp_path: Path):
    done = run(folder, EXP)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = toy.evaluations(folder, exp_id(EXP))
    scores = [row["harness/colours/acc"] for row in rows]
    assert [row["step"] for row in rows] == [4, 8, 12]
    places = Places(folder / "data", folder / "runs")
    assert scores[-1] == pytest.approx(accuracy(folder / "runs" / exp_id(EXP), places, ROWS[:20]))
    assert any(0 < score < 1 for score in scores)
    for options in ([], ["--fsdp"]):
        world = write_world(tmp_path / "-".join(["world", *options]))
        done = run(world, EXP, *options, processes=2)
        assert done.returncode == 0, done.stderr[-3000:]
        others = toy.evaluations(world, exp_id(EXP))
        assert [row["harness/colours/acc"] for row in others] == scores
        assert [row["val_loss"] for row in others] == pytest.approx([row["val_loss"] for row in rows])


PRECISION = """
import torch, sys
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from src.evaluation.harness import _adapter
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=1)).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for enabled in (True, False):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        print(_adapter(model, tokenizer, 2)._model_call(torch.ones(1, 4, dtype=torch.long)).dtype)
"""


@pytest.mark.slow
@needs_harness
def test_tasks_are_scored_in_the_precision_of_the_evaluation(folder: Path):
    command = [str(LM_EVAL), "-c", PRECISION, str(folder / "data" / "toy_tokenizer")]
    done = subprocess.run(command, capture_output=True, text=True, env=toy.environment(), cwd=toy.ROOT, check=False)
    assert done.stdout.split() == ["torch.bfloat16", "torch.float32"], done.stderr[-3000:]


@pytest.mark.slow
@needs_harness
def test_evaluating_tasks_changes_no_training_and_resumes(folder: Path):
    """Answers that are generated, at the end only, after a restart from a checkpoint."""
    exp = override(EXP, {"harness.tasks": ["generated", "colours"], "harness.at": "end", "harness.num_fewshot": 2})
    done = run(folder, exp, "--stop_after", "0.001")
    assert done.returncode == 75, done.stderr[-3000:]
    done = run(folder, exp)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = toy.evaluations(folder, exp_id(exp))
    assert [row["step"] for row in rows if "harness/generated/exact_match" in row] == [12]
    assert {"harness/generated/exact_match", "harness/colours/acc"} <= rows[-1].keys()
    plain = {key: value for key, value in EXP.items() if key != "harness"}
    assert toy.main(["-e", "x"], {"x": [plain]}, folder) == 0
    expected = toy.evaluations(folder, exp_id(plain))
    assert [row["val_loss"] for row in rows] == [row["val_loss"] for row in expected]
    weights = [checkpoints.newest_complete(folder / "runs" / exp_id(each)) for each in (exp, plain)]
    first, second = ((place / "model.safetensors").read_bytes() for place in weights if place)
    assert first == second


@pytest.mark.slow
@needs_harness
@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"harness.tasks": ["colors"]}, ("harness.tasks: ", "'colors'", "colours")),
        ({"harness.tasks": ["colours", "arc_easy"]}, ("harness.tasks: 'arc_easy'", "--tasks arc_easy")),
        ({"harness.task_folder": "nowhere"}, ("harness.task_folder: ", "nowhere")),
        ({"loop.best_metric": "harness/colours/acc", "loop.best_mode": "max"}, ()),
        ({"loop.best_metric": "harness/colors/acc", "loop.best_mode": "max"}, ("unknown score 'harness/colors/acc'",)),
    ],
)
def test_a_dry_run_checks_tasks_and_their_data(folder: Path, changes: dict[str, Any], texts: tuple[str, ...]):
    done = run(folder, override(EXP, changes), "--dry-run")
    assert done.returncode == (1 if texts else 0), done.stderr[-3000:]
    for text in texts:
        assert text in done.stderr


@pytest.mark.slow
@needs_harness
def test_a_sharded_model_generates_no_answers(folder: Path):
    done = run(folder, override(EXP, {"harness.tasks": ["generated"]}), "--fsdp")
    assert done.returncode == 1
    assert "harness.tasks: 'generated' (generate_until)" in done.stderr


def test_a_missing_harness_is_an_error_before_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert toy.main(["-e", "x", "--dry-run"], {"x": [override(EXP, {"seed": 1})]}, folder) == 1
    assert f'pip install "{harness.PACKAGE}"' in capsys.readouterr().err


def test_a_dry_run_loads_the_tasks_of_many_experiments_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    loads: list[str] = []

    class TaskManager:
        """That of the harness, without its table of tasks."""

        def __init__(self, include_path: str) -> None:
            self.all_subtasks = ["colours"]

        def load(self, name: str) -> dict[str, Any]:
            loads.append(name)
            return {"tasks": {}}

    for name in ("lm_eval", "lm_eval.tasks"):
        module: Any = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.TaskManager = TaskManager
        monkeypatch.setitem(sys.modules, name, module)
    (folder / "data" / "once").mkdir()
    exp = override(EXP, {"harness.task_folder": "once"})
    group = [override(exp, {"seed": seed}) for seed in range(3)] + [override(exp, {"harness.limit": 2})]
    assert toy.main(["-e", "x", "--dry-run"], {"x": group}, folder) == 0
    assert loads == ["colours"] * 2, "once for each setting of harness"


def test_only_decoders_have_tasks():
    with pytest.raises(ConfigError, match="harness"):
        load_experiment(override(toy.CROSSATTN, {"harness": EXP["harness"]}), "here")
    with pytest.raises(ConfigError, match="tasks"):
        load(harness.Harness, {"tasks": []}, "harness")
