"""All settings of torch for rounding, memory, and the end of hanging trainings.

Settings in the environment take precedence. docs/long_trainings.md explains each choice; env.json records the effective
settings.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective. Other ranks wait while rank 0 scores answers and writes checkpoints."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the GPU memory allocator: for torch 2.9 and later, and for older versions."""
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # a failed or late collective ends the process, not just hangs
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
}
"""Environment variables of NCCL's watchdog and flight recorder (the last collectives of each process)."""
DUMP = "TORCH_FR_DUMP_TEMP_FILE"
"""Environment variable: path prefix of the flight recorder's files, to which torch appends the rank."""
GRADIENT_CHECKPOINTING = ("full", "selective")
"""Ways to recompute layers in the backward pass; see `training.parallel.memory.checkpoint_layers`."""
MIN_ROWS = 64
"""Rows of a product from which `speed_up_bfloat16` applies; with fewer, the conversion of a weight takes longer."""
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
VARIABLES = (*ALLOCATOR, *ENVIRONMENT, DUMP, WORKSPACE, "NVIDIA_TF32_OVERRIDE")


def make(deterministic: bool = False) -> None:
    """Apply the settings in this process, before it uses a GPU or joins a process group.

    Matrix products of float32 use float32, never TF32, and kernels are not chosen by benchmarks. deterministic: use
    only deterministic algorithms; torch raises a RuntimeError for operations without one.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = (
            "expandable_segments:True"  # batches vary in length, and fixed segments would fragment
        )
    if deterministic:
        os.environ.setdefault(WORKSPACE, ":4096:8")  # required by cuBLAS
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    if (
        deterministic or torch.are_deterministic_algorithms_enabled()
    ):  # any call imports torch._inductor, which takes 0.8 s
        torch.use_deterministic_algorithms(deterministic)


def speed_up_bfloat16() -> None:
    """Where oneDNN has no kernels for bfloat16, compute large matrix products on the CPU as such kernels do: with sums
    in float32, and the result rounded once. torch's own are slower: benchmarks/training/cpu_bfloat16.py.

    Smaller products, other types, other devices and compiled graphs stay as they are.
    """
    if not _onednn_has_bfloat16():
        _float32_products()


def _onednn_has_bfloat16() -> bool:
    """False on CPUs with only AVX2, and for builds of torch without oneDNN."""
    import torch

    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def _float32_products() -> Any:
    """Replace torch's kernels until the returned library is deleted."""
    import torch

    def kernel(name: str) -> Any:
        original: Any = torch.library.get_kernel(f"aten::{name}", "CPU")

        def compute(keys: Any, *tensors: Any, **scales: Any) -> Any:
            if tensors[-2].shape[-2] < MIN_ROWS or any(each.dtype != torch.bfloat16 for each in tensors):
                return original.call_boxed(keys, *tensors, **scales)
            return original.call_boxed(keys, *(each.float() for each in tensors), **scales).bfloat16()

        return compute

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            library.impl(name, kernel(name), "CPU", with_keyset=True)
    return library


@contextlib.contextmanager
def flight_recorder_in(folder: Path) -> Iterator[None]:
    """Let failed or late collectives in the block write <folder>/flight_recorder_RANK, unless the user sets another
    path. torch reads the variable at its first dump, which ends the process."""
    if DUMP in os.environ:
        yield
        return
    os.environ[DUMP] = str(folder.resolve() / "flight_recorder_")
    try:
        yield
    except RuntimeError:  # of a collective: torch's watchdog can still be about to write
        raise
    except BaseException:
        del os.environ[DUMP]
        raise
    del os.environ[DUMP]


def describe() -> dict[str, Any]:
    """The effective settings as JSON values, for env.json."""
    import torch
    import torch.cuda.nccl

    gpu = torch.cuda.is_available()
    return {
        "float32_matmul": torch.get_float32_matmul_precision(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "onednn_bfloat16": _onednn_has_bfloat16(),
        "bfloat16_reduced_precision_sums": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "collective_timeout_seconds": COLLECTIVE_TIMEOUT.total_seconds(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
