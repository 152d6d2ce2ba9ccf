"""Cross-attention layers in a frozen code model: the tiny pair of the demo, and published configurations (XC-Cache)."""

from src.experiments.grid import override, ref

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

# Cross-attention layers in that model, trained to answer questions about a function or class, which only they can read.
CROSSATTN_TINY = {
    "recipe": "crossattn",
    "seed": 0,
    "model": {"name": "cross_attention", "num_layers": 2, "stride": 1, "base": ref(BASE_TINY)},
    "data": {
        "name": "qa",
        "corpus": "stdlib_qa",
        "context_tokens": 96,
        "sequence_tokens": 64,
        "loss_on": "answer",
        "val_samples": 192,
    },
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

# XC-Cache on Natural Questions (arXiv 2404.15420), with the sizes, placements and learning rates of its released
# configurations. Needs the base model, the prepared data and GPUs. A step has as many sequences as one GPU between two
# updates there. All use bfloat16, which needs no loss scaling and supports sharding; the smaller configurations were
# published in float16.
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
        "base": {"name": "hf", "path": "TabbyML/SantaCoder-1B", "dtype": "bfloat16"},
    },
    "data": {
        "name": "qa",
        "corpus": "nq",
        "context_tokens": 2048,
        "sequence_tokens": 512,
        "loss_on": "all",
        "include_contexts": True,
    },
    "loop": {
        "steps": 25_000,
        "sequences_per_step": 16,
        "micro_batch": 1,
        "learning_rate": 6e-4,
        "schedule": "linear",
        "warmup_rate": 0.05,
        "weight_decay": 5e-2,
        "precision": "bfloat16",
        "eval_every": 1_000,
    },
}
CROSSATTN_STARCODERBASE_3B = override(
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
            "base": {"name": "hf", "path": "bigcode/starcoderbase-3b", "dtype": "bfloat16"},
        },
        "data.context_tokens": 4096,
        "loop.sequences_per_step": 128,
        "loop.micro_batch": 4,
        "loop.learning_rate": 5e-4,
        "loop.schedule": "cosine",
        "loop.weight_decay": 1e-3,
    },
)
# Run these with --gradient_checkpointing.
CROSSATTN_STARCHAT = override(
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
    },
)
# XC-Cache's Llama-style blocks have LayerNorm.
CROSSATTN_TULU = override(
    CROSSATTN,
    {
        "model": {
            "name": "cross_attention",
            "num_layers": 4,
            "stride": 6,
            "final_layer": True,
            "norm": "layer",
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
    },
)
CROSSATTN_TULU_ABLATION = override(
    CROSSATTN_TULU, {"model.context_dropout_rate": 0.2, "loop.schedule": "cosine", "loop.weight_decay": 1e-3}
)

GROUPS = {
    "crossattn_santacoder": [
        override(
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
        override(CROSSATTN, {"model.num_layers": 8, "model.stride": 4, "model.base.path": "bigcode/starcoder"}),
    ],
    "crossattn_starcoderbase-1b": [
        override(
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
    # Its contexts are encoded in advance by data_prep.crossattn.preproc_nq; the other groups encode them at each step.
    "crossattn_starcoderbase-3b": [override(CROSSATTN_STARCODERBASE_3B, {"data.encoded_contexts": True})],
    "crossattn_starcoderbase-7b": [
        override(
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
    "crossattn_tulu-13b": [override(CROSSATTN_TULU, {"model.base.path": "allenai/tulu-2-dpo-13b"})],
    # XC-Cache's code gives Mistral blocks the base's heads, regardless of the configuration, and the MLP of its smaller
    # blocks.
    "crossattn_mistral-7b": [
        override(
            CROSSATTN_TULU,
            {
                "model.hidden_size": None,
                "model.num_heads": None,
                "model.num_key_value_heads": None,
                "model.feed_forward_size": 4096,
                "model.base.path": "mistralai/Mistral-7B-Instruct-v0.2",
                "data.template": "instruct",
            },
        )
    ],
    # Llama 2 supports at most 4,096 tokens; the published configuration has 6,144.
    **{
        f"crossattn_llama-{size}": [
            override(CROSSATTN_TULU, {"model.base.path": f"meta-llama/Llama-2-{size}-hf", "data.context_tokens": 4096})
        ]
        for size in ("7b", "13b")
    },
    # Not published: the same blocks, with RMSNorm, on later bases.
    **{
        f"crossattn_{name}": [override(CROSSATTN_TULU, {"model.norm": None, "model.base.path": path})]
        for name, path in {
            "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
            "qwen3-8b": "Qwen/Qwen3-8B",
            "gemma-3-4b": "google/gemma-3-4b-it",
        }.items()
    },
    "crossattn_starcoder2-7b": [
        override(
            CROSSATTN_STARCODERBASE_3B,
            {"model.num_layers": 8, "model.stride": 4, "model.base.path": "bigcode/starcoder2-7b"},
        )
    ],
    **{
        f"crossattn_tulu-7b_{n}x{s}": [override(CROSSATTN_TULU_ABLATION, {"model.num_layers": n, "model.stride": s})]
        for n, s in [(2, 8), (8, 2), (8, 3)]
    },
}
