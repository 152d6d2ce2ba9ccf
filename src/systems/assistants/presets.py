"""Open-Assistant's model settings (model/model_training/configs of LAION-AI/Open-Assistant, January 2024).

A group is named after its section there, for example assistant_pythia-12b. Prepare the data sets under the names used
here with `python -m data_prep.assistants.prepare_conversations`. Numbers of tokens, sequences, epochs and learning
rates are the original's. Half precision is bfloat16 here. An epoch has at most `MAX_SAMPLES` samples of each data set,
different ones in each epoch.
"""

from collections.abc import Sequence
from typing import Any

from src.experiments.grid import override, ref

CONTROL_TOKENS = ["<|prompter|>", "<|assistant|>", "<|system|>", "<|prefix_begin|>", "<|prefix_end|>"]
MAX_SAMPLES = 20_000
DEVICES = 8
"""Number of GPUs that share the sequences of a step, for all but the smallest models."""
# The section "defaults" and its mixes.
DEFAULT_MIX = (
    "adversarial_qa", "cnn_dailymail", "dive_mt", "gsm8k", "joke", "multi_news", "samsum", "scitldr", "soda",
    "soda_dialogue", "squad_v2", "ted_trans_de-ja", "ted_trans_nl-en", "trivia_qa_nocontext", "webgpt",
    "wmt2019_de-en", "wmt2019_ru-en", "wmt2019_zh-en", "xsum",
)  # fmt: skip
FEWER = {"gsm8k": 7473, "joke": 301, "samsum": 14732, "scitldr": 1992, "webgpt": 14251}
"""Number of training samples of the data sets that have fewer than `MAX_SAMPLES`."""
REWARD_MIX = {
    "anthropic_rlhf": {"fraction": 0.1},
    "augment_oasst": {"fraction": 1.0},
    "hellaswag": {"fraction": 0.5},
    "hf_summary_pairs": {"fraction": 0.1},
    "shp": {"fraction": 1.0},
    "webgpt_ranked": {"fraction": 1.0},
}
REWARD_SAMPLES = 16_000 + 20_000 + 9_000 + 20_000 + 39_000 + 14_000
"""Approximate number of conversations in an epoch of `REWARD_MIX`; only the end of the schedule depends on it."""
# Section: (hub id, learning rate, tokens, sequences per pass, passes per process, epochs, warm-up steps, whether rows
# are packed)
SFT: dict[str, tuple[str, float, int, int, int, int, int, bool]] = {
    "galactica-125m": ("facebook/galactica-125m", 5e-5, 512, 4, 2, 3, 600, False),
    "pythia-70m-deduped": ("EleutherAI/pythia-70m-deduped", 8e-6, 520, 2, 9, 3, 1000, True),
    "pythia-1b": ("EleutherAI/pythia-1b-deduped", 8e-6, 520, 4, 1, 3, 10, True),
    "pythia-6.9b": ("EleutherAI/pythia-6.9b-deduped", 8e-6, 2048, 4, 2, 3, 20, True),
    "pythia-12b": ("EleutherAI/pythia-12b-deduped", 6e-6, 2048, 2, 4, 16, 100, True),
    "gpt-neox": ("EleutherAI/gpt-neox-20b", 8e-6, 1024, 8, 2, 3, 1000, True),
    "gpt-jt": ("togethercomputer/GPT-JT-6B-v1", 8e-6, 1024, 4, 8, 3, 600, False),
    "codegen": ("Salesforce/codegen-2B-multi", 8e-6, 520, 2, 9, 3, 600, False),
    "cerebras-6.7b": ("cerebras/Cerebras-GPT-6.7B", 8e-6, 2048, 2, 32, 3, 600, True),
    "cerebras-13b": ("cerebras/Cerebras-GPT-13B", 6e-6, 2048, 2, 32, 3, 600, True),
    "llama-7b": ("huggyllama/llama-7b", 1e-5, 2048, 4, 2, 8, 100, True),
    "llama-13b": ("huggyllama/llama-13b", 1e-5, 2048, 4, 2, 8, 100, True),
    "llama-30b": ("huggyllama/llama-30b", 2e-5, 512, 1, 16, 8, 100, True),
    "falcon-7b": ("tiiuae/falcon-7b", 1e-5, 2048, 1, 2, 8, 100, False),
}
LORA = {"llama-13b": (24, 1), "llama-30b": (4, 1), "llama-65b": (12, 1)}
"""Base -> sequences per pass, passes per process. All: 12 epochs, 2,048 tokens, 300 warm-up steps."""
REWARD = {"6.9b": (1e-5, 3), "2.8b": (1e-5, 3), "1.4b": (8e-6, 2), "1b": (8e-6, 2)}
"""Size of Pythia -> learning rate, epochs. All: 2,048 tokens."""
_SMALL = ("galactica-125m", "pythia-70m-deduped")
_WRITING = {"template": "oasst"}


def conversations(
    corpora: Sequence[str], tokens: int, packed: bool = False, random_offset: float = 0.8
) -> dict[str, Any]:
    """Data of supervised fine-tuning: one data set, or a mixture with at most `MAX_SAMPLES` of each per epoch."""
    parts = {
        name: {
            "name": "conversations",
            "corpus": name,
            "sequence_tokens": tokens,
            "random_offset": random_offset,
            "writing": _WRITING,
        }
        for name in corpora
    }
    data = parts[corpora[0]] if len(parts) == 1 else {
        "name": "mixture", "parts": parts, "draw": {name: {"fraction": 1.0, "size": MAX_SAMPLES} for name in parts},
    }  # fmt: skip
    return {"name": "packed", "documents": data, "sequence_tokens": tokens} if packed else data


def sft(section: str, corpora: Sequence[str] = DEFAULT_MIX, **model: Any) -> dict[str, Any]:
    """A section of supervised fine-tuning on these data sets. model: more fields of its 'hf' model."""
    path, rate, tokens, micro_batch, passes, epochs, warmup, packed = SFT[section]
    samples = sum(FEWER.get(name, MAX_SAMPLES) for name in corpora)
    base = {"name": "hf", "path": path, "extra_tokens": CONTROL_TOKENS, **model}
    if section == "galactica-125m":  # its own tokenizer has no end token
        base = {"name": "hf", "path": path, "tokenizer": "galactica_oasst"}
    if section == "falcon-7b":
        base = {"name": "regularized", "base": base, "residual_dropout": 0.3, "dropout_by_layer": "growing"}
    return {
        "recipe": "sft",
        "seed": 0,
        "model": base,
        "data": conversations(corpora, tokens, packed),
        "loop": {
            **loop(
                micro_batch,
                micro_batch * passes * (1 if section in _SMALL else DEVICES),
                samples * epochs,
                warmup,
                rate,
            ),
            **({} if packed else {"group_by_length": True}),
            **({"precision": "float32"} if section == "galactica-125m" else {}),
        },
    }


def loop(micro_batch: int, sequences: int, samples: int, warmup: int, rate: float) -> dict[str, Any]:
    """The section "defaults" with these changes.

    sequences: per step. samples: in all epochs, before packing. warmup: steps.
    """
    steps = max(1, samples // sequences)
    return {
        "steps": steps,
        "sequences_per_step": sequences,
        "micro_batch": micro_batch,
        "learning_rate": rate,
        "warmup_rate": round(min(0.5, warmup / steps), 4),
        "adam_epsilon": 1e-12,
        "max_grad_norm": 2.0,
        "precision": "bfloat16",
        "eval_every": min(200, steps),
    }


def lora(section: str) -> dict[str, Any]:
    """Fine-tuning of low-rank adapters in all matrices."""
    micro_batch, passes = LORA[section]
    path = SFT[section][0] if section in SFT else "huggyllama/llama-65b"
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    base = {"name": "hf", "path": path, "dtype": "bfloat16", "extra_tokens": CONTROL_TOKENS}
    samples = sum(FEWER.get(name, MAX_SAMPLES) for name in DEFAULT_MIX)
    return override(
        sft("llama-13b"),
        {
            "model": {
                "name": "lora",
                "rank": 16,
                "alpha": 32.0,
                "dropout_rate": 0.05,
                "target_modules": names,
                "base": base,
            },
            "loop": loop(micro_batch, micro_batch * passes * DEVICES, samples * 12, 300, 5e-5),
        },
    )


def reward(size: str) -> dict[str, Any]:
    """oasst-rm-1-pythia-SIZE: a reward model on ranked replies of several sources."""
    rate, epochs = REWARD[size]
    parts = {
        name: {
            "name": "ranked_replies",
            "corpus": name,
            "sequence_tokens": 2048,
            "min_prompt_tokens": 256,
            "writing": _WRITING,
        }
        for name in REWARD_MIX
    }
    base = {"name": "hf", "path": f"EleutherAI/pythia-{size}-deduped", "extra_tokens": CONTROL_TOKENS}
    return {
        "recipe": "reward",
        "seed": 0,
        "model": {"name": "reward", "base": base},
        "data": {"name": "mixture", "parts": parts, "draw": REWARD_MIX},
        "loop": {
            **loop(1, 4 * DEVICES, REWARD_SAMPLES * epochs, 50, rate),
            "group_by_length": True,
            "best_metric": "val_accuracy",
            "best_mode": "max",
        },
    }


def rlhf(policy: dict[str, Any], size: str) -> dict[str, Any]:
    """pythia_rlhf and llama_rlhf: PPO with the reward model of this size.

    Differences: a step has 128 rollouts, a divisor of those of an iteration, instead of 18 per process. The KL is a
    mean over answers, instead of over prompts, answers and padding.
    """
    prompts = {"name": "conversations", "corpus": "oasst_export", "sequence_tokens": 1520, "writing": _WRITING}
    return {
        "recipe": "ppo",
        "seed": 0,
        "model": {"name": "with_values", "base": policy},
        "data": {
            "name": "rollouts",
            "prompts": prompts,
            "rollouts": 1024,
            "passes": 4,
            "max_new_tokens": 512,
            "sampling": {"top_p": 0.7},
            "generation_batch": 32,
            "long_prompts": "leave_out",
        },
        "rewards": [{"name": "reward_model", "model": ref(reward(size)), "template": "oasst"}],
        "ppo": {
            "kl": {"weight": 0.1, "target": 6.0, "horizon": 10_000},
            "clip": 0.4,
            "value_clip": 0.4,
            "reward_clip": 4.0,
        },
        "loop": {
            "steps": 10_000,
            "sequences_per_step": 128,
            "micro_batch": 16,
            "learning_rate": 1e-6,
            "schedule": "constant",
            "adam_epsilon": 1e-8,
            "weight_decay": 1e-6,
            "precision": "bfloat16",
            "eval_every": 250,
            "best_metric": "f1",
            "best_mode": "max",
        },
        "answers": {"questions": 16, "max_new_tokens": 512, "metrics": [{"name": "squad"}]},
    }


ROPE_SCALING = override(
    sft("llama-13b"),
    {
        "model": override(
            lora("llama-13b")["model"],
            {"base.path": "meta-llama/Llama-2-13b-hf", "base.rope": {"kind": "linear", "factor": 2.0}},
        ),
        "data": conversations(DEFAULT_MIX, 4048, packed=True),
    },
)  # fmt: skip
FALCON_NTK = override(
    sft("falcon-7b"), {"model.base.rope": {"kind": "ntk", "factor": 2.0}, "data": conversations(DEFAULT_MIX, 4048)}
)

GROUPS = {
    **{f"assistant_{section}": [sft(section)] for section in SFT},
    "assistant_galactica-125m_webgpt": [sft("galactica-125m", ["webgpt"])],
    "assistant_galactica-125m_oasst": [sft("galactica-125m", ["oasst_export"])],
    "assistant_llama-13b_oasst": [sft("llama-13b", ["oasst_export"])],
    **{f"assistant_lora-{section}": [lora(section)] for section in LORA},
    "assistant_llama-2-13b_rope": [ROPE_SCALING],
    "assistant_falcon-7b_ntk": [FALCON_NTK],
    **{f"assistant_rm-pythia-{size}": [reward(size)] for size in REWARD},
}
RLHF = {
    "assistant_pythia_rlhf": [rlhf(ref(sft("pythia-12b")), "1.4b")],
    "assistant_llama_rlhf": [rlhf({"name": "regularized", "base": ref(sft("llama-30b")), "frozen_layers": 52}, "6.9b")],
}
"""Policies that start from models of `GROUPS`."""
