"""Seeds of random draws: functions of the experiment's seed and the step, never of process state or world size.

The order of samples has its own, see `orders`; masks and augmentation are drawn by the data sets from (seed, epoch,
index).
"""

import numpy as np
import torch


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """Seed of the dropout of one micro-batch (its number within the step over all processes): 63 bits."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> 1)


def generation_seed(seed: int, step: int, block: int, rank: int) -> int:
    """Seed of what process `rank` draws in a block of `Engine.generating`,
    `block` of them after the last step: 63 bits."""
    return int(np.random.SeedSequence([seed, step, block, rank, 1]).generate_state(1, np.uint64)[0] >> 1)


def rollout_seed(seed: int, iteration: int, batch: int) -> int:
    """Seed of what is sampled in one batch of an iteration of rollouts, numbered over all processes: 63 bits."""
    return int(np.random.SeedSequence([seed, iteration, batch, 2]).generate_state(1, np.uint64)[0] >> 1)


def set_seed(seed: int, device: torch.device) -> None:
    """Seed the CPU's random numbers, and those of a GPU `device`.

    torch.manual_seed probes every kind of accelerator, which takes a hundred times as long."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def has_drawn(seed: int, device: torch.device) -> bool:
    """Whether random numbers of `device` were drawn since `set_seed`."""
    gpu = device.type == "cuda"
    generator = torch.cuda.default_generators[torch.cuda.current_device()] if gpu else torch.default_generator
    return not torch.equal(generator.get_state(), torch.Generator(device).manual_seed(seed).get_state())
