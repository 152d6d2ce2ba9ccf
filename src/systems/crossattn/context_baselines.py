"""Baselines of cross-attention on the same questions: prompts with and without a context, and Fusion-in-Decoder."""

from src.experiments.grid import grid, override, ref
from src.systems.crossattn.groups import BASE_TINY, CROSSATTN_TINY, CROSSATTN_TULU

# The baselines of XC-Cache. The tiny decoder with the context in its prompt, or without a context: untrained, with
# adapters, fully fine-tuned.
TINY_QUESTIONS = {"corpus": "stdlib_qa", "sequence_tokens": 64, "loss_on": "answer", "val_samples": 192}
PROMPTED_TINY = override(
    CROSSATTN_TINY,
    {
        "recipe": "prompted",
        "model": {
            "name": "lora",
            "rank": 16,
            "alpha": 32.0,
            "target_modules": ["c_attn", "c_fc", "c_proj"],
            "base": ref(BASE_TINY),
        },
        "data": {"name": "prompted_qa", "contexts": "all", "context_tokens": 96, **TINY_QUESTIONS},
    },
)
PROMPTED_TINY_AS_IT_IS = {
    **{key: PROMPTED_TINY[key] for key in ("recipe", "seed", "data", "answers")},
    "model": ref(BASE_TINY),
    "evaluation": {"micro_batch": 8},
}
FID_TINY = override(
    CROSSATTN_TINY,
    {
        "recipe": "fid",
        "model": {
            "name": "fusion_in_decoder",
            "base": {
                "name": "t5",
                "random": {
                    "tokenizer": "stdlib_tokenizer",
                    "hidden_size": 128,
                    "feed_forward_size": 256,
                    "num_layers": 3,
                    "num_heads": 4,
                },
            },
        },
        "data": {
            "name": "fid_qa",
            "corpus": "stdlib_qa",
            "contexts": "all",
            "passage_tokens": 128,
            "answer_tokens": 32,
            "val_samples": 192,
        },
    },
)
# Prompted Tulu 2: adapters and learning rates of XC-Cache's larger configuration, with as many context tokens as its
# cross-attention reads. The base is in bfloat16 instead of 8 bits. Run with --gradient_checkpointing.
PROMPTED_TULU = override(
    CROSSATTN_TULU,
    {
        "recipe": "prompted",
        "model": {
            "name": "lora",
            "rank": 360,
            "alpha": 720.0,
            "dropout_rate": 0.5,
            "target_modules": ["q_proj", "k_proj", "v_proj"],
            "base": {"name": "hf", "path": "allenai/tulu-2-dpo-7b", "dtype": "bfloat16"},
        },
        "data": {
            "name": "prompted_qa",
            "corpus": "nq",
            "contexts": "all",
            "context_tokens": 6144,
            "sequence_tokens": 512,
            "loss_on": "answer",
        },
        "loop.learning_rate": 1e-4,
        "loop.schedule": "linear",
        "loop.warmup_rate": 0.1,
        "loop.weight_decay": 1e-2,
        "loop.adam_epsilon": 1e-8,
    },
)
QUESTIONS_ASKED = {"split": "val", "max_new_tokens": 32, "metrics": [{"name": "squad"}]}
PROMPTED_TULU_AS_IT_IS = {
    "recipe": "prompted",
    "seed": 0,
    "model": PROMPTED_TULU["model"]["base"],
    "data": PROMPTED_TULU["data"],
    "evaluation": {"micro_batch": 1},
    "inference": QUESTIONS_ASKED,
}
# Fusion-in-Decoder with the options of XC-Cache's baselines/fid: up to 8 passages of 512 tokens, 2 questions per GPU, a
# constant rate after 1,000 steps. The numbers of steps and GPUs are not published. We use the steps of the other
# configurations and 8 GPUs.
FID_T5 = {
    "recipe": "fid",
    "seed": 0,
    "model": {"name": "fusion_in_decoder", "base": {"name": "t5", "path": "google-t5/t5-base", "dropout_rate": 0.1}},
    "data": {
        "name": "fid_qa",
        "corpus": "nq",
        "contexts": "all",
        "num_passages": 8,
        "keep_gold": True,
        "passage_tokens": 512,
        "answer_tokens": 64,
    },
    "loop": {
        "steps": 25_000,
        "sequences_per_step": 16,
        "micro_batch": 2,
        "learning_rate": 1e-4,
        "schedule": "constant_with_warmup",
        "warmup_rate": 0.04,
        "weight_decay": 0.1,
        "precision": "bfloat16",
        "eval_every": 1_000,
    },
    "inference": QUESTIONS_ASKED,
}

GROUPS = {
    "prompted_tiny": [
        override(PROMPTED_TINY_AS_IT_IS, {"data": {"name": "prompted_qa", "contexts": "none", **TINY_QUESTIONS}}),
        PROMPTED_TINY_AS_IT_IS,
        PROMPTED_TINY,
        override(PROMPTED_TINY, {"model": ref(BASE_TINY), "loop.learning_rate": 1e-3}),
    ],
    "fid_tiny": [FID_TINY],
    "prompted_tulu-7b": [PROMPTED_TULU_AS_IT_IS],
    "prompted_tulu-7b_lora": [PROMPTED_TULU],
    "fid_t5": grid(FID_T5, {"model.base.path": ["google-t5/t5-base", "google-t5/t5-large"]}),
    "fid_flan-t5-xl": [override(FID_T5, {"model.base.path": "google/flan-t5-xl", "loop.micro_batch": 1})],
}
