"""Weights & Biases: the only module that calls it. The key comes from the environment or netrc and is written nowhere."""

from collections.abc import Mapping
from typing import Any

import wandb
from torch import nn

from src.errors import RunError
from src.experiments import run as runs
from src.files import read_json


class Wandb:
    """One wandb run per experiment; a restart continues it, by its id. Raises RunError where wandb refuses, as without a key."""

    def __init__(self, run: runs.Run, options: runs.Wandb, model: nn.Module) -> None:
        online = options.entity is not None and options.project is not None
        try:
            self.wandb = wandb.init(
                entity=options.entity,
                project=options.project or "trainval",
                name=options.name or run.dir.exp_id,
                id=run.dir.exp_id,
                resume="allow" if online else None,
                mode="online" if online else "offline",
                dir=str(run.path),
                config=read_json(run.path / "config.json", RunError),
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            raise RunError(f"wandb: {reason} Run `wandb login`, or leave out --wandb_entity_name to log to files.") from None
        if options.gradients:
            self.wandb.watch(model, log="gradients", log_freq=run.options.log_every or 100)

    def on_step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Nothing: rows are logged."""

    def on_row(self, row: Mapping[str, Any], perf: Mapping[str, float]) -> None:
        """Log the row at its step."""
        self.wandb.log({**row, **{f"perf/{name}": value for name, value in perf.items()}}, step=row["step"])

    def close(self) -> None:
        """Flush and end."""
        self.wandb.finish()
