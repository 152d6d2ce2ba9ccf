"""`make study-questions`: cross-attention compared with prompting and closed-book answers, on SmolLM2-135M.

The data are SQuAD and Natural Questions, with contexts encoded in advance. `make study-rates` compares learning rates
of cross-attention, with another seed and on questions that the tables do not score.
"""

from src.experiments.grid import override, seeds

SMOLLM2 = {"name": "hf", "path": "HuggingFaceTB/SmolLM2-135M-Instruct", "dtype": "bfloat16"}
DATA = {
    "corpus": "processed_data/SmolLM2-135M-Instruct/squad_nq",
    "context_tokens": 256,
    "sequence_tokens": 96,
    "loss_on": "answer",
    "template": "instruct",
    "val_samples": 512,
}
CROSSATTN = {
    "recipe": "crossattn",
    "seed": 0,
    "model": {"name": "cross_attention", "num_layers": 6, "stride": 4, "base": SMOLLM2},
    "data": {"name": "qa", "encoded_contexts": True, **DATA},
    "loop": {
        "steps": 1000,
        "sequences_per_step": 16,
        "micro_batch": 16,
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "weight_decay": 0.1,
        "precision": "bfloat16",
        "eval_every": 500,
    },
    "inference": {
        "split": "val",
        "rows": 512,
        "max_new_tokens": 16,
        "metrics": [{"name": "squad"}],
        "wrong_contexts": True,
    },
}
PROMPTING = override(
    CROSSATTN,
    {
        "recipe": "prompted",
        "model": {
            "name": "lora",
            "rank": 16,
            "alpha": 32.0,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "base": SMOLLM2,
        },
        "data": {"name": "prompted_qa", "contexts": "all", **DATA},
        "loop.steps": 100,
        "loop.micro_batch": 2,
        "loop.eval_every": 50,
    },
)
CLOSED_BOOK = override(
    PROMPTING,
    {
        "data": {"name": "prompted_qa", "contexts": "none", **{k: v for k, v in DATA.items() if k != "context_tokens"}},
        "loop.steps": 500,
        "loop.micro_batch": 16,
        "loop.eval_every": 250,
        "inference.wrong_contexts": False,
    },
)
# The instruct model as it is, with its own chat template.
ZERO_SHOT = {
    "loop": None,
    "evaluation": {"micro_batch": 16, "precision": "bfloat16"},
    "model": SMOLLM2,
    "data.template": "chat",
    "inference.max_new_tokens": 32,
}
TUNING = {
    "seed": 100,
    "data.corpus": "processed_data/SmolLM2-135M-Instruct/squad_nq_tuning",
    "loop.steps": 250,
    "loop.eval_every": 250,
    "inference": None,
}

GROUPS = {
    "smollm2_crossattn": seeds([CROSSATTN], 3),
    "smollm2_prompted": seeds([PROMPTING], 3),
    "smollm2_closed_book": seeds([CLOSED_BOOK], 3),
    "smollm2_untrained": [override(PROMPTING, ZERO_SHOT), override(CLOSED_BOOK, ZERO_SHOT)],
    "smollm2_crossattn_rates": [
        override(CROSSATTN, {**TUNING, "loop.learning_rate": rate}) for rate in (3e-4, 1e-3, 3e-3)
    ],
}
