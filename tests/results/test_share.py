"""What is shared: everything that a table needs, no weights, no keys, and the same bytes each time."""

import json
import zipfile
from pathlib import Path

import pytest

from results import share, table
from src.errors import DataError
from src.runs.run_dir import RunDir
from src.tables import results

KEYS = {
    "hugging face": "hf_" + "a1B2c3D4" * 4,
    "openai": "sk-proj-" + "a1B2c3D4" * 4,
    "github": "ghp_" + "a1B2c3D4" * 4,
    "aws": "AKIA" + "ABCDEFGH12345678",
    "google": "AIza" + "a1B2c3D" * 5,
    "named": "WANDB_API_KEY=" + "0123456789abcdef" * 2 + "01234567",
    "in json": '"api_key": "' + "0123456789abcdef" * 2 + '"',
    "as a flag": "--auth-token " + "0123456789abcdef" * 2,
    "of wandb, as a flag": "--wandb_key " + "0123456789abcdef" * 2 + "01234567",
    "in a header": "'Authorization': 'Bearer " + "0123456789abcdef" * 2 + "'",
    "a password of words": 'password = "a1B2c3D-and-$more"',
    "in an address": "https://me:pass@example.org/x.git",
    "private": "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
}
NO_KEYS = [
    '{"loss_per_token": 0.00012345678901234567, "token_secret": 1.2345678901234567e-05}\n',
    '"commit": "0123456789abcdef0123456789abcdef01234567"',
    "https://example.org/a@b see me@example.org",
    "password: null, password=getpass(), the password is a word that is not shown",
    "the token is a word that is not followed by one",
    '"eos_token": "<|endoftext|>", "tokenizer": "bigcode/starcoderbase-1b-with-a-long-name-1234"',
]


def write_zip(runs: Path, output: Path, *arguments: str) -> zipfile.ZipFile:
    assert share.main([str(runs), *arguments, "-o", str(output)]) == 0
    return zipfile.ZipFile(output)


def test_the_table_of_the_zip_is_that_of_the_runs(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for path in runs.glob("*/scores.jsonl"):
        (path.parent / "checkpoints" / "step-00000004").mkdir(parents=True)
        (path.parent / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"w" * 1000)
        (path.parent / "logs").mkdir()
        (path.parent / "logs" / "main.log").write_text("hello\n")
        (path.parent / "wandb").mkdir()
        (path.parent / "wandb" / "run.wandb").write_text("x")
    table.main([str(runs), "--format", "csv"])
    expected = capsys.readouterr().out
    with write_zip(runs, tmp_path / "new" / "tiny.zip", "-e", "tiny") as archive:
        names = archive.namelist()
        assert archive.read("table.csv").decode() == expected
        assert "Results of 6 runs of group tiny" in archive.read("README.txt").decode()
        archive.extractall(tmp_path / "unpacked")
    capsys.readouterr()
    assert table.main([str(tmp_path / "unpacked"), "--format", "csv"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (expected, "")
    assert {Path(name).name for name in names if name.count("/") == 1} == {
        *("exp_dict.json", "config.json", "env.json", "groups.json", "status.json", "scores.jsonl", "score_list.pkl")
    }
    assert sum(name.endswith("logs/main.log") for name in names) == 6
    assert not [
        name for name in names if "checkpoints" in name or "wandb" in name or "index" in name or "lease" in name
    ]
    assert len(results.load_rows(tmp_path / "unpacked")[0]) == 6


def test_the_same_runs_give_the_same_bytes(runs: Path, tmp_path: Path):
    write_zip(runs, tmp_path / "a.zip").close()
    for path in runs.rglob("*"):
        path.touch()
    write_zip(runs, tmp_path / "b.zip").close()
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_folders_of_wandb_on_demand(runs: Path, tmp_path: Path):
    run = next(path for path in runs.iterdir() if len(path.name) == 32)
    (run / "wandb").mkdir()
    (run / "wandb" / "run.wandb").write_text("x")
    with write_zip(runs, tmp_path / "a.zip", "--wandb") as archive:
        assert f"{run.name}/wandb/run.wandb" in archive.namelist()


@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_hidden(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str):
    run = next(path for path in runs.iterdir() if len(path.name) == 32)
    (run / "logs").mkdir()
    (run / "logs" / "main.log").write_text(f"before\n{KEYS[kind]}\nafter\n")
    with write_zip(runs, tmp_path / "a.zip") as archive:
        text = archive.read(f"{run.name}/logs/main.log").decode()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "***" in text
    for part in ("0123456789abcdef", "a1B2c3D", "ABCDEFGH", "me:pass", "abc", "more"):
        assert part not in text
    assert f"hidden: 1 times what looks like a key in {run / 'logs' / 'main.log'}" in capsys.readouterr().err


@pytest.mark.parametrize("text", NO_KEYS)
def test_other_texts_are_shared_as_they_are(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    run = next(path for path in runs.iterdir() if len(path.name) == 32)
    (run / "note.txt").write_text(text)
    with write_zip(runs, tmp_path / "a.zip") as archive:
        assert archive.read(f"{run.name}/note.txt").decode() == text
    assert capsys.readouterr().err == ""


def test_omitted_files_are_reported(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = next(path for path in runs.iterdir() if len(path.name) == 32)
    (run / "model.pth").write_bytes(b"w")
    (run / "id_rsa").write_text("x")
    (run / "bytes.dat").write_bytes(b"\0" + KEYS["github"].encode())
    (run / "link").symlink_to("/etc/hostname")
    with write_zip(runs, tmp_path / "a.zip") as archive:
        assert not [name for name in archive.namelist() if name.endswith((".pth", "id_rsa", ".dat", "link"))]
    error = capsys.readouterr().err
    for message in (
        "model.pth: looks like weights.",
        "id_rsa: its name is that of",
        "bytes.dat: holds what looks like a key",
    ):
        assert message in error


def test_a_key_in_an_experiment_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    exp = {"recipe": "toy", "hub": KEYS["hugging face"]}
    with RunDir.open(tmp_path / "runs", exp, exp) as run:
        run.set_status("done")
    with pytest.raises(DataError, match=r"exp_dict\.json: .*key"):
        share.share(tmp_path / "runs", results.load_rows(tmp_path / "runs")[0], tmp_path / "a.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "nothing half written"


def test_mistakes_are_one_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, message in [
        (["-e", "tny"], "unknown group 'tny'"),
        (["--where", "sed == 1"], "--where: unknown name 'sed'"),
    ]:
        assert share.main([str(runs), *arguments, "-o", str(tmp_path / "a.zip")]) == 1
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1
    assert share.main([str(runs), "-o", "/proc/version/x.zip"]) == 1
    assert "/proc/version/x.zip: cannot write: File exists." in capsys.readouterr().err
    assert not (tmp_path / "a.zip").exists()
    assert json.loads((next(runs.glob("*/status.json"))).read_text())["state"] == "done"
