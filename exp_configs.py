"""Every experiment: EXP_GROUPS maps the name of a group to a list of plain dicts. `python trainval.py -e NAME` runs a group."""

from src.exp_groups import t5
from src.experiments.grid import changed, grid, ref, seeds

# A GPTBigCode model of 2.4 M parameters, trained from scratch on the source of the Python standard library.
BASE_TINY = {
    "recipe": "lm",
    "seed": 0,
    "model": {
        "name": "gpt_bigcode",
        "tokenizer": "stdlib_tokenizer",
        "hidden_size": 192,
        "num_layers": 4,
        "num_heads": 6,
        "max_positions": 256,
    },
    "data": {"name": "text", "corpus": "stdlib_text", "sequence_tokens": 128, "val_sequences": 128},
    "loop": {
        "steps": 200,
        "sequences_per_step": 24,
        "micro_batch": 12,
        "learning_rate": 2e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "weight_decay": 0.1,
        "eval_every": 100,
    },
}

# Cross-attention layers in that model, trained to answer questions about a function or class that only they can read.
CROSSATTN_TINY = {
    "recipe": "crossattn",
    "seed": 0,
    "model": {"name": "cross_attention", "num_layers": 2, "stride": 1, "base": ref(BASE_TINY)},
    "data": {"name": "qa", "corpus": "stdlib_qa", "context_tokens": 96, "sequence_tokens": 64, "loss_on": "answer", "val_samples": 192},
    "loop": {
        "steps": 120,
        "sequences_per_step": 16,
        "micro_batch": 8,
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "eval_every": 60,
    },
    "answers": {"questions": 32, "max_new_tokens": 12, "metrics": [{"name": "squad"}]},
}

# XC-Cache on Natural Questions (arXiv 2404.15420): the sizes, placements and rates of its released configurations. Needs the
# base model, the prepared data and GPUs. A step reads what one GPU read between two updates there.
CROSSATTN = {
    "recipe": "crossattn",
    "seed": 0,
    "model": {
        "name": "cross_attention",
        "num_layers": 4,
        "stride": 2,
        "shared_weights": True,
        "final_layer": False,
        "context_dropout_rate": 0.3,
        "base": {"name": "hf", "path": "TabbyML/SantaCoder-1B", "dtype": "float16"},
    },
    "data": {"name": "qa", "corpus": "nq", "context_tokens": 2048, "sequence_tokens": 512, "loss_on": "all", "include_contexts": True},
    "loop": {
        "steps": 25_000,
        "sequences_per_step": 16,
        "micro_batch": 1,
        "learning_rate": 6e-4,
        "schedule": "linear",
        "warmup_rate": 0.05,
        "weight_decay": 5e-2,
        "precision": "float16",
        "eval_every": 1_000,
    },
}
CROSSATTN_STARCODERBASE_3B = changed(
    CROSSATTN,
    {
        "model": {
            "name": "cross_attention",
            "num_layers": 6,
            "stride": 6,
            "final_layer": True,
            "hidden_size": 1024,
            "num_heads": 16,
            "context_dropout_rate": 0.4,
            "base": {"name": "hf", "path": "bigcode/starcoderbase-3b", "dtype": "float16"},
        },
        "data.context_tokens": 4096,
        "loop.sequences_per_step": 128,
        "loop.micro_batch": 4,
        "loop.learning_rate": 5e-4,
        "loop.schedule": "cosine",
        "loop.weight_decay": 1e-3,
    },
)
# In bfloat16; run these with --gradient_checkpointing.
CROSSATTN_STARCHAT = changed(
    CROSSATTN,
    {
        "model": {
            "name": "cross_attention",
            "num_layers": 4,
            "stride": 8,
            "final_layer": True,
            "shared_projections": True,
            "hidden_size": 2048,
            "num_heads": 32,
            "context_dropout_rate": 0.25,
            "base": {"name": "hf", "path": "HuggingFaceH4/starchat-alpha", "dtype": "bfloat16"},
        },
        "data.context_tokens": 4096,
        "loop.sequences_per_step": 32,
        "loop.learning_rate": 2e-4,
        "loop.schedule": "cosine",
        "loop.weight_decay": 1e-2,
        "loop.precision": "bfloat16",
    },
)
CROSSATTN_TULU = changed(
    CROSSATTN,
    {
        "model": {
            "name": "cross_attention",
            "num_layers": 4,
            "stride": 6,
            "final_layer": True,
            "hidden_size": 1024,
            "num_heads": 32,
            "num_key_value_heads": 32,
            "context_dropout_rate": 0.1,
            "base": {"name": "hf", "path": "allenai/tulu-2-dpo-7b", "dtype": "bfloat16"},
        },
        "data.context_tokens": 6144,
        "loop.sequences_per_step": 32,
        "loop.learning_rate": 2e-4,
        "loop.weight_decay": 0.0,
        "loop.precision": "bfloat16",
    },
)
CROSSATTN_TULU_ABLATION = changed(CROSSATTN_TULU, {"model.context_dropout_rate": 0.2, "loop.schedule": "cosine", "loop.weight_decay": 1e-3})

# The baselines that XC-Cache compares with, on the same questions. That tiny decoder with the context in its prompt, or without any:
# as it stands, with adapters, trained whole.
TINY_QUESTIONS = {"corpus": "stdlib_qa", "sequence_tokens": 64, "loss_on": "answer", "val_samples": 192}
PROMPTED_TINY = changed(
    CROSSATTN_TINY,
    {
        "recipe": "prompted",
        "model": {"name": "lora", "rank": 16, "alpha": 32.0, "target_modules": ["c_attn", "c_fc", "c_proj"], "base": ref(BASE_TINY)},
        "data": {"name": "prompted_qa", "contexts": "all", "context_tokens": 96, **TINY_QUESTIONS},
    },
)
PROMPTED_TINY_AS_IT_IS = {
    **{key: PROMPTED_TINY[key] for key in ("recipe", "seed", "data", "answers")},
    "model": ref(BASE_TINY),
    "evaluation": {"micro_batch": 8},
}
FID_TINY = changed(
    CROSSATTN_TINY,
    {
        "recipe": "fid",
        "model": {
            "name": "fusion_in_decoder",
            "base": {
                "name": "t5",
                "random": {"tokenizer": "stdlib_tokenizer", "hidden_size": 128, "feed_forward_size": 256, "num_layers": 3, "num_heads": 4},
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
# Prompted Tulu 2: the adapters and rates of XC-Cache's larger configuration, which has its base in 8 bits, and as many context tokens
# as cross-attention reads there. In bfloat16; run with --gradient_checkpointing.
PROMPTED_TULU = changed(
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
# Fusion-in-Decoder with the options of XC-Cache's baselines/fid: passages of 512 tokens, 8 at most, 2 questions on each GPU, a
# constant rate after 1,000 steps. The number of steps and of GPUs is not published: as many steps as for the others, 8 GPUs.
FID_T5 = {
    "recipe": "fid",
    "seed": 0,
    "model": {"name": "fusion_in_decoder", "base": {"name": "t5", "path": "google-t5/t5-base", "dropout_rate": 0.1}},
    "data": {"name": "fid_qa", "corpus": "nq", "contexts": "all", "num_passages": 8, "passage_tokens": 512, "answer_tokens": 64},
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

# A study on real questions that one core can carry out: a decoder of 260 thousand parameters that knows children's stories is to
# answer from 192 tokens of Wikipedia. Data and base: `make study`.
STUDY_DATA = {"corpus": "squad_nq", "context_tokens": 192, "sequence_tokens": 96, "loss_on": "answer", "val_samples": 256}
STUDY_BASE = {"name": "hf", "path": "stories260k"}
STUDY_CROSSATTN = {
    "recipe": "crossattn",
    "seed": 0,
    "model": {"name": "cross_attention", "num_layers": 2, "stride": 1, "base": STUDY_BASE},
    "data": {"name": "qa", **STUDY_DATA},
    "loop": {
        "steps": 300,
        "sequences_per_step": 8,
        "micro_batch": 8,
        "learning_rate": 2e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "eval_every": 150,
    },
    "inference": {"split": "val", "rows": 128, "max_new_tokens": 16, "metrics": [{"name": "squad"}]},
}
STUDY_PROMPTED = changed(
    STUDY_CROSSATTN,
    {
        "recipe": "prompted",
        "model": {"name": "lora", "rank": 8, "alpha": 16.0, "target_modules": ["q_proj", "v_proj"], "base": STUDY_BASE},
        "data": {"name": "prompted_qa", "contexts": "all", **STUDY_DATA},
    },
)

STUDY_CLOSED_BOOK = changed(
    STUDY_PROMPTED,
    {"data": {"name": "prompted_qa", "contexts": "none", **{key: STUDY_DATA[key] for key in STUDY_DATA if key != "context_tokens"}}},
)

EXP_GROUPS = {
    "base_tiny": [BASE_TINY],
    "crossattn_tiny": grid(
        CROSSATTN_TINY,
        {"model.num_layers": [1, 2, 3], "model.stride": [1, 2], "seed": [0, 1]},
        where=lambda e: (e["model"]["num_layers"], e["model"]["stride"]) in [(1, 1), (2, 1), (2, 2), (3, 1)],
    ),
    "study_crossattn": seeds(
        grid(
            STUDY_CROSSATTN,
            {"model.num_layers": [1, 2, 5], "model.stride": [1, 2]},
            where=lambda e: (e["model"]["num_layers"], e["model"]["stride"]) in [(1, 1), (2, 1), (2, 2), (5, 1)],
        ),
        3,
    ),
    "study_prompted": seeds([STUDY_PROMPTED, STUDY_CLOSED_BOOK], 3),
    "crossattn_santacoder": [
        changed(
            CROSSATTN,
            {
                "model.num_layers": 6,
                "loop.sequences_per_step": 40,
                "loop.micro_batch": 5,
                "loop.learning_rate": 3e-4,
                "loop.schedule": "cosine",
                "loop.weight_decay": 5e-4,
            },
        )
    ],
    "crossattn_starcoder": [
        changed(CROSSATTN, {"model.num_layers": 8, "model.stride": 4, "model.base.path": "bigcode/starcoder"}),
    ],
    "crossattn_starcoderbase-1b": [
        changed(
            CROSSATTN,
            {
                "model.num_layers": 6,
                "model.stride": 3,
                "model.shared_weights": False,
                "model.base.path": "bigcode/starcoderbase-1b",
                "data.context_tokens": 128,
                "loop.sequences_per_step": 1,
                "loop.learning_rate": 3e-4,
                "loop.schedule": "cosine",
                "loop.weight_decay": 5e-1,
            },
        )
    ],
    # Its contexts are encoded by data_prep.preproc_nq, before the training; those of the others at each step.
    "crossattn_starcoderbase-3b": [changed(CROSSATTN_STARCODERBASE_3B, {"data.encoded_contexts": True})],
    "crossattn_starcoderbase-7b": [
        changed(
            CROSSATTN_STARCODERBASE_3B,
            {
                "model.num_layers": 8,
                "model.stride": 4,
                "model.shared_weights": True,
                "model.shared_projections": True,
                "model.num_heads": 8,
                "model.base.path": "bigcode/starcoderbase-7b",
                "data.context_tokens": 2048,
                "loop.sequences_per_step": 32,
                "loop.micro_batch": 1,
                "loop.learning_rate": 1e-4,
                "loop.weight_decay": 1e-2,
            },
        )
    ],
    "crossattn_starchat-alpha": [CROSSATTN_STARCHAT],
    "crossattn_tulu-7b": [CROSSATTN_TULU],
    "crossattn_mistral-7b": [
        changed(CROSSATTN_TULU, {"model.base.path": "mistralai/Mistral-7B-Instruct-v0.2", "data.template": "instruct"})
    ],
    # Llama 2 reads 4,096 tokens at most; the published configuration asks for 6,144.
    **{
        f"crossattn_llama-{size}": [
            changed(CROSSATTN_TULU, {"model.base.path": f"meta-llama/Llama-2-{size}-chat-hf", "data.context_tokens": 4096})
        ]
        for size in ("7b", "13b")
    },
    **{
        f"crossattn_tulu-7b_{n}x{s}": [changed(CROSSATTN_TULU_ABLATION, {"model.num_layers": n, "model.stride": s})]
        for n, s in [(2, 8), (8, 2), (8, 3)]
    },
    "prompted_tiny": [
        changed(PROMPTED_TINY_AS_IT_IS, {"data": {"name": "prompted_qa", "contexts": "none", **TINY_QUESTIONS}}),
        PROMPTED_TINY_AS_IT_IS,
        PROMPTED_TINY,
        changed(PROMPTED_TINY, {"model": ref(BASE_TINY), "loop.learning_rate": 1e-3}),
    ],
    "fid_tiny": [FID_TINY],
    "prompted_tulu-7b": [PROMPTED_TULU_AS_IT_IS],
    "prompted_tulu-7b_lora": [PROMPTED_TULU],
    "fid_t5": grid(FID_T5, {"model.base.path": ["google-t5/t5-base", "google-t5/t5-large"]}),
    "fid_flan-t5-xl": [changed(FID_T5, {"model.base.path": "google/flan-t5-xl", "loop.micro_batch": 1})],
    **t5.GROUPS,
}
