"""Conversations: fill of packed rows, rendering, opening a large mixture, and training speed packed, padded and in TRL.

    python -m benchmarks.assistants.conversations --data_path DIR [--tokenizer FOLDER] [--trl FOLDER] [--rows 10000000]
        [--steps 40] [--rounds 2]

DIR holds alpaca, gsm8k (data_prep.assistants.prepare_conversations) and stories260k (data_prep.llama2c). --tokenizer:
the tokenizer to measure lengths with; that of stories260k has only 512 tokens. --trl: an unpacked wheel of TRL; without
it TRL is skipped. One thread.

fill: share of used tokens in rows of 1,024 and 2,048 tokens with 16 open rows, packed with complete conversations of
both data sets.
rendering: ids and roles of 2,000 conversations by `Renderer` and by transformers' `apply_chat_template` with the same
template.
mixture: --rows conversations in two data sets, opened by a new process, first without and then with its index: seconds
and memory until the first sample, beyond what imports take.
training: a Llama of 4 layers of 256 trains --steps steps of 8 rows by recipe `sft`, packed, padded, and padded in rows
of like lengths; and by TRL's SFTTrainer on the same padded rows. Alternately, each in a process of its own; the first
fifth of the steps is not counted.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from src.data.orders import RankShare
from src.experiments.config import Places
from src.experiments.identity import exp_id
from src.experiments.registry import DATASETS, bind
from src.files import new_directory
from src.models import prepared_tokenizer
from src.runs.scores import parse_lines
from src.systems.assistants.conversations import templates
from src.systems.assistants.conversations.entries import read_entry
from src.systems.assistants.conversations.rendering import Renderer

ROOT = Path(__file__).resolve().parents[2]
CONTROLS = ["<|prompter|>", "<|assistant|>", "<|system|>"]
MOST, PER_STEP = 512, 8
OASST = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|prompter|>' + m.content + eos_token }}{% "
    "else %}{{ '<|assistant|>' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


def conversations(corpora: Sequence[str]) -> dict[str, Any]:
    """The dict of a mixture of data sets."""
    parts = {
        name: {"name": "conversations", "corpus": name, "sequence_tokens": MOST, "val_samples": 8} for name in corpora
    }
    return {"name": "mixture", "parts": parts}


def packed(corpora: Sequence[str], tokens: int) -> dict[str, Any]:
    """The dict of that mixture, packed."""
    return {"name": "packed", "documents": conversations(corpora), "sequence_tokens": tokens}


def best_seconds(work: Callable[[], object], rounds: int) -> float:
    """Processor seconds of the fastest of some rounds."""
    times = list[float]()
    for _ in range(rounds):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def measure_fill(places: Places, tokenizer: Any) -> None:
    """Print the share of the places of packed rows that have a token."""
    for corpora, room in (
        (corpora, room) for corpora in (["alpaca"], ["gsm8k"], ["alpaca", "gsm8k"]) for room in (1024, 2048)
    ):
        data = bind(DATASETS, packed(corpora, room)).build(places, tokenizer, "train", 0)
        order, num_tokens, rows = data.order(0, PER_STEP, 1, ()), 0, 0
        for keys, _, _ in islice(order.micro_batches(0, RankShare(PER_STEP, PER_STEP, 0, 1), {}), 40):
            for key in keys:
                num_tokens += sum(data.sizes(*key[i : i + 2])[key[i + 2]][0] for i in range(0, len(key), 3))
                rows += 1
        print(f"fill, {' and '.join(corpora)}: {num_tokens / rows / room:.4f} of {rows} rows of {room}")


def measure_rendering(places: Places, tokenizer: Any, rounds: int) -> None:
    """Print conversations per second for both ways to compute ids and loss masks."""
    lines = (places.data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").split("\n")[:2000]
    rows = [json.loads(line) for line in lines]
    renderer = Renderer(tokenizer, templates.find("oasst", tokenizer))
    tokenizer.chat_template = OASST

    def ours() -> list[Any]:
        conversations = [renderer.render(read_entry(row, "").messages) for row in rows]
        start = len(renderer.safe.start)  # which their template leaves out
        return [(each.ids[start:], each.loss_mask[start:]) for each in conversations]

    def theirs() -> list[Any]:
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        outputs = [tokenizer.apply_chat_template(row["messages"], **options) for row in rows]
        return [(each["input_ids"], [bool(each) for each in each["assistant_masks"]]) for each in outputs]

    same = sum(mine == other for mine, other in zip(ours(), theirs(), strict=True))
    seconds = {work: best_seconds(work, rounds) for work in (ours, theirs)}
    print(
        f"rendering: {len(rows) / seconds[ours]:.0f} conversations/s, transformers {len(rows) / seconds[theirs]:.0f}: ",
        end="",
    )
    print(f"{seconds[theirs] / seconds[ours]:.1f} times; the same ids and masks of {same} of {len(rows)}")


def write_large(folder: Path, rows: int) -> None:
    """Write a prepared folder with `rows` short conversations."""
    if folder.is_dir():
        return
    with new_directory(folder) as new_folder:
        for split, count in (("train", rows), ("val", 10)):
            with open(new_folder / f"{split}.jsonl", "w") as file:
                for number in range(count):
                    messages = [
                        {"role": "user", "content": f"{number} + 1?"},
                        {"role": "assistant", "content": str(number + 1)},
                    ]
                    file.write(json.dumps({"messages": messages}) + "\n")


def open_large(places: Places) -> None:
    """In a process of its own: print seconds and mebibytes of opening the large mixture and reading its first
    sample."""
    tokenizer: Any = prepared_tokenizer.load(places.data / "stories260k", CONTROLS)
    config = bind(DATASETS, {**conversations(["large_0", "large_1"]), "shuffle": "feistel"})
    bind(DATASETS, conversations(["gsm8k"])).build(places, tokenizer, "train", 0).sample(0, 0)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest memory so far
    before, begin = status_kib("VmRSS"), time.perf_counter()
    data = config.build(places, tokenizer, "train", 0)
    data.sample(0, 12345)
    seconds, extra_kib = time.perf_counter() - begin, status_kib("VmHWM") - before
    print(f"mixture of {len(data):,} conversations: opened in {seconds:.2f} s with {extra_kib / 1024:.0f} MiB more")


def status_kib(name: str) -> int:
    """A value of /proc/self/status in KiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def measure_large(places: Places, rows: int) -> None:
    """Print the seconds and memory to open a large mixture, without and with its index."""
    for number in range(2):
        write_large(places.data / f"large_{number}", rows // 2)
    for occasion in ("the first time", "later"):
        print(f"{occasion}: ", end="", flush=True)
        subprocess.run(
            [sys.executable, "-m", "benchmarks.assistants.conversations", "--data_path", str(places.data), "--open"],
            check=True,
        )


def write_model(places: Places, tokenizer: Any) -> None:
    """Write a Llama of random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    with new_directory(places.data / "benchmark_llama") as folder:
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=MOST, **sizes)).save_pretrained(
            folder
        )
        tokenizer.save_pretrained(folder)


def experiments(steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Experiments to train, by name."""
    padded = conversations(["alpaca", "gsm8k"])
    for name, data, more in (
        ("packed", packed(["alpaca", "gsm8k"], MOST), {}),
        ("padded", padded, {}),
        ("like lengths", padded, {"group_by_length": True}),
    ):
        loop = {
            "steps": steps,
            "sequences_per_step": PER_STEP,
            "micro_batch": PER_STEP,
            "learning_rate": 1e-4,
            "eval_every": steps,
            **more,
        }
        yield (
            name,
            {
                "recipe": "sft",
                "seed": 0,
                "model": {"name": "hf", "path": "benchmark_llama"},
                "data": data,
                "loop": loop,
            },
        )


def train_ours(exp: dict[str, Any], places: Places, folder: Path) -> float:
    """Learned tokens a second of a training."""
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
    first = next(row["tokens"] for row in scores if row["step"] == steps // 5)
    return (scores[-1]["tokens"] - first) / sum(row["seconds"] for row in speeds if row["step"] > steps // 5)


def train_theirs(places: Places, steps: int, site: Path) -> None:
    """In a process of its own: print the learned tokens a second of TRL's trainer, on the rows of `experiments`'
    "padded", in its order."""
    sys.path.append(str(site))
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    from transformers import AutoModelForCausalLM, TrainerCallback

    from src.data.orders import order_of

    tokenizer: Any = prepared_tokenizer.load(places.data / "benchmark_llama")
    data = bind(DATASETS, conversations(["alpaca", "gsm8k"])).build(places, tokenizer, "train", 0)
    share, keys = RankShare(PER_STEP, PER_STEP, 0, 1), list[Any]()
    for batch, _, _ in islice(order_of(data, 0, PER_STEP, steps).micro_batches(0, share, {}), steps):
        keys += batch
    samples = [data.sample(*key).sample for key in keys]
    rows = [
        {"input_ids": each["input_ids"], "completion_mask": [int(flag) for flag in each["loss_mask"]]}
        for each in samples
    ]
    times = dict[int, float]()

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times[state.global_step] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        config = trl.SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=PER_STEP, learning_rate=1e-4,
            report_to=[], max_length=None, completion_only_loss=True, use_cpu=True, save_strategy="no", bf16=False,
            gradient_checkpointing=False, logging_steps=steps, disable_tqdm=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(places.data / "benchmark_llama")
        trainer = trl.SFTTrainer(
            model=model,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    begin = steps // 5
    num_learned = sum(sum(row["completion_mask"][1:]) for row in rows[begin * PER_STEP :])
    print(f"learned tokens/s: {num_learned / (times[steps] - times[begin])}")


def measure_training(places: Places, tokenizer: Any, steps: int, rounds: int, site: Path | None) -> None:
    """Print learned tokens a second of each way, the best of the rounds, and their ratios."""
    if not (places.data / "benchmark_llama").is_dir():
        write_model(places, tokenizer)
    rates = dict[str, float]()
    for _ in range(rounds):
        for name, exp in experiments(steps):
            with tempfile.TemporaryDirectory() as folder:
                rates[name] = max(rates.get(name, 0.0), train_ours(exp, places, Path(folder)))
        if site:
            command = [
                sys.executable,
                "-m",
                "benchmarks.assistants.conversations",
                "--data_path",
                str(places.data),
                "--steps",
                str(steps),
                "--worker",
            ]
            done = subprocess.run([*command, "--trl", str(site)], check=True, capture_output=True, text=True)
            (report,) = (line for line in done.stdout.splitlines() if line.startswith("learned tokens/s"))
            rates["TRL"] = max(rates.get("TRL", 0.0), float(report.split(": ")[1]))
    report = ", ".join(f"{rate:.0f} {name}" for name, rate in rates.items())
    print(f"training, learned tokens/s: {report}; packed {rates['packed'] / rates['padded']:.2f} times padded", end="")
    print(
        f"; padded {rates['padded'] / rates['TRL']:.2f} and packed {rates['packed'] / rates['TRL']:.2f} times TRL's"
        if site
        else ""
    )


def main() -> None:
    """Run the benchmarks selected on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data_path", type=Path, required=True)
    add("--tokenizer", type=Path, metavar="FOLDER")
    add("--trl", type=Path, metavar="FOLDER")
    add("--rows", type=int, default=10_000_000, help="0: no large mixture")
    add("--steps", type=int, default=40, help="0: no training")
    add("--rounds", type=int, default=2)
    add("--open", action="store_true", help=argparse.SUPPRESS)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    places = Places(args.data_path, args.data_path)
    if args.open:
        open_large(places)
    elif args.worker:
        train_theirs(places, args.steps, args.trl)
    else:
        tokenizer: Any = prepared_tokenizer.load(args.data_path / "stories260k", CONTROLS)
        measure_fill(places, prepared_tokenizer.load(args.tokenizer, CONTROLS) if args.tokenizer else tokenizer)
        measure_rendering(places, tokenizer, args.rounds)
        if args.rows:
            measure_large(places, args.rows)
        if args.steps:
            measure_training(places, tokenizer, args.steps, args.rounds, args.trl)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
