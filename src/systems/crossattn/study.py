"""`make study`: compare cross-attention with prompting and with closed-book answers, on real questions."""

from src.experiments.grid import grid, override, seeds

# A study on real questions for one CPU core: a decoder of 260,000 parameters, pretrained on children's stories, answers
# questions from 192 tokens of Wikipedia. `make study` prepares the data and the base.
STUDY_DATA = {
    "corpus": "squad_nq",
    "context_tokens": 192,
    "sequence_tokens": 96,
    "loss_on": "answer",
    "val_samples": 256,
}
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
        "learning_rate": 8e-3,
        "schedule": "cosine",
        "warmup_rate": 0.1,
        "eval_every": 150,
    },
    "inference": {
        "split": "val",
        "rows": 128,
        "max_new_tokens": 16,
        "metrics": [{"name": "squad"}],
        "wrong_contexts": True,
    },
}
STUDY_PROMPTED = override(
    STUDY_CROSSATTN,
    {
        "recipe": "prompted",
        "model": {"name": "lora", "rank": 8, "alpha": 16.0, "target_modules": ["q_proj", "v_proj"], "base": STUDY_BASE},
        "data": {"name": "prompted_qa", "contexts": "all", **STUDY_DATA},
    },
)

STUDY_CLOSED_BOOK = override(
    STUDY_PROMPTED,
    {
        "data": {
            "name": "prompted_qa",
            "contexts": "none",
            **{key: STUDY_DATA[key] for key in STUDY_DATA if key != "context_tokens"},
        },
        "inference.wrong_contexts": False,
    },
)
WITHOUT_TRAINING = {"loop": None, "evaluation": {"micro_batch": 8}}
UNTRAINED_BASE = {**WITHOUT_TRAINING, "model": STUDY_BASE}

BLOCKS = grid(
    STUDY_CROSSATTN,
    {"model.num_layers": [1, 2, 5], "model.stride": [1, 2]},
    where=lambda e: (e["model"]["num_layers"], e["model"]["stride"]) in [(1, 1), (2, 1), (2, 2), (5, 1)],
)

GROUPS = {
    # Search for learning rates, with a seed that the study does not use.
    "study_rates": [
        override(e, {"loop.learning_rate": rate, "loop.max_grad_norm": norm, "seed": 100, "inference": None})
        for e in [*BLOCKS, STUDY_PROMPTED, STUDY_CLOSED_BOOK]
        for rate in (4e-3, 8e-3, 1.6e-2)
        for norm in (1.0, 100.0)
    ],
    "study_crossattn": seeds(
        [override(e, {"loop.learning_rate": 4e-3}) if e["model"]["num_layers"] == 5 else e for e in BLOCKS], 3
    ),
    "study_prompted": seeds([STUDY_PROMPTED, STUDY_CLOSED_BOOK], 3),
    "study_untrained": [
        *seeds([override(STUDY_CROSSATTN, WITHOUT_TRAINING)], 3),
        override(STUDY_PROMPTED, UNTRAINED_BASE),
        override(STUDY_CLOSED_BOOK, UNTRAINED_BASE),
    ],
}
