"""What is told of a model's speed: the tokens that were written are counted, and the operations of one follow from the
sizes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from src.evaluation import speed
from src.evaluation.generation import AnswerGenerator, generated_counts

PROMPT, WIDTH, INNER, LAYERS, VOCABULARY, END = 11, 32, 48, 2, 20, 0


class Questions:
    """One question, of `PROMPT` tokens."""

    def prompt(self, index: int) -> list[int]:
        return [index + 1] * PROMPT

    def collate_prompts(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor(prompts)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}


class Ends:
    eos_token_id = END


@pytest.fixture
def generator() -> AnswerGenerator:
    """4 query heads of width 8, which share one head of keys and values."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(
        LlamaConfig(num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=64, **sizes)
    ).eval()
    return AnswerGenerator(model, Questions(), Ends(), 2, torch.device("cpu"))


def test_operations_of_a_token_follow_from_the_sizes(generator: AnswerGenerator):
    """A product of matrices costs two operations a weight; of five tokens the later four read 12 to 15 keys, 13.5 on
    average."""
    weights = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * 8 + 3 * WIDTH * INNER) + WIDTH * VOCABULARY
    attention = LAYERS * 2 * 2 * (PROMPT + 2.5) * WIDTH
    speeds = speed.measure(generator, 0, 9, tokens=6, seconds=1.5)
    assert speeds["flops_per_generated_token"] == 2 * weights + attention
    assert speeds["tokens_per_second"] == 4
    assert 0 < speeds["seconds_to_first_token"] < 10
    assert (speeds["batch_size"], speeds["processes"], speeds["device"]) == (2, 1, "cpu")


def test_where_operations_cannot_be_counted_nothing_is_said(generator: AnswerGenerator):
    assert speed.measure(generator, 0, 1, 1, 1.0)["flops_per_generated_token"] is None
    generator.model.register_parameter(
        "packed", torch.nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
    )
    assert speed.measure(generator, 0, 9, 1, 1.0)["flops_per_generated_token"] is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_flops_are_omitted_only_on_out_of_memory(generator: AnswerGenerator, error: type[Exception]):
    passes = []

    def refuse(*_: object) -> None:
        passes.append(1)
        if len(passes) > 3:  # the three first tokens are timed before
            raise error("too much")

    generator.model.register_forward_pre_hook(refuse)
    if error is RuntimeError:
        with pytest.raises(RuntimeError, match="too much"):
            speed.measure(generator, 0, 9, 1, 1.0)
    else:
        assert speed.measure(generator, 0, 9, 1, 1.0)["flops_per_generated_token"] is None


def test_written_tokens_are_counted_up_to_the_end():
    ids = torch.tensor([[5, 6, END, END], [5, 6, 7, END], [5, 6, 7, 8], [END, END, END, END]])
    assert generated_counts(ids, END) == [3, 4, 4, 1]
