"""All checks that need a GPU, in one command of at most 20 minutes: `python -m benchmarks.gpu [--only ITEM ..]
[-o FOLDER]`.

Each item runs in its own process with a time limit, so that a failure does not stop the rest, and writes ITEM.json to
the folder; at the end, table.md there and the last lines have one table for the docs. GPUs with less than 40 GiB get
models of half the size. Without a GPU, tiny models replace the large ones, and items that need a GPU are reported as
not tried. The command needs only torch, transformers, accelerate, pydantic and orjson
(deepspeed for its item), and no network: `make gpu-wheels` packs the packages missing on a machine with torch,
transformers and accelerate.

device           the device, and the speed of large matrix products against the table of peaks
precisions       the losses of the same steps on the GPU and the CPU, in float32, bfloat16 and float16
overflow         float16 gradients overflow at first: these steps are skipped and counted, the next ones train
resume           killed after a checkpoint and resumed: bit-exact, for three recipes in each precision
stop             SIGTERM in each precision: a checkpoint of the last complete step, and exit code 75
sharded          FSDP2 and ZeRO-3 with one process: the same losses as a replicated model, and peak memory
speed_lm         1.1 billion parameters (GPTBigCode), compiled and not: tokens a second, also as a share of a bare
                 loop's and of Hugging Face's Trainer, MFU, memory, waits
speed_llama      the same for a Llama
speed_t5         the same for T5-base, without peers
loading          seconds that a step of 16 micro-batches waits for data
synchronisations times that a step waits for the device
cross_attention  3 billion frozen parameters that read encoded contexts: tokens a second, memory, attention kernels
checkpoint       how long a checkpoint blocks the training
"""

import argparse
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from benchmarks import gpu_peers, gpu_runs
from benchmarks.gpu_runs import GPU, ROOT
from src.experiments.grid import override
from src.training.monitoring.flops import peak_flops
from tests import toy

PRECISIONS = (
    "float32",
    *(["bfloat16"] if not GPU or torch.cuda.is_bf16_supported(including_emulation=False) else []),
    *(["float16"] if GPU else []),
)
HALF = "bfloat16" if "bfloat16" in PRECISIONS else "float16"
"""Precision of the large models."""
SECONDS = 360
"""Time limit of an item."""
TOTAL_SECONDS = 1200
"""Time limit of all items."""
ROW_EVERY = ("--log_every", "10" if GPU else "4")
"""The last row of perf.jsonl has the speed of the last of these steps alone, without compilation and warm-up."""
TARGETS = {"lm": 0.50, "llama": 0.50, "t5": 0.45}
"""MFU in `HALF` with compile."""


class SkipItem(Exception):
    """A requirement of the item is missing on this machine; the message names it."""


def main() -> int:
    """Run the items, print a line for each. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=list(ITEMS), metavar="ITEM")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "results" / "gpu", help="a folder for ITEM.json")
    parser.add_argument("--item", choices=ITEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.item:
        return _run_item(options.item, options.output)
    began, reports = time.monotonic(), dict[str, dict[str, Any]]()
    for name in options.only:
        seconds_left = TOTAL_SECONDS - (time.monotonic() - began)
        reports[name] = _start_item(name, options.output, min(SECONDS, seconds_left))
    table = _table(reports)
    (options.output / "table.md").write_text(table)
    print(f"\n{table}", end="")
    return int("failed" in {report["state"] for report in reports.values()})


def _table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of all results."""
    lines = ["| item | state | seconds | results |", "|---|---|---|---|"]
    for name, report in reports.items():
        reason = report.get("reason", "").strip().splitlines()[-1:]
        cell = "; ".join(_flatten(report["found"]) if "found" in report else reason).replace("|", "/")
        lines.append(f"| {name} | {report['state']} | {report['seconds']:.0f} | {cell} |")
    return "\n".join(lines) + "\n"


def _flatten(value: Any, name: str = "") -> list[str]:
    """ "NAME VALUE" of each number or text in nested results."""
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in _flatten(item, f"{name} {key}".strip())]
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"]


def _start_item(name: str, output: Path, seconds: float) -> dict[str, Any]:
    """The report of an item, which gets at most `seconds`."""
    result = output / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--item", name, "-o", str(output.resolve())]
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        log_text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        log_text = f"{process.communicate()[0]}\ntook more than {seconds:.0f} s"
    report: dict[str, Any] = (
        json.loads(result.read_text()) if result.exists() else {"state": "failed", "reason": log_text[-4000:]}
    )
    report["seconds"] = round(time.monotonic() - began, 1)
    result.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"{name:17}{report['state']:11}{report['seconds']:6.1f} s  "
        f"{json.dumps(report.get('found', report.get('reason')))}",
        flush=True,
    )
    return report


def _run_item(name: str, output: Path) -> int:
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            gpu_runs.write_t5_tokenizer(toy.write_data(folder / "data"))
            gpu_runs.write_long_texts(folder / "data")
            result = {"state": "passed", "found": ITEMS[name](folder)}
        except SkipItem as missing:
            result = {"state": "not tried", "reason": str(missing)}
        except Exception:  # noqa: BLE001  whatever it is belongs into the report
            result = {"state": "failed", "reason": traceback.format_exc()[-4000:]}
    (output / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def device(folder: Path) -> dict[str, Any]:
    """Its name, the versions, and the rate of products of square matrices."""
    del folder
    kind = torch.device("cuda" if GPU else "cpu")
    name = torch.cuda.get_device_name() if GPU else "cpu"
    facts: dict[str, Any] = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}
    size, rounds = (8192, 50) if GPU else (512, 5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if GPU else (torch.float32,):
        first, right = (torch.randn(size, size, device=kind, dtype=dtype) for _ in range(2))
        seconds = gpu_peers.seconds(lambda first=first, right=right: first @ right, rounds)
        word = str(dtype).removeprefix("torch.")
        facts[f"{word}_tflops"] = round(2 * size**3 / seconds / 1e12, 2)
        if peak := peak_flops(name, word) if GPU else None:
            facts[f"{word}_share_of_peak"] = round(2 * size**3 / seconds / peak, 3)
            assert facts[f"{word}_share_of_peak"] < 1.05, "the table of peaks is too low for this device"
    if GPU:
        assert peak_flops(name, "bfloat16"), f"{name}: not in the table of peaks"
    return facts


def precisions(folder: Path) -> dict[str, Any]:
    """The first losses, on the device and on the CPU."""
    differences: dict[str, Any] = {}
    on_cpu = gpu_runs.losses(folder / "cpu", toy.BASE, without_gpu=True)
    for precision in PRECISIONS:
        losses = gpu_runs.losses(folder / precision, override(toy.BASE, {"loop.precision": precision}))
        differences[precision] = max(abs(a - b) / abs(b) for a, b in zip(losses, on_cpu, strict=True))
        assert differences[precision] < {"float32": 1e-3}.get(precision, 0.05), (precision, losses, on_cpu)
    return {f"largest difference to float32 on the CPU, {name}": round(value, 6) for name, value in differences.items()}


def resume(folder: Path) -> dict[str, Any]:
    """Killed after a checkpoint, continued, compared with a run that was not."""
    exps = {
        f"{name} {precision}": override(exp, {"loop.precision": precision, "loop.steps": 8, "loop.eval_every": 4})
        for precision in PRECISIONS
        for name, exp in gpu_runs.TINY.items()
    }
    whole, cut = folder / "whole", folder / "cut"
    gpu_runs.train(whole, list(exps.values()), "--with-parents")
    for exp in exps.values():
        gpu_runs.train(cut, [exp], "--with-parents", kill_after=4)
    gpu_runs.train(cut, list(exps.values()), "--with-parents")
    for name, exp in exps.items():
        one, other = (gpu_runs.weights(place, exp) for place in (whole, cut))
        assert one == other, f"{name}: other bits"
    return {"same bits": list(exps)}


def overflow(folder: Path) -> dict[str, Any]:
    """Train with a z-loss weight that makes the scaled gradients overflow float16."""
    if not GPU:
        raise SkipItem("float16 needs a GPU")
    exp = override(toy.BASE, {"loop.precision": "float16", "loop.z_loss": 1e4, "loop.steps": 60, "loop.eval_every": 20})
    gpu_runs.train(folder / "float16", [exp])
    rows = gpu_runs.scores(folder / "float16", exp)
    skipped = [row.get("skipped_steps", 0) for row in rows]
    assert skipped[0] > 0, rows
    assert skipped[-1] < skipped[0], rows
    assert rows[-1]["train_loss"] < rows[0]["train_loss"], rows
    return {"skipped of 20 steps": skipped}


def stop(folder: Path) -> dict[str, Any]:
    """Asked to end while it trains."""
    checkpoints = {}
    for precision in PRECISIONS:
        exp = override(toy.BASE, {"loop.steps": 100_000, "loop.eval_every": 50_000, "loop.precision": precision})
        process = gpu_runs.begin(folder, [exp], "--log_every", "10")
        gpu_runs.wait_for_scores(process, folder, exp)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, output
        checkpoints[precision] = max(
            place.name for place in (gpu_runs.run_folder(folder, exp) / "checkpoints").glob("step-*")
        )
    return {"exit code": 75, "checkpoint": checkpoints}


def sharded(folder: Path) -> dict[str, Any]:
    """One process: nothing to share, but all of the machinery."""
    settings = folder / "zero3.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}))
    ways: dict[str, list[str]] = {"replicated": [], "fsdp": ["--fsdp"]}
    if importlib.util.find_spec("deepspeed"):
        ways["zero3"] = ["--deepspeed", str(settings)]
    exp, results = gpu_runs.large("lm", {"loop.precision": HALF}), {}
    for name, words in ways.items():
        gpu_runs.train(folder / name, [exp], *words)
        results[name] = {
            "loss": gpu_runs.scores(folder / name, exp)[-1]["train_loss"],
            **gpu_runs.perf(folder / name, exp, "peak_memory_bytes"),
        }
    for values in results.values():
        assert abs(values["loss"] / results["replicated"]["loss"] - 1) < 1e-2, results
    return {**results, "deepspeed": "zero3" in ways or "not installed"}


def speed(name: str, folder: Path) -> dict[str, Any]:
    """Compare training speed for the same model on the same tokens. name: key of `gpu_runs.SIZES`."""
    results: dict[str, Any] = {}
    gpu_peers.write_llama(folder / "data" / gpu_peers.LLAMA, folder / "data" / "toy_tokenizer", gpu_runs.LLAMA)
    for compiled in (False, True) if GPU else (False,):
        exp = gpu_runs.large(name, {"loop.precision": HALF, **({"loop.compile": True} if compiled else {})})
        place = folder / f"{name}-{compiled}"
        gpu_runs.train(place, [exp], *ROW_EVERY)
        perf = gpu_runs.perf(place, exp, "tokens_per_second", "mfu", "peak_memory_bytes", "data_wait_rate")
        if name != "t5":
            work = gpu_peers.Work(exp, folder / "data", compiled)
            perf["times bare"] = perf["tokens_per_second"] / gpu_peers.bare_tokens_per_second(work)
            perf["times Trainer"] = perf["tokens_per_second"] / gpu_peers.trainer_tokens_per_second(
                work, place / "trainer"
            )
        results["compiled" if compiled else "not compiled"] = perf
    if GPU:
        results[f"mfu of at least {TARGETS[name]}"] = results["compiled"].get("mfu", 0) >= TARGETS[name]
    return results


def loading(folder: Path) -> dict[str, Any]:
    """The share of the time that a step waits for its data."""
    exp = gpu_runs.large("lm", {"loop.sequences_per_step": 64, "loop.micro_batch": 4})
    gpu_runs.train(folder / "loading", [exp], *ROW_EVERY)
    return gpu_runs.perf(folder / "loading", exp, "data_wait_rate", "tokens_per_second")


def synchronisations(folder: Path) -> dict[str, Any]:
    """Counted by what torch warns of: in the optimizer steps, with the functions that wait, of which `train_step` does
    once; and in all else, such as the evaluation."""
    if not GPU:
        raise SkipItem("torch counts only waits for a GPU")
    num_waits = {}

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            frames = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
            places[place_of(frames) if any(code.co_name == "train_step" for code in frames) else "elsewhere"] += 1

    for name, exp in gpu_runs.TINY.items():
        exp = override(exp, {"loop.steps": 60, "loop.eval_every": 60})
        # Parents, and work that is done only once.
        assert toy.main(["-e", "one", "--with-parents"], {"one": [exp], "base": [toy.BASE]}, folder) == 0
        again = override(exp, {"seed": 1})
        places: Counter[str] = Counter()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            assert toy.main(["-e", "one", "--with-parents"], {"one": [again], "base": [toy.BASE]}, folder) == 0
            torch.cuda.set_sync_debug_mode("default")
        elsewhere = places.pop("elsewhere", 0)
        steps = again["loop"]["steps"]
        num_waits[name] = {
            "of a step": round(places.total() / steps, 2),
            "elsewhere": elsewhere,
            **{place: round(count / steps, 2) for place, count in places.most_common()},
        }
    return {"waits": num_waits}


def place_of(codes: Sequence[CodeType]) -> str:
    """The innermost function outside torch, this file and Python's own, and the innermost of `src`."""
    outside = [
        code
        for code in codes
        if not re.search(r"/(torch|benchmarks)/|lib/python[^/]*/[a-z]+\.py|<frozen", code.co_filename)
    ]
    inner = [next(iter(group), None) for group in (outside, [code for code in outside if "/src/" in code.co_filename])]
    return " in ".join(dict.fromkeys(f"{Path(code.co_filename).stem}.{code.co_qualname}" for code in inner if code))


def cross_attention(folder: Path) -> dict[str, Any]:
    """With contexts of one length, where no position is masked, and of several."""
    del folder
    sizes = {"n_embd": 2816, "n_layer": 36, "n_head": 22} if GPU else {"n_embd": 32, "n_layer": 2, "n_head": 2}
    return gpu_peers.read_encoded(sizes, *((8, 512, 2048) if GPU else (2, 8, 16)))


def checkpoint(folder: Path) -> dict[str, Any]:
    """Seconds that a checkpoint blocks the loop: perf.jsonl's time between rows with and without a checkpoint."""
    changes = {"loop.steps": 40, "loop.eval_every": 40}
    exp = gpu_runs.large("lm", changes)
    gpu_runs.train(folder / "with", [exp], "--save_every", "10")
    gpu_runs.train(folder / "without", [exp])
    seconds = [
        sum(row["seconds"] for row in gpu_runs.rows(gpu_runs.run_folder(folder / name, exp) / "perf.jsonl"))
        for name in ("with", "without")
    ]
    size = max(file.stat().st_size for file in (gpu_runs.run_folder(folder / "with", exp) / "checkpoints").glob("*/*"))
    return {
        "megabytes of the largest file": size / 1e6,
        "seconds with three checkpoints": seconds[0],
        "without": seconds[1],
    }


_CHECKS = (device, precisions, overflow, resume, stop, sharded, loading, synchronisations, cross_attention, checkpoint)
ITEMS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{check.__name__: check for check in _CHECKS},
    **{f"speed_{name}": partial(speed, name) for name in gpu_runs.SIZES},
}

if __name__ == "__main__":
    sys.exit(main())
