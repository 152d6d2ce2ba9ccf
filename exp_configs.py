"""Every experiment: EXP_GROUPS maps the name of a group to a list of plain dicts. `python trainval.py -e NAME` runs a
group."""

from src.exp_groups import (
    assistant_presets,
    assistants,
    context_baselines,
    crossattn,
    demo,
    metadata,
    streaming,
    study,
    t5,
)
from src.exp_groups.crossattn import BASE_TINY, CROSSATTN_TINY
from src.experiments.grid import grid

EXP_GROUPS = {
    **assistants.GROUPS,
    **assistant_presets.GROUPS,
    **assistant_presets.RLHF,
    "base_tiny": [BASE_TINY],
    "crossattn_tiny": grid(
        CROSSATTN_TINY,
        {"model.num_layers": [1, 2, 3], "model.stride": [1, 2], "seed": [0, 1]},
        where=lambda e: (e["model"]["num_layers"], e["model"]["stride"]) in [(1, 1), (2, 1), (2, 2), (3, 1)],
    ),
    **demo.GROUPS,
    **crossattn.GROUPS,
    **context_baselines.GROUPS,
    **metadata.GROUPS,
    **streaming.GROUPS,
    **study.GROUPS,
    **t5.GROUPS,
}
