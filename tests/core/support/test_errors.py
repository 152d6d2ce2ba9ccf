"""Every command of data_prep and results prints the errors of the user as lines `error: ...`, without a traceback, and
exits with 1."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from src.errors import ConfigError, print_errors

ROOT = Path(__file__).resolve().parents[3]
ENCODING = ["--embedding_model", "none", "--maximum_input_length", "8", "--data_cache_path", "data", "--corpus", "none"]
BAD_INPUT = {
    "data_prep.interleaved.digit_pages": ["--pages", "0"],
    "data_prep.assistants.chat_tokenizer": [
        "--data_path",
        "data",
        "--from",
        "./none",
        "--template",
        "oasst",
        "--name",
        "new",
    ],
    "data_prep.assistants.check_dataset_counts": ["--datasets", "none"],
    "data_prep.llama2c": ["none.bin", "none.bin"],
    "data_prep.metadata.prepare": [
        "--data_path",
        "data",
        "--name",
        "toy",
        "--train",
        "none.jsonl",
        "--val",
        "none.jsonl",
    ],
    "data_prep.metadata.validation": ["none", "--columns", "html"],
    "data_prep.metadata.weights": ["none"],
    "data_prep.metadata.wiki_index": ["none.xml"],
    "data_prep.t5.natural_instructions": ["none"],
    "data_prep.assistants.oasst_trees": ["counts", "none.jsonl"],
    "data_prep.t5.pmi_vocabulary": ["--data_path", "data", "--name", "toy", "--train", "none.txt"],
    "data_prep.assistants.prepare_conversations": ["--form", "?", "--train", "x", "--name", "x"],
    "data_prep.crossattn.prepare_qa": [
        "--data_path",
        "data",
        "--name",
        "toy",
        "--train",
        "none.json",
        "--val_percent",
        "25",
    ],
    "data_prep.t5.prepare_task": ["--data_path", "data", "--task", "none", "--train", "none.tsv"],
    "data_prep.crossattn.preproc_nq": [*ENCODING, "--batch_size", "0"],
    "data_prep.assistants.show_conversations": ["no_such_group"],
    "data_prep.assistants.arithmetic": ["--data_path", "/dev/null/x"],
    "data_prep.assistants.stdlib_conversations": ["--data_path", "/dev/null/x"],
    "data_prep.gguf": ["none.gguf", "--name", "none"],
    "data_prep.metadata.html_folder": ["none", "--url", "u/", "--train", "t.jsonl", "--val", "v.jsonl"],
    "data_prep.metadata.stdlib_pages": ["--data_path", "/dev/null/x"],
    "data_prep.crossattn.stdlib_qa": ["--data_path", "data", "--vocab_size", "100"],
    "data_prep.t5.t5_tokenizer": ["--data_path", "data", "--name", "toy", "--from", "./none"],
    "data_prep.interleaved.convert": ["wd", "none.tar", "--output", "out"],
    "data_prep.interleaved.index": ["none.tar"],
    "data_prep.tokenize": ["--data_path", "data", "--name", "toy", "--tokenizer", "none", "--train", "none.txt"],
    "results.rollouts": ["none"],
    "results.answers": ["none"],
    "results.clean": ["none"],
    "results.compare": ["none", "none"],
    "results.diff": ["aaaa", "bbbb", "--runs", "none"],
    "results.lineage": ["none"],
    "results.metadata": ["none"],
    "results.note": ["none"],
    "results.plot": ["none"],
    "results.progress": ["none"],
    "results.report": ["none"],
    "results.rescore": ["none.jsonl", "--metrics", "squad"],
    "results.pages.run_page": ["none"],
    "results.share": ["none", "-o", "shared.zip"],
    "results.table": ["none"],
}


def test_every_command_is_here():
    files = [path.relative_to(ROOT) for room in ("data_prep", "results") for path in (ROOT / room).rglob("*.py")]
    files = [path for path in files if path.parts[:2] not in (("results", "runs"), ("results", "data"))]
    commands = {
        ".".join(path.with_suffix("").parts)
        for path in files
        if '__name__ == "__main__"' in (ROOT / path).read_text(encoding="utf-8")
    }
    # tests/results/pages/test_dashboard.py gives the dashboard a port that is taken.
    assert commands - {"results.dashboard"} == BAD_INPUT.keys()


@pytest.mark.parametrize("command", BAD_INPUT)
def test_a_command_names_the_error_and_exits_with_1(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert import_module(command).main(BAD_INPUT[command]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err
    assert all(line.startswith("error: ") for line in err.splitlines())


@pytest.mark.parametrize("command", ["trainval.py --list", "-m data_prep.t5.prepare_task --help"])
def test_a_reader_can_exit(command: str):
    """As `| head` does: the pipe is closed before the first line."""
    process = subprocess.Popen(
        [sys.executable, *command.split()], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == (141 if "--list" in command else 0)  # argparse ends well in any case


@pytest.mark.parametrize("command", ["-m results.plot", "-m data_prep.tokenize", "-m src.sweeps", "trainval.py --list"])
def test_a_forgotten_environment_is_a_line(command: str):
    done = subprocess.run(
        [sys.executable, "-S", *command.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: the package '\w+' is not installed for .*source \.venv/bin/activate\. .*\n", done.stderr
    )


def test_each_line_of_an_error_is_marked(capsys: pytest.CaptureFixture[str]):
    @print_errors
    def main() -> int:
        raise ConfigError("one\ntwo")

    assert main() == 1
    assert capsys.readouterr().err == "error: one\nerror: two\n"
