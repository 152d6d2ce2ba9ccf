"""What a policy samples behind prompts: a prompt that is answered several times is read once, and the answers stay the
same."""

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model

from src.systems.assistants.rl.policy import Generation

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
IDS = {
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}  # so large that a prompt matters


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **IDS))


def with_adapters() -> Any:
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), llama())


def gpt_bigcode() -> Any:
    return transformers.GPTBigCodeForCausalLM(
        transformers.GPTBigCodeConfig(vocab_size=40, n_embd=32, n_head=4, n_layer=2, **IDS)
    )


def with_window() -> Any:
    """Its layers keep the last tokens alone."""
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3, **IDS)
    )


def prompts(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Padded on the left, with a token that prompts have too."""
    longest = max(map(len, rows))
    ids = torch.tensor([[2] * (longest - len(row)) + row for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


def sample(model: Any, batch: dict[str, torch.Tensor], has_repeated_prompts: bool) -> tuple[list[list[int]], int]:
    """The answers, and how many tokens were read for them."""
    read: list[int] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    with torch.no_grad():
        answers = Generation(
            5, 1.0, {"top_p": 1.0, "top_k": 0}, [1], [3], has_repeated_prompts=has_repeated_prompts
        ).sample(model, batch, seed=7)
    handle.remove()
    return answers, sum(read)


@pytest.mark.parametrize("build", [llama, gpt_bigcode, with_adapters, with_window])
def test_a_prompt_that_is_answered_several_times_is_read_once(build: Any):
    torch.manual_seed(0)
    model = build().eval()
    long, short = [5, 6, 7, 8, 9, 10, 11, 12], [2, 9, 7]
    batch = prompts(
        *[long] * 4, *[short] * 4, [2, 2, *short], long
    )  # the last but one differs from the one before in its length alone
    answers, tokens = sample(model, batch, has_repeated_prompts=True)
    expected_answers, all_tokens = sample(model, batch, has_repeated_prompts=False)
    assert answers == expected_answers
    assert len({tuple(answer) for answer in answers[:4]}) > 1
    if build is not with_window:
        assert all_tokens - tokens == (10 - 4) * 8 - 10, (
            "four prompts are read, and the last token of each row once more"
        )


@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(length: int):
    torch.manual_seed(0)
    model, batch = llama().eval(), prompts([5] * length, [5] * length)
    assert sample(model, batch, has_repeated_prompts=True)[0] == sample(model, batch, has_repeated_prompts=False)[0]


@pytest.mark.parametrize(
    "settings", [{"min_p": 0.9}, {"typical_p": 0.1}, {"repetition_penalty": 9.0}, {"no_repeat_ngram_size": 1}]
)
def test_generation_config_of_pretrained_model_is_ignored(settings: dict[str, float]):
    """Its generation_config.json; else the log-probabilities that are learned would be those of another
    distribution."""
    torch.manual_seed(0)
    model, batch = llama().eval(), prompts(*[[5, 6, 7]] * 32)
    expected_answers, _ = sample(model, batch, has_repeated_prompts=True)
    model.generation_config.update(**settings)
    config = model.generation_config
    assert sample(model, batch, has_repeated_prompts=True)[0] == expected_answers
    assert model.generation_config is config
