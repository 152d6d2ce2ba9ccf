"""Policies: rollout tokens per second against plain `generate`, seconds per step by phase, updates per second against
TRL, and memory.

    python -m benchmarks.assistants.rl --data_path DIR [--trl FOLDER] [--steps 20] [--rounds 2]

DIR holds expression_tasks and expression_tokenizer (data_prep.assistants.stdlib_conversations). --trl: an unpacked
wheel of TRL. One thread. A Llama of 4 layers of 128 with random weights answers in 24 tokens, 64 answers a step in
groups of 8; the reward is the length. Each training is a process of its own, in turn; the first fifth of its steps is
not counted.

reference: peak memory in MiB that a copy of the policy, or switched-off adapters, add to a policy with adapters.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.assistants.conversations import ROOT
from src.experiments.config import Places
from src.experiments.grid import override
from src.experiments.identity import exp_id
from src.experiments.registry import DATASETS, bind
from src.files import new_directory
from src.models import prepared_tokenizer
from src.runs.scores import parse_lines

MODEL, TOKENS, ROLLOUTS, GROUP = "benchmark_policy", 24, 64, 8
EXP: dict[str, Any] = {
    "recipe": "grpo",
    "seed": 0,
    "model": {"name": "hf", "path": MODEL},
    "data": {
        "name": "rollouts",
        "prompts": {"name": "conversations", "corpus": "expression_tasks", "sequence_tokens": 80},
        "rollouts": ROLLOUTS,
        "group_size": GROUP,
        "max_new_tokens": TOKENS,
    },
    "rewards": [{"name": "length", "free_tokens": 0, "worst_tokens": TOKENS}],
    "loop": {
        "steps": 20,
        "sequences_per_step": ROLLOUTS,
        "micro_batch": ROLLOUTS,
        "learning_rate": 1e-5,
        "eval_every": 20,
        "best_metric": "solved",
        "best_mode": "max",
    },
    "answers": {"questions": 1, "max_new_tokens": 1, "metrics": [{"name": "expressions"}]},
}
LORA = {"name": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"], "base": EXP["model"]}


def write_model(places: Places) -> None:
    """A Llama with random weights, and its tokenizer."""
    import torch
    import transformers

    tokenizer: Any = prepared_tokenizer.load(places.data / "expression_tokenizer")
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, **ends)
    torch.manual_seed(0)
    with new_directory(places.data / MODEL) as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def train_ours(exp: dict[str, Any], places: Places, folder: Path) -> tuple[dict[str, float], float]:
    """Seconds of a step by phase, and "step" for all of it; and the tokens of an answer."""
    steps = exp["loop"]["steps"]
    arguments = [
        "-e",
        "one",
        "--data_path",
        str(places.data),
        "--savedir_base",
        str(folder / "runs"),
        "--log_every",
        str(steps // 5),
    ]
    code = f"import exp_configs, trainval; exp_configs.EXP_GROUPS = {{'one': [{exp!r}]}}; trainval.main({arguments!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
    run = folder / "runs" / exp_id(exp)
    scores, speeds = (
        parse_lines((run / name).read_bytes().split(b"\n")[:-1], run / name) for name in ("scores.jsonl", "perf.jsonl")
    )
    measured_rows = [row for row in speeds if row["step"] > steps // 5]
    number = steps - steps // 5
    phases = {
        name: sum(row[f"{name}_seconds"] for row in measured_rows) / number
        for name in ("generation", "rewards", "measuring")
    }
    whole = {"step": sum(1 / row["steps_per_second"] for row in measured_rows) / len(measured_rows)}
    return {**phases, **whole, "peak_mib": speeds[-1]["peak_host_memory_bytes"] / 2**20}, scores[-1]["answer_tokens"]


def time_generate(places: Places, rounds: int) -> float:
    """Seconds of transformers' own `generate` on the prompts of an iteration: a mean, as of the phases of ours."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)

    tokenizer: Any = prepared_tokenizer.load(places.data / MODEL)
    prompts = bind(DATASETS, EXP["data"]).build(places, tokenizer, "train", 0).prompts
    batch = prompts.collate([prompts[number] for number in range(ROLLOUTS // GROUP) for _ in range(GROUP)])
    model: Any = AutoModelForCausalLM.from_pretrained(places.data / MODEL).eval()
    times = []
    for _ in range(4 * rounds + 1):
        before = time.perf_counter()
        with torch.no_grad():
            model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"].long(),
                do_sample=True,
                top_k=0,
                max_new_tokens=TOKENS,
            )
        times.append(time.perf_counter() - before)
    return sum(times[1:]) / len(times[1:])


def train_theirs(places: Places, steps: int, site: Path) -> None:
    """In a process of its own: print the seconds of a step of TRL's GRPOTrainer on the same prompts."""
    sys.path.append(str(site))
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    from transformers import AutoModelForCausalLM, TrainerCallback

    tokenizer: Any = prepared_tokenizer.load(places.data / MODEL)
    prompts = bind(DATASETS, EXP["data"]).build(places, tokenizer, "train", 0).prompts
    rows = [
        {"prompt": tokenizer.decode(prompts[number % len(prompts)].ids)} for number in range(steps * ROLLOUTS // GROUP)
    ]
    times = dict[int, float]()

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times[state.global_step] = time.perf_counter()

    def shortness(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-len(ids) / TOKENS for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=ROLLOUTS, num_generations=GROUP,
            max_completion_length=TOKENS, learning_rate=1e-5, beta=0.0, report_to=[], use_cpu=True, save_strategy="no",
            bf16=False, gradient_checkpointing=False, logging_steps=steps, disable_tqdm=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(places.data / MODEL)
        trainer = trl.GRPOTrainer(
            model=model,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            reward_funcs=shortness,
            callbacks=[Clock()],
        )
        trainer.train()
    begin = steps // 5
    print(f"seconds of a step: {(times[steps] - times[begin]) / (steps - begin)}")


def main() -> None:
    """Run the benchmarks selected on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data_path", type=Path, required=True)
    add("--trl", type=Path, metavar="FOLDER")
    add("--steps", type=int, default=20)
    add("--rounds", type=int, default=2)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    places = Places(args.data_path, args.data_path)
    if args.worker:
        train_theirs(places, args.steps, args.trl)
        return
    if not (places.data / MODEL).is_dir():
        write_model(places)
    exp = override(EXP, {"loop.steps": args.steps, "loop.eval_every": args.steps})
    near = {"kl_weight": 0.1}
    variants = {
        "policy": exp,
        "adapters, no reference": override(exp, {"model": LORA}),
        "adapters off": override(exp, {"model": LORA, "grpo": {**near, "reference": "adapters_off"}}),
        "a copy": override(exp, {"model": LORA, "grpo": near}),
    }
    best: dict[str, dict[str, float]] = {}
    theirs, tokens = [], 0.0
    for _ in range(args.rounds):
        for name, variant in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                timings, tokens = train_ours(variant, places, Path(folder))
            best[name] = min(best.get(name, timings), timings, key=lambda each: each["step"])
        if args.trl:
            command = [
                sys.executable,
                "-m",
                "benchmarks.assistants.rl",
                "--data_path",
                str(places.data),
                "--steps",
                str(args.steps),
                "--worker",
            ]
            done = subprocess.run(
                [*command, "--trl", str(args.trl)], check=True, capture_output=True, text=True, cwd=ROOT
            )
            theirs += [
                float(line.split(": ")[1]) for line in done.stdout.splitlines() if line.startswith("seconds of a step")
            ]
    policy, plain = best["policy"], time_generate(places, args.rounds)
    print(
        f"rollouts: {ROLLOUTS * tokens / policy['generation']:.0f} tokens/s, "
        f"{plain / policy['generation']:.2f} times plain generate"
    )
    print(f"a step: {json.dumps({name: round(value, 4) for name, value in policy.items()})}")
    if theirs:
        print(f"updates/s: {1 / policy['step']:.2f}, {min(theirs) / policy['step']:.2f} times TRL's")
    less = best["adapters, no reference"]["peak_mib"]
    timings = ", ".join(f"{name} {best[name]['peak_mib'] - less:+.1f} MiB" for name in ("adapters off", "a copy"))
    print(f"reference: {timings}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
