"""A folder of finished runs: two strides, three seeds, one more run that failed."""

import json
import shutil
from pathlib import Path

import pytest

from exp_configs import EXP_GROUPS
from src.evaluation.metrics.answers import GAIN, WRONG
from src.runs import plan
from src.runs.run_dir import RunDir


def loss(stride: int, seed: int, step: int) -> float:
    return stride / step + 0.1 * seed + 1 / 3


@pytest.fixture
def runs(finished: Path, tmp_path: Path) -> Path:
    """Six runs of group "tiny", which all have val_loss at steps 1 to 4 and em at the last; this test's own."""
    return Path(shutil.copytree(finished, tmp_path / "runs"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `runs` is a copy of."""
    folder = tmp_path_factory.mktemp("finished")
    for stride in (2, 1):
        for seed in range(3):
            exp = {"recipe": "toy", "seed": seed, "model": {"name": "m", "stride": stride, "kind": "a_b & 50%"}}
            with RunDir.open(folder, exp, exp, facts={"groups": ["tiny"]}) as run:
                for step in range(1, 5):
                    row = {"step": step, "val_loss": loss(stride, seed, step), "train_loss": 1.0}
                    run.scores.append(row | ({"em": stride / 4} if step == 4 else {}))
                run.scores.export_haven()
                run.set_status("done")
    return folder


@pytest.fixture(scope="session")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiments of the demo and their parent, with the scores, speeds and answers that runs of them have; the
    numbers are made up."""
    folder = tmp_path_factory.mktemp("demo")
    groups = plan.load_all(EXP_GROUPS)
    for item in plan.add_parents(plan.load_groups(EXP_GROUPS, ["demo"], []), groups, add=True):
        with RunDir.open(folder, item.exp, item.exp, facts={"groups": list(item.groups)}) as run:
            for step in range(25, 275, 25):
                row = {
                    "step": step,
                    "train_loss": 100 / step,
                    "grad_norm": 1.5,
                    "tokens": 500 * step,
                    "val_loss": 150 / step,
                }
                if item.group == "demo":
                    row["val_loss_shuffled_context"] = 160 / step
                if item.group == "demo" and step == 250:
                    row |= {
                        f"inference/{metric}{end}": 0.25
                        for metric in ("em", "f1", "precision", "recall")
                        for end in ("", WRONG, GAIN)
                    }
                run.scores.append(row)
            (run.path / "perf.jsonl").write_text(json.dumps({"step": 25, "tokens_per_second": 1.0}) + "\n")
            if item.group == "demo":
                (run.path / "inference").mkdir()
                for end in ("", WRONG):
                    (run.path / "inference" / f"val{end}.jsonl").write_text("".join(map(answer, range(60))))
            run.set_status("done", step=250, steps=250)
    return folder


def answer(number: int) -> str:
    """A line of an inference; each third one is right."""
    text = f"def function_{number}(argument_with_a_long_name, *arguments):\n    raise ValueError({'x' * 90!r})"
    row = {
        "question": "Which exceptions does this function raise?",
        "context": text,
        "answer": "ValueError",
        "dataset": "stdlib",
    }
    return json.dumps({**row, "answer_pred": "ValueError" if number % 3 == 0 else "TypeError"}) + "\n"
