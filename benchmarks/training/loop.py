"""Overhead of the training loop: tokens/s of `fit` against a bare PyTorch loop and against the Trainer of transformers.

    python -m benchmarks.training.loop [--group base_tiny | t5_tiny | smollm2 | smollm2_lora] [--steps 30] [--rounds 3]
        [--against bare trainer] [--set PATH=VALUE]
    torchrun --nproc-per-node 2 -m benchmarks.training.loop

All train the model of the group in float32 on the same sequences in the same order, in one process (or in the same
processes, with DistributedDataParallel); the bare loop has nothing but the model, AdamW, clipping and the learning
rate. They take turns after every step, so that a slow moment of the machine falls on all, and each waits while another
computes. A step is timed from the end of the one before, in its second half of the training; the median over the steps
of the ratio of two ways at the same step counts: both read the same sequences in it. All must have the same weights, up
to rounding, after the first steps: PyTorch's clipping and the Trainer's mean over tokens round differently, and Adam
amplifies the difference with each step.

Freed memory stays with the process for all of them, as `fit` does on a CPU. Without that, the C library can return and
reallocate memory in each step, depending on fragmentation, and times differ by up to 15 % for unrelated reasons.
"""

import argparse
import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import exp_configs
from benchmarks.turns import Turns, one_arena
from src.data.orders import IndexedOrder, order_of
from src.data.text import tokenizers
from src.experiments.config import Places
from src.experiments.grid import override, parse_assignment
from src.experiments.interfaces import RecipeConfig, load_experiment
from src.experiments.registry import resolved_dict
from src.runs.context import Options, Run
from src.runs.run_dir import RunDir
from src.support import distributed
from src.systems.assistants.groups import smollm2_sft
from src.training import loader
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.loop import fit
from src.training.loss import causal_lm_loss, seq2seq_loss
from src.training.optim import optimizers, schedule
from src.training.parallel import memory
from src.training.spec import TrainSpec
from src.training.state import State

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"bare": 0.97, "trainer": 1.0}
_ON_ALPACA = {
    "data": {
        "name": "conversations",
        "corpus": "alpaca",
        "sequence_tokens": 256,
        "writing": {"template": "tokenizer"},
    },
    "loop.precision": "float32",
    "loop.learning_rate": 1e-5,
}
"""Fine-tuning of SmolLM2-135M (`make smollm2`) on the corpus alpaca below --data_path."""
EXPERIMENTS: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "base_tiny": (exp_configs.EXP_GROUPS["base_tiny"][0], causal_lm_loss),
    "t5_tiny": (exp_configs.EXP_GROUPS["t5_tiny"][0], seq2seq_loss),
    "smollm2": (override(smollm2_sft(0, lora=False), _ON_ALPACA), causal_lm_loss),
    "smollm2_lora": (
        override(smollm2_sft(0, lora=True), {**_ON_ALPACA, "model.base.dtype": "float32"}),
        causal_lm_loss,
    ),
}
COMPARED_STEPS = 8
"""Steps, at most, after which all must have the same weights."""


@dataclass
class Clock:
    """Times the steps after the first half, by the wall and by the processor. Before them it looks at the weights
    once."""

    steps: int
    model: Any
    turns: Turns
    done: int = 0
    began: tuple[float, float] = (0.0, 0.0)
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """(wall time, CPU time of this thread) for each step of the second half."""
    weights: dict[str, Tensor] = field(default_factory=dict)

    def step(self) -> None:
        """An optimizer step has ended."""
        end_times = time.perf_counter(), time.thread_time()
        if self.done >= self.steps // 2:
            self.seconds.append((end_times[0] - self.began[0], end_times[1] - self.began[1]))
        self.done += 1
        if self.done == min(COMPARED_STEPS, self.steps // 2):
            self.weights = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.turns.pass_on()
        self.began = time.perf_counter(), time.thread_time()


@dataclass
class Work:
    """A training to run: its inputs, and a clock for its steps."""

    model: Any
    train: Any
    recipe: RecipeConfig
    exp: dict[str, Any]
    places: Places
    clock: Clock
    loss: Callable[..., Tensor]

    @property
    def config(self) -> Any:
        """The experiment's."""
        return self.recipe


def bare(work: Work) -> None:
    """Nothing but the model, AdamW, clipping and the learning rate."""
    loop = work.config.loop
    model = DistributedDataParallel(work.model) if distributed.world_size() > 1 else work.model
    optimizer, rate = optimizers.build_optimizer(model, loop, torch.device("cpu")), schedule.learning_rate(loop)
    model.train()
    order = order_of(work.train, work.config.seed, loop.sequences_per_step, loop.steps)
    steps = loader.StepLoader(work.train, order, loop, torch.device("cpu")).steps(State())
    for step, read in enumerate(islice(steps, loop.steps)):
        (tokens,) = distributed.all_reduce_sum([read.loss_tokens])
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for batch in read.batches:
            quiet = isinstance(model, DistributedDataParallel) and batch is not read.batches[-1]
            with model.no_sync() if quiet else contextlib.nullcontext():
                (work.loss(model, batch) * (distributed.world_size() / tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), loop.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        work.clock.step()


def ours(work: Work) -> None:
    """`fit`, with all that it does by default, but its checkpoints: benchmarks.training.checkpoint_stall measures
    those."""
    from src.training.monitoring import throughput

    count = throughput.ThroughputMeter.count

    def count_tokens(
        self: throughput.ThroughputMeter, step: loader.Step
    ) -> None:  # the last thing that `fit` does in a step
        count(self, step)
        work.clock.step()

    with contextlib.ExitStack() as stack:
        runs: list[RunDir] = []

        def begin() -> Path:
            runs.append(
                stack.enter_context(RunDir.open(work.places.runs, work.exp, resolved_dict(work.recipe, key="recipe")))
            )
            return runs[0].path

        path = distributed.broadcast_from_rank0(begin)
        run = Run(runs[0] if runs else RunDir.attach(path), work.places, Options(log_every=work.config.loop.steps))
        task = TrainSpec(
            work.model,
            CheckpointMetadata({}, tokenizers.load(work.model.name_or_path)),
            work.train,
            {},
            work.loss,
            lambda _: {"val_loss": 0.0},
        )
        throughput.ThroughputMeter.count = count_tokens
        try:
            fit(task, run, work.config.loop, work.config.seed)
        finally:
            throughput.ThroughputMeter.count = count


class Sequences(Dataset):
    """All sequences of the training in order, in the format of the Trainer."""

    def __init__(self, train: Any, config: Any) -> None:
        self.train = train
        order = IndexedOrder(config.seed, len(train), config.loop.sequences_per_step)
        self.keys = list(islice(order.keys(), config.loop.steps * config.loop.sequences_per_step))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Any:
        return self.train.sample(*self.keys[index])

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        """With labels, which are -100 where nothing is to be learned."""
        batch = self.train.collate(samples)
        if "labels" in batch:
            return {name: tensor for name, tensor in batch.items() if name != "loss_mask"}
        labels = torch.where(batch["loss_mask"], batch["input_ids"], -100)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long(), "labels": labels}


def trainer(work: Work) -> None:
    """The Trainer of transformers, as a user sets it up for the same training."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            work.clock.step()

    loop, sequences = work.config.loop, Sequences(work.train, work.config)
    arguments = TrainingArguments(
        output_dir=str(work.places.runs / "trainer"),
        use_cpu=True,
        max_steps=loop.steps,
        per_device_train_batch_size=loop.micro_batch,
        gradient_accumulation_steps=loop.sequences_per_step // loop.micro_batch // distributed.world_size(),
        train_sampling_strategy="sequential",
        learning_rate=loop.learning_rate,
        lr_scheduler_type=loop.schedule,
        warmup_steps=round(loop.warmup_rate * loop.steps),
        weight_decay=loop.weight_decay,
        adam_beta1=loop.adam_beta1,
        adam_beta2=loop.adam_beta2,
        adam_epsilon=loop.adam_epsilon,
        max_grad_norm=loop.max_grad_norm,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=work.config.seed,
    )
    callbacks: list[TrainerCallback] = [Steps()]
    Trainer(
        work.model, arguments, data_collator=sequences.collate, train_dataset=sequences, callbacks=callbacks
    ).train()


WAYS = {"bare": bare, "fit": ours, "trainer": trainer}


def round_of(
    names: list[str], exp: dict[str, Any], loss: Callable[..., Tensor], data: Path
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each measured step, by way; the ways start in the order of `names`.

    With several processes, the times of rank 0: all wait for each other in each step.
    """
    recipe = load_experiment(exp, "benchmark")
    config: Any = recipe
    turns, clocks, works = Turns(), {}, []
    with tempfile.TemporaryDirectory() as runs_folder:
        places = Places(data, Path(distributed.broadcast_from_rank0(lambda: runs_folder)))
        for name in names:
            torch.manual_seed(0)
            model = config.model.build(places)
            train = config.data.build(places, tokenizers.load(model.name_or_path), "train", config.seed)
            clocks[name] = Clock(config.loop.steps, model, turns)
            works.append(partial(WAYS[name], Work(model, train, recipe, exp, places, clocks[name], loss)))
        turns.run(works)
        distributed.all_gather_list([None])  # nobody is in the folder any more
    compare({name: clock.weights for name, clock in clocks.items()})
    return {name: clock.seconds for name, clock in clocks.items()}


def compare(weights: dict[str, dict[str, Tensor]]) -> None:
    """Fail if the measured ways did not do the same work."""
    for name, theirs in weights.items():
        assert theirs.keys() == weights["fit"].keys()
        for key, ours in weights["fit"].items():
            same = torch.allclose(ours, theirs[key], rtol=1e-3, atol=5e-5)
            assert same, (
                f"{name} must have the weights of fit, else it did other work: {key}, "
                f"{(ours - theirs[key]).abs().max()}"
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the messages of a training."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    yield


def main() -> None:
    """Print one line per round and the median ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--group", choices=list(EXPERIMENTS), default="base_tiny")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="PATH=VALUE",
        help="changes of the experiment, as trainval.py takes them",
    )
    parser.add_argument("--against", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--data_path", type=Path, default=ROOT / "results" / "data")
    args = parser.parse_args()
    one_arena()
    memory.reuse_freed_memory()
    exp, loss = EXPERIMENTS[args.group]
    exp = override(
        exp, {"loop.steps": args.steps, "loop.eval_every": args.steps, **dict(map(parse_assignment, args.set))}
    )
    names = ["fit", *args.against]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with quiet(), distributed.session():
        for i in range(args.rounds):
            seconds = round_of(names[i % len(names) :] + names[: i % len(names)], exp, loss, args.data_path)
            for name in names:
                times[name] += seconds[name]
            if distributed.is_main():
                medians = (f"{name} {statistics.median(wall for wall, _ in seconds[name]):.4f} s" for name in names)
                print(f"round {i}, a step: " + "   ".join(medians), flush=True)
        if distributed.is_main():
            for name in args.against:
                wall, work = (
                    sorted(b[k] / a[k] for a, b in zip(times["fit"], times[name], strict=True)) for k in (0, 1)
                )
                middle = f"half of {len(wall)} steps {wall[len(wall) // 4]:.3f} to {wall[3 * len(wall) // 4]:.3f}"
                print(
                    f"tokens/s of fit / {name}: "
                    f"median {statistics.median(wall):.3f}, {middle} (target: at least {TARGETS[name]})"
                )
                print(f"   by processor seconds {statistics.median(work):.3f}")


if __name__ == "__main__":
    main()
