"""`python -m benchmarks.gpu`: with a GPU all of it; without one, items that cost little, so that it is whole on the day
there is one."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType

import pytest
import torch

from benchmarks import gpu, gpu_runs
from src.data.jsonl import SPLITS
from tests import toy
from tests.conftest import ROOT
from tests.toy import environment


def run(folder: Path, *words: str) -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "-o", str(folder), *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    results = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert done.returncode == int(any(each["state"] == "failed" for each in results.values())), done.stderr
    return results


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_item_passes(tmp_path: Path):
    assert {name: each["state"] for name, each in run(tmp_path).items() if each["state"] != "passed"} == {}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there are no tiny stand-ins")
def test_without_a_gpu_possible_checks_run_and_the_rest_are_named(tmp_path: Path):
    results = run(tmp_path, "--only", "device", "stop", "synchronisations", "cross_attention")
    expected = {"device": "passed", "stop": "passed", "synchronisations": "not tried", "cross_attention": "passed"}
    assert {name: each["state"] for name, each in results.items()} == expected
    assert "GPU" in results["synchronisations"]["reason"]
    assert results["stop"]["found"]["exit code"] == 75
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [re.split(r" *\| *", line)[1:3] for line in lines[2:]] == [list(pair) for pair in expected.items()]
    assert "exit code 75" in lines[3]


def test_the_long_texts_have_several_sequences_of_the_large_models_in_each_split(tmp_path: Path):
    gpu_runs.write_long_texts(toy.write_data(tmp_path))
    for split in SPLITS:
        rows = (tmp_path / "long_texts" / f"{split}.jsonl").read_text().splitlines()
        assert sum(len(json.loads(row)["text"].split()) for row in rows) > 8 * 1024, split


def test_a_wait_is_named_by_the_library_and_by_the_function_of_src():
    def code(path: str, name: str) -> CodeType:
        return compile(f"def {name}(): pass", path, "exec").co_consts[0]

    torchs = code("/env/lib/python3.12/site-packages/torch/_tensor.py", "item")
    masks = code("/env/lib/python3.12/site-packages/transformers/masking_utils.py", "ignore")
    loss, step = code("/project/src/training/loss.py", "loss"), code("/project/src/training/loop.py", "train_step")
    assert gpu.place_of([torchs, masks, loss, step]) == "masking_utils.ignore in loss.loss"
    assert gpu.place_of([torchs, step]) == "loop.train_step"


@pytest.mark.slow
def test_a_training_needs_no_more_packages_than_are_carried_to_a_bare_machine(tmp_path: Path):
    """torch, transformers, accelerate, pydantic, orjson, numpy and what they need, linked into a folder of their
    own."""
    bare = tmp_path / "packages"
    link_packages(bare, ["torch", "transformers", "accelerate", "pydantic", "orjson", "numpy"])
    code = (
        f"from pathlib import Path; from tests import toy; import sys; "
        f"toy.write_data(Path({str(tmp_path / 'data')!r})); "
    )
    code += f"sys.exit(toy.main(['-e', 'base'], toy.GROUPS, Path({str(tmp_path)!r})))"
    variables = environment() | {"PYTHONPATH": f"{bare}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    process = subprocess.run(
        [sys.executable, "-S", "-c", "import panel"], cwd=tmp_path, env=variables, capture_output=True, check=False
    )
    assert process.returncode == 1


def link_packages(folder: Path, names: list[str]) -> None:
    """Links to the installed packages `names`, and to all that these require."""
    import importlib.metadata

    from packaging.requirements import Requirement

    folder.mkdir()
    seen: set[str] = set()
    while names:
        name = names.pop().lower().replace("_", "-")
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        seen.add(name)
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if (
                requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            ) and requirement.name.lower().replace("_", "-") not in seen:
                names.append(requirement.name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)
