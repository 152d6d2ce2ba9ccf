"""BufferPool of tensors whose memory is used again."""

import torch

from src.training.parallel.engine import BufferPool


def test_a_copy_is_not_reached_by_later_changes_and_its_memory_is_used_again():
    weight, copies = torch.arange(4.0), BufferPool()
    first = copies.copies([("weight", weight)])
    weight += 1
    assert first["weight"].tolist() == [0, 1, 2, 3]
    second = copies.copies([("weight", weight)])
    assert second["weight"].tolist() == [1, 2, 3, 4]
    assert second["weight"].data_ptr() == first["weight"].data_ptr()


def test_a_tensor_that_has_changed_its_shape_or_type_gets_new_memory():
    copies = BufferPool()
    copies.copies([("a", torch.zeros(2)), ("gone", torch.zeros(1))])
    assert copies.copies([("a", torch.zeros(2, dtype=torch.bfloat16))])["a"].dtype == torch.bfloat16
    again = copies.copies([("a", torch.ones(3))])
    assert again.keys() == {"a"}
    assert again["a"].tolist() == [1, 1, 1]


def test_a_parameter_is_copied_without_its_graph():
    assert not BufferPool().copies([("a", torch.nn.Parameter(torch.ones(2)))])["a"].requires_grad
