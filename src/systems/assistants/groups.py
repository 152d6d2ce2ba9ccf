"""Assistants: supervised fine-tuning, reward models and preferences."""

from typing import Any

from src.experiments.grid import override, ref

_WRITING = {"template": "oasst"}
_METRICS = [{"name": "expressions"}]

# Base model of the assistants, trained on every token of the standard library's doctests (python -m
# data_prep.assistants.stdlib_conversations).
BASE_TINY: dict[str, Any] = {
    "recipe": "sft",
    "seed": 0,
    "model": {
        "name": "gpt_bigcode",
        "tokenizer": "expression_tokenizer",
        "hidden_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "max_positions": 96,
    },
    "data": {
        "name": "packed",
        "documents": {
            "name": "conversations",
            "corpus": "stdlib_doctests",
            "sequence_tokens": 96,
            "writing": _WRITING,
            "train_all_roles": True,
        },
        "sequence_tokens": 96,
    },
    "loop": {
        "steps": 200,
        "sequences_per_step": 32,
        "micro_batch": 32,
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "eval_every": 100,
    },
}
# Tasks: write an expression of two numbers with a given value. Answers are evaluated in Python.
SFT_TINY: dict[str, Any] = {
    "recipe": "sft",
    "seed": 0,
    "model": ref(BASE_TINY),
    "data": {"name": "conversations", "corpus": "expression_tasks", "sequence_tokens": 80, "writing": _WRITING},
    "loop": {**BASE_TINY["loop"], "steps": 400},
    "answers": {"questions": 100, "max_new_tokens": 12, "metrics": _METRICS},
}
REWARD_TINY: dict[str, Any] = {
    "recipe": "reward",
    "seed": 0,
    "model": {"name": "reward", "base": ref(SFT_TINY)},
    "data": {"name": "ranked_replies", "corpus": "expression_replies", "sequence_tokens": 80, "writing": _WRITING},
    "loop": {
        "steps": 300,
        "sequences_per_step": 8,
        "micro_batch": 8,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "eval_every": 100,
        "best_metric": "val_accuracy",
        "best_mode": "max",
    },
}
DPO_TINY: dict[str, Any] = {
    "recipe": "dpo",
    "seed": 0,
    "model": ref(SFT_TINY),
    "data": {**REWARD_TINY["data"], "corpus": "expression_pairs", "max_replies": 2},
    "loop": {**REWARD_TINY["loop"], "steps": 100, "learning_rate": 2e-4, "eval_every": 50},
    "preference": {"sft_weight": 1.0},
}

# The same pairs as single replies with a label: 4 groups of 8 replies per step.
KTO_TINY: dict[str, Any] = {
    "recipe": "kto",
    "seed": 0,
    "model": ref(SFT_TINY),
    "data": {**SFT_TINY["data"], "name": "labeled_replies", "corpus": "expression_pairs", "group_size": 8},
    "loop": {**DPO_TINY["loop"], "sequences_per_step": 4, "micro_batch": 1},
}

# Policies with three rewards: the verifier, the verifier and the reward model, only the reward model.
SAMPLED = {"questions": 100, "samples": 4, "max_new_tokens": 12, "metrics": _METRICS}
GRPO_TINY: dict[str, Any] = {
    "recipe": "grpo",
    "seed": 0,
    "model": ref(SFT_TINY),
    "data": {"name": "rollouts", "prompts": SFT_TINY["data"], "rollouts": 256, "group_size": 8, "max_new_tokens": 12},
    "rewards": [{"name": "expressions"}],
    "loop": {
        "steps": 160,
        "sequences_per_step": 256,
        "micro_batch": 64,
        "learning_rate": 2e-4,
        "schedule": "constant_with_warmup",
        "warmup_rate": 0.05,
        "eval_every": 40,
        "extra_eval_steps": [1],
        "best_metric": "solved_mean@4",
        "best_mode": "max",
    },
    "sampled": SAMPLED,
}
PPO_TINY: dict[str, Any] = {
    "recipe": "ppo",
    "seed": 0,
    "model": {"name": "with_values", "base": ref(SFT_TINY)},
    "data": {**GRPO_TINY["data"], "group_size": 1, "passes": 2},
    "rewards": [
        {"name": "expressions", "correct": 1.0, "incorrect": -1.0},
        {"name": "reward_model", "model": ref(REWARD_TINY), "weight": 0.5, "squash": 4.0},
    ],
    "ppo": {"kl": {"weight": 0.05}},
    "loop": {
        **GRPO_TINY["loop"],
        "steps": 640,
        "sequences_per_step": 128,
        "learning_rate": 4e-4,
        "schedule": "linear",
        "eval_every": 80,
    },
    "sampled": SAMPLED,
}


def without_verifier(ppo: dict[str, Any]) -> dict[str, Any]:
    """The same with only the reward model, to show reward hacking."""
    rewards = [{**ppo["rewards"][1], "weight": 1.0, "squash": None}]
    return override(ppo, {"rewards": rewards, "loop.steps": 200, "loop.eval_every": 50})


def evaluation_of(trained: dict[str, Any]) -> dict[str, Any]:
    """Evaluate one model of the chain: share of solved tasks, with greedy and with sampled answers."""
    return {
        "recipe": "sft",
        "seed": trained["seed"],
        "model": ref(trained),
        "data": SFT_TINY["data"],
        "evaluation": {"micro_batch": 32},
        "answers": SFT_TINY["answers"],
        "sampled": {**SAMPLED, "samples": 16},
    }


def chain(seed: int) -> dict[str, dict[str, Any]]:
    """The experiments of the chain with one seed, by name."""
    base = override(BASE_TINY, {"seed": seed})
    sft = override(SFT_TINY, {"seed": seed, "model": ref(base)})
    reward = override(REWARD_TINY, {"seed": seed, "model.base": ref(sft)})
    reward_config = {**PPO_TINY["rewards"][1], "model": ref(reward)}
    ppo = override(PPO_TINY, {"seed": seed, "model.base": ref(sft), "rewards": [PPO_TINY["rewards"][0], reward_config]})
    return {
        "base": base,
        "sft": sft,
        "reward": reward,
        "dpo": override(DPO_TINY, {"seed": seed, "model": ref(sft)}),
        "grpo": override(GRPO_TINY, {"seed": seed, "model": ref(sft)}),
        "ppo": ppo,
        "ppo_hacked": without_verifier(ppo),
    }


# SmolLM2-135M (`make smollm2`) as an assistant: fine-tuned, ranked, aligned and taught arithmetic, each with a control.
# `make study-assistants` prepares the data: Alpaca, GSM8K, three folds of preference pairs, forks of Open-Assistant's
# trees, and arithmetic.
_CHAT = {"template": "tokenizer"}
SMOLLM2 = {"name": "hf", "path": "HuggingFaceTB/SmolLM2-135M-Instruct"}
SMOLLM2_LORA = {
    "name": "lora",
    "rank": 16,
    "alpha": 32.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "base": {**SMOLLM2, "dtype": "bfloat16"},
}
SMOLLM2_LOOP: dict[str, Any] = {
    "steps": 30,
    "sequences_per_step": 8,
    "micro_batch": 2,
    "schedule": "cosine",
    "warmup_rate": 0.1,
    "precision": "bfloat16",
    "eval_every": 15,
}
ARITHMETIC = {"name": "conversations", "corpus": "arithmetic", "sequence_tokens": 96, "writing": _CHAT}
SMOLLM2_SAMPLED = {
    "questions": 50,
    "samples": 16,
    "max_new_tokens": 16,
    "temperature": 0.7,
    "metrics": [{"name": "math"}],
}
_SEEDS = (0, 1, 2)


def smollm2_sft(seed: int, lora: bool, shuffled: bool = False) -> dict[str, Any]:
    """Fine-tuning on Alpaca and GSM8K, of all weights or of adapters. shuffled: with the answers of other questions."""
    documents = {
        "name": "conversations",
        "sequence_tokens": 384,
        "val_samples": 100,
        "writing": _CHAT,
        **({"shuffled_answers": True} if shuffled else {}),
    }
    parts = {corpus: {**documents, "corpus": corpus} for corpus in ("alpaca", "gsm8k")}
    return {
        "recipe": "sft",
        "seed": seed,
        "model": SMOLLM2_LORA if lora else SMOLLM2,
        "data": {"name": "packed", "documents": {"name": "mixture", "parts": parts}, "sequence_tokens": 384},
        "loop": {**SMOLLM2_LOOP, "learning_rate": 5e-4 if lora else 5e-5},
    }


def smollm2_untrained(data: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Evaluation of the model as it is, on held-out conversations."""
    exp = {"recipe": "sft", "seed": 0, "model": SMOLLM2_LORA["base"], "evaluation": {"micro_batch": 16}}
    return {**exp, "data": data, **settings}


def smollm2_pairs(corpus: str, shuffled: bool) -> dict[str, Any]:
    """Replies that people ranked. shuffled: with shuffled ranks."""
    return {
        "name": "ranked_replies",
        "corpus": corpus,
        "sequence_tokens": 256,
        "min_prompt_tokens": 64,
        "writing": _CHAT,
        **({"shuffled_ranks": True} if shuffled else {}),
    }


def smollm2_reward(fold: int, shuffled: bool = False) -> dict[str, Any]:
    """A reward model of preference pairs and of forks of trees. fold: the part of the pairs that is held out.

    Its seed is none of DPO's, which it judges.
    """
    parts = {"pairs": smollm2_pairs(f"pairs_{fold}", shuffled), "forks": smollm2_pairs("oasst_forks", shuffled)}
    return {
        "recipe": "reward",
        "seed": 10 + fold,
        "model": {"name": "reward", "pooling": "mean", "base": {**SMOLLM2, "dtype": "float32"}},
        "data": {"name": "mixture", "parts": parts},
        "loop": {**SMOLLM2_LOOP, "learning_rate": 5e-5},
    }


def smollm2_dpo(seed: int, shuffled: bool = False) -> dict[str, Any]:
    """Direct preference optimization of the fine-tuned adapters. shuffled: with shuffled ranks."""
    return {
        "recipe": "dpo",
        "seed": seed,
        "model": ref(smollm2_sft(seed, lora=True)),
        "data": {**smollm2_pairs("pairs_1", shuffled), "max_replies": 2},
        "loop": {**SMOLLM2_LOOP, "steps": 20, "eval_every": 10, "learning_rate": 1e-4},
    }


def smollm2_grpo(seed: int, shuffled: bool = False) -> dict[str, Any]:
    """GRPO on arithmetic, judged by reward `math`. shuffled: rewards for the answers of other problems."""
    return {
        "recipe": "grpo",
        "seed": seed,
        "model": SMOLLM2_LORA,
        "data": {
            "name": "rollouts",
            "prompts": {**ARITHMETIC, "corpus": "arithmetic_shuffled"} if shuffled else ARITHMETIC,
            "rollouts": 32,
            "group_size": 8,
            "max_new_tokens": 16,
            "sampling": {"temperature": 0.7},
        },
        "rewards": [{"name": "math"}],
        "loop": {
            **SMOLLM2_LOOP,
            "steps": 40,
            "sequences_per_step": 32,
            "micro_batch": 16,
            "learning_rate": 3e-4,
            "eval_every": 40,
            "best_metric": "solved_mean@16",
            "best_mode": "max",
        },
        "sampled": SMOLLM2_SAMPLED,
    }


GROUPS = {
    "assistant_tiny_base": [BASE_TINY],
    "assistant_tiny_sft": [SFT_TINY],
    "assistant_tiny_reward": [REWARD_TINY],
    "assistant_tiny_dpo": [DPO_TINY],
    "assistant_tiny_kto": [KTO_TINY, override(KTO_TINY, {"data.shuffled_labels": True})],
    "assistant_tiny_kto_judged": [evaluation_of(KTO_TINY)],
    "assistant_tiny_grpo": [GRPO_TINY],
    "assistant_tiny_ppo": [PPO_TINY],
    "assistant_tiny_ppo_hacked": [without_verifier(PPO_TINY)],
    "assistant_tiny_judged": [evaluation_of(chain(0)[name]) for name in ("base", "sft", "dpo")],
    "assistant_tiny_policies": [evaluation_of(chain(0)[name]) for name in ("grpo", "ppo", "ppo_hacked")],
    "assistant_tiny_seeds": [link for seed in (1, 2, 3) for link in chain(seed).values()],
    **{
        f"assistant_tiny_seeds_{name}": [evaluation_of(chain(seed)[name]) for seed in (1, 2, 3)]
        for name in ("base", "sft", "dpo", "grpo", "ppo", "ppo_hacked")
    },
    "assistant_tiny_reward_control": [override(REWARD_TINY, {"data.shuffled_ranks": True})],
    "smollm2_assistant_untrained": [smollm2_untrained(smollm2_sft(0, lora=True)["data"])],
    "smollm2_arithmetic_untrained": [smollm2_untrained(ARITHMETIC, sampled=SMOLLM2_SAMPLED)],
    "smollm2_sft": [*(smollm2_sft(seed, lora=True) for seed in _SEEDS), smollm2_sft(0, lora=False)],
    "smollm2_sft_control": [smollm2_sft(seed, lora=True, shuffled=True) for seed in _SEEDS],
    "smollm2_reward": [smollm2_reward(fold) for fold in (1, 2, 3)],
    "smollm2_reward_control": [smollm2_reward(fold, shuffled=True) for fold in (1, 2, 3)],
    "smollm2_dpo": [smollm2_dpo(seed) for seed in _SEEDS],
    "smollm2_dpo_control": [smollm2_dpo(seed, shuffled=True) for seed in _SEEDS],
    "smollm2_grpo": [smollm2_grpo(seed) for seed in range(5)],
    "smollm2_grpo_control": [smollm2_grpo(seed, shuffled=True) for seed in range(5)],
}
