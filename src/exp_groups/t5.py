"""T5: pre-training on masked text, and fine-tuning on tasks that are written as text."""

from typing import Any

from src.experiments.grid import changed

# A small T5 learns on this machine to fill gaps in the documentation of Python's standard library.
T5_TINY: dict[str, Any] = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {
        "name": "t5",
        "random": {
            "tokenizer": "stdlib_t5_tokenizer",
            "hidden_size": 128,
            "feed_forward_size": 384,
            "num_layers": 2,
            "num_heads": 4,
        },
    },
    "data": {"name": "span_corruption", "corpus": "stdlib_text", "input_tokens": 128, "val_sequences": 128},
    "loop": {
        "steps": 300,
        "sequences_per_step": 32,
        "micro_batch": 32,
        "learning_rate": 4e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "eval_every": 50,
    },
}

# nanoT5's recipe (Nawrot 2023, arXiv 2309.02373): T5 v1.1-base on C4, 2^16 steps of 128 sequences, in bfloat16. The corpus is made by
# data_prep.tokenize, the tokenizer by data_prep.t5_tokenizer from T5's SentencePiece model.
T5_V1_1_BASE: dict[str, Any] = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {
        "name": "t5",
        "random": {
            "tokenizer": "t5_tokenizer",
            "hidden_size": 768,
            "feed_forward_size": 2048,
            "num_layers": 12,
            "num_heads": 12,
        },
    },
    "data": {"name": "span_corruption", "corpus": "c4_en_t5", "input_tokens": 512},
    "loop": {
        "steps": 65_536,
        "sequences_per_step": 128,
        "micro_batch": 128,
        "optimizer": "adamw_scale",
        "learning_rate": 2e-2,
        "schedule": "cosine",
        "warmup_rate": 10_000 / 65_536,
        "warmup_start": 0.5,
        "final_rate": 1e-5 / 2e-2,
        "adam_beta2": 0.999,
        "precision": "bfloat16",
        "compile": True,
        "eval_every": 4_096,
    },
}

T5_BASE_CONTINUED = changed(
    T5_V1_1_BASE, {"model": {"name": "t5", "path": "google/t5-v1_1-base"}, "loop.learning_rate": 5e-3, "loop.warmup_start": 0.0}
)
UL2 = {"name": "ul2", "corpus": "c4_en_t5", "input_tokens": 512}


def budget(hours: int, steps: int, warmup: int) -> dict[str, Any]:
    """nanoT5's recipe for so many hours of one A100: 256 sequences a step, in halves."""
    del hours
    return changed(
        T5_V1_1_BASE,
        {"loop.steps": steps, "loop.warmup_rate": warmup / steps, "loop.sequences_per_step": 256, "loop.eval_every": steps // 4},
    )


GROUPS: dict[str, list[dict[str, Any]]] = {
    "t5_tiny": [T5_TINY],
    "t5_v1_1_base": [T5_V1_1_BASE],
    "t5_v1_1_base_continued": [T5_BASE_CONTINUED],
    "t5_v1_1_base_budgets": [
        budget(hours, steps, warmup)
        for hours, steps, warmup in (
            (4, 13_333, 1_666),
            (8, 26_666, 3_332),
            (12, 39_999, 5_000),
            (16, 53_332, 6_666),
            (20, 66_665, 8_332),
            (24, 79_998, 10_000),
        )
    ],
}
