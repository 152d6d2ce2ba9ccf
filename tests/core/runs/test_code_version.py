"""The recorded code version reproduces the tree."""

import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from src.launch import snapshot
from src.runs.code_version import MAX_DIFF_BYTES, SNAPSHOT, code_version
from src.support.redaction import looks_secret

BINARY = bytes(range(256)) * 10


def git(folder: Path, *arguments: str, check: bool = True) -> str:
    options = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@t",
        "-c",
        "protocol.file.allow=always",
        "-c",
        "init.defaultBranch=main",
    ]
    done = subprocess.run(["git", "-C", str(folder), *options, *arguments], capture_output=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout.decode(errors="replace").strip()


def write(folder: Path, files: dict[str, bytes | str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(folder: Path) -> None:
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "x")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    files: dict[str, bytes | str] = {
        f"src/{name}.py": f"{name} = 1\n" * 5 for name in ("changed", "deleted", "renamed", "mode", "typed")
    }
    write(
        root,
        {
            **files,
            "binary.bin": BINARY,
            "no_newline": "a\nb",
            "latin.txt": b"caf\xe9\n",
            ".gitignore": "ignored\n",
            "trainval.py": "",
        },
    )
    write(
        root,
        {
            "gone.bin": BINARY[::-1],
            "crlf.txt": "a\r\nb\r\n",
            "staged.py": "1\n",
            "folder": "a file\n",
            "directory/a/b.py": "1\n",
        },
    )
    os.symlink("src/changed.py", root / "link")
    commit(root)
    return root


def tree_of(root: Path) -> dict[str, Any]:
    """Content, and whether it is executable, of each file; the target of each link."""
    content_by_name: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = os.fsencode(path.relative_to(root)).decode(errors="backslashreplace")
        if ".git" in path.relative_to(root).parts or (path.is_dir() and not path.is_symlink()):
            continue
        content_by_name[name] = (
            os.readlink(path) if path.is_symlink() else (path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
        )
    return content_by_name


def apply_patch(root: Path, facts: dict[str, Any], target: Path) -> dict[str, Any]:
    """The tree of a clone at the recorded commit with the recorded patch."""
    git(target.parent, "clone", "-q", "--recurse-submodules", str(root), str(target))
    git(target, "checkout", "-q", facts["commit"])
    git(target, "submodule", "update", "-q", "--init", "--recursive")
    patch = target.parent / "diff.patch"
    patch.write_bytes(facts["diff"].encode("utf-8", "surrogateescape"))
    git(target, "apply", "--whitespace=nowarn", str(patch))
    return tree_of(target)


def test_clean_tree(root: Path):
    facts = code_version(root)
    assert facts == {"commit": git(root, "rev-parse", "HEAD"), "branch": "main", "dirty": False, "diff": ""}


def change_everything(root: Path) -> None:
    write(
        root,
        {
            "src/changed.py": "changed = 2",
            "no_newline": "a\nc",
            "latin.txt": b"th\xe9\n",
            "binary.bin": BINARY[1:],
            "crlf.txt": "a\r\n",
        },
    )
    write(
        root,
        {
            "src/new.py": "NEW = 1\n",
            "new/deep/data.bin": BINARY,
            "empty.py": "",
            'späte Änderung "x"\t.py': "1\n",
            "-dash": "x",
        },
    )
    write(root, {":(top)magic": "1\n", "*.py": "star\n", "src/noted.py": "intent\n", "staged.py": "2\n"})
    (root / os.fsdecode(b"caf\xe9.txt")).write_text("a name that is not UTF-8\n")
    git(root, "add", "-N", "src/noted.py")
    git(root, "add", "staged.py")
    write(root, {"staged.py": "3\n"})
    (root / "src/deleted.py").unlink()
    (root / "gone.bin").unlink()
    git(root, "mv", "src/renamed.py", "src/other_name.py")
    (root / "src/mode.py").chmod(0o755)
    (root / "src/typed.py").unlink()
    (root / "src/typed.py").symlink_to("changed.py")
    (root / "link").unlink()
    (root / "link").symlink_to("src/new.py")
    (root / "new_link").symlink_to("nowhere")
    (root / "folder").unlink()
    write(root, {"folder/inner.py": "1\n"})
    shutil.rmtree(root / "directory")
    write(root, {"directory": "a file now\n"})


@pytest.mark.parametrize(
    "config", [{}, {"diff.noprefix": "true", "color.ui": "always", "diff.context": "0", "diff.renames": "copies"}]
)
def test_the_patch_reproduces_the_tree(root: Path, tmp_path: Path, config: dict[str, str]):
    for key, value in config.items():
        git(root, "config", key, value)
    change_everything(root)
    before = git(root, "status", "--porcelain")
    facts = code_version(root)
    assert git(root, "status", "--porcelain") == before
    assert facts["dirty"] is True
    assert "omitted" not in facts
    assert apply_patch(root, facts, tmp_path / "copy") == tree_of(root)


def test_a_new_file_is_dirty(root: Path):
    write(root, {"src/plugin.py": "x = 1\n"})
    facts = code_version(root)
    assert facts["dirty"] is True
    assert "+x = 1" in facts["diff"]


def test_ignored_files_and_save_directories_are_no_code(root: Path):
    write(root, {"ignored": "x", "runs/a/b.py": "1\n", "env/pyvenv.cfg": "", "env/lib/a.py": "1\n"})
    assert code_version(root, [root / "runs"])["dirty"] is False
    assert code_version(root)["dirty"] is True


def test_secrets_are_never_recorded(root: Path):
    names = [
        ".env",
        "server.pem",
        "wandb_token.txt",
        "credentials.json",
        ".aws/config",
        "id_rsa",
        "conf/.netrc",
        "my.key",
    ]
    write(root, dict.fromkeys(names, "KEY=hush-hush\n"))
    write(root, {"deploy.txt": "-----BEGIN RSA PRIVATE KEY-----\nhush-hush\n", "code.py": "1\n"})
    git(root, "add", "-f", "id_rsa")
    facts = code_version(root)
    assert "hush-hush" not in str(facts)
    assert "code.py" in facts["diff"]
    commit(root)
    assert code_version(root)["dirty"] is False
    write(root, {".env": "KEY=hush-again\n"})
    facts = code_version(root)
    assert facts["dirty"] is True
    assert "hush" not in str(facts)
    assert [each["name"] for each in facts["omitted"]] == [".env"]


@pytest.mark.parametrize(
    "name", ["prod.env", ".envrc", "api-key.json", "wandb_key.txt", "service_account.json", ".htpasswd", "authkey"]
)
def test_names_of_secrets(name: str):
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "keyboard.json", "monkey.py", "api_key.py", "environment.yml", "vocab.txt"]
)
def test_names_of_other_files(name: str):
    assert not looks_secret(name)


def test_access_tokens_in_files_are_never_recorded(root: Path):
    tokens = "hf_" + "a1" * 17, "ghp_" + "b2" * 18, "AKIA" + "C3" * 8
    write(root, {f"conf{number}.yaml": f"login: {token}\n" for number, token in enumerate(tokens)})
    facts = code_version(root)
    assert [each["name"] for each in facts["omitted"]] == ["conf0.yaml", "conf1.yaml", "conf2.yaml"]
    assert not any(token in str(facts) for token in tokens)


def test_access_tokens_that_were_removed_are_never_recorded(root: Path):
    token = "hf_" + "a1" * 17
    write(root, {"changed.py": f"token = '{token}'\n", "gone.txt": f"{token}\n"})
    commit(root)
    write(root, {"changed.py": "token = None\n"})
    (root / "gone.txt").unlink()
    facts = code_version(root)
    assert [each["name"] for each in facts["omitted"]] == ["changed.py", "gone.txt"]
    assert token not in str(facts)


def test_filters_and_checks_of_git_that_fail_hide_nothing(root: Path, tmp_path: Path):
    write(root, {".gitattributes": "*.dat filter=gone\n", "a.dat": "1\n"})
    commit(root)
    for key, value in {"filter.gone.clean": "no-such-program", "filter.gone.required": "true"}.items():
        git(root, "config", key, value)
    write(root, {"a.dat": "2\n", "new.py": "1\n"})
    assert apply_patch(root, code_version(root), tmp_path / "copy") == tree_of(root)
    git(root, "config", "core.autocrlf", "input")
    git(root, "config", "core.safecrlf", "true")
    write(root, {"crlf.py": "a\r\nb\r\n"})
    assert "crlf.py" in code_version(root)["diff"]


def test_variables_of_another_repository_are_ignored(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "other").mkdir()
    git(tmp_path / "other", "init", "-q")
    head = git(root, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert code_version(root)["commit"] == head


def test_the_commit_is_recorded_even_if_the_files_cannot_be_compared(root: Path, monkeypatch: pytest.MonkeyPatch):
    head = git(root, "rev-parse", "HEAD")
    (root / ".git" / "objects" / git(root, "rev-parse", "HEAD^{tree}")[:2]).rename(root / "gone")
    facts = code_version(root)
    assert (facts["commit"], facts["dirty"]) == (head, None)


def test_large_files_are_listed_and_the_patch_still_applies(root: Path, tmp_path: Path):
    write(root, {"large.bin": b"0" * (MAX_DIFF_BYTES + 1), "small.py": "1\n"})
    facts = code_version(root)
    (large,) = facts["omitted"]
    assert (large["name"], large["bytes"], len(large["sha256"])) == ("large.bin", MAX_DIFF_BYTES + 1, 64)
    (root / "large.bin").unlink()
    assert apply_patch(root, facts, tmp_path / "copy") == tree_of(root)
    for number in range(4):
        write(root, {f"random{number}.bin": os.urandom(MAX_DIFF_BYTES // 3)})
    facts = code_version(root)
    assert len(facts["diff"].encode()) <= MAX_DIFF_BYTES
    missing = {each["name"] for each in facts["omitted"]}
    assert missing < {f"random{number}.bin" for number in range(4)}
    expected = {name: content for name, content in tree_of(root).items() if name not in missing}
    assert apply_patch(root, facts, tmp_path / "second") == expected


def test_submodules(root: Path, tmp_path: Path):
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q")
    write(library, {"lib.py": "one\n"})
    commit(library)
    git(root, "submodule", "add", "-q", str(library), "third party/lib")
    git(root, "submodule", "add", "-q", str(library), "clean")
    commit(root)
    assert code_version(root)["dirty"] is False
    inner = root / "third party/lib"
    write(inner, {"new.py": "untracked\n", ".env": "hush-hush"})
    facts = code_version(root)
    assert (facts["dirty"], [each["path"] for each in facts["submodules"]]) == (True, ["third party/lib"])
    git(inner, "checkout", "-q", "-b", "mine")
    write(inner, {"lib.py": "two\n"})
    git(inner, "commit", "-q", "-a", "-m", "only here")
    write(inner, {"lib.py": "three\n"})
    facts = code_version(root)
    (submodule,) = facts["submodules"]
    assert submodule["commit"] == git(inner, "rev-parse", "HEAD") != submodule["recorded"]
    (inner / ".env").unlink()
    assert apply_patch(root, facts, tmp_path / "copy") == tree_of(root)


def test_a_repository_within_the_code(root: Path, tmp_path: Path):
    write(root, {"plugin/code.py": "1\n"})
    git(root / "plugin", "init", "-q")
    facts = code_version(root)
    assert facts["dirty"] is True
    assert apply_patch(root, facts, tmp_path / "copy") == tree_of(root)


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_hidden_changes_are_seen(root: Path, flag: str):
    git(root, "update-index", flag, "src/changed.py")
    write(root, {"src/changed.py": "hidden = 1\n"})
    assert "+hidden = 1" in code_version(root)["diff"]


def test_a_project_in_a_folder_of_a_repository(root: Path, tmp_path: Path):
    write(root, {"src/new.py": "1\n", "elsewhere.py": "2\n"})
    facts = code_version(root / "src")
    assert "elsewhere" not in facts["diff"]
    (root / "elsewhere.py").unlink()
    assert apply_patch(root, facts, tmp_path / "copy") == tree_of(root)


def test_a_copy_that_a_repository_ignores_has_no_commit(root: Path):
    write(root, {"ignored/trainval.py": "1\n"})
    assert code_version(root / "ignored") == {"commit": None, "branch": None, "dirty": None, "diff": None}


def test_a_repository_without_commits(tmp_path: Path):
    git(tmp_path, "init", "-q")
    write(tmp_path, {"a.py": "x\n"})
    facts = code_version(tmp_path)
    assert (facts["commit"], facts["dirty"]) == (None, True)
    assert "+x" in facts["diff"]


def test_a_snapshot_describes_the_original(root: Path, tmp_path: Path):
    write(root, {"src/new.py": "NEW = 1\n"})
    expected = code_version(root)
    folder = snapshot.take(root, tmp_path / "snapshots")
    assert code_version(folder) == expected
    (folder / "trainval.py").write_text("evil\n")
    (folder / "added.py").write_text("1\n")
    assert [each["name"] for each in code_version(folder)["omitted"]] == ["trainval.py", "added.py"]
    (folder / SNAPSHOT).write_text("[" * 100_000)
    assert code_version(folder)["commit"] is None


def test_changes_in_the_snapshot_of_a_clean_tree_are_dirty(root: Path, tmp_path: Path):
    folder = snapshot.take(root, tmp_path / "snapshots")
    assert code_version(folder)["dirty"] is False
    (folder / "src/changed.py").write_text("edited\n")
    assert code_version(folder)["dirty"] is True
