"""Peers of `benchmarks.gpu`: a bare loop and Hugging Face's Trainer; and a large model that reads encoded contexts."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from src.experiments.config import Places
from src.experiments.registry import MODELS, bind
from src.files import new_directory
from src.systems.crossattn.model.config import Config
from src.systems.crossattn.model.layers import CrossAttentionLM
from src.training.loss import context_lm_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA = "benchmark_llama"
STEPS, WORDS = 10, 30
ATTENTION = re.compile("attention|fmha|flash|sdpa", re.IGNORECASE)
"""Names of its kernels: torch's, CUTLASS's, FlashAttention's and cuDNN's."""


@dataclass(frozen=True)
class Work:
    """What both do: the model of an experiment in its precision, on batches of its shape, with AdamW."""

    exp: Mapping[str, Any]
    data: Path
    compiled: bool

    def model(self) -> Any:
        """With weights of its own."""
        return bind(MODELS, dict(self.exp["model"])).build(Places(self.data, self.data)).train()

    def ids(self, rows: int) -> Tensor:
        """(rows, T), of tokens that every model here has."""
        return torch.randint(0, WORDS, (rows, self.exp["data"]["sequence_tokens"]))

    @property
    def passes(self) -> int:
        """Micro-batches per step."""
        return self.exp["loop"]["sequences_per_step"] // self.exp["loop"]["micro_batch"]


def write_llama(folder: Path, tokenizer: Path, sizes: Mapping[str, Any]) -> None:
    """A Llama with random weights, and the tokenizer of a folder."""
    import transformers

    llama_tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tokenizer)
    config = transformers.LlamaConfig(
        vocab_size=64, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, **sizes
    )
    with new_directory(folder) as new:
        transformers.LlamaForCausalLM(config).save_pretrained(new)
        llama_tokenizer.save_pretrained(new)


def bare_tokens_per_second(work: Work) -> float:
    """Speed of the model with AdamW and autocast, on tokens that are already on the device."""
    loop, model = work.exp["loop"], work.model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), loop["learning_rate"], fused=DEVICE == "cuda")
    run: Any = torch.compile(model) if work.compiled else model
    ids = work.ids(loop["micro_batch"]).to(DEVICE)

    def step() -> None:
        for _ in range(work.passes):
            with torch.autocast(DEVICE, getattr(torch, loop["precision"])):
                loss: Tensor = run(input_ids=ids, labels=ids).loss
            (loss / work.passes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return work.passes * ids.numel() / seconds(step, STEPS)


def trainer_tokens_per_second(work: Work, folder: Path) -> float:
    """Of transformers' Trainer, over the steps after the first three."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    loop, ids = work.exp["loop"], work.ids(work.exp["loop"]["sequences_per_step"] * (STEPS + 3))
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS + 3,
        per_device_train_batch_size=loop["micro_batch"],
        gradient_accumulation_steps=work.passes,
        learning_rate=loop["learning_rate"],
        bf16=loop["precision"] == "bfloat16",
        fp16=loop["precision"] == "float16",
        use_cpu=DEVICE == "cpu",
        torch_compile=work.compiled,
        optim="adamw_torch_fused" if DEVICE == "cuda" else "adamw_torch",
        max_grad_norm=1.0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model=work.model(), args=arguments, train_dataset=rows, callbacks=[Clock()]).train()  # pyright: ignore[reportArgumentType]
    return STEPS * loop["sequences_per_step"] * ids.shape[1] / (times[-1] - times[-1 - STEPS])


def read_encoded(sizes: Mapping[str, Any], rows: int, tokens: int, positions: int) -> dict[str, Any]:
    """Training steps of five cross-attention layers over a frozen GPTBigCode of `sizes`, on `rows` of `tokens` that
    read contexts of `positions`, and of a third and more of these."""
    from torch.profiler import ProfilerActivity, profile
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    base: Any = GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=49_152, n_positions=tokens, **sizes))
    base.to(torch.bfloat16)
    layers = min(5, sizes["n_layer"])
    config = Config(base=bind(MODELS, {"name": "hf", "path": "not-read"}), num_layers=layers, stride=1)
    model = CrossAttentionLM(config, base).to(DEVICE).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4, fused=DEVICE == "cuda")
    facts: dict[str, Any] = {"billions of frozen parameters": round(sum(p.numel() for p in base.parameters()) / 1e9, 2)}
    for name, batch in _encoded_batches(rows, tokens, positions, sizes["n_embd"]):

        def step(batch: Mapping[str, Tensor] = batch) -> None:
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = context_lm_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        rate = rows * tokens / seconds(step, STEPS)
        with profile(activities=[ProfilerActivity.CUDA if DEVICE == "cuda" else ProfilerActivity.CPU]) as profiler:
            step()
        kernels = {event.key[:60] for event in profiler.key_averages() if ATTENTION.search(event.key)}
        facts[name] = {"tokens_per_second": round(rate), "kernels": sorted(kernels)}
    if DEVICE == "cuda":
        facts["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    return facts


def _encoded_batches(rows: int, tokens: int, positions: int, width: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    ids = torch.randint(0, WORDS, (rows, tokens), device=DEVICE)
    seen, loss_mask = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool)
    loss_mask[:, 0] = False
    states = torch.randn(rows, positions, width, device=DEVICE, dtype=torch.bfloat16)
    lengths = torch.linspace(positions // 3, positions, rows, device=DEVICE).long()
    for name, mask in (
        ("contexts of one length", torch.ones(rows, positions, dtype=torch.bool, device=DEVICE)),
        ("contexts of several", torch.arange(positions, device=DEVICE) < lengths[:, None]),
    ):
        batch = {
            "input_ids": ids,
            "attention_mask": seen,
            "loss_mask": loss_mask,
            "context_hidden": states,
            "context_mask": mask,
        }
        yield name, batch


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Seconds per call, after three warm-up calls."""

    def wait(times: Iterable[int]) -> float:
        for _ in times:
            work()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    began = wait(range(3))
    return (wait(range(rounds)) - began) / rounds
