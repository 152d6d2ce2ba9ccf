"""T5: pre-training on masked text, and fine-tuning on text-to-text tasks."""

from typing import Any

from src.experiments.grid import override, ref, seeds

# A small T5 that learns to fill gaps in the source of Python's standard library, in five minutes on one CPU core.
TINY_TEXT = {"corpus": "stdlib_text", "input_tokens": 128, "val_sequences": 128}
TINY_DENOISERS = [
    {"rate": 1.0, "mode": "[NLU]", "mean_span_tokens": 3.0, "noise_density": 0.15},
    {"rate": 1.0, "mode": "[S2S]"},
    {"rate": 1.0, "mode": "[NLG]", "mean_span_tokens": 3.0, "noise_density": 0.5},
]
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
    "data": {"name": "span_corruption", **TINY_TEXT},
    "loop": {
        "steps": 3_000,
        "sequences_per_step": 8,
        "micro_batch": 8,
        "optimizer": "adamw_scale",
        "learning_rate": 2e-2,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "warmup_start": 0.5,
        "eval_every": 500,
    },
}

T5_TINY_SHORT = override(T5_TINY, {"loop.steps": 1_000, "loop.eval_every": 250})

# nanoT5's recipe (Nawrot 2023, arXiv 2309.02373): T5 v1.1-base on C4, 2^16 steps of 128 sequences, in bfloat16. Prepare
# the corpus with data_prep.tokenize, and the tokenizer with data_prep.t5.t5_tokenizer from T5's SentencePiece model.
T5_V1_1_BASE: dict[str, Any] = {
    "recipe": "t5_pretrain",
    "seed": 0,
    "model": {
        "name": "t5",
        "random": {
            "tokenizer": "t5_tokenizer",
            "vocabulary_multiple": 128,
            "hidden_size": 768,
            "feed_forward_size": 2048,
            "num_layers": 12,
            "num_heads": 12,
        },
    },
    "data": {"name": "span_corruption", "corpus": "c4_en_t5", "input_tokens": 512, "val_sequences": 63_872},
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

# nanoT5's README compares the recipe above (loss 1.953) with these (2.040, 1.993 and 1.995): two optimizers and two
# schedules.
# Its inverse square root, min(0.01, 1 / sqrt(step)), ends in 10 % of linear decay to 0, which cannot be expressed here.
_ADAFACTOR = {**{k: v for k, v in T5_V1_1_BASE["loop"].items() if k != "adam_beta2"}, "optimizer": "adafactor"}
_INVERSE_SQRT = {
    "loop.schedule": "inverse_sqrt",
    "loop.learning_rate": 1e-2,
    "loop.warmup_start": 1.0,
    "loop.final_rate": 0.0,
}
T5_V1_1_BASE_OPTIMIZERS = [
    override(T5_V1_1_BASE, _INVERSE_SQRT),
    {**T5_V1_1_BASE, "loop": _ADAFACTOR},
    override({**T5_V1_1_BASE, "loop": _ADAFACTOR}, _INVERSE_SQRT),
]

# FlashT5's settings (catie-aq/flashT5, configs/flash-t5-base.yaml at 141a99e with train_flash_t5.py at d5f1358, and
# configs/fr/fat5-fr-small.yaml at 1237380 with examples/fat5-fr/train_fat5.py at 55cd585). Sequences per step: rows of
# a batch times accumulation, 8 * 16 and 128 * 2. Not expressed:
# - Packing: there, samples of several documents share a row and attend to each other. Here a row is one stretch of
#   running text.
# - The prefix of [S]: a fixed quarter of a row there, a random share here.
# - The French corpora and tokenizers are not public as prepared files; prepare yours under these names. The tokenizer
#   needs the control tokens [R], [S] and [X], and 128 sentinels.
_FLASH_DENOISERS = [
    {"rate": 0.165, "mode": "[R]", "mean_span_tokens": 3.0, "noise_density": 0.15},
    {"rate": 0.165, "mode": "[R]", "mean_span_tokens": 8.0, "noise_density": 0.15},
    {"rate": 0.34, "mode": "[S]"},
    {"rate": 0.0825, "mode": "[X]", "mean_span_tokens": 3.0, "noise_density": 0.5},
    {"rate": 0.0825, "mode": "[X]", "mean_span_tokens": 8.0, "noise_density": 0.15},
    {"rate": 0.0825, "mode": "[X]", "mean_span_tokens": 64.0, "noise_density": 0.15},
    {"rate": 0.0825, "mode": "[X]", "mean_span_tokens": 64.0, "noise_density": 0.5},
]
FLASH_T5_BASE = override(
    T5_V1_1_BASE,
    {
        "seed": 42,
        "model.random": {
            "tokenizer": "flash_t5_fr_tokenizer",
            "hidden_size": 768,
            "feed_forward_size": 3072,
            "num_layers": 12,
            "num_heads": 12,
        },
        "data": {
            "name": "ul2",
            "corpus": "culturax_fr",
            "input_tokens": 512,
            "denoisers": _FLASH_DENOISERS,
            "fixed_length": True,
            "val_sequences": 5_000,
        },
        "loop.steps": 200_000,
        "loop.micro_batch": 8,
        "loop.learning_rate": 5e-3,
        "loop.warmup_rate": 10_000 / 200_000,
        "loop.final_rate": 1e-5 / 5e-3,
        "loop.label_smoothing": 0.1,
        "loop.z_loss": 1e-4,
        "loop.eval_every": 500,
    },
)
FAT5_FR_SMALL = override(
    FLASH_T5_BASE,
    {
        "model.random.tokenizer": "fat5_fr_tokenizer",
        "model.random.hidden_size": 512,
        "model.random.feed_forward_size": 2048,
        "model.random.num_layers": 6,
        "model.random.num_heads": 8,
        "data.corpus": "fat5_fr",
        "loop.steps": 1_500_000,
        "loop.sequences_per_step": 256,
        "loop.micro_batch": 128,
        "loop.warmup_rate": 20_000 / 1_500_000,
        "loop.label_smoothing": 0.0,
        "loop.compile": False,
        "loop.eval_every": 1_000,
    },
)

# Continues from Google's weights. Their tokenizer is a different file, so the corpus is tokenised with it.
T5_BASE_CONTINUED = override(
    T5_V1_1_BASE,
    {
        "model": {"name": "t5", "path": "google/t5-v1_1-base", "dropout_rate": 0.0},
        "data.corpus": "c4_en_t5_v1_1",
        "loop.learning_rate": 5e-3,
        "loop.warmup_start": 0.0,
    },
)

# Fine-tuning on one task: learning rates and epochs for T5-base from the README of "principled pre-training", with 16
# sequences per step.
T5_BASE_TASK: dict[str, Any] = {
    "recipe": "seq2seq",
    "seed": 0,
    "model": {"name": "t5", "path": "google-t5/t5-base"},
    "data": {"name": "task", "task": "rte", "corpus": "rte"},
    "loop": {
        "steps": 1,
        "sequences_per_step": 16,
        "micro_batch": 4,
        "learning_rate": 5e-4,
        "schedule": "linear",
        "warmup_rate": 0.1,
        "precision": "bfloat16",
        "eval_every": 100,
        "best_metric": "accuracy",
        "best_mode": "max",
        "early_stopping": {"patience": 3, "min_gain": 0.001},
    },
    "predictions": {},
}
TASKS = {
    # task: (training rows, epochs, steps between evaluations, metric to optimise)
    "cola": (8_551, 20, 500, "matthews"),
    "sst2": (67_349, 10, 500, "accuracy"),
    "mrpc": (3_668, 50, 100, "f1"),
    "qqp": (363_849, 3, 2_000, "f1"),
    "stsb": (5_749, 20, 200, "pearson"),
    "mnli": (392_702, 3, 2_000, "accuracy"),
    "qnli": (104_743, 5, 2_000, "accuracy"),
    "rte": (2_490, 50, 100, "accuracy"),
    "wnli": (635, 20, 40, "accuracy"),
}


def task(name: str) -> dict[str, Any]:
    """T5-base on one task of GLUE."""
    rows, epochs, eval_every, metric = TASKS[name]
    changes = {"loop.steps": rows * epochs // 16, "loop.eval_every": eval_every, "loop.best_metric": metric}
    return override(T5_BASE_TASK, {"data.task": name, "data.corpus": name, **changes})


# A mixture of all GLUE tasks except WNLI, weighted by T5's numbers of examples, with T5's constant learning rate and
# 2^18 steps of 128 sequences.
T5_BASE_GLUE = override(
    T5_BASE_TASK,
    {
        "data": {
            "name": "mixture",
            "parts": {name: {"name": "task", "task": name, "corpus": name} for name in TASKS if name != "wnli"},
        },
        "loop.steps": 262_144,
        "loop.sequences_per_step": 128,
        "loop.micro_batch": 16,
        "loop.optimizer": "adafactor",
        "loop.learning_rate": 1e-3,
        "loop.schedule": "constant",
        "loop.warmup_rate": 0.0,
        "loop.eval_every": 5_000,
        "loop.best_metric": "task_score",
    },
)

# Super-Natural-Instructions as in nanoT5: 100 instances of 757 tasks, two epochs, 8 sequences per step, no gradient
# clipping.
T5_BASE_SNI = override(
    T5_BASE_TASK,
    {
        "model.path": "google/t5-v1_1-base",
        "data": {
            "name": "task",
            "task": "sni",
            "corpus": "sni",
            "input_tokens": 1024,
            "target_tokens": 128,
            "long_targets": "cut",
        },
        "loop.steps": 18_900,
        "loop.sequences_per_step": 8,
        "loop.learning_rate": 5e-5,
        "loop.schedule": "constant",
        "loop.warmup_rate": 0.0,
        "loop.precision": "float32",
        "loop.adam_beta2": 0.999,
        "loop.max_grad_norm": 1e9,
        "loop.eval_every": 6_300,
        "loop.best_metric": "rougeL",
        "loop.early_stopping": None,
    },
)

# The small T5 on real tasks, from the weights of `t5_tiny` and from random weights.
T5_TINY_TASK = override(
    T5_BASE_TASK,
    {
        "model": ref(T5_TINY),
        "data.input_tokens": 192,
        "data.target_tokens": 8,
        "loop.steps": 300,
        "loop.micro_batch": 16,
        "loop.learning_rate": 1e-3,
        "loop.precision": "float32",
        "loop.early_stopping": None,
    },
)


# The benefit of pre-training: the small T5 reads code, and predicts its name or the first sentence of its docstring.
T5_TINY_CODE: dict[str, Any] = {
    "recipe": "seq2seq",
    "seed": 0,
    "model": ref(T5_TINY),
    "data": {
        "name": "task",
        "task": "codedoc",
        "corpus": "codedoc",
        "input_tokens": 96,
        "target_tokens": 48,
        "long_targets": "drop",
        "val_samples": 128,
    },
    "loop": {
        "steps": 200,
        "sequences_per_step": 8,
        "micro_batch": 8,
        "optimizer": "adamw_scale",
        "learning_rate": 5e-3,
        "schedule": "linear",
        "warmup_rate": 0.1,
        "eval_every": 200,
    },
}


def with_random_baseline(trained: dict[str, Any]) -> list[dict[str, Any]]:
    """An experiment from the small T5's weights, and the same from random weights, with three seeds each."""
    return seeds([trained, override(trained, {"model": T5_TINY["model"]})], 3)


def tiny_task(name: str) -> list[dict[str, Any]]:
    """The small T5 on one task, with and without pre-training."""
    trained = override(T5_TINY_TASK, {"data.task": name, "data.corpus": name, "loop.best_metric": TASKS[name][3]})
    return [trained, override(trained, {"model": T5_TINY["model"]})]


def budget(steps: int, warmup: int) -> dict[str, Any]:
    """nanoT5's recipe with this number of steps, of 256 sequences each."""
    return override(
        T5_V1_1_BASE,
        {
            "loop.steps": steps,
            "loop.warmup_rate": warmup / steps,
            "loop.sequences_per_step": 256,
            "loop.eval_every": steps // 4,
        },
    )


GROUPS: dict[str, list[dict[str, Any]]] = {
    "t5_tiny": [T5_TINY],
    "t5_v1_1_base": [T5_V1_1_BASE],
    "t5_v1_1_base_optimizers": T5_V1_1_BASE_OPTIMIZERS,
    "t5_v1_1_base_whole_words": [override(T5_V1_1_BASE, {"data.whole_words": True})],
    "t5_flash_base": [FLASH_T5_BASE],
    "t5_fat5_fr_small": [FAT5_FR_SMALL],
    "t5_v1_1_base_continued": [T5_BASE_CONTINUED],
    "t5_v1_1_base_budgets": [
        # 4, 8, 12, 16, 20 and 24 hours of one A100
        budget(13_333, 1_666),
        budget(26_666, 3_332),
        budget(39_999, 5_000),
        budget(53_332, 6_666),
        budget(66_665, 8_332),
        budget(79_998, 10_000),
    ],
    **{f"t5_base_{name}": [task(name)] for name in TASKS},
    "t5_base_glue": [T5_BASE_GLUE],
    "t5_base_sni": [T5_BASE_SNI],
    **{f"t5_tiny_{name}": tiny_task(name) for name in ("rte", "sst2", "cola")},
    "t5_tiny_codedoc": with_random_baseline(T5_TINY_CODE),
    "t5_tiny_codename": with_random_baseline(
        override(T5_TINY_CODE, {"data.task": "codename", "data.corpus": "codename"})
    ),
    "t5_tiny_objectives": [
        override(
            T5_TINY_SHORT,
            {"data": {"name": "prefix_lm", "corpus": "stdlib_text", "sequence_tokens": 157, "val_sequences": 128}},
        ),
        override(T5_TINY_SHORT, {"data": {"name": "ul2", "denoisers": TINY_DENOISERS, **TINY_TEXT}}),
        override(T5_TINY_SHORT, {"data": {"name": "depth", **TINY_TEXT, "target_tokens": 128}}),
    ],
    "t5_tiny_optimizers": [
        override(T5_TINY_SHORT, {"loop.optimizer": "adamw", "loop.learning_rate": 4e-3}),
        *(override(T5_TINY_SHORT, {"loop.schedule": schedule}) for schedule in ("cosine", "inverse_sqrt")),
    ],
    "t5_v1_1_base_ul2": [
        override(
            T5_V1_1_BASE, {"data": {"name": "ul2", "corpus": "c4_en_t5", "input_tokens": 400}, "loop.compile": False}
        )
    ],
}
