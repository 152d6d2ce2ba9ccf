"""Every experiment: EXP_GROUPS maps the name of a group to a list of plain dicts. `python trainval.py -e NAME` runs a group."""

from src.experiments.grid import grid, ref

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

# XC-Cache on Natural Questions; needs the base model, the prepared data and GPUs.
CROSSATTN_STARCODERBASE_3B = {
    "recipe": "crossattn",
    "seed": 0,
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
    "data": {"name": "qa", "corpus": "nq", "context_tokens": 4096, "sequence_tokens": 512, "loss_on": "all"},
    "loop": {
        "steps": 25_000,
        "sequences_per_step": 128,
        "micro_batch": 4,
        "learning_rate": 5e-4,
        "schedule": "cosine",
        "warmup_rate": 0.05,
        "weight_decay": 1e-3,
        "precision": "float16",
        "eval_every": 1_000,
    },
}

EXP_GROUPS = {
    "base_tiny": [BASE_TINY],
    "crossattn_tiny": grid(
        CROSSATTN_TINY,
        {"model.num_layers": [1, 2, 3], "model.stride": [1, 2], "seed": [0, 1]},
        where=lambda e: (e["model"]["num_layers"], e["model"]["stride"]) in [(1, 1), (2, 1), (2, 2), (3, 1)],
    ),
    "crossattn_starcoderbase-3b": [CROSSATTN_STARCODERBASE_3B],
}
