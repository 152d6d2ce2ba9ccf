"""Speed of matrix products in bfloat16 on one core: torch's own, ours, and float32.

    python -m benchmarks.training.cpu_bfloat16 [--rows 768]

The weights are those of a layer of SmolLM2-135M, (1536, 576). Forward and backward passes read them transposed and as
they are. A line per product: GFLOP per processor second of each, and the ratio of ours to torch's own, which is 1 where
oneDNN has kernels for bfloat16.
"""

import argparse
import time

import torch

from src.support import torch_settings

SECONDS = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=768)
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    wide, narrow = 1536, 576
    weights, inputs, gradients = torch.randn(wide, narrow), torch.randn(rows, narrow), torch.randn(rows, wide)
    factors = {"forward": (inputs, weights.t()), "backward": (gradients, weights)}
    float32 = {name: speed(a, b) for name, (a, b) in factors.items()}
    halves = {name: (a.bfloat16(), b.bfloat16()) for name, (a, b) in factors.items()}
    native = {name: speed(a, b) for name, (a, b) in halves.items()}
    torch_settings.speed_up_bfloat16()
    for name, (a, b) in halves.items():
        ours = speed(a, b)
        print(
            f"{name}: float32 {float32[name]:.1f}, bfloat16 of torch {native[name]:.1f}, ours {ours:.1f}, "
            f"ratio {ours / native[name]:.1f}"
        )


def speed(a: torch.Tensor, b: torch.Tensor) -> float:
    """GFLOP per processor second of a @ b."""
    torch.mm(a, b)
    start, count = time.process_time(), 0
    while (seconds := time.process_time() - start) < SECONDS:
        torch.mm(a, b)
        count += 1
    return 2e-9 * count * a.shape[0] * a.shape[1] * b.shape[1] / seconds


if __name__ == "__main__":
    main()
