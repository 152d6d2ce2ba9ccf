"""Seconds that a checkpoint delays training: written in the background, as `fit` does, against written synchronously.

    python -m benchmarks.training.checkpoint_stall [--rounds 3] [--steps 24] [--hidden_size 768] [--num_layers 8]

Each round runs the same training three times, in a different order: without checkpoints, with a synchronous checkpoint
after each quarter, and with background checkpoints. The second and the third checkpoint are measured; the first also
allocates the memory that all copies use. Two stalls are reported per checkpoint: the time that the loop waits in
`save`, and the extra time of the second half of the steps compared with no checkpoints. The latter includes the
slowdown of the following steps by the writer if there is no spare core. All end with the same weights, bit for bit.
"""

import argparse
import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import exp_configs
from src.data.text import tokenizers
from src.experiments.config import Places
from src.experiments.grid import set_path
from src.experiments.interfaces import load_experiment
from src.experiments.registry import resolved_dict
from src.runs.context import Options, Run
from src.runs.run_dir import RunDir
from src.training.checkpointing.checkpoint import CheckpointMetadata
from src.training.checkpointing.saver import LoopSnapshot, Saver, Writer
from src.training.loop import fit
from src.training.loss import causal_lm_loss
from src.training.parallel.engine import Engine
from src.training.spec import TrainSpec

ROOT = Path(__file__).resolve().parents[2]
TARGET = 0.25
MODES = ("none", "waiting", "background")


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Within the block every write is waited for where it is started."""
    start = Writer.start

    def whole(self: Writer, write: Callable[[], None]) -> None:
        start(self, write)
        self.wait()

    with mock.patch.object(Writer, "start", whole):
        yield


@contextlib.contextmanager
def time_saves(standing: list[float]) -> Iterator[None]:
    """Within the block the seconds of each `save` are put into `standing`."""
    save = Saver.save

    def whole(self: Saver, engine: Engine, snapshot: LoopSnapshot) -> None:
        began = time.perf_counter()
        save(self, engine, snapshot)
        standing.append(time.perf_counter() - began)

    with mock.patch.object(Saver, "save", whole):
        yield


def trained(exp: dict[str, Any], data: Path, mode: str) -> tuple[nn.Module, float, float, int]:
    """The model, seconds of the second half of the steps, seconds in one `save` of them, and bytes of a checkpoint."""
    recipe = load_experiment(exp, "benchmark")
    config: Any = recipe
    half, began, end_time = config.loop.steps // 2, 0.0, 0.0
    calls, standing = 0, []

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        nonlocal calls, began
        calls += 1
        if calls == half:  # a step has one micro-batch; the second checkpoint comes when this step is done
            began = time.perf_counter()
        return causal_lm_loss(model, batch)

    def evaluate(_: Any) -> dict[str, float]:
        nonlocal end_time
        end_time = time.perf_counter()
        return {"val_loss": 0.0}

    with (
        tempfile.TemporaryDirectory(dir=data) as folder,
        time_saves(standing),
        waiting() if mode == "waiting" else contextlib.nullcontext(),
    ):
        places = Places(data, Path(folder))
        torch.manual_seed(0)
        model = config.model.build(places)
        tokenizer = tokenizers.load(model.name_or_path)
        train = config.data.build(places, tokenizer, "train", config.seed)
        with RunDir.open(places.runs, exp, resolved_dict(recipe, key="recipe")) as run_dir:
            options = Options(log_every=config.loop.steps if mode == "none" else half // 2, statistics_every=0)
            fit(
                TrainSpec(model, CheckpointMetadata({}, tokenizer), train, {}, loss, evaluate),
                Run(run_dir, places, options),
                config.loop,
                config.seed,
            )
            size = max(
                sum(file.stat().st_size for file in step.iterdir())
                for step in (run_dir.path / "checkpoints").glob("step-*")
            )
        return model, end_time - began, statistics.mean(standing[1:3]) if mode != "none" else 0.0, size


def main() -> None:
    """Print one line per round and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument(
        "--data_path",
        type=Path,
        default=ROOT / "results" / "data",
        help="also where checkpoints are written for a while",
    )
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    exp = exp_configs.BASE_TINY
    changes = {
        "loop.steps": args.steps,
        "loop.eval_every": args.steps,
        "loop.sequences_per_step": 1,
        "loop.micro_batch": 1,
    }
    for path, value in {**changes, "model.hidden_size": args.hidden_size, "model.num_layers": args.num_layers}.items():
        exp = set_path(exp, path, value, True)
    stalls: dict[str, list[float]] = {"waiting": [], "background": []}
    save_stalls: dict[str, list[float]] = {"waiting": [], "background": []}
    for i in range(args.rounds):
        results = {mode: trained(exp, args.data_path, mode) for mode in MODES[i % 3 :] + MODES[: i % 3]}
        first = results["none"][0]
        assert all(
            torch.equal(a, b)
            for model, *_ in results.values()
            for a, b in zip(first.parameters(), model.parameters(), strict=True)
        )
        for mode, of in stalls.items():
            of.append((results[mode][1] - results["none"][1]) / 2)
            save_stalls[mode].append(results[mode][2])
        if i == 0:
            parameters = sum(p.numel() for p in first.parameters())
            print(f"{parameters / 1e6:.0f} M parameters, {results['background'][3] / 1e6:.0f} MB a checkpoint")
        seconds = "   ".join(f"{mode} {results[mode][1]:.2f} s" for mode in MODES)
        print(
            f"round {i}: {seconds}   in save {save_stalls['waiting'][-1]:.2f} s "
            f"and {save_stalls['background'][-1]:.2f} s",
            flush=True,
        )
    for name, each in (("standing still in save", save_stalls), ("in all", stalls)):
        medians = {mode: statistics.median(of) for mode, of in each.items()}
        ratio = medians["background"] / medians["waiting"]
        seconds = f"{medians['background']:.2f} s in the background, {medians['waiting']:.2f} s waiting"
        print(f"{name}: {seconds}: {ratio:.2f} (target: at most {TARGET})")


if __name__ == "__main__":
    main()
