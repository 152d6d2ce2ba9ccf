"""Run by two processes: FSDP2's parts are moved by the bits that whole tensors are, and go on from a checkpoint.
Argument: a folder."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from src.files import new_directory
from src.support import distributed
from src.training.checkpointing import checkpoint
from src.training.checkpointing.shard_store import ShardStore
from src.training.monitoring import parameter_statistics
from src.training.optim.adamw_scale import AdamWScale

STEPS = 3


def make_model(cut: bool) -> tuple[nn.Module, AdamWScale]:
    """The same weights in every process. Of three rows one process has two, of one vector of length 1 one has
    nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))
    if cut:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, AdamWScale(model.parameters(), 0.02, (0.9, 0.95), 1e-6, 0.1)


def train(model: nn.Module, optimizer: AdamWScale, steps: range) -> list[parameter_statistics.TensorSums]:
    """On the same input in every process, so that the mean of the gradients is that of one."""
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 7)).pow(2).sum().backward()
        optimizer.step()
    return parameter_statistics.gather_sums(parameter_statistics.weights(model, optimizer), model)


def tensors(model: nn.Module, optimizer: AdamWScale) -> dict[str, Tensor]:
    """Weights and the optimizer's state, whole."""
    state = {**dict(model.named_parameters()), **checkpoint.optimizer_tensors(model, optimizer)}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in state.items()
    }


def main(folder: Path) -> None:
    with distributed.session():
        whole, cut = make_model(False), make_model(True)
        of_whole, of_parts = train(*whole, range(STEPS)), train(*cut, range(STEPS))
        expected, result = tensors(*whole), tensors(*cut)
        assert expected.keys() == result.keys()
        for name, tensor in expected.items():
            assert torch.equal(result[name], tensor), name
        for one, other in zip(of_parts, of_whole, strict=distributed.is_main()):
            assert torch.allclose(one.sums, other.sums, rtol=1e-9, atol=0), f"{one.name} {one.context}"

        def write() -> None:
            with new_directory(folder / "checkpoint") as beside:
                save_file(checkpoint.optimizer_tensors(*whole), beside / checkpoint.OPTIMIZER)
                save_file(dict(whole[0].named_parameters()), beside / "model.safetensors")

        distributed.broadcast_from_rank0(write)
        again, optimizer = make_model(True)
        store = ShardStore()
        store.load(folder / "checkpoint", {name: parameter.detach() for name, parameter in again.named_parameters()})
        store.load_optimizer(folder / "checkpoint", again, optimizer)
        for model, its in (whole, (again, optimizer)):
            train(model, its, range(STEPS, 2 * STEPS))
        expected, result = tensors(*whole), tensors(again, optimizer)
        for name, tensor in expected.items():
            assert torch.equal(result[name], tensor), f"{name} after a restart"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
