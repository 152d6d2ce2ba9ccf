"""The recorded code of a run gives the same tree, and the same tree the same scores."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from results import diff
from src.errors import ConfigError, RunError
from src.experiments.identity import exp_id
from src.launch import arguments
from src.operations import recorded_code
from src.runs import environment, ledger
from src.runs.code_version import code_version
from src.runs.run_dir import RunDir
from src.runs.store import SavedRun
from tests import toy
from tests.core.runs.test_code_version import commit, git, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a project."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    write(root, {"src/a.py": "a = 1\n", "src/gone.py": "x = 1\n", "trainval.py": "print(0)\n"})
    commit(root)
    return root


def make(root: Path, seed: int, **changes: Any) -> SavedRun:
    """A run that records the code of `root`, but for `changes` of its env.json."""
    exp = {"recipe": "toy", "seed": seed}
    facts = {**code_version(root), "variables": {}, **changes}
    environment.code_digest.cache_clear()
    with RunDir.open(root.parent / "runs", exp, exp, facts=facts) as run:
        ledger.append(run.path, ledger.event("start", step=0, code=environment.code_digest(root)))
        run.set_status("done")
    return SavedRun(run.path)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.parts and path.name != ".git"
    }


def test_the_tree_with_its_uncommitted_changes(root: Path):
    write(root, {"src/a.py": "a = 2\n", "src/new.py": "n = 1\n", "notes.bin": bytes(range(256))})
    (root / "src/gone.py").unlink()
    before = files(root)
    run = make(root, 0)
    write(root, {"src/a.py": "a = 3\n"})
    commit(root)
    folder = recorded_code.recreate(run, root.parent / "tree", root)
    assert files(folder) == before
    assert recorded_code.recreate(run, root.parent / "tree", root) == folder
    assert code_version(folder)["diff"].encode() == (run.path / "attempts" / "001" / "diff.patch").read_bytes()
    write(folder, {"src/a.py": "a = 4\n"})
    with pytest.raises(RunError, match="worktree remove"):
        recorded_code.recreate(run, root.parent / "tree", root)


def test_a_project_below_the_top_of_the_repository(tmp_path: Path):
    top = tmp_path / "top"
    write(top, {"inner/src/a.py": "a = 1\n", "inner/trainval.py": "", "other.txt": "x"})
    git(top, "init", "-q")
    commit(top)
    write(top, {"inner/src/a.py": "a = 2\n"})
    run = make(top / "inner", 0)
    folder = recorded_code.recreate(run, tmp_path / "tree", top / "inner")
    assert folder == tmp_path / "tree" / "inner"
    assert (folder / "src/a.py").read_text() == "a = 2\n"


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"commit": None}, "no commit"),
        ({"commit": "0" * 40}, "0" * 40),
        ({"diff": None}, "diff.patch"),
        *(
            ({"omitted": [{"name": name, "reason": "more than 1000000 bytes"}]}, name)
            for name in (
                "src/secret.env",
                "trainval.py",
                "exp_configs.py",
                "data_prep/sources.py",
                "resources/a_key.json",
            )
        ),
        ({"omitted": [{"name": "and 7 more"}]}, "and 7 more"),
        ({"submodules": [{"path": "inner"}]}, "inner"),
        ({"diff": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}, "diff.patch"),
    ],
)
def test_code_that_is_not_recorded_is_refused(root: Path, changes: dict[str, Any], value: str):
    write(root, {"src/a.py": "a = 2\n"})
    run = make(root, 0, **changes)
    with pytest.raises(RunError) as error:
        recorded_code.rerun(run, root.parent, (), is_dry=True, root=root)
    assert str(run.path) in str(error.value)
    assert value in str(error.value)
    assert not (run.path.parent / recorded_code.FOLDER).exists()


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("inner/src/a.py", True), ("inner/exp_configs.py", True), ("src/a.py", True), ("inner/notes/key.pem", False)],
)
def test_omitted_files_below_the_top_of_the_repository(tmp_path: Path, name: str, is_refused: bool):
    """A name without the folder is one of a snapshot."""
    top = tmp_path / "top"
    write(top, {"inner/src/a.py": "a = 1\n", "inner/trainval.py": ""})
    git(top, "init", "-q")
    commit(top)
    run = make(top / "inner", 0, omitted=[{"name": name, "reason": "its name looks like a secret"}])
    if is_refused:
        with pytest.raises(RunError) as error:
            recorded_code.rerun(run, tmp_path, (), is_dry=True, root=top / "inner")
        assert name in str(error.value)
    else:
        assert recorded_code.rerun(run, tmp_path, (), is_dry=True, root=top / "inner") == 0


def start(runs: Path, *commands: list[str], engine: str = "replicated", processes: int = 1) -> SavedRun:
    """A run with one start for each command; the last start has this number of processes."""
    exp = {"recipe": "toy", "seed": 0}
    for number, words in enumerate(commands, 1):
        variables = {"WORLD_SIZE": str(processes)} if number == len(commands) else {}
        with RunDir.open(runs, exp, exp, facts={"command": words, "variables": variables}) as run:
            ledger.append(run.path, ledger.event("start", step=0, engine=engine))
            run.set_status("stopped")
    return SavedRun(runs / exp_id(exp))


def options(run: SavedRun, *words: str) -> tuple[list[str], list[str]]:
    args = arguments.parse(["--from-run", run.name, *words], "", toy.ROOT)
    return recorded_code.recorded_options(args, run)


MICRO_BATCH = ["trainval.py", "-e", "base", "--set", "loop.steps=3", "--micro-batch=4", "--deterministic"]
SHARDED = ["/old/trainval.py", "--exp_id", "abc", "--fsdp", "--fsdp_replicas", "2", "--log_every", "5", "-j", "x"]


def test_options_that_change_numbers_are_repeated(tmp_path: Path):
    one = start(tmp_path / "one", MICRO_BATCH)
    assert options(one) == (["--micro_batch", "4", "--deterministic"], [])
    assert options(one, "--micro_batch", "2") == (["--deterministic"], [])
    other = start(tmp_path / "other", SHARDED, engine="fsdp")
    assert options(other) == (["--fsdp", "--fsdp_replicas", "2", "--log_every", "5"], [])
    assert options(other, "--deepspeed", "x.json") == (["--log_every", "5"], [])


def test_a_settings_file_of_the_project_is_that_of_the_recorded_code(tmp_path: Path):
    for number, word in enumerate(("resources/zero2.json", str(toy.ROOT / "resources" / "zero2.json"))):
        run = start(tmp_path / str(number), ["trainval.py", "--deepspeed", word], engine="zero2")
        assert options(run) == (["--deepspeed", "resources/zero2.json"], [])
    run = start(tmp_path / "outside", ["trainval.py", "--deepspeed", str(tmp_path / "x.json")], engine="zero2")
    words, (warning,) = options(run)
    assert words == ["--deepspeed", str(tmp_path / "x.json")]
    assert str(tmp_path / "x.json") in warning


@pytest.mark.parametrize(
    ("commands", "more", "words", "value"),
    [
        ([["pytest"]], {}, [], "--micro_batch"),
        ([["pytest", "-e"], MICRO_BATCH], {}, [], "--micro_batch"),
        ([], {}, [], "--micro_batch"),
        ([["trainval.py"]], {"engine": "zero3"}, [], "zero3"),
        ([["trainval.py"], MICRO_BATCH], {}, ["--micro_batch", "4", "--deterministic"], "different options"),
        ([MICRO_BATCH, MICRO_BATCH], {"processes": 2}, ["--micro_batch", "4", "--deterministic"], "processes"),
    ],
)
def test_one_warning_if_the_numbers_can_differ(
    tmp_path: Path, commands: list[list[str]], more: dict[str, Any], words: list[str], value: str
):
    run = start(tmp_path, *commands, **more)
    run.path.mkdir(exist_ok=True)
    repeated_words, (warning,) = options(run)
    assert repeated_words == words
    assert value in warning
    assert str(run.path) in warning


def test_no_repository_is_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make(root, 0)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "copy").mkdir()
    with pytest.raises(ConfigError) as error:
        recorded_code.recreate(run, tmp_path / "tree", tmp_path / "copy")
    assert str(tmp_path / "copy") in str(error.value)


def test_a_run_of_two_versions_or_machines_is_refused(root: Path):
    run = make(root, 0)
    several = make(root, 1, variables={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(RunError, match="several machines"):
        recorded_code.rerun(several, root.parent, (), is_dry=True, root=root)
    ledger.append(run.path, ledger.event("start", step=3, code="other"))
    with pytest.raises(RunError, match="2 versions"):
        recorded_code.rerun(SavedRun(run.path), root.parent, (), is_dry=True, root=root)


def test_the_code_difference_of_two_runs(root: Path):
    write(root, {"src/a.py": "a = 2\n"})
    one = make(root, 0)
    commit(root)
    other = make(root, 1)
    assert recorded_code.difference(one, other, root) == []  # the same code, first as changes, then as a commit
    write(root, {"src/a.py": "a = 3\n"})
    third = make(root, 2)
    lines = recorded_code.difference(one, third, root)
    assert [line for line in lines if line[:1] in "+-" and line[1:2] == "a"] == ["-a = 2", "+a = 3"]


def test_results_diff_has_the_difference_of_the_code(root: Path, capsys: pytest.CaptureFixture[str]):
    patch = (
        "diff --git a/new.txt b/new.txt\nnew file mode 100644\n--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+a = 3\n"
    )
    head = git(toy.ROOT, "rev-parse", "HEAD")
    one, other = make(root, 0, commit=head, diff=""), make(root, 1, commit=head, diff=patch, dirty=True)
    foreign = make(root, 2)
    words = [one.name, other.name, "-r", str(root.parent / "runs")]
    assert diff.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["code_patch"][-1] == "+a = 3"
    assert diff.main(words) == 0
    assert "    +a = 3" in capsys.readouterr().out.splitlines()
    assert diff.main([one.name, foreign.name, "-r", str(root.parent / "runs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["code_patch"] is None


@pytest.mark.slow
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_run_from_its_code_has_the_same_scores(tmp_path: Path, is_changed: bool):
    """With the options and threads of its start. `loop.micro_batch` is 2."""
    toy.write_data(tmp_path / "data")
    root = tmp_path / "project"
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(toy.ROOT / "src", root / "src", ignore=ignore)
    for name in ("trainval.py", "job_configs.py"):
        shutil.copy(toy.ROOT / name, root)
    (root / "exp_configs.py").write_text(f"EXP_GROUPS = {{'base': [{toy.BASE!r}]}}\n")
    git(root, "init", "-q")
    commit(root)
    loop = root / "src" / "training" / "loss.py"
    if is_changed:
        loop.write_text(loop.read_text() + "\n# An uncommitted change.\n")
    words = ["--micro_batch", "8", "--deterministic", "--log_every", "3"]
    first = command(root, tmp_path, "-e", "base", *words, OMP_NUM_THREADS="1")
    assert first["error"] is None
    (run,) = [path for path in (tmp_path / "runs").iterdir() if (path / "exp_dict.json").exists()]
    loop.write_text("raise SystemExit('a later change')\n")
    (root / "exp_configs.py").write_text("EXP_GROUPS = {}\n")
    commit(root)
    shutil.copytree(toy.ROOT / "src", root / "src", dirs_exist_ok=True, ignore=ignore)
    second = command(root, tmp_path, "--from-run", run.name[:6])
    assert second["experiments"][0]["state"] == "done"
    assert second["warnings"] == []
    copy = tmp_path / "runs" / "reruns" / run.name / "runs" / run.name
    assert (copy / "scores.jsonl").read_bytes() == (run / "scores.jsonl").read_bytes()
    assert SavedRun(copy).env["dirty"] is is_changed
    assert SavedRun(copy).env["torch"] == SavedRun(run).env["torch"]
    assert [event["micro_batch"] for event in ledger.read(copy) if event["event"] == "start"] == [8]
    assert ledger.codes_of_starts(copy, 99) == ledger.codes_of_starts(run, 99)


def command(root: Path, folder: Path, *words: str, **variables: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        toy.command(root, [*words, "--json"], folder),
        cwd=root,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
