"""The z-loss, and the loss and accuracy of encoder-decoders. The loss itself: test_optim.py."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from src.errors import TrainingError
from src.training.loss import cross_entropy, seq2seq_loss, watch_groups
from src.training.validation import SampleSums, measure


def test_z_loss_adds_the_squared_logarithm_of_the_softmax_denominator_where_something_is_learned():
    logits = torch.tensor([[math.log(2.0), math.log(6.0)], [5.0, 5.0]])
    loss = cross_entropy(logits, torch.tensor([1, -100]), z_loss=0.5)
    assert loss.item() == pytest.approx(math.log(8 / 6) + 0.5 * math.log(8) ** 2)


@pytest.mark.parametrize(
    ("mask", "poly_epsilon", "expected"),
    [("1100", 0.0, 0.813933), ("1111", 0.0, 0.724081), ("0000", 0.0, 0.0), ("1100", 1.0, 1.275687)],
)
def test_masked_cross_entropy_and_poly_loss(mask: str, poly_epsilon: float, expected: float):
    """Worked examples of the specification; the reference could not make its poly loss (B9), and where nothing is
    learned it is 0."""
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0], [0.0, 3.0, 1.0], [1.0, 1.0, 1.0]])
    targets = torch.tensor(
        [target if is_learned == "1" else -100 for target, is_learned in zip([0, 2, 1, 0], mask, strict=True)]
    )
    loss = cross_entropy(logits, targets, poly_epsilon=poly_epsilon)
    assert loss.item() / max(1, mask.count("1")) == pytest.approx(expected, abs=1e-6)


def test_z_loss_pulls_the_logits_to_zero():
    logits = torch.full((1, 3), 4.0, requires_grad=True)
    cross_entropy(logits, torch.tensor([0]), z_loss=1.0).backward()
    # d/dx of log(sum exp x)^2 is 2 log(sum exp x) softmax(x); the cross entropy's own gradient sums to 0.
    assert logits.grad is not None
    assert logits.grad.sum().item() == pytest.approx(2 * (4 + math.log(3)))


class Echo(nn.Module):
    """Finds the token that the decoder has read the likeliest, with odds of 3 to 1 each against the three others; reads
    no input."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor, use_cache: bool
    ) -> object:
        del input_ids, attention_mask, use_cache
        return SimpleNamespace(logits=nn.functional.one_hot(decoder_input_ids, 4).float() * math.log(3.0))


class Pairs:
    """Three samples of other lengths."""

    targets = ([1, 1, 2], [3], [0, 2])

    def __len__(self) -> int:
        return len(self.targets)

    def sample(self, epoch: int, index: int) -> list[int]:
        return self.targets[index]

    def collate(self, samples: list[list[int]]) -> dict[str, torch.Tensor]:
        T = max(map(len, samples))
        labels = torch.tensor([ids + [-100] * (T - len(ids)) for ids in samples])
        start = torch.zeros(len(samples), 1, dtype=torch.int64)
        return {
            "input_ids": start,
            "attention_mask": start.bool(),
            "decoder_input_ids": torch.cat([start, labels[:, :-1].clamp(min=0)], dim=1),
            "labels": labels,
            "loss_mask": labels != -100,
        }


def test_the_loss_of_an_encoder_decoder_is_that_of_its_labels():
    # The decoder reads 0 1 1 | 0 | 0 0 and should write 1 1 2 | 3 | 0 2: two of six tokens are those that it has read.
    batch = Pairs().collate([*Pairs.targets])
    assert seq2seq_loss(Echo(), batch).item() == pytest.approx(2 * math.log(2) + 4 * math.log(6))


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_accuracy_is_the_share_of_learned_tokens_that_are_likeliest(batch_size: int):
    """And the loss is of tokens, whatever the batches, the last one too (B7 of BigScience's metadata project: a mean of
    batches' means)."""
    sums = measure(Echo(), Pairs(), seq2seq_loss, batch_size, torch.device("cpu"), accuracy=True)
    assert (sums.loss, sums.accuracy) == pytest.approx(((2 * math.log(2) + 4 * math.log(6)) / 6, 2 / 6))
    assert measure(Echo(), Pairs(), seq2seq_loss, batch_size, torch.device("cpu")).loss == pytest.approx(sums.loss)


def test_a_loss_of_pairs_is_measured_by_the_pair():
    sums = measure(
        Echo(), Pairs(), seq2seq_loss, 2, torch.device("cpu"), accuracy=True, count=lambda batch: len(batch["labels"])
    )
    assert (sums.loss, sums.accuracy) == pytest.approx(((2 * math.log(2) + 4 * math.log(6)) / 3, 2 / 6))
    with pytest.raises(TrainingError, match="no scored tokens"):
        measure(Echo(), Pairs(), seq2seq_loss, 2, torch.device("cpu"), count=lambda _: 0)


def test_losses_by_group_by_hand():
    """Uniform logits over 4: each token costs ln 4. Places that are not learned count nothing, nor do losses outside
    the block."""
    logits = torch.zeros(5, 4)
    logits[3] = torch.tensor([math.log(5), 0, 0, 0])  # 5 / 8 for token 0
    logits[1, 0] = math.nan
    targets = torch.tensor([0, 0, -100, 0, -100])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    with watch_groups({"loss_mask": mask}, torch.tensor([0, 1]), 3) as sums:
        cross_entropy(logits, targets)
    cross_entropy(logits, targets)
    assert sums.tolist() == [pytest.approx([math.log(4), 1]), pytest.approx([math.log(8 / 5), 1]), [0, 0]]


def test_rows_of_one_sample_are_of_its_group():
    mask = torch.tensor([[True], [True], [True]])
    with watch_groups({"loss_mask": mask, "sample_of_row": torch.tensor([1, 1, 0])}, torch.tensor([0, 1]), 2) as sums:
        cross_entropy(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
    assert sums[:, 1].tolist() == [1, 2]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_the_losses_of_samples_make_the_mean(batch_size: int):
    device = torch.device("cpu")
    losses: list[SampleSums] = []
    measure(Echo(), Pairs(), seq2seq_loss, batch_size, device, samples=losses)
    assert [(sample.number, sample.tokens) for sample in losses] == [(0, 3), (1, 1), (2, 2)]
    each = [measure(Echo(), _One(i), seq2seq_loss, 1, device) for i in range(3)]
    assert [sample.nats for sample in losses] == pytest.approx([one.loss_sum for one in each])


class _One(Pairs):
    def __init__(self, index: int) -> None:
        self.targets = (Pairs.targets[index],)
