"""Base class of models around a transformers model."""

from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from src.errors import ConfigError


class Wrapper(nn.Module):
    """A model around `base`, with the base's config and tokenizer."""

    base: Any
    """A transformers model; untyped, as transformers' classes do not type-check."""
    has_separate_base: ClassVar[bool] = False
    """Whether the options `with_base` and `standalone` of `export` apply."""

    def export(self, folder: Path, request: Any) -> None:
        """Export the model into `folder`, which already has the tokenizer. request: `models.export.Request`.

        Raises:
            ConfigError: other programs cannot load it.
        """
        raise ConfigError(f"{folder}: other programs cannot load a {type(self).__name__}. Load it with this project.")

    def match_base_type(self) -> None:
        """Convert weights that are trained in float32 to the type of the base, for inference."""

    @property
    def config(self) -> Any:
        """The base's transformers config."""
        return self.base.config

    @property
    def name_or_path(self) -> str:
        """Folder or hub id of the tokenizer."""
        return str(self.base.name_or_path)

    @name_or_path.setter
    def name_or_path(self, value: str) -> None:
        self.base.name_or_path = value
