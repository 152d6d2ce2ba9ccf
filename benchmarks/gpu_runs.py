"""Experiments of `benchmarks.gpu`: their models and data, trainings as processes, and what these have written."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_peers
from src.data.jsonl import SPLITS
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.files import new_directory
from tests import toy

ROOT = Path(__file__).resolve().parents[1]
GPU = torch.cuda.is_available()
IS_SMALL = GPU and torch.cuda.get_device_properties(0).total_memory < 40 * 2**30
T5_TOKENIZER = "toy_t5_tokenizer"
T5: dict[str, Any] = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {
        "name": "t5",
        "random": {
            "tokenizer": T5_TOKENIZER,
            "hidden_size": 32,
            "feed_forward_size": 64,
            "num_layers": 2,
            "num_heads": 2,
        },
    },
    "data": {"name": "span_corruption", "corpus": "toy_text", "input_tokens": 24},
    "loop": {**toy.BASE["loop"]},
}
TINY: dict[str, dict[str, Any]] = {
    "lm": toy.BASE,
    "crossattn": {k: v for k, v in toy.CROSSATTN.items() if k != "answers"},
    "t5": T5,
}
# About 1.1 billion parameters, and T5 v1.1-base.
_LARGE_LM = {"hidden_size": 2048, "num_layers": 10 if IS_SMALL else 21, "num_heads": 16, "max_positions": 1024}
_LARGE_T5 = {
    "hidden_size": 768,
    "feed_forward_size": 2048,
    "num_layers": 12,
    "num_heads": 12,
    "vocabulary_multiple": 32_128,
}
_LONG_TEXTS = {"data.corpus": "long_texts", "data.sequence_tokens": 1024 if GPU else 16}
SIZES: dict[str, dict[str, Any]] = {
    "lm": {**({"model": {**toy.BASE["model"], **_LARGE_LM}} if GPU else {}), **_LONG_TEXTS},
    "llama": {"model": {"name": "hf", "path": gpu_peers.LLAMA}, **_LONG_TEXTS},
    "t5": {"model.random": {**T5["model"]["random"], **_LARGE_T5}, "data.input_tokens": 512} if GPU else {},
}
LLAMA = (
    {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 11 if IS_SMALL else 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    }
    if GPU
    else {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
"""The shape of TinyLlama, of 1.0 billion parameters without its vocabulary."""


def large(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The largest model of a kind for this device, for a few steps. name: key of `SIZES`."""
    loop = {"loop.steps": 40, "loop.eval_every": 40, "loop.sequences_per_step": 32, "loop.micro_batch": 8}
    return override(
        TINY.get(name, toy.BASE),
        {**SIZES[name], **(loop if GPU else {"loop.steps": 12, "loop.eval_every": 12}), **changes},
    )


def begin(
    folder: Path, exps: Sequence[Mapping[str, Any]], *words: str, without_gpu: bool = False
) -> subprocess.Popen[str]:
    if not (folder / "data").exists():
        folder.mkdir(exist_ok=True)
        (folder / "data").symlink_to(folder.parent / "data")
    groups = {"one": exps, "base": [toy.BASE]}
    call = f"toy.main({['-e', 'one', *words]!r}, {groups!r}, Path({str(folder)!r}))"
    code = f"import sys; from pathlib import Path; from tests import toy; sys.exit({call})"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if without_gpu else None
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(
    folder: Path, exps: Sequence[Mapping[str, Any]], *words: str, kill_after: int = 0, without_gpu: bool = False
) -> None:
    """Train experiments to the end, or kill them once the first has a checkpoint of step `kill_after`."""
    process = begin(folder, exps, *words, without_gpu=without_gpu)
    if kill_after:
        while (
            process.poll() is None
            and not (run_folder(folder, exps[0]) / "checkpoints" / f"step-{kill_after:08}").exists()
        ):
            time.sleep(0.001)
        process.kill()
    output, _ = process.communicate()
    assert kill_after or process.returncode == 0, output[-4000:]


def wait_for_scores(process: subprocess.Popen[str], folder: Path, exp: Mapping[str, Any]) -> None:
    while not (run_folder(folder, exp) / "scores.jsonl").exists() or not scores(folder, exp):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def losses(folder: Path, exp: dict[str, Any], without_gpu: bool = False) -> list[float]:
    train(folder, [exp], without_gpu=without_gpu)
    return [row["train_loss"] for row in scores(folder, exp)]


def run_folder(folder: Path, exp: Mapping[str, Any]) -> Path:
    return folder / "runs" / exp_id(dict(exp))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scores(folder: Path, exp: Mapping[str, Any]) -> list[dict[str, Any]]:
    return rows(run_folder(folder, exp) / "scores.jsonl")


def perf(folder: Path, exp: Mapping[str, Any], *names: str) -> dict[str, Any]:
    row = rows(run_folder(folder, exp) / "perf.jsonl")[-1]
    return {name: row[name] for name in names if name in row}


def weights(folder: Path, exp: Mapping[str, Any]) -> bytes:
    return (max((run_folder(folder, exp) / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()


def write_long_texts(data: Path) -> None:
    """`toy_text` with documents of 1,280 tokens, so that each split has several sequences of 1,024."""
    with new_directory(data / "long_texts") as folder:
        for split in SPLITS:
            short = rows(data / "toy_text" / f"{split}.jsonl")
            documents = [{**row, "text": row["text"] * 32} for row in short]
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))


def write_t5_tokenizer(data: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sentinels = [f"<extra_id_{n}>" for n in range(100)]
    words = [
        "<pad>",
        "</s>",
        "<unk>",
        *toy.COLOURS,
        *toy.THINGS,
        "the",
        "is",
        ".",
        "what",
        "it",
        "?",
        *reversed(sentinels),
    ]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "extra_special_tokens": sentinels}
    tokenizer.add_special_tokens([*special["extra_special_tokens"], "<pad>", "</s>", "<unk>"])
    with new_directory(data / T5_TOKENIZER) as folder:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
