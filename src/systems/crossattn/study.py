"""`make study`: cross-attention compared with prompting and closed-book answers, on SmolLM2-135M and real questions."""

from src.experiments.grid import seeds

SMOLLM2 = {"name": "hf", "path": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "bfloat16"}
DATA = {
    "corpus": "squad_nq",
    "context_tokens": 256,
    "sequence_tokens": 96,
    "loss_on": "answer",
    "template": "instruct",
    "val_samples": 512,
}
CROSSATTN = {
    "recipe": "crossattn",
    "seed": 0,
    "model": {"name": "cross_attention", "num_layers": 6, "stride": 4, "cache_contexts": True, "base": SMOLLM2},
    "data": {"name": "qa", **DATA},
    "loop": {
        "steps": 800,
        "sequences_per_step": 16,
        "micro_batch": 16,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "weight_decay": 0.1,
        "precision": "bfloat16",
        "eval_every": 400,
    },
    "inference": {
        "split": "val",
        "rows": 512,
        "max_new_tokens": 16,
        "metrics": [{"name": "squad"}],
        "wrong_contexts": True,
    },
}
GROUPS = {"smollm2_crossattn": seeds([CROSSATTN], 3)}
