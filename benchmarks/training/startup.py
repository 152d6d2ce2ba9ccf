"""Processor time of a training from its start to its first step, against importing the libraries and building the same
model.

python -m benchmarks.training.startup

The training is base_tiny. Its corpus is read as token files written by data_prep.tokenize, and as text, which the first
start tokenizes. The processes take turns; the medians are printed.
"""

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from data_prep import tokenize
from data_prep.crossattn import stdlib_qa

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


def main() -> None:
    """Prepare the data, measure and print the table."""
    with tempfile.TemporaryDirectory() as temporary:
        data, number = Path(temporary, "data"), 0
        with contextlib.redirect_stdout(io.StringIO()):
            stdlib_qa.prepare(data)
            tokenize.main(
                [
                    "--data_path",
                    str(data),
                    "--name",
                    "tokens",
                    "--tokenizer",
                    "stdlib_tokenizer",
                    "--corpus",
                    "stdlib_text",
                ]
            )
        programs = {"import torch, transformers; build the model": [PEER, str(data / "stdlib_tokenizer")]}
        for name, corpus in (("token files", "tokens"), ("text", "stdlib_text")):
            command = [TRAINING, "-e", "base_tiny", "--data_path", str(data), "--set", f"data.corpus={corpus}"]
            programs[f"trainval.py to its first step, {name}"] = command
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(ROUNDS):
            for name, command in programs.items():
                number += 1
                folder = [] if command[0] is PEER else ["-sb", str(Path(temporary, f"runs_{number}"))]
                times[name].append(processor_seconds(*command, *folder))
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = next(iter(medians.values()))
    print(f"{'processor time, median of ' + str(ROUNDS):<48}{'seconds':>9}{'ratio':>8}")
    for name, seconds in medians.items():
        print(f"{name:<48}{seconds:>9.2f}{seconds / base:>8.2f}")


if __name__ == "__main__":
    main()
