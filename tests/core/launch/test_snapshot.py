"""Jobs run from a copy of the code: whole, without secrets, once for equal code, and deaf to later edits."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from src.errors import LaunchError
from src.launch import snapshot
from src.runs.code_version import code_version


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    return subprocess.run(
        ["git", *identity, *words], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small project, not under git."""
    root = tmp_path / "project"
    (root / "src" / "data").mkdir(parents=True)
    (root / "trainval.py").write_text("print('one')\n")
    (root / "src" / "data" / "tokenizers.py").write_text("TOKEN = 1\n")
    (root / "run.sh").write_text("echo\n")
    (root / "run.sh").chmod(0o755)
    return root


def under_git(root: Path) -> Path:
    git(root, "init", "-q", "-b", "main")
    (root / ".gitignore").write_text("ignored.txt\nresults/\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def names(folder: Path) -> set[str]:
    file_names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return file_names - {"manifest.json", "snapshot.json"}


CODE = {"trainval.py", "src/data/tokenizers.py", "run.sh"}


@pytest.mark.parametrize("with_git", [True, False])
def test_equal_code_is_copied_once_and_an_edit_makes_another(root: Path, tmp_path: Path, with_git: bool):
    if with_git:
        under_git(root)
    first = snapshot.take(root, tmp_path / "snapshots")
    inodes = {path: path.stat().st_ino for path in first.rglob("*")}
    assert snapshot.take(root, tmp_path / "snapshots") == first
    assert {path: path.stat().st_ino for path in first.rglob("*")} == inodes
    assert names(first) == CODE | ({".gitignore"} if with_git else set())
    assert os.access(first / "run.sh", os.X_OK)
    assert not os.access(first / "trainval.py", os.X_OK)
    (root / "trainval.py").write_text("print('two')\n")
    second = snapshot.take(root, tmp_path / "snapshots")
    assert second != first
    assert (first / "trainval.py").read_text() == "print('one')\n"
    assert (second / "trainval.py").read_text() == "print('two')\n"
    (root / "run.sh").chmod(0o644)
    assert snapshot.take(root, tmp_path / "snapshots") not in (first, second)


def test_git_says_what_belongs_to_the_code(root: Path, tmp_path: Path):
    under_git(root)
    (root / "ignored.txt").write_text("x")
    (root / "results" / "runs").mkdir(parents=True)
    (root / "results" / "runs" / "x.json").write_text("x")
    (root / "new.py").write_text("not yet added\n")
    (root / "run.sh").unlink()
    assert names(snapshot.take(root, tmp_path / "snapshots")) == (CODE | {"new.py", ".gitignore"}) - {"run.sh"}


def test_without_git_results_environments_and_hidden_files_stay(root: Path, tmp_path: Path):
    for name in (
        "results/runs/x",
        ".hidden/x",
        ".dot",
        "my_env/lib/x.py",
        "src/__pycache__/x.pyc",
        "src/results/kept.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (root / "my_env" / "pyvenv.cfg").write_text("x")
    assert names(snapshot.take(root, tmp_path / "snapshots")) == CODE | {"src/results/kept.py"}


def test_environments_are_no_code_whatever_they_are_called(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    under_git(root)
    for name in (
        "env/pyvenv.cfg",
        "env/lib/x.py",
        "env/lib/secrets.json",
        "deep/conda/conda-meta/x",
        "deep/conda/lib/x.py",
        "deep/y.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (root / "env").rename(tmp_path / "env")
    (root / ".venv").symlink_to(tmp_path / "env")
    (root / "env").symlink_to(tmp_path / "env")
    with caplog.at_level("INFO"):
        assert names(snapshot.take(root, tmp_path / "snapshots")) == CODE | {".gitignore", "deep/y.py"}
    assert not caplog.text
    (root / "env").unlink()
    (tmp_path / "env").rename(root / "env")
    assert names(snapshot.take(root, tmp_path / "snapshots")) == CODE | {".gitignore", "deep/y.py"}


@pytest.mark.parametrize("with_git", [True, False])
def test_a_link_to_a_part_of_an_environment_is_no_code(
    root: Path, tmp_path: Path, with_git: bool, caplog: pytest.LogCaptureFixture
):
    """The environment is recognised by pyvenv.cfg wherever it lies. Code that itself lies in one is code."""
    inside = root.rename((tmp_path / "around").mkdir() or tmp_path / "around" / "project")
    (tmp_path / "around" / "pyvenv.cfg").write_text("x")
    packages = tmp_path / "env" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").write_text("x")
    for name in ("x.py", "token.json"):
        (packages / name).write_text("x")
    (inside / "packages").symlink_to(packages)
    (inside / ".venv").symlink_to(tmp_path / "env" / "lib")
    if with_git:
        under_git(inside)
    with caplog.at_level("INFO"):
        assert names(snapshot.take(inside, tmp_path / "snapshots")) - {".gitignore"} == CODE
    assert not caplog.text


@pytest.mark.parametrize("with_git", [True, False])
def test_linked_folders_are_copied_and_a_link_to_itself_ends(root: Path, tmp_path: Path, with_git: bool):
    (root / "src").rename(tmp_path / "elsewhere")
    (root / "src").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "elsewhere")
    (root / "nowhere").symlink_to(tmp_path / "missing")
    if with_git:
        under_git(root)
    file_names = names(snapshot.take(root, tmp_path / "snapshots"))
    assert file_names - {".gitignore"} == CODE


@pytest.mark.parametrize("with_git", [True, False])
def test_save_directories_and_data_are_no_code_wherever_they_lie(root: Path, tmp_path: Path, with_git: bool):
    if with_git:
        under_git(root)
    for name in ("my_runs/abc/exp_dict.json", "my_data/rows.jsonl"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("x")
    (root / "linked").symlink_to(root / "my_data")
    copy = snapshot.take(root, root / "my_runs" / "snapshots", [root / "my_runs", root / "my_data"])
    assert names(copy) - {".gitignore"} == CODE


SECRET = [
    ".env",
    ".env.local",
    "server.pem",
    "id_rsa",
    "id_ed25519.pub",
    "my.key",
    ".netrc",
    "credentials.json",
    "wandb_token.txt",
]
SECRET += ["SECRETS.yaml", "db-password.txt", "secrets.py", "deep/kaggle.json"]
NOT_SECRET = [
    "tokenizers.py",
    "token.py",
    "special_tokens_map.json",
    "tokenizer.json",
    "keyboard.txt",
    "test_secret_files.py",
]
NOT_SECRET += ["copy_token.sh"]


@pytest.mark.parametrize("with_git", [True, False])
def test_files_that_look_like_keys_are_left_out_and_named(
    root: Path, tmp_path: Path, with_git: bool, caplog: pytest.LogCaptureFixture
):
    (root / "deep").mkdir()
    for name in [*SECRET, *NOT_SECRET]:
        (root / name).write_text("hush\n")
    if with_git:
        under_git(root)
    with caplog.at_level("INFO"):
        file_names = names(snapshot.take(root, tmp_path / "snapshots"))
    assert file_names - {".gitignore"} == CODE | set(NOT_SECRET)
    assert "deep/kaggle.json" in caplog.text
    logged = caplog.text.partition("likely secrets, not copied for the jobs: ")[2]
    assert len(logged.split(", ")) == snapshot.MAX_NAMES == 10
    assert (" and 3 more" in logged) == with_git, "git names the hidden ones, too"


def test_files_with_keys_are_left_out(root: Path, tmp_path: Path):
    contents = {
        "secrets/prod.json": "{}",
        ".aws/config": "[default]",
        "deploy.txt": "-----BEGIN RSA PRIVATE KEY-----\n",
        "notes.md": "hf_" + "a1" * 17,
        "plain.md": "hf_hub_download",
    }
    for name, content in contents.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)
    under_git(root)
    assert names(snapshot.take(root, tmp_path / "snapshots")) - {".gitignore"} == CODE | {"plain.md"}


def test_a_large_file_is_refused_by_name(root: Path, tmp_path: Path):
    with open(root / "weights.bin", "wb") as file:
        file.truncate(snapshot.MAX_FILE_BYTES + 1)
    with pytest.raises(
        LaunchError,
        match=r"project/weights\.bin: 20,000,001 bytes, the limit for a file of code is 20,000,000\. .*\.gitignore",
    ):
        snapshot.take(root, tmp_path / "snapshots")
    assert not (tmp_path / "snapshots").exists()


def test_many_files_that_are_large_together_are_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot, "MAX_BYTES", 25)
    with pytest.raises(LaunchError, match=r"with it the code has more than 25 bytes"):
        snapshot.take(root, tmp_path / "snapshots")


def test_a_damaged_snapshot_is_made_again(root: Path, tmp_path: Path):
    first = snapshot.take(root, tmp_path / "snapshots")
    (first / "trainval.py").write_text("print('evil')\n")
    assert snapshot.take(root, tmp_path / "snapshots") == first
    assert (first / "trainval.py").read_text() == "print('one')\n"


def test_a_reserved_name_is_refused(root: Path, tmp_path: Path):
    (root / "manifest.json").write_text("{}")
    with pytest.raises(LaunchError, match=r"project/manifest\.json: this name is reserved"):
        snapshot.take(root, tmp_path / "snapshots")


def test_the_snapshot_records_the_commit_and_uncommitted_changes(root: Path, tmp_path: Path):
    """A run from it records the code that was submitted, not that of a repository around the runs folder."""
    under_git(root)
    (root / "trainval.py").write_text("print('changed')\n")
    copy = snapshot.take(root, root / "results" / "snapshots")
    commit = git(root, "rev-parse", "HEAD")
    git(root, "commit", "-q", "-a", "-m", "later")
    facts = code_version(copy)
    assert (facts["commit"], facts["branch"], facts["dirty"]) == (commit, "main", True)
    assert "+print('changed')" in facts["diff"]
    assert json.loads((copy / "snapshot.json").read_text()) == facts
    assert snapshot.take(copy, tmp_path / "other") == copy  # a job that submits


def test_a_file_that_changes_while_it_is_copied(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another program writes between the look and the copy: it is looked at again, and in the end refused."""
    real, remaining = snapshot.new_directory, [1]

    def racing(*args, **kwargs):
        if remaining[0]:
            remaining[0] -= 1
            (root / "trainval.py").write_text(f"print({remaining[0]})\n" * 3)
        return real(*args, **kwargs)

    monkeypatch.setattr(snapshot, "new_directory", racing)
    copy = snapshot.take(root, tmp_path / "snapshots")
    assert (copy / "trainval.py").read_text() == "print(0)\n" * 3
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    remaining[0] = 100
    (root / "trainval.py").write_text("print('new')\n")
    with pytest.raises(LaunchError, match=r"project: its files change while they are copied"):
        snapshot.take(root, tmp_path / "snapshots")
