"""Processor time of a training from its start to its first step, against importing the libraries and building the same
model.

    python -m benchmarks.training.startup
    python -m benchmarks.training.startup --smollm2 DATA      # after `make smollm2`; with alpaca and gsm8k

The training is base_tiny. Its corpus is read as token files written by data_prep.tokenize, and as text, which the first
start tokenizes. The processes take turns; the medians are printed.

With --smollm2 it is smollm2_sft, of adapters and of all weights, against loading the model with from_pretrained. After
that, each is trained for 2 steps with one thread, and its peak memory is printed.
"""

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data_prep import tokenize
from data_prep.crossattn import stdlib_qa
from src.runs.jsonl_records import rows
from src.systems.assistants.groups import SMOLLM2

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 5
PEER = """
import sys, time
import torch, transformers
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
config = transformers.GPTBigCodeConfig(vocab_size=len(tokenizer), n_positions=256, n_embd=192, n_layer=4, n_head=6)
transformers.GPTBigCodeForCausalLM(config)
print(time.process_time())
"""
TRAINING = """
import os, time
import trainval

def stop(loop, step):
    os.write(1, f"{time.process_time()}\\n".encode())
    os._exit(0)

def carry_out(item, run):
    from src.training.loop import Loop
    Loop.train_step = stop
    item.recipe.run(run)

trainval.carry_out = carry_out
trainval.main()
"""


def processor_seconds(program: str, *arguments: str) -> float:
    """The last line that a Python program prints, as a number."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


PRETRAINED = """
import sys, time
import torch, transformers
transformers.AutoTokenizer.from_pretrained(sys.argv[1])
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=sys.argv[2])
print(time.process_time())
"""


def tiny_programs(data: Path) -> dict[str, list[str]]:
    """{name: program and arguments} of base_tiny, after its data are prepared in `data`."""
    with contextlib.redirect_stdout(io.StringIO()):
        stdlib_qa.prepare(data)
        names = ["--name", "tokens", "--tokenizer", "stdlib_tokenizer", "--corpus", "stdlib_text"]
        tokenize.main(["--data_path", str(data), *names])
    programs = {"import torch, transformers; build the model": [PEER, str(data / "stdlib_tokenizer")]}
    for name, corpus in (("token files", "tokens"), ("text", "stdlib_text")):
        command = [TRAINING, "-e", "base_tiny", "--data_path", str(data), "--set", f"data.corpus={corpus}"]
        programs[f"trainval.py to its first step, {name}"] = command
    return programs


def smollm2_programs(data: Path) -> dict[str, list[str]]:
    """{name: program and arguments} of smollm2_sft and of from_pretrained."""
    path = str(data / SMOLLM2["path"])
    programs = {f"from_pretrained, {dtype}": [PRETRAINED, path, dtype] for dtype in ("bfloat16", "float32")}
    for name, model in (("adapters", "lora"), ("all weights", "hf")):
        selection = ["--where", f"seed == 0 and model.name == {model!r}"]
        programs[f"trainval.py to its first step, {name}"] = [
            *(TRAINING, "-e", "smollm2_sft", *selection, "--data_path", str(data), "--set", "loop.steps=2"),
        ]
    return programs


def peak_gib(command: Sequence[str], runs: Path) -> float:
    """Peak memory of the process of a training, in GiB."""
    words = [sys.executable, "trainval.py", *command, "-sb", str(runs)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(words, cwd=ROOT, env=env, capture_output=True, check=True)
    (perf,) = runs.glob("*/perf.jsonl")
    return max(row["peak_host_memory_bytes"] for row in rows(perf) if "peak_host_memory_bytes" in row) / 2**30


def main() -> None:
    """Prepare the data, measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, metavar="DATA", help="data folder with SmolLM2, alpaca and gsm8k")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        programs = smollm2_programs(args.smollm2.resolve()) if args.smollm2 else tiny_programs(folder / "data")
        times: dict[str, list[float]] = {name: [] for name in programs}
        for round_number in range(ROUNDS):
            for number, (name, command) in enumerate(programs.items()):
                runs = ["-sb", str(folder / f"runs_{round_number}_{number}")] if command[0] is TRAINING else []
                times[name].append(processor_seconds(*command, *runs))
        medians = {name: statistics.median(values) for name, values in times.items()}
        base = next(iter(medians.values()))
        print(f"{'processor time, median of ' + str(ROUNDS):<48}{'seconds':>9}{'ratio':>8}")
        for name, seconds in medians.items():
            print(f"{name:<48}{seconds:>9.2f}{seconds / base:>8.2f}")
        for number, (name, command) in enumerate(programs.items()):
            if args.smollm2 and command[0] is TRAINING:
                print(f"{name.rpartition(', ')[2]}: peak {peak_gib(command[1:], folder / f'trained_{number}'):.2f} GiB")


if __name__ == "__main__":
    main()
