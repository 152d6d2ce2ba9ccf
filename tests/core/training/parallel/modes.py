"""A project with small experiments, run to the end, stopped or continued in every mode of sharing a model."""

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from src.experiments.identity import exp_id
from src.files import new_directory
from tests import toy, warm

EXP: dict[str, Any] = copy.deepcopy(toy.BASE)
EXP["loop"] |= {"steps": 6, "sequences_per_step": 8, "micro_batch": 4, "eval_every": 3, "max_grad_norm": 0.5}
TWICE = copy.deepcopy(EXP)
TWICE["loop"]["micro_batch"] = 2
LONG = copy.deepcopy(EXP)
LONG["loop"] |= {"steps": 60, "eval_every": 20}
LONGER = copy.deepcopy(EXP)
LONGER["loop"] |= {"steps": 600, "eval_every": 300}
WIDE = copy.deepcopy(EXP)
WIDE["loop"] |= {"steps": 9, "sequences_per_step": 12, "micro_batch": 2}
UNEVEN = copy.deepcopy(toy.CROSSATTN)
UNEVEN["data"] |= {"corpus": "uneven_qa"}
UNEVEN["loop"] |= {"steps": 2, "sequences_per_step": 6, "micro_batch": 2, "eval_every": 2}
AT_ONCE = copy.deepcopy(UNEVEN)
AT_ONCE["loop"]["micro_batch"] = 6
PASSES = copy.deepcopy(UNEVEN)
PASSES["loop"] |= {"steps": 1, "sequences_per_step": 32, "micro_batch": 16, "eval_every": 1}
SKIPS = copy.deepcopy(LONG)
SKIPS["loop"]["divergence"] = {
    "window": 16,
    "noise_floor": 1e-9,
    "loss_deviations": 0.01,
    "loss_steps": 1,
    "on_loss_spike": "skip_batch",
}
HALF = copy.deepcopy(EXP)
HALF["loop"]["precision"] = "bfloat16"
HALF["model"]["dropout_rate"] = 0.1
CHUNKS = copy.deepcopy(EXP)
CHUNKS["loop"]["cross_entropy_chunk_tokens"] = 40
LLAMA = copy.deepcopy(TWICE)
LLAMA["model"] = {"name": "hf", "path": "toy_llama"}
LLAMA["loop"]["learning_rate"] = 1e-3
ON_LLAMA = copy.deepcopy(UNEVEN)
ON_LLAMA["model"]["base"] = {"name": "hf", "path": "toy_llama_dropout"}
ADAPTERS = copy.deepcopy(LLAMA)
ADAPTERS["model"] = {"name": "lora", "rank": 2, "alpha": 4.0, "target_modules": ["q_proj"], "base": LLAMA["model"]}
GROUPED = copy.deepcopy(EXP)
GROUPED["loop"] |= {"layerwise_decay": 0.8, "weight_decay": 0.1, "groups": [{"match": "wte", "learning_rate": 3e-2}]}
MUON = copy.deepcopy(TWICE)
MUON["loop"] |= {"optimizer": "muon", "muon_learning_rate": 3e-2, "groups": GROUPED["loop"]["groups"]}
EXPERIMENTS = {
    "base": toy.BASE,
    "once": EXP,
    "twice": TWICE,
    "long": LONG,
    "longer": LONGER,
    "wide": WIDE,
    "uneven": UNEVEN,
    "uneven at once": AT_ONCE,
    "passes": PASSES,
    "skips": SKIPS,
    "half": HALF,
    "chunks": CHUNKS,
    "llama": LLAMA,
    "on llama": ON_LLAMA,
    "adapters": ADAPTERS,
    "grouped": GROUPED,
    "muon": MUON,
}
"""Uneven has three micro-batches a step, and answers of one to four words; its model stands on that of base, frozen.
On two processes twice accumulates two micro-batches, once and long none. Wide can be shared by one, two or three
processes. Passes evaluates batches of 16 and of 4 questions, whose contexts are read 8 at a time. Skips leaves a batch
out. Half is once in bfloat16, with dropout of attention, whose backward pass autocast would change. Chunks is once,
with the logits of 40 tokens at a time. Llama is twice, of a pretrained Llama; adapters trains that of its queries. On
llama is uneven on one, with dropout of attention in the new layers. Grouped is once with learning rates by layer and a
group of its own for embeddings; muon is twice with Muon and that group."""
FIRST, LAST = "step-00000003", "step-00000006"
RESOURCES = sorted(path.stem for path in (toy.ROOT / "resources").glob("ds_config_*.json"))
MODES = ["replicated", "fsdp", "zero1", "zero2", "zero3"]


def pairs(modes: Sequence[str], *fewer: str) -> list[Any]:
    """All modes; those that are not in `fewer` only in `make test-matrix`."""
    return [mode if mode in fewer else pytest.param(mode, marks=pytest.mark.matrix) for mode in modes]


class Modes:
    """The project, and its runs by mode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _write_uneven(toy.write_data(folder / "data"))
        _write_llama(folder / "data")
        self.root = toy.project(folder, f"EXP_GROUPS = { ({name: [exp] for name, exp in EXPERIMENTS.items()})!r}\n")
        for stage in (1, 2, 3):
            self.settings(f"zero{stage}", {"stage": stage})
        self.settings("zero3_plain", {"stage": 3, "memory_efficient_linear": False})
        self.settings("offload", {"stage": 2, "offload_optimizer": {"device": "cpu"}})
        for name in RESOURCES:
            shutil.copy(toy.ROOT / "resources" / f"{name}.json", folder)

    def settings(self, name: str, zero: dict[str, Any]) -> None:
        """The DeepSpeed json of a mode."""
        (self.folder / f"{name}.json").write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))

    def command(self, mode: str, group: str = "once", processes: int = 2, more: Sequence[str] = ()) -> list[str]:
        """What starts or continues it."""
        if mode not in ("replicated", "fsdp"):
            pytest.importorskip("deepspeed", reason="needs deepspeed")
        words = {"replicated": [], "fsdp": ["--fsdp"]}.get(mode, ["--deepspeed", str(self.folder / f"{mode}.json")])
        return toy.command(self.root, ["-e", group, *words, *more], self.folder, processes=processes)

    def begin(self, mode: str, group: str = "once", processes: int = 2, more: Sequence[str] = ()) -> warm.Process:
        """Start or continue it; what it prints goes to `log`."""
        self.log.unlink(missing_ok=True)
        return warm.Process(self.command(mode, group, processes, more), toy.environment(), None, self.log)

    @property
    def log(self) -> Path:
        """What the last start has printed."""
        return self.folder / "log"

    def start(self, mode: str, group: str = "once", processes: int = 2, more: Sequence[str] = ()) -> str:
        """Run it to the end; what it printed, "" where all went well."""
        process = self.begin(mode, group, processes, more)
        try:
            code = process.wait(timeout=600)
        finally:
            process.kill()
        return self.log.read_text() if code else ""

    def run(self, group: str = "once") -> Path:
        """The save directory."""
        return self.folder / "runs" / exp_id(EXPERIMENTS[group])

    def trained(self, mode: str, group: str = "once", processes: int = 2) -> Path:
        """The save directory of a finished run, moved aside."""
        folder = self.folder / f"{mode}-{group}-{processes}"
        if not folder.exists():
            assert self.start(mode, group, processes) == ""
            shutil.move(self.run(group), folder)
        return folder

    def cut_back(self, mode: str, group: str = "once", processes: int = 2) -> Path:
        """The run as it was after the last but one of its checkpoints, which is returned."""
        shutil.rmtree(self.run(group), ignore_errors=True)
        shutil.copytree(self.trained(mode, group, processes), self.run(group))
        return self.drop_last(group)

    def drop_last(self, group: str = "once") -> Path:
        """The run without its last checkpoint and its end; the checkpoint that it goes on from."""
        *_, before, last = sorted((self.run(group) / "checkpoints").glob("step-*"))
        shutil.rmtree(last)
        (self.run(group) / "status.json").unlink()
        return before


def _write_uneven(data: Path) -> None:
    rows = [
        {
            "context": f"the {t} is {c} .",
            "question": "what is it ?",
            "answer": " ".join([c] * (1 + (i + j) % 4)),
            "dataset": "toy",
        }
        for i, t in enumerate(toy.THINGS)
        for j, c in enumerate(toy.COLOURS[:3])
    ]
    lines = [json.dumps({**row, "sample_idx": number}) + "\n" for number, row in enumerate(rows)]
    with new_directory(data / "uneven_qa") as folder:
        (folder / "train.jsonl").write_text("".join(lines[20:]))
        (folder / "val.jsonl").write_text("".join(lines[:20]))


def _write_llama(data: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed

    tokenizer = AutoTokenizer.from_pretrained(data / "toy_tokenizer")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, attention_bias=True, tie_word_embeddings=True, **sizes
    )
    for name, dropout in {"toy_llama": 0.0, "toy_llama_dropout": 0.1}.items():
        config.attention_dropout = dropout
        set_seed(0)
        with new_directory(data / name) as folder:
            LlamaForCausalLM(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)


def scores(run: Path) -> list[dict[str, float]]:
    """The score rows."""
    return [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]


def weights(run: Path) -> bytes:
    """The file of the last checkpoint."""
    return (max((run / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()
