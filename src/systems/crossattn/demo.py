"""The demo: a tiny model predicts which exception Python code raises. Only its cross-attention layers read the code."""

from src.experiments.grid import grid, override, ref
from src.systems.crossattn.groups import BASE_TINY, CROSSATTN_TINY

RAISES = override(
    CROSSATTN_TINY,
    {
        "model": {
            "name": "cross_attention",
            "num_layers": 1,
            "stride": 1,
            "final_layer": True,
            "cache_contexts": True,
            "base": ref(BASE_TINY),
        },
        "data.context_tokens": 160,
        "data.train_datasets": ["stdlib_raises"],
        "data.val_datasets": ["stdlib_raises"],
        "data.val_samples": None,
        "loop.steps": 500,
        "loop.sequences_per_step": 8,
        "loop.learning_rate": 5e-3,
        "loop.eval_every": 50,
        "answers": None,
        "inference": {"max_new_tokens": 8, "metrics": [{"name": "squad"}], "wrong_contexts": True},
    },
)
GROUPS = {
    "demo": grid(
        RAISES,
        {"model.num_layers": [1, 2], "data.context_tokens": [16, 96, 160], "seed": [0, 1]},
        where=lambda e: e["data"]["context_tokens"] == 160 or e["model"]["num_layers"] == 1,
    ),
}
