"""What an experiment that trains nothing says instead of a loop."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from src.config import Config
from src.errors import ConfigError


class Evaluation(Config):
    """The model is scored once, as it stands."""

    micro_batch: int = Field(gt=0)
    """Sequences in one forward pass."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the forward pass; weights stay as the model was built."""

    @property
    def steps(self) -> int:
        """None is made."""
        return 0

    def agree(self, told: Mapping[str, str | float]) -> None:
        """Raises ConfigError where `accelerate launch` was told another precision."""
        other = told.get("precision", self.precision)
        if other != self.precision:
            raise ConfigError(
                f"evaluation.precision is {self.precision}, but accelerate launch --mixed_precision says {other}. "
                "Leave it out there: the experiment decides."
            )
