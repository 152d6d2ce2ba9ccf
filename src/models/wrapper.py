"""Base class of models around a transformers model."""

from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from src.errors import ConfigError


class Wrapper(nn.Module):
    """A model around `base`, whose config and tokenizer are its own."""

    base: Any
    """A transformers model, whose classes are of no use to a type checker."""
    has_separate_base: ClassVar[bool] = False
    """Whether an export can leave out the base, or carry its own code: `with_base` and `standalone` of `export`."""

    def export(self, folder: Path, request: Any) -> None:
        """Write the model into `folder`, which has its tokenizer, for other programs.
        request: `models.export.Request`.

        Raises:
            ConfigError: no other program can load it.
        """
        raise ConfigError(
            f"{folder}: its model is a {type(self).__name__}, which no other program knows. Load it with this project."
        )

    def match_base_type(self) -> None:
        """Give weights that are trained in float32 the type of the base, to answer with."""

    @property
    def config(self) -> Any:
        """The base's transformers config."""
        return self.base.config

    @property
    def name_or_path(self) -> str:
        """Where the tokenizer is loaded from."""
        return str(self.base.name_or_path)

    @name_or_path.setter
    def name_or_path(self, value: str) -> None:
        self.base.name_or_path = value
