"""Every experiment: EXP_GROUPS maps the name of a group to a list of plain dicts.
`python trainval.py -e NAME` runs a group."""

from typing import Any

from src.experiments.grid import grid, override, ref, seeds, zip_axes  # noqa: F401  for your experiments
from src.systems.assistants.groups import GROUPS as ASSISTANTS
from src.systems.assistants.presets import GROUPS as ASSISTANT_PRESETS
from src.systems.assistants.presets import RLHF
from src.systems.crossattn.context_baselines import GROUPS as CONTEXT_BASELINES
from src.systems.crossattn.demo import GROUPS as DEMO
from src.systems.crossattn.groups import BASE_TINY, CROSSATTN_TINY
from src.systems.crossattn.groups import GROUPS as CROSSATTN
from src.systems.crossattn.study import GROUPS as STUDY
from src.systems.interleaved.groups import GROUPS as INTERLEAVED
from src.systems.metadata.groups import GROUPS as METADATA
from src.systems.t5.groups import GROUPS as T5

# The base of examples/research_loop, with a learning rate that is 10 times too low.
RESEARCH_TINY = override(
    BASE_TINY,
    {
        "model.hidden_size": 64,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "data.sequence_tokens": 64,
        "loop": {
            "budget": {"tokens": 40_960},
            "sequences_per_step": 8,
            "micro_batch": 4,
            "learning_rate": 4e-4,
            "schedule": "cosine",
            "warmup_rate": 0.1,
            "weight_decay": 0.1,
            "eval_every": 1000,
        },
    },
)

# One run with a constant learning rate, and three finished models that decay from its checkpoints in 20 % of their
# steps. Train the group with --keep_every 40.
WSD_TINY = override(
    BASE_TINY,
    {"loop.steps": 160, "loop.schedule": "constant_with_warmup", "loop.eval_every": 40},
)


def decay_tiny(step: int) -> dict[str, Any]:
    """A decay from the checkpoint of `step`."""
    loop = {"loop.steps": step * 5 // 4, "loop.schedule": "wsd", "loop.decay_rate": 0.2, "loop.decay_shape": "sqrt"}
    return override(WSD_TINY, {"model": ref(WSD_TINY, step=step), **loop})


EXP_GROUPS = {
    **ASSISTANTS,
    **ASSISTANT_PRESETS,
    **RLHF,
    "base_tiny": [BASE_TINY],
    "crossattn_tiny": grid(
        CROSSATTN_TINY,
        {"model.num_layers": [1, 2, 3], "model.stride": [1, 2], "seed": [0, 1]},
        where=lambda e: (e["model"]["num_layers"], e["model"]["stride"]) in [(1, 1), (2, 1), (2, 2), (3, 1)],
    ),
    **DEMO,
    "research_tiny": [RESEARCH_TINY],
    "wsd_tiny": [WSD_TINY, *(decay_tiny(step) for step in (80, 120, 160))],
    **CROSSATTN,
    **CONTEXT_BASELINES,
    **METADATA,
    **INTERLEAVED,
    **STUDY,
    **T5,
}
