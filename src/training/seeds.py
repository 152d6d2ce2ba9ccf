"""Random seeds as functions of the experiment's seed and the step, independent of process state and world size.

For the order of samples see `orders`. Data sets draw masks and augmentation from (seed, epoch, index).
"""

import numpy as np
import torch


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """63-bit seed for the dropout of a micro-batch, numbered within the step over all processes."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> 1)


def generation_seed(seed: int, step: int, block: int, rank: int) -> int:
    """63-bit seed of process `rank` for a block of `Engine.generating`.

    block: number of the block since the last step.
    """
    return int(np.random.SeedSequence([seed, step, block, rank, 1]).generate_state(1, np.uint64)[0] >> 1)


def rollout_seed(seed: int, iteration: int, batch: int) -> int:
    """63-bit seed for sampling one batch of an iteration of rollouts, numbered over all processes."""
    return int(np.random.SeedSequence([seed, iteration, batch, 2]).generate_state(1, np.uint64)[0] >> 1)


def set_seed(seed: int, device: torch.device) -> None:
    """Seed the random numbers of the CPU, and of a GPU `device`.

    torch.manual_seed probes every kind of accelerator and takes a hundred times as long.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def has_drawn(seed: int, device: torch.device) -> bool:
    """Whether random numbers of `device` were drawn since `set_seed`."""
    gpu = device.type == "cuda"
    generator = torch.cuda.default_generators[torch.cuda.current_device()] if gpu else torch.default_generator
    return not torch.equal(generator.get_state(), torch.Generator(device).manual_seed(seed).get_state())
