"""A world small enough to learn in seconds: data on disk, experiments over them, and the command line run on both."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trainval
from src.experiments.grid import ref
from src.files import new_directory
from tests import warm

LONGEST = 600
"""Seconds that no command of these tests takes, on however busy a machine."""
ROOT = Path(trainval.__file__).parent
COLOURS = ["red", "blue", "green", "pink", "grey", "black", "white", "brown"]
THINGS = [f"thing{i}" for i in range(16)]
SPECIAL = [
    "<|endoftext|>",
    "<|pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|C|>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    "<unk>",
]

BASE: dict[str, Any] = {
    "recipe": "lm",
    "seed": 0,
    "model": {
        "name": "gpt_bigcode",
        "tokenizer": "toy_tokenizer",
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 2,
        "max_positions": 64,
    },
    "data": {"name": "text", "corpus": "toy_text", "sequence_tokens": 16},
    "loop": {"steps": 12, "sequences_per_step": 8, "micro_batch": 2, "learning_rate": 1e-2, "eval_every": 4},
}
CROSSATTN: dict[str, Any] = {
    "recipe": "crossattn",
    "seed": 0,
    "model": {"name": "cross_attention", "num_layers": 1, "stride": 1, "base": ref(BASE)},
    "data": {"name": "qa", "corpus": "toy_qa", "context_tokens": 16, "sequence_tokens": 16, "loss_on": "answer"},
    "loop": {"steps": 80, "sequences_per_step": 16, "micro_batch": 16, "learning_rate": 1e-2, "eval_every": 40},
    "answers": {"questions": 16, "max_new_tokens": 4, "metrics": [{"name": "squad"}]},
}
GROUPS = {"base": [BASE], "crossattn": [CROSSATTN]}


def write_data(data: Path) -> Path:
    """Write toy_tokenizer, toy_text and toy_qa below `data`; returns `data`."""
    _write_tokenizer(data / "toy_tokenizer")
    facts = [(thing, COLOURS[(i * 5 + j) % 8]) for i, thing in enumerate(THINGS) for j in range(4)]
    splits = {"train": [f for i, f in enumerate(facts) if i % 4], "val": facts[::4]}
    with new_directory(data / "toy_text") as folder:
        for split, rows in splits.items():
            _write_rows(folder / f"{split}.jsonl", [{"text": f"the {t} is {c} . " * 8, "source": t} for t, c in rows])
    with new_directory(data / "toy_qa") as folder:
        for split, rows in splits.items():
            documents = [
                {
                    "context": f"the {t} is {c} .",
                    "question": "what is it ?",
                    "answer": c,
                    "sample_idx": i,
                    "dataset": "toy",
                }
                for i, (t, c) in enumerate(rows)
            ]
            _write_rows(folder / f"{split}.jsonl", documents)
    return data


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_tokenizer(final: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *COLOURS, *THINGS, "the", "is", ".", "what", "it", "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    with new_directory(final) as folder:
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|endoftext|>",
            bos_token="<|endoftext|>",
            pad_token="<|pad|>",
            unk_token="<unk>",
            extra_special_tokens=SPECIAL[2:8],
        ).save_pretrained(folder)


def main(arguments: Sequence[str], groups: dict[str, Any], folder: Path) -> int:
    """trainval.main in this process on `groups`, with data and runs below `folder`; returns the exit code."""
    module = types.ModuleType("exp_configs")
    module.EXP_GROUPS = groups  # type: ignore[attr-defined]
    before = sys.modules.get("exp_configs")
    sys.modules["exp_configs"] = module
    try:
        return trainval.main([*arguments, "--data_path", str(folder / "data"), "-sb", str(folder / "runs")])
    finally:
        del sys.modules["exp_configs"]
        if before is not None:
            sys.modules["exp_configs"] = before


def project(folder: Path, exp_configs: str) -> Path:
    """A copy of the project below `folder` with another exp_configs.py; src is linked."""
    root = folder / "project"
    root.mkdir()
    (root / "src").symlink_to(ROOT / "src")
    for name in ("trainval.py", "job_configs.py"):
        shutil.copy(ROOT / name, root)
    (root / "exp_configs.py").write_text(exp_configs)
    return root


def command(root: Path, arguments: Sequence[str], folder: Path, processes: int = 1) -> list[str]:
    """The command line that runs trainval.py of `root`, under torchrun for several processes."""
    python = [sys.executable]
    if processes > 1:
        python += [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(processes),
            "--master-port",
            "0",
            "--rdzv-backend",
            "c10d",
        ]
        python += ["--rdzv-endpoint", "localhost:0"]
    return [
        *python,
        str(root / "trainval.py"),
        *arguments,
        "--data_path",
        str(folder / "data"),
        "-sb",
        str(folder / "runs"),
    ]


def run(
    root: Path, arguments: Sequence[str], folder: Path, processes: int = 1, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end, in processes forked from one that has the libraries loaded: tests/warm.py."""
    return finished(command(root, arguments, folder, processes), environment() if variables is None else variables)


def finished(
    words: Sequence[str], variables: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that tests/warm.py knows to its end, with nothing but `variables` in its environment."""
    with tempfile.TemporaryDirectory() as log_folder:
        out, errors = Path(log_folder, "out"), Path(log_folder, "errors")
        process = warm.Process(words, variables, cwd, out, errors)
        try:
            code = process.wait(timeout=LONGEST)
        except TimeoutError as error:
            error.add_note(f"{out.read_text()}{errors.read_text()}")
            raise
        finally:
            process.kill()
        return subprocess.CompletedProcess(list(words), code, out.read_text(), errors.read_text())


def run_cold(root: Path, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end as a user does: it loads what it needs. For what loads little."""
    return subprocess.run(
        command(root, arguments, folder), capture_output=True, text=True, env=environment(), check=False
    )


def kill_midway(root: Path, arguments: Sequence[str], folder: Path, exp_id: str) -> None:
    """Start or continue, and kill it when a further checkpoint is there."""
    checkpoints = folder / "runs" / exp_id / "checkpoints"
    before = max(checkpoints.glob("step-*"), default=checkpoints)
    process = warm.Process(command(root, arguments, folder), environment(), None, folder / "log")
    until = time.monotonic() + LONGEST
    while max(checkpoints.glob("step-*"), default=before) == before:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < until
        time.sleep(0.0005)
    process.kill()
    process.wait(LONGEST)


def environment() -> dict[str, str]:
    """One thread per process, nothing of a surrounding torchrun."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
        "OMP_NUM_THREADS": "1"
    }


def rows(folder: Path, exp_id: str) -> list[dict[str, Any]]:
    """The score rows of a run."""
    return [json.loads(line) for line in (folder / "runs" / exp_id / "scores.jsonl").read_text().splitlines()]


def evaluations(folder: Path, exp_id: str) -> list[dict[str, Any]]:
    """The score rows of a run in which it was evaluated."""
    return [row for row in rows(folder, exp_id) if "val_loss" in row]
