"""Scores from servers: batches against one sequence at a time, and against the model in this process.

    OMP_NUM_THREADS=1 python -m benchmarks.assistants.serving [--rows 32] [--tokens 128] [--hidden 256] [--layers 4]
    [--rounds 5]

A reward model of that size is made (its training is a formality), and served by the real Triton (`make triton`) over
gRPC and HTTP and by src.systems.assistants.serving.reward_server. Each round measures all ways in turn; the median of
the rounds' ratios is printed.

Aims: batched at least 3 times as fast as one by one, and at most 1.3 times the seconds in this process.
"""

import argparse
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from src.experiments.config import Places
from src.experiments.grid import override, ref
from src.experiments.identity import exp_id
from src.serving.served_model import load_served
from src.systems.assistants.rewards.remote import RemoteModel
from src.systems.assistants.serving.triton import repository
from tests import toy
from tests.servers import running_server
from tests.systems.assistants.serving.triton.process import Server
from tests.systems.assistants.train_assistants import REWARD, SFT, write_data


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def make_run(folder: Path, args: argparse.Namespace) -> tuple[Path, Places]:
    """A reward model of the requested size."""
    sizes = {
        "hidden_size": args.hidden,
        "num_layers": args.layers,
        "num_heads": 4,
        "max_positions": max(args.tokens, 96),
    }
    talker = override(
        SFT, {**{f"model.{name}": value for name, value in sizes.items()}, "loop.steps": 1, "loop.eval_every": 1}
    )
    judge = override(REWARD, {"model.base": ref(talker), "loop.steps": 1, "loop.eval_every": 1})
    write_data(folder / "data")
    assert toy.main(["-e", "sft", "reward"], {"sft": [talker], "reward": [judge]}, folder) == 0
    return folder / "runs" / exp_id(judge), Places(folder / "data", folder / "runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 32), ("tokens", 128), ("hidden", 256), ("layers", 4), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run, places = make_run(folder, args)
        model = load_served(run, places, "cpu")
        ids = [
            [(7919 * (row * args.tokens + n)) % model.vocabulary for n in range(args.tokens)]
            for row in range(args.rows)
        ]
        batch = torch.tensor(ids), torch.ones(args.rows, args.tokens)
        server_args = ["--data_path", str(places.data), "-sb", str(places.runs), "--device", "cpu", "--port", "0"]
        addresses = {
            "our server, HTTP": stack.enter_context(
                running_server(["src.systems.assistants.serving.reward_server", str(run), *server_args])
            )
        }
        models = folder / "models"
        options = Namespace(mode="rm", backend="python", name="judge", max_batch=args.rows, device="cpu")
        repository.write_model(run, models, places, options)
        triton = Server(models)
        stack.callback(triton.stop)
        addresses |= {f"Triton, {name}": f"{triton.address(name)}/judge" for name in ("grpc", "http")}
        clients = {name: RemoteModel(address, model.fingerprint, print) for name, address in addresses.items()}
        measure(args, clients, ids, lambda: model.score(*batch))


def measure(args: argparse.Namespace, clients: dict[str, RemoteModel], ids: Any, in_process: Callable[[], Any]) -> None:
    """Print both ratios of each way."""
    expected = in_process()
    for name, client in clients.items():
        apart = (torch.tensor(client.rewards(ids)) - expected).abs().max().item()
        assert apart < 1e-5, (name, apart)
    ratios: dict[str, list[tuple[float, float, float]]] = {name: [] for name in clients}
    for _ in range(args.rounds):
        here = seconds_of(in_process)
        for name, client in clients.items():
            together = seconds_of(lambda each=client: each.rewards(ids))
            alone = seconds_of(lambda each=client: [each.rewards([row]) for row in ids])
            ratios[name].append((together, alone / together, together / here))
    print(f"{args.rows} x {args.tokens} tokens, {args.layers} layers of {args.hidden}, median of {args.rounds} rounds:")
    for name, columns in ratios.items():
        together, faster, slower = (statistics.median(column) for column in zip(*columns, strict=True))
        print(
            f"{name}: {together * 1e3:.1f} ms a batch, {faster:.1f} times as fast as one by one, {slower:.2f} times "
            f"the seconds in process"
        )


if __name__ == "__main__":
    main()
