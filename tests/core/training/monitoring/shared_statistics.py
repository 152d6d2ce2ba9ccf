"""Run by two processes: sums over shared parameters are those of a model that one process has whole. Argument: fsdp, or
a ZeRO stage."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from src.support import distributed
from src.training.monitoring import parameter_statistics
from src.training.monitoring.parameter_statistics import TensorSums

STEPS = 3


def make_layer() -> tuple[nn.Module, Tensor]:
    """The same model and the same input in every process, so that the mean of the gradients is that of one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(4, 7)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(model: nn.Module, optimizer: Any, x: Tensor) -> list[TensorSums]:
    tensor_sums = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        tensor_sums = parameter_statistics.gradients(model)
        optimizer.step()
    return parameter_statistics.gather_sums(tensor_sums + parameter_statistics.weights(model, optimizer), model)


def fully_sharded() -> list[TensorSums]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = make_layer()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return trained(model, adamw(model), x)


def zero(stage: int) -> list[TensorSums]:
    import deepspeed
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(CPU_Accelerator())
    model, x = make_layer()
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see ZeroEngine
    deepspeed.init_distributed(dist_backend=None, auto_mpi_discovery=False)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    tensor_sums = []
    for _ in range(STEPS):
        engine.backward(engine(x).pow(2).sum())
        tensor_sums = parameter_statistics.gradients(model)
        engine.step()
    return parameter_statistics.gather_sums(tensor_sums + parameter_statistics.weights(model, optimizer), model)


def main() -> None:
    mode = sys.argv[1]
    with distributed.session():
        model, x = make_layer()
        whole = trained(model, adamw(model), x)
        shared = fully_sharded() if mode == "fsdp" else zero(int(mode))
        if not distributed.is_main():
            assert not whole, "what every process has whole, rank 0 alone reads"
            return
        assert [(item.name, item.context) for item in shared] == [(item.name, item.context) for item in whole]
        assert len(whole) == 4 * 5
        for one, other in zip(shared, whole, strict=True):
            assert torch.allclose(one.sums, other.sums, rtol=1e-9, atol=0), (
                f"{one.name} {one.context}: {one.sums} {other.sums}"
            )


if __name__ == "__main__":
    main()
