"""AdamWScale: the formula, whole tensors and parts of them, and what it keeps."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from src.training.optim.adamw_scale import AdamWScale
from tests import warm

RATE, BETAS, EPSILON = 0.02, (0.9, 0.999), 1e-6


def take_step(optimizer: torch.optim.Optimizer, gradients: dict[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient.clone()
    optimizer.step()


def test_the_first_step_of_the_worked_example():
    weight = nn.Parameter(torch.full((2, 2), 2.0))
    take_step(AdamWScale([weight], RATE, BETAS, EPSILON), {weight: torch.full((2, 2), 0.5)})
    # 0.02 · 2 · 1/(1 + 1e-6/(0.5 √0.001)): with a first gradient g, m/√v is (1 - β₁)/√(1 - β₂), whatever g
    assert (weight.detach() - 2).flatten().tolist() == pytest.approx([-0.0399975] * 4, abs=2e-7)


def reference(weight: list[float], gradients: list[list[float]], decay: float) -> list[float]:
    """The formula of the class, number by number."""
    first, second = [0.0] * len(weight), [0.0] * len(weight)
    for t, gradient in enumerate(gradients, 1):
        scale = max(1e-3, math.sqrt(sum(w * w for w in weight) / len(weight)))
        rate = RATE * math.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t) * scale
        for i, g in enumerate(gradient):
            first[i] = BETAS[0] * first[i] + (1 - BETAS[0]) * g
            second[i] = BETAS[1] * second[i] + (1 - BETAS[1]) * g * g
            weight[i] -= rate * first[i] / (math.sqrt(second[i]) + EPSILON)
            weight[i] -= RATE * decay * weight[i]
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("size", [0.0, 1e-5, 3.0])
def test_steps_are_those_of_the_formula(size: float, decay: float):
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(size * torch.randn(5, 3, generator=generator, dtype=torch.float64))
    other = nn.Parameter(torch.ones(2))  # of another size, and without a gradient in the first step
    optimizer = AdamWScale([{"params": [weight], "weight_decay": decay}, {"params": [other]}], RATE, BETAS, EPSILON)
    gradients = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(4)]
    expected = reference(weight.flatten().tolist(), [gradient.flatten().tolist() for gradient in gradients], decay)
    for t, gradient in enumerate(gradients):
        take_step(optimizer, {weight: gradient, **({other: torch.ones(2)} if t else {})})
    assert weight.flatten().tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert other.tolist() == pytest.approx(reference([1.0] * 2, [[1.0] * 2] * 3, 0.0), rel=1e-6)


def step_one_by_one(
    weights: list[nn.Parameter], moments: list[tuple[torch.Tensor, torch.Tensor]], step: int, decay: float
) -> None:
    """The formula, one tensor after the other."""
    for weight, (first, second) in zip(weights, moments, strict=True):
        gradient, (beta1, beta2) = weight.grad, BETAS
        assert gradient is not None
        scale = (
            torch.tensor(math.sqrt(torch.linalg.vector_norm(weight, dtype=torch.float64).item() ** 2 / weight.numel()))
            .clamp(1e-3)
            .item()
        )
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        rate = RATE * math.sqrt(1 - beta2**step) / (1 - beta1**step) * scale
        weight.addcdiv_(first, second.sqrt().add_(EPSILON), value=-rate)
        weight.mul_(1 - RATE * decay)


def test_all_tensors_at_once_move_by_the_bits_of_one_after_the_other():
    shapes = [(64, 32), (1000,), (3, 5, 7), (1,), (33,)]
    one, all_ = (
        [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in shapes]
        for _ in range(2)
    )
    moments = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in one]
    optimizer = AdamWScale(all_, RATE, BETAS, EPSILON, 0.1)
    for step in range(1, 5):
        for first, second in zip(one, all_, strict=True):
            first.grad = torch.randn(first.shape, generator=torch.Generator().manual_seed(step))
            second.grad = first.grad.clone()
        with torch.no_grad():
            step_one_by_one(one, moments, step, 0.1)
        optimizer.step()
    assert all(torch.equal(first, second) for first, second in zip(one, all_, strict=True))
    assert all(
        torch.equal(optimizer.state[weight]["exp_avg_sq"], second)
        for weight, (_, second) in zip(all_, moments, strict=True)
    )


def test_it_moves_a_tensor_a_thousand_times_as_large_a_thousand_times_as_far():
    small, large = nn.Parameter(torch.full((3,), 0.01)), nn.Parameter(torch.full((3,), 10.0))
    take_step(AdamWScale([small, large], RATE, BETAS, EPSILON), {small: torch.ones(3), large: torch.ones(3)})
    assert (large.detach() - 10) / (small.detach() - 0.01) == pytest.approx(torch.full((3,), 1000.0), rel=1e-4)


@pytest.mark.slow
def test_two_processes_with_parts_move_by_the_same_bits(tmp_path: Path):
    assert warm.torchrun(Path(__file__).with_name("shared_adamw_scale.py"), [str(tmp_path)], 2, tmp_path / "log") == ""
