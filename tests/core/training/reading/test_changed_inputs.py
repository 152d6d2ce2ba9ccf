"""What may change between two starts of a run, and what becomes of it: other code is told, other data are refused."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from results import table
from src.errors import CheckpointError, RunError
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.launch import snapshot
from src.runs import environment, ledger
from src.runs.inputs import content_samples
from src.training.state import State
from tests import toy
from tests.core.training import small

EXP: dict[str, Any] = copy.deepcopy(toy.BASE)
EXP["loop"] |= {"steps": 60, "eval_every": 20}
RUN = exp_id(EXP)
ARGUMENTS = ["-e", "base", "--log_every", "2"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    toy.write_data(tmp_path / "data")
    return toy.project(tmp_path, f"EXP_GROUPS = {{'base': [{EXP!r}]}}\n")


@pytest.mark.slow
def test_changed_code_is_in_the_log_and_the_table(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (root / "src").unlink()
    shutil.copytree(toy.ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    run = tmp_path / "runs" / RUN
    toy.kill_midway(root, ARGUMENTS, tmp_path, RUN)
    toy.kill_midway(root, ARGUMENTS, tmp_path, RUN)
    assert "different code" not in (run / "logs" / "train.log").read_text()
    assert table.main([str(tmp_path / "runs"), "--format", "markdown"]) == 0
    assert "code_versions" not in capsys.readouterr().out
    loss = root / "src" / "training" / "loss.py"
    loss.write_text(loss.read_text().replace("    return loss\n", "    return 1.5 * loss\n", 1))
    assert toy.run(root, ARGUMENTS, tmp_path).returncode == 0
    first, second, third = (event["code"] for event in ledger.read(run) if event["event"] == "start")
    assert first == second != third
    text = f"resumes with different code than at its last start ({second}, now {third})."
    assert (run / "logs" / "train.log").read_text().count(text) == 1
    assert table.main([str(tmp_path / "runs"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["code_versions"] == 2
    assert table.main([str(tmp_path / "runs"), "--format", "markdown"]) == 0
    assert "| code_versions |" in capsys.readouterr().out


def test_starts_of_which_nothing_is_left_do_not_count(tmp_path: Path):
    for step, code in ((0, "a"), (0, "b"), (4, "c"), (4, "b")):
        ledger.append(tmp_path, ledger.event("start", step=step, code=code))
    ledger.append(tmp_path, ledger.event("start", step=8))
    assert ledger.codes_of_starts(tmp_path, 8) == ["b", "b"]
    assert ledger.codes_of_starts(tmp_path, 0) == []


def test_starts_of_a_branch_that_was_left_do_not_count_until_it_is_taken_up_again(tmp_path: Path):
    ledger.append(tmp_path, ledger.event("start", step=0, code="a"))
    ledger.append(tmp_path, ledger.event("start", step=100, code="b"))
    assert ledger.codes_of_starts(tmp_path, 200) == ["a", "b"]
    ledger.append(tmp_path, ledger.event("rewind", step=50, number=1))
    assert ledger.codes_of_starts(tmp_path, 50) == ["a"]
    ledger.append(tmp_path, ledger.event("start", step=50, code="c"))
    assert ledger.codes_of_starts(tmp_path, 150) == ["a", "c"]
    ledger.append(tmp_path, ledger.event("undo", step=50, number=2, undoes=1))
    assert ledger.codes_of_starts(tmp_path, 200) == ["a", "b"]


def test_the_digest_does_not_depend_on_the_folder(tmp_path: Path):
    source = tmp_path / "source"
    (source / "src" / "launch").mkdir(parents=True)
    for name in ("trainval.py", "src/loss.py", "src/launch/local.py"):
        (source / name).write_text("one = 1\n")
    copy = snapshot.take(source, tmp_path / "snapshots")
    before = environment.code_digest(source)
    assert environment.code_digest(copy) == before
    (source / "src" / ".#loss.py").symlink_to("nobody@nowhere")  # an editor's lock
    (source / "src" / "gone.py").symlink_to("nowhere")
    (source / "src" / ".kept").mkdir()
    (source / "src" / ".kept" / "loss.py").write_text("one = 0\n")
    for name, same in (("src/launch/local.py", True), ("src/loss.py", False)):
        (source / name).write_text("one = 2\n")
        environment.code_digest.cache_clear()
        assert (environment.code_digest(source) == before) == same


def test_the_digest_of_the_evaluation_leaves_out_models_and_the_loop(tmp_path: Path):
    names = {
        "data/text.py": True,
        "evaluation/metrics/squad.py": True,
        "recipes/lm.py": True,
        "training/validation.py": True,
        "systems/t5/tasks/rows.py": True,
        "systems/t5/recipe.py": True,
        "training/parallel/linear_cross_entropy.py": True,
        "training/monitoring/reporter.py": True,
        "training/loop.py": False,
        "systems/assistants/groups.py": False,
        "systems/assistants/serving/page.py": False,
        "evaluation/speed.py": False,
        "models/hf.py": False,
        "systems/t5/model/config.py": False,
        "tables/results.py": False,
    }
    for name, is_part in names.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        before = environment.evaluation_digest(tmp_path)
        (tmp_path / "src" / name).write_text("one = 1\n")
        environment.evaluation_digest.cache_clear()
        assert (environment.evaluation_digest(tmp_path) != before) == is_part, name


@pytest.mark.slow
def test_data_of_the_same_size_with_other_content_are_refused(root: Path, tmp_path: Path):
    toy.kill_midway(root, ARGUMENTS, tmp_path, RUN)
    file = tmp_path / "data" / "toy_text" / "train.jsonl"
    before = file.read_bytes()
    file.write_bytes(before.replace(b"red", b"tan"))
    for option in ([], ["--dry-run"]):
        done = toy.run(root, [*ARGUMENTS, *option], tmp_path)
        assert done.returncode == 1
        assert f"base[0]: run {RUN} has read other data: {tmp_path / 'data' / 'toy_text'} changed" in done.stderr
    file.write_bytes(before)
    assert toy.run(root, ARGUMENTS, tmp_path).returncode == 0


NESTED = {"name": "mixture", "parts": {"first": toy.BASE["data"]}}


@pytest.mark.parametrize("data", [toy.BASE["data"], NESTED], ids=["one", "mixture"])
@pytest.mark.parametrize("option", [[], ["--dry-run"]], ids=["start", "dry run"])
def test_a_finished_run_of_other_data_is_not_simply_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: dict[str, Any], option: list[str]
):
    toy.write_data(tmp_path / "data")
    exp = {**toy.BASE, "data": data, "loop": {**toy.BASE["loop"], "steps": 2, "eval_every": 2}}
    groups, words = {"base": [exp]}, ["-e", "base", *option]
    assert toy.main(["-e", "base"], groups, tmp_path) == 0
    assert toy.main(words, groups, tmp_path) == 0
    assert "warning" not in capsys.readouterr().err
    file = tmp_path / "data" / "toy_text" / "val.jsonl"
    file.write_bytes(file.read_bytes().replace(b"red", b"tan"))
    assert toy.main(words, groups, tmp_path) == 0
    warning = f"warning: base[0]: run {exp_id(exp)} has read other data: {tmp_path / 'data' / 'toy_text'} changed since"
    assert warning in capsys.readouterr().err
    assert toy.main([*words, "-r", "1"], groups, tmp_path) == 0
    assert "warning" not in capsys.readouterr().err


def test_an_evaluation_of_other_data_is_not_simply_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    toy.write_data(tmp_path / "data")
    exp = {name: value for name, value in toy.BASE.items() if name != "loop"} | {"evaluation": {"micro_batch": 2}}
    assert toy.main(["-e", "base"], {"base": [exp]}, tmp_path) == 0
    shutil.rmtree(tmp_path / "data" / "toy_text")
    assert toy.main(["-e", "base"], {"base": [exp]}, tmp_path) == 0
    assert "warning" not in capsys.readouterr().err
    toy.write_data(tmp_path / "others")
    file = tmp_path / "others" / "toy_text" / "val.jsonl"
    file.write_bytes(file.read_bytes().replace(b"red", b"tan"))
    shutil.move(tmp_path / "others" / "toy_text", tmp_path / "data")
    assert toy.main(["-e", "base"], {"base": [exp]}, tmp_path) == 0
    assert f"{tmp_path / 'data' / 'toy_text'} changed since" in capsys.readouterr().err


def test_folders_called_as_kinds_of_data_are_not_sampled(tmp_path: Path):
    data = toy.write_data(tmp_path / "data")
    shutil.copytree(data / "toy_text", data / "text")
    exp = {"recipe": "small", "data": {"name": "mixture", "parts": {"a": {"name": "text", "dataset": "toy_text"}}}}
    assert set(content_samples(exp, Places(data, tmp_path / "runs"))) == {"content of toy_text"}


def test_a_run_that_has_sampled_such_a_folder_resumes(tmp_path: Path):
    with small.open_run(small.write_data(tmp_path)) as run:
        small.train(run, inputs={"content of text": "a", "data": "b"})
        state, _ = small.train(run, inputs={"data": "b"})
        assert state.step == small.CONFIG.steps
        with pytest.raises(RunError, match="inputs changed since the start of the run: data"):
            small.train(run, inputs={})


def test_the_state_of_a_later_version_is_refused():
    saved = State(step=3).to_json()
    saved["since_row"]["later"] = 1
    with pytest.raises(CheckpointError, match="from another version"):
        State.from_json(saved)
