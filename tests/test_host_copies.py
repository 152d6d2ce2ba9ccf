"""What the CPU knows of tensors on a device: the same numbers as asking the device, and the same masks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils

from src import host_copies
from src.host_copies import (
    change_both,
    host_copy,
    pick,
    pick_before,
    places,
    read_together,
    remember,
    to_device,
    write_beside,
)

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
BIG = {"n_embd": 16, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
T5 = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "decoder_start_token_id": 0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(vocab_size=32, **SIZES),
    "mistral": lambda: transformers.MistralConfig(vocab_size=32, sliding_window=3, **SIZES),
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(vocab_size=32, n_positions=16, **BIG),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=32, n_positions=16, **BIG),
    "t5": lambda: transformers.T5Config(vocab_size=32, **T5),
}
WIDTHS = {"nothing": (8, 8, 8), "right": (8, 5, 2), "left": (8, -5, -2)}
"""Real tokens of each row, by where padding is; negative: at the end."""
IDS = torch.randint(4, 32, (3, 8), generator=torch.Generator().manual_seed(0))


def masks(widths: tuple[int, ...]) -> Tensor:
    place = torch.arange(8)
    return torch.stack([place < n if n > 0 else place >= 8 + n for n in widths])


def known(tensor: Tensor) -> Tensor:
    """As if it were on a device: another tensor, whose copy on the CPU is known."""
    return remember(tensor.clone(), tensor)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", WIDTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_makes_the_masks_that_it_would_make(name: str, padding: str, attention: str):
    host_copies.answer_masks()
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = attention
    t5 = name == "t5"
    model = (transformers.T5ForConditionalGeneration if t5 else transformers.AutoModelForCausalLM.from_config)(
        config
    ).eval()
    mask, more = masks(WIDTHS[padding]), {"decoder_input_ids": IDS} if t5 else {}
    asked = model(input_ids=IDS, attention_mask=mask, use_cache=False, **more).logits
    told = model(input_ids=IDS, attention_mask=known(mask), use_cache=False, **more).logits
    assert torch.equal(asked[mask], told[mask])
    without = model(input_ids=IDS, use_cache=False, **more).logits
    assert torch.equal(told[mask], without[mask]) == (padding == "nothing" or (padding == "right" and not t5)), (
        "padding is seen"
    )


@pytest.mark.parametrize("lengths", [(8,), (3, 5), (2, 2, 4)])
def test_rows_are_packed_as_their_positions_say(lengths: tuple[int, ...]):
    host_copies.answer_masks()
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval()
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(3, 8).contiguous()
    found = masking_utils.find_packed_sequence_indices(known(positions))
    assert (found is None) == (len(lengths) == 1)
    asked = model(input_ids=IDS, position_ids=positions, use_cache=False).logits
    assert torch.equal(asked, model(input_ids=IDS, position_ids=known(positions), use_cache=False).logits)


def test_a_mask_is_made_where_the_copy_says_that_there_is_padding():
    """The copy alone decides: that of another mask gives its result."""
    host_copies.answer_masks()
    hidden, full = masks((8, 5, 2)), masks((8, 8, 8))
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    sizes = {"batch_size": 3, "q_length": 8, "kv_length": 8}
    assert make(**sizes, attention_mask=remember(hidden.clone(), full)) is None
    made = make(**sizes, attention_mask=remember(full.clone(), hidden))
    assert made is not None
    assert made[:, 0, -1].equal(full)
    with host_copies.nothing_hidden():
        assert make(**sizes, attention_mask=hidden) is None
    assert make(**sizes, attention_mask=hidden)[:, 0, -1].equal(hidden)


def test_a_copy_with_other_columns_than_the_keys_is_not_believed():
    host_copies.answer_masks()
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    shorter = torch.ones(3, 6, dtype=torch.bool)
    assert not make(batch_size=3, q_length=8, kv_length=8, attention_mask=known(shorter))[:, 0, -1, 6:].any()


@pytest.mark.parametrize("wrap", [lambda mask: mask, known])
def test_what_is_picked_is_what_a_mask_picks(wrap: Callable[[Tensor], Tensor]):
    mask, values = masks((8, -5, 2)), torch.randn(3, 8, 4)
    assert pick(values, wrap(mask)).equal(values[mask])
    assert pick_before(values, wrap(mask)).equal(values[:, :-1][mask[:, 1:]])
    assert places(wrap(mask)).equal(mask.flatten().nonzero()[:, 0])
    assert pick(values, wrap(torch.zeros_like(mask))).shape == (0, 4)


def test_copies_are_remembered_and_changed_together():
    mask = masks((8, 5, 2))
    on_device = known(mask)
    assert host_copy(on_device) is mask
    assert host_copy(on_device[None]) is not mask
    changed = change_both(lambda own: own.any(dim=1), on_device)
    assert host_copy(changed) is not changed
    assert host_copy(changed).equal(mask.any(dim=1))
    assert host_copy(change_both(Tensor.bool, mask)) is mask
    (moved,) = to_device({"mask": mask}, torch.device("cpu")).values()
    assert moved is mask


def test_numbers_are_read_as_they_were_given():
    parts = (
        torch.tensor([1.5, 2.0], dtype=torch.float64),
        torch.zeros(0, dtype=torch.float64),
        torch.tensor([3.25], dtype=torch.float64),
    )
    assert read_together(*parts) == [[1.5, 2.0], [], [3.25]]
    assert write_beside(torch.tensor(1.0), torch.tensor(0.5)).dtype == torch.float64
